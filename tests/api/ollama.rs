//! Tests of Ollama's API, on its own port.

use super::server::{CHAT, Server, Setup, chat, frequent_events, wait_until, with};
use moestro::http::ApiSet;
use serde_json::{Value, json};
use std::time::Duration;

const ANSWER: &str = "I add.\n</think>\n\n12 + 7 = 19.";
const CALL: &str = "</think>\n\n<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n\
                    <tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>";

async fn server(says: &'static str) -> Server {
    Setup { says: Some(says), api: ApiSet::WithOllama, ..Setup::default() }.start().await
}

fn question(more: Value) -> Value {
    with(with(chat("What is 12+7?"), json!({"model": "mock:latest"})), more)
}

/// The lines of a stream.
async fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let answer = server.post(path, body).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/x-ndjson")));
    let text = answer.text().await;
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn joined(lines: &[Value], pointer: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(pointer)?.as_str()).collect()
}

#[tokio::test]
async fn chat_streams_lines_by_default() {
    let server = server(ANSWER).await;
    let lines = lines(&server, "/api/chat", &question(json!({}))).await;
    assert_eq!(joined(&lines, "/message/content"), "12 + 7 = 19.");
    assert_eq!(joined(&lines, "/message/thinking"), "I add.");
    let (last, before) = lines.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false && line["model"] == "mock:latest"));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    for count in ["prompt_eval_count", "eval_count", "eval_duration", "total_duration"] {
        assert!(last[count].as_u64() > Some(0), "{count}: {last}");
    }
    assert!(last["created_at"].as_str().unwrap().ends_with('Z'));
}

#[tokio::test]
async fn chat_body_has_the_whole_message() {
    let server = server(ANSWER).await;
    let answer = server.ask("/api/chat", &question(json!({"stream": false}))).await;
    assert_eq!(answer["message"], json!({"role": "assistant", "content": "12 + 7 = 19.", "thinking": "I add."}));
    let cut = server.ask("/api/chat", &question(json!({"stream": false, "options": {"num_predict": 3}}))).await;
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(3)));
}

#[tokio::test]
async fn tool_calls_are_whole_objects() {
    let server = server(CALL).await;
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let call = |city: &str| json!({"function": {"name": "f", "arguments": {"city": city}}});
    let answer = server.ask("/api/chat", &question(json!({"stream": false, "tools": tools}))).await;
    assert_eq!(answer["message"]["tool_calls"], json!([call("Oslo"), call("Rome")]));
    let lines = lines(&server, "/api/chat", &question(json!({"tools": tools}))).await;
    let calls: Vec<&Value> =
        lines.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls, [&call("Oslo"), &call("Rome")]);
    // A client can send the call and its result back to the server.
    let mut next = question(json!({"stream": false, "tools": tools}));
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(answer["message"].clone());
    messages.push(json!({"role": "tool", "tool_name": "f", "content": "Rain"}));
    server.ask("/api/chat", &next).await;
}

/// The prompt, and a call that is held back until it is whole, both take longer than the interval of events.
#[tokio::test]
async fn silent_stream_sends_empty_lines() {
    let api = ApiSet::WithOllama;
    let setup = Setup { says: Some(CALL), stops_at: 0, api, configure: frequent_events, ..Setup::default() };
    let server = setup.start().await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let body = question(json!({"tools": tools}));
    let lines = server.evaluate_slowly(Duration::from_millis(5), lines(&server, "/api/chat", &body)).await;
    let is_call = |line: &Value| line["message"].get("tool_calls").is_some();
    let is_empty = |line: &Value| line["message"]["content"] == "" && !is_call(line) && line["done"] == false;
    let first_call = lines.iter().position(is_call).unwrap();
    assert!(lines[..first_call].iter().filter(|line| is_empty(line)).count() > 1, "{lines:?}");
}

/// Ollama's documentation shows requests of curl without a content type. The check of `Origin` keeps web pages out.
#[tokio::test]
async fn body_needs_no_content_type() {
    let server = server(ANSWER).await;
    let body = json!({"model": "mock"}).to_string();
    let length = body.len().to_string();
    let answer = server.bare("POST", "/api/show", &[("content-length", &length)], body.as_bytes()).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn generate_answers_a_prompt() {
    let server = server(ANSWER).await;
    let lines = lines(&server, "/api/generate", &json!({"model": "mock", "prompt": "What is 12+7?"})).await;
    assert_eq!(joined(&lines, "/response"), "12 + 7 = 19.");
    assert_eq!(joined(&lines, "/thinking"), "I add.");
    let raw = json!({"model": "mock", "prompt": "x", "raw": true, "stream": false});
    assert_eq!(server.ask("/api/generate", &raw).await["response"], ANSWER);
}

#[tokio::test]
async fn format_constrains_the_answer() {
    let server = server("no JSON").await;
    let schema =
        json!({"type": "object", "required": ["n"], "properties": {"n": {"enum": [7]}}, "additionalProperties": false});
    for (format, expected) in [(schema, Some(json!({"n": 7}))), (json!("json"), None)] {
        let body = question(json!({"stream": false, "think": false, "format": format, "options": {"seed": 1}}));
        let answer = server.ask("/api/chat", &body).await;
        let text = answer["message"]["content"].as_str().unwrap();
        if let Some(expected) = expected {
            assert_eq!(serde_json::from_str::<Value>(text).unwrap(), expected);
        }
        assert!(text.starts_with('{'), "{text}");
    }
}

#[tokio::test]
async fn lists_describe_the_model() {
    let server = server(ANSWER).await;
    let version = server.get("/api/version").await.json().await;
    assert_eq!(version["version"].as_str().unwrap().split('.').count(), 3);
    for path in ["/api/tags", "/api/ps"] {
        let list = server.get(path).await.json().await;
        let names: Vec<_> = list["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
        assert_eq!(names, ["mock"], "{path}");
    }
    for name in ["mock", "mock:latest"] {
        let shown = server.ask("/api/show", &json!({"model": name})).await;
        assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
        let architecture = shown["model_info"]["general.architecture"].as_str().unwrap();
        assert_eq!(shown["model_info"][format!("{architecture}.context_length")], 512);
    }
    assert_eq!(server.get("/").await.text().await, "Ollama is running");
    // VS Code sends its chats to OpenAI's path of the same port.
    let answer = server.ask(CHAT, &question(json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "12 + 7 = 19.");
}

#[tokio::test]
async fn errors_have_ollamas_shape() {
    let server = server(ANSWER).await;
    for (path, body, status) in [
        ("/api/chat", question(json!({"options": {"mirostat": 2}})), 400),
        ("/api/generate", json!({"model": "mock", "prompt": "x", "suffix": "y"}), 400),
        ("/api/show", json!({"model": "other/model"}), 404),
        ("/api/embed", json!({"model": "mock", "input": "x"}), 404),
    ] {
        assert!(server.refused(path, &body, status).await.is_string(), "{path}");
    }
}

#[tokio::test]
async fn type_errors_name_the_field() {
    let server = server(ANSWER).await;
    for (path, body, message) in [
        ("/api/chat", question(json!({"model": 5})), "model: invalid type: integer `5`, expected a string"),
        ("/api/chat", question(json!({"options": 5})), "options: invalid type: integer `5`, expected an object"),
        ("/api/chat", question(json!({"messages": "Hi"})), "messages: invalid type: string \"Hi\", expected an array"),
        (
            "/api/generate",
            json!({"model": "mock", "prompt": "x", "stream": "no"}),
            "stream: invalid type: string \"no\", expected a boolean",
        ),
    ] {
        assert_eq!(server.refused(path, &body, 400).await, message, "{path}");
    }
}

#[tokio::test]
async fn missing_endpoints_are_explained() {
    let server = server(ANSWER).await;
    for (path, hint) in [("/api/embed", "no embeddings"), ("/api/pull", "moestro pull"), ("/api/me", "POST /api/me")] {
        let error = server.refused(path, &json!({"model": "mock"}), 404).await.to_string();
        assert!(error.contains(hint) && !error.contains("--ollama-port"), "{path}: {error}");
    }
}

#[tokio::test]
async fn request_without_prompt_loads_the_model() {
    let server = server(ANSWER).await;
    let loaded = server.ask("/api/generate", &json!({"model": "mock"})).await;
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
    let unloaded = server.ask("/api/chat", &json!({"model": "mock", "messages": [], "keep_alive": 0})).await;
    assert_eq!(unloaded["done_reason"], "unload");
    wait_until(|| server.state.models.loaded_id().is_none(), || "the model is still loaded".into()).await;
}

#[tokio::test]
async fn main_port_names_the_flag() {
    let server = Server::saying(ANSWER).await;
    let answer = server.get("/api/tags").await;
    assert_eq!(answer.status, 404);
    assert!(answer.text().await.contains("--ollama-port"));
}
