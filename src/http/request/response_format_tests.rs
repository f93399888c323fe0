use super::*;
use serde_json::json;

fn request(mut fields: Value) -> ChatRequest {
    fields["messages"] = json!([]);
    serde_json::from_value(fields).unwrap()
}

fn asked(fields: Value) -> Option<OutputFormat> {
    form(&request(fields)).unwrap().map(|asked| asked.form)
}

fn error(fields: Value) -> Value {
    let error = form(&request(fields)).unwrap_err();
    assert_eq!(error.status, 400);
    serde_json::to_value(error.body()).unwrap()["error"]["param"].clone()
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

fn tools(more: Value) -> Value {
    let mut fields = json!({"tools": [tool("f"), tool("g"), tool("h")]});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

/// The names of the tools that a form allows.
fn named(form: &OutputFormat) -> Vec<&str> {
    let tools = form.tools.iter().flat_map(|allowed| &allowed.tools);
    tools.map(|(_, tool)| tool["function"]["name"].as_str().unwrap()).collect()
}

#[test]
fn every_name_for_a_schema_is_understood() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    for (fields, strict) in [
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}), false),
        (
            json!({"response_format":
                {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
            true,
        ),
        (json!({"response_format": {"type": "json_object", "schema": schema}}), true),
        (json!({"guided_json": schema}), true),
        (json!({"guided_json": schema.to_string()}), true),
        (json!({"structured_outputs": {"json": schema, "regex": null}}), true),
        (json!({"json_schema": schema, "guided_regex": null, "grammar": null}), true),
    ] {
        let content = ContentFormat::Json { schema: schema.clone(), strict };
        assert_eq!(asked(fields.clone()), Some(OutputFormat { content, tools: None }), "{fields}");
    }
    let any = ContentFormat::Json { schema: any_object(), strict: true };
    assert_eq!(asked(json!({"response_format": {"type": "json_object"}})).unwrap().content, any);
    assert_eq!(asked(json!({"structured_outputs": {"json_object": true}})).unwrap().content, any);
    let regex = ContentFormat::Regex("a+".into());
    assert_eq!(asked(json!({"guided_regex": "a+"})).unwrap().content, regex);
    assert_eq!(asked(json!({"response_format": {"type": "regex", "regex": "a+"}})).unwrap().content, regex);
    let choice = ContentFormat::Lark("start: \"a\" | \"b\\\"\"".into());
    assert_eq!(asked(json!({"guided_choice": ["a", "b\""]})).unwrap().content, choice);
    let lark = asked(json!({"response_format": {"type": "lark", "lark": "start: \"x\""}})).unwrap().content;
    assert_eq!(lark, ContentFormat::Lark("start: \"x\"".into()));
    for none in [json!({}), json!({"response_format": {"type": "text"}}), json!({"response_format": null})] {
        assert_eq!(asked(none), None);
    }
}

#[test]
fn a_choice_of_tools_becomes_a_form() {
    for free in
        [json!({}), json!({"tool_choice": "auto"}), json!({"tool_choice": "none"}), json!({"tool_choice": null})]
    {
        assert_eq!(asked(tools(free)), None);
    }
    let form = asked(tools(json!({"tool_choice": "required"}))).unwrap();
    assert_eq!((named(&form), &form.content), (vec!["f", "g", "h"], &ContentFormat::Nothing));
    assert!(form.tools.unwrap().parallel);
    let form = asked(tools(json!({"tool_choice": tool("g"), "parallel_tool_calls": false}))).unwrap();
    assert_eq!((named(&form), &form.content), (vec!["g"], &ContentFormat::Nothing));
    assert!(!form.tools.unwrap().parallel);
    for (mode, content) in [("auto", ContentFormat::Text), ("required", ContentFormat::Nothing)] {
        let allowed = json!({"mode": mode, "tools": [tool("f"), tool("h")]});
        let form = asked(tools(json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}))).unwrap();
        assert_eq!((named(&form), &form.content), (vec!["f", "h"], &content));
    }
    // A schema beside tools: either is an answer.
    let form = asked(tools(json!({"response_format": {"type": "json_object"}}))).unwrap();
    assert!(named(&form).len() == 3 && matches!(form.content, ContentFormat::Json { .. }));
    let mut strict = tools(json!({}));
    strict["tools"][1]["function"]["strict"] = json!(true);
    assert_eq!(asked(strict).unwrap().content, ContentFormat::Text);
}

#[test]
fn what_cannot_be_meant_is_refused() {
    for (fields, param) in [
        (json!({"tool_choice": "required"}), "tool_choice"),
        (tools(json!({"tool_choice": "sometimes"})), "tool_choice"),
        (tools(json!({"tool_choice": tool("z")})), "tool_choice.function.name"),
        (tools(json!({"tool_choice": {"type": "function"}})), "tool_choice.function.name"),
        (tools(json!({"tool_choice": {"type": "custom"}})), "tool_choice.type"),
        (tools(json!({"tool_choice": 5})), "tool_choice"),
        (
            tools(json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}})),
            "tool_choice.allowed_tools.tools",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "regex"}}), "response_format.regex"),
        (json!({"grammar": "root ::= \"a\""}), "grammar"),
        (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
        (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex"),
    ] {
        assert_eq!(error(fields.clone()), param, "{fields}");
    }
}
