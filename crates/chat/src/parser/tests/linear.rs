//! Answers that make a parser read the same text again and again. The time must grow linearly with the answer.

use super::*;
use std::time::Duration;
use test_support::thread_cpu::cpu_time_of;

/// Quadratic time grows by a factor of 16 from the short to the long answer, and linear time by 4.
const MAX_GROWTH: u32 = 8;
/// Time below which the growth says nothing.
const SHORT: Duration = Duration::from_millis(20);

/// Checks the time for `start` and many of `part`, in one piece and byte by byte. `#` in `part` is its number.
fn check(start: &str, part: &str) {
    let mut tools = tools();
    tools[0]["function"]["parameters"]["properties"]["u"] = json!({"type": ["object", "string"]});
    tools.push(json!({"name": "open", "parameters": {"type": "object"}}));
    let time = |bytes: usize, size: usize| {
        let parts = (0..bytes / part.len()).map(|number| part.replace('#', &number.to_string()));
        let text = format!("<tool_call>\n<function={start}{}", parts.collect::<String>());
        let run = || {
            cpu_time_of(|| {
                let mut parser = Parser::new(false, &tools);
                text.as_bytes().chunks(size).for_each(|piece| _ = parser.push(str::from_utf8(piece).unwrap()));
                parser.finish(false);
            })
        };
        run().min(run())
    };
    for (bytes, size) in [(8_000, 1), (20_000, usize::MAX)] {
        let (short, long) = (time(bytes, size), time(4 * bytes, size));
        assert!(long < SHORT.max(short) * MAX_GROWTH, "{start:?} {part:?}: {short:?}, 4 times as much: {long:?}");
    }
}

#[test]
fn values_full_of_tags_take_linear_time() {
    let tags = ["</parameter>\n", "<parameter=s>\n", "</function>\n", "<tool_call>", "</s>\n"];
    for name in ["s", "n", "o", "u"] {
        for open in ["", "{\"x\": \""] {
            for tag in tags {
                check(&format!("f>\n<parameter={name}>\n{open}"), tag);
            }
        }
    }
}

#[test]
fn values_of_white_space_take_linear_time() {
    for name in ["s", "n", "o", "maybe"] {
        for space in [" ", "\n", "\t\r\n"] {
            check(&format!("f>\n<parameter={name}>\n"), space);
        }
    }
    check(&format!("f>\n<parameter=o>\n{}[", " ".repeat(20_000)), "1,");
}

#[test]
fn repeated_tags_take_linear_time() {
    for part in [
        "<parameter=s>\n",
        "  <parameter=n>",
        "<parameter=o>\n[",
        "</parameter>\nx\n<parameter=n>\n",
        "<parameter=p#>\nx\n",
        "</function>\n<parameter=p#>\n",
    ] {
        check("f>\n", part);
        check("open>\n", part);
    }
}

#[test]
fn unfinished_calls_take_linear_time() {
    for part in
        ["<tool_call>{\"'", "<tool_call>[\"", "<function=f>{\"", "`<tool_call>\n<function=f>\n", "\"<tool_call>{"]
    {
        check("f>\n</function>\n</tool_call>\n", part);
    }
}
