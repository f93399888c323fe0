//! Tests of `/v1/chat/completions`.

use super::{
    client::stable,
    server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Server, Setup, with},
};
use moestro::http::RequestLimits;
use serde_json::{Value, json};
use std::time::Duration;

const THINKS: &str = "I need to compute 12 + 7. That is 19.\n</think>\n\n12 + 7 = 19.";

const CALLS: &str = "I should call get_weather.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n\
                     </parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";

fn question() -> Value {
    json!({"model": "mock", "messages": [{"role": "user", "content": "What is 12+7?"}]})
}

fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let parameters = json!({"type": "object", "properties": properties, "required": ["city"]});
    json!({"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]})
}

/// Joins the values of one field from all deltas of a stream.
fn joined(chunks: &[Value], part: &str) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][part].as_str()).collect()
}

/// Checks ids, roles and finish reasons of a stream's chunks.
fn check_stream(chunks: &[Value]) {
    let first = &chunks[0];
    let choices: Vec<_> = chunks.iter().filter(|chunk| chunk["choices"] != json!([])).collect();
    for (index, chunk) in choices.iter().enumerate() {
        assert_eq!(chunk["id"], first["id"]);
        assert_eq!(chunk["created"], first["created"]);
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["choices"][0]["delta"].get("role").is_some(), index == 0, "{chunk}");
        let last = index + 1 == choices.len();
        let choice = chunk["choices"][0].as_object().unwrap();
        assert_eq!(choice["finish_reason"].is_null(), !last, "{chunk}");
    }
}

#[tokio::test]
async fn body_has_reasoning_and_content() {
    let server = Server::saying(THINKS).await;
    insta::assert_json_snapshot!(stable(server.ask(CHAT, &question()).await));
}

#[tokio::test]
async fn stream_has_one_chunk_per_token() {
    let server = Server::saying(THINKS).await;
    let body = with(question(), json!({"stream_options": {"include_usage": true}}));
    let chunks = server.stream(CHAT, &body).await;
    check_stream(&chunks);
    assert_eq!(joined(&chunks, "reasoning_content"), "I need to compute 12 + 7. That is 19.");
    assert_eq!(joined(&chunks, "content"), "12 + 7 = 19.");
    assert!(chunks.len() > 20, "one chunk per token");
    let (first, last) = (chunks[..2].to_vec(), chunks[chunks.len() - 3..].to_vec());
    insta::assert_json_snapshot!([first, last].concat().into_iter().map(stable).collect::<Vec<_>>());
}

#[tokio::test]
async fn stream_equals_body() {
    for says in [THINKS, CALLS, "</think>\n\nÄrger mit 日本語 und 🦀!", ""] {
        let server = Server::saying(says).await;
        let body = with(question(), tools());
        let message = server.ask(CHAT, &body).await["choices"][0].clone();
        let chunks = server.stream(CHAT, &body).await;
        check_stream(&chunks);
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "usage was not requested");
        for part in ["content", "reasoning_content"] {
            assert_eq!(joined(&chunks, part), message["message"][part].as_str().unwrap_or(""), "{part}");
        }
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], message["finish_reason"]);
    }
}

#[tokio::test]
async fn tool_call_has_name_and_arguments() {
    let server = Server::saying(CALLS).await;
    let body = with(question(), tools());
    insta::assert_json_snapshot!("tool_call", stable(server.ask(CHAT, &body).await));

    let chunks = server.stream(CHAT, &body).await;
    check_stream(&chunks);
    let calls: Vec<_> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0).cloned()).collect();
    assert!(calls.iter().all(|call| call["index"] == 0));
    assert_eq!(calls[0]["function"], json!({"name": "get_weather", "arguments": ""}));
    assert_eq!(calls[0]["type"], "function");
    assert!(calls[0]["id"].as_str().is_some_and(|id| !id.is_empty()));
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Paris", "days": 3}));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn parallel_tool_calls_limits_calls() {
    const TWICE: &str = "</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n\
                         </function>\n</tool_call>";
    let server = Server::saying(TWICE).await;
    let function = |name| json!({"type": "function", "function": {"name": name}});
    let body = with(question(), json!({"tools": [function("f"), function("g")]}));
    let count = async |more| {
        let choice = server.ask(CHAT, &with(body.clone(), more)).await["choices"][0].clone();
        let calls = choice["message"]["tool_calls"].as_array().map_or(0, Vec::len);
        (calls, choice["finish_reason"].as_str().unwrap().to_owned())
    };
    assert_eq!(count(json!({})).await, (2, "tool_calls".into()));
    assert_eq!(count(json!({"parallel_tool_calls": false})).await, (1, "tool_calls".into()));
    // When a token is forbidden, the mock starts its answer again. This repeats until the context is full.
    assert_eq!(count(json!({"tool_choice": "none"})).await, (0, "length".into()));
}

#[tokio::test]
async fn tool_choice_none_keeps_the_prompt() {
    let server = Server::saying(THINKS).await;
    let body = with(with(question(), tools()), json!({"max_tokens": 1}));
    let prompt_tokens =
        async |more| server.ask(CHAT, &with(body.clone(), more)).await["usage"]["prompt_tokens"].clone();
    assert_eq!(prompt_tokens(json!({"tool_choice": "none"})).await, prompt_tokens(json!({})).await);
}

#[tokio::test]
async fn stop_string_does_not_end_the_reasoning() {
    let server = Server::saying(THINKS).await;
    for (stop, content) in [
        (json!("= 1"), "12 + 7 "),
        (json!([" 7", "12 +"]), ""),
        (json!("19"), "12 + 7 = "),
        (json!("none of it"), "12 + 7 = 19."),
        (json!(["", "9."]), "12 + 7 = 1"),
    ] {
        let body = with(question(), json!({"stop": stop}));
        let answer = server.ask(CHAT, &body).await;
        assert_eq!(answer["choices"][0]["message"]["content"], content, "{stop}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "I need to compute 12 + 7. That is 19.");
        let chunks = server.stream(CHAT, &body).await;
        assert_eq!(joined(&chunks, "content"), content, "{stop}");
    }
}

#[tokio::test]
async fn partial_stop_string_is_sent_at_end() {
    let server = Server::saying(THINKS).await;
    for limit in 1..50 {
        let plain = with(question(), json!({"max_tokens": limit}));
        let stopped = with(plain.clone(), json!({"stop": ["12 + 7 = 19!", "= 19?"]}));
        let [plain, stopped] = [server.ask(CHAT, &plain).await, server.ask(CHAT, &stopped).await];
        assert_eq!(stopped["choices"], plain["choices"], "{limit} tokens");
    }
}

#[tokio::test]
async fn stop_string_stops_the_engine() {
    let server = Setup { says: Some(LONG), stops_at: 0, ..Setup::default() }.start().await;
    let body = with(question(), json!({"stop": "five"}));
    let answer = server.evaluate_slowly(Duration::from_millis(2), server.ask(CHAT, &body)).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "one two three four ");
    server.resume();
    server.idle().await;
    assert!(server.evaluated() < 60, "{} tokens were evaluated", server.evaluated());
}

const LONG: &str = "</think>\n\none two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
                    sixteen seventeen eighteen nineteen twenty and again one two three four five six seven eight nine ten \
                    eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty, and that is all.";

#[tokio::test]
async fn max_tokens_finishes_with_length() {
    let server = Server::saying(THINKS).await;
    for limit in [json!({"max_tokens": 5}), json!({"max_completion_tokens": 5, "max_tokens": 50})] {
        let answer = server.ask(CHAT, &with(question(), limit)).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 5);
        assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 5);
    }
    let small = Setup { says: Some(LONG), context: 40, ..Setup::default() }.start().await;
    let answer = small.ask(CHAT, &with(question(), json!({"max_tokens": 10_000}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(answer["usage"]["total_tokens"].as_u64().unwrap() <= 41);
}

#[tokio::test]
async fn server_limits_apply_unless_requested() {
    let limits = RequestLimits { max_tokens: Some(9), thinking_budget: Some(4), ..RequestLimits::default() };
    let server = Setup { says: Some(THINKS), limits, ..Setup::default() }.start().await;
    let counts = async |more: Value| {
        let usage = server.ask(CHAT, &with(question(), more)).await["usage"].clone();
        let reasoning = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
        (usage["completion_tokens"].as_u64().unwrap(), reasoning)
    };
    let (tokens, reasoning) = counts(json!({})).await;
    assert!(tokens == 9 && reasoning < 9, "{tokens} {reasoning}");
    assert_eq!(counts(json!({"max_tokens": 3})).await.0, 3);
    assert!(counts(json!({"max_tokens": -1})).await.0 > 9, "-1 means no limit");
    assert!(counts(json!({"thinking_budget": 500})).await.1 > reasoning, "a request sets its own budget");
}

#[tokio::test]
async fn logprobs_list_only_content_tokens() {
    let says = "Hm.\n</think>\n\nLet 🦀 look.\n\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>";
    let server = Server::saying(says).await;
    let body = with(with(question(), tools()), json!({"logprobs": true, "top_logprobs": 3}));
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Let 🦀 look.");
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8))
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap().trim_end(), "Let 🦀 look.");
    for entry in &entries {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(top[0]["token"], entry["token"], "greedy sampling takes the most likely token");
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
    }
    let chunks = server.stream(CHAT, &body).await;
    let streamed: Vec<Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, entries);

    let plain = server.ask(CHAT, &with(question(), json!({"logprobs": true}))).await;
    assert_eq!(plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn request_overrides_server_thinking_setting() {
    let prompt_tokens = async |server: &Server, more: Value| {
        let body = with(with(question(), json!({"max_tokens": 1})), more);
        server.ask(CHAT, &body).await["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let server = Server::saying("Hello.").await;
    let thinks = prompt_tokens(&server, json!({})).await;
    let silent = prompt_tokens(&server, json!({"chat_template_kwargs": {"enable_thinking": false}})).await;
    assert!(silent > thinks, "the template closes the reasoning in the prompt");
    assert_eq!(prompt_tokens(&server, json!({"enable_thinking": false})).await, silent);
    let off = Setup { says: Some("Hello."), thinking: Some(false), ..Setup::default() }.start().await;
    assert_eq!(prompt_tokens(&off, json!({})).await, silent);
    assert_eq!(prompt_tokens(&off, json!({"enable_thinking": true})).await, thinks);
    let answer = off.ask(CHAT, &question()).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello.");
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
}

#[tokio::test]
async fn model_failure_is_reported_and_degrades_health() {
    let server = Setup { says: Some(THINKS), fails_on: Some(" compute"), ..Setup::default() }.start().await;
    let error = server.refused(CHAT, &question(), 500).await;
    assert!(error["message"].as_str().unwrap().contains("test error on token"), "{error}");

    let chunks = server.events(CHAT, &question()).await;
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["error"]["type"], "server_error");
    assert!(joined(before, "reasoning_content").starts_with("I need to"));
    assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));

    let health = server.get("/health").await;
    assert_eq!(health.status, 503);
    let health = health.json().await;
    assert_eq!(health["status"], "degraded");
    assert!(health["reason"].as_str().unwrap().contains("test error on token"), "{health}");
    // A request that only evaluates its prompt succeeds, after which the server is healthy again.
    let prompt = json!({"prompt": "Hello", "max_tokens": 0, "echo": true});
    assert_eq!(server.post(COMPLETIONS, &prompt).await.status, 200);
    assert_eq!(server.get("/health").await.json().await["status"], "ok");
}

#[tokio::test]
async fn call_that_ends_reasoning_is_no_reasoning() {
    const CALL: &str = "I look it up.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n\
                        </function>\n</tool_call>";
    let server = Server::saying(CALL).await;
    let answer = server.ask(CHAT, &with(question(), tools())).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    let reasoning = server.tokenizer.encode("I look it up.").unwrap().len();
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], reasoning, "{answer}");
}

/// Refuses conversations as Qwen's templates do.
const STRICT_TEMPLATE: &str = "\
{%- set found = namespace(query=false) -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{ raise_exception('A system message comes first.') }}{%- endif -%}
{%- set is_response = message.content.startswith('<tool_response>') -%}
{%- if message.role == 'user' and not is_response -%}{%- set found.query = true -%}{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if not found.query -%}{{ raise_exception('No user query found in messages.') }}{%- endif -%}";

#[tokio::test]
async fn conversation_without_user_is_answered() {
    let server = Setup { says: Some("ok"), template: Some(STRICT_TEMPLATE), ..Setup::default() }.start().await;
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let system = say("system", "Write a title.");
    let assistant = say("assistant", "Sure.");
    let tool = json!({"role": "tool", "tool_call_id": "c", "content": "r"});
    let response = say("user", "<tool_response>r</tool_response>");
    for (messages, prompt) in [
        (json!([system]), "<user>Write a title."),
        (json!([system, assistant]), "<user>Write a title.<assistant>Sure."),
        (json!([say("developer", "d"), system]), "<user>d\n\nWrite a title."),
        (json!([assistant, tool]), "<user><assistant>Sure.<tool>r"),
        (json!([assistant, response]), "<user><assistant>Sure.<user><tool_response>r"),
        (json!([system, say("user", "u")]), "<system>Write a title.<user>u"),
    ] {
        let rendered = server.prompt(&json!({"messages": messages})).await;
        assert!(rendered.starts_with(prompt), "{rendered}");
        server.ask(CHAT, &json!({"messages": messages, "max_tokens": 1})).await;
    }
    let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
    let result = json!([{"type": "tool_result", "tool_use_id": "t", "content": "r"}]);
    let messages = json!([{"role": "assistant", "content": call}, {"role": "user", "content": result}]);
    let body = json!({"system": "s", "max_tokens": 1, "messages": messages});
    server.ask(MESSAGES, &body).await;
    let body = json!({"input": [{"role": "developer", "content": "d"}], "max_output_tokens": 1});
    server.ask(RESPONSES, &body).await;
}
