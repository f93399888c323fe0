//! The grammar of Qwen's tool calls, with each parameter constrained to its schema:
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
//! Parameters come in the order of the schema. Parameters that are not required may be left out. The value of a string
//! is raw text up to the closing tag. Every other value is JSON.

use super::{
    format::{AllowedTools, FormatError},
    json_schema, string_formats,
};
use crate::parser::{JsonTypes, target};
use llguidance::{api::GrammarWithLexer, derivre::RegexAst, regex_to_lark};
use serde_json::{Map, Value};
use std::fmt::Write;

/// Maximum number of tools that one answer may call, as in OpenAI's API.
const MAX_TOOLS: usize = 128;
/// Maximum number of parameters of all tools together. Compiling takes about a millisecond per parameter.
const MAX_PARAMETERS: usize = 2000;
/// Maximum number of parameter sets that `anyOf` and `oneOf` of one tool may result in.
const MAX_PARAMETER_SETS: usize = 64;
/// Maximum depth to which `$ref`, `allOf` and `anyOf` are followed to find the parameters of a tool.
const MAX_DEPTH: usize = 16;
/// Maximum number of parts of a schema that are collected. References that branch could give exponentially many parts.
const MAX_PARTS: usize = 1000;

/// The closing tag of a value, in Lark.
const END: &str = r#""\n</parameter>\n""#;

/// Lark expression for any text up to the first closing tag, with that tag.
const TEXT: &str = "text \"\\n\"";
/// The rule that `TEXT` refers to.
const TEXT_RULE: &str = r#"text[suffix="</parameter>"]: /(?s:.*)/"#;

/// A grammar with the rule `calls`, and the grammars of JSON values that this rule refers to.
#[derive(Default)]
pub struct CallGrammar {
    pub lark: String,
    pub values: Vec<GrammarWithLexer>,
}

/// Writes the rule for one call, or for several calls. `call_is_token` is true if `<tool_call>` is one token. `check`
/// compiles the grammar of each tool separately, so that an error names its tool.
pub fn write(
    allowed: &AllowedTools,
    call_is_token: bool,
    check: impl Fn(Vec<GrammarWithLexer>) -> Result<(), String>,
) -> Result<CallGrammar, FormatError> {
    let count = allowed.tools.len();
    if count > MAX_TOOLS {
        return Err(FormatError::new("", format!("{count} tools may be called; the limit is {MAX_TOOLS}")));
    }
    let mut parameters = 0;
    let mut grammar = CallGrammar::default();
    let [open, close] =
        if call_is_token { ["<tool_call>", "</tool_call>"] } else { ["\"<tool_call>\"", "\"</tool_call>\""] };
    let more = if allowed.parallel { " (\"\\n\" call)*" } else { "" };
    let names: Vec<String> = allowed.tools.iter().map(|(index, _)| format!("tool_{index}")).collect();
    let _ = writeln!(grammar.lark, "calls: call{more}");
    let _ = writeln!(grammar.lark, "call: {open} \"\\n<function=\" ({}) \"</function>\\n\" {close}", names.join(" | "));
    let _ = writeln!(grammar.lark, "{TEXT_RULE}");
    for (index, tool) in &allowed.tools {
        let of_tool = |error: FormatError| FormatError { tool: Some(*index), ..error };
        let tool = ToolGrammar::new(*index, tool).map_err(of_tool)?;
        parameters += tool.root.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        if parameters > MAX_PARAMETERS {
            let reason = format!("the tools up to this one have more than {MAX_PARAMETERS} parameters");
            return Err(of_tool(FormatError::new("", reason)));
        }
        let rules = tool.write().map_err(of_tool)?;
        let alone = format!("start: tool_{index}\n{TEXT_RULE}\n{}", rules.lark);
        let alone = [vec![GrammarWithLexer::from_lark(alone)], rules.values.clone()].concat();
        check(alone).map_err(|reason| of_tool(FormatError::new("", reason)))?;
        grammar.lark += &rules.lark;
        grammar.values.extend(rules.values);
    }
    Ok(grammar)
}

/// The rules of one tool.
struct ToolGrammar {
    name: String,
    index: usize,
    /// The schema of the parameters, as [`json_schema::prepare`] returns it.
    root: Value,
    strict: bool,
    grammar: CallGrammar,
}

/// One set of parameters that a call may have.
#[derive(Clone, Default)]
struct ParameterSet {
    properties: Map<String, Value>,
    required: Vec<String>,
    /// True if the schema names no properties, so that any parameter is allowed.
    is_open: bool,
}

impl ToolGrammar {
    fn new(index: usize, tool: &Value) -> Result<Self, FormatError> {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
        // A tool without a schema takes any parameters.
        let parameters = function.get("parameters").filter(|parameters| !parameters.is_null()).cloned();
        let root = json_schema::prepare(&parameters.unwrap_or_else(|| Map::new().into()), strict)?;
        Ok(Self { name, index, root, strict, grammar: CallGrammar::default() })
    }

    fn write(mut self) -> Result<CallGrammar, FormatError> {
        let mut sets = Vec::new();
        let open = ParameterSet { is_open: true, ..ParameterSet::default() };
        self.collect_sets(&self.root, open, &mut sets, 0);
        if sets.len() > MAX_PARAMETER_SETS {
            let reason = format!("there are more than {MAX_PARAMETER_SETS} ways to fill in the parameters");
            return Err(FormatError::new("", reason));
        }
        let mut alternatives = Vec::new();
        for set in sets {
            let mut alternative = String::new();
            for (name, property) in &set.properties {
                if name.trim() != name || name.is_empty() || name.contains(['<', '>', '\n']) {
                    let reason = "a parameter's name must not contain <, > or white space at its ends";
                    return Err(FormatError::new(&format!(".properties.{name}"), reason));
                }
                let at =
                    |error: FormatError| FormatError::new(&format!(".properties.{name}{}", error.path), error.reason);
                let value = self.value(property).map_err(at)?;
                let value = format!("{} ({value})", literal(&format!("<parameter={name}>\n")));
                let _ = if set.required.contains(name) {
                    write!(alternative, " {value}")
                } else {
                    write!(alternative, " ({value})?")
                };
            }
            if set.is_open && set.properties.is_empty() {
                alternative += &self.any_parameters()?;
            }
            alternatives.push(if alternative.is_empty() { " \"\"".into() } else { alternative });
        }
        let index = self.index;
        let name = literal(&format!("{}>\n", self.name));
        let _ = writeln!(self.grammar.lark, "tool_{index}: {name} ({})", alternatives.join(" |"));
        Ok(self.grammar)
    }

    /// Writes a rule for parameters of any name. Used if the schema names no parameters.
    fn any_parameters(&mut self) -> Result<String, FormatError> {
        let others = self.root.get("additionalProperties").filter(|others| others.is_object()).cloned();
        let value = others.map_or_else(|| Ok(TEXT.to_owned()), |others| self.value(&others))?;
        let count = |key: &str| self.root.get(key).and_then(Value::as_u64).map(|count| count.min(1000));
        let min = count("minProperties").unwrap_or(0);
        let max = count("maxProperties").unwrap_or(1000);
        Ok(format!(" (\"<parameter=\" /[A-Za-z0-9_.-]{{1,64}}/ \">\\n\" ({value})){{{min},{max}}}"))
    }

    /// Collects every set of parameters that `schema` allows. Each set includes the parameters of `base`.
    fn collect_sets(&self, schema: &Value, base: ParameterSet, sets: &mut Vec<ParameterSet>, depth: usize) {
        if depth > MAX_DEPTH || sets.len() > MAX_PARAMETER_SETS {
            return;
        }
        let mut set = base;
        let mut parts = Vec::new();
        self.collect_parts(schema, &mut parts, 0);
        for part in parts {
            if let Some(Value::Object(properties)) = part.get("properties") {
                set.is_open = false;
                set.properties.extend(properties.clone());
            }
            set.is_open &= part.get("additionalProperties") != Some(&Value::Bool(false));
            let required = part.get("required").and_then(Value::as_array).into_iter().flatten();
            set.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
        }
        match alternatives(schema) {
            None => sets.push(set),
            Some(choices) => {
                choices.iter().for_each(|choice| self.collect_sets(choice, set.clone(), sets, depth + 1));
            }
        }
    }

    /// Collects a schema and the schemas that it includes by reference or `allOf`.
    fn collect_parts<'a>(&'a self, schema: &'a Value, parts: &mut Vec<&'a Value>, depth: usize) {
        parts.push(schema);
        if depth < MAX_DEPTH && parts.len() < MAX_PARTS {
            let all = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
            target(schema, &self.root)
                .into_iter()
                .chain(all)
                .for_each(|part| self.collect_parts(part, parts, depth + 1));
        }
    }

    /// Lark alternatives for a value and its closing tag.
    fn value(&mut self, schema: &Value) -> Result<String, FormatError> {
        let mut branches = Vec::new();
        self.collect_branches(schema, &mut branches, 0);
        let mut rules = branches.iter().map(|branch| self.branch(branch)).collect::<Result<Vec<_>, _>>()?;
        rules.dedup();
        // If any text is allowed, the other alternatives add nothing.
        Ok(if rules.iter().any(|rule| rule == TEXT) { TEXT.into() } else { rules.join(" | ") })
    }

    /// Splits a schema into alternatives with one type each, as far as the alternatives can be distinguished.
    fn collect_branches(&self, schema: &Value, branches: &mut Vec<Value>, depth: usize) {
        let is_only_keyword = schema.as_object().map_or(0, Map::len) == 1;
        if is_only_keyword && depth < MAX_DEPTH && branches.len() < MAX_PARTS {
            if let Some(target) = target(schema, &self.root) {
                return self.collect_branches(target, branches, depth + 1);
            }
            if let Some(choices) = alternatives(schema) {
                return choices.iter().for_each(|choice| self.collect_branches(choice, branches, depth + 1));
            }
        }
        match schema.get("type").and_then(Value::as_array) {
            Some(types) if schema.get("enum").is_none() => branches.extend(types.iter().map(|kind| {
                let mut one = schema.clone();
                one["type"] = kind.clone();
                one
            })),
            _ => branches.push(schema.clone()),
        }
    }

    fn branch(&mut self, schema: &Value) -> Result<String, FormatError> {
        let types = JsonTypes::of_schema(schema, &self.root);
        let values = schema.get("enum").and_then(Value::as_array).cloned();
        if let Some(values) = values.or_else(|| schema.get("const").map(|value| vec![value.clone()])) {
            // The values are written as the model writes them. A value that the parser would read back differently is
            // left out.
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let reads_back =
                |value: &&Value| serde_json::from_str(&types.json(&text(value))).is_ok_and(|v: Value| v == **value);
            let words: Vec<String> = values.iter().filter(reads_back).map(|value| literal(&text(value))).collect();
            return Ok(format!("({}) {END}", words.join(" | ")));
        }
        if types.only_string() {
            return self.string(schema);
        }
        let name = format!("value_{}_{}", self.index, self.grammar.values.len());
        let grammar = GrammarWithLexer::from_json_schema(json_schema::extract(schema, &self.root));
        self.grammar.values.push(GrammarWithLexer { name: Some(name.clone()), ..grammar });
        Ok(format!("@{name} {END}"))
    }

    fn string(&mut self, schema: &Value) -> Result<String, FormatError> {
        let number = |key: &str| schema.get(key).and_then(Value::as_u64);
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        let min = number("minLength").unwrap_or(0);
        let max = number("maxLength");
        let at = self.grammar.lark.len();
        let mut expressions = Vec::new();
        if let Some(pattern) = text("pattern").map(match_whole) {
            let regex = RegexAst::Regex(regex_to_lark(&pattern, "dw"));
            let can_enforce = json_schema::can_enforce(&regex, self.strict.then_some("tool"), ".pattern")?;
            expressions.extend(can_enforce.then_some(pattern));
        }
        expressions.extend(text("format").and_then(string_formats::expression));
        match (max, expressions.is_empty() && min == 0) {
            (None, true) => Ok(TEXT.into()),
            // As in `TEXT`, the first closing tag ends the text. The line feed before the tag may count as one of the
            // `max` characters.
            (Some(max), true) => {
                let name = format!("string_{}_{at}", self.index);
                let rule = format!("{name}[suffix=\"</parameter>\"]: /(?s:.{{0,{max}}})\\n?/\n");
                self.grammar.lark += &rule;
                Ok(format!("{name} \"\\n\""))
            }
            // A suffix, as in `TEXT_RULE`, would accept any text before the tag. Here the text must match, so the
            // expression excludes the tag explicitly.
            _ => {
                let name = format!("STRING_{}_{at}", self.index);
                let max = max.map_or_else(String::new, |max| max.to_string());
                let mut rule = format!("{name}: (/(?s:.{{{min},{max}}})/");
                for expression in expressions {
                    rule += &format!(" & /{}/", regex_to_lark(&expression, "dw"));
                }
                rule += &format!(" & ~/(?s:.*)<\\/parameter>(?s:.*)/) {END}\n");
                self.grammar.lark += &rule;
                Ok(name)
            }
        }
    }
}

fn alternatives(schema: &Value) -> Option<&Vec<Value>> {
    ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array())
}

/// Turns `pattern`, which may match anywhere in a text, into an expression that matches the whole text.
fn match_whole(pattern: &str) -> String {
    let alternatives = top_level_alternatives(pattern).into_iter().map(|alternative| {
        let (inner, before) = alternative.strip_prefix('^').map_or((alternative, "(?s:.*)"), |rest| (rest, ""));
        // A dollar after a backslash is a literal.
        let end = inner.strip_suffix('$').filter(|rest| !rest.ends_with('\\'));
        let (inner, after) = end.map_or((inner, "(?s:.*)"), |rest| (rest, ""));
        format!("{before}(?:{inner}){after}")
    });
    alternatives.collect::<Vec<_>>().join("|")
}

/// Splits an expression at each `|` outside brackets.
fn top_level_alternatives(pattern: &str) -> Vec<&str> {
    let mut depth = 0;
    let mut in_class = false;
    let mut escaped = false;
    let mut start = 0;
    let mut parts = Vec::new();
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            '[' => in_class = true,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            '|' if !in_class && depth == 0 => {
                parts.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&pattern[start..]);
    parts
}

/// A Lark literal. Lark writes strings as JSON does.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
