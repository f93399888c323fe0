//! Converters, fine-tuning tools and uploaders write tokenizers, chat templates and sampling defaults in several files and
//! spellings. The demo gives the same answer with each.

use crate::{layouts::respell, program::moestro};
use serde_json::{Value, json};
use std::{fs, path::Path, process::Output};
use test_support::{DEMO, files::copy_dir};

/// Changes the files of the demo and asks a question.
fn ask(change: impl FnOnce(&Path)) -> Output {
    let dir = tempfile::tempdir().unwrap();
    copy_dir(DEMO, dir.path());
    change(dir.path());
    let home = tempfile::tempdir().unwrap();
    let args = ["generate", "-p", "What is 12+7?", "--temp", "0", "--thinking", "off", "--max-tokens", "60"];
    moestro(home.path()).args(args).arg(dir.path()).output().unwrap()
}

/// Changes the files of the demo and returns the answer to a question.
fn answer(change: impl FnOnce(&Path)) -> String {
    let output = ask(change);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn turn_of_template_ends_answer() {
    let ended = answer(|dir| {
        // Only the end of a document is declared, as in base models.
        edit_json(&dir.join("generation_config.json"), |json| json["eos_token_id"] = 2038.into());
        edit_json(&dir.join("tokenizer_config.json"), |json| json["eos_token"] = "<|endoftext|>".into());
        edit_json(&dir.join("config.json"), |json| {
            json["eos_token_id"] = 2038.into();
            json["text_config"]["eos_token_id"] = 2038.into();
        });
    });
    assert_eq!(ended, "12 + 7 = 19.\n");
}

#[test]
fn template_of_older_processor_is_used() {
    for name in ["chat_template.json", "processor_config.json"] {
        let found = answer(|dir| {
            let template = fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
            fs::remove_file(dir.join("chat_template.jinja")).unwrap();
            fs::write(dir.join(name), json!({"chat_template": template}).to_string()).unwrap();
            let remove = |json: &mut Value| _ = json.as_object_mut().unwrap().remove("chat_template");
            edit_json(&dir.join("tokenizer_config.json"), remove);
            fs::write(dir.join("generation_config.json"), "[1]").unwrap();
        });
        assert_eq!(found, "12 + 7 = 19.\n", "{name}");
    }
}

#[test]
fn order_of_added_tokens_changes_nothing() {
    let found = answer(|dir| {
        edit_json(&dir.join("tokenizer.json"), |json| json["added_tokens"].as_array_mut().unwrap().reverse());
    });
    assert_eq!(found, "12 + 7 = 19.\n");
}

#[test]
fn other_contents_of_text_files_are_refused() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    let page = "<!doctype html>\n<html></html>";
    for (file, text, reason) in [
        ("chat_template.jinja", pointer, "it is a Git LFS pointer"),
        ("chat_template.jinja", page, "it is a web page"),
        ("tokenizer_config.json", page, "it is a web page"),
        ("tokenizer_config.json", "{", "it is not valid JSON: EOF"),
        ("tokenizer.json", "", "it is empty"),
        ("tokenizer.json", "{}", "it is not a tokenizer: "),
        ("added_tokens.json", "{", "it is not valid JSON: EOF"),
        ("config.json", "{", "it is not valid JSON: EOF"),
    ] {
        let output = ask(|dir| fs::write(dir.join(file), text).unwrap());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(file) && said.contains(reason), "{file}: {said}");
    }
    let output = ask(|dir| fs::rename(dir.join("tokenizer.json"), dir.join("merges.txt")).unwrap());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no tokenizer.json; copy that of the original model"));
}

/// Some tools for fine-tuning write `<|im_start|>` to other files than `tokenizer.json`.
#[test]
fn added_tokens_of_other_files_are_used() {
    for name in ["tokenizer_config.json", "added_tokens.json"] {
        let found = answer(|dir| {
            let mut tokens = Value::Null;
            edit_json(&dir.join("tokenizer.json"), |json| {
                tokens = json["added_tokens"].take();
                json["added_tokens"] = json!([]);
                json["model"]["dropout"] = 0.5.into();
            });
            let id = |token: &Value| token["id"].as_u64().unwrap();
            let list = tokens.as_array().unwrap().iter();
            edit_json(&dir.join("tokenizer_config.json"), |json| {
                let described = list.clone().map(|token| (id(token).to_string(), token.clone()));
                json["added_tokens_decoder"] =
                    if name == "added_tokens.json" { Value::Null } else { described.collect() };
            });
            if name == "added_tokens.json" {
                let ids = list.map(|token| (token["content"].as_str().unwrap().to_owned(), id(token).into()));
                let ids: serde_json::Map<String, Value> = ids.collect();
                fs::write(dir.join(name), Value::from(ids).to_string()).unwrap();
            }
        });
        assert_eq!(found, "12 + 7 = 19.\n", "{name}");
    }
}

#[test]
fn special_template_that_fails_is_not_used() {
    let found = answer(|dir| {
        let template = fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
        fs::remove_file(dir.join("chat_template.jinja")).unwrap();
        let named = |(name, template): (&str, &str)| json!({"name": name, "template": template});
        let list = [("rag", "{{ f( }}"), ("default", &template), ("tool_use", "{% if %}")];
        edit_json(&dir.join("tokenizer_config.json"), |json| {
            json["chat_template"] = list.into_iter().map(named).collect();
        });
    });
    assert_eq!(found, "12 + 7 = 19.\n");
}

#[test]
fn spellings_of_all_files_give_same_answer() {
    let found = answer(|dir| {
        for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
            respell(&dir.join(name), 15);
        }
        // The order of its keys matters.
        let tokenizer = fs::read_to_string(dir.join("tokenizer.json")).unwrap();
        fs::write(dir.join("tokenizer.json"), format!("\u{feff}{tokenizer}")).unwrap();
        let template = fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
        fs::write(dir.join("chat_template.jinja"), format!("\u{feff}{}", template.replace('\n', "\r\n"))).unwrap();
    });
    assert_eq!(found, "12 + 7 = 19.\n");
}
