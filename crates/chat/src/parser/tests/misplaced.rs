//! Calls with headers, names and text at the wrong place.

use super::{
    malformed::{STRINGS, answer, read},
    *,
};
use test_support::mutate::Dice;

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

#[test]
fn name_may_be_a_tag() {
    let values = STRINGS.iter().filter(|(_, quotes)| !quotes).map(|(value, _)| *value);
    for value in values.chain(["<?xml?>\n<a>\n  <i>1</i>\n</a>", "<s>\nx\n</s>", "a</s> b <n> c"]) {
        let expected = [("f".to_owned(), json!({"s": value, "n": 5}))];
        let body = format!("<s>\n{value}\n</s>\n<n>5</n>\n");
        let object = expected[0].1.to_string();
        for header in
            ["<function=f>\n", "<name>f</name>\n", "<tool_name> f </tool_name>", "<function_name>f</function_name>\n"]
        {
            for wrapper in ["arguments", "parameters", "params", "args", "input"] {
                for body in
                    [&body, &format!("<parameter=s>\n{value}\n</parameter>\n<parameter=n>5</parameter>\n"), &object]
                {
                    for end in ["</function>\n</tool_call>", "</tool_call>", ""] {
                        let text = format!("Ok.\n<tool_call>\n{header}<{wrapper}>\n{body}</{wrapper}>\n{end}");
                        let (content, calls) = answer(streamed(false, &tools(), &text, false));
                        assert_eq!((content.trim(), &calls[..]), ("Ok.", &expected[..]), "{text}");
                    }
                }
            }
            // The second has an argument after the tag around all arguments.
            for body in [&body, &format!("<args>\n<s>\n{value}\n</s>\n</args>\n<n>5</n>\n")] {
                let text = format!("<tool_call>\n{header}{body}</function>\n</tool_call>");
                assert_eq!(answer(whole(false, &text)), (String::new(), expected.to_vec()), "{text}");
            }
        }
        let text = format!("<function=f>\n{body}</function>");
        assert_eq!(answer(whole(true, &text)), (String::new(), expected.to_vec()), "{text}");
    }
}

#[test]
fn name_may_be_the_closing_tag() {
    for value in STRINGS
        .iter()
        .filter(|(value, quotes)| !quotes && !value.ends_with('\n'))
        .map(|(value, _)| *value)
        .chain(["<s>x</s>\ny", "<a>\n</a>"])
    {
        for rest in ["<parameter=n>\n5\n</n>\n</function>", "<parameter=n>5</parameter>\n</function>\n</tool_call>"] {
            for end in ["\n</s>\n", "</s>\n", "\n  </s>\n"] {
                let deltas = read(&format!("<parameter=s>\n{value}{end}{rest}"));
                let expected = vec![("f".to_owned(), json!({"s": value, "n": 5}))];
                assert_eq!(answer(deltas), (String::new(), expected), "{value}{end}{rest}");
            }
        }
    }
    for value in ["<a>\n<s>\nx\n</s>\n</a>", "x\n</s>", "<s>\n<n>\n5\n</n>\n</s>", "</s> x", "</n>\n</o>"] {
        let deltas = read(&format!("<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"));
        assert_eq!(answer(deltas).1, [("f".to_owned(), json!({"s": value}))], "{value}");
    }
}

#[test]
fn name_tags_in_values_are_text() {
    let names = ["html", "content", "path", "func", "tool_call_id", "a=b", "src/", ""];
    let properties: serde_json::Map<_, _> =
        names.iter().map(|name| (name.to_string(), json!({"type": "string"}))).collect();
    let tool = json!({"name": "f", "parameters": {"type": "object", "properties": properties}});
    let check = |body: &str, arguments: Value, content: &str| {
        for end in ["\n</function>\n</tool_call>", "</function>", "\n</tool_call>", ""] {
            let text = format!("<tool_call>\n<function=f>\n{body}{end}");
            let (actual, calls) = answer(streamed(false, std::slice::from_ref(&tool), &text, false));
            assert_eq!((actual.trim(), &calls[..]), (content, &[("f".to_owned(), arguments.clone())][..]), "{text}");
        }
    };
    for value in [
        "<html>\nx\n</html>",
        "<html>x</html>",
        "<html lang=\"en\">\nx\n</html>",
        "<html\nlang=\"en\">\n<html>x</html>\n</html>",
        "<args>\nx\n</args>",
        "<path d=\"M0\">\n<a/>\n</path>",
        "<path>\nx\n</path>",
        "<content>\n<path>\nx\n</path>\n</content>",
        "<content type=\"a\">\nx\n</content>",
        "x\n</arguments>",
        "x\n</path>\n</html>\ny",
        "<object>\n<param>v</param>\n<path>q</path>\n</object>",
        "<params>\n<path>q</path>\n</params>\nx",
        "<Params.Provider>\nx\n</Params.Provider>\nx",
        "<toolbar-vertical>\n<tool:local>x</tool:local>\n</toolbar-vertical>",
    ] {
        let (html, both) = (json!({"html": value}), json!({"html": value, "path": "p"}));
        if !value.contains("\n</html>\ny") {
            check(&format!("<parameter=html>\n{value}"), html.clone(), "");
            check(&format!("<parameter=html>\n{value}\n<parameter=path>\np\n</parameter>"), both, "");
            check(&format!("<parameter=html>\n{value}\n</html>"), html.clone(), "");
        }
        check(&format!("<parameter=html>\n{value}\n</parameter>"), html, "");
        for path in ["<path>p</path>", "<path>\np\n</path>"] {
            let both = json!({"content": value, "path": "p"});
            check(&format!("<content>\n{value}\n</content>\n{path}"), both.clone(), "");
            check(&format!("<args>\n<content>\n{value}\n</content>\n{path}\n</args>"), both, "");
        }
        check(&format!("<content>\n{value}\n</content>"), json!({"content": value}), "");
    }
    // Elements of XML with the name of a tag and of a parameter.
    for value in [
        "<plugin>\n<parameter>v</parameter>\n<path>p</path>\n</plugin>",
        "<path>\n<parameter>v</parameter>\n</path>",
        "<args>\n<parameter>\nv\n</parameter>\n</args>\n<path>\n</path>",
        "<f>\n<parameter>v</parameter>\n</f>",
    ] {
        check(&format!("<parameter=html>\n{value}\n</parameter>"), json!({"html": value}), "");
    }
    check("<parameter=src/>\nx\n</parameter>", json!({"src/": "x"}), "");
    check("<parameter=a=b>\nx\n</parameter>", json!({"a=b": "x"}), "");
    for (body, content) in [("<a=b>x</a=b>", "<a=b>x</a=b>"), ("<func>go", "<func>go"), ("<>x</>", "<>x</>")] {
        check(body, json!({}), content);
    }
    for text in ["<tool_call>\n<function=/>\n</tool_call>", "<function=/>\n</function>"] {
        let names: Vec<_> = answer(whole(false, text)).1.into_iter().map(|(name, _)| name).collect();
        assert!(names.iter().all(|name| name == "/"), "{text}");
    }
}

#[test]
fn name_tags_elsewhere_are_text() {
    for text in [
        "<tool_call>\n<name>h</name>\n<s>x</s>\n</tool_call>",
        "<name>f</name>\n<s>x</s>",
        "<s>x</s>",
        "<tool_call>\n<name>f</b>",
        "<tool_call>\n<h>\n<s>x</s>\n</h>\n</tool_call>",
        "<tool_call>\n<f>\ntext\n</tool_call>",
        "<f>\n<s>x</s>\n</f>",
    ] {
        assert_eq!(whole(false, text), [format!("C {text}")]);
    }
    let deltas = read("note: <s>x</s>\n<n>5</n>\n</function>");
    assert_eq!(answer(deltas), ("note: <s>x</s>\n<n>5</n>\n".into(), vec![("f".into(), json!({}))]));
    let no_names = json!({"name": "f", "parameters": {"type": "object", "properties": {}}});
    let deltas =
        streamed(false, &[no_names], "<tool_call>\n<name>f</name>\n<arguments>\n</arguments>\n</tool_call>", false);
    assert_eq!(deltas, ["0 f", "0 {}"]);
    assert_eq!(whole(false, "<tool_call>\n<function=f/>\n</tool_call>"), ["0 f", "0 {}"]);
}

#[test]
fn misplaced_tags_have_expected_arguments() {
    let values: Vec<_> = STRINGS.iter().filter(|(_, quotes)| !quotes).map(|(value, _)| *value).collect();
    for seed in 0..answer_count() {
        let dice = &mut Dice(seed);
        let value = *dice.pick(&values);
        let (header, end) = *dice.pick(&[
            ("<function=f>", "</function>"),
            ("<function=f>", "</function=f>"),
            ("<f>", "</f>"),
            ("<f>", "</function>"),
        ]);
        let ends = ["</parameter>", "</parameter=NAME>", "</NAME>"];
        let [one, two] = [("s", value), ("n", "5")].map(|(name, value)| {
            let close = dice.pick(&ends).replace("NAME", name);
            format!("<parameter={name}>\n{value}\n{close}\n")
        });
        let wrapper = *dice.pick(&["", "", "args", "arguments"]);
        let [open, close] =
            ["<", "</"].map(|start| format!("{start}{wrapper}>\n").replace("<>\n", "").replace("</>\n", ""));
        let early = if wrapper.is_empty() { *dice.pick(&["", "</function>\n", "</ function>\n\n"]) } else { "" };
        let stray = if end == "</f>" { "" } else { *dice.pick(&["", "</parameter>\n", "</function>\n"]) };
        let text = format!("Ok.\n<tool_call>\n{header}\n{open}{one}{early}{two}{close}{end}\n{stray}</tool_call>");
        let (content, calls) = answer(streamed(dice.below(4) == 0, &tools(), &text, false));
        let expected = [("f".to_owned(), json!({"s": value, "n": 5}))];
        assert_eq!((content.trim(), &calls[..]), ("Ok.", &expected[..]), "seed {seed}: {text}");
        let reordered = format!("<tool_call>\n{header}\n{two}{early}{one}{end}\n{stray}</tool_call>");
        assert_eq!(answer(whole(false, &reordered)), (String::new(), expected.to_vec()), "seed {seed}: {reordered}");
    }
}

#[test]
fn only_parameter_needs_no_name() {
    let tool = |names: &[&str]| {
        let properties: serde_json::Map<_, _> =
            names.iter().map(|name| (name.to_string(), json!({"type": "string"}))).collect();
        json!({"name": "f", "parameters": {"type": "object", "properties": properties}})
    };
    for (value, _) in STRINGS.iter().filter(|(_, quotes)| !quotes) {
        let text = format!("<tool_call>\n<function=f>\n<parameter>\n{value}\n</parameter>\n</function>\n</tool_call>");
        let read = |tool| answer(streamed(false, &[tool], &text, false)).1;
        assert_eq!(read(tool(&["s"])), [("f".to_owned(), json!({"s": value}))], "{text}");
        if *value == "x" {
            assert_eq!(read(tool(&["s", "t"])), [("f".to_owned(), json!({}))], "{text}");
        }
    }
    for name in ["arguments", "input"] {
        let text = format!("<tool_call>\n<function=f>\n<parameter={name}>\n{{}}\n</parameter>\n</function>");
        assert_eq!(answer(streamed(false, &[tool(&[])], &text, false)).1, [("f".to_owned(), json!({}))], "{text}");
    }
}
