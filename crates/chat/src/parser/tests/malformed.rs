//! Calls as models break them: tags that are dropped, repeated, misspelt or cut, and values that quote the tags.

use super::*;
use serde_json::Map;
use std::fmt::Write;
use test_support::mutate::Dice;

/// Values of a string. The flag is true if a value quotes tags outside of quotation marks, so that its end tags are
/// needed.
pub(super) const STRINGS: &[(&str, bool)] = &[
    ("", false),
    ("x", false),
    ("two\nlines", false),
    ("a < b && c > d, it's \"half", false),
    ("ends with a line feed\n", false),
    ("  indented\n\ttext", false),
    ("{\"a\": [1]}", false),
    ("<div>\n<p class=\"x\">one</p>\n</div>", false),
    ("# Title\n\n```rust\nfn main() {}\n```", false),
    ("é 😀 `unclosed", false),
    ("if text.endswith(\"</parameter>\"):\n    return '</function></tool_call>'", false),
    ("pattern = r'<parameter=n>\\n(.*?)\\n</parameter>'", false),
    ("A call ends with </tool_call> on its own, and a value with </parameter> or so.", false),
    ("Use `</parameter>` and `<tool_call><function=f>`", false),
    ("</param> </parameter x>", true),
    ("The last tag is </parameter>\nas you know.", true),
    ("It ends with\n</parameter>\n</function>\n</tool_call>\nand nothing else.", true),
    ("<tool_call>\n<function=x>\n</function>\n</tool_call>", true),
    (
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        true,
    ),
    ("Like this:\n<function=g>\n<parameter=n>\n1\n</parameter>\n</function>\nSee?", true),
    ("<parameter=n>\n1\n</parameter>", true),
    ("<parameter=s>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n", true),
    ("<function name=\"a\">\n  <parameter name=\"x\">1</parameter>\n</function>", true),
    ("<plugin>\n<parameter>v</parameter>\n</plugin>\n<Tool function={f}>\n</Tool>", true),
    ("<parameter name='s' type=\"int\"/>\n<parameter name=\"n\" value=\"1\"/>", true),
    ("<tool>\n  <parameter name=\"n\" type=\"int\">1</parameter>\n</tool>", true),
    ("<parameters>\n<parameter-group name=\"n\">\n<param=n>\n</parameters >", true),
];

/// Texts and JSON of the other parameters.
const OTHERS: &[(&str, &str, &str)] = &[
    ("n", "5", "5"),
    ("n", "-1", "-1"),
    ("o", "{\"a\": [1, {}]}", "{\"a\": [1, {}]}"),
    ("o", "{\n  \"a\": \"</parameter> <parameter=n>x\"\n}", "{\"a\": \"</parameter> <parameter=n>x\"}"),
    (
        "o",
        "{\"a\": \"</function></tool_call>\", \"b\": \"it's\"}",
        "{\"a\": \"</function></tool_call>\", \"b\": \"it's\"}",
    ),
    ("b", "true", "true"),
    ("maybe", "null", "null"),
    ("maybe", "text", "\"text\""),
];

/// A spelling of a closing tag.
fn closing(dice: &mut Dice, tag: &str, misspelt: &[&str], may_be_lost: bool) -> String {
    match dice.below(12) {
        0 if may_be_lost => String::new(),
        1 => format!("{tag}\n{tag}"),
        2 if may_be_lost => dice.pick(misspelt).to_string(),
        _ => tag.to_owned(),
    }
}

fn line_feed(dice: &mut Dice) -> &'static str {
    if dice.below(8) == 0 { "" } else { "\n" }
}

/// Writes a parameter. Returns true if the later parameters must be plain ones: after a tag that is lost or repeated, a
/// second fault could also mean that the value quotes the tags.
fn write_parameter(
    dice: &mut Dice,
    text: &mut String,
    (name, value): (&str, &str),
    quotes: bool,
    is_plain: bool,
) -> bool {
    let after = if quotes || is_plain || value.contains('\n') || value.is_empty() { "\n" } else { line_feed(dice) };
    let is_repeated = !(quotes || is_plain) && dice.below(8) == 0;
    let (repeated, repeated_end) = *dice.pick(&[
        ("", "</parameter>"),
        ("</parameter>\n", "</parameter>"),
        ("", "</parameter>\n</parameter>"),
        ("\n", "</parameter>"),
        ("  ", "</parameter>"),
    ]);
    let _ = match dice.below(12) {
        _ if is_repeated => write!(text, "<parameter={name}>\n{repeated}<parameter={name}>\n"),
        0 => write!(text, "<parameter=\"{name}\">{after}"),
        1 => write!(text, "<parameter = {name} >{after}"),
        _ if is_plain => writeln!(text, "<parameter={name}>"),
        2 => write!(text, "<parameter name=\"{name}\">{after}"),
        3 => writeln!(text, "<parameter={name}"),
        6 => write!(text, "<parameter name=“{name}”>{after}"),
        // On the line of a value, their quotation marks could close one of the value.
        4 if text.ends_with('\n') => write!(text, "<parameter name=\"{name}\" string=\"true\">{after}"),
        5 if text.ends_with('\n') => write!(text, "<parameter={name} type='string' x-y=\"a b\">{after}"),
        _ => write!(text, "<parameter={name}>{after}"),
    };
    let close = if is_repeated {
        repeated_end.into()
    } else if is_plain {
        "</parameter>".into()
    } else {
        closing(
            dice,
            "</parameter>",
            &["</parameter", "</param>", "</parameters>", "</ parameter>", "</parameter/>", "</parameter=s>"],
            !quotes,
        )
    };
    let lost = close.is_empty();
    let before =
        if quotes || lost || value.ends_with('\n') || close != "</parameter>" { "\n" } else { line_feed(dice) };
    let end = if close.ends_with('>') {
        line_feed(dice)
    } else if lost {
        ""
    } else {
        "\n"
    };
    let _ = write!(text, "{value}{before}{close}{end}");
    lost || is_repeated
}

/// Writes a call and returns its arguments. `is_plain` is true if the closing tags of the call before are lost, and is
/// set to true if those of this call are.
fn write_call(
    dice: &mut Dice,
    text: &mut String,
    name: &str,
    is_last: bool,
    is_plain: &mut bool,
) -> Map<String, Value> {
    text.push_str(["<tool_call>\n", "<tool_call>\n<tool_call>\n", "", "<tool_call>\n", "<tool_call>\n"][dice.below(5)]);
    let _ = match dice.below(8) {
        0 => writeln!(text, "<function=\"{name}\">"),
        1 => write!(text, "<function={name}>\n<function={name}>\n"),
        3 => writeln!(text, "<function=“{name}”>"),
        2 => writeln!(text, "<function={name}"),
        _ => writeln!(text, "<function={name}>"),
    };
    let header = text.rfind("<function=").expect("a header");
    let mut arguments = Map::new();
    let mut is_open = *is_plain;
    let mut quoting = false;
    for _ in 0..dice.below(4) {
        let (parameter, value, json, quotes) = if dice.below(2) == 0 {
            let (value, quotes) = *dice.pick(STRINGS);
            ("s", value, Value::from(value).to_string(), quotes)
        } else {
            let (parameter, value, json) = *dice.pick(OTHERS);
            (parameter, value, json.to_owned(), false)
        };
        if arguments.contains_key(parameter) || (is_open && quotes) {
            continue;
        }
        is_open |= write_parameter(dice, text, (parameter, value), quotes, is_open);
        quoting |= quotes;
        arguments.insert(parameter.into(), serde_json::from_str(&json).expect("JSON"));
    }
    if !arguments.is_empty() && dice.below(8) == 0 {
        let call = text.split_off(header);
        text.push_str(&call.replacen("<function=", "<parameter=", 1));
    }
    let is_filled = arguments.values().next_back().is_some_and(|value| value != "");
    if let Some(parameter) =
        arguments.keys().next_back().filter(|_| is_filled && !is_open && !quoting && dice.below(8) == 0)
    {
        // The first value counts.
        let _ = write!(text, "<parameter={parameter}>\nagain\n</parameter>\n");
        is_open = true;
    }
    if is_last && !is_open && !quoting && !arguments.contains_key("n") && dice.below(6) == 0 {
        let tag = dice.pick(&["<", "</", "</para", "</parameter", "<param", "</func", "</tool_ca"]);
        let _ = write!(text, "<parameter=n>\n5\n{tag}");
        arguments.insert("n".into(), 5.into());
        return arguments;
    }
    let functions =
        &["</func>", "</ function>", "</function", "</functions>", "</function_invocation>", "</function=f>"];
    let end = closing(dice, "</function>", functions, !quoting && (!is_open || !is_last) && !arguments.is_empty());
    let is_cut = end.is_empty() && is_open;
    let calls = &["</tool_calls>", "</toolcall>", "</tool_call", "</tool call>", "</tool_cal>"];
    let close = closing(dice, "</tool_call>", calls, !(is_cut && is_last));
    let between = if end.is_empty() {
        ""
    } else if end.ends_with('>') {
        line_feed(dice)
    } else {
        "\n"
    };
    let after = if close.is_empty() { "" } else { "\n" };
    *is_plain = end.is_empty() && close.is_empty();
    let _ = write!(text, "{end}{between}{close}{after}");
    arguments
}

/// The content and the calls of some deltas.
pub(super) fn answer(deltas: Vec<String>) -> (String, Vec<(String, Value)>) {
    let mut content = String::new();
    let mut calls: Vec<(String, Value)> = Vec::new();
    let mut name = String::new();
    for delta in deltas {
        let (kind, text) = delta.split_once(' ').expect("a kind");
        match kind {
            "R" | "C" => content += text,
            _ if text.starts_with('{') => {
                calls.push((std::mem::take(&mut name), serde_json::from_str(text).expect(text)));
            }
            _ => name = text.to_owned(),
        }
    }
    (content, calls)
}

#[test]
fn broken_calls_have_expected_arguments() {
    let tools = tools_f_and_g();
    let mut failures = Vec::new();
    for seed in 0..answer_count() {
        let dice = &mut Dice(seed);
        let in_reasoning = dice.below(4) == 0;
        let before = *dice.pick(&["", "Let me look.\n\n", "It's `ls`:\n\n"]);
        let mut text = before.to_owned();
        let mut expected = Vec::new();
        let calls = 1 + dice.below(3);
        let mut is_plain = false;
        for call in 0..calls {
            let name = ["f", "g"][call % 2];
            let arguments = write_call(dice, &mut text, name, call + 1 == calls, &mut is_plain);
            expected.push((name.to_owned(), Value::Object(arguments)));
        }
        if dice.below(6) == 0 {
            text = text.replace('\n', "\r\n");
            for (_, arguments) in &mut expected {
                if let Some(Value::String(value)) = arguments.get_mut("s") {
                    *value = value.replace('\n', "\r\n");
                }
            }
        }
        let (content, calls) = answer(streamed(in_reasoning, &tools, &text, false));
        if content.trim() != before.trim() || calls != expected {
            failures.push(format!("seed {seed}:\n{text}\n--- {content:?} {calls:?}\n--- {expected:?}\n"));
        }
    }
    assert!(failures.is_empty(), "{} calls differ:\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
}

/// The arguments of the call with this body.
pub(super) fn read(body: &str) -> Vec<String> {
    whole(false, &format!("<tool_call>\n<function=f>\n{body}"))
}

#[test]
fn value_ends_where_its_tag_is_missing() {
    for (body, arguments) in [
        ("<parameter=o>\n{\"a\": 1}\n</function>\n</tool_call>", r#"{"o":{"a": 1}}"#),
        ("<parameter=o>\n{\"a\": 1}\n</tool_call>", r#"{"o":{"a": 1}}"#),
        ("<parameter=s>\n1\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>", r#"{"s":"1","n":2}"#),
        ("<parameter=s>\n1\n<parameter=n>\n2\n</function>\n</tool_call>", r#"{"s":"1","n":2}"#),
        ("<parameter=s>\n1\n<parameter=n>\n2\n</parameter>\n</parameter>\n</function>", r#"{"s":"1","n":2}"#),
        ("<parameter=s>\n1</parameter><parameter=n>2</parameter></function></tool_call>", r#"{"s":"1","n":2}"#),
        ("<parameter=s>\n1\n  </parameter>\n  </function>\n</tool_call>", r#"{"s":"1"}"#),
        ("<parameter=s>\n1\n</parameter>\n</parameter>\n</function>\n</function>\n</tool_call>", r#"{"s":"1"}"#),
        ("<parameter=s>\n1\n</parameter\n</function>\n</tool_call>", r#"{"s":"1"}"#),
        ("<parameter=s>\n1\n</parameter_function>\n</tool_call>", r#"{"s":"1"}"#),
        ("<parameter=s>\n1\n</parameter>\n</function_invocation>\n</tool_call>\n</tool_call>", r#"{"s":"1"}"#),
        ("<parameter=other>\n1\n</parameter>\n</function>", r#"{"other":"1"}"#),
    ] {
        assert_eq!(read(body), ["0 f".to_owned(), format!("0 {arguments}")], "{body}");
    }
    // The next call.
    let next = "<function=f>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>";
    for body in [format!("<parameter=s>\n1\n<tool_call>\n{next}"), format!("<parameter=s>\n1\n{next}")] {
        assert_eq!(read(&body), ["0 f", r#"0 {"s":"1"}"#, "1 f", r#"1 {"n":2}"#], "{body}");
    }
}

#[test]
fn complete_json_ends_at_any_tag() {
    for (body, arguments) in [
        ("<parameter=n>\n1 <parameter=s>\nx\n</parameter>\n</function>", r#"{"n":1,"s":"x"}"#),
        ("<parameter=n>\n1\n<parameter=n>\n2\n<parameter=o>\n{}\n</function>", r#"{"n":1,"o":{}}"#),
        ("<parameter=b>true</function>\n</tool_call>", r#"{"b":true}"#),
    ] {
        assert_eq!(read(body), ["0 f".to_owned(), format!("0 {arguments}")], "{body}");
    }
    // Line feeds in a string of an object, and a tag before the end of the object.
    let body = "<parameter=o>\n{'a': 'x\n</parameter>\n</function>\ny'}\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(read(body), ["0 f", r#"0 {"o":{"a": "x\n</parameter>\n</function>\ny"}}"#]);
}

#[test]
fn repeated_header_opens_one_value() {
    for (body, arguments) in [
        ("<parameter=n>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>", r#"{"n":5}"#),
        ("<parameter=n>\n<parameter=n>\n5\n</parameter>\n</parameter>\n</function>\n</tool_call>", r#"{"n":5}"#),
        ("<parameter=n>\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>", r#"{"n":5}"#),
        ("<parameter=n>\n\n</parameter>\n<parameter name=\"n\">\n5\n</parameter>\n</function>", r#"{"n":5}"#),
        ("<parameter=n><parameter=n>5</parameter></parameter></function></tool_call>", r#"{"n":5}"#),
        ("<parameter=s>\n<parameter=s>\nx\n</parameter>\n</parameter>\n</function>\n</tool_call>", r#"{"s":"x"}"#),
        ("<parameter=s>\n</parameter>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>", r#"{"s":"x"}"#),
        (
            "<parameter=s>\n<parameter=s>\nx\ny\n</parameter>\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>",
            r#"{"s":"x\ny","n":1}"#,
        ),
        ("<parameter=maybe>\n<parameter=maybe>\nnull\n</parameter>\n</parameter>\n</function>", r#"{"maybe":null}"#),
        (
            "<parameter=o>\n<parameter=o>\n{}\n</parameter>\n</parameter>\n<parameter=s>\nx\n</parameter>",
            r#"{"o":{},"s":"x"}"#,
        ),
        ("<parameter=s>\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>", r#"{"s":"","n":1}"#),
        ("<parameter=s>\n</parameter>\n</function>", r#"{"s":""}"#),
        ("<parameter=s>\n</parameter>\n", r#"{"s":""}"#),
    ] {
        assert_eq!(read(body), ["0 f".to_owned(), format!("0 {arguments}")], "{body}");
    }
}

#[test]
fn repeated_parameter_keeps_its_first_value() {
    for (body, arguments) in [
        ("<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>", r#"{"n":1}"#),
        ("<parameter=n>\n1\n<parameter=n>\n2\n</parameter>\n</function>", r#"{"n":1}"#),
        ("<parameter=n>\n1\n</parameter>\n<parameter name='n'>\n2\n</parameter>\n</function>", r#"{"n":1}"#),
        (
            "<parameter=s>\na\n</parameter>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nb\n</parameter>\n</function>",
            r#"{"s":"a","n":1}"#,
        ),
        ("<parameter=x>\na\n</parameter>\n<parameter=x>\nb\n</parameter>\n</function>", r#"{"x":"a"}"#),
        ("<parameter=s>\na\n</parameter>\n<parameter=s>\nb", r#"{"s":"a"}"#),
        (
            "<parameter=n>\n1\n</parameter>\n<parameter=n>\nfive\n</function>\nx\n</parameter>\n</function>",
            r#"{"n":1}"#,
        ),
    ] {
        assert_eq!(read(body), ["0 f".to_owned(), format!("0 {arguments}")], "{body}");
    }
}

#[test]
fn unfinished_tag_keeps_a_values_type() {
    for (name, value) in [("n", "5"), ("o", "{\"a\": [1]}"), ("b", "true"), ("maybe", "null")] {
        for tag in
            ["\n<", "\n</", "\n</para", "\n</parameter", "</param", "\n<param", "\n</func", "\n  </tool_c", "\r\n</p"]
        {
            let body = format!("<parameter={name}>\n{value}{tag}");
            assert_eq!(read(&body), ["0 f".to_owned(), format!("0 {{\"{name}\":{value}}}")], "{body:?}");
        }
    }
    assert_eq!(read("<parameter=n>\nfive\n</para"), ["0 f", r#"0 {"n":"five\n</para"}"#]);
}

#[test]
fn carriage_returns_around_tags_are_markup() {
    let text = "so\n</think>\n\nOk.\n\n<tool_call>\n<function=f>\n<parameter=s>\ntwo\nlines\n</parameter>\n<parameter=n>\n5\n\
                </parameter>\n<parameter=maybe>\nnull\n  </parameter\n<parameter=o\n{\"a\": 1}\n</parameter>\n</function>\n\
                </tool_call>\n<function=f>\n<parameter=s>\nx\n</function>";
    let arguments = r#"0 {"s":"two\r\nlines","n":5,"maybe":null,"o":{"a": 1}}"#;
    let expected = ["R so", "C Ok.", "0 f", arguments, "1 f", r#"1 {"s":"x"}"#];
    assert_eq!(whole(true, &text.replace('\n', "\r\n")), expected);
    // After a plain line feed, a carriage return belongs to the value.
    assert_eq!(read("<parameter=s>\na\r\nb\r\n</parameter>\n</function>"), ["0 f", r#"0 {"s":"a\r\nb\r"}"#]);
    assert_eq!(read("<parameter=s>a\r\n</parameter>\r\n</function>"), ["0 f", r#"0 {"s":"a"}"#]);
}

#[test]
fn characters_without_width_between_tags_are_markup() {
    let text = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n\
                </tool_call>\n";
    for extra in ["\u{200b}", "\u{200d}", "\u{2060}", "\u{feff}", "\u{200b}\u{200b}"] {
        let ends = text.match_indices(">\n").filter(|(at, _)| !text[at + 2..].starts_with(['x', '1']));
        for (end, _) in ends {
            for at in [end + 1, end + 2] {
                let (before, after) = text.split_at(at);
                let broken = format!("{before}{extra}{after}");
                assert_eq!(whole(false, &broken), ["0 f", r#"0 {"s":"x","n":1}"#], "{broken:?}");
            }
        }
        let value = format!("<parameter=s>\n{extra}x{extra}\n</parameter>\n</function>\n</tool_call>");
        assert_eq!(read(&value), ["0 f".to_owned(), format!("0 {}", json!({"s": format!("{extra}x{extra}")}))]);
    }
    // In a text between the tags they belong to the text, however the text is cut.
    let stray = "\u{1f468}\u{200d}\u{1f469}";
    let found = read(&format!("<parameter=s>x</parameter>{stray}</function>"));
    assert!(found.iter().any(|delta| delta.contains(stray)), "{found:?}");
}

#[test]
fn tags_of_other_markup_stay() {
    for line in [
        "<parameter name=\"x\">",
        "<parameter name=\"n\">",
        "<parameter name='s' type=\"int\"/>",
        "<parameter name='s' type=\"int\">",
        "<parameter name=\"n\" string=\"false\">",
        "<parameter name=\"n\" description=\"a b\" required>",
        "<parameter=x>",
        "<parameter>",
        "<parameter n>",
        "<parameters>",
        "</parameter >",
        "<function name=\"f\">",
        "<function=h>",
        "<function f>",
        "<functions>",
        "<tool_calls>",
        "<param=n>",
        "<parameter-group name=\"n\">",
    ] {
        for value in [
            line.to_string(),
            format!("a\n{line}\nb"),
            format!("{line}\nb"),
            format!("a\n{line}"),
            format!("a\n  {line} b\n{line}\nc"),
        ] {
            for rest in [
                "",
                "<parameter=n>\n1\n</parameter>\n",
                "<parameter=n>1</parameter>\n",
                "<parameter=o>\n{}\n</parameter>\n<parameter=n>\n1\n</parameter>\n",
            ] {
                let text = format!("<parameter=s>\n{value}\n</parameter>\n{rest}</function>\n</tool_call>");
                let mut expected = json!({"s": value});
                if rest.contains("=o>") {
                    expected["o"] = json!({});
                }
                if !rest.is_empty() {
                    expected["n"] = 1.into();
                }
                assert_eq!(answer(read(&text)).1, [("f".to_owned(), expected)], "{text}");
            }
        }
    }
}

#[test]
fn quoted_tags_stay_in_their_value() {
    for value in [
        "</parameter>\n</function>\n</tool_call>",
        "x\n</parameter>\n</function>\n</tool_call>",
        "x\n</parameter>\n</function>\n</tool_call>\nx",
        "ends with </parameter>",
        "</parameter>",
        "a\n</function>\nb",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n\ntext\n\n<tool_call>",
        "Begin:\n<tool_call>\n<function=NAME>\n<parameter=s>\nhere.",
        "<parameter=path>\nis a mention",
        "{\"a\": \"</parameter> <parameter=n>x\"}",
    ] {
        let body = format!("<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>");
        assert_eq!(read(&body), ["0 f".to_owned(), format!("0 {}", json!({"s": value}))], "{value}");
    }
    // Without `</parameter>`, a quotation mark still protects a tag, and so do an opening tag and text after the tag.
    for (body, arguments) in [
        ("<parameter=o>\n{\"a\": \"</parameter> <parameter=n>x\"}", json!({"o": {"a": "</parameter> <parameter=n>x"}})),
        ("<parameter=s>\nx\n</function>\ny", json!({"s": "x\n</function>\ny"})),
        ("<parameter=s>\nx\n</tool_call>\ny", json!({"s": "x\n</tool_call>\ny"})),
        (
            "<parameter=s>\n<tool_call>\n<function=x>\n</function>\n</tool_call>",
            json!({"s": "<tool_call>\n<function=x>\n</function>\n</tool_call>"}),
        ),
    ] {
        let deltas = read(&format!("{body}\n</function>\n</tool_call>"));
        assert_eq!(answer(deltas).1, [("f".to_owned(), arguments)], "{body}");
    }
}

#[test]
fn function_without_tool_call_is_call() {
    let body = "<parameter=s>\nx\n</parameter>\n</function>";
    for (before, reasoning) in [("", false), ("Ok.\n\n", false), ("Ok.", false), ("so\n", true)] {
        for (header, end) in [
            ("<function=f>", ""),
            ("<function=f>", "\n</tool_call>"),
            ("<function=f>", "\n</tool_call>\n</tool_call>"),
            ("<function name=\"f\">", ""),
            ("<invoke name='f'>", "\n</invoke>"),
        ] {
            let text = format!("{before}{header}\n{body}{end}");
            let mut expected = vec!["0 f".to_owned(), r#"0 {"s":"x"}"#.to_owned()];
            if !before.is_empty() {
                expected.insert(0, format!("{} {}", if reasoning { "R" } else { "C" }, before.trim()));
            }
            assert_eq!(whole(reasoning, &text), expected, "{text}");
        }
    }
}

#[test]
fn call_after_much_white_space_is_read() {
    let call = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
    let text = format!("Ok.{}{call}", "\n".repeat(1500));
    assert_eq!(whole(false, &text), ["C Ok.", "0 f", r#"0 {"n":1}"#]);
}

#[test]
fn truncated_quote_stays_open() {
    for (body, arguments) in [
        ("<parameter=s>\n<function name='a'>\n</function>\n<b", r#"{"s":"<function name='a'>\n</function>\n<b"#),
        ("<parameter=s>\nx\n</function>\ny", r#"{"s":"x\n</function>\ny"#),
        ("<parameter=s>\nx\n</parameter>\n</function>", r#"{"s":"x"}"#),
    ] {
        let actual = cut(false, &format!("<tool_call>\n<function=f>\n{body}"));
        assert_eq!(actual, ["0 f".to_owned(), format!("0 {arguments}")], "{body}");
    }
}

#[test]
fn long_names_are_independent_of_cuts() {
    for length in 990..1010 {
        let name = "s".repeat(length);
        for text in [
            format!("<tool_call>\n<function=f>\n<parameter={name}>\n1\n</parameter>\n</function>\n</tool_call>"),
            format!("<tool_call>\n<function={name}>\n</function>\n</tool_call>"),
        ] {
            // Compares with the text character by character.
            whole(false, &text);
        }
    }
}

#[test]
fn long_values_take_linear_time() {
    let long = "a line with a <tag> and \"quotes\"\n".repeat(30_000);
    for before in ["", "</parameter>\n", "</parameter>\n</function>\n</tool_call>\n", "\"</parameter>\"\n"] {
        let body = format!("<parameter=s>\n{before}{long}</parameter>\n</function>\n</tool_call>");
        let mut parser = Parser::new(false, &tools());
        let mut deltas = parser.push("<tool_call>\n<function=f>\n");
        let mut rest = body.as_str();
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(4));
            deltas.extend(parser.push(piece));
            rest = later;
        }
        deltas.extend(parser.finish(false));
        let json: String =
            deltas.iter().filter(|delta| matches!(delta, Delta::Arguments { .. })).map(Delta::text).collect();
        let value = format!("{before}{long}");
        let expected = json!({"s": value.strip_suffix('\n')}).to_string();
        assert!(json == expected, "value after {before:?}");
    }
}
