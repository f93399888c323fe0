mod generated_tools;
mod kinds;
mod limits;
mod validator;

use super::*;
use crate::{
    parser::{Delta, Parser},
    schema::format_pattern,
};
use serde_json::json;
use std::sync::LazyLock;

const EOS: u32 = 2040;

static GRAMMARS: LazyLock<GrammarCompiler> =
    LazyLock::new(|| GrammarCompiler::new(Arc::new(Tokenizer::load(&test_support::demo()).unwrap()), &[EOS, 2038]));

static SCHEMAS: LazyLock<Vec<Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../../tests/fixtures/schemas.json")).unwrap());

fn compile(format: &OutputFormat) -> Result<TokenConstraint, FormatError> {
    GRAMMARS.compile(&CancelFlag::default(), format, false, None)
}

fn text(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| GRAMMARS.tokenizer.token_bytes(id)).collect();
    String::from_utf8(bytes).unwrap()
}

fn allowed(next: &NextTokens) -> Vec<u32> {
    let NextTokens::Only(words) = next else { return (0..2038).collect() };
    (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// An answer whose tokens are drawn uniformly from the allowed tokens. After 60 tokens, tokens that close a string,
/// list or object are preferred, so that the answer ends.
fn random_answer(mut constraint: TokenConstraint, seed: u64) -> Vec<u32> {
    let mut bits = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut ids = Vec::new();
    loop {
        let mut allowed = allowed(&constraint.allowed().unwrap());
        // Exponents are never drawn, because JSON allows 1e1000, which an f64 cannot hold.
        let digit =
            ids.last().is_some_and(|&id| GRAMMARS.tokenizer.token_bytes(id).last().is_some_and(u8::is_ascii_digit));
        allowed.retain(|&id| !(digit && matches!(GRAMMARS.tokenizer.token_bytes(id).first(), Some(b'e' | b'E'))));
        assert!(!allowed.is_empty(), "no token is allowed after {:?}", text(&ids));
        let closes = |id: &&u32| {
            let bytes = GRAMMARS.tokenizer.token_bytes(**id);
            **id == EOS || bytes.first().is_some_and(|byte| b"\"]}<n0/".contains(byte))
        };
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = (bits >> 33) as usize;
        let closing: Vec<u32> = allowed.iter().filter(closes).copied().collect();
        let tag = closing_tag(&ids, &allowed).filter(|_| ids.len() > 60 && !draw.is_multiple_of(4));
        let from = if ids.len() > 60 && !draw.is_multiple_of(8) && !closing.is_empty() { &closing } else { &allowed };
        let drawn = tag.unwrap_or(from[draw / 8 % from.len()]);
        let id = if ids.len() > 90 && allowed.contains(&EOS) { EOS } else { drawn };
        if id == EOS || id == 2038 {
            return ids;
        }
        constraint.accept(id).unwrap();
        ids.push(id);
        assert!(ids.len() < 20_000, "does not end: {:?}", &text(&ids)[..400]);
    }
}

/// The longest allowed token that starts or continues the closing tag of a string.
fn closing_tag(ids: &[u32], allowed: &[u32]) -> Option<u32> {
    const TAG: &[u8] = b"</parameter>";
    let sampled: Vec<u8> = ids.iter().rev().take(12).rev().flat_map(|&id| GRAMMARS.tokenizer.token_bytes(id)).collect();
    let matched = (0..TAG.len()).rev().find(|&length| sampled.ends_with(&TAG[..length]))?;
    let continues = |id: &&u32| {
        let bytes = GRAMMARS.tokenizer.token_bytes(**id);
        !bytes.is_empty() && TAG[matched..].starts_with(&bytes)
    };
    allowed.iter().filter(continues).max_by_key(|id| GRAMMARS.tokenizer.token_bytes(**id).len()).copied()
}

fn content_format(content: ContentFormat) -> OutputFormat {
    OutputFormat { content, tools: None }
}

fn json_format(schema: &Value, strict: bool) -> OutputFormat {
    content_format(ContentFormat::Json { schema: schema.clone(), strict })
}

fn lark_format(text: String) -> OutputFormat {
    content_format(ContentFormat::Lark(text))
}

/// The format of an answer that is a call, or several if `parallel`.
fn call_format(tools: &[Value], parallel: bool) -> OutputFormat {
    let tools = tools.iter().cloned().enumerate().collect();
    OutputFormat { content: ContentFormat::Nothing, tools: Some(AllowedTools { tools, parallel }) }
}

/// Values of `count` random answers to a schema.
fn random_values(schema: &Value, strict: bool, count: u64) -> Vec<Value> {
    let constraint = compile(&json_format(schema, strict)).unwrap_or_else(|error| panic!("{schema}: {error:?}"));
    let value = |seed| {
        let answer = text(&random_answer(constraint.clone(), seed));
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{schema}: {error}: {answer}"))
    };
    (0..count).map(value).collect()
}

/// Checks `count` random answers to a strict schema.
fn check_values(schema: &Value, count: u64) {
    for value in random_values(schema, true, count) {
        let wrong = validator::errors(schema, &value, schema);
        assert!(wrong.is_empty(), "{schema}: {value}: {wrong:?}");
    }
}

/// The names and arguments of the calls in an answer.
fn calls(tools: &[Value], answer: &str) -> Vec<(String, Value)> {
    let mut parser = Parser::new(false, tools);
    let mut calls = Vec::<(String, String)>::new();
    for delta in parser.push(answer).into_iter().chain(parser.finish(false)) {
        match delta {
            Delta::ToolCall { name, .. } => calls.push((name, String::new())),
            Delta::Arguments { json, .. } => calls.last_mut().unwrap().1 += &json,
            other => panic!("{other:?} in {answer}"),
        }
    }
    calls.into_iter().map(|(name, json)| (name, serde_json::from_str(&json).unwrap())).collect()
}

#[test]
fn random_answers_match_their_schema() {
    assert!(SCHEMAS.len() >= 60);
    let mut answers = 0;
    for case in SCHEMAS.iter() {
        let schema = &case["schema"];
        let name = &case["name"];
        for value in random_values(schema, case["strict"] == true, 17) {
            let wrong = validator::errors(schema, &value, schema);
            assert!(wrong.is_empty() || case["strict"] == false, "{name}: {wrong:?}: {value}");
            answers += 1;
        }
    }
    assert!(answers >= 1000);
}

#[test]
fn integers_have_bounded_length() {
    for schema in [
        json!({"type": "integer"}),
        json!({"type": ["integer", "null"]}),
        json!({"type": "integer", "minimum": 18}),
        json!({"type": "integer", "exclusiveMaximum": -3}),
        json!({"type": "integer", "multipleOf": 7}),
        json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}),
    ] {
        for sign in ["", "-"] {
            let mut constraint = compile(&json_format(&schema, true)).unwrap();
            let mut sampled = Vec::new();
            loop {
                let allowed = allowed(&constraint.allowed().unwrap());
                // Prefers the sign, then nines, so that the number becomes as long and as large as possible.
                let bytes = |id: u32| GRAMMARS.tokenizer.token_bytes(id);
                let continues = |id: &u32| {
                    let begins = sampled.is_empty() && bytes(*id) == sign.as_bytes();
                    let bytes = bytes(*id);
                    begins || !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
                };
                let next = allowed.into_iter().filter(continues).max_by_key(|&id| (bytes(id) == b"-", bytes(id)));
                let Some(id) = next else { break };
                constraint.accept(id).unwrap();
                sampled.push(id);
                assert!(sampled.len() <= 20, "{schema}: {}", text(&sampled));
            }
            assert!(text(&sampled).is_empty() || text(&sampled).parse::<i64>().is_ok(), "{schema}: {}", text(&sampled));
        }
    }
    let far = json!({"type": "integer", "minimum": 2e18, "maximum": 3e18});
    for value in random_values(&far, true, 2) {
        assert!((2_000_000_000_000_000_000..=3_000_000_000_000_000_000).contains(&value.as_u64().unwrap()), "{value}");
    }
}

fn tool(name: &str, parameters: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[test]
fn random_calls_have_valid_arguments() {
    let objects: Vec<_> = SCHEMAS.iter().filter(|case| case["schema"]["type"] == "object").collect();
    let mut count = 0;
    for (at, case) in objects.iter().enumerate() {
        let schema = &case["schema"];
        let name = &case["name"];
        let tools = [tool("f", schema), tool("other", &json!({"type": "object", "properties": {}}))];
        let format = call_format(&tools, at.is_multiple_of(2));
        let constraint = compile(&format).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        for seed in 0..10 {
            let answer = text(&random_answer(constraint.clone(), seed));
            let answered = calls(&tools, &answer);
            assert!(!answered.is_empty() && (at.is_multiple_of(2) || answered.len() == 1), "{name}: {answer}");
            for (function, arguments) in answered {
                let wrong = validator::errors(schema, &arguments, schema);
                let is_right = function == "other" || wrong.is_empty() || case["strict"] == false;
                assert!(is_right, "{name}: {wrong:?}: {answer}");
                count += 1;
            }
        }
    }
    assert!(count > 400, "{count}");
}

fn lark_error(text: String) -> FormatError {
    compile(&lark_format(text)).err().unwrap()
}

fn schema_error(schema: Value) -> FormatError {
    compile(&json_format(&schema, false)).err().unwrap()
}

/// A schema whose `$defs` refer to each other in a chain, by pointer or by `$id`.
fn reference_chain(length: usize, reference: impl Fn(usize) -> String) -> Value {
    let definition = |i: usize| {
        let next = json!({"type": "object", "properties": {"a": {"$ref": reference(i + 1)}}});
        let mut next = if i == length { json!({"type": "string"}) } else { next };
        if !reference(i).starts_with('#') {
            next["$id"] = reference(i).into();
        }
        (format!("d{i}"), next)
    };
    let defs: serde_json::Map<String, Value> = (0..=length).rev().map(definition).collect();
    json!({"$ref": reference(0), "$defs": defs})
}

#[test]
fn deep_grammars_do_not_overflow_the_stack() {
    let rules = |name: &str| {
        let rules: String = (0..3000).map(|i| format!("{name}{i}: \"a\" {name}{}\n", i + 1)).collect();
        lark_format(format!("start: {name}0\n{rules}{name}3000: \"b\"\n"))
    };
    assert!(compile(&rules("r")).is_ok() && compile(&rules("R")).is_ok());
    assert!(lark_error(format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))).reason.contains("nest"));
    for prefix in ["#/$defs/d", "http://localhost/d"] {
        let chain = reference_chain(900, |i| format!("{prefix}{i}"));
        assert!(compile(&json_format(&chain, true)).is_ok(), "{prefix}");
    }
    let links = (0..9000).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    let links: serde_json::Map<String, Value> = links.chain([("d9000".to_owned(), json!({"type": "null"}))]).collect();
    let whole = json!({"$ref": "#/$defs/d0", "$defs": links});
    assert!(compile(&json_format(&whole, true)).is_ok());
}

#[test]
fn intersected_patterns_do_not_exhaust_memory() {
    let terminals: Vec<String> = (0..30).map(|i| format!("/(?s:.*)a(?s:.{{{i}}})/")).collect();
    assert!(lark_error(format!("start: T\nT: {}", terminals.join(" & "))).reason.contains("intersections"));
    let patterns: Vec<Value> = (0..30).map(|i| json!({"pattern": format!("a.{{{i}}}$")})).collect();
    assert!(schema_error(json!({"type": "string", "allOf": patterns})).reason.contains("patterns"));
}

#[test]
fn format_without_any_text_is_refused() {
    let regex = |regex: &str| compile(&content_format(ContentFormat::Regex(regex.into()))).err();
    assert!(regex("[^\\s\\S]").is_some());
    assert_eq!(regex("a*"), None);
    assert!(lark_error("start: a\na: b\nb: a".into()).reason.contains("no text"));
    assert!(lark_error("start: T\nT: /a/ & /b/".into()).reason.contains("no text"));
    for reference in ["#", "#/$defs/a", "#/$defs/b"] {
        let schema = json!({"$ref": reference, "$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/c"},
            "c": {"$ref": "#/$defs/b"}}});
        assert!(schema_error(schema).reason.contains("no text"));
    }
    let many: Vec<Value> = (0..6000).map(|i| json!({"type": "object", "properties": {format!("p{i}"): {}}})).collect();
    let error = schema_error(json!({"anyOf": many}));
    assert!(error.reason.contains("properties"), "{error:?}");
}

#[test]
fn long_string_parameter_has_bounded_length() {
    // Regression test: with a `max` of 100 or more, the grammar was too complex for the demo's vocabulary.
    for max in [1, 100, 4000] {
        for value in random_arguments(json!({"type": "string", "maxLength": max}), false, 20) {
            assert!(value.as_str().unwrap().chars().count() <= max, "{max}: {value}");
        }
    }
}

/// The arguments of `count` random calls of a function with one parameter `s`.
fn random_arguments(schema: Value, strict: bool, count: u64) -> Vec<Value> {
    let mut tools = [tool("f", &json!({"type": "object", "required": ["s"], "properties": {"s": schema}}))];
    tools[0]["function"]["strict"] = strict.into();
    let constraint = compile(&call_format(&tools, false)).unwrap();
    let answers = (0..count).map(|seed| text(&random_answer(constraint.clone(), seed)));
    answers.map(|answer| calls(&tools, &answer).remove(0).1["s"].take()).collect()
}

#[test]
fn strict_tool_string_keeps_its_format() {
    for format in ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration", "uri"] {
        let regex = fancy_regex::Regex::new(&format_pattern(format).unwrap()).unwrap();
        for value in random_arguments(json!({"type": "string", "format": format}), true, 4) {
            assert!(regex.is_match(value.as_str().unwrap()).unwrap(), "{format}: {value}");
        }
    }
    let both = json!({"type": "string", "format": "date", "pattern": "^2026-|^2027-"});
    for value in random_arguments(both, true, 4) {
        assert!(value.as_str().unwrap().starts_with("202"), "{value}");
    }
}

#[test]
fn dates_are_days_of_the_calendar() {
    for (format, time) in [("date", ""), ("date-time", "T23:59:59Z")] {
        let constraint = compile(&json_format(&json!({"type": "string", "format": format}), true)).unwrap();
        let valid = ["0001-02-01", "2026-12-31", "2024-02-29"];
        for date in valid.into_iter().chain(["0000-02-01", "2026-02-29", "1900-02-29"]) {
            let mut constraint = constraint.clone();
            let ids = GRAMMARS.tokenizer.encode(&format!("\"{date}{time}\"")).unwrap();
            let mut is_next =
                |id| allowed(&constraint.allowed().unwrap()).contains(&id) && constraint.accept(id).is_ok();
            assert_eq!(ids.into_iter().all(&mut is_next), valid.contains(&date), "{format} {date}");
        }
    }
}

#[test]
fn unsupported_pattern_is_left_out() {
    for pattern in ["^(a(?!ba))+$", "(?<!a)c", "(^a|b$)c", "\\bx"] {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}});
        compile(&json_format(&schema, false)).unwrap();
        random_arguments(schema["properties"]["a"].clone(), false, 4);
        let error = compile(&json_format(&schema, true)).err().unwrap();
        assert_eq!(error.path, ".properties.a.pattern", "{error:?}");
        assert!(error.reason.contains("strict") && !error.reason.ends_with(':'), "{}", error.reason);
    }
    for value in random_arguments(json!({"type": "string", "pattern": "^$|^[0-9]{2}$"}), true, 4) {
        let text = value.as_str().unwrap();
        assert!(text.is_empty() || text.len() == 2 && text.parse::<u8>().is_ok(), "{text}");
    }
}

#[test]
fn huge_number_bounds_are_reduced() {
    for schema in [
        json!({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}),
        json!({"type": "integer", "minimum": 0, "maximum": 18_446_744_073_709_551_615u64}),
        json!({"type": "number", "exclusiveMaximum": 1e300}),
    ] {
        check_values(&schema, 10);
    }
    let far = json!({"type": "number", "minimum": 1e18});
    assert!(compile(&json_format(&far, false)).is_ok());
    let error = compile(&json_format(&far, true)).err().unwrap();
    assert_eq!(error.path, ".minimum");
}

#[test]
fn multiples_are_exact_or_refused() {
    for divisor in [json!(1e-9), json!(4001), json!(40_000_000), json!(1e300)] {
        let schema = json!({"type": "number", "minimum": 1e-9, "multipleOf": divisor});
        for strict in [false, true] {
            let error = compile(&json_format(&schema, strict)).err().unwrap();
            assert_eq!(error.path, ".multipleOf", "{schema}");
        }
        assert!(compile(&lark_format(format!("start: %json {schema}"))).is_err(), "{schema}");
    }
    for divisor in [0.01, 0.125, 7.0, 4000.0] {
        let schema = json!({"type": "number", "minimum": -4e9, "maximum": 4e9, "multipleOf": divisor});
        for value in random_values(&schema, true, 5) {
            let count = value.as_f64().unwrap() / divisor;
            assert!((count - count.round()).abs() < 1e-3, "{value} is no multiple of {divisor}");
        }
    }
}

#[test]
fn libraries_schemas_are_accepted_if_strict() {
    let cat = json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": "cat"}}});
    let dog = json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": "dog"}}});
    let tagged = json!({"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": {"Cat": cat, "Dog": dog},
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}});
    let record =
        json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}});
    let constants = json!({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"enum": [1, 2]}, {"const": null}]});
    // zod's and TypeBox's values that are missing.
    let optional = json!({"anyOf": [{"not": {}}, {"type": "object", "additionalProperties": {"not": {}}}]});
    // Sets of Pydantic, records of zod 4, and alternatives of OpenAPI.
    let set = json!({"type": "array", "items": {"$ref": "#/$defs/Colour"}, "uniqueItems": true, "minItems": 1,
        "$defs": {"Colour": {"type": "string", "enum": ["red", "green", "blue"]}}});
    let names = json!({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["cpu"],
        "propertyNames": {"type": "string", "enum": ["cpu", "ram"]}});
    let short = json!({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 3}, "maxProperties": 3});
    let parent = json!({"oneOf": [{"$ref": "#/$defs/Page"}, {"$ref": "#/$defs/Database"}], "$defs": {
        "Page": {"type": "object", "properties": {"page_id": {"type": "string"}}, "required": ["page_id"]},
        "Database": {"type": "object", "properties": {"database_id": {"type": "string"}}, "required": ["database_id"]}}});
    let either = json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}]});
    for schema in [tagged, record, constants, optional, set, names, short, parent, either] {
        check_values(&schema, 10);
    }
    let overlapping = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
    let error = compile(&json_format(&overlapping, true)).err().unwrap();
    assert!(error.reason.contains("anyOf") && !error.reason.contains("coerce"), "{error:?}");
    assert!(compile(&json_format(&overlapping, false)).is_ok());
}

#[test]
fn cancelled_compilation_ends_early() {
    let cancel = CancelFlag::default();
    cancel.set();
    let error = GRAMMARS.compile(&cancel, &json_format(&any_object(), true), false, None).err().unwrap();
    assert!(error.reason.contains("cancelled"), "{error:?}");
}

/// The error of a forced call of a strict tool.
fn strict_tool_error(parameters: Value) -> FormatError {
    let mut tools = [tool("f", &parameters)];
    tools[0]["function"]["strict"] = true.into();
    compile(&call_format(&tools, false)).err().unwrap_or_else(|| panic!("{parameters} is accepted"))
}

#[test]
fn words_after_other_keywords_are_kept() {
    let color = json!({"type": "string", "enum": ["red", "blue"]});
    for schema in [
        json!({"allOf": [color], "description": "d"}),
        json!({"allOf": [color, {"maxLength": 3}], "default": "red"}),
        json!({"type": "string", "anyOf": [{"const": "red"}, {"const": "blue"}]}),
        json!({"anyOf": [color, {"type": "null"}], "default": null}),
        json!({"oneOf": [color, {"type": "null"}]}),
        json!({"oneOf": [{"const": "red", "title": "Red"}, {"type": "string", "enum": ["blue", "green"]}]}),
        json!({"oneOf": [{"const": 1}, {"const": "1"}, {"type": "integer", "enum": [2, 3]}]}),
        json!({"type": ["string", "integer"], "enum": ["red", "7"]}),
        json!({"enum": ["red", "blue"], "pattern": "^r"}),
        json!({"type": ["string", "null"], "const": "null"}),
    ] {
        for strict in [false, true] {
            for value in random_arguments(schema.clone(), strict, 4) {
                let wrong = validator::errors(&schema, &value, &schema);
                assert!(wrong.is_empty(), "{schema}: {value}: {wrong:?}");
            }
        }
    }
}

#[test]
fn references_in_tools_are_followed_or_refused() {
    let parameters = |reference: &str| {
        json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": reference, "maximum": 5}},
            "$defs": {"P<s>": {"$anchor": "p", "$id": "https://example.com/p", "type": "integer", "minimum": 0}}})
    };
    for reference in ["#/$defs/P%3Cs%3E", "#/$defs/P<s>", "https://example.com/p"] {
        let tools = [tool("f", &parameters(reference))];
        let answer = text(&random_answer(compile(&call_format(&tools, false)).unwrap(), 3));
        let value = calls(&tools, &answer)[0].1["a"].as_u64();
        assert!(value.is_some_and(|value| value <= 5), "{reference}: {answer}");
    }
    for reference in ["#/$defs/none", "#none", "https://example.com/none"] {
        let error = strict_tool_error(parameters(reference));
        assert_eq!((error.tool, &*error.path), (Some(0), ".properties.a.$ref"), "{error:?}");
        assert_eq!(schema_error(parameters(reference)).path, ".properties.a.$ref");
    }
}

#[test]
fn open_and_counted_parameters_are_enforced() {
    let map = |min: usize| json!({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": min});
    let patterns = json!({"type": "object", "patternProperties": {"^x_": {"type": "boolean"}}, "additionalProperties": false,
        "minProperties": 1});
    let both = json!({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 2,
        "additionalProperties": false});
    for (parameters, part) in [(map(1), "<parameter="), (patterns, "<parameter=x_"), (both, "<parameter=b>\n2\n")] {
        let constraint = compile(&call_format(&[tool("f", &parameters)], false)).unwrap();
        for seed in 0..4 {
            let answer = text(&random_answer(constraint.clone(), seed));
            assert!(answer.contains(part), "{parameters}: {answer}");
        }
    }
    let object = json!({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["a"], "additionalProperties": false});
    let with = |key: &str, value: Value| test_support::with(object.clone(), json!({key: value}));
    for (parameters, path) in [
        (map(2), ".minProperties"),
        (with("minProperties", json!(2)), ".minProperties"),
        (with("maxProperties", json!(2)), ".maxProperties"),
        (with("required", json!(["a", "z"])), ".required"),
        (with("const", json!({"a": 1})), ".const"),
        (with("properties", json!({"a": {"const": "</parameter>\n</function>"}})), ".properties.a"),
    ] {
        assert_eq!(strict_tool_error(parameters).path, path);
    }
}

#[test]
fn optional_parameters_come_in_any_order() {
    let whole = json!({"type": "integer"});
    let parameters = json!({"type": "object", "required": ["path", "mode"], "properties": {
        "path": {"type": "string"}, "offset": whole, "limit": whole, "mode": {"enum": ["r", "w"]},
        "all": {"type": "boolean"}}});
    let tools = [tool("f", &parameters)];
    let text = |names: &str| {
        let value = |name: &str| match name {
            "path" => "/x",
            "mode" => "r",
            "all" => "true",
            _ => "5",
        };
        let parameters = names.split(' ').map(|name| format!("<parameter={name}>\n{}\n</parameter>\n", value(name)));
        format!("<tool_call>\n<function=f>\n{}</function>\n</tool_call>", parameters.collect::<String>())
    };
    let constraint = compile(&call_format(&tools, false)).unwrap();
    for (names, is_allowed) in [
        ("path mode", true),
        ("path offset limit mode all", true),
        ("limit path offset all mode", true),
        ("all limit offset path mode", true),
        ("path limit mode offset", true),
        ("mode path", false),
        ("path limit", false),
    ] {
        let mut constraint = constraint.clone();
        let mut is_next = |id| allowed(&constraint.allowed().unwrap()).contains(&id) && constraint.accept(id).is_ok();
        let ids = GRAMMARS.tokenizer.encode(&text(names)).unwrap();
        assert_eq!(ids.into_iter().all(&mut is_next), is_allowed, "{names}");
    }
    let read = calls(&tools, &text("all limit path limit mode"));
    assert_eq!(read[0].1, json!({"all": true, "limit": 5, "path": "/x", "mode": "r"}));
}

#[test]
fn name_patterns_without_a_name_are_refused() {
    for pattern in ["^<a>$", "^ $", "^$", "^'x'$", "^a\nb$", "^[^\\s\\S]$"] {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
            "patternProperties": {pattern: {"type": "boolean"}, "^x_": {"type": "integer"}}, "additionalProperties": false});
        let error = strict_tool_error(parameters);
        assert!(error.path == ".patternProperties" && error.reason.contains(pattern), "{error:?}");
    }
}

#[test]
fn closed_objects_have_no_other_properties() {
    let closed = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": false});
    let open = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": true});
    for value in random_values(&closed, true, 10) {
        assert!(value.as_object().unwrap().keys().all(|name| name == "a"), "{value}");
    }
    // No escape spells a declared name so that it seems to be another one.
    let mut constraint = compile(&json_format(&open, true)).unwrap();
    for byte in ["{", "\""] {
        constraint.accept(GRAMMARS.tokenizer.encode(byte).unwrap()[0]).unwrap();
    }
    constraint.accept(GRAMMARS.tokenizer.encode("\\").unwrap()[0]).unwrap();
    let next = allowed(&constraint.allowed().unwrap());
    assert!(next.iter().all(|&id| !GRAMMARS.tokenizer.token_bytes(id).starts_with(b"u")));
    let combined = json!({"allOf": [{"type": "object"}], "unevaluatedProperties": false});
    assert_eq!(compile(&json_format(&combined, true)).err().unwrap().path, ".unevaluatedProperties");
}

#[test]
fn large_integers_are_not_rounded() {
    let refused = |part: Value| {
        let whole = json!({"type": "object", "properties": {"a": part}, "required": ["a"]});
        assert!(compile(&json_format(&whole, false)).is_ok(), "{whole}");
        compile(&json_format(&whole, true)).err().map(|error| error.path)
    };
    for large in ["1234567890123456789", "-9007199254740993", "18446744073709551615", "12345678901234567890123"] {
        let large: Value = serde_json::from_str(large).unwrap();
        assert_eq!(refused(json!({"const": large})).as_deref(), Some(".properties.a.const"), "{large}");
        assert_eq!(refused(json!({"enum": [1, {"b": [large]}]})).as_deref(), Some(".properties.a.enum"), "{large}");
    }
    for exact in [json!(9_007_199_254_740_992_u64), json!(-4_611_686_018_427_387_904_i64), json!(0.1), json!(1e15)] {
        assert_eq!(refused(json!({"const": exact})), None, "{exact}");
    }
    // The largest integers that the bounds allow are exact in an f64.
    let bounds = json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64, "maximum": 9_007_199_254_740_995_u64});
    assert_eq!(random_values(&bounds, true, 2), [9_007_199_254_740_994_u64; 2]);
}

#[test]
fn names_in_quotation_marks_are_refused() {
    for name in ["\"q\"", "'q'"] {
        let parameters = json!({"type": "object", "properties": {name: {"type": "boolean"}}});
        let tools = Some(AllowedTools { tools: vec![(0, tool("f", &parameters))], parallel: false });
        assert!(compile(&OutputFormat { tools, ..OutputFormat::default() }).is_err(), "{name}");
    }
}
