//! Generates random output formats that may attack the grammar compiler: deep, wide, recursive or intersecting JSON
//! schemas, regular expressions, Lark grammars and tools. Many of these formats are invalid.

use crate::mutate::Dice;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// A source of random decisions: first from given bytes, then from a pseudo-random sequence.
pub struct Source<'a> {
    bytes: &'a [u8],
    dice: Dice,
}

impl<'a> Source<'a> {
    pub fn new(bytes: &'a [u8], seed: u64) -> Self {
        Self { bytes, dice: Dice(seed) }
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        if let Some((&byte, rest)) = self.bytes.split_first() {
            self.bytes = rest;
            return usize::from(byte) % limit.max(1);
        }
        self.dice.below(limit.max(1))
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// A random size: usually small, sometimes very large.
    fn size(&mut self) -> usize {
        match self.below(8) {
            0..4 => self.below(6),
            4 | 5 => self.below(60),
            6 => self.below(256) * 8,
            _ => self.below(256) * 64,
        }
    }
}

/// The fields of a chat request with a random format.
pub fn fields(source: &mut Source) -> Value {
    let strict = source.below(2) == 0;
    match source.below(10) {
        0..4 => {
            let schema = root_schema(source);
            let name = source.one_of(&["json_schema", "guided_json"]);
            match name {
                "guided_json" => json!({name: schema}),
                _ => {
                    json!({"response_format": {"type": name, name: {"name": "n", "strict": strict, "schema": schema}}})
                }
            }
        }
        4 | 5 => json!({"response_format": {"type": "regex", "regex": regex(source, 4)}}),
        6 | 7 => json!({"response_format": {"type": "lark", "lark": lark(source)}}),
        _ => {
            let count = 1 + source.size() / 8;
            let tools: Vec<Value> = (0..count)
                .map(|i| {
                    let parameters = if count < 20 { root_schema(source) } else { object(source, 2) };
                    let function = json!({"name": format!("f{i}"), "strict": strict, "parameters": parameters});
                    json!({"type": "function", "function": function})
                })
                .collect();
            let choice = source.one_of(&["auto", "required"]);
            json!({"tools": tools, "tool_choice": choice})
        }
    }
}

fn root_schema(source: &mut Source) -> Value {
    match source.below(12) {
        0 => nested(source),
        1 => wide(source),
        2 | 3 => referring(source),
        4 => json!({"allOf": (0..source.size().min(300)).map(|_| schema(source, 2)).collect::<Vec<_>>()}),
        5 => {
            let patterns: Vec<Value> =
                (0..source.below(12)).map(|i| json!({"pattern": format!("(?s:.*)a(?s:.{{{i}}})")})).collect();
            json!({"type": "string", "allOf": patterns})
        }
        _ => schema(source, 5),
    }
}

/// Nested schemas of one kind, with up to hundreds of levels.
fn nested(source: &mut Source) -> Value {
    let levels = source.size().min(400);
    let kind = source.below(5);
    (0..levels).fold(json!({"type": "integer"}), |inner, _| match kind {
        0 => json!({"type": "array", "items": inner}),
        1 => json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
        2 => json!({"anyOf": [inner, {"type": "null"}]}),
        3 => json!({"allOf": [inner]}),
        _ => json!({"type": "object", "additionalProperties": inner}),
    })
}

/// A schema with many properties, values or alternatives.
fn wide(source: &mut Source) -> Value {
    let count = source.size();
    let part = |source: &mut Source| schema(source, 1);
    match source.below(6) {
        0 => json!({"enum": (0..count).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
        1 => json!({"anyOf": (0..count).map(|_| part(source)).collect::<Vec<_>>()}),
        2 => {
            let branch = |i: usize| json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": format!("k{i}")}}});
            json!({"oneOf": (0..count).map(branch).collect::<Vec<_>>()})
        }
        3 => json!({"prefixItems": (0..count).map(|_| part(source)).collect::<Vec<_>>()}),
        4 => {
            let patterns: Map<String, Value> = (0..count.min(40)).map(|_| (regex(source, 2), part(source))).collect();
            json!({"type": "object", "patternProperties": patterns})
        }
        _ => {
            let properties: Map<String, Value> = (0..count).map(|i| (format!("p{i}"), part(source))).collect();
            let required: Vec<String> = properties.keys().take(source.size()).cloned().collect();
            json!({"type": "object", "properties": properties, "required": required})
        }
    }
}

/// Schema definitions that refer to each other in chains, cycles or trees.
fn referring(source: &mut Source) -> Value {
    let count = 1 + source.size().min(600);
    let kind = source.below(7);
    let target = |i: usize| json!({"$ref": format!("#/$defs/d{}", i % count)});
    let definition = |source: &mut Source, i: usize| match kind {
        0 => target(i + 1),
        1 => json!({"type": "object", "properties": {"a": target(i + 1), "b": target(i + 1)}}),
        2 => json!({"anyOf": [target(i + 1), target(2 * i + 1), {"type": "null"}]}),
        3 => json!({"allOf": [target(i + 1), schema(source, 1)]}),
        4 => json!({"type": "array", "items": target(i * 7 + 3), "maxItems": source.below(5)}),
        5 => json!({"minLength": source.below(9), "pattern": regex(source, 1), "$ref": target(i + 1)["$ref"]}),
        _ => json!({"type": "object", "additionalProperties": target(source.below(count))}),
    };
    let mut defs: Map<String, Value> = (0..count).map(|i| (format!("d{i}"), definition(source, i))).collect();
    if source.below(3) > 0 {
        defs.insert(format!("d{}", count - 1), schema(source, 1));
    }
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn object(source: &mut Source, depth: usize) -> Value {
    let properties: Map<String, Value> =
        (0..source.below(6)).map(|i| (format!("p{i}"), schema(source, depth.saturating_sub(1)))).collect();
    let required: Vec<String> = properties.keys().filter(|_| source.below(2) == 0).cloned().collect();
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    if source.below(2) == 0 {
        object["additionalProperties"] = json!(source.below(2) == 0);
    }
    if source.below(8) == 0 {
        object["minProperties"] = source.size().into();
    }
    object
}

fn schema(source: &mut Source, depth: usize) -> Value {
    let leaf = depth == 0;
    match source.below(if leaf { 6 } else { 11 }) {
        0 => {
            let mut text = json!({"type": "string"});
            if source.below(3) == 0 {
                text["minLength"] = source.size().into();
            }
            if source.below(3) == 0 {
                text["maxLength"] = source.size().into();
            }
            if source.below(4) == 0 {
                text["pattern"] = regex(source, 3).into();
            }
            if source.below(6) == 0 {
                text["format"] = source.one_of(&["date", "date-time", "uuid", "email", "uri", "ipv6", "x"]).into();
            }
            text
        }
        1 => {
            let kind = source.one_of(&["integer", "number"]);
            let mut number = json!({"type": kind});
            for key in ["minimum", "maximum", "exclusiveMinimum", "multipleOf"] {
                if source.below(4) == 0 {
                    number[key] = source.one_of(&[0.0, 1.0, -7.5, 1e-9, 4e7, 123_456.789, 1e18, -3.4e38, 5e300]).into();
                }
            }
            number
        }
        2 => json!({"type": source.one_of(&["boolean", "null", "string", "integer", "nonsense"])}),
        3 => json!({"enum": [1, "a", null, {"x": [1.5]}, "\u{1f980}"]}),
        4 => json!({"const": source.one_of(&["", "x", "\"\\", "</parameter>"])}),
        5 => json!(source.below(3) > 0),
        6 | 7 => object(source, depth),
        8 => json!({"type": "array", "items": schema(source, depth - 1), "minItems": source.below(4),
                    "maxItems": source.size()}),
        9 => {
            let key = source.one_of(&["anyOf", "oneOf", "allOf"]);
            json!({key: (0..1 + source.below(4)).map(|_| schema(source, depth - 1)).collect::<Vec<_>>()})
        }
        _ => json!({"not": schema(source, depth - 1), "if": true, "type": ["object", "string"]}),
    }
}

fn regex(source: &mut Source, depth: usize) -> String {
    let atoms = [
        "a", ".", "[a-z0-9]", "\\d", "\\w", "\\p{L}", "(?s:.)", "[^x]", "\\.", "é", "\\b", "(?!a)", "^", "$", "(", "/",
    ];
    let mut text = String::new();
    for _ in 0..1 + source.below(4) {
        let part = if depth > 0 && source.below(2) == 0 {
            format!("({}|{})", regex(source, depth - 1), regex(source, depth - 1))
        } else {
            // The last atoms are used rarely, because the compiler does not support most of them.
            let known = if source.below(20) == 0 { atoms.len() } else { 10 };
            atoms[source.below(known)].to_owned()
        };
        text += &part;
        match source.below(6) {
            0 => text.push('*'),
            1 => text.push('+'),
            2 => {
                let low = source.below(5);
                let high = source.size();
                let _ = write!(text, "{{{low},{}}}", low + high);
            }
            _ => {}
        }
    }
    text
}

fn lark(source: &mut Source) -> String {
    let count = source.size().min(800);
    let rules = |rule: &dyn Fn(usize) -> String| (0..count).map(rule).collect::<String>();
    match source.below(10) {
        0 => format!("start: r0\n{}r{count}: \"b\"\n", rules(&|i| format!("r{i}: \"a\" r{}\n", i + 1))),
        1 => format!("start: r0\n{}r{count}: \"b\"\n", rules(&|i| format!("r{i}: r{} r{} | \"x\"\n", i + 1, i + 1))),
        2 => format!("start: r0\n{}", rules(&|i| format!("r{i}: r{} | \"x\"\n", (i * 5 + 1) % count.max(1)))),
        3 => {
            let kind = source.below(3);
            let terminal = |i: usize| match kind {
                0 => format!("/(?s:.*)a(?s:.{{{i}}})/"),
                1 => format!("~/{}b/", "a".repeat(i % 50)),
                _ => format!("/[a-z]{{{i},}}/"),
            };
            let terms: Vec<String> = (0..1 + source.below(12)).map(terminal).collect();
            format!("start: T\nT: {}\n", terms.join(" & "))
        }
        4 => format!("start: {}\n", (0..=count).map(|i| format!("\"word {i}\"")).collect::<Vec<_>>().join(" | ")),
        5 => format!("start: {}\"a\"{}\n", "(".repeat(count), ")".repeat(count)),
        6 => format!("start: A{{0,{}}}\nA: /{}/\n", source.size() * 50, regex(source, 2)),
        7 => format!("start: %json {}\n", root_schema(source)),
        8 => format!("start: a b\na[max_tokens=3]: /{}/\nb[lazy]: /.*{}/ a?\n", regex(source, 1), regex(source, 1)),
        _ => {
            let mut text = format!("start: r0\nr0: /{}/ | \"(\" r0 \")\" | r0 r0\n", regex(source, 3));
            for _ in 0..source.below(4) {
                let at =
                    (0..=text.len()).filter(|&at| text.is_char_boundary(at)).nth(source.below(text.len())).unwrap_or(0);
                text.insert_str(at, source.one_of(&["(", "|", "/", "\"", "%json", "~", "&", "{3}", "<x>", "\n"]));
            }
            text
        }
    }
}
