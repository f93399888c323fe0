//! Tests of `/v1/responses`.

use super::{
    client::events,
    server::{
        CALLS, CHAT, RESPONSES, STRAY, Server, Setup, THINKS, chat, chat_after_calls, frequent_events, little_memory,
        with,
    },
};
use serde_json::{Value, json};
use std::time::Duration;

fn question() -> Value {
    json!({"model": "mock", "input": "What is 12+7?"})
}

fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let parameters = json!({"type": "object", "properties": properties});
    json!({"tools": [{"type": "function", "name": "get_weather", "parameters": parameters}]})
}

/// Reads the events of a stream. Checks that their numbers start at 0.
async fn stream(server: &Server, body: &Value) -> Vec<Value> {
    let events = server.events(RESPONSES, body).await;
    assert!(events.iter().enumerate().all(|(number, event)| event["sequence_number"] == number), "{events:?}");
    events
}

/// The call in a response.
fn called(response: &Value) -> &Value {
    response["output"].as_array().unwrap().iter().find(|item| item["type"] == "function_call").unwrap()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

/// Removes ids, times and usage, which differ between runs.
fn stable(mut response: Value) -> Value {
    for name in ["id", "created_at", "completed_at", "usage"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item.get("call_id").is_some() {
            item["call_id"] = Value::Null;
        }
    }
    response
}

#[tokio::test]
async fn body_has_output_items() {
    let server = Server::saying(THINKS).await;
    let answer = server.ask(RESPONSES, &with(question(), json!({"metadata": {"a": "b"}, "temperature": 0.5}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    for time in ["created_at", "completed_at"] {
        assert!((now - 60..=now).contains(&answer[time].as_u64().unwrap()), "{time} of {answer}");
    }
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&answer["metadata"], &answer["temperature"]), (&json!({"a": "b"}), &json!(0.5)));
    let output = answer["output"].as_array().unwrap();
    assert_eq!(output.len(), 2);
    assert_eq!(output[0]["type"], "reasoning");
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "12 + 7 is 19."}]));
    assert_eq!(output[0]["summary"], json!([]));
    assert_eq!((&output[1]["type"], &output[1]["status"]), (&json!("message"), &json!("completed")));
    let text = json!({"type": "output_text", "text": "12 + 7 = 19.", "annotations": [], "logprobs": []});
    assert_eq!(output[1]["content"], json!([text]));
    let usage = &answer["usage"];
    let sum = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    assert!(usage["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
}

/// The log-probabilities are those of a chat.
#[tokio::test]
async fn logprobs_are_those_of_a_chat() {
    let server = Server::saying(THINKS).await;
    let body = with(chat("What is 12+7?"), json!({"logprobs": true, "top_logprobs": 2}));
    let chat = server.ask(CHAT, &body).await;
    let listed = |entries: &Value| -> Vec<(Value, f32)> {
        let entries = entries.as_array().unwrap();
        entries.iter().map(|entry| (entry["token"].clone(), entry["logprob"].as_f64().unwrap() as f32)).collect()
    };
    let expected = listed(&chat["choices"][0]["logprobs"]["content"]);
    let body = with(question(), json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}));
    let answer = server.ask(RESPONSES, &body).await;
    let message = |response: &Value| {
        let output = response["output"].as_array().unwrap();
        output.iter().find(|item| item["type"] == "message").unwrap()["content"][0].clone()
    };
    let part = message(&answer);
    assert_eq!((&answer["top_logprobs"], listed(&part["logprobs"])), (&json!(2), expected.clone()));
    assert!(expected.len() > 1);
    for entry in part["logprobs"].as_array().unwrap() {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(entry["bytes"].is_array() && entry["top_logprobs"][1]["logprob"].is_f64(), "{entry}");
    }
    let events = stream(&server, &body).await;
    let of = |kind: &str| -> Vec<Value> { events.iter().filter(|event| event["type"] == kind).cloned().collect() };
    let deltas: Vec<_> = of("response.output_text.delta").iter().flat_map(|event| listed(&event["logprobs"])).collect();
    assert_eq!(deltas, expected);
    assert_eq!(of("response.output_text.done")[0]["logprobs"], part["logprobs"]);
    assert_eq!(message(&events.last().unwrap()["response"]), part);
    let parts: Vec<_> = of("response.content_part.done").iter().map(|event| event["part"].clone()).collect();
    assert!(parts.contains(&part), "{parts:?}");
}

/// A stream keeps its log-probabilities for its last event.
#[tokio::test]
async fn logprobs_count_as_memory() {
    let says = format!("</think>\n\n{}", "word ".repeat(300)).leak();
    let server = Setup { says: Some(says), configure: little_memory, ..Setup::default() }.start().await;
    let body = |tokens: usize| {
        let include = json!(["message.output_text.logprobs"]);
        with(question(), json!({"include": include, "top_logprobs": 20, "max_output_tokens": tokens}))
    };
    assert_eq!(server.refused(RESPONSES, &body(400), 413).await["code"], "request_too_large");
    for (tokens, last) in [(400, "response.failed"), (8, "response.incomplete")] {
        server.memory_is_free().await;
        assert_eq!(stream(&server, &body(tokens)).await.last().unwrap()["type"], last);
    }
    server.idle().await;
}

#[tokio::test]
async fn events_have_the_documented_order() {
    let server = Server::saying(CALLS).await;
    let events = stream(&server, &with(question(), tools())).await;
    let expected = "created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done \
        content_part.done output_item.done output_item.added content_part.added output_text.delta output_text.done \
        content_part.done output_item.done output_item.added function_call_arguments.delta \
        function_call_arguments.done output_item.done completed";
    let expected: Vec<_> = expected.split(' ').map(|kind| format!("response.{kind}")).collect();
    assert_eq!(kinds(&events), expected);
    let parts: Vec<_> =
        events.iter().filter(|event| event.get("part").is_some()).map(|event| &event["part"]["type"]).collect();
    assert_eq!(parts, ["reasoning_text", "reasoning_text", "output_text", "output_text"]);
    let texts = events.iter().filter(|event| event["type"] == "response.output_text.delta").count();
    assert!(texts > 1, "text must be streamed: {texts}");
    for (index, kind) in ["reasoning", "message", "function_call"].iter().enumerate() {
        let of: Vec<_> = events.iter().filter(|event| event["output_index"] == index).collect();
        assert_eq!((&of[0]["item"]["type"], &of[0]["item"]["status"]), (&json!(kind), &json!("in_progress")));
        let id = &of[0]["item"]["id"];
        assert!(of.iter().all(|event| event.get("item_id").is_none_or(|other| other == id)));
        let deltas: String = of.iter().filter_map(|event| event["delta"].as_str()).collect();
        let last = &of.last().unwrap()["item"];
        let text = last["content"][0]["text"].as_str().or(last["arguments"].as_str());
        assert_eq!(Some(deltas.as_str()), text);
        assert_eq!(*last, events.last().unwrap()["response"]["output"][index]);
    }
}

#[tokio::test]
async fn last_event_contains_the_body() {
    for says in [THINKS, CALLS, STRAY, ""] {
        let server = Server::saying(says).await;
        for more in [json!({}), json!({"reasoning": {"summary": "auto"}}), json!({"max_output_tokens": 5})] {
            let body = with(with(question(), tools()), more);
            let whole = stable(server.ask(RESPONSES, &body).await);
            let events = stream(&server, &body).await;
            assert_eq!(stable(events.last().unwrap()["response"].clone()), whole);
        }
    }
}

#[tokio::test]
async fn max_output_tokens_leaves_response_incomplete() {
    let server = Server::saying(THINKS).await;
    let body = with(question(), json!({"max_output_tokens": 3}));
    let answer = server.ask(RESPONSES, &body).await;
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(kinds(&stream(&server, &body).await).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn encrypted_reasoning_can_be_sent_back() {
    let server = Server::saying(THINKS).await;
    let fields = json!({"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": false});
    let events = stream(&server, &with(question(), fields)).await;
    assert!(kinds(&events).contains(&"response.reasoning_summary_text.delta"));
    assert!(!kinds(&events).contains(&"response.reasoning_text.delta"));
    let item = events.last().unwrap()["response"]["output"][0].clone();
    assert_eq!(item["summary"], json!([{"type": "summary_text", "text": "12 + 7 is 19."}]));

    // A client that keeps only the encrypted content sends the reasoning back in this form.
    let reasoning =
        json!({"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]});
    let call = json!({"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "1", "output": "sunny"});
    let count = async |items: Vec<Value>| {
        let body = with(with(question(), tools()), json!({"input": items}));
        server.ask(RESPONSES, &body).await["usage"]["input_tokens"].as_u64().unwrap()
    };
    let user = json!({"role": "user", "content": "Hi"});
    let with_reasoning = count(vec![user.clone(), reasoning, call.clone(), output.clone()]).await;
    assert!(with_reasoning > count(vec![user, call, output]).await);
}

#[tokio::test]
async fn response_continues_a_stored_response() {
    let server = Server::saying(CALLS).await;
    let first = server.ask(RESPONSES, &with(question(), tools())).await;
    let call = called(&first);
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"});

    let next = with(tools(), json!({"previous_response_id": first["id"], "input": [output]}));
    let second = server.ask(RESPONSES, &next).await;
    assert_eq!(second["previous_response_id"], first["id"]);

    // The prompt must be the same as if all items were sent again.
    let mut items = vec![json!({"role": "user", "content": "What is 12+7?"})];
    items.extend(first["output"].as_array().unwrap().clone());
    items.push(output.clone());
    let again = server.ask(RESPONSES, &with(tools(), json!({"input": items, "store": false}))).await;
    assert_eq!(again["usage"]["input_tokens"], second["usage"]["input_tokens"]);

    // The prompt must be the same as the prompt of this conversation in chat completions.
    let chat = chat_after_calls(&tools()["tools"][0]["parameters"]);
    assert_eq!(server.ask("/tokenize", &chat).await["count"], second["usage"]["input_tokens"]);

    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.json().await, first);
    assert_eq!(server.send("DELETE", &path, &[], None).await.json().await["deleted"], true);
    assert_eq!(server.get(&path).await.status, 404);
    assert_eq!(server.send("DELETE", &path, &[], None).await.status, 404);
    assert_eq!(server.refused(RESPONSES, &next, 404).await["param"], "previous_response_id");
    let not_stored = format!("{RESPONSES}/{}", again["id"].as_str().unwrap());
    assert_eq!(server.get(&not_stored).await.status, 404, "the request has store: false");
}

#[tokio::test]
async fn input_tokens_are_those_of_the_response() {
    let server = Server::saying(THINKS).await;
    let first = server.ask(RESPONSES, &question()).await;
    let next = json!({"previous_response_id": first["id"], "input": "And 3+4?", "instructions": "Be brief."});
    for body in [
        question(),
        with(question(), tools()),
        with(question(), json!({"reasoning": {"effort": "none"}})),
        next.clone(),
    ] {
        let counted = server.ask("/v1/responses/input_tokens", &body).await;
        let used = &server.ask(RESPONSES, &body).await["usage"]["input_tokens"];
        assert_eq!(counted, json!({"object": "response.input_tokens", "input_tokens": used}), "{body}");
    }
    for (more, param) in [
        (json!({"input": 5}), "input"),
        (json!({"tool_choice": {"type": "function", "name": "none"}}), "tool_choice.name"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"name": "n"}}}), "text.format.type"),
        (json!({"text": {"format": "json"}}), "text.format"),
        (json!({"temperature": 9}), "temperature"),
        (json!({"tool_choice": 5}), "tool_choice"),
        (json!({"tool_choice": []}), "tool_choice"),
        (json!({"tool_choice": false}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": 5}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}}), "tool_choice.tools"),
        (json!({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}}), "tool_choice.tools"),
        (with_schema(json!({"not": {"type": "string"}})), "text.format.schema.properties.a.not"),
        (with_schema(json!({"type": "text"})), "text.format.schema.properties.a.type"),
        (with_schema(json!({"$ref": "#/$defs/none"})), "text.format.schema.properties.a.$ref"),
        (strict_tool(json!({"not": {"type": "string"}})), "tools[0].parameters.properties.a.not"),
        (strict_tool(json!({"$ref": "#/$defs/none"})), "tools[0].parameters.properties.a.$ref"),
    ] {
        for path in ["/v1/responses/input_tokens", RESPONSES] {
            let body = with(question(), more.clone());
            let error = server.refused(path, &body, 400).await;
            assert_eq!(error["param"], param, "{path}: {body}");
            let message = error["message"].as_str().unwrap();
            assert!(["response_format", ".function"].iter().all(|name| !message.contains(name)), "{path}: {error}");
        }
    }
}

/// The strict format of an object with a property of this schema.
fn with_schema(schema: Value) -> Value {
    let schema = json!({"type": "object", "properties": {"a": schema}});
    json!({"text": {"format": {"type": "json_schema", "name": "n", "strict": true, "schema": schema}}})
}

/// A strict tool with a property of this schema.
fn strict_tool(schema: Value) -> Value {
    let schema = json!({"type": "object", "properties": {"a": schema}});
    json!({"tools": [{"type": "function", "name": "f", "strict": true, "parameters": schema}]})
}

#[tokio::test]
async fn stored_response_can_be_streamed() {
    let server = Server::saying(CALLS).await;
    let summarized = json!({"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]});
    for body in [
        with(question(), tools()),
        with(with(question(), tools()), summarized),
        with(question(), json!({"max_output_tokens": 3})),
    ] {
        let original = stream(&server, &body).await;
        let stored = original.last().unwrap()["response"].clone();
        let path = format!("{RESPONSES}/{}", stored["id"].as_str().unwrap());
        let replayed = async |query: &str| {
            let answer = server.get(&format!("{path}?stream=true{query}")).await;
            assert_eq!(answer.header("cache-control"), Some("no-cache, no-transform"));
            events(&answer.text().await)
        };
        let all = replayed("").await;
        assert_eq!(all.last().unwrap()["response"], stored);
        let mut expected = kinds(&original);
        expected.dedup();
        assert_eq!(kinds(&all), expected);
        let numbers: Vec<_> = all.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..all.len() as u64).collect::<Vec<_>>());
        let done = |events: &[Value]| {
            let done = events.iter().filter(|event| event["type"].as_str().unwrap().ends_with(".done"));
            done.map(|event| with(event.clone(), json!({"sequence_number": 0}))).collect::<Vec<_>>()
        };
        assert_eq!(done(&all), done(&original));
        assert_eq!(replayed("&starting_after=2").await, all[3..]);
        let refused = server.get(&format!("{path}?stream=true&starting_after=x")).await;
        assert_eq!((refused.status, refused.json().await["error"]["param"].clone()), (400, json!("starting_after")));
    }
    assert_eq!(server.get(&format!("{RESPONSES}/resp_none?stream=true")).await.status, 404);
}

#[tokio::test]
async fn input_items_are_listed_by_page() {
    let server = Server::saying(THINKS).await;
    let first = server.ask(RESPONSES, &question()).await;
    let second = server.ask(RESPONSES, &json!({"previous_response_id": first["id"], "input": "And 3+4?"})).await;
    let path = format!("{RESPONSES}/{}/input_items", second["id"].as_str().unwrap());
    let list = async |query: &str| server.get(&format!("{path}?{query}")).await.json().await;
    let all = list("order=asc").await;
    let items = all["data"].as_array().unwrap();
    let output = first["output"].as_array().unwrap();
    assert_eq!((items.len(), &items[1..=output.len()]), (output.len() + 2, &output[..]));
    assert_eq!(all["has_more"], false);
    let content = json!([{"type": "input_text", "text": "And 3+4?"}]);
    let last = items.last().unwrap();
    assert_eq!((&last["type"], &last["role"], &last["content"]), (&json!("message"), &json!("user"), &content));
    // The newest item is first by default. `after` gives the rest.
    let page = list("limit=1").await;
    assert_eq!((&page["data"], &page["has_more"]), (&json!([last]), &json!(true)));
    let rest = list(&format!("after={}", page["last_id"].as_str().unwrap())).await;
    assert_eq!((&rest["data"][0], &rest["last_id"]), (&items[items.len() - 2], &items[0]["id"]));
    for (path, status) in [
        (format!("{path}?limit=0"), 400),
        (format!("{path}?order=up"), 400),
        (format!("{path}?after=none"), 400),
        (format!("{RESPONSES}/none/input_items"), 404),
    ] {
        assert_eq!(server.get(&path).await.status, status, "{path}");
    }
}

#[tokio::test]
async fn response_continues_without_new_input() {
    let server = Server::saying(THINKS).await;
    let first = server.ask(RESPONSES, &question()).await;
    let second = server.ask(RESPONSES, &json!({"previous_response_id": first["id"]})).await;
    assert_eq!(second["status"], "completed", "{second}");
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    assert!(tokens(&second) > tokens(&first));
}

#[tokio::test]
async fn invalid_request_error_names_the_field() {
    let server = Server::saying(THINKS).await;
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [{"role": "wizard", "content": "Hi"}]}), "input[0].role"),
        (json!({"input": [{"type": "item_reference", "id": "msg_0"}]}), "input[0]"),
        (json!({"input": "Hi", "temperature": "hot"}), "temperature"),
        (json!({"input": "Hi", "max_tokens": 5}), "max_tokens"),
        (json!({"input": "Hi", "background": true}), "background"),
        (json!({"input": "Hi", "top_logprobs": 1}), "top_logprobs"),
        (json!({"input": "Hi", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}), "top_logprobs"),
        (json!({"input": "Hi", "metadata": {"a": "x".repeat(513)}}), "metadata.a"),
    ] {
        let answer = server.post(RESPONSES, &body).await;
        assert!([400, 404].contains(&answer.status), "{body}");
        assert_eq!(answer.json().await["error"]["param"], param, "{body}");
    }
    assert_eq!(server.evaluated(), 0);
}

#[tokio::test]
async fn model_failure_ends_the_stream() {
    let server = Setup { says: Some(THINKS), fails_on: Some(" 19"), ..Setup::default() }.start().await;
    server.refused(RESPONSES, &question(), 500).await;
    let events = stream(&server, &question()).await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("test error on token"));
}

/// Codex closes a stream after 300 s without an event. Codex does not count comments as events.
#[tokio::test]
async fn slow_prompt_repeats_in_progress() {
    // One chunk takes longer than the interval of events, or several chunks together do.
    for (delay, words) in [(20, 1), (2, 160)] {
        let delay = Duration::from_millis(delay);
        let setup = Setup { says: Some(THINKS), stops_at: 0, configure: frequent_events, ..Setup::default() };
        let server = setup.start().await;
        let body = json!({"input": "word ".repeat(words), "max_output_tokens": 1});
        let events = server.evaluate_slowly(delay, stream(&server, &body)).await;
        let repeated = events.iter().filter(|event| event["type"] == "response.in_progress").count();
        assert!(repeated > 1, "{delay:?}: {:?}", kinds(&events));
        assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    }
}

#[tokio::test]
async fn long_argument_sends_empty_deltas() {
    let (server, list) = Server::calling_with_long_list().await;
    let parameters = json!({"type": "object", "properties": {"list": {"type": "array"}}});
    let tools = json!({"tools": [{"type": "function", "name": "f", "parameters": parameters}]});
    let body = with(question(), tools);
    let events = server.evaluate_slowly(Duration::from_millis(5), stream(&server, &body)).await;
    let is_empty = |event: &&Value| event["type"] == "response.function_call_arguments.delta" && event["delta"] == "";
    assert!(events.iter().filter(is_empty).count() > 1, "{events:?}");
    let call = called(&events.last().unwrap()["response"]);
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"list": list}));
}

#[tokio::test]
async fn codex_catalogue_fields_are_accepted() {
    let server = Server::saying(THINKS).await;
    let tools = json!([{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]);
    let input = json!([
        {"type": "additional_tools", "tools": [tools[0], {"type": "function", "name": "f"}]},
        {"role": "user", "content": "What is 12+7?"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
    ]);
    let body = json!({"input": input, "tools": tools, "text": {"verbosity": "low"}, "truncation": "auto"});
    let answer = server.ask(RESPONSES, &body).await;
    assert_eq!((&answer["status"], &answer["text"]["verbosity"]), (&json!("completed"), &json!("low")));
    assert_eq!(answer["truncation"], "disabled");
}

#[tokio::test]
async fn echoed_request_fields_count_as_memory() {
    // The body alone fits into the memory of requests. Together with its translation and its copy in the answer, it
    // does not.
    let server = Setup { says: Some(THINKS), configure: little_memory, ..Setup::default() }.start().await;
    let body = |bytes: usize| with(question(), json!({"user": "x".repeat(bytes)}));
    assert_eq!(server.refused(RESPONSES, &body(1_200_000), 413).await["code"], "request_too_large");
    server.memory_is_free().await;
    assert_eq!(server.post(RESPONSES, &body(600_000)).await.status, 200);
}

#[tokio::test]
async fn compaction_keeps_user_messages_and_summary() {
    let server = Server::saying("</think>\n\nThey added 12 and 7.").await;
    let input = json!([
        {"role": "user", "content": "What is 12+7?"},
        {"role": "assistant", "content": "19"},
        {"role": "user", "content": "And 19+1?"},
    ]);
    let cut = json!({"model": "mock", "input": input, "max_output_tokens": 2});
    assert_eq!(server.refused("/v1/responses/compact", &cut, 400).await["code"], "context_length_exceeded");
    let compacted = server.ask("/v1/responses/compact", &json!({"model": "mock", "input": input})).await;
    assert_eq!(compacted["object"], "response.compaction");
    let output = compacted["output"].as_array().unwrap();
    assert_eq!(output.iter().filter(|item| item["role"] == "user").count(), 2);
    let (summary, kept) = output.split_last().unwrap();
    assert_eq!((&summary["type"], kept.len()), (&json!("compaction"), 2));
    let content = json!([{"type": "input_text", "text": "What is 12+7?"}]);
    assert_eq!((&kept[0]["type"], &kept[0]["content"]), (&json!("message"), &content));
    assert!(output.iter().all(|item| item["id"].is_string()), "{compacted}");
    assert!(summary["encrypted_content"].as_str().unwrap().contains("They added 12 and 7."), "{summary}");
    assert!(compacted["usage"]["output_tokens"].as_u64() > Some(0));
    // A client can continue the conversation with the items.
    let mut next = output.clone();
    next.push(json!({"role": "user", "content": "Go on."}));
    assert_eq!(server.ask(RESPONSES, &json!({"input": next})).await["status"], "completed");
}
