//! The grammar of Qwen's tool calls, with each parameter held to its schema:
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=P>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Parameters come in the schema's order; those that are not required may be left out. A string's value is raw text up to
//! the closing tag, any other value is JSON.

use super::{AllowedTools, FormatError, parameters, schema};
use crate::chat::parser::Types;
use llguidance::{api::GrammarWithLexer, regex_to_lark};
use serde_json::{Map, Value};
use std::fmt::Write;

/// Ways to fill in one tool's parameters that a schema's `anyOf` may give.
const MOST_SHAPES: usize = 64;

/// The closing tag of a value, in Lark.
const END: &str = r#""\n</parameter>\n""#;

/// A string of any text: the first closing tag ends it.
const TEXT: &str = "text \"\\n\"";

/// Rules named `calls`, and the grammars of JSON values that they refer to.
#[derive(Default)]
pub struct Written {
    pub lark: String,
    pub values: Vec<GrammarWithLexer>,
}

/// Writes the rule of one call or several. `marked`: `<tool_call>` is a token. `check` compiles one tool's part alone.
pub fn write(
    calls: &AllowedTools,
    marked: bool,
    check: impl Fn(Vec<GrammarWithLexer>) -> Result<(), String>,
) -> Result<Written, FormatError> {
    let mut written = Written::default();
    let [open, close] = if marked { ["<tool_call>", "</tool_call>"] } else { ["\"<tool_call>\"", "\"</tool_call>\""] };
    let more = if calls.parallel { " (\"\\n\" call)*" } else { "" };
    let names: Vec<String> = calls.tools.iter().map(|(index, _)| format!("tool_{index}")).collect();
    let _ = writeln!(written.lark, "calls: call{more}");
    let _ = writeln!(written.lark, "call: {open} \"\\n<function=\" ({}) \"</function>\\n\" {close}", names.join(" | "));
    let _ = writeln!(written.lark, "text[suffix=\"</parameter>\"]: /(?s:.*)/");
    for (index, tool) in &calls.tools {
        let fault = |fault: FormatError| FormatError { tool: Some(*index), ..fault };
        let one = Tool::new(*index, tool).map_err(fault)?.write().map_err(fault)?;
        let alone = format!("start: tool_{index}\ntext[suffix=\"</parameter>\"]: /(?s:.*)/\n{}", one.lark);
        let alone = [vec![GrammarWithLexer::from_lark(alone)], one.values.clone()].concat();
        check(alone).map_err(|why| fault(FormatError::new("", why)))?;
        written.lark += &one.lark;
        written.values.extend(one.values);
    }
    Ok(written)
}

/// One tool's rules.
struct Tool {
    name: String,
    index: usize,
    root: Value,
    written: Written,
}

/// One way to fill in the parameters.
#[derive(Clone, Default)]
struct Shape {
    properties: Map<String, Value>,
    required: Vec<String>,
    /// The schema names no properties at all: any may come.
    open: bool,
}

impl Tool {
    fn new(index: usize, tool: &Value) -> Result<Self, FormatError> {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
        let root = schema::ready(&parameters(tool), strict)?;
        Ok(Self { name, index, root, written: Written::default() })
    }

    fn write(mut self) -> Result<Written, FormatError> {
        let mut shapes = Vec::new();
        self.shapes(&self.root.clone(), Shape { open: true, ..Shape::default() }, &mut shapes, 0);
        if shapes.len() > MOST_SHAPES {
            return Err(FormatError::new(
                "",
                format!("there are more than {MOST_SHAPES} ways to fill in the parameters"),
            ));
        }
        let mut ways = Vec::new();
        for shape in shapes {
            let mut way = String::new();
            for (name, property) in &shape.properties {
                if name.trim() != name || name.is_empty() || name.contains(['<', '>', '\n']) {
                    let why = "a parameter's name must not hold <, > or white space at its ends";
                    return Err(FormatError::new(&format!(".properties.{name}"), why));
                }
                let value = self.value(property, 0);
                let value = format!("{} ({value})", literal(&format!("<parameter={name}>\n")));
                let _ =
                    if shape.required.contains(name) { write!(way, " {value}") } else { write!(way, " ({value})?") };
            }
            if shape.open && shape.properties.is_empty() {
                way += &self.any_parameters();
            }
            ways.push(if way.is_empty() { " \"\"".into() } else { way });
        }
        let (index, name, ways) = (self.index, literal(&format!("{}>\n", self.name)), ways.join(" |"));
        let _ = writeln!(self.written.lark, "tool_{index}: {name} ({ways})");
        Ok(self.written)
    }

    /// Parameters of any name, where the schema names none.
    fn any_parameters(&mut self) -> String {
        let others = self.root.get("additionalProperties").filter(|others| others.is_object()).cloned();
        let value = others.map_or_else(|| TEXT.to_owned(), |others| self.value(&others, 0));
        let count = |key: &str| self.root.get(key).and_then(Value::as_u64).map(|count| count.min(1000));
        let (least, most) = (count("minProperties").unwrap_or(0), count("maxProperties").unwrap_or(1000));
        format!(" (\"<parameter=\" /[A-Za-z0-9_.-]{{1,64}}/ \">\\n\" ({value})){{{least},{most}}}")
    }

    /// Every way that `schema` leaves to fill in an object, on top of what `base` says.
    fn shapes(&self, schema: &Value, base: Shape, into: &mut Vec<Shape>, depth: usize) {
        if depth > 16 || into.len() > MOST_SHAPES {
            return;
        }
        let mut shape = base;
        for part in self.parts(schema, 0) {
            if let Some(Value::Object(properties)) = part.get("properties") {
                shape.open = false;
                shape.properties.extend(properties.clone());
            }
            shape.open &= part.get("additionalProperties") != Some(&Value::Bool(false));
            let required = part.get("required").and_then(Value::as_array).into_iter().flatten();
            shape.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
        }
        let choices = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array());
        match choices {
            None => into.push(shape),
            Some(choices) => choices.iter().for_each(|choice| self.shapes(choice, shape.clone(), into, depth + 1)),
        }
    }

    /// A schema and what it includes by reference or `allOf`.
    fn parts<'a>(&'a self, schema: &'a Value, depth: usize) -> Vec<&'a Value> {
        let mut parts = vec![schema];
        if depth < 16 {
            let target =
                schema.get("$ref").and_then(Value::as_str).and_then(|r| self.root.pointer(r.strip_prefix('#')?));
            let all = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
            target.into_iter().chain(all).for_each(|part| parts.extend(self.parts(part, depth + 1)));
        }
        parts
    }

    /// The rule of a value and of the tag that ends it.
    fn value(&mut self, schema: &Value, depth: usize) -> String {
        let mut branches = Vec::new();
        self.branches(schema, &mut branches, depth);
        let mut rules: Vec<String> = branches.iter().map(|branch| self.branch(branch)).collect();
        rules.dedup();
        // Any text: the others are in it.
        if rules.iter().any(|rule| rule == TEXT) { TEXT.into() } else { rules.join(" | ") }
    }

    /// A schema as alternatives of one type each, as far as they can be told apart.
    fn branches(&self, schema: &Value, into: &mut Vec<Value>, depth: usize) {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|r| self.root.pointer(r.strip_prefix('#')?));
        let only = schema.as_object().map_or(0, Map::len) == 1;
        if let (Some(target), true, true) = (target, only, depth < 16) {
            return self.branches(target, into, depth + 1);
        }
        let choices = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array());
        if let (Some(choices), true, true) = (choices, only, depth < 16) {
            return choices.iter().for_each(|choice| self.branches(choice, into, depth + 1));
        }
        match schema.get("type").and_then(Value::as_array) {
            Some(types) if schema.get("enum").is_none() => into.extend(types.iter().map(|kind| {
                let mut one = schema.clone();
                one["type"] = kind.clone();
                one
            })),
            _ => into.push(schema.clone()),
        }
    }

    fn branch(&mut self, schema: &Value) -> String {
        let types = Types::of_schema(schema, &self.root);
        let values = schema.get("enum").and_then(Value::as_array).cloned();
        if let Some(values) = values.or_else(|| schema.get("const").map(|value| vec![value.clone()])) {
            // Each value as the model writes it, if it reads back as itself.
            let spelt = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let same =
                |value: &&Value| serde_json::from_str(&types.json(&spelt(value))).is_ok_and(|v: Value| v == **value);
            let words: Vec<String> = values.iter().filter(same).map(|value| literal(&spelt(value))).collect();
            return format!("({}) {END}", words.join(" | "));
        }
        if types.only_string() {
            return self.string(schema);
        }
        let name = format!("value_{}_{}", self.index, self.written.values.len());
        let grammar = GrammarWithLexer::from_json_schema(schema::alone(schema, &self.root));
        self.written.values.push(GrammarWithLexer { name: Some(name.clone()), ..grammar });
        format!("@{name} {END}")
    }

    fn string(&mut self, schema: &Value) -> String {
        let number = |key: &str| schema.get(key).and_then(Value::as_u64);
        let pattern = schema.get("pattern").and_then(Value::as_str);
        if pattern.is_none() && number("minLength").is_none() && number("maxLength").is_none() {
            return TEXT.into();
        }
        let name = format!("STRING_{}_{}", self.index, self.written.lark.len());
        let most = number("maxLength").map_or_else(String::new, |most| most.to_string());
        let mut rule = format!("{name}: (/(?s:.{{{},{most}}})/", number("minLength").unwrap_or(0));
        if let Some(pattern) = pattern {
            rule += &format!(" & /{}/", regex_to_lark(&whole(pattern), "dw"));
        }
        rule += &format!(" & ~/(?s:.*)<\\/parameter>(?s:.*)/) {END}\n");
        self.written.lark += &rule;
        name
    }
}

/// An expression that matches all of a text of which `pattern` matches a part.
fn whole(pattern: &str) -> String {
    let (mut depth, mut class, mut escaped, mut bar) = (0, false, false, false);
    for c in pattern.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => class = false,
            '[' => class = true,
            '(' if !class => depth += 1,
            ')' if !class => depth -= 1,
            '|' if !class && depth == 0 => bar = true,
            _ => {}
        }
    }
    let (mut inner, mut before, mut after) = (pattern, "(?s:.*)", "(?s:.*)");
    if !bar && let Some(rest) = inner.strip_prefix('^') {
        (inner, before) = (rest, "");
    }
    // An escaped dollar is one to match.
    if !bar && let Some(rest) = inner.strip_suffix('$').filter(|rest| !rest.ends_with('\\')) {
        (inner, after) = (rest, "");
    }
    format!("{before}(?:{inner}){after}")
}

/// A literal of Lark, which writes strings as JSON does.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
