//! Words of tags with one wrong letter, and parameters that mix two kinds of tags.

use super::*;
use malformed::{answer, read};

fn named_tools() -> [Value; 1] {
    let names = ["s", "n", "o"].map(|name| (name.to_owned(), json!({"type": "string"})));
    let properties = serde_json::Map::from_iter(names);
    [json!({"name": "f", "parameters": {"type": "object", "properties": properties}})]
}

#[test]
fn misspelt_tags_are_read() {
    let expected = [("f".to_owned(), json!({"s": "a\nb", "n": 5}))];
    for parameter in ["parameter", "param", "parameters", "paramter", "parametr", "paremeter", "parmaeter", "Param"] {
        for function in ["function", "functions", "fuction", "funtcion", "functiom"] {
            for call in ["tool_call", "toolcall", "tool_cal", "tool_calll", "tool_clal"] {
                let close = |word: &str| format!("</{}>", word.to_lowercase());
                let text = format!(
                    "<{call}>\n<{function}=f>\n<{parameter}=s>\na\nb\n{end}\n<{parameter} name=\"n\">\n5\n{end}\n{}\n{}",
                    close(function),
                    close(call),
                    end = close(parameter),
                );
                assert_eq!(answer(whole(false, &text)), (String::new(), expected.to_vec()), "{text}");
            }
        }
    }
}

#[test]
fn cut_closing_tag_is_dropped() {
    for end in ["</tool_c", "</tool_ca\n", "</tool_cal\n\n"] {
        let text = format!("<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n{end}");
        assert_eq!(whole(false, &text), ["0 f", "0 {\"n\":5}"], "{text}");
    }
}

#[test]
fn other_words_are_no_tags() {
    for value in [
        "<perimeter=s>\n1\n</perimeter>",
        "<junction>\n1\n</junction>",
        "<fraction>\n1\n</fraction>",
        "<parade name=\"n\">\n1\n</parade>",
        "<object>\n<param name=\"n\" value=\"1\">\n<param name=\"n\">\n</object>",
        "<applet>\n<param=n>\n</applet>",
        "<object>\n<param name=\"n\">1</param>\n<param name=\"b\">2</param>\n</object>",
        "<Tool>\n<Param name=\"b\">\n1\n</Param>\n<Param name=\"n\">\n2\n</Param>\n</Tool>",
        "<params>\n<param id=\"a\">1</param>\n<param name=\"other\">2</param>\n</params>",
        "<parameters id=\"a\">\n</parameters>\n<parameters name=\"c\">2</parameters>",
        "<functions>\n\n```\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n```",
        "<call tool=\"f\">\n</call>",
    ] {
        for rest in ["", "<parameter=n>\n5\n</parameter>\n"] {
            let arguments = if rest.is_empty() { json!({"s": value}) } else { json!({"s": value, "n": 5}) };
            let text = format!("<parameter=s>\n{value}\n</parameter>\n{rest}</function>\n</tool_call>");
            assert_eq!(answer(read(&text)), (String::new(), vec![("f".to_owned(), arguments)]), "{text}");
        }
        assert_eq!(whole(false, value), [format!("C {value}")]);
    }
}

#[test]
fn parameters_with_different_tags_are_read() {
    let expected = [("f".to_owned(), json!({"s": "a", "n": "b", "o": "c"}))];
    for body in [
        "<s>\na\n</s>\n<parameter=n>\nb\n</parameter>\n<o>\nc\n</o>",
        "<s>\na\n</parameter>\n<n>\nb\n</parameter>\n<parameter=o>\nc\n</parameter>",
        "<parameter=s>\na\n</s>\n<n>\nb\n</n>\n<o>\nc\n</o>",
        "<parameter=s>\na\n</s>\n<n>\nb\n</parameter>\n<parameter=o>\nc\n</o>",
        "<s>\na\n</s>\n<parameter=n>\nb\n</parameter>\n<o>\nc\n</parameter>",
    ] {
        for end in ["\n</function>\n</tool_call>", "\n</tool_call>", ""] {
            let text = format!("<tool_call>\n<function=f>\n{body}{end}");
            let deltas = streamed(false, &named_tools(), &text, false);
            assert_eq!(answer(deltas), (String::new(), expected.to_vec()), "{text}");
        }
    }
    // Elements of a value with the names of parameters.
    for value in ["<x>\n</parameter>\n<n>\n1\n</n>\n</x>", "<x>\n<s>\n1\n</s>\n<n>\n1\n</n>\n</x>"] {
        let text =
            format!("<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>");
        let deltas = streamed(false, &named_tools(), &text, false);
        assert_eq!(answer(deltas).1, [("f".to_owned(), json!({"s": value}))], "{text}");
    }
}

#[test]
fn tool_tag_on_same_line_is_text() {
    let tool = |name| json!({"name": name, "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}});
    let tools = [tool("f"), tool("div")];
    let value = "a\n</parameter>\n</function>\n</tool_call> <div>x</div>\n<tool_call> <div>\nb";
    let text = format!("<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>");
    assert_eq!(answer(streamed(false, &tools, &text, false)).1, [("f".to_owned(), json!({"s": value}))]);
    let next = "<tool_call>\n<div>\n<s>\nb\n</s>\n</div>\n</tool_call>";
    let text = format!("<tool_call>\n<function=f>\n<parameter=s>\na\n{next}");
    let expected = [("f".to_owned(), json!({"s": "a"})), ("div".to_owned(), json!({"s": "b"}))];
    assert_eq!(answer(streamed(false, &tools, &text, false)).1, expected);
}
