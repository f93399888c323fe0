//! Tests of mistakes that people make on the command line. Each mistake must get a certain sentence as its error
//! message.

use crate::program::moestro;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    os::unix::fs::symlink,
    path::Path,
    process::Stdio,
    thread,
};
use test_support::demo;

/// Runs a command with its own home directory. Returns the output on stdout and stderr.
fn output_of(home: &Path, endpoint: &str, args: &[&str]) -> String {
    let mut command = moestro(home);
    command.env("HF_ENDPOINT", endpoint).args(args).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8(text).unwrap()
}

/// Runs the command lines of a table. Checks that the output of each contains a part of the expected sentence.
fn check(home: &Path, table: &[(&str, &str)]) {
    for (line, sentence) in table {
        let text = output_of(home, "http://127.0.0.1:1", &line.split(' ').collect::<Vec<_>>());
        assert!(text.contains(sentence), "{line}\nneeds: {sentence}\nsaid:  {text}");
    }
}

#[test]
fn wrong_names_and_values_get_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port();
    let in_use = format!("serve --port {port}");
    let ollama_in_use = format!("serve --port 0 --ollama-port {port}");
    check(
        home.path(),
        &[
            (&in_use, "is in use; --port takes another one, --port 0 any that is free"),
            (&ollama_in_use, "is in use; --ollama-port takes another one, --ollama-port 0 any that is free"),
            ("serve ~/models/nope", "no such directory"),
            ("serve /etc/hosts", "not a checkpoint: it is a file"),
            ("serve nope", "`moestro list` shows the models on this machine; org/name is a model"),
            ("bench nope", "`moestro list` shows the models on this machine"),
            ("info -m nope", "no such directory: nope"),
            ("info --model nope", "no such directory: nope"),
            ("serve a -m b", "the model is given twice: a and --model"),
            ("run /no/model What is it?", "no such directory: /no/model"),
            ("generate", "the prompt on stdin is empty"),
            ("run", "the prompt on stdin is empty"),
            ("serve --port 99999", "it must be a whole number from 0 to 65535"),
            ("serve --ollama-port x", "it must be a whole number from 0 to 65535"),
            ("ps --port x", "it must be a whole number from 0 to 65535"),
            ("generate -p Hi --top-k 1.5", "it must be a whole number from 0 to 18446744073709551615"),
            ("generate -p Hi --seed x", "it must be a whole number from 0 to 18446744073709551615"),
            ("serve --memory-limit 1M --models-dir /no/where", "cannot read --models-dir"),
            ("serve --log-dir /dev/null", "--log-dir /dev/null: "),
            ("serve --port 0 --host example.invalid", "listening on port 0 of example.invalid"),
            ("serve --host=", "it is not an address or a host name such as 127.0.0.1"),
            ("serve --host 127.0.0.1:80", "--port sets the port"),
            ("ps --host http://box", "it is not an address or a host name"),
            ("service install --dry-run --host *", "for all addresses, 0.0.0.0"),
            ("serve --prompt-cache-dir=", "a value is required for '--prompt-cache-dir <DIR>'"),
            ("info --like 35B --machine PC", "unknown machine PC"),
            ("serve nope --device CPU --thinking ON --prefetch Off", "no such directory: nope"),
            ("serve nope --request-timeout 5m", "no such directory: nope"),
            ("serve --request-timeout 0s", "it must be more than 0"),
            ("list --format json", "list and cache have --json"),
            ("generate -p=", "the prompt is empty"),
            ("serve --memroy-limit 8G", "--memory-limit"),
            ("serve --memory-limit 8", "8 is 8 bytes; did you mean 8GiB?"),
            ("serve --memory-limit 0", "is not a size such as 8GiB, 8G or 500M"),
            ("serve --memory-limit 8GBB", "is not a size such as 8GiB, 8G or 500M"),
            ("serve --port 0 --memory-limit 1M", "the program itself"),
            ("serve --port 0 --memory-limit 1M --max-model-len 4096", "KV cache for 4096 tokens"),
            ("serve --port 0 --memory-limit 1M -c 5000 -t 1", "KV cache for 5000 tokens"),
            ("serve --port 0 --memory-limit 1M --context-length 6000", "KV cache for 6000 tokens"),
            ("generate -p Hi --ctx-size 10", "the context 10"),
            ("generate -p Hi --temperature 9", "it must be a number from 0 to 2"),
            ("generate -p Hi --temp 5", "it must be a number from 0 to 2"),
            ("generate -p Hi --temp -1", "it must be a number from 0 to 2"),
            ("generate -p Hi --top-p 2", "not between 0 and 1"),
            ("generate -p Hi --kv-bits 2", "use 16, 8 or 4"),
            ("generate -p Hi --threads 0", "whole number from 1 to 1024"),
            ("generate -p Hi --threads 300 -n 1", "more threads than cores slow decoding down"),
            ("generate -p Hi -n 0", "whole number, at least 1"),
            ("generate -p Hi -n 3", "the answer reached its token limit while the model reasoned"),
            ("info --like 28b", "[possible values: 4b, 9b, 27b, 35b, 122b, 397b, flash-next]"),
            ("info --device gpu", "[possible values: auto, cpu, metal, cuda]"),
            ("info --device metal", "only builds for macOS support it"),
            ("srve", "serve"),
            ("cp a b", "[models.NAME]"),
            ("version", "`moestro --version` prints the version"),
            ("chat nope", "the prompt on stdin is empty"),
            ("show nope", "no such directory: nope"),
            ("ps --port 1", "`moestro serve` starts one"),
            ("stop --port 1", "`moestro serve` starts one"),
            ("rm moestro-demo", "part of the program"),
            ("rm moestro-dmeo", "did you mean moestro-demo?"),
            ("rm nope", "this machine has no model nope; `moestro list` shows the models"),
            ("serve --config /no/moestro.toml", "/no/moestro.toml: No such file"),
            ("serve --api-key=", "an empty key protects nothing"),
            ("serve --api-key=a\u{7f}b", "no client can send a key with a line break"),
            ("serve --api-key-file /no/key", "/no/key: No such file"),
            ("serve --cors foo", "not an origin such as https://example.com"),
            ("synth / --like 35b", "synth overwrites nothing"),
            ("pull qwen", "a hub id has the form org/name, such as"),
            ("pull org/name:Q4_K_M", "`moestro pull --revision REV` selects a revision"),
            ("pull org/name --revision ../x", "is not a branch, tag or commit"),
            ("pull org/name --revision a//b", "is not a branch, tag or commit"),
            ("pull https://hf.co/org/name/tree/..", "\"..\" is not a branch, tag or commit"),
            ("serve https://hf.co/org/name/tree/dev", "`moestro pull ADDRESS` downloads that revision"),
            ("pull org/name", "cannot reach http://127.0.0.1:1: "),
            ("pull org/name", "check the network, HTTPS_PROXY and HF_ENDPOINT"),
            ("pull https://huggingface.co/org/name", "org/name: cannot reach"),
        ],
    );
    // In this command, the prompt is in the position of the model name.
    let text = output_of(home.path(), "", &["run", "What is 12+7?"]);
    assert!(text.contains("a prompt follows the model") || text.contains("stdin is empty"), "{text}");
}

#[test]
fn flags_of_other_programs_get_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    check(
        home.path(),
        &[
            ("serve --gpu-memory-utilization 0.9", "use --memory-limit SIZE"),
            ("serve --mem-limit 8000", "use --memory-limit with a unit"),
            ("serve -ctk q8_0", "--kv-bits 16, 8 or 4"),
            ("serve --turbo-kv", "--kv-bits 16, 8 or 4"),
            ("serve -b 512", "--prefill-chunk"),
            ("serve -lv 4", "--log-level"),
            ("serve --embeddings", "there are no embeddings"),
            ("serve --alias x", "[models.NAME]"),
            ("serve --served-model-name x", "[models.NAME]"),
            ("serve --lora x", "merge them into the model"),
            ("serve --audio", "audio is not supported"),
            ("serve --chat-template x", "chat_template.jinja"),
            ("run --format json x", "response_format"),
            ("run --think x", "--thinking on or off"),
            // These flags have no effect. The command then fails for another reason.
            ("serve nope -ngl 99", "-ngl has no effect: the memory plan"),
            ("serve nope -ngl 99", "no such directory: nope"),
            ("serve nope --jinja -fa on --no-mmap --mlock", "no such directory: nope"),
            ("serve nope -cd 512 -ngld 99", "-cd has no effect: a draft has"),
            ("serve nope -dev CUDA0", "use --device auto, cpu, metal or cuda"),
            ("serve nope --trust-remote-code", "Moestro never runs code of a checkpoint"),
            ("-m nope -c 4096 --port 0", "no such directory: nope"),
            ("serve nope -np 2", "no such directory: nope"),
            ("serve nope --max-num-seqs 2", "no such directory: nope"),
        ],
    );
    let unknown = output_of(home.path(), "", &["serve", "--colour"]);
    assert!(unknown.contains("unexpected argument '--colour'") && !unknown.contains("similar"), "{unknown}");
}

/// Tests every command line of SwiftLM's README, with our binary and a model that does not exist.
#[test]
fn command_lines_of_swiftlm_are_accepted() {
    let home = tempfile::tempdir().unwrap();
    for line in [
        "--model PATH --port 5413",
        "--port 8002 --model PATH --stream-experts",
        "--port 8002 --model PATH --draft-model PATH --num-draft-tokens 4",
        "--port 8002 --model PATH --stream-experts --draft-model PATH",
        "--model PATH --vision",
        "--model PATH --host 127.0.0.1 --max-tokens 2048 --prefill-size 512 --top-p 1.0 --top-k 50 --min-p 0.0",
        "--model PATH --gpu-layers 20 --dflash --temp 0.6 --repeat-penalty 1.1 --thinking on",
    ] {
        // If a flag is repeated, the last one applies.
        let line = line.replace("PATH", "/no/model") + " --port 0";
        let text = output_of(home.path(), "", &line.split(' ').collect::<Vec<_>>());
        assert!(text.ends_with("moestro: no such directory: /no/model\n"), "{line}: {text}");
    }
}

#[test]
fn damaged_checkpoints_get_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    let copy = |name: &str, but: &[&str]| {
        let dir = home.path().join(name);
        fs::create_dir(&dir).unwrap();
        for file in demo().read_dir().unwrap().map(Result::unwrap) {
            if !but.contains(&file.file_name().to_str().unwrap()) {
                fs::copy(file.path(), dir.join(file.file_name())).unwrap();
            }
        }
        dir
    };
    let config: Value = serde_json::from_slice(&fs::read(demo().join("config.json")).unwrap()).unwrap();
    let with = |name: &str, change: &dyn Fn(&mut Value)| {
        let (dir, mut config) = (copy(name, &[]), config.clone());
        change(&mut config);
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        dir
    };
    let gguf = home.path().join("model.gguf");
    fs::write(&gguf, "GGUF").unwrap();
    let gguf_dir = home.path().join("gguf");
    fs::create_dir(&gguf_dir).unwrap();
    fs::write(gguf_dir.join("model.gguf"), "GGUF").unwrap();
    let empty = home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let pointer = copy("pointer", &[]);
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5000000\n";
    fs::write(pointer.join("model.safetensors"), text).unwrap();
    let truncated = copy("truncated", &[]);
    fs::OpenOptions::new().write(true).open(truncated.join("model.safetensors")).unwrap().set_len(1 << 20).unwrap();
    let adapter = copy("adapter", &["config.json"]);
    fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    let shards = copy("shards", &["model.safetensors"]);
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    fs::write(shards.join("model.safetensors.index.json"), index).unwrap();
    let unmarked = copy("unmarked", &[]);
    let tokenizer = fs::read_to_string(unmarked.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&tokenizer).unwrap();
    tokenizer["added_tokens"] = json!([]);
    fs::write(unmarked.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for (dir, sentence) in [
        (gguf, "GGUF file, which Moestro does not read; pull an MLX version"),
        (gguf_dir, "GGUF file, which Moestro does not read; pull an MLX version"),
        (empty, "not a checkpoint: it has no config.json"),
        (with("llama", &|config| config["model_type"] = "llama".into()), "is not supported"),
        (copy("words", &["tokenizer.json"]), "it has no tokenizer.json"),
        (unmarked, "its tokenizer.json has no token 2038, which ends an answer"),
        (pointer, "it is a Git LFS pointer, not the file; fetch it with `git lfs pull`"),
        (truncated, "it is truncated"),
        (adapter, "not a checkpoint: it is an adapter; merge it into its model"),
        (shards, "2 of 2 weight files missing, such as model-1.safetensors; `moestro pull ORG/NAME` downloads them"),
    ] {
        let text = output_of(home.path(), "", &["generate", dir.to_str().unwrap(), "-p", "Hi"]);
        assert!(text.contains(sentence), "{}\nneeds: {sentence}\nsaid:  {text}", dir.display());
    }
}

#[test]
fn links_that_lead_nowhere_are_named() {
    let home = tempfile::tempdir().unwrap();
    for name in
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    {
        for (target, sentence) in [(name, "symbolic links"), ("nowhere", "a link to a missing file; download it again")]
        {
            let dir = tempfile::tempdir_in(home.path()).unwrap();
            for entry in fs::read_dir(demo()).unwrap().flatten().filter(|entry| entry.file_name() != name) {
                symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
            symlink(target, dir.path().join(name)).unwrap();
            let text = output_of(home.path(), "", &["generate", dir.path().to_str().unwrap(), "-p", "Hi"]);
            assert!(text.contains(&format!("{name}: ")) && text.contains(sentence), "{name} to {target}: {text}");
        }
    }
}

#[test]
fn texts_of_a_configuration_are_bounded() {
    let home = tempfile::tempdir().unwrap();
    let dir = with_zeros(home.path(), "no tensor");
    let file = dir.path().join("config.json");
    let config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let keys = |at: &str| config.pointer(at).and_then(Value::as_object).into_iter().flat_map(|object| object.keys());
    let top = keys("").map(|key| format!("/{key}"));
    let places: Vec<String> = top.chain(keys("/text_config").map(|key| format!("/text_config/{key}"))).collect();
    let long = "w\u{1b}[31mord\nmoestro: fine ".repeat(300);
    let mut refused = 0;
    for place in places.iter().step_by(3) {
        let mut config = config.clone();
        *config.pointer_mut(place).unwrap() = json!(long);
        fs::write(&file, config.to_string()).unwrap();
        let text = output_of(home.path(), "", &["info", dir.path().to_str().unwrap()]);
        let has_control = text.contains(|c: char| c.is_control() && c != '\n');
        assert!(!has_control && text.lines().all(|line| line.len() < 2500), "{place}: {text:.3000}");
        if text.starts_with("moestro: ") {
            assert!(!text.contains("\nmoestro: fine"), "{place}: {text:.3000}");
            refused += 1;
        }
    }
    assert!(refused > 3, "{refused} of {}", places.len());
}

/// A copy of the demo model in which the tensors that have `part` in their names are zero.
fn with_zeros(home: &Path, part: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(home).unwrap();
    for entry in fs::read_dir(demo()).unwrap().flatten() {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let file = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    for (_, tensor) in header.iter().filter(|(name, _)| name.contains(part)) {
        let [from, to] = [0, 1].map(|end| start + tensor["data_offsets"][end].as_u64().unwrap() as usize);
        bytes[from..to].fill(0);
    }
    fs::write(&file, bytes).unwrap();
    dir
}

#[test]
fn weights_that_are_zero_are_logged() {
    let home = tempfile::tempdir().unwrap();
    let matrices =
        ["linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.o_proj", "mlp.gate", "shared_expert.up_proj"];
    let parts = ["weight", "scales"];
    let trunk = matrices.into_iter().flat_map(|matrix| parts.map(|part| (matrix, part, matrix)));
    let experts = ["switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"];
    let experts = experts.into_iter().flat_map(|matrix| parts.map(|part| (matrix, part, "a part of an expert")));
    let vectors =
        ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "linear_attn.norm", "linear_attn.conv1d"];
    let vectors = vectors.map(|vector| (vector, "weight", vector)).into_iter();
    for (matrix, part, what) in trunk.chain(experts).chain(vectors) {
        let dir = with_zeros(home.path(), &format!("{matrix}.{part}"));
        let text = output_of(home.path(), "", &["generate", dir.path().to_str().unwrap(), "-p", "Hi", "-n", "4"]);
        let sentence = "is zero, as in a file whose download did not end";
        let named = [what.to_owned(), format!("{what}.weight")].map(|name| format!("{name} {sentence}"));
        assert!(named.iter().any(|named| text.contains(named)), "{matrix}.{part}: {text}");
    }
}

/// A hub that gives the same response to every request.
fn hub(response: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let _ = stream.write_all(response.as_bytes());
        }
    });
    address
}

#[test]
fn refusals_of_the_hub_get_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    for (response, sentence) in [
        (
            "HTTP/1.1 403 Forbidden\r\nx-error-code: GatedRepo\r\nContent-Length: 0\r\n\r\n",
            "the model is gated: accept its licence at http://127.0.0.1:PORT/org/name and set HF_TOKEN or run `hf auth login`",
        ),
        ("HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "set HF_TOKEN or run `hf auth login` to access it"),
        ("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "the hub has no such model or file"),
        (
            "HTTP/1.1 404 No\r\nx-error-code: RevisionNotFound\r\nContent-Length: 0\r\n\r\n",
            "the model has no such revision",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n<html>Pay</html>",
            "a web page instead of a listing, perhaps the login page of this network",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n{\"sha\": \"0123456789abcdef0123456789abcdef01234567\", \
             \"siblings\": [{\"rfilename\": \"m.gguf\", \"size\": 9}]}",
            "the repository has GGUF files, which Moestro does not read; pull an MLX version",
        ),
    ] {
        let endpoint = hub(response);
        let text = output_of(home.path(), &endpoint, &["pull", "org/name"]);
        let port = endpoint.rsplit(':').next().unwrap();
        let sentence = sentence.replace("PORT", port);
        assert!(text.contains(&sentence), "{response}\nneeds: {sentence}\nsaid:  {text}");
    }
    let nowhere = output_of(home.path(), "nonsense", &["pull", "org/name"]);
    assert!(nowhere.contains("HF_ENDPOINT is \"nonsense\", not an address such as https://"), "{nowhere}");
}

#[test]
fn part_of_a_name_gets_a_hint() {
    let home = tempfile::tempdir().unwrap();
    let mine = home.path().join(".local/share/moestro/models/org/tiny");
    fs::create_dir_all(&mine).unwrap();
    fs::copy(demo().join("config.json"), mine.join("config.json")).unwrap();
    assert!(output_of(home.path(), "", &["info", "tiny"]).contains("(did you mean org/tiny?)"));
    let text = output_of(home.path(), "", &["rm", "org/tiny"]);
    assert!(text.contains("Use --yes to confirm: stdin is not a terminal"), "{text}");
}
