//! Forced calls of generated tools: random walks through the mask of a byte-level vocabulary, read back by the parser
//! and validated. The schemas combine what Pydantic, Zod, TypeBox and generators of Go and C# write.

use super::*;
use crate::{
    parser::{Delta, Parser},
    schema::{Document, any_value, normalized, parameter_sets},
};
use serde_json::{Map, json};
use std::{ops::Range, sync::LazyLock};
use test_support::random_cases::seeds;

const SCHEMAS: u64 = 400;
const WALKS: u64 = 3;
const CALL: u32 = 256;
const EOS: u32 = 258;
/// Content before a call.
const CONTENT: &str = "It's `</param>`:";

/// The compiler for a vocabulary of all bytes.
static BYTES: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let is_printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut unprintable = 256..;
    let vocabulary: Map<String, Value> = (0..256u32)
        .map(|byte| {
            let code = if is_printable(&byte) { byte } else { unprintable.next().unwrap() };
            (char::from_u32(code).unwrap().to_string(), byte.into())
        })
        .collect();
    let added = ["<tool_call>", "</tool_call>", "<|im_end|>"].iter().zip(256..).map(|(text, id)| {
        json!({"id": id, "content": text, "special": id == EOS, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": byte_level,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}});
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    GrammarCompiler::new(Arc::new(Tokenizer::load(dir.path()).unwrap()), &[EOS])
});

struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

/// Texts that a walk tries to write as values: other types, Python's spelling, and tags.
const TRAPS: [&str; 30] = [
    "null",
    "None",
    "true",
    "false",
    "True",
    "7",
    "5",
    "1000",
    "-1",
    "1.5",
    "007",
    " 7",
    "[1]",
    "{}",
    "[",
    "\n",
    "{\"a\": 1}",
    "['a']",
    "</function>",
    "</tool_call>",
    "<parameter=b>\nx",
    "a</parameter>\n</function>",
    "</func\nx",
    "\n</param>\n</ function>\n",
    "a\n</parameter\n<tool",
    "\n<|tool_call|>\n<invoke name=\"f\">\n",
    "<tool_calls>\n{\"name\": \"f\", \"arguments\": {}}\n",
    "<parameter name=\"b\">\nx",
    "```\n</func>",
    "\n<function_calls><",
];

/// The text of a call after `content`. Each step takes a byte that continues a trap, or a byte that ends the value, or any
/// byte.
fn random_call(mut constraint: TokenConstraint, content: &str, random: &mut Random) -> String {
    let mut text: Vec<u8> = content.into();
    if !content.is_empty() {
        content.bytes().for_each(|byte| constraint.accept(byte.into()).unwrap());
        constraint.accept(CALL).unwrap();
        text.extend(BYTES.tokenizer.token_bytes(CALL));
    }
    let mut trap: &[u8] = b"";
    loop {
        let NextTokens::Only(mask) = constraint.allowed().unwrap() else { panic!("nothing is constrained") };
        let is_allowed = |id: u32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
        assert!((0..=EOS).any(is_allowed), "no token is allowed after {:?}", String::from_utf8_lossy(&text));
        if text.ends_with(b">\n") && !random.one_in(3) {
            trap = random.pick(&TRAPS).as_bytes();
        }
        // No exponents: JSON allows 1e1000, which an f64 cannot hold.
        let after_digit = text.last().is_some_and(u8::is_ascii_digit);
        let is_allowed = |id: u32| is_allowed(id) && !(after_digit && matches!(id, 69 | 101));
        let next = trap.first().copied().filter(|&byte| is_allowed(byte.into()));
        trap = if next.is_some() { &trap[1..] } else { b"" };
        let allowed: Vec<u32> = (0..=EOS).filter(|&id| is_allowed(id)).collect();
        let is_long = text.len() > 300;
        let ends_value = if random.one_in(8) != is_long { closing(&text, &is_allowed) } else { None };
        let plain: Vec<u32> = allowed.iter().copied().filter(|&id| (32..127).contains(&id) || id == 10).collect();
        let from = if plain.is_empty() || random.one_in(40) { &allowed } else { &plain };
        let id = next.map(u32::from).or(ends_value).unwrap_or_else(|| random.pick(from));
        if id == EOS || text.len() > 3000 && is_allowed(EOS) {
            return String::from_utf8(text).unwrap();
        }
        constraint.accept(id).unwrap();
        text.extend(BYTES.tokenizer.token_bytes(id));
        assert!(text.len() < 20_000, "does not end: {:?}", String::from_utf8_lossy(&text[..2000]));
    }
}

/// A byte that ends a value soon.
fn closing(text: &[u8], is_allowed: &impl Fn(u32) -> bool) -> Option<u32> {
    const TAG: &[u8] = b"\n</parameter>\n";
    let matched = (0..TAG.len()).rev().find(|&length| text.ends_with(&TAG[..length]))?;
    let bytes = [TAG[matched], TAG[0], b'"', b']', b'}', b'<', b'0'];
    [EOS, 257].into_iter().chain(bytes.map(u32::from)).find(|&id| is_allowed(id))
}

/// Writes schemas as libraries do.
struct Writer {
    random: Random,
    definitions: Map<String, Value>,
    /// Keyword of the definitions.
    place: &'static str,
}

impl Writer {
    /// A tool's parameters.
    fn parameters(seed: u64) -> Value {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let place = random.pick(&["$defs", "$defs", "definitions"]);
        let mut writer = Self { random, definitions: Map::new(), place };
        let mut root = writer.root();
        match writer.random.below(12) {
            0 => {
                writer.definitions.insert("Args".into(), root);
                root = json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/args",
                    "$ref": format!("#/{place}/Args")});
            }
            1 => root["$schema"] = "http://json-schema.org/draft-07/schema#".into(),
            2 => root = json!({"allOf": [root], "title": "Args"}),
            3 => root["minProperties"] = writer.random.below(3).into(),
            4 => root["maxProperties"] = writer.random.below(4).into(),
            5 => root["required"].as_array_mut().unwrap().push("z".into()),
            _ => {}
        }
        if !writer.definitions.is_empty() {
            root[place] = std::mem::take(&mut writer.definitions).into();
        }
        root
    }

    fn root(&mut self) -> Value {
        match self.random.below(17) {
            14 => {
                let mut object = self.object(0);
                object["oneOf"] = self.exclusive();
                object
            }
            15 => {
                let mut object = self.object(0);
                object["propertyNames"] = self.names();
                object
            }
            16 => {
                let value = self.value(1);
                json!({"type": "object", "propertyNames": self.names(), "additionalProperties": value, "required": []})
            }
            0 => {
                let value = self.value(1);
                json!({"type": "object", "properties": {}, "required": [], "additionalProperties": value, "minProperties": 1})
            }
            1 => {
                let value = self.value(1);
                let name = self.random.pick(&["^x_[a-z]*$", "^x{70}$"]);
                json!({"type": "object", "required": [], "patternProperties": {name: value},
                    "additionalProperties": false, "minProperties": self.random.below(2)})
            }
            2 => {
                let one = self.object(1);
                let other = self.object(1);
                json!({"type": "object", "required": [], "anyOf": [one, other]})
            }
            3 => {
                let mut one = self.object(1);
                let mut other = self.object(1);
                one["additionalProperties"] = true.into();
                other["additionalProperties"] = true.into();
                json!({"type": "object", "required": [], "allOf": [one, other]})
            }
            _ => self.object(0),
        }
    }

    fn object(&mut self, depth: usize) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for name in ["a", "b", "c d", "items"].into_iter().take(1 + self.random.below(4)) {
            properties.insert(name.into(), self.value(depth + 1));
            if !self.random.one_in(3) {
                required.push(name);
            }
        }
        let mut object = json!({"type": "object", "properties": properties, "required": required});
        match self.random.below(6) {
            0 => {}
            1 => object["additionalProperties"] = self.value(depth + 2),
            2 => object["unevaluatedProperties"] = false.into(),
            _ => object["additionalProperties"] = false.into(),
        }
        object
    }

    /// A schema, as it is, as a definition, or with neighbours.
    fn value(&mut self, depth: usize) -> Value {
        let value = self.kind(depth);
        let mut value = match self.random.below(18) {
            0 | 1 => self.define(value),
            2 => json!({"allOf": [self.define(value)], "default": null}),
            3 => json!({"anyOf": [value, {"type": "null"}], "default": null}),
            4 if value.get("type").is_some() => json!({"oneOf": [{"type": "null"}, value]}),
            5 => {
                let mut value = value;
                value["nullable"] = true.into();
                value
            }
            6 => {
                let more = self.text();
                json!({"allOf": [value, more]})
            }
            7 => {
                let other = self.kind(depth + 1);
                json!({"anyOf": [value, other]})
            }
            8 => {
                let mut value = self.define(value);
                value["maxLength"] = 12.into();
                value
            }
            9 => {
                let nothing = self.random.pick(&[json!({"not": {}}), json!({"not": true}), json!(false)]);
                json!({"anyOf": [nothing, value], "description": "zod's undefined"})
            }
            _ => value,
        };
        if self.random.one_in(4) {
            value["description"] = "what".into();
            value["title"] = "T".into();
        }
        if self.random.one_in(60) {
            value["not"] = json!({"const": 5});
        }
        value
    }

    /// Moves a schema to the definitions and returns a reference to it.
    fn define(&mut self, mut value: Value) -> Value {
        let name = self.random.pick(&["Kind", "P<int>", "My Type", "Node"]);
        let name = format!("{name}{}", self.definitions.len());
        let place = self.place;
        let reference = match self.random.below(8) {
            0 => {
                value = json!({"$anchor": format!("anchor{}", self.definitions.len()), "allOf": [value]});
                format!("#{}", value["$anchor"].as_str().unwrap())
            }
            1 if !value.to_string().contains("\"$ref\"") => {
                value = json!({"$id": format!("https://example.com/{}", self.definitions.len()), "allOf": [value]});
                value["$id"].as_str().unwrap().to_owned()
            }
            2 if self.random.one_in(4) => "#/$defs/nowhere".into(),
            _ => format!("#/{place}/{}", name.replace('<', "%3C").replace('>', "%3E").replace(' ', "%20")),
        };
        self.definitions.insert(name, value);
        json!({"$ref": reference})
    }

    fn kind(&mut self, depth: usize) -> Value {
        match self.random.below(if depth > 3 { 9 } else { 17 }) {
            14 => {
                let items = self.words();
                let items = if self.random.one_in(2) { items } else { self.define(items) };
                json!({"type": "array", "items": items, "uniqueItems": true, "maxItems": 1 + self.random.below(5)})
            }
            15 => {
                let values = self.value(depth + 1);
                json!({"type": "object", "additionalProperties": values, "propertyNames": self.names()})
            }
            16 => {
                let mut object = self.object(depth + 1);
                object["oneOf"] = self.exclusive();
                object
            }
            0 | 1 => self.text(),
            2 => self.words(),
            3 => json!({"type": self.random.pick(&["boolean", "integer", "number", "null", "string"])}),
            4 => {
                let min = self.random.below(2000);
                json!({"type": self.random.pick(&["integer", "number"]), "minimum": min, "maximum": min + 2})
            }
            5 => json!({"type": "integer", "multipleOf": 5, "exclusiveMinimum": -20, "exclusiveMaximum": 30}),
            6 => {
                let others = self.random.pick(&["integer", "number", "boolean", "null", "array", "object"]);
                json!({"type": ["string", others]})
            }
            7 => {
                let text = self.text();
                let number = json!({"type": "integer", "minimum": 1000, "maximum": 1001});
                json!({"anyOf": [text, number, {"const": true}]})
            }
            8 => json!({}),
            9 => {
                let items = self.value(depth + 1);
                let max = 1 + self.random.below(3);
                json!({"type": "array", "items": items, "maxItems": max, "minItems": self.random.below(2)})
            }
            10 => {
                let first = self.value(depth + 1);
                json!({"type": "array", "prefixItems": [first, {"type": "boolean"}], "items": false, "minItems": 2})
            }
            11 => {
                let values = self.value(depth + 1);
                json!({"type": "object", "additionalProperties": values, "propertyNames": {"type": "string"}, "maxProperties": 2})
            }
            12 => {
                let one = self.tagged("cat", depth);
                let other = self.tagged("dog", depth);
                json!({"oneOf": [one, other], "discriminator": {"propertyName": "kind"}})
            }
            _ => self.object(depth + 1),
        }
    }

    fn tagged(&mut self, tag: &str, depth: usize) -> Value {
        let value = self.value(depth + 2);
        json!({"type": "object", "properties": {"kind": {"type": "string", "const": tag}, "v": value}, "required": ["kind"],
            "additionalProperties": false})
    }

    /// Alternatives that require one or two properties each, some with their values.
    fn exclusive(&mut self) -> Value {
        let mut names = || self.random.pick(&[&["a"][..], &["b"], &["c d"], &["a", "b"], &["b", "items"], &["other"]]);
        let mut alternatives = vec![json!({"required": names()}), json!({"required": names(), "type": "object"})];
        alternatives.extend(self.random.one_in(2).then(|| json!({"required": ["items"], "title": "third"})));
        if self.random.one_in(2) {
            alternatives[0]["properties"] = json!({"b": self.value(3), "other": self.text()});
        }
        if self.random.one_in(3) {
            alternatives[1] = self.define(alternatives[1].clone());
        }
        alternatives.into()
    }

    fn names(&mut self) -> Value {
        match self.random.below(6) {
            0 => json!({"enum": ["a", "b", "c d", "new"]}),
            1 => self.define(json!({"type": "string", "enum": ["a", "x1"]})),
            2 => json!({"pattern": "^[a-c]+$"}),
            3 => json!({"maxLength": 3, "minLength": 2}),
            4 => json!({"type": "string", "format": "uuid"}),
            _ => self.text(),
        }
    }

    fn text(&mut self) -> Value {
        match self.random.below(8) {
            0 => json!({"type": "string", "minLength": 2, "maxLength": 5}),
            1 => json!({"type": "string", "maxLength": 3}),
            2 => {
                json!({"type": "string", "pattern": self.random.pick(&["^[0-9]{3}$", "(?i)^[a-z]+$|^7", "[0-9]", "^(a|b)$|^null$"])})
            }
            3 => json!({"type": "string", "minLength": 1}),
            4 => self.words(),
            5 => json!({"type": "string", "pattern": self.random.pick(&["^(?!x).*$", "^[a-z]*$", "[a-z]$", "^.{2}$"])}),
            _ => json!({"type": "string"}),
        }
    }

    fn words(&mut self) -> Value {
        let words = json!([
            "red",
            "7",
            "true",
            "null",
            "None",
            "",
            "a\nb",
            "[1]",
            "</parameter>\n</function>",
            "</tool_call>x"
        ]);
        let count = if self.random.one_in(10) { 10 } else { 8 };
        let word = || words[self.random.below(count)].clone();
        let some: Vec<Value> = std::iter::repeat_with(word).take(3).collect();
        match self.random.below(8) {
            0 => json!({"type": "string", "enum": some}),
            7 => {
                json!({"oneOf": [{"const": some[0]}, {"enum": [some[1], 7, null]}, {"type": "integer", "enum": [8, 9]}]})
            }
            1 => json!({"const": some[0]}),
            2 => json!({"anyOf": some.iter().map(|word| json!({"const": word, "type": "string"})).collect::<Vec<_>>()}),
            3 => json!({"enum": [some[0], 7, null, true, [4], {"five": 5}]}),
            4 => json!({"type": ["string", "integer"], "enum": [some[0], 7]}),
            5 => json!({"type": "string", "anyOf": [{"const": some[0]}, {"const": some[1]}]}),
            _ => json!({"type": ["string", "null"], "enum": [some[0], some[1], null]}),
        }
    }
}

/// Compiles the call of a strict tool, forced or after content, and returns arguments of random calls.
fn call_arguments(seed: u64, parameters: &Value) -> Result<Vec<(String, Value)>, FormatError> {
    let tools = [json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}})];
    let allowed = AllowedTools { tools: tools.iter().cloned().enumerate().collect(), parallel: false };
    let is_forced = seed.is_multiple_of(2);
    let content = if is_forced { ContentFormat::Nothing } else { ContentFormat::Text };
    let content_text = if is_forced { "" } else { CONTENT };
    let format = OutputFormat { content, tools: Some(allowed) };
    let constraint = BYTES.compile(&CancelFlag::default(), &format, false, None)?;
    let mut random = Random(seed);
    let walk = |walk: u64| {
        let before = if is_forced { String::new() } else { CONTENT.to_owned() + ["", "\n\n"][walk as usize % 2] };
        let text = random_call(constraint.clone(), &before, &mut random);
        let read = |pieces: &mut dyn Iterator<Item = &str>| {
            let mut parser = Parser::new(false, &tools).with_exact_calls(format.exact_calls());
            let mut deltas: Vec<Delta> = pieces.flat_map(|piece| parser.push(piece)).collect();
            deltas.extend(parser.finish(false));
            let mut arguments = String::new();
            let mut content = String::new();
            for delta in deltas {
                match delta {
                    Delta::ToolCall { index: 0, .. } => assert_eq!(content, content_text, "{text:?}"),
                    Delta::Arguments { json, .. } => arguments += &json,
                    Delta::Content(text) => content += &text,
                    other => panic!("{parameters}: {other:?} in {text:?}"),
                }
            }
            arguments
        };
        let arguments = read(&mut [&*text].into_iter());
        assert_eq!(read(&mut text.split_inclusive(|_| true)), arguments, "by character: {text:?}");
        let value = serde_json::from_str(&crate::json_repair::repair(&arguments));
        (text, value.unwrap_or_else(|error| panic!("{parameters}: {error}: {arguments}")))
    };
    Ok((0..WALKS).map(walk).collect())
}

/// Writes types and missing keywords as other generators do.
fn respell(schema: &mut Value, random: &mut Random) {
    const NAMES: [(&str, &[&str]); 7] = [
        ("null", &["NULL", "None"]),
        ("boolean", &["BOOLEAN", "bool"]),
        ("integer", &["INTEGER", "int"]),
        ("number", &["NUMBER", "float", "double"]),
        ("string", &["STRING", "str"]),
        ("object", &["OBJECT", "dict"]),
        ("array", &["ARRAY", "list"]),
    ];
    if let Value::Array(parts) = schema {
        parts.iter_mut().for_each(|part| respell(part, random));
    }
    let Value::Object(fields) = schema else { return };
    fields.iter_mut().filter(|(key, _)| *key != "const" && *key != "enum").for_each(|(_, part)| respell(part, random));
    let Some(Value::String(name)) = fields.get("type") else { return };
    let spellings = NAMES.iter().find(|(known, _)| known == name).unwrap().1;
    fields.insert("type".into(), random.pick(spellings).into());
    let missing =
        ["minLength", "required", "properties", "items", "enum", "pattern", "format", "maxItems", "$ref", "oneOf"];
    fields.entry(random.pick(&missing)).or_insert(Value::Null);
}

#[test]
fn schemas_in_other_spellings_mean_the_same() {
    for seed in 0..SCHEMAS {
        let schema = Writer::parameters(seed);
        let mut respelled = schema.clone();
        respell(&mut respelled, &mut Random(seed));
        let [expected, prepared] = [&schema, &respelled].map(|schema| json_schema::prepare(schema, false));
        assert_eq!(prepared.map_err(|error| error.path), expected.map_err(|error| error.path), "{respelled}");
        let [expected, sets] = [&schema, &normalized(&respelled)].map(|schema| {
            let document = Document::new(schema);
            let sets = parameter_sets(&[schema], &document);
            ["a", "b", "c d", "items"].map(|name| any_value(&sets, name, &document))
        });
        assert_eq!(sets.map(|value| value.others), expected.map(|value| value.others), "{respelled}");
    }
}

#[test]
fn forced_calls_match_generated_schemas() {
    check_forced_calls(0..SCHEMAS);
}

#[test]
#[ignore = "long: 2,000 schemas"]
fn many_forced_calls_match_generated_schemas() {
    let seeds = seeds(2_000);
    check_forced_calls(SCHEMAS + seeds.start..SCHEMAS + seeds.end);
}

fn check_forced_calls(seeds: Range<u64>) {
    let count = seeds.end - seeds.start;
    let mut compiled = 0;
    for seed in seeds {
        let parameters = Writer::parameters(seed);
        match call_arguments(seed, &parameters) {
            Ok(answers) => {
                compiled += 1;
                for (text, value) in answers {
                    let wrong = validator::errors(&parameters, &value, &parameters);
                    assert!(wrong.is_empty(), "{seed}: {parameters}: {wrong:?}: {text:?}");
                }
            }
            Err(error) => {
                let named = format!("{} {}", error.path, error.reason);
                let keywords = [
                    "not",
                    "uniqueItems",
                    "$ref",
                    "unevaluated",
                    "attern",
                    "roperties",
                    "oneOf",
                    "enum",
                    "required",
                    "minimum",
                ];
                let is_impossible = named.contains("no text can match") || named.contains("nsatisfiable");
                let is_named = is_impossible || keywords.iter().any(|keyword| named.contains(keyword));
                assert!(is_named, "{seed}: {parameters}: {error:?}");
            }
        }
    }
    eprintln!("{compiled} of {count} schemas compiled");
    assert!(compiled > count * 2 / 5, "{compiled}");
}
