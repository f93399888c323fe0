//! Kinds of schemas as libraries write them, each with many generated members.

use super::*;

fn with_x(schema: &Value) -> Value {
    json!({"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": false})
}

/// Checks answers to a strict schema, and calls of a strict tool that has it as a parameter.
fn check(schema: &Value, count: u64, is_valid: impl Fn(&Value) -> bool) {
    for value in random_values(&with_x(schema), true, count) {
        assert!(is_valid(&value["x"]), "{schema}: {value}");
    }
    for value in random_arguments(schema.clone(), true, count) {
        assert!(is_valid(&value), "{schema}: {value}");
    }
}

/// For look-ahead, [`fancy_regex`] is an engine that does not know how the grammar replaces it.
#[test]
fn answers_match_patterns_with_look_ahead() {
    for pattern in [
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]{1,9})*\.?$",
        r"^[A-Z]{6}(?!00)[\dA-Z]{2}(?:[\dA-Z]{3})?$",
        r"^(?:(?!^-0\.?0*$)(?:-?(?:(?:0|[1-9]\d*)(?:\.\d+)?)|\.\d+?))$",
        r"^(?!000|666|9\d{2})\d{3}-(?!00)\d{2}-(?!0000)\d{4}$",
        r"^(?:(?!10)[01]{2,9}:)+$",
        r"a(?=[bc]d)\w{2,5}$",
    ] {
        let regex = fancy_regex::Regex::new(&regex_to_lark(pattern, "dw")).unwrap();
        check(&json!({"type": "string", "pattern": pattern, "maxLength": 40}), 12, |value| {
            regex.is_match(value.as_str().unwrap()).unwrap()
        });
    }
}

/// JavaScript and Python have no classes in classes, and no operators between them.
#[test]
fn classes_have_javascript_syntax() {
    for (pattern, allowed) in [
        (r"^[a-c&&[^b]{2}$", "abc&[^"),
        (r"^[[:alp]{1,3}$", "[:alp"),
        (r"^[a~~b[\]]{2}$", "a~b[]"),
        (r"^(?!&)[&&a]{2}$", "&a"),
    ] {
        let schema = json!({"type": "string", "pattern": pattern});
        check(&schema, 12, |value| value.as_str().unwrap().chars().all(|c| allowed.contains(c)));
    }
    let map = json!({"type": "object", "patternProperties": {"^[a&&b]{2}$": {"type": "null"}}, "minProperties": 1,
        "additionalProperties": false});
    for value in random_values(&map, true, 12) {
        assert!(value.as_object().unwrap().keys().all(|name| name.chars().all(|c| "ab&".contains(c))), "{value}");
    }
}
