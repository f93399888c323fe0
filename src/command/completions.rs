//! `moestro completions`: shell completions, generated from the command line. `moestro list` provides the names of
//! models when the user presses Tab.

use crate::cli::help;
use clap_complete::Shell;

/// Commands whose first argument is a model.
const WITH_MODEL: &str = "run chat generate serve info show bench pack config rm stop";

/// Replaces bash's completion function. Completes the names of models where a command expects a model.
const BASH: &str = r#"
_moestro_with_models() {
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command
    for command in @COMMANDS@; do
        [[ "${COMP_WORDS[1]}" == "$command" ]] || continue
        if [[ "$current" != -* && ( "$before" == "$command" || "$before" == -m || "$before" == --model ) ]]; then
            COMPREPLY=( $(compgen -W "$(moestro list 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$current") )
            COMPREPLY+=( $(compgen -d -- "$current") )
            return 0
        fi
    done
    _moestro "$@"
}
complete -F _moestro_with_models -o bashdefault -o default moestro
"#;

const ZSH: &str = r#"
(( $+functions[_moestro_models] )) || _moestro_models() {
    local -a names
    names=(${(f)"$(moestro list 2>/dev/null | awk 'NR > 1 { print $1 }')"})
    compadd -a names
    _files -/
}
"#;

const FISH: &str = r#"
complete -c moestro -n "__fish_seen_subcommand_from @COMMANDS@" -a "(moestro list 2>/dev/null | awk 'NR > 1 { print \$1 }')"
"#;

/// Generates a completion script.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut help::command(), "moestro", &mut script);
    let mut script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => script += &BASH.replace("@COMMANDS@", WITH_MODEL),
        Shell::Fish => script += &FISH.replace("@COMMANDS@", WITH_MODEL),
        Shell::Zsh => script = with_models_in_zsh(&script),
        _ => {}
    }
    script
}

/// Replaces zsh's default action for arguments and options that take a model.
fn with_models_in_zsh(script: &str) -> String {
    let is_model = |line: &str| {
        let line = line.trim_start();
        ["'::model -- ", "'-m+[", "'--model=["].iter().any(|start| line.starts_with(start))
    };
    let lines = script
        .lines()
        .map(|line| if is_model(line) { line.replace(":_default'", ":_moestro_models'") } else { line.to_owned() });
    let text = lines.collect::<Vec<_>>().join("\n");
    // The line `#compdef moestro` must stay the first line.
    match text.split_once('\n') {
        Some((first, rest)) => format!("{first}\n{ZSH}{rest}\n"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_complete_models() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            assert!(script.contains("moestro list"), "{shell}");
        }
        let zsh = completions(Shell::Zsh);
        assert!(zsh.starts_with("#compdef moestro\n") && zsh.contains(":_moestro_models'"), "{zsh}");
    }
}
