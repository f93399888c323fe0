//! Tests with requests of desktop programs. The requests are written from the source code of the version named at each
//! test. The tests read the answers in the same way as these programs.

use super::server::{CHAT, Server, Setup, with};
use moestro::http::ApiSet;
use serde_json::{Value, json};

const ANSWER: &str = "I add.\n</think>\n\n12 + 7 = 19.";
const CALL: &str = "</think>\n\n<tool_call>\n<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n\
                    </tool_call>";
const KEY: &[(&str, &str)] = &[("authorization", "Bearer local"), ("content-type", "application/json")];

async fn server(says: &'static str, api: ApiSet) -> Server {
    Setup { says: Some(says), api, ..Setup::default() }.start().await
}

/// The body of a successful response.
async fn text(server: &Server, method: &str, path: &str, body: Option<&Value>) -> String {
    let body = body.map(|body| body.to_string().into_bytes());
    let answer = server.send(method, path, KEY, body.as_deref()).await;
    let (status, text) = (answer.status, answer.text().await);
    assert_eq!(status, 200, "{path}: {text}");
    text
}

async fn get(server: &Server, path: &str) -> Value {
    serde_json::from_str(&text(server, "GET", path, None).await).unwrap()
}

/// The events of a stream: the texts of its `data: ` lines, or plain lines.
async fn stream(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let text = text(server, "POST", path, Some(body)).await;
    let lines = text.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn joined(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

fn question() -> Value {
    json!([{"role": "system", "content": "You help."}, {"role": "user", "content": "What is 12+7?"}])
}

/// A function as OpenAI's and Ollama's clients define it.
fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
    json!([{"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": parameters}}])
}

/// The name and the arguments of the tool call in a stream of chunks.
fn called(chunks: &[Value]) -> (String, String) {
    let part = |name: &str| joined(chunks, &format!("/choices/0/delta/tool_calls/0/function/{name}"));
    (part("name"), part("arguments"))
}

/// Open WebUI 0.12.4: `routers/openai.py`, "Verify connection" and a chat.
#[tokio::test]
async fn open_webui_connects_to_openai_api() {
    let server = server(ANSWER, ApiSet::Standard).await;
    let list = get(&server, "/v1/models").await;
    assert_eq!((&list["data"][0]["id"], &list["object"]), (&json!("mock"), &json!("list")));
    let body =
        json!({"stream": true, "model": "mock", "messages": question(), "stream_options": {"include_usage": true}});
    let chunks = stream(&server, CHAT, &body).await;
    assert_eq!(joined(&chunks, "/choices/0/delta/content"), "12 + 7 = 19.");
    assert_eq!(joined(&chunks, "/choices/0/delta/reasoning_content"), "I add.");
    assert!(chunks.last().unwrap()["usage"]["total_tokens"].is_u64());
    // This is the request of the button that continues an answer.
    let messages = json!([{"role": "user", "content": "What is 12+7?"}, {"role": "assistant", "content": "12 + 7"}]);
    let go_on = json!({"continue_final_message": true, "add_generation_prompt": false});
    let body = with(json!({"stream": true, "model": "mock", "messages": messages}), go_on);
    assert!(!stream(&server, CHAT, &body).await.is_empty());
}

/// Open WebUI 0.12.4: `routers/ollama.py`, "Verify connection", the list of models and a chat.
#[tokio::test]
async fn open_webui_connects_to_ollama_api() {
    let server = server(ANSWER, ApiSet::WithOllama).await;
    assert!(get(&server, "/api/version").await["version"].is_string());
    let list = get(&server, "/api/tags").await;
    let model = list["models"][0]["model"].as_str().unwrap();
    let loaded = get(&server, "/api/ps").await;
    assert_eq!(loaded["models"][0]["name"], list["models"][0]["name"]);
    // Python's `datetime.fromisoformat` reads this time.
    let expires = loaded["models"][0]["expires_at"].as_str().unwrap();
    expires.parse::<jiff::Timestamp>().unwrap();
    let body = json!({"model": model, "messages": question(), "options": {"temperature": 0.7, "num_ctx": 512},
        "stream": true, "keep_alive": "5m"});
    let lines = stream(&server, "/api/chat", &body).await;
    assert_eq!(joined(&lines, "/message/content"), "12 + 7 = 19.");
    assert_eq!(lines.last().unwrap()["done"], true);
}

/// VS Code's Copilot Chat, repository at 0ea4ed3: `ollamaProvider.ts` and `openAIEndpoint.ts`.
#[tokio::test]
async fn vs_code_finds_models_and_chats() {
    let server = server(CALL, ApiSet::WithOllama).await;
    let version = get(&server, "/api/version").await["version"].as_str().unwrap().to_owned();
    let numbers: Vec<u32> = version.split('.').map(|part| part.parse().unwrap()).collect();
    assert!(numbers >= vec![0, 6, 4], "{version}");
    let list = get(&server, "/api/tags").await;
    let model = &list["models"][0]["model"];
    let shown = text(&server, "POST", "/api/show", Some(&json!({"model": model}))).await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let info = &shown["model_info"];
    assert!(info["general.basename"].is_string());
    let context = format!("{}.context_length", info["general.architecture"].as_str().unwrap());
    assert_eq!(info[context], 512);
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("tools")));
    let body = json!({"messages": question(), "model": model, "temperature": 0, "top_p": 1, "n": 1, "stream": true,
        "tools": tools(), "stream_options": {"include_usage": true}});
    let chunks = stream(&server, CHAT, &body).await;
    assert_eq!(called(&chunks), ("read_file".into(), r#"{"path":"a.txt"}"#.into()));
}

/// Zed, repository at 014676e: `crates/open_ai/src/open_ai.rs`. Zed fails at an event that is neither a chunk nor an
/// error.
#[tokio::test]
async fn zed_reads_each_event() {
    let server = server(CALL, ApiSet::Standard).await;
    let body = json!({"model": "mock", "messages": question(), "stream": true, "stream_options": {"include_usage": true},
        "max_completion_tokens": 256, "temperature": 1.0, "tool_choice": "auto", "parallel_tool_calls": false,
        "tools": tools(), "prompt_cache_key": "thread-1"});
    let chunks = stream(&server, CHAT, &body).await;
    assert_eq!(called(&chunks), ("read_file".into(), r#"{"path":"a.txt"}"#.into()));
    for chunk in &chunks {
        assert!(chunk["choices"].is_array(), "{chunk}");
        assert!(chunk["choices"].as_array().unwrap().iter().all(|choice| choice["index"].is_u64()), "{chunk}");
        assert!(chunk["usage"].is_null() || chunk["usage"]["total_tokens"].is_u64(), "{chunk}");
    }
}

/// Home Assistant, repository at 0d0db90: `components/ollama/entity.py`. Home Assistant sends null for options that are
/// not set.
#[tokio::test]
async fn home_assistant_calls_a_tool() {
    let server = server(CALL, ApiSet::WithOllama).await;
    for keep_alive in [json!(-1), json!("60s")] {
        let body = json!({"model": "mock:latest", "messages": question(), "tools": tools(), "stream": true,
            "keep_alive": keep_alive, "options": {"num_ctx": 8192}, "think": false, "format": null});
        let lines = stream(&server, "/api/chat", &body).await;
        let calls: Vec<&Value> =
            lines.iter().filter_map(|line| line.pointer("/message/tool_calls/0/function")).collect();
        assert_eq!(calls, [&json!({"name": "read_file", "arguments": {"path": "a.txt"}})]);
    }
}
