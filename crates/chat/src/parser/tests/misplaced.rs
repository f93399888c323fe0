//! Calls with headers, names and text at the wrong place.

use super::{
    malformed::{answer, read},
    *,
};

#[test]
fn text_before_end_of_call_is_content() {
    for (rest, content) in [
        ("</function>\nI list it.\n</tool_call>", "\nI list it."),
        ("</function>\nI list it.\n</function>\n</tool_call>", "\nI list it."),
        ("</function>\nOne.\n</function>\nTwo.\n</tool_call>\nThree.", "\nOne.\nTwo.\nThree."),
        ("</function>\nA\n```\n</tool_call>\n```", "\nA\n```\n</tool_call>\n```"),
        ("</function>\n</tool_call>\nA line is\n</tool_call>", "\nA line is\n</tool_call>"),
        ("</function>\n<function={{ name }}>\n</tool_call>", "\n<function={{ name }}>"),
    ] {
        let deltas = read(&format!("<parameter=s>\nx\n</parameter>\n{rest}"));
        let expected = (content.to_owned(), vec![("f".to_owned(), json!({"s": "x"}))]);
        assert_eq!(answer(deltas), expected, "{rest}");
    }
}

#[test]
fn parameter_tag_with_tool_name_is_call() {
    let [one, two] =
        ["f", "g"].map(|name| format!("<parameter={name}>\n<parameter=s>\nx\n</parameter>\n</function>\n"));
    for (text, names) in [
        (format!("<tool_call>\n{one}</tool_call>"), "f"),
        (format!("<tool_call>\n{one}</tool_call>\n<tool_call>\n{two}</tool_call>"), "fg"),
        (format!("<tool_call>\n{one}{two}</tool_call>"), "fg"),
        (format!("Ok.\n\n{one}{two}"), "fg"),
        (format!("<tool_call>\n<function=f>\n{one}</tool_call>"), "f"),
        (one.replace("=f", "=h"), ""),
        (one.replace("<parameter=s>\nx\n</parameter>\n", ""), ""),
        (format!("`{one}`"), ""),
    ] {
        let (_, calls) = answer(streamed(false, &tools_f_and_g(), &text, false));
        let called: String = calls.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(called, names, "{text}");
        assert!(calls.iter().all(|(_, arguments)| *arguments == json!({"s": "x"})), "{text}: {calls:?}");
    }
}

#[test]
fn header_without_bracket_keeps_its_value() {
    for (header, value) in [
        ("<parameter=s ls -l\n", "ls -l"),
        ("<parameter=s=ls -l\n", "ls -l"),
        ("<parameter=s=ls", "ls"),
        ("<parameter=s a = b\nc\n", "a = b\nc"),
        ("<parameter=s \nx\n", "x"),
        ("<parameter =s ls\n", "ls"),
        ("<parameter=s ls > out 2>&1\n", "ls > out 2>&1"),
        ("<parameter=s export A=\"b\"\n", "export A=\"b\""),
    ] {
        let deltas = read(&format!("{header}</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"));
        let expected = ("f".to_owned(), json!({"s": value, "n": 1}));
        assert_eq!(answer(deltas), (String::new(), vec![expected]), "{header}");
    }
    for header in ["<parameter=other x", "<parameter  =éé x", "<parameter\u{3000}\u{3000}=ss x"] {
        let deltas = read(&format!("{header}\n</parameter>\n</function>"));
        assert_eq!(answer(deltas).1, [("f".to_owned(), json!({}))], "{header}");
        read(&format!("<parameter=s>\nx\n{header}\n</parameter>\n</function>"));
    }
}

#[test]
fn object_in_one_parameter_is_all_arguments() {
    for (body, arguments) in [
        ("<parameter=arguments>\n{\"n\": 1}\n</parameter>\n</function>", json!({"n": 1})),
        ("<parameter=input>{'n': 1}}\n", json!({"n": 1})),
        ("<parameter=parameters>\n```json\n{\"n\": 1}\n```\n</parameter>", json!({"n": 1})),
        ("<parameter=arguments>\n[1]\n</parameter>", json!({"arguments": "[1]"})),
        ("<parameter=n>\n1\n</parameter>\n<parameter=input>\n{}\n</parameter>", json!({"n": 1, "input": "{}"})),
        (
            "<parameter=input>\n{\"x\": 1}\n</parameter>\n<parameter=s>\na\n</parameter>",
            json!({"input": "{\"x\": 1}", "s": "a"}),
        ),
    ] {
        assert_eq!(answer(read(body)), (String::new(), vec![("f".to_owned(), arguments)]), "{body}");
    }
}

#[test]
fn empty_call_is_dropped() {
    let call = "<tool_call>\n<function=f>\n</function>\n</tool_call>";
    for (text, expected) in [
        ("Ok.\n\n<tool_call>\n</tool_call>", vec!["C Ok."]),
        ("<tool_call></tool_call>", vec![]),
        ("<tool_call>\n</tool_call>\nOk.", vec!["C \nOk."]),
        (&format!("<tool_call>\n</tool_call>\n{call}"), vec!["0 f", "0 {}"]),
        (&format!("{call}\n<tool_call>\n</tool_call>"), vec!["0 f", "0 {}"]),
        ("Write <tool_call></tool_call> here", vec!["C Write <tool_call></tool_call> here"]),
        ("```\n<tool_call>\n</tool_call>\n```", vec!["C ```\n<tool_call>\n</tool_call>\n```"]),
    ] {
        assert_eq!(whole(false, text), expected, "{text}");
    }
}
