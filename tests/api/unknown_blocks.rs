//! Tests with content blocks that the server does not know, and with malformed fields. In a tool result or an answered
//! message, they are no error in any API. In a new user message, they are a 400.

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
    let part = json!({"type": "input_image", "image_url": "data:,"});
    for (input, status) in [
        (json!([user, call, output]), 200),
        (json!([user, bare]), 200),
        (json!([user, call, output, answer, user]), 200),
        (json!([user, call, answer, user]), 200),
        (json!([compaction, user, answer, user]), 200),
        (json!([user, answer, call]), 200),
        (json!([compaction, user]), 200),
        (json!([user, {"type": "odd"}]), 200),
        (json!([{"type": "odd"}, user]), 200),
        (json!([user, {"type": "odd"}, user]), 200),
        (json!([user, answer, {"type": "odd"}, user]), 200),
        (json!([user, call, output, {"type": "odd"}]), 200),
        (json!([user, answer, {"type": "odd"}]), 400),
        (json!([{"type": "odd"}, {"type": "strange"}]), 400),
        (json!([user, part]), 400),
        (json!([part, user]), 400),
        (json!([user, part, answer, user]), 200),
    ] {
        let answer = server.post(RESPONSES, &json!({"input": input, "max_output_tokens": 1})).await;
        let found = answer.status;
        assert_eq!(found, status, "{input}: {}", answer.text().await);
    }
}

/// The output of `/v1/responses/compact` ends with a compaction. The user messages before it were answered.
#[tokio::test]
async fn kept_messages_before_compaction_are_old() {
    let server = server().await;
    let user = |part: &Value| json!({"role": "user", "content": [{"type": "input_text", "text": "x"}, part]});
    let [text, image] = [
        json!({"type": "input_text", "text": "y"}),
        json!({"type": "input_image", "image_url": "data:image/png;base64,bm90"}),
    ];
    let developer = json!({"role": "developer", "content": "z"});
    let many = vec![image.clone(); 20];
    for part in [&image, &json!({"type": "input_audio"}), &json!({"type": "input_file", "file_id": "f"})] {
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
        let output = json!({"type": "function_call_output", "call_id": "c", "output": "o"});
        let history = json!({"input": [user(part), {"role": "user", "content": many}, call, output]});
        let compacted = server.ask("/v1/responses/compact", &history).await["output"].clone();
        let input = compacted.as_array().unwrap();
        assert_eq!((input.len(), &input[2]["type"]), (3, &json!("compaction")));
        let summary = with(input[2].clone(), json!({"type": "compaction_summary"}));
        for (input, more, status) in [
            (input.clone(), vec![], 200),
            (vec![input[0].clone(), summary], vec![], 200),
            (input.clone(), vec![developer.clone()], 200),
            (input.clone(), vec![json!({"type": "odd"})], 200),
            (input.clone(), vec![user(&text)], 200),
            (input.clone(), vec![user(part)], 400),
        ] {
            let input = [input, more].concat();
            let answer = server.post(RESPONSES, &json!({"input": input, "max_output_tokens": 1})).await;
            let found = answer.status;
            assert_eq!(found, status, "{input:?}: {}", answer.text().await);
        }
    }
}

/// `value` with each of its fields removed once, and with odd values in the place of each value inside it.
fn malformed(value: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    let places: Vec<String> = match value {
        Value::Array(items) => (0..items.len()).map(|index| format!("/{index}")).collect(),
        Value::Object(fields) => fields.keys().map(|name| format!("/{name}")).collect(),
        _ => Vec::new(),
    };
    for place in places {
        let inner = value.pointer(&place).unwrap();
        let odd = [json!(null), json!(5), json!(true), json!("odd"), json!({}), json!({"a": 1}), json!([]), json!([1])];
        for other in odd.into_iter().chain(malformed(inner)) {
            let mut changed = value.clone();
            *changed.pointer_mut(&place).unwrap() = other;
            all.push(changed);
        }
        if let Value::Object(fields) = value {
            let mut fields = fields.clone();
            fields.remove(&place[1..]);
            all.push(fields.into());
        }
    }
    all
}

/// Each API with the field of its conversation, further fields, and a conversation that has an answer.
fn histories() -> Vec<(&'static str, &'static str, Value, Value)> {
    let text = |kind: &str| json!([{"type": kind, "text": "x"}]);
    let user = json!({"role": "user", "content": "x"});
    let image = json!({"type": "image_url", "image_url": {"url": "data:;base64,AA"}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let custom = json!({"id": "d", "type": "custom", "custom": {"name": "g", "input": "x"}});
    let chat = json!([
        user,
        {"role": "user", "content": [{"type": "text", "text": "x"}, image]},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call, custom]},
        {"role": "tool", "tool_call_id": "c", "content": text("text")},
        {"role": "assistant", "content": text("text"), "refusal": null, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "x"},
    ]);
    let ollama = json!([
        {"role": "user", "content": "x", "images": ["AA"]},
        {"role": "assistant", "content": "a", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "x", "tool_name": "f"},
    ]);
    let source = json!({"type": "content", "content": text("text")});
    let messages = json!([
        user,
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "document", "title": "t", "source": source}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"},
            {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_regex", "input": {"query": "x"}},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"type": "tool_search_tool_search_result",
             "tool_references": [{"type": "tool_reference", "tool_name": "f"}]}},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "is_error": false, "content": text("text")},
            {"type": "text", "text": "x"}]},
    ]);
    let responses = json!([
        {"type": "message", "role": "user", "content": text("input_text")},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": text("output_text")},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": text("input_text")},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"type": "mcp_call", "name": "f", "server_label": "s", "arguments": "{}", "output": "x", "error": null},
        {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "a", "stderr": "b"}]},
        {"type": "compaction", "encrypted_content": "x"},
    ]);
    vec![
        (CHAT, "messages", json!({"max_tokens": 1}), chat),
        (OLLAMA, "messages", json!({"model": "mock", "options": {"num_predict": 1}}), ollama),
        (COUNT, "messages", json!({}), messages),
        ("/v1/responses/input_tokens", "input", json!({}), responses),
    ]
}

#[tokio::test]
async fn malformed_history_never_ends_a_conversation() {
    let server = server().await;
    let answer = json!({"role": "assistant", "content": "a"});
    let user = json!({"role": "user", "content": "Go on"});
    let mut count = 0;
    let mut refused = Vec::new();
    for (path, field, more, history) in histories() {
        for changed in malformed(&history) {
            let mut conversation = changed.as_array().unwrap().clone();
            conversation.extend([answer.clone(), user.clone()]);
            let status = server.post(path, &with(more.clone(), json!({field: conversation}))).await.status;
            count += 1;
            if status != 200 {
                refused.push(format!("{status} {path} {changed}"));
            }
        }
    }
    assert!(refused.is_empty(), "{} of {count}:\n{}", refused.len(), refused.join("\n"));
    assert!(count > 500, "{count}");
}

#[tokio::test]
async fn malformed_results_and_system_blocks_are_accepted() {
    let server = server().await;
    let user = json!({"role": "user", "content": "x"});
    let chat_call = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
    let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": [1]}]});
    let item = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    for content in [json!(null), json!(5), json!(true), json!({"a": 1}), json!({"type": "text", "text": "x"})] {
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": content});
        let messages = json!([user, call, {"role": "user", "content": [result]}]);
        let system = json!([{"type": "text", "text": "s"}, {"type": "odd"}]);
        server.ask(MESSAGES, &json!({"messages": messages, "system": system, "max_tokens": 1})).await;
        let messages = json!([user, chat_call, {"role": "tool", "tool_call_id": "c", "content": content}]);
        server.ask(CHAT, &json!({"messages": messages, "max_tokens": 1})).await;
        let output = json!({"type": "function_call_output", "call_id": "c", "output": content});
        server.ask(RESPONSES, &json!({"input": [user, item, output], "max_output_tokens": 1})).await;
    }
    let prompt =
        server.prompt(&json!({"messages": [user, chat_call, {"role": "tool", "content": {"a": [1, true]}}]})).await;
    assert!(prompt.contains("{\"a\":[1,true]}"), "{prompt}");
    let missing = json!([user, chat_call, {"role": "tool", "tool_call_id": "c"}]);
    server.ask(CHAT, &json!({"messages": missing, "max_tokens": 1})).await;
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
        for (input, is_refused) in [
            (json!([user, item, answer, user]), false),
            (json!([user, item, user]), kind.starts_with("input_")),
            (json!([user, item]), kind.starts_with("input_") || kind == "compaction_trigger"),
            (json!([user, answer, item]), is_other),
        ] {
            let answer = server.post(RESPONSES, &json!({"input": input, "max_output_tokens": 1})).await;
            let status = answer.status;
            let expected = if is_refused { 400 } else { 200 };
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
