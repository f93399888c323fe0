mod json;
mod linear;
mod malformed;
mod misplaced;
mod misspelt;
mod quoted;

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Vec<Value> {
    vec![json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "b": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}
    }}}})]
}

/// The tool of [`tools`], named `f` and `g`.
fn tools_f_and_g() -> Vec<Value> {
    let mut second = tools().remove(0);
    second["function"]["name"] = "g".into();
    vec![tools().remove(0), second]
}

/// Number of random answers of a test.
fn answer_count() -> u64 {
    std::env::var("MOESTRO_CALLS").ok().and_then(|count| count.parse().ok()).unwrap_or(400)
}

/// Deltas of some pieces as text. Deltas of the same kind are joined. Ids are checked and left out.
fn pieces<'a>(mut parser: Parser, pieces: impl IntoIterator<Item = &'a str>, cut: bool) -> Vec<String> {
    let mut text = String::new();
    let mut deltas = Vec::new();
    for piece in pieces {
        text += piece;
        deltas.extend(parser.push(piece));
    }
    deltas.extend(parser.finish(cut));
    let spans: String = parser.spans().into_iter().map(|span| &text[span]).collect();
    let content: String = deltas
        .iter()
        .filter_map(|delta| if let Delta::Content(text) = delta { Some(text.as_str()) } else { None })
        .collect();
    assert_eq!(spans, content, "spans cover the content");
    parser.out.clear();
    deltas.into_iter().for_each(|delta| parser.emit(delta));
    let actual = parser.out.iter().map(|delta| match delta {
        Delta::Reasoning(text) => format!("R {text}"),
        Delta::Content(text) => format!("C {text}"),
        Delta::ToolCall { index, id, name } => {
            assert!(id.starts_with("call_") && id.len() == 29 && id[5..].bytes().all(|b| b.is_ascii_alphanumeric()));
            format!("{index} {name}")
        }
        Delta::Arguments { index, json } => format!("{index} {json}"),
    });
    actual.collect()
}

fn whole(in_reasoning: bool, text: &str) -> Vec<String> {
    ended(in_reasoning, text, false)
}

/// The deltas of an answer that the token limit ended.
fn cut(in_reasoning: bool, text: &str) -> Vec<String> {
    ended(in_reasoning, text, true)
}

fn ended(in_reasoning: bool, text: &str, cut: bool) -> Vec<String> {
    streamed(in_reasoning, &tools(), text, cut)
}

/// The deltas of an answer, which are the same for the whole text and character by character.
fn streamed(in_reasoning: bool, tools: &[Value], text: &str, cut: bool) -> Vec<String> {
    let parser = || Parser::new(in_reasoning, tools);
    let whole = pieces(parser(), [text], cut);
    let single: Vec<String> = text.chars().map(String::from).collect();
    let single = || single.iter().map(String::as_str);
    assert_eq!(pieces(parser(), single(), cut), whole, "by character: {text:?}");
    // Content before a call shows that no grammar constrains the call.
    if whole.iter().find(|delta| !delta.starts_with("R ")).is_some_and(|delta| delta.starts_with("C ")) {
        assert_eq!(
            pieces(parser().with_exact_calls(ExactCalls::WithoutContent), single(), cut),
            whole,
            "after content: {text:?}"
        );
    }
    whole
}

#[test]
fn reasoning_ends_at_the_first_end_tag() {
    assert_eq!(whole(true, "hmm\nso\n</think>\n\nhi </think> there\n"), ["R hmm\nso", "C hi </think> there\n"]);
    assert_eq!(whole(true, "\n\nhmm</think>hi"), ["R hmm", "C hi"]);
    assert_eq!(whole(true, "\n</think>\n\n"), [""; 0]);
    assert_eq!(whole(true, "cut off\n</thi"), ["R cut off\n</thi"]);
    assert_eq!(whole(true, "<tool_call> in thought</think>x"), ["R <tool_call> in thought", "C x"]);
    assert_eq!(whole(true, "<think>\nagain</think>x"), ["R again", "C x"]);
    assert_eq!(whole(false, "\n<think>\nhmm\n</think>\n\nhi"), ["R hmm", "C hi"]);
    assert_eq!(whole(false, "  hi <think>"), ["C   hi <think>"]);
    assert_eq!(whole(false, ""), [""; 0]);
}

#[test]
fn calls_are_typed_by_their_tool() {
    let text = "Let me look.\n\n<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n\
                <parameter=o>\n{\"a\": [1]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=maybe>\nnull\n\
                </parameter>\n<parameter=other>\n1\n</parameter>\n</function>\n</tool_call>\n\
                <tool_call>\n<function=g>\n</function>\n</tool_call>\n";
    let first = r#"0 {"s":"5","n":5,"o":{"a": [1]},"b":true,"maybe":null,"other":"1"}"#;
    assert_eq!(whole(false, text), ["C Let me look.", "0 f", first, "1 g", "1 {}"]);
}

#[test]
fn values_are_raw_text() {
    let call = |value: &str| {
        format!("<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>")
    };
    for value in [
        "",
        "\n",
        "\n\nx\n\n",
        "a < b && \"c\" \\ \t é 😀",
        "<tool_call>\n<function=x>\n</function>\n</tool_call>",
        "</param> </parameter x>",
        "say </parameter> and continue",
        "</think>",
        "null",
    ] {
        let arguments = format!("0 {}", json!({"s": value}));
        assert_eq!(whole(false, &call(value)), ["0 f".to_string(), arguments], "{value:?}");
    }
    // The line feeds around a value may be missing.
    let bare =
        "<tool_call><function=f><parameter=s>x</parameter><parameter=maybe>nullify</parameter></function></tool_call>";
    assert_eq!(whole(false, bare), ["0 f", r#"0 {"s":"x","maybe":"nullify"}"#]);
}

#[test]
fn strings_are_streamed() {
    let mut parser = Parser::new(false, &tools());
    let mut say = |text: &str| parser.push(text).iter().map(Delta::text).collect::<String>();
    assert_eq!(say("<tool_call>\n<function=f>"), "f");
    assert_eq!(say("\n<parameter=s>\n"), r#"{"s":""#);
    assert_eq!(say("one\n"), "one");
    assert_eq!(say("two</p"), "\\ntwo");
    assert_eq!(say("re>\n</parameter>"), "</pre>");
    // The value may quote the tags. The end of the answer or the next call shows that it does not.
    assert_eq!(say("\n</function>\n</tool_call>"), "");
    assert_eq!(say("\n<tool_call>\n<function=f>"), "\"}f");
}

#[test]
fn consecutive_calls_with_text_are_parsed() {
    let call = "<tool_call>\n<function=f>\n</function>\n</tool_call>";
    let text = format!("so</think>\n\n{call}\n{call}\nand then\n");
    assert_eq!(whole(true, &text), ["R so", "0 f", "0 {}", "1 f", "1 {}", "C \nand then"]);
    let two = "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>";
    assert_eq!(whole(false, two), ["0 f", "0 {}", "1 g", "1 {}"]);
}

#[test]
fn malformed_call_is_content() {
    for text in [
        "a <tool_call> b",
        "a\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>",
        "a <tool_call>\n<function=f",
        "a <tool_call>\n<function=>",
        "<tool_call>\n<function={{ tool.name }}>\n</function>\n</tool_call>",
        "a <tool_call>\n<function=f\n>",
        "a <tool_ca",
        "a \n",
    ] {
        assert_eq!(whole(false, text), [format!("C {text}")]);
    }
    let call = "a <tool_call>\n<function=f>\n</function>\n</tool_call>";
    assert_eq!(pieces(Parser::new(false, &[]), [call], false), [format!("C {call}")], "no tools, no calls");
}

#[test]
fn call_in_reasoning_ends_it() {
    let call = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
    let called = ["R so", "0 f", r#"0 {"n":1}"#];
    assert_eq!(whole(true, &format!("so\n{call}")), called);
    assert_eq!(whole(true, &format!("so\n\n{call}\n</think>\n\n")), called);
    assert_eq!(whole(true, &format!("so\n{call}\n</think>\n\nhi")), ["R so", "0 f", r#"0 {"n":1}"#, "C hi"]);
    // A call of an unknown tool is part of the reasoning.
    for thought in ["<tool_call>\n<function=unknown>", "<tool_call> <function", "<tool_call>\n{", "a <tool_ca"] {
        assert_eq!(whole(true, &format!("{thought}\n</think>x")), [format!("R {thought}"), "C x".into()]);
        assert_eq!(whole(true, thought), [format!("R {thought}")]);
    }
}

#[test]
fn truncated_call_stays_open() {
    let start = "<tool_call>\n<function=f>\n";
    for (rest, arguments) in [
        ("", "{"),
        ("<param", "{"),
        ("</func", "{"),
        ("<parameter=s>", r#"{"s":""#),
        ("<parameter=s>\nab\n", r#"{"s":"ab"#),
        ("<parameter=s>\nab\n</para", r#"{"s":"ab"#),
        ("<parameter=s>\nab\n</parameter>", r#"{"s":"ab"#),
        ("<parameter=s>\nab\n</parameter>\n<para", r#"{"s":"ab"#),
        ("<parameter=s>\nab\n</parameter>\n<parameter=n>", r#"{"s":"ab","n":"#),
        ("<parameter=n>\n1", r#"{"n":"#),
        ("<parameter=o>\n{\"a\": 1}", r#"{"o":"#),
    ] {
        let actual = cut(false, &format!("{start}{rest}"));
        assert_eq!(actual, ["0 f".to_string(), format!("0 {arguments}")], "{rest:?}");
        assert!(serde_json::from_str::<Value>(arguments).is_err());
    }
    // A complete call stays complete, and an incomplete tag is dropped.
    assert_eq!(cut(false, &format!("{start}</function>\n</too")), ["0 f", "0 {}"]);
    assert_eq!(cut(false, &format!("{start}</function>\n</tool_call>\n<tool_ca")), ["0 f", "0 {}"]);
    assert_eq!(cut(false, &format!("{start}</function>\n</tool_call>\n<tool_call>\n<func")), ["0 f", "0 {}"]);
    assert_eq!(cut(false, &format!("{start}</function>\n<function=")), ["0 f", "0 {}"]);
    for tag in ["<tool_call>", "<tool_call>\n", "<tool_call>\n<function=get_w"] {
        assert_eq!(cut(false, &format!("I look.\n\n{tag}")), ["C I look."]);
        assert_eq!(cut(true, &format!("I look.\n\n{tag}")), ["R I look."]);
    }
}

#[test]
fn incomplete_call_is_closed() {
    let start = "<tool_call>\n<function=f>\n";
    for (rest, arguments) in [
        ("", "{}"),
        ("<param", "{}"),
        ("<parameter=s>", r#"{"s":""}"#),
        ("<parameter=s>\nab\n", r#"{"s":"ab\n"}"#),
        ("<parameter=s>\nab\n</para", r#"{"s":"ab\n</para"}"#),
        ("<parameter=s>\nab\n</parameter>", r#"{"s":"ab"}"#),
        ("<parameter=s>\nab\n</parameter>\n<para", r#"{"s":"ab"}"#),
        ("<parameter=o>\n{\"a\": ", r#"{"o":"{\"a\": "}"#),
        ("<parameter=maybe>\nnul", r#"{"maybe":"nul"}"#),
        ("</func", "{}"),
        ("</function>\n<", "{}"),
        ("</function>\n</tool", "{}"),
        ("<parameter=n>\n1\n</parameter>\n</tool_call>", r#"{"n":1}"#),
        ("<parameter=n>\n1\n</parameter>\n</function>", r#"{"n":1}"#),
    ] {
        assert_eq!(whole(false, &format!("{start}{rest}")), ["0 f".to_string(), format!("0 {arguments}")], "{rest:?}");
    }
}

#[test]
fn stray_text_in_call_is_content() {
    let text = "<tool_call>\n<function=f>\n note: <b> \n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(whole(false, text), ["0 f", "C note: <b> \n", r#"0 {"n":1}"#]);
    let text = "<tool_call>\n<function=f>\n<parameter=>\n</function>\n</tool_call>";
    assert_eq!(whole(false, text), ["0 f", "C <parameter=>\n", "0 {}"]);
}

/// Markup in random order.
fn markup() -> impl Strategy<Value = String> {
    let short = [
        "<think>", "</think>", "</param", "</param>", "`", "```\n", "\n", " ", "x", "null", "12", "é", "\"", "<", ">",
        "\\", "[", "}", ",", "=", "\u{3000}",
    ];
    let long = [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=s>",
        "<parameter=n>",
        "<parameter=o>",
        "<parameter=maybe>",
        "<parameter=",
        "</parameter>",
        "</ function>",
        "</tool_call",
        "<parameter=\"n\">",
        "<parameter name='o'>",
        "<parameter=s\n",
        "<parameter=s A=\"b\"",
        "<parameter=f>",
        "<parameter=arguments>",
        "<arguments>",
        "</arguments>",
        "<s>",
        "</s>",
        "<n>",
        "</n>",
        "<s a>",
        "</args>",
        "<n",
        "</",
        "<name>f</name>",
        "<parameter  =",
        "<parameter",
        "<function>",
        "{\"function=f\"",
        "{\"a\": 1}",
        "<tool_calls>",
        "<|tool_call|>",
        "<invoke name=\"f\">",
        "{\"name\": \"f\", \"arguments\": ",
        "{'name': 'f'}",
        "<tool_call>\n<function=f>\n<parameter=s>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ];
    let word = prop::sample::select([&short[..], &long].concat());
    prop::collection::vec(word, 0..24).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn cuts_do_not_change_deltas(text in markup(), in_reasoning: bool, cuts in prop::collection::vec(0usize..12, 0..24)) {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        for cut in cuts {
            let at = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
            let (part, later) = rest.split_at(at);
            parts.push(part);
            rest = later;
        }
        parts.push(rest);
        for cut in [false, true] {
            let parts = parts.iter().copied();
            prop_assert_eq!(pieces(Parser::new(in_reasoning, &tools()), parts, cut), ended(in_reasoning, &text, cut));
        }
    }

    #[test]
    fn arguments_are_always_an_object(text in markup()) {
        let mut parser = Parser::new(false, &tools());
        let mut deltas = parser.push(&format!("<tool_call>\n<function=f>\n{text}"));
        deltas.extend(parser.finish(false));
        let mut calls: Vec<String> = Vec::new();
        for delta in deltas {
            match delta {
                Delta::ToolCall { index, .. } => { prop_assert_eq!(index, calls.len()); calls.push(String::new()); }
                Delta::Arguments { index, json } => { prop_assert_eq!(index + 1, calls.len()); calls[index] += &json; }
                _ => {}
            }
        }
        prop_assert!(!calls.is_empty());
        for json in calls {
            let parsed: Result<serde_json::Map<String, Value>, _> = serde_json::from_str(&json);
            prop_assert!(parsed.is_ok(), "{}", json);
        }
    }

    #[test]
    fn text_without_tools_is_unchanged(text in markup()) {
        prop_assume!(!text.trim_start().starts_with("<think>"));
        let actual = pieces(Parser::new(false, &[]), [text.as_str()], false).concat();
        prop_assert_eq!(actual.strip_prefix("C ").unwrap_or(""), text);
    }
}
