//! Tests of continuing the final assistant message: `continue_final_message`, and Anthropic's prefill.

use super::server::{CHAT, MESSAGES, Server, chat, with};
use serde_json::{Value, json};

const PROMPT: &str = "<|im_start|>user\nWhat is 12+7?<|im_end|>\n<|im_start|>assistant\n<think>\n";

fn ask(last: Value, more: Value) -> Value {
    let last = with(last, json!({"role": "assistant"}));
    with(json!({"messages": [{"role": "user", "content": "What is 12+7?"}, last]}), more)
}

#[tokio::test]
async fn content_is_continued() {
    let server = Server::saying(" 19.").await;
    for (more, end) in [
        (json!({"continue_final_message": true, "add_generation_prompt": false}), "\n</think>\n\n12 + 7 ="),
        (json!({"continue_final_message": true}), "\n</think>\n\n12 + 7 ="),
        (json!({}), "\n</think>\n\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ] {
        let body = ask(json!({"content": "12 + 7 ="}), more.clone());
        assert_eq!(server.prompt(&body).await, format!("{PROMPT}{end}"));
        let answer = server.ask(CHAT, &body).await;
        assert_eq!(answer["usage"]["prompt_tokens"], server.ask("/tokenize", &body).await["count"]);
        let message = &answer["choices"][0]["message"];
        // A new message starts with reasoning. A continued message starts with content.
        let part = if more == json!({}) { "reasoning_content" } else { "content" };
        assert_eq!(message[part], " 19.", "the answer must not be trimmed");
    }
    let body =
        ask(json!({"content": [{"type": "text", "text": "12 + 7 is"}]}), json!({"add_generation_prompt": false}));
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], " 19.");
    let chunks = server.stream(CHAT, &body).await;
    let content: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, " 19.");
}

#[tokio::test]
async fn reasoning_is_continued() {
    let server = Server::saying(" 19.\n</think>\n\n12 + 7 = 19.").await;
    let body = ask(json!({"reasoning_content": "That is"}), json!({"continue_final_message": true}));
    assert_eq!(server.prompt(&body).await, format!("{PROMPT}That is"));
    let message = server.ask(CHAT, &body).await["choices"][0]["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!(" 19."), &json!("12 + 7 = 19.")));
}

#[tokio::test]
async fn anthropic_prefill_is_continued() {
    let server = Server::saying("B) because.").await;
    let body = ask(json!({"content": "The answer is ("}), json!({"max_tokens": 50}));
    let answer = server.ask(MESSAGES, &body).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": "B) because."}]));
    let chat = with(body.clone(), json!({"continue_final_message": true}));
    let count = server.ask("/tokenize", &chat).await["count"].clone();
    assert_eq!(server.ask("/v1/messages/count_tokens", &body).await["input_tokens"], count);
}

#[tokio::test]
async fn invalid_continuation_is_refused() {
    let server = Server::saying("Hello.").await;
    let continued = |more: Value| with(json!({"continue_final_message": true}), more);
    let calls = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    for (body, param) in [
        (ask(json!({"content": "", "tool_calls": calls}), continued(json!({}))), "messages"),
        (ask(json!({"content": "{"}), continued(json!({"response_format": {"type": "json_object"}}))), "messages"),
        (ask(json!({"content": "x"}), continued(json!({"add_generation_prompt": true}))), "continue_final_message"),
        (with(chat("Hi"), json!({"add_generation_prompt": false})), "messages"),
    ] {
        assert_eq!(server.refused(CHAT, &body, 400).await["param"], param, "{body}");
    }
    let thinks = ask(json!({"content": "x"}), json!({"max_tokens": 5, "thinking": {"type": "enabled"}}));
    assert_eq!(server.post(MESSAGES, &thinks).await.status, 400);
}
