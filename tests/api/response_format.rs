//! Tests of response formats, required tool calls and reasoning budgets.
//!
//! The mock model repeats a fixed answer. If the grammar forbids the next token of that answer, the mock model
//! continues with random allowed tokens.

use super::server::{CHAT, Server, Setup, chat, with};
use serde_json::{Value, json};

const THINKS: &str = "I need to compute 12 + 7. That is 19.\n</think>\n\n12 + 7 = 19.";

fn ask(more: Value) -> Value {
    with(chat("What is 12+7?"), more)
}

fn sizes() -> Value {
    let item = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": false});
    json!({"type": "object", "properties": {"size": {"enum": ["small", "large"]}, "items":
        {"type": "array", "items": item, "maxItems": 2}}, "required": ["size", "items"], "additionalProperties": false})
}

fn assert_sizes(value: &Value) {
    let fields = value.as_object().unwrap();
    assert_eq!(fields.keys().collect::<Vec<_>>(), ["size", "items"]);
    assert!(["small", "large"].contains(&value["size"].as_str().unwrap()));
    let items = value["items"].as_array().unwrap();
    assert!(items.len() <= 2 && items.iter().all(|item| item["n"].as_u64().is_some_and(|n| n < 100)), "{value}");
}

fn schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}}})
}

fn tools(parameters: &Value) -> Value {
    let tool = |name| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([tool("one"), tool("two")])
}

#[tokio::test]
async fn too_many_tools_are_named() {
    let server = Setup { context: 8192, ..Setup::default() }.start().await;
    let tool = |strict: bool| {
        let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
        move |index| {
            json!({"type": "function", "function":
            {"name": format!("f{index}"), "parameters": parameters, "strict": strict && index == 0}})
        }
    };
    let tools = |strict: bool| (0..129).map(tool(strict)).collect::<Vec<Value>>();
    for more in [json!({"tools": tools(false), "tool_choice": "required"}), json!({"tools": tools(true)})] {
        let error = refused(&server, more).await;
        assert_eq!(
            (&error["param"], &error["message"]),
            (&json!("tools"), &json!("tools: 129 tools may be called; the limit is 128"))
        );
    }
}

async fn refused(server: &Server, more: Value) -> Value {
    server.refused(CHAT, &ask(more), 400).await
}

#[tokio::test]
async fn content_matches_the_schema() {
    let server = Server::saying(THINKS).await;
    for more in [json!({}), json!({"enable_thinking": false}), json!({"thinking_budget": 4}), json!({"temperature": 1})]
    {
        let choice = server.ask(CHAT, &with(ask(schema(&sizes())), more.clone())).await["choices"][0].clone();
        let content: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert_sizes(&content);
        assert_eq!(choice["finish_reason"], "stop");
        let reasoning = choice["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(reasoning.is_empty(), more["enable_thinking"] == false, "{reasoning}");
    }
}

#[tokio::test]
async fn content_matches_regex_choice_and_grammar() {
    let server = Server::saying(THINKS).await;
    let answer_of = async |more: Value| {
        server.ask(CHAT, &ask(more)).await["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let text = answer_of(json!({"response_format": {"type": "regex", "regex": "[a-c]{2}-[0-9]"}})).await;
    let pattern = ["abc", "abc", "-", "0123456789"];
    assert!(text.len() == 4 && text.chars().zip(pattern).all(|(found, allowed)| allowed.contains(found)), "{text}");
    assert!(["yes", "no"].contains(&&*answer_of(json!({"guided_choice": ["yes", "no"]})).await));
    let lark = json!({"response_format": {"type": "lark", "lark": "start: \"a\" \"b\" \"b\""}});
    assert_eq!(answer_of(lark).await, "abb");
}

#[tokio::test]
async fn required_tool_is_called() {
    let server = Server::saying(THINKS).await;
    let two = json!({"type": "function", "function": {"name": "two"}});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [two]}});
    for (choice, names) in [(json!("required"), &["one", "two"][..]), (two, &["two"]), (allowed, &["two"])] {
        let fields = json!({"tools": tools(&sizes()), "tool_choice": choice, "parallel_tool_calls": false});
        let answer = server.ask(CHAT, &ask(fields.clone())).await["choices"][0].clone();
        assert_eq!(answer["finish_reason"], "tool_calls");
        assert_eq!(answer["message"]["content"], Value::Null);
        let calls = answer["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        assert!(names.contains(&calls[0]["function"]["name"].as_str().unwrap()));
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_sizes(&arguments);
        let chunks = server.stream(CHAT, &ask(fields)).await;
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[tokio::test]
async fn invalid_schema_error_names_the_position() {
    let server = Server::saying(THINKS).await;
    let at = "response_format.json_schema.schema";
    for (part, place, in_tools) in [
        (json!({"type": "string", "pattern": "(?<=x)y"}), ".properties.a.pattern", false),
        (json!({"type": "strnig"}), ".properties.a.type", false),
        (json!({"not": {"type": "string"}}), ".properties.a.not", false),
        (json!({"anyOf": [{"type": "null"}, 5]}), ".properties.a.anyOf[1]", true),
        (json!({"$ref": "#/$defs/missing"}), ".properties.a.$ref", true),
        (json!({"type": "integer", "minimum": 5, "maximum": 1}), ".properties.a", true),
    ] {
        let whole = json!({"type": "object", "properties": {"b": {"type": "integer"}, "a": part}, "required": ["a"]});
        let error = refused(&server, schema(&whole)).await;
        assert_eq!(error["param"], format!("{at}{place}"), "{error}");
        if in_tools {
            let error = refused(&server, json!({"tools": tools(&whole), "tool_choice": "required"})).await;
            assert!(error["param"].as_str().unwrap().starts_with("tools[0].function.parameters"), "{error}");
        }
    }
    assert_eq!(refused(&server, json!({"guided_regex": "("})).await["param"], "guided_regex");
    let lark = json!({"response_format": {"type": "lark", "lark": "begin: \"x\""}});
    assert_eq!(refused(&server, lark).await["param"], "response_format.lark");
    let mut deep = json!({"type": "integer"});
    (0..80).for_each(|_| deep = json!({"type": "array", "items": deep}));
    assert!(refused(&server, schema(&deep)).await["message"].as_str().unwrap().contains("levels deep"));
    let wide: Value = (0..30_000).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    let error = refused(&server, schema(&json!({"type": "object", "properties": wide}))).await;
    assert!(error["message"].as_str().unwrap().contains("the limit is"), "{error}");
    assert_eq!(server.ask(CHAT, &ask(json!({}))).await["choices"][0]["message"]["content"], "12 + 7 = 19.");
}

#[tokio::test]
async fn reasoning_ends_at_its_budget() {
    let server = Server::saying(THINKS).await;
    let free = server.ask(CHAT, &ask(json!({}))).await;
    let tokens = |answer: &Value| answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let answer = server.ask(CHAT, &ask(json!({"thinking_budget": 5}))).await;
    assert!((5..=8).contains(&tokens(&answer)) && tokens(&free) > 8, "{answer}");
    let whole = free["choices"][0]["message"]["reasoning_content"].as_str().unwrap();
    let part = answer["choices"][0]["message"]["reasoning_content"].as_str().unwrap();
    assert!(whole.starts_with(part) && part.len() < whole.len(), "{part}");
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    let same = server.ask(CHAT, &ask(json!({"thinking_budget": 500}))).await;
    assert_eq!(same["choices"], free["choices"], "an unused budget must have no effect");
    let none = server.ask(CHAT, &ask(json!({"reasoning_effort": "none"}))).await;
    assert_eq!(tokens(&none), 0);
    assert_eq!(refused(&server, json!({"reasoning_effort": "zzz"})).await["param"], "reasoning_effort");
}

#[tokio::test]
async fn truncated_call_has_unclosed_arguments() {
    const CALLS: &str = "I look.\n</think>\n\n<tool_call>\n<function=one>\n<parameter=city>\nOslo\n</parameter>\n\
                         <parameter=days>\n12\n</parameter>\n</function>\n</tool_call>";
    let server = Server::saying(CALLS).await;
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let whole = server.tokenizer.encode(CALLS).unwrap().len();
    let (mut open, mut complete) = (0, 0);
    for limit in 1..=whole + 1 {
        let body = ask(json!({"tools": tools(&parameters), "max_tokens": limit}));
        let choice = server.ask(CHAT, &body).await["choices"][0].clone();
        let content = choice["message"]["content"].as_str().unwrap_or_default();
        assert!(!content.contains('<'), "{limit}: {content}");
        assert_eq!(choice["finish_reason"] == "length", limit <= whole, "{limit}");
        for call in choice["message"]["tool_calls"].as_array().into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            match serde_json::from_str::<Value>(arguments) {
                Ok(arguments) => {
                    assert_eq!(arguments, json!({"city": "Oslo", "days": 12}), "{limit}");
                    complete += 1;
                }
                Err(_) => open += 1,
            }
        }
    }
    assert!(open > 5 && complete > 0);
}

#[tokio::test]
async fn deprecated_messages_and_fields_are_accepted() {
    let server = Server::saying("</think>\n\nok").await;
    let messages = json!([
        {"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": null, "function_call": {"name": "one", "arguments": "{}"}},
        {"role": "function", "name": "one", "content": "1"}, {"role": "system", "content": "d"}
    ]);
    let functions = json!([{"name": "one", "parameters": {"type": "object", "properties": {}}}]);
    let body = json!({"messages": messages, "functions": functions, "function_call": "auto"});
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "ok");
    let named = json!({"functions": functions, "function_call": {"name": "one"}});
    let answer = server.ask(CHAT, &ask(named)).await;
    assert_eq!(answer["choices"][0]["message"]["function_call"]["name"], "one");
    let bad = json!({"tools": [{"type": "function", "function": {"name": "a b"}}]});
    assert_eq!(refused(&server, bad).await["param"], "tools[0].function.name");
}

#[tokio::test]
async fn choices_use_consecutive_seeds() {
    let server = Server::saying(THINKS).await;
    let one = server.ask(CHAT, &ask(json!({}))).await;
    let three = server.ask(CHAT, &ask(json!({"n": 3}))).await;
    let choices = three["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(choices.iter().all(|choice| choice["message"] == one["choices"][0]["message"]));
    let tokens = |answer: &Value, key: &str| answer["usage"][key].as_u64().unwrap();
    assert_eq!(tokens(&three, "prompt_tokens"), tokens(&one, "prompt_tokens"));
    assert_eq!(tokens(&three, "completion_tokens"), 3 * tokens(&one, "completion_tokens"));

    let options = json!({"n": 2, "stream_options": {"include_usage": true}});
    let chunks = server.stream(CHAT, &ask(options)).await;
    for index in 0..2 {
        let own = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let own: Vec<&Value> = own.map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(own[0]["delta"]["role"], "assistant");
        assert_eq!(own.last().unwrap()["finish_reason"], "stop");
        let content: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(content, "12 + 7 = 19.");
    }
    assert_eq!(tokens(chunks.last().unwrap(), "completion_tokens"), 2 * tokens(&one, "completion_tokens"));

    // Choice number i of a request is sampled with seed + i.
    let random = json!({"temperature": 1.5, "guided_regex": "[a-z]{12}", "enable_thinking": false});
    let random = |more: Value| with(ask(random.clone()), more);
    let both = server.ask(CHAT, &random(json!({"n": 2, "seed": 7}))).await;
    for (index, seed) in [(0, 7), (1, 8)] {
        let alone = server.ask(CHAT, &random(json!({"seed": seed}))).await;
        assert_eq!(both["choices"][index]["message"], alone["choices"][0]["message"]);
    }
    assert_ne!(both["choices"][0]["message"], both["choices"][1]["message"]);
    assert_eq!(refused(&server, json!({"n": 0})).await["param"], "n");
    assert_eq!(refused(&server, json!({"n": 1000})).await["param"], "n");
}

#[tokio::test]
async fn functions_request_gets_a_function_call() {
    let says = "One.\n</think>\n\n<tool_call>\n<function=one>\n<parameter=city>\nParis\n</parameter>\n</function>\n\
                </tool_call>\n<tool_call>\n<function=one>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";
    let server = Server::saying(says).await;
    let function = json!({"name": "one", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}});
    let body = ask(json!({"functions": [function]}));
    let choice = server.ask(CHAT, &body).await["choices"][0].clone();
    let call = json!({"name": "one", "arguments": "{\"city\":\"Paris\"}"});
    assert_eq!((&choice["message"]["function_call"], &choice["finish_reason"]), (&call, &json!("function_call")));
    assert_eq!((&choice["message"]["content"], choice["message"].get("tool_calls")), (&Value::Null, None));

    let chunks = server.stream(CHAT, &body).await;
    let (mut name, mut arguments) = (String::new(), String::new());
    for delta in chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]) {
        assert!(delta.get("tool_calls").is_none(), "{delta}");
        name += delta["function_call"]["name"].as_str().unwrap_or_default();
        arguments += delta["function_call"]["arguments"].as_str().unwrap_or_default();
    }
    assert_eq!(json!({"name": name, "arguments": arguments}), call);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "function_call");

    // A client can send the answer back to the server, with the result of the function.
    let mut next = body;
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(choice["message"].clone());
    messages.push(json!({"role": "function", "name": "one", "content": "Rain"}));
    server.ask(CHAT, &next).await;
}
