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
//! Required parameters come in the order of the schema, and the other listed ones anywhere between them, in any order.
//! Models often choose another order than the schema: with a fixed order, a model that writes `limit` first could not
//! write `offset` any more. Parameters that the schema does not list come last. The reader drops a repeated parameter.
//! The value of a string is raw text up to the closing tag: see [`raw_text`](super::raw_text). Every other value is
//! JSON.

use super::{
    CancelFlag,
    format::{AllowedTools, FormatError},
    json_schema::{self, PATTERN_PROPERTIES},
    raw_text::{END, RawText, TEXT_RULE, literal, name_expression, raw_types},
};
use crate::schema::{Document, MAX_PARAMETER_SETS, ParameterSet, TypeSet, ValueType, any_value, parameter_sets};
use llguidance::api::GrammarWithLexer;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Maximum number of tools that one answer may call, as in OpenAI's API.
const MAX_TOOLS: usize = 128;
/// Maximum number of parameters of all tools together. A parameter counts once in each set of its tool. Compiling takes
/// about a millisecond per parameter.
const MAX_PARAMETERS: usize = 2000;
/// A value whose schema has this many bytes, with its definitions, counts as another parameter.
const PARAMETER_BYTES: usize = 16 << 10;
/// Maximum number of parameters with names that the schema does not list.
const MAX_OPEN_PARAMETERS: usize = 1000;

/// A grammar with the rule `calls`, and the grammars of JSON values that this rule refers to.
#[derive(Default)]
pub struct CallGrammar {
    pub lark: String,
    pub values: Vec<GrammarWithLexer>,
}

/// Writes the rule for one call, or for several calls. `call_is_token` is true if `<tool_call>` is one token. Fails before
/// the next tool if `cancel` is set.
pub fn write(allowed: &AllowedTools, call_is_token: bool, cancel: &CancelFlag) -> Result<CallGrammar, FormatError> {
    let count = allowed.tools.len();
    if count > MAX_TOOLS {
        return Err(FormatError::new("", format!("{count} tools may be called; the limit is {MAX_TOOLS}")));
    }
    let mut parameters_left = MAX_PARAMETERS;
    let mut grammar = CallGrammar::default();
    let [open, close] =
        if call_is_token { ["<tool_call>", "</tool_call>"] } else { ["\"<tool_call>\"", "\"</tool_call>\""] };
    let more = if allowed.parallel { " (\"\\n\" call)*" } else { "" };
    let names: Vec<String> = allowed.tools.iter().map(|(index, _)| format!("tool_{index}")).collect();
    let _ = writeln!(grammar.lark, "calls: call{more}");
    let _ = writeln!(grammar.lark, "call: {open} \"\\n<function=\" ({}) \"</function>\\n\" {close}", names.join(" | "));
    let _ = writeln!(grammar.lark, "{TEXT_RULE}");
    for (index, tool) in &allowed.tools {
        cancel.check().map_err(|reason| FormatError::new("", reason))?;
        let rules = write_tool(*index, tool, &mut parameters_left);
        let rules = rules.map_err(|error| FormatError { tool: Some(*index), ..error })?;
        grammar.lark += &rules.lark;
        grammar.values.extend(rules.values);
    }
    Ok(grammar)
}

/// Writes the rule of one tool. `parameters_left` is the number of parameters that this tool and later ones may have.
fn write_tool(index: usize, tool: &Value, parameters_left: &mut usize) -> Result<CallGrammar, FormatError> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let strict = function.get("strict").and_then(Value::as_bool).unwrap_or(false);
    // A tool without a schema takes any parameters.
    let parameters = function.get("parameters").filter(|parameters| !parameters.is_null()).cloned();
    let root = json_schema::prepare(&parameters.unwrap_or_else(|| Map::new().into()), strict)?;
    let document = Document::new(&root);
    let sets = parameter_sets(&[&root], &document);
    if sets.len() > MAX_PARAMETER_SETS {
        let reason = format!("there are more than {MAX_PARAMETER_SETS} ways to fill in the parameters");
        return Err(FormatError::new("", reason));
    }
    let mut writer = ToolWriter {
        index,
        root: &root,
        document: &document,
        sets: &sets,
        strict,
        parameters_left,
        grammar: CallGrammar::default(),
        impossible: None,
    };
    let mut alternatives = Vec::new();
    for set in &sets {
        alternatives.extend(writer.parameters(set)?);
    }
    if alternatives.is_empty() {
        let reason = "no call can have the parameters that the schema requires";
        return Err(writer.impossible.unwrap_or_else(|| FormatError::new("", reason)));
    }
    let name = literal(&format!("{name}>\n"));
    let _ = writeln!(writer.grammar.lark, "tool_{index}: {name} ({})", alternatives.join(" |"));
    Ok(writer.grammar)
}

/// Writes the rules of one tool.
struct ToolWriter<'a> {
    index: usize,
    /// The schema of the parameters, as [`json_schema::prepare`] returns it.
    root: &'a Value,
    document: &'a Document<'a>,
    sets: &'a [ParameterSet<'a>],
    strict: bool,
    parameters_left: &'a mut usize,
    grammar: CallGrammar,
    /// Why no call can have some set of parameters.
    impossible: Option<FormatError>,
}

impl ToolWriter<'_> {
    /// Counts parameters.
    fn spend(&mut self, parameters: usize) -> Result<(), FormatError> {
        let reason = || {
            let counts = "counted in each alternative of `anyOf`, and once more for each 16 KiB of a schema";
            format!("the tools up to this one have more than {MAX_PARAMETERS} parameters, {counts}")
        };
        let left = self.parameters_left.checked_sub(parameters).ok_or_else(|| FormatError::new("", reason()))?;
        *self.parameters_left = left;
        Ok(())
    }

    /// Writes the expression of one set of parameters. `None` if no call can have these parameters.
    fn parameters(&mut self, set: &ParameterSet<'_>) -> Result<Option<String>, FormatError> {
        if let Some(keyword) = set.constant().filter(|_| self.strict) {
            let reason = format!("`{keyword}` of all parameters together cannot be enforced in a strict tool");
            return Err(FormatError::new(&format!(".{keyword}"), reason));
        }
        let mut listed = Vec::new();
        let names = set.names();
        self.spend(names.len())?;
        for name in names {
            check_name(name)?;
            let at = |error: FormatError| FormatError::new(&format!(".properties.{name}{}", error.path), error.reason);
            let schemas = set.schemas(name);
            match self.value(&schemas, |tool| any_value(tool.sets, name, tool.document)).map_err(at)? {
                Some(value) => {
                    listed.push((
                        format!("{} ({value})", literal(&format!("<parameter={name}>\n"))),
                        set.is_required(name),
                    ));
                }
                None if set.is_required(name) => {
                    let reason = format!("no value is allowed for the required parameter `{name}`");
                    self.impossible = Some(FormatError::new(".required", reason));
                    return Ok(None);
                }
                None => {}
            }
        }
        let open = self.open_parameters(set)?;
        self.sequence(listed, &open, set.counts())
    }

    /// Writes the listed parameters, each with true if it is required, and then the open ones.
    fn sequence(
        &mut self,
        mut listed: Vec<(String, bool)>,
        open: &[String],
        (min, max): (usize, Option<usize>),
    ) -> Result<Option<String>, FormatError> {
        let all_are_needed = min >= listed.len();
        listed.iter_mut().for_each(|(_, is_required)| *is_required |= all_are_needed);
        let required = listed.iter().filter(|(_, is_required)| *is_required).count();
        // Listed parameters that are left out are not counted.
        let open_min = min.saturating_sub(required);
        let open_max = max.map_or(MAX_OPEN_PARAMETERS, |max| max.saturating_sub(listed.len()));
        let too_many = max.is_some_and(|max| max < listed.len());
        let too_few = if open.is_empty() { open_min > 0 } else { open_min > 1 };
        let keyword = if too_many { "maxProperties" } else { "minProperties" };
        let is_impossible =
            max.is_some_and(|max| max < required) || open_min > 0 && required == listed.len() && open.is_empty();
        let error = |reason: &str| FormatError::new(&format!(".{keyword}"), format!("`{keyword}` {reason}"));
        if is_impossible || !open.is_empty() && open_min > open_max {
            self.impossible = Some(error("allows no call"));
            return Ok(None);
        }
        if self.strict && (too_many || too_few) {
            return Err(error("cannot be enforced in a strict tool with optional parameters"));
        }
        let (required, optional): (Vec<_>, Vec<_>) = listed.into_iter().partition(|(_, is_required)| *is_required);
        let mut any_optional = String::new();
        if !optional.is_empty() {
            let name = format!("optional_{}_{}", self.index, self.grammar.lark.len());
            any_optional = format!(" {name}{{0,{}}}", optional.len());
            let optional: Vec<String> = optional.into_iter().map(|(parameter, _)| parameter).collect();
            let _ = writeln!(self.grammar.lark, "{name}: {}", optional.join(" | "));
        }
        let mut sequence = any_optional.clone();
        for (parameter, _) in required {
            let _ = write!(sequence, " {parameter}{any_optional}");
        }
        if !open.is_empty() && open_max > 0 {
            let _ = write!(sequence, " ({}){{{open_min},{open_max}}}", open.join(" | "));
        }
        Ok(Some(if sequence.is_empty() { " \"\"".into() } else { sequence }))
    }

    /// Writes alternatives for a parameter whose name the schema does not list.
    fn open_parameters(&mut self, set: &ParameterSet<'_>) -> Result<Vec<String>, FormatError> {
        let mut parameters = Vec::new();
        let mut listed: Vec<&str> = self.sets.iter().flat_map(ParameterSet::names).collect();
        listed.sort_unstable();
        listed.dedup();
        let open = set.open_names();
        // Each pattern is compared with all others.
        self.spend(open.len() * open.len().min(PATTERN_PROPERTIES))?;
        for names in open {
            let Some(value) = self.value(&names.schemas, Self::any_open_value)? else { continue };
            let Some(expression) = name_expression(&names, &listed, self.strict)? else { continue };
            let name = format!("NAME_{}_{}", self.index, self.grammar.lark.len());
            let _ = writeln!(self.grammar.lark, "{name}: \"<parameter=\" {expression} \">\\n\"");
            parameters.push(format!("{name} ({value})"));
        }
        Ok(parameters)
    }

    /// The values of parameters whose names are not listed, in any set.
    fn any_open_value(&self) -> ValueType {
        let open = self.sets.iter().flat_map(ParameterSet::open_names);
        open.map(|names| ValueType::of(&names.schemas, self.document)).fold(ValueType::nothing(), ValueType::or)
    }

    /// Lark alternatives for a value that matches all `schemas`, with its closing tag. `None` if no value matches them.
    /// `any_value` returns the values of the parameter in any set.
    fn value(
        &mut self,
        schemas: &[&Value],
        any_value: impl Fn(&Self) -> ValueType,
    ) -> Result<Option<String>, FormatError> {
        let value = ValueType::of(schemas, self.document);
        if !value.is_complete {
            return Err(FormatError::new("", "it has too many alternatives"));
        }
        let read = if self.sets.len() > 1 { any_value(self) } else { value.clone() };
        let is_word_of_other_set = |word: &&String| {
            let types = serde_json::from_str(word).map_or(TypeSet::default(), |value| TypeSet::of(&value));
            !value.words.contains(word) && value.others.has_any(types)
        };
        if let Some(word) = read.words.iter().find(is_word_of_other_set).filter(|_| self.strict) {
            let reason = format!(
                "`anyOf` of a strict tool has the word `{word}` in one alternative and another type in another"
            );
            return Err(FormatError::new("", reason));
        }
        let misread = value.misread(&read);
        let prefix = format!("{}_{}", self.index, self.grammar.lark.len());
        let text = RawText::of(&value, misread, &prefix, self.strict)?;
        self.grammar.lark += &text.rules;
        let mut alternatives = text.alternatives;
        let types = value.others.without(raw_types(&value, misread));
        if !types.is_empty() {
            let name = format!("value_{}_{}", self.index, self.grammar.values.len());
            let schema = json_schema::with_definitions(json_part(schemas, &value, types), self.root, self.strict);
            self.spend(schema.to_string().len() / PARAMETER_BYTES)?;
            let grammar = GrammarWithLexer::from_json_schema(schema);
            self.grammar.values.push(GrammarWithLexer { name: Some(name.clone()), ..grammar });
            alternatives.push(format!("@{name} {END}"));
        }
        Ok((!alternatives.is_empty()).then(|| alternatives.join(" | ")))
    }
}

/// The schema of the values that are written as JSON.
fn json_part(schemas: &[&Value], value: &ValueType, types: TypeSet) -> Value {
    let selects = |schema: &&Value| {
        let keywords = ["type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"];
        keywords.iter().any(|key| schema.get(key).is_some())
    };
    let has_types = !value.has_strings() && schemas.iter().any(selects);
    match schemas {
        [schema] if has_types => (*schema).clone(),
        _ => {
            let mut all = schemas.iter().map(|schema| (*schema).clone()).collect::<Vec<_>>();
            all.push(json!({"type": types.names().collect::<Vec<_>>()}));
            json!({"allOf": all})
        }
    }
}

fn check_name(name: &str) -> Result<(), FormatError> {
    let is_quoted = name.starts_with(['"', '\'']) || name.ends_with(['"', '\'']);
    if name.trim() != name || name.is_empty() || is_quoted || name.contains(['<', '>', '\n']) {
        let reason = "a parameter's name must not contain <, > or a line feed, or have white space or quotation marks at its ends";
        return Err(FormatError::new(&format!(".properties.{name}"), reason));
    }
    Ok(())
}
