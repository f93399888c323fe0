//! Calls as JSON between the tags of a call.

use super::{
    malformed::{STRINGS, answer},
    *,
};
use test_support::mutate::Dice;

fn parse(in_reasoning: bool, text: &str) -> Vec<String> {
    streamed(in_reasoning, &tools_f_and_g(), text, false)
}

#[test]
fn json_between_tags_is_call() {
    for text in [
        r#"<tool_call>{"name":"f","arguments":{"n": 1}}</tool_call>"#,
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n",
        "<tool_call>\n{\"arguments\": {\"n\": 1}, \"name\": \"f\"}\n</tool_call>",
        "<tool_call>\n{\n  \"name\": \"f\",\n  \"arguments\": {\"n\": 1}\n}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"parameters\": {\"n\": 1}}\n</tool_calls>",
        "<tool_call>\n{\"name\": \"f\", \"input\": {\"n\": 1}, \"id\": 7}\n</tool_call>",
        "<tool_call>\n{\"function\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>",
        "<tool_call>\n{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"n\": 1}}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"n\\\": 1}\"}\n</tool_call>",
        "<tool_call>\n{'name': 'f', 'arguments': {'n': 1}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1,},}\n</tool_call>",
        "<tool_call>\n```json\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n```\n</tool_call>",
        "<tool_call>\n```\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n```",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}}\n</tool_call>",
        "<tool_call>\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]\n</tool_call>",
        "<tool_calls>\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_calls>",
        "<tool_calls>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n</tool_calls>",
        "<|tool_call|>{\"name\": \"f\", \"arguments\": {\"n\": 1}}<|/tool_call|>",
        "<|tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</|tool_call|>",
        "<tool_call\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call",
        "<Tool_Call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</TOOL_CALL>",
        "<function_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</function_call>",
        "<tool_call>\n<function=f>\n{\"n\": 1}\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>{'n': 1}</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n```json\n{\"n\": 1}\n```\n</function>\n</tool_call>",
        "<tool_call>\n<function name=\"f\">\n{\"n\": 1}\n</function>\n</tool_call>",
        "<function=f>\n{\"n\": 1}\n</function>",
        "<function=f>{\"n\": 1}</function>",
        "<function>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</function>",
        "<tool_call>\n<function=f>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</function>\n</tool_call>",
        "<tool_call>\n{\"function=f\", \"arguments\": {\"n\": 1}}\n</tool_call>",
    ] {
        let (content, calls) = answer(parse(false, text));
        assert_eq!((content.as_str(), calls), ("", vec![("f".to_owned(), json!({"n": 1}))]), "{text}");
        let thought = parse(true, &format!("so\n{text}\n</think>\n\nhi"));
        assert_eq!((&thought[0], &thought[1]), (&"R so".to_owned(), &"0 f".to_owned()), "{text}");
    }
}

#[test]
fn arguments_that_resemble_a_call_stay_whole() {
    for json in [
        r#"{"name": "f", "arguments": {"n": 1}, "s": "a"}"#,
        r#"{"name": "f", "arguments": {"n": 1}, "why": "a"}"#,
        r#"{"name": "g", "arguments": {"n": 1}}"#,
        r#"{"input": {"n": 1}}"#,
    ] {
        let text = format!("<tool_call>\n<function=f>\n{json}\n</function>\n</tool_call>");
        assert_eq!(parse(false, &text), ["0 f".to_owned(), format!("0 {json}")]);
    }
}

#[test]
fn several_json_calls_in_one_block() {
    let f = r#"{"name": "f", "arguments": {"n": 1.0}}"#;
    let g = r#"{"name": "g"}"#;
    for text in [
        format!("<tool_call>\n{f}\n{g}\n</tool_call>"),
        format!("<tool_call>\n{f},\n{g}\n</tool_call>"),
        format!("<tool_call>\n[{f}, {g}]\n</tool_call>"),
        format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>"),
        format!("<tool_call>\n{f}\n<tool_call>\n{g}"),
        format!("<tool_calls>\n<tool_call>{f}</tool_call><tool_call>{g}</tool_call>\n</tool_calls>"),
        format!("<tool_call>\n{f}\n<function=g>\n</function>\n</tool_call>"),
    ] {
        assert_eq!(parse(false, &text), ["0 f", r#"0 {"n": 1.0}"#, "1 g", "1 {}"], "{text}");
        assert_eq!(parse(false, &format!("Ok.\n\n{text}"))[0], "C Ok.", "{text}");
    }
    let text = format!("<tool_call>\n{f}\n</tool_call>\nDone.");
    assert_eq!(parse(false, &text), ["0 f", r#"0 {"n": 1.0}"#, "C \nDone."]);
}

#[test]
fn tags_of_other_formats_are_read() {
    for (open, close) in [
        ("<function_calls>\n<invoke name=\"f\">", "</invoke>\n</function_calls>"),
        ("<tool_call>\n<invoke name=\"f\">", "</invoke>\n</tool_call>"),
        ("<tool_calls>\n<function name=\"f\">", "</function>\n</tool_calls>"),
        ("<|tool_call|>\n<Function=f>", "</Function>\n<|/tool_call|>"),
    ] {
        for parameters in [
            "<parameter name=\"s\">x</parameter>\n<parameter name=\"n\">1</parameter>",
            "<parameter=s>\nx\n</parameter>\n<Parameter = n>\n1\n</Parameter>",
            "<parameter name=\"s\" string=\"true\">x</parameter>\n<parameter name=\"n\" string=\"false\">1</parameter>",
        ] {
            let one = format!("{open}\n{parameters}\n{close}");
            assert_eq!(parse(false, &one), ["0 f", r#"0 {"s":"x","n":1}"#], "{one}");
        }
    }
    let one = "<invoke name=\"f\">\n<parameter name=\"n\">1</parameter>\n</invoke>";
    let two = format!("<function_calls>\n{one}\n{one}\n</function_calls>");
    assert_eq!(parse(false, &two), ["0 f", r#"0 {"n":1}"#, "1 f", r#"1 {"n":1}"#]);
}

#[test]
fn json_that_is_no_call_is_text() {
    for text in [
        // No tag of a call.
        "{\"name\": \"f\", \"arguments\": {\"n\": 1}}",
        "```json\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n```",
        "<tools>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tools>",
        // An unknown tool.
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {\"n\": 1}}\n</tool_call>",
        "<tool_call>\n[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"unknown\", \"arguments\": {}}]\n</tool_call>",
        "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>",
        // No arguments, or not an object.
        "<tool_call>\n{\"name\": \"f\", \"n\": 1}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": [1]}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": \"x\"}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {\"n\": 1}}\n</tool_call>",
        "<tool_call>\n[]\n</tool_call>",
        "<tool_call>\n[\"name\", \"f\"]\n</tool_call>",
        "<tool_call>\n\"f\"\n</tool_call>",
        "<tool_call>\nf\n</tool_call>",
        // No JSON.
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": [1}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": \"1}}\n</tool_call>",
        "<tool_call> {see \"name\" and so on}",
        "<tool_call>\n```json\n",
        // Code.
        "`<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>`",
        "```\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n```",
        "say \"<tool_call>{'name': 'f'}</tool_call>\"",
        "<invoke name=\"f\">\n<parameter name=\"n\">1</parameter>\n</invoke>",
        "<function name=\"f\">{\"n\": 1}</function>",
        "fn f(calls: Vec<ToolCall>) -> Option<Function> { x }",
        "<function=f>{\"n\": 1}",
        "<function=f>{\"n\": 1} and so on",
        "<function=f>{n} of them</function>",
    ] {
        assert_eq!(parse(false, text), [format!("C {text}")]);
        let thought = parse(true, &format!("{text}\n</think>hi"));
        assert_eq!(thought, [format!("R {}", text.trim_end()), "C hi".to_owned()]);
    }
}

#[test]
fn truncated_json_call_stays_open() {
    for (rest, expected) in [
        ("{\"name\": \"f\"", vec!["C Ok.", "0 f", "0 {"]),
        ("{\"name\": \"f\", \"argu", vec!["C Ok.", "0 f", "0 {"]),
        ("{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>", vec!["C Ok.", "0 f", r#"0 {"s": "</tool_call>"#]),
        ("{\"arguments\": {\"n\": 1}, \"name\": \"f\"", vec!["C Ok.", "0 f", r#"0 {"n": 1"#]),
        ("{\"arguments\": {\"n\": 1}, \"na", vec!["C Ok.\n\n<tool_call>\n{\"arguments\": {\"n\": 1}, \"na"]),
        ("{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n{\"na", vec!["C Ok.", "0 f", r#"0 {"n": 1}"#, "C \n{\"na"]),
        ("{\"name\": \"f\", \"arguments\": {\"n\": 1}}", vec!["C Ok.", "0 f", r#"0 {"n": 1}"#]),
        ("<function=f>\n{\"s\": \"a", vec!["C Ok.", "0 f", "0 {\"s\": \"a"]),
        ("<function=f>\n```js", vec!["C Ok.", "0 f", "0 {"]),
    ] {
        assert_eq!(cut(false, &format!("Ok.\n\n<tool_call>\n{rest}")), expected, "{rest}");
    }
}

/// Writes JSON as models do: as JSON, with line feeds, or as a Python literal.
fn spelled(dice: &mut Dice, value: &Value) -> String {
    let json = value.to_string();
    match dice.below(4) {
        0 => serde_json::to_string_pretty(value).unwrap(),
        1 if !json.contains(['\'', '\\']) => json.replace("\"", "'").replace("true", "True").replace("null", "None"),
        2 => json.replace("}", ",}").replace("{,}", "{}"),
        _ => json,
    }
}

/// Writes the JSON of a call.
fn json_call(dice: &mut Dice, name: &str, arguments: &Value) -> String {
    let key = *dice.pick(&["arguments", "arguments", "parameters"]);
    let arguments = if dice.below(6) == 0 { arguments.to_string().into() } else { arguments.clone() };
    let call = match dice.below(6) {
        0 => json!({key: arguments, "name": name}),
        1 => json!({"id": "1", "type": "function", "function": {"name": name, key: arguments}}),
        _ => json!({"name": name, key: arguments}),
    };
    // A bracket in a string gets no comma.
    let has_bracket = ["}\"", "f}"].iter().any(|end| call.to_string().contains(end));
    if has_bracket { call.to_string() } else { spelled(dice, &call) }
}

#[test]
fn broken_json_calls_have_expected_arguments() {
    for seed in 0..answer_count() {
        let dice = &mut Dice(seed);
        let in_reasoning = dice.below(4) == 0;
        let before = *dice.pick(&["", "Let me look.\n\n", "It's `ls`:\n\n"]);
        let mut text = before.to_owned();
        let mut expected = Vec::new();
        for _ in 0..1 + dice.below(3) {
            let (open, close) = *dice.pick(&[
                ("<tool_call>\n", "\n</tool_call>\n"),
                ("<tool_call>\n", "\n</tool_call>\n"),
                ("<tool_call>", "</tool_call>"),
                ("<tool_call>\n<tool_call>\n", "\n</tool_call>\n</tool_call>\n"),
                ("<tool_calls>\n", "\n</tool_calls>\n"),
                ("<tool_call>\n```json\n", "\n```\n</tool_call>\n"),
                ("<|tool_call|>", "<|/tool_call|>\n"),
                ("<tool_call>\n", "\n"),
                ("<tool_call>\n", "}\n</tool_call>\n"),
            ]);
            let mut calls = Vec::new();
            for _ in 0..1 + dice.below(2) {
                let name = *dice.pick(&["f", "g"]);
                let mut arguments = json!({});
                if dice.below(4) > 0 {
                    arguments["s"] = dice.pick(STRINGS).0.into();
                }
                if dice.below(2) == 0 {
                    arguments["o"] = json!({"a": [1, true, null, {}], "b": dice.pick(STRINGS).0});
                }
                calls.push(json_call(dice, name, &arguments));
                expected.push((name.to_owned(), arguments));
            }
            let body = match dice.below(4) {
                0 => format!("[{}]", calls.join(", ")),
                1 => calls.join(",\n"),
                _ if calls.len() == 1 && close == "\n</tool_call>\n" && dice.below(2) == 0 => {
                    format!("<function={}>\n{}\n</function>", expected[expected.len() - 1].0, calls[0])
                }
                _ => calls.join("\n"),
            };
            let body = if close.contains("tool") && !close.starts_with('}') && dice.below(6) == 0 {
                body.strip_suffix(['}', ']']).unwrap_or(&body).to_owned()
            } else {
                body
            };
            text += &[open, &body, close].concat();
        }
        let (content, calls) = answer(parse(in_reasoning, &text));
        assert_eq!((content.trim(), calls), (before.trim(), expected), "seed {seed}: {text}");
    }
}

#[test]
fn long_json_takes_linear_time() {
    let value = "a line with a <tag> and 'quotes'\n".repeat(30_000);
    let text = format!("<tool_call>\n{}\n</tool_call>", json!({"arguments": {"s": value}, "name": "f"}));
    let mut parser = Parser::new(false, &tools());
    let mut deltas = Vec::new();
    for piece in text.as_bytes().chunks(4) {
        deltas.extend(parser.push(std::str::from_utf8(piece).unwrap()));
    }
    deltas.extend(parser.finish(false));
    let [Delta::ToolCall { .. }, Delta::Arguments { json, .. }] = &deltas[..] else {
        panic!("{} deltas", deltas.len())
    };
    let expected = json!({"s": value}).to_string();
    assert!(*json == expected, "{} bytes", json.len());
}
