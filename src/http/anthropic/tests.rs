use super::*;

fn request(body: Value) -> MessagesRequest {
    serde_json::from_value(body).unwrap()
}

fn conversation(body: Value) -> Conversation {
    request(body).conversation(false, None).unwrap()
}

#[test]
fn blocks_become_chat_messages() {
    let call = json!({"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}});
    let result = json!({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]});
    let chat = conversation(json!({
        "max_tokens": 5,
        "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Well"}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on"}, {"type": "text", "text": "please"}]},
        ],
    }))
    .chat;
    let calls = json!([{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
    let wanted = [
        json!({"role": "system", "content": "One.\n\nTwo."}),
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": "Well", "reasoning_content": "hm", "tool_calls": calls}),
        json!({"role": "tool", "tool_call_id": "t1", "content": "42"}),
        json!({"role": "user", "content": "Go on\n\nplease"}),
    ];
    assert_eq!(chat.messages, wanted);
}

#[test]
fn a_billing_header_is_left_out_if_it_comes_first() {
    let header = json!({"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"});
    let rule = json!({"type": "text", "text": "Be kind."});
    let system = |blocks: Value, keep| {
        let body = json!({"system": blocks, "messages": [{"role": "user", "content": "Hi"}]});
        request(body).conversation(keep, None).unwrap().chat.messages[0]["content"].as_str().unwrap().to_owned()
    };
    assert_eq!(system(json!([header, rule]), false), "Be kind.");
    assert!(system(json!([header, rule]), true).starts_with("x-anthropic-billing-header:"));
    assert!(system(json!([rule, header]), false).contains("x-anthropic-billing-header:"));
    assert!(system(header["text"].clone(), false).starts_with("x-anthropic-billing-header:"));
}

#[test]
fn thinking_is_off_unless_somebody_says_so() {
    let thinks = |thinking: Value, server| {
        let body = json!({"thinking": thinking, "messages": [{"role": "user", "content": "Hi"}]});
        request(body).conversation(false, server).unwrap().chat.enable_thinking
    };
    assert_eq!(thinks(Value::Null, None), Some(false));
    assert_eq!(thinks(Value::Null, Some(true)), Some(true));
    assert_eq!(thinks(json!({"type": "enabled", "budget_tokens": 1024}), None), Some(true));
    assert_eq!(thinks(json!({"type": "disabled"}), Some(true)), Some(false));
}

#[test]
fn tools_and_the_choice_among_them_are_translated() {
    let schema = json!({"type": "object"});
    let tool = json!({"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}});
    let ask = |choice: Value| {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        conversation(json!({"messages": messages, "tools": [tool], "tool_choice": choice})).chat
    };
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    assert_eq!(ask(json!({"type": "auto"})).tools.unwrap(), [json!({"type": "function", "function": function})]);
    assert_eq!(ask(json!({"type": "any"})).tool_choice.unwrap(), "required");
    assert_eq!(ask(json!({"type": "none"})).tool_choice.unwrap(), "none");
    assert_eq!(ask(json!({"type": "tool", "name": "f"})).tool_choice.unwrap()["function"]["name"], "f");
    let one = json!({"type": "auto", "disable_parallel_tool_use": true});
    assert_eq!(ask(one).parallel_tool_calls, Some(false));
}

#[test]
fn the_output_has_a_form_and_an_effort() {
    let ask = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        conversation(body).chat
    };
    let schema = json!({"type": "object"});
    let format = json!({"type": "json_schema", "schema": schema});
    for body in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let inner = ask(body).response_format.unwrap().json_schema.unwrap();
        assert_eq!((inner.schema, inner.strict), (Some(schema.clone()), Some(true)));
    }
    assert_eq!(ask(json!({"output_config": {"effort": "low"}})).reasoning_effort.unwrap(), "low");
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let with = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (body, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "tool", "content": "Hi"}]}), "messages[0].role"),
        (with(json!(5)), "messages[0].content"),
        (with(json!([{"type": "image", "source": {}}])), "messages[0].content[0]"),
        (with(json!([{"type": "text"}])), "messages[0].content[0]"),
        (with(json!([{"type": "tool_result", "content": "x"}])), "messages[0].content[0].tool_use_id"),
        (json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}), "messages[0].content[0]"),
        (json!({"messages": [{"role": "assistant", "content": "I"}], "thinking": {"type": "enabled"}}), "thinking"),
        (json!({"messages": messages, "system": 5}), "system"),
        (json!({"messages": messages, "tools": [{"type": "web_search_20250305", "name": "w"}]}), "tools[0]"),
        (json!({"messages": messages, "tool_choice": {"type": "maybe"}}), "tool_choice.type"),
        (json!({"messages": messages, "tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"messages": messages, "thinking": {"type": "hard"}}), "thinking.type"),
        (json!({"messages": messages, "output_format": {"type": "xml"}}), "output_config.format.type"),
    ] {
        let error = request(body.clone()).conversation(false, None).err().unwrap_or_else(|| panic!("{body}"));
        assert_eq!(serde_json::to_value(error.body()).unwrap()["error"]["param"], param, "{body}");
    }
}

#[test]
fn what_is_set_of_sampling_is_taken_over() {
    let common = conversation(json!({
        "max_tokens": 7, "model": "m", "stream": true, "temperature": 0.25, "top_p": 0.5, "top_k": 9, "stop_sequences": ["x"],
        "messages": [{"role": "user", "content": "Hi"}],
    }))
    .common;
    assert_eq!((common.model.as_deref(), common.stream, common.max_tokens), (Some("m"), Some(true), Some(7)));
    assert_eq!((common.temperature, common.top_p, common.top_k), (Some(0.25), Some(0.5), Some(9)));
}

#[test]
fn a_message_without_a_role_is_named_and_one_with_another_kind_of_role_too() {
    for (message, status) in
        [(json!({"content": "x"}), "has no role"), (json!({"role": 5, "content": "x"}), "must be a string")]
    {
        let body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}, message]});
        let error = request(body).conversation(false, None).unwrap_err();
        let told = serde_json::to_value(error.body()).unwrap();
        assert_eq!(told["error"]["param"], "messages[1].role");
        assert!(told["error"]["message"].as_str().unwrap().contains(status), "{told}");
    }
}

#[test]
fn each_status_has_its_kind_of_error() {
    for (wrong, kind) in [
        (ApiError::unauthorized(), "authentication_error"),
        (ApiError::wrong_host("evil"), "permission_error"),
        (ApiError::no_such_model("a", "b"), "not_found_error"),
        (ApiError::too_large(5), "request_too_large"),
        (ApiError::memory_in_use(), "overloaded_error"),
        (crate::error::EngineError::TimedOut.into(), "timeout_error"),
        (ApiError::failed("x"), "api_error"),
        (ApiError::invalid("x", "y"), "invalid_request_error"),
    ] {
        assert_eq!(super::super::answer::error(&wrong)["error"]["type"], kind);
    }
}
