//! Tests with content blocks that the server does not know, or whose fields are malformed. In a tool result or an
//! answered message, a sentence replaces them in every API. In a new user message, they are a 400.

use super::server::{CHAT, MESSAGES, RESPONSES, Server, Setup, with};
use moestro::http::ApiSet;
use serde_json::{Value, json};
use test_support::mutate::Dice;

const COUNT: &str = "/v1/messages/count_tokens";
const OLLAMA: &str = "/api/chat";

async fn server() -> Server {
    Setup { says: Some("</think>\n\nok"), context: 8192, api: ApiSet::WithOllama, ..Setup::default() }.start().await
}

/// Blocks of current clients, and blocks whose fields are missing or have other types.
fn known_blocks() -> Vec<Value> {
    let kinds = "text thinking redacted_thinking tool_reference server_tool_use web_search_tool_result mcp_tool_use \
        mcp_tool_result container_upload compaction search_result document image image_url input_image input_audio \
        refusal";
    let bare = kinds.split(' ').chain([""]).map(|kind| json!({"type": kind}));
    let whole = json!([
        {"type": "tool_reference", "tool_name": "WebFetch"},
        {"type": "tool_reference", "tool_name": 5},
        {"type": "thinking", "thinking": null, "signature": 1},
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        {"type": "document", "source": {"type": "content", "content": {}}},
        {"type": "search_result", "source": [], "title": {}, "content": [{"type": "odd"}, 5]},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "text", "text": ["x"]},
        {"text": "a block without a type"},
        {"type": null}, [], null, "a string", 1.5,
    ]);
    bare.chain(whole.as_array().unwrap().clone()).chain(sdk_parts().into_iter().flat_map(|(_, parts)| parts)).collect()
}

/// An example of each type of part, block and item that the SDKs know, for each API.
fn sdk_parts() -> Vec<(String, Vec<Value>)> {
    let names: Value = serde_json::from_str(include_str!("../sdk/names.json")).unwrap();
    let parts = names["parts"].as_object().unwrap().iter();
    parts.map(|(api, parts)| (api.clone(), parts.as_array().unwrap().clone())).collect()
}

/// A block with a random type and random fields.
fn random_block(dice: &mut Dice) -> Value {
    let word = |dice: &mut Dice| -> String {
        let letters: Vec<char> = "abcdefghij_-.<|>{}`é🦀 ".chars().collect();
        (0..1 + dice.below(12)).map(|_| *dice.pick(&letters)).collect()
    };
    let mut block = json!({"type": word(dice)});
    for _ in 0..dice.below(4) {
        let names = ["text", "content", "source", "name", "id", "tool_name", "tool_use_id", "image_url"];
        let values = [json!(null), json!(7), json!("x"), json!([[{"type": "y"}]]), json!({"type": "text"}), json!([5])];
        block[*dice.pick(&names)] = dice.pick(&values).clone();
    }
    block
}

/// Requests with the block in each tool result and each answered message of each API.
fn answered(block: &Value) -> Vec<(&'static str, Value)> {
    let user = |content: Value| json!({"role": "user", "content": content});
    let assistant = |content: Value| json!({"role": "assistant", "content": content});
    let text = |kind: &str| json!({"type": kind, "text": "x"});
    let last = || user("Go on".into());
    let mut requests = Vec::new();

    let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
    let result = |content: Value| user(json!([{"type": "tool_result", "tool_use_id": "t", "content": content}]));
    let nested = json!([
        {"type": "search_result", "source": "s", "title": "t", "content": [block]},
        {"type": "document", "source": {"type": "content", "content": [block, text("text")]}},
    ]);
    for messages in [
        json!([user(json!([text("text"), block])), assistant("a".into()), last()]),
        json!([user("x".into()), assistant(json!([block, text("text")])), last()]),
        json!([user("x".into()), assistant(call.clone()), result(json!([block]))]),
        json!([user("x".into()), assistant(call.clone()), result(nested)]),
        json!([user("x".into()), assistant(call), result(json!([block])), assistant("a".into()), last()]),
    ] {
        requests.push((COUNT, json!({"messages": messages})));
        requests.push((MESSAGES, json!({"messages": messages, "max_tokens": 1})));
    }

    let call = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": [block]});
    for messages in [
        json!([user(json!([text("text"), block])), assistant("a".into()), last()]),
        json!([user("x".into()), assistant(json!([block])), last()]),
        json!([{"role": "system", "content": [block]}, user("x".into()), assistant("a".into()), last()]),
        json!([user("x".into()), call, result]),
    ] {
        requests.push((CHAT, json!({"messages": messages, "max_tokens": 1})));
        let call = json!({"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "f", "arguments": {}}}]});
        let mut messages = messages.as_array().unwrap().clone();
        let calls = messages.iter_mut().filter(|message| !message["tool_calls"].is_null());
        calls.for_each(|message| *message = call.clone());
        requests.push((OLLAMA, json!({"model": "mock", "messages": messages, "options": {"num_predict": 1}})));
    }

    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    let result = json!({"type": "function_call_output", "call_id": "c", "output": [block]});
    for input in [
        json!([user(json!([text("input_text"), block])), assistant("a".into()), last()]),
        json!([user("x".into()), assistant(json!([block, text("output_text")])), last()]),
        json!([user("x".into()), call, result]),
    ] {
        requests.push((RESPONSES, json!({"input": input, "max_output_tokens": 1})));
    }
    requests
}

#[tokio::test]
async fn unknown_blocks_never_end_a_conversation() {
    let server = server().await;
    let mut dice = Dice(51);
    let random: Vec<Value> = (0..30).map(|_| random_block(&mut dice)).collect();
    for block in known_blocks().iter().chain(&random) {
        for (path, body) in answered(block) {
            let answer = server.post(path, &body).await;
            let status = answer.status;
            assert_eq!(status, 200, "{path} {body}: {}", answer.text().await);
        }
    }
}

#[tokio::test]
async fn unknown_blocks_in_new_messages_are_refused() {
    let server = server().await;
    for (path, field, more) in [
        (MESSAGES, "messages", json!({"max_tokens": 1})),
        (COUNT, "messages", json!({})),
        (CHAT, "messages", json!({})),
        (RESPONSES, "input", json!({})),
        (OLLAMA, "messages", json!({"model": "mock"})),
    ] {
        for block in [json!({"type": "odd"}), json!({"type": "tool_reference", "tool_name": "f"}), json!({}), json!(5)]
        {
            let messages = json!([{"role": "assistant", "content": "a"}, {"role": "user", "content": [block]}]);
            let body = with(more.clone(), json!({field: messages}));
            let error = server.refused(path, &body, 400).await;
            assert!(error.to_string().contains("content[0]"), "{path} {body}: {error}");
        }
    }
}

#[tokio::test]
async fn unknown_response_items_become_sentences() {
    let server = server().await;
    let user = json!({"role": "user", "content": "x"});
    let answer = json!({"role": "assistant", "content": "a"});
    let call = json!({"type": "odd_call", "call_id": "c", "action": {}});
    let output = json!({"type": "odd_call_output", "call_id": "c", "output": "x"});
    let bare = json!({"type": "odd_output"});
    let compaction = json!({"type": "compaction", "encrypted_content": "gAAA"});
    for (input, status) in [
        (json!([user, call, output]), 200),
        (json!([user, bare]), 200),
        (json!([user, call, output, answer, user]), 200),
        (json!([user, call, answer, user]), 200),
        (json!([compaction, user, answer, user]), 200),
        (json!([user, answer, call]), 200),
        (json!([compaction, user]), 200),
        (json!([user, {"type": "odd"}]), 400),
    ] {
        let answer = server.post(RESPONSES, &json!({"input": input, "max_output_tokens": 1})).await;
        let found = answer.status;
        assert_eq!(found, status, "{input}: {}", answer.text().await);
    }
}

#[tokio::test]
async fn response_items_of_sdks_are_accepted() {
    let server = server().await;
    let user = json!({"role": "user", "content": "x"});
    let answer = json!({"role": "assistant", "content": "a"});
    let sdk = sdk_parts();
    let (_, items) = sdk.iter().find(|(api, _)| api == "responses").unwrap();
    let kinds = items.iter().filter_map(|item| Some((item["type"].as_str()?, item)));
    // Parts of messages, and items that ask for something that the server does not have.
    let parts = ["input_", "output_text", "reasoning_text", "refusal", "computer_screenshot"];
    let requests = ["configuration_update", "compaction_trigger"];
    for (kind, item) in kinds {
        let is_other = parts.iter().chain(&requests).any(|start| kind.starts_with(start));
        for (input, is_new) in [
            (json!([user, item, answer, user]), false),
            (json!([user, item, user]), true),
            (json!([user, answer, item]), true),
        ] {
            let answer = server.post(RESPONSES, &json!({"input": input, "max_output_tokens": 1})).await;
            let status = answer.status;
            let expected = if is_new && is_other { 400 } else { 200 };
            assert_eq!(status, expected, "{input}: {}", answer.text().await);
        }
    }
}

#[tokio::test]
async fn outputs_of_calls_are_in_the_prompt() {
    let server = server().await;
    let shell = json!([{"stdout": "pelican", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]);
    for items in [
        json!([{"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
               {"type": "local_shell_call_output", "id": "c", "output": "pelican"}]),
        json!([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
               {"type": "shell_call_output", "call_id": "c", "output": shell}]),
        json!([{"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "pelican"}]),
        json!([{"type": "mcp_call", "id": "c", "name": "f", "server_label": "s", "arguments": "{}", "output": "pelican"}]),
        json!([{"type": "program_output", "id": "p", "call_id": "c", "result": "pelican", "status": "completed"}]),
    ] {
        let count = async |word: &str| {
            let items: Value = serde_json::from_str(&items.to_string().replace("pelican", word)).unwrap();
            let input = [&[json!({"role": "user", "content": "x"})][..], items.as_array().unwrap()].concat();
            let counted = server.ask("/v1/responses/input_tokens", &json!({"input": input})).await;
            counted["input_tokens"].as_u64().unwrap()
        };
        assert!(count(&"pelican ".repeat(50)).await > count("pelican").await + 49, "{items}");
    }
}
