//! Tests that text with the image placeholder is not counted as an image, wherever it is in a request with images.

use super::{
    images::{FIXTURE, file, image_url, options, text, url, user},
    server::{Server, serve_checkpoint, with},
};
use moestro_chat::{Conversation, Template};
use serde_json::{Value, json};
use std::{fs, path::Path};
use test_support::files::copy_files;

const OLLAMA: &str = "/api/chat";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// A path and its request, with tools, a call, a result, and two images. If a change spoils one image, the other stays.
type Case = (&'static str, Value);

const PLACEHOLDER: &str = "<|image_pad|>";
/// The placeholder as the server writes it if it is text.
const BROKEN: &str = "<|imag e_pad|>";
/// The name of an argument that the template completes to a placeholder: `<parameter=NAME>`.
const INCOMPLETE: &str = "<|image_pad|";

/// A server, and the directory of its model. `start` is a template whose text is before that of the model's template.
async fn server_with(start: &str) -> (Server, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Path::new(FIXTURE).join("mlx_4bit");
    let names =
        ["config.json", "preprocessor_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    copy_files(&fixture, dir.path(), &names);
    let template = fs::read_to_string(fixture.join("chat_template.jinja")).unwrap();
    fs::write(dir.path().join("chat_template.jinja"), [start, &template].concat()).unwrap();
    let (mut load, options) = options();
    load.plan.context = Some(4096);
    (serve_checkpoint(dir.path(), &load, options).await, dir)
}

/// A server whose template also writes the variable `note`.
async fn server() -> (Server, tempfile::TempDir) {
    server_with("{{- note | default('') | tojson }}").await
}

fn schema() -> Value {
    json!({"type": "object", "description": "b", "properties": {"path": {"type": "string", "enum": ["a"]}}})
}

fn arguments() -> Value {
    json!({"path": "a", "list": ["b", {"c": "d"}], "table": {"e": {"f": "g"}}})
}

/// `image` has the fields of a message with an image.
fn chat_messages(image: &Value) -> Value {
    let call = json!({"id": "t", "type": "function", "function": {"name": "write", "arguments": arguments()}});
    json!([
        {"role": "system", "content": "Be brief."},
        with(user(json!("Look")), image.clone()),
        {"role": "assistant", "content": "Well", "reasoning_content": "Hm", "thinking": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "tool_name": "write", "content": "ok"},
        with(user(json!("Go on")), image.clone()),
    ])
}

fn chat_tool() -> Value {
    json!({"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": schema()}})
}

fn chat_case() -> Case {
    let parts = json!({"content": [text("Look"), image_url(&file("gradient.png")), text("here")]});
    let kwargs = json!({"note": {"a": ["b"]}, "add_vision_id": true});
    let body = json!({"messages": chat_messages(&parts), "tools": [chat_tool()], "chat_template_kwargs": kwargs});
    ("/tokenize", body)
}

fn ollama_case() -> Case {
    let messages = chat_messages(&json!({"images": [file("gradient.png")]}));
    (OLLAMA, json!({"model": "checkpoint", "messages": messages, "tools": [chat_tool()]}))
}

fn messages_case() -> Case {
    let source = json!({"type": "base64", "media_type": "image/png", "data": file("gradient.png")});
    let picture = json!({"type": "image", "source": source});
    let tool = |name: &str, defer: bool| json!({"name": name, "description": "Writes.", "input_schema": schema(), "defer_loading": defer});
    let found = json!([{"type": "tool_reference", "tool_name": "late"}, text("ok")]);
    let body = json!({
        "system": [text("Be brief.")],
        "tools": [tool("write", false), tool("late", true)],
        "messages": [
            user(json!([text("Look"), picture])),
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                text("Well"),
                {"type": "tool_use", "id": "t", "name": "write", "input": arguments()},
            ]},
            user(json!([{"type": "tool_result", "tool_use_id": "t", "content": found}, text("Go on"), picture])),
        ],
    });
    (COUNT_TOKENS, body)
}

fn responses_case() -> Case {
    let picture = json!({"type": "input_image", "image_url": url(&file("gradient.png"))});
    let tool = |name: &str| json!({"type": "function", "name": name, "description": "Writes.", "parameters": schema()});
    let search = json!({"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": schema()});
    let body = json!({
        "instructions": "Be brief.",
        "tools": [tool("write"), search],
        "input": [
            user(json!([{"type": "input_text", "text": "Look"}, picture])),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
            {"type": "function_call", "call_id": "t", "name": "write", "arguments": arguments()},
            {"type": "function_call_output", "call_id": "t", "output": "ok"},
            {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"path": "a"}},
            {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [tool("late")]},
            user(json!([{"type": "input_text", "text": "Go on"}, picture])),
        ],
    });
    ("/v1/responses/input_tokens", body)
}

/// Appends a text to the string or key number `place`, and subtracts the number of strings and keys from it.
fn with_text(value: &Value, place: &mut isize, text: &str) -> Value {
    let changed = |written: &str, place: &mut isize| {
        *place -= 1;
        if *place == -1 { [written, text].concat() } else { written.to_owned() }
    };
    match value {
        Value::String(written) => changed(written, place).into(),
        Value::Array(items) => items.iter().map(|item| with_text(item, place, text)).collect(),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| (changed(name, place), with_text(value, place, text));
            Value::Object(fields.iter().map(field).collect())
        }
        other => other.clone(),
    }
}

/// Writes the arguments of calls as JSON text with escapes, as clients in Go and .NET do.
fn escape_arguments(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(escape_arguments),
        Value::Object(fields) => {
            fields.values_mut().for_each(escape_arguments);
            if let Some(arguments) = fields.get_mut("arguments") {
                *arguments = arguments.to_string().replace('<', "\\u003c").replace('>', "\\u003e").into();
            }
        }
        _ => {}
    }
}

/// The status of a request, and its prompt: the tokens or their number. The statuses of wrong requests are equal.
async fn prompt(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let mut body = body.clone();
    match path {
        OLLAMA => body = with(body, json!({"stream": false, "options": {"num_predict": 1}})),
        COUNT_TOKENS => {}
        _ => escape_arguments(&mut body),
    }
    let answer = server.post(path, &body).await;
    let status = answer.status;
    let answer = answer.json().await;
    let names = ["tokens", "input_tokens", "prompt_eval_count"];
    (status, names.iter().find_map(|name| answer.get(name)).cloned().unwrap_or_default())
}

/// Checks the placeholder at each string and key of a request.
async fn check_every_place((path, body): Case) {
    let (server, _dir) = server().await;
    let (status, whole) = prompt(&server, path, &body).await;
    assert_eq!(status, 200, "{path}");
    let mut end = 0;
    with_text(&body, &mut end, "");
    let mut in_prompt = 0;
    for place in 0..-end {
        let [changed, expected, incomplete] =
            [PLACEHOLDER, BROKEN, INCOMPLETE].map(|text| with_text(&body, &mut place.clone(), text));
        let expected = prompt(&server, path, &expected).await;
        assert!(prompt(&server, path, &changed).await == expected, "{path}: {changed}");
        assert_eq!(prompt(&server, path, &incomplete).await.0, expected.0, "{path}: {incomplete}");
        in_prompt += usize::from(expected.0 == 200 && expected.1 != whole);
    }
    assert!(in_prompt >= 40, "{path}: {in_prompt} of {} places are in the prompt", -end);
}

#[tokio::test]
async fn placeholder_in_chat_is_no_image() {
    check_every_place(chat_case()).await;
}

#[tokio::test]
async fn placeholder_in_ollama_is_no_image() {
    check_every_place(ollama_case()).await;
}

#[tokio::test]
async fn placeholder_in_messages_is_no_image() {
    check_every_place(messages_case()).await;
}

#[tokio::test]
async fn placeholder_in_responses_is_no_image() {
    check_every_place(responses_case()).await;
}

#[tokio::test]
async fn continued_message_may_contain_placeholder() {
    let (server, _dir) = server().await;
    let prompt = async |text: &str| {
        let picture = user(json!([image_url(&file("gradient.png"))]));
        let messages = json!([picture, {"role": "assistant", "content": text}]);
        let body = json!({"messages": messages, "continue_final_message": true});
        server.ask("/tokenize", &body).await["tokens"].clone()
    };
    let start = prompt("").await;
    for [changed, expected] in [[PLACEHOLDER, BROKEN], ["a <|image_pad|> b ", "a <|imag e_pad|> b "]] {
        let found = prompt(changed).await;
        assert_eq!(found, prompt(expected).await);
        assert!(found.as_array().unwrap().starts_with(start.as_array().unwrap()), "{found} {start}");
    }
}

#[tokio::test]
async fn prompt_without_placeholder_is_the_template() {
    let (server, dir) = server().await;
    let (path, body) = chat_case();
    let rendered = Template::load(dir.path()).unwrap().render(&Conversation {
        messages: body["messages"].as_array().unwrap(),
        tools: body["tools"].as_array().map(Vec::as_slice),
        kwargs: body["chat_template_kwargs"].as_object().unwrap(),
        add_generation_prompt: true,
    });
    let mut tokens = server.ask(path, &body).await["tokens"].as_array().unwrap().clone();
    tokens.dedup_by(|next, token| *next == 1003 && *token == 1003);
    assert!(rendered.as_ref().unwrap().contains("Picture 2: <|vision_start|>"));
    assert_eq!(json!(tokens), json!(server.tokenizer.encode(&rendered.unwrap()).unwrap()));
}

#[tokio::test]
async fn template_with_more_placeholders_is_named() {
    let (server, _dir) = server_with("<|image_pad|>").await;
    let (_, body) = chat_case();
    let error = server.refused("/tokenize", &body, 400).await;
    let expected = "The model's chat template does not write one placeholder for each of the 2 images.";
    assert_eq!(error["message"], expected);
}
