#!/usr/bin/env bash
# Prints a Homebrew formula for the archives in DIR: formula.sh VERSION REPOSITORY-URL DIR
set -euo pipefail
version=$1 url=$2 dir=$3
source_of() {
  local file=moestro-$version-$1.tar.gz
  local sum
  sum=$( (sha256sum "$dir/$file" 2>/dev/null || shasum -a 256 "$dir/$file") | cut -d' ' -f1)
  printf 'url "%s/releases/download/v%s/%s"\n      sha256 "%s"' "$url" "$version" "$file" "$sum"
}
cat <<FORMULA
class Moestro < Formula
  desc "Serves mixture-of-experts models that are larger than memory"
  homepage "$url"
  version "$version"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    on_arm do
      $(source_of aarch64-apple-darwin)
    end
  end

  on_linux do
    on_intel do
      $(source_of x86_64-unknown-linux-gnu)
    end
    on_arm do
      $(source_of aarch64-unknown-linux-gnu)
    end
  end

  def install
    bin.install "moestro"
    man1.install Dir["man/*.1"]
    man5.install Dir["man/*.5"]
    bash_completion.install "completions/moestro.bash" => "moestro"
    zsh_completion.install "completions/moestro.zsh" => "_moestro"
    fish_completion.install "completions/moestro.fish"
  end

  service do
    run [opt_bin/"moestro", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/moestro.log"
    error_log_path var/"log/moestro.log"
    process_type :interactive
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/moestro --version")
    assert_match "19", shell_output("#{bin}/moestro generate --device cpu --temp 0 -p 'What is 12+7?'")
  end
end
FORMULA
