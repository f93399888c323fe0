//! Text about the format of tool calls, which calls nothing.

use super::*;
use test_support::mutate::Dice;

/// Texts that quote calls of the tools `f` and `g`.
const QUOTES: &[&str] = &[
    "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>",
    "<function=f>\n<parameter=s>\nx\n</parameter>\n</function>",
    "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>",
    "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "<function=f></function>",
    "<tool_call>\n<function=f>",
    "<tool_call>",
    "<function=f>",
    "</parameter>\n</function>\n</tool_call>",
    "<parameter=s>\nx\n</parameter>",
    "<tool_call>\n<function=example_function_name>\n<parameter=example>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "const call = <Tool function={f}><parameter name=\"s\">{x}</parameter></Tool>;",
    "<function name=\"f\">\n<parameter name=\"s\"/>\n</function>",
    "re.findall(r'<function=f>(.*?)</function>', text)",
    "{\"text\": \"<tool_call>\\n<function=f>\"}",
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}\n</tool_call>",
    "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"g\"}</tool_call>",
    "<tool_call>\n{'name': 'f', 'arguments': {'s': 'x'}}",
    "<tool_calls>\n[{\"name\": \"f\"}, {\"name\": \"g\"}]\n</tool_calls>",
    "<function=f>\n{\"s\": \"x\"}\n</function>",
    "<function_calls>\n<invoke name=\"f\">\n<parameter name=\"s\">x</parameter>\n</invoke>\n</function_calls>",
];

const BEFORE: &[&str] = &[
    "",
    "The format:\n\n",
    "1. Don't call it\n2. Write",
    "It's like this: ",
    "> Quoted `x`:\n",
    "- item ``a`b``\n",
    "```\ncode\n```\n",
];

const AFTER: &[&str] = &["", "\n", " is a call.\n", "\n\nThat's `it`.", "\n```js\nf()\n```\n"];

fn fenced(dice: &mut Dice, quote: &str) -> String {
    let (open, close) = *dice.pick(&[
        ("```\n", "\n```"),
        ("```xml\n", "\n```"),
        ("~~~\n", "\n~~~"),
        ("````md\n```\n", "\n```\n````"),
        ("  ```text\n", "\n  ```"),
        ("- ```\n", "\n  ```"),
        ("> ```\n> ", "\n> ```"),
        ("```python\ntext = \"\"\"\n", "\n\"\"\"\n```"),
        ("```\nfirst\n\n", "\n\nlast\n```"),
    ]);
    format!("\n{open}{quote}{close}\n")
}

fn inline(dice: &mut Dice, quote: &str) -> String {
    let (open, close) = *dice.pick(&[("`", "`"), ("``", "``"), ("(`", "`)"), ("`a` and `", "`"), ("`x ", " y`")]);
    format!("{open}{quote}{close}")
}

fn parse(text: &str) -> Vec<String> {
    streamed(false, &tools_f_and_g(), text, false)
}

#[test]
fn calls_in_markdown_code_are_text() {
    for seed in 0..answer_count() {
        let dice = &mut Dice(seed);
        let mut text = String::new();
        for _ in 0..1 + dice.below(3) {
            let quote = *dice.pick(QUOTES);
            text.push_str(dice.pick::<&str>(BEFORE));
            text.push_str(&if dice.below(2) == 0 { fenced(dice, quote) } else { inline(dice, quote) });
            text.push_str(dice.pick::<&str>(AFTER));
            text.push('\n');
        }
        assert_eq!(parse(&text), [format!("C {text}")], "seed {seed}");
    }
}

#[test]
fn fence_after_mentioned_tag_is_text() {
    for tag in ["<tool_call>", "Write <tool_call>", "<function>", "<tool_calls>"] {
        for info in ["", "xml", "json"] {
            let call = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
            let text = format!("{tag}\n\n```{info}\n{call}\n```");
            assert_eq!(whole(false, &text), [format!("C {text}")]);
        }
    }
}

#[test]
fn call_after_open_fence_is_call() {
    for before in ["```\ncode", "Look at `this", "```\ncode\n```\n```", "~~~\n```", "The mark is ` here"] {
        let text = format!(
            "{before}\n\n<tool_call>\n<function=f>\n<parameter=s>\n`a`\n</parameter>\n</function>\n</tool_call>"
        );
        assert_eq!(parse(&text), [format!("C {before}"), "0 f".into(), r#"0 {"s":"`a`"}"#.into()]);
    }
}

#[test]
fn unknown_function_is_text() {
    for text in [
        "Write <function=foo> and </function> yourself.",
        "<function=foo>\n<parameter=s>\n1\n</parameter>\n</function>",
        "Call it with <function=f> and then",
        "Call <function=f></function> now",
        "<function=f>",
        "<function=f>\n",
        "<function=f>\ntext",
        "<function name=\"f\">\n<parameter name=\"s\">1</parameter>\n</function>",
    ] {
        assert_eq!(parse(text), [format!("C {text}")]);
    }
}
