//! Tests with requests of coding agents, recorded from one turn of `claude -p` and `codex exec`.
//!
//! The recordings are shortened: every field and every kind of block is kept, but the texts are replaced.

use super::{client::events, server::Server};
use serde_json::{Value, json};

const SAYS: &str = "12 + 7 is 19.\n</think>\n\n<tool_call>\n<function=close_agent>\n<parameter=target>\none\n</parameter>\n\
                    </function>\n</tool_call>";

async fn stream(path: &str, body: &str) -> Vec<Value> {
    let server = Server::saying(SAYS).await;
    let answer = server.send("POST", path, &[("anthropic-version", "2023-06-01")], Some(body.as_bytes())).await;
    let (status, text) = (answer.status, answer.text().await);
    assert_eq!(status, 200, "{text}");
    events(&text)
}

#[tokio::test]
async fn claude_code_turn_calls_a_tool() {
    let events = stream("/v1/messages?beta=true", include_str!("../fixtures/agents/claude-code.json")).await;
    let delta = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn codex_turn_calls_a_namespaced_function() {
    let events = stream("/v1/responses", include_str!("../fixtures/agents/codex.json")).await;
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["status"], "completed");
    let output = response["output"].as_array().unwrap();
    assert_eq!(output[0]["summary"], json!([{"type": "summary_text", "text": "12 + 7 is 19."}]));
    assert!(output[0]["encrypted_content"].is_string());
    let call = output.last().unwrap();
    assert_eq!((&call["name"], &call["namespace"]), (&json!("close_agent"), &json!("multi_agent_v1")));
}
