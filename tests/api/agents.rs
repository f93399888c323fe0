//! Requests of coding agents, recorded from one turn of `claude -p` and `codex exec`.
//!
//! The recordings are shortened: every field and every kind of block is kept, the texts are replaced.

use super::server::Server;
use serde_json::{Value, json};

const SAYS: &str = "12 + 7 is 19.\n</think>\n\n<tool_call>\n<function=close_agent>\n<parameter=target>\none\n</parameter>\n\
                    </function>\n</tool_call>";

async fn stream(path: &str, body: &str) -> Vec<Value> {
    let server = Server::saying(SAYS).await;
    let answer = server.send("POST", path, &[("anthropic-version", "2023-06-01")], Some(body.as_bytes())).await;
    let (status, text) = (answer.status, answer.text().await);
    assert_eq!(status, 200, "{text}");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test]
async fn claude_code_turn_calls_a_tool() {
    let body = include_str!("../fixtures/agents/claude-code.json");
    let events = stream("/v1/messages?beta=true", body).await;
    let delta = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
    let server = Server::saying(SAYS).await;
    let mut body: Value = serde_json::from_str(body).unwrap();
    let count =
        async |body: &Value| server.ask("/v1/messages/count_tokens?beta=true", body).await["input_tokens"].clone();
    let before = count(&body).await;
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=1.2.3; another=one;".into();
    assert_eq!(count(&body).await, before, "the billing header must not reach the prompt");
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
