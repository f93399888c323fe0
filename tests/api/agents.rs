//! Tests with requests of coding agents, recorded from one turn of `claude -p` and `codex exec`.
//!
//! The recordings are shortened: every field and every kind of block is kept, but the texts are replaced.

use super::{
    client::events,
    server::{Server, Setup},
};
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

/// Number of turns after the turn in which the result of a tool contains a picture.
const MORE_TURNS: usize = 10;

/// Sends a turn and checks that the model received a sentence instead of each picture.
async fn turn_with_pictures(server: &Server, path: &str, body: &Value) {
    let headers = [("anthropic-version", "2023-06-01")];
    let answer = server.send("POST", path, &headers, Some(body.to_string().as_bytes())).await;
    let (status, not_shown) = (answer.status, answer.header("x-moestro-images-not-shown").map(str::to_owned));
    let text = answer.text().await;
    assert_eq!((status, not_shown.as_deref()), (200, Some("1")), "{text}");
}

#[tokio::test]
async fn claude_code_continues_after_a_picture() {
    let server = Setup { says: Some(SAYS), context: 8192, ..Setup::default() }.start().await;
    let mut body: Value = serde_json::from_str(include_str!("../fixtures/agents/claude-code.json")).unwrap();
    body["max_tokens"] = 40.into();
    let messages = body["messages"].as_array_mut().unwrap();
    let source = json!({"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="});
    let call =
        |id: usize| json!({"type": "tool_use", "id": format!("t{id}"), "name": "Read", "input": {"file_path": "/a"}});
    let result = |id: usize, content: Value| json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": format!("t{id}"), "content": content}]});
    messages.push(json!({"role": "assistant", "content": [call(0)]}));
    messages.push(result(0, json!([{"type": "image", "source": source}])));
    turn_with_pictures(&server, "/v1/messages?beta=true", &body).await;
    for turn in 1..=MORE_TURNS {
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(json!({"role": "assistant", "content": [call(turn)]}));
        messages.push(result(turn, json!("42")));
        turn_with_pictures(&server, "/v1/messages?beta=true", &body).await;
    }
}

#[tokio::test]
async fn codex_continues_after_a_picture() {
    let server = Setup { says: Some(SAYS), context: 8192, ..Setup::default() }.start().await;
    let mut body: Value = serde_json::from_str(include_str!("../fixtures/agents/codex.json")).unwrap();
    let call = |id: usize| json!({"type": "function_call", "call_id": format!("c{id}"), "name": "view_image", "arguments": "{}"});
    let output = |id: usize, output: Value| json!({"type": "function_call_output", "call_id": format!("c{id}"), "output": output});
    let input = body["input"].as_array_mut().unwrap();
    let image = json!([{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]);
    input.extend([call(0), output(0, image)]);
    turn_with_pictures(&server, "/v1/responses", &body).await;
    for turn in 1..=MORE_TURNS {
        body["input"].as_array_mut().unwrap().extend([call(turn), output(turn, json!("42"))]);
        turn_with_pictures(&server, "/v1/responses", &body).await;
    }
}
