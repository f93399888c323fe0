//! Tests of `/v1/messages` and `/v1/messages/count_tokens`.

use super::server::{
    CALLS, CHAT, MESSAGES, STRAY, Server, Setup, THINKS, chat, chat_after_calls, frequent_events, with,
};
use serde_json::{Value, json};
use std::time::Duration;

/// The path of the count of tokens.
const COUNT: &str = "/v1/messages/count_tokens";

fn question() -> Value {
    json!({"model": "mock", "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024},
           "messages": [{"role": "user", "content": "What is 12+7?"}]})
}

fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    json!({"tools": [{"name": "get_weather", "input_schema": {"type": "object", "properties": properties}}]})
}

/// Accumulates the events of a stream into a message, as Anthropic's SDKs do.
fn accumulate(events: &[Value]) -> Value {
    assert_eq!(events[0]["type"], "message_start");
    let mut message = events[0]["message"].clone();
    let mut json = String::new();
    for event in &events[1..] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "ping" => {}
            "content_block_start" => {
                assert_eq!(event["index"], content.len());
                content.push(event["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => {
                assert_eq!(event["index"], content.len() - 1);
                let (block, delta) = (content.last_mut().unwrap(), &event["delta"]);
                let mut add = |field: &str| {
                    let joined = block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap();
                    block[field] = joined.into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add("text"),
                    "thinking_delta" => add("thinking"),
                    "signature_delta" => add("signature"),
                    "input_json_delta" => json += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert_eq!(event["index"], content.len() - 1);
                let block = content.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&json).unwrap();
                }
            }
            "message_delta" => {
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = event["delta"][field].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    let last: Vec<_> = events[events.len() - 2..].iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(last, ["message_delta", "message_stop"]);
    message
}

/// The call in a message.
fn called(message: &Value) -> &Value {
    message["content"].as_array().unwrap().iter().find(|block| block["type"] == "tool_use").unwrap()
}

fn without_ids(mut message: Value) -> Value {
    message["id"] = "ID".into();
    for block in message["content"].as_array_mut().unwrap() {
        if block.get("id").is_some() {
            block["id"] = "ID".into();
        }
    }
    message
}

#[tokio::test]
async fn body_has_content_blocks() {
    let server = Server::saying(THINKS).await;
    let answer = server.ask(MESSAGES, &question()).await;
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    let answer = without_ids(answer);
    let (input, output) = (&answer["usage"]["input_tokens"], &answer["usage"]["output_tokens"]);
    let thinking = &answer["usage"]["output_tokens_details"]["thinking_tokens"];
    assert!(input.as_u64() > Some(0) && thinking.as_u64() > Some(0) && output.as_u64() > thinking.as_u64());
    let expected = json!({
        "id": "ID", "type": "message", "role": "assistant", "model": "mock",
        "content": [
            {"type": "thinking", "thinking": "12 + 7 is 19.", "signature": "moestro"},
            {"type": "text", "text": "12 + 7 = 19."},
        ],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
                  "output_tokens": output, "output_tokens_details": {"thinking_tokens": thinking},
                  "service_tier": "standard"},
    });
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn accumulated_stream_equals_body() {
    for (says, stop) in [(THINKS, "end_turn"), (CALLS, "tool_use"), (STRAY, "tool_use"), ("", "end_turn")] {
        let server = Server::saying(says).await;
        let body = with(question(), tools());
        let mut whole = without_ids(server.ask(MESSAGES, &body).await);
        let mut streamed = without_ids(accumulate(&server.events(MESSAGES, &body).await));
        // The second request finds the prompt in the cache.
        for message in [&mut whole, &mut streamed] {
            let input = message["usage"]["input_tokens"].as_u64().unwrap();
            let cached = message["usage"]["cache_read_input_tokens"].as_u64().unwrap();
            message["usage"] = json!({"input": input + cached, "output": message["usage"]["output_tokens"]});
        }
        assert_eq!(streamed, whole);
        assert_eq!(whole["stop_reason"], stop);
    }
}

#[tokio::test]
async fn tool_result_continues_the_conversation() {
    let server = Server::saying(CALLS).await;
    let body = with(question(), tools());
    let answer = server.ask(MESSAGES, &body).await;
    let call = answer["content"][2].clone();
    assert_eq!(call["type"], "tool_use");
    assert_eq!(call["input"], json!({"city": "Paris", "days": 3}));

    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": "sunny", "is_error": false});
    let mut next = body.clone();
    let turns = next["messages"].as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": answer["content"]}));
    turns.push(json!({"role": "user", "content": [result]}));
    assert_eq!(server.post(MESSAGES, &next).await.status, 200);

    // The same conversation in OpenAI's format has the same prompt.
    let chat = chat_after_calls(&body["tools"][0]["input_schema"]);
    let counted = server.ask(COUNT, &next).await["input_tokens"].clone();
    assert_eq!(counted, server.ask("/tokenize", &chat).await["count"]);
}

#[tokio::test]
async fn stop_reason_names_the_cause() {
    let server = Server::saying(THINKS).await;
    let ended = async |more: Value| {
        let answer = server.ask(MESSAGES, &with(question(), more)).await;
        (answer["stop_reason"].as_str().unwrap().to_owned(), answer["stop_sequence"].clone())
    };
    assert_eq!(ended(json!({})).await, ("end_turn".into(), Value::Null));
    assert_eq!(ended(json!({"max_tokens": 3})).await, ("max_tokens".into(), Value::Null));
    assert_eq!(ended(json!({"stop_sequences": ["x", "= 1"]})).await, ("stop_sequence".into(), json!("= 1")));
}

#[tokio::test]
async fn thinking_is_off_unless_requested() {
    let server = Server::saying("Hello.").await;
    let mut body = question();
    let thinks = server.ask(COUNT, &body).await["input_tokens"].as_u64().unwrap();
    body.as_object_mut().unwrap().remove("thinking");
    let answer = server.ask(MESSAGES, &body).await;
    // Anthropic's API does not think by default.
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Hello."}]));
    assert!(answer["usage"]["input_tokens"].as_u64().unwrap() > thinks, "the template closes the reasoning");
}

#[tokio::test]
async fn omitted_thinking_is_only_in_the_signature() {
    let server = Server::saying(THINKS).await;
    let display = |display: &str| {
        with(question(), json!({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": display}}))
    };
    let whole = server.ask(MESSAGES, &display("summarized")).await;
    assert_eq!(whole["content"][0]["thinking"], "12 + 7 is 19.");
    let body = server.ask(MESSAGES, &display("omitted")).await;
    let events = server.events(MESSAGES, &display("omitted")).await;
    assert!(!json!([body, events]).to_string().contains("12 + 7 is 19."), "{events:?}");
    assert!(!events.iter().any(|event| event["delta"]["type"] == "thinking_delta"), "{events:?}");
    assert_eq!(without_ids(accumulate(&events)), without_ids(body.clone()));
    assert_eq!((&body["content"][0]["thinking"], &body["content"][1]), (&json!(""), &whole["content"][1]));
    // The client sends the block back, and the prompt is that of the whole thinking.
    let count = async |answer: &Value| {
        let result = json!([{"type": "tool_result", "tool_use_id": "t", "content": "r"}]);
        let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": answer["content"]},
                              {"role": "user", "content": result}]);
        server.ask(COUNT, &json!({"messages": messages})).await["input_tokens"].as_u64().unwrap()
    };
    let kept = count(&body).await;
    assert_eq!(kept, count(&whole).await);
    let mut without = body;
    without["content"][0]["signature"] = "x".into();
    assert!(count(&without).await < kept);
    let refused = server.post(MESSAGES, &display("hidden")).await;
    assert!(refused.status == 400 && refused.text().await.contains("thinking.display"));
}

#[tokio::test]
async fn counting_checks_the_whole_request() {
    let server = Server::saying("Hello.").await;
    for (more, field) in [
        (json!({"tool_choice": {"type": "tool", "name": "none"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "sometimes"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
        (json!({"output_format": {"type": "json_schema"}}), "output_config.format.schema"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema"),
        (json!({"output_config": {"effort": "much"}}), "output_config.effort"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": -1}}), "thinking.budget_tokens"),
        (json!({"stop_sequences": vec!["a"; 17]}), "stop_sequences"),
        (
            with(strict_tool(json!({"type": "strnig"})), json!({"tool_choice": {"type": "any"}})),
            "tools[0].input_schema.properties.a.type",
        ),
        (json!({"temperature": 9}), "temperature"),
        (json!({"top_k": -2}), "top_k"),
        (format_with(json!({"not": {"type": "string"}})), "output_config.format.schema.properties.a.not"),
        (format_with(json!({"type": "text"})), "output_config.format.schema.properties.a.type"),
        (format_with(json!({"$ref": "#/$defs/none"})), "output_config.format.schema.properties.a.$ref"),
        (strict_tool(json!({"not": {"type": "string"}})), "tools[0].input_schema.properties.a.not"),
        (strict_tool(json!({"$ref": "#/$defs/none"})), "tools[0].input_schema.properties.a.$ref"),
    ] {
        let body = with(with(chat("x"), json!({"max_tokens": 5})), more);
        for path in [COUNT, MESSAGES] {
            let error = server.refused(path, &body, 400).await;
            assert!(error["message"].as_str().unwrap().starts_with(field), "{path}: {body}: {error}");
            server.memory_is_free().await;
        }
    }
}

/// The format of an object with a property of this schema.
fn format_with(schema: Value) -> Value {
    let schema = json!({"type": "object", "properties": {"a": schema}});
    json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}})
}

/// A strict tool with a property of this schema.
fn strict_tool(schema: Value) -> Value {
    let schema = json!({"type": "object", "properties": {"a": schema}});
    json!({"tools": [{"name": "f", "strict": true, "input_schema": schema}]})
}

#[tokio::test]
async fn billing_header_is_not_in_the_prompt() {
    let server = Server::saying("Hello.").await;
    let count = async |header: &str| {
        let system = json!([{"type": "text", "text": header}, {"type": "text", "text": "Be kind."}]);
        let body = with(question(), json!({"system": system}));
        server.ask(COUNT, &body).await["input_tokens"].as_u64().unwrap()
    };
    let first = count("x-anthropic-billing-header: cc_version=2.1; cch=1;").await;
    assert_eq!(first, count("x-anthropic-billing-header: cc_version=2.1; cch=1234567890;").await);
    assert!(first < count("X-Billing: cch=1;").await);
}

#[tokio::test]
async fn errors_have_anthropic_format() {
    let setup = Setup { says: Some(THINKS), api_key: Some("secret"), fails_on: Some(" 19"), ..Setup::default() };
    let server = setup.start().await;
    let key = ("x-api-key", "secret");
    let refused = async |method: &str, path: &str, headers: &[(&str, &str)], body: Value| {
        let answer = server.send(method, path, headers, Some(body.to_string().as_bytes())).await;
        assert!(answer.header("request-id").is_some());
        let status = answer.status;
        let body = answer.json().await;
        assert_eq!(body["type"], "error");
        assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
        (status, body["error"]["type"].as_str().unwrap().to_owned())
    };
    let invalid = (400, "invalid_request_error".to_owned());
    assert_eq!(refused("POST", MESSAGES, &[key], chat("Hi")).await, invalid);
    assert_eq!(refused("POST", MESSAGES, &[key], json!([])).await, invalid);
    assert_eq!(refused("POST", MESSAGES, &[key], with(question(), json!({"max_tokens": 0}))).await, invalid);
    assert_eq!(refused("POST", MESSAGES, &[key], with(question(), json!({"temperature": "hot"}))).await, invalid);
    assert_eq!(refused("POST", MESSAGES, &[], question()).await, (401, "authentication_error".into()));
    assert_eq!(refused("GET", MESSAGES, &[key], question()).await.0, 405);
    let missing = (404, "not_found_error".to_owned());
    assert_eq!(refused("POST", "/v1/messages/batches", &[key], question()).await, missing);
    let client = [key, ("anthropic-version", "2023-06-01")];
    assert_eq!(refused("GET", "/v1/files", &client, json!({})).await, missing);
    assert_eq!(refused("GET", "/v1/models/other/model", &client, json!({})).await, missing);
    assert_eq!(refused("POST", MESSAGES, &[key], question()).await, (500, "api_error".into()));

    let body = with(question(), json!({"stream": true})).to_string();
    let text = server.send("POST", MESSAGES, &[key], Some(body.as_bytes())).await.text().await;
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.starts_with("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\""), "{last}");
    assert!(!text.contains("message_stop"));
}

/// Claude Code closes a stream after 300 s without an event. Claude Code does not count comments and pings as events.
#[tokio::test]
async fn slow_prompt_sends_empty_deltas() {
    // One chunk takes longer than the interval of events, or several chunks together do.
    for (delay, words) in [(20, 1), (2, 160)] {
        let delay = Duration::from_millis(delay);
        let setup = Setup { says: Some(THINKS), stops_at: 0, configure: frequent_events, ..Setup::default() };
        let server = setup.start().await;
        let body = with(with(question(), chat(&"word ".repeat(words))), json!({"max_tokens": 1}));
        let events = server.evaluate_slowly(delay, server.events(MESSAGES, &body)).await;
        let is_empty = |event: &Value| event["delta"]["type"] == "thinking_delta" && event["delta"]["thinking"] == "";
        assert!(events.iter().any(is_empty), "{delay:?}: {events:?}");
        assert_eq!(accumulate(&events)["content"][0]["type"], "thinking");
    }
}

#[tokio::test]
async fn long_argument_sends_empty_deltas() {
    let (server, list) = Server::calling_with_long_list().await;
    let schema = json!({"type": "object", "properties": {"list": {"type": "array"}}});
    let tools = json!({"tools": [{"name": "f", "input_schema": schema}]});
    let body = with(question(), tools);
    let events = server.evaluate_slowly(Duration::from_millis(5), server.events(MESSAGES, &body)).await;
    let is_empty =
        |event: &&Value| event["delta"]["type"] == "input_json_delta" && event["delta"]["partial_json"] == "";
    assert!(events.iter().filter(is_empty).count() > 1, "{events:?}");
    assert_eq!(called(&accumulate(&events))["input"], json!({"list": list}));
}

/// A grammar allows tags that the reader otherwise takes for misspelt ones.
#[tokio::test]
async fn strict_text_may_have_misspelt_tags() {
    let text = "x\n</param>\n<parameter name=\"b\">\ny";
    let says = "</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</param>\n<parameter name=\"b\">\ny\n\
                </parameter>\n</function>\n</tool_call>";
    let server = Server::saying(says).await;
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]});
    for (strict, input) in [(false, json!({"a": "x", "b": "y"})), (true, json!({"a": text}))] {
        let tools = json!({"tools": [{"name": "f", "input_schema": schema, "strict": strict}]});
        let answer = server.ask(MESSAGES, &with(question(), tools)).await;
        assert_eq!(called(&answer)["input"], input, "strict: {strict}");
    }
}

#[tokio::test]
async fn huge_number_keeps_its_digits() {
    const BIG: &str = "</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=days>\n1e999\n</parameter>\n\
                       </function>\n</tool_call>";
    let server = Server::saying(BIG).await;
    let answer = server.ask(MESSAGES, &with(question(), tools())).await;
    assert_eq!(answer["content"][0]["input"], json!({"days": "1e999"}));
    let chat = json!({"messages": question()["messages"], "tools": [{"type": "function", "function": {
        "name": "get_weather", "parameters": tools()["tools"][0]["input_schema"]}}]});
    let message = server.ask(CHAT, &chat).await["choices"][0]["message"].clone();
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"days\":1e999}");
    // A client can send the message back to the server.
    let mut next = chat;
    next["messages"].as_array_mut().unwrap().push(message);
    server.ask(CHAT, &next).await;
}

/// The tool runners of Anthropic's SDKs read the details and then send the whole conversation.
#[tokio::test]
async fn thread_is_refused_with_details() {
    let server = Server::saying("</think>\n\nHello.").await;
    for stream in [false, true] {
        let body = with(question(), json!({"thread": {"type": "create"}, "stream": stream}));
        let answer = server.post(MESSAGES, &body).await;
        assert_eq!(answer.status, 400);
        let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        assert_eq!(answer.json().await["error"]["details"], details);
    }
    let other = server.post(MESSAGES, &with(question(), json!({"container": "x"}))).await.json().await;
    assert_eq!(other["error"]["details"], Value::Null);
}
