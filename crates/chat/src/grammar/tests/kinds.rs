//! Kinds of schemas as libraries write them, each with many generated members.

use super::*;
use test_support::mutate::Dice;

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
        check(&json!({"type": "string", "pattern": pattern, "maxLength": 40}), 6, |value| {
            regex.is_match(value.as_str().unwrap()).unwrap()
        });
    }
}

#[test]
fn numbers_keep_exclusive_bounds() {
    let mut dice = Dice(3);
    for round in 0..40 {
        let sign = *dice.pick(&[1.0, -1.0]);
        let near = *dice.pick(&[0.0, 0.0, 1.0, 7.0, 10.0, 2500.0]);
        let far = near + *dice.pick(&[0.001, 0.1, 0.5, 0.999, 1.0, 3.25]);
        let [near, far] = [sign * near, sign * far];
        let keys = [
            ["exclusiveMinimum", "minimum", "maximum", "exclusiveMaximum"],
            ["exclusiveMaximum", "maximum", "minimum", "exclusiveMinimum"],
        ];
        let [exclusive, inclusive, other, other_exclusive] = keys[usize::from(sign < 0.0)];
        let far_key = *dice.pick(&[other, other_exclusive]);
        let mut schema = json!({"type": "number", far_key: far});
        if round % 3 == 0 {
            schema[inclusive] = near.into();
            schema[exclusive] = true.into();
        } else {
            schema[exclusive] = near.into();
        }
        let is_valid = |value: &Value| {
            let [value, near, far] = [value.as_f64().unwrap(), near, far].map(|number| sign * number);
            near < value && value <= far && (far_key == other || value < far)
        };
        check(&schema, 10, is_valid);
    }
}

#[test]
fn formats_are_enforced_or_refused() {
    let segment = r"[^\s/?#\[\]]*";
    for (format, pattern) in [
        ("hostname", "^.{1,253}$".to_owned()),
        ("json-pointer", "^(/([^/~]|~0|~1)*)*$".to_owned()),
        ("relative-json-pointer", "^(0|[1-9][0-9]*)(#|(/([^/~]|~0|~1)*)*)$".to_owned()),
        ("idn-email", "^[^@]+@[^@]+$".to_owned()),
        (
            "uri-reference",
            format!(
                r"^([a-zA-Z][\w+.-]*:)?(//(\[[^\]]*\])?{segment})?(?!//){segment}(/{segment})*(\?[^#\s]*)?(#[^#\s]*)?$"
            ),
        ),
        ("iri", r"^[a-zA-Z][\w+.-]*:\S+$".to_owned()),
    ] {
        let regex = fancy_regex::Regex::new(&pattern).unwrap();
        check(&json!({"type": "string", "format": format}), 6, |value| {
            regex.is_match(value.as_str().unwrap()).unwrap()
        });
    }
    for format in ["regex", "uri-template", "idn-hostname"] {
        let schema = with_x(&json!({"type": "string", "format": format}));
        let error = compile(&json_format(&schema, true)).err().unwrap();
        assert!(error.path == ".properties.x.format" && error.reason.contains(format), "{error:?}");
        assert!(compile(&json_format(&schema, false)).is_ok());
    }
}

#[test]
fn integer_formats_bound_integers() {
    let mut dice = Dice(4);
    let mut compiled = 0;
    for _ in 0..60 {
        let (format, min, max) = *dice.pick(&[
            ("int8", -128, 127),
            ("uint8", 0, 255),
            ("int16", -32_768, 32_767),
            ("int32", -2_147_483_648, 2_147_483_647),
            ("uint32", 0, 4_294_967_295),
            ("uint64", 0, 1_000_000_000_000_000_000_i64),
            ("int64", -1_000_000_000_000_000_000, 1_000_000_000_000_000_000),
        ]);
        let mut number = json!({"type": dice.pick(&["integer", "integer", "number"]), "format": format});
        let limits = [
            ("minimum", [-5_000_000_000_i64, -3, 3]),
            ("exclusiveMinimum", [-40_000, min, 7]),
            ("maximum", [5_000_000_000, 300, 100]),
            ("exclusiveMaximum", [5_000_000_000, 256, 90]),
            ("multipleOf", [5, 7, 50]),
        ];
        let mut all = vec![json!({"minimum": min, "maximum": max, "type": ["integer", "null"]})];
        for (key, values) in limits {
            if dice.below(3) == 0 {
                let value = *dice.pick(&values);
                number[key] = value.into();
                all.push(json!({key: value}));
            }
        }
        let schema = match dice.below(6) {
            0 => json!({"anyOf": [number, {"type": "null"}]}),
            1 => {
                number["type"] = json!([number["type"], "null"]);
                number
            }
            2 => test_support::with(number, json!({"nullable": true})),
            3 => {
                number.as_object_mut().unwrap().remove("type");
                json!({"allOf": [{"type": "integer"}, number]})
            }
            _ => number,
        };
        if compile(&json_format(&with_x(&schema), true)).is_err() {
            continue;
        }
        compiled += 1;
        let kept = json!({"allOf": all});
        check(&schema, 3, |value| validator::errors(&kept, value, &kept).is_empty());
    }
    assert!(compiled > 30, "{compiled}");
}

/// JavaScript and Python have no classes in classes, and no operators between them.
#[test]
fn classes_have_javascript_syntax() {
    for (pattern, allowed) in [
        (r"^[a-c&&[^b]{2}$", "abc&[^"),
        (r"^[[:alp]{1,3}$", "[:alp"),
        (r"^[a~~b[\]]{2}$", "a~b[]"),
        (r"^(?!&)[&&a]{2}$", "&a"),
        (r"^[+--]{2}$", "+,-"),
        (r"^[a\w--\d]{2}$", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"),
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

/// marshmallow writes a type beside a reference.
#[test]
fn type_beside_reference_is_accepted() {
    let node = |kind: Value| {
        json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["v"], "additionalProperties": false,
            "properties": {"v": {"type": "integer"}, "next": {"type": kind, "$ref": "#/$defs/node"}}}}})
    };
    check_values(&node(json!("object")), 12);
    let error = compile(&json_format(&node(json!(["object", "null"])), true)).err().unwrap();
    assert!(error.reason.contains("circular"), "{error:?}");
}

#[test]
fn long_texts_are_enforced() {
    for min in [60, 400, 950] {
        for value in random_arguments(json!({"type": "string", "minLength": min}), true, 2) {
            assert!(value.as_str().unwrap().chars().count() >= min, "{min}: {value}");
        }
    }
    let schema = with_x(&json!({"type": "string", "minLength": 1001}));
    let mut strict = tool("f", &schema);
    strict["function"]["strict"] = true.into();
    let error = compile(&call_format(&[strict], false)).err().unwrap();
    assert_eq!((error.tool, error.path.as_str()), (Some(0), ".properties.x.minLength"));
    assert!(compile(&call_format(&[tool("f", &schema)], false)).is_ok());
}

#[test]
fn items_of_constants_are_unique() {
    let mut dice = Dice(9);
    let all = [
        json!("a"),
        json!("b"),
        json!(1),
        json!(2),
        json!(2.5),
        json!(-3),
        json!([1]),
        json!({"a": 2}),
        json!(true),
        Value::Null,
        json!("1"),
    ];
    let mut compiled = 0;
    for _ in 0..25 {
        let start = dice.below(all.len() - 4);
        let constants = &all[start..start + 1 + dice.below(4)];
        let mut items = json!({"enum": constants});
        if dice.below(3) == 0 {
            items["minimum"] = 2.into();
        }
        let schema = json!({"type": "array", "items": items, "uniqueItems": true});
        let Ok(_) = compile(&json_format(&with_x(&schema), true)) else { continue };
        compiled += 1;
        check(&schema, 6, |value| validator::errors(&schema, value, &schema).is_empty());
    }
    assert!(compiled > 15, "{compiled}");
}
