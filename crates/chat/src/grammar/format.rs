//! The format that an answer must have, and the error of a format that cannot be compiled.

use serde_json::{Value, json};
use std::fmt;

/// The format of an answer after its reasoning.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutputFormat {
    pub content: ContentFormat,
    pub tools: Option<AllowedTools>,
}

impl OutputFormat {
    /// The calls that this format constrains, if `<tool_call>` is one token.
    pub fn exact_calls(&self) -> ExactCalls {
        match (&self.tools, &self.content) {
            (None, _) => ExactCalls::None,
            (Some(_), ContentFormat::Text) => ExactCalls::All,
            (Some(_), _) => ExactCalls::WithoutContent,
        }
    }
}

/// Which calls of an answer a grammar constrains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ExactCalls {
    #[default]
    None,
    /// Those of an answer without content. Content in a client's format may look like a call.
    WithoutContent,
    All,
}

/// The format of an answer's content.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum ContentFormat {
    #[default]
    Text,
    /// JSON that matches a schema. If `strict` is true, a keyword that cannot be enforced is an error. Otherwise the
    /// keyword is ignored.
    Json { schema: Value, strict: bool },
    /// The whole answer matches this regular expression (Rust's syntax).
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// No content: the answer must call a tool.
    Nothing,
}

/// The tools that an answer may call.
#[derive(Debug, Clone, PartialEq)]
pub struct AllowedTools {
    /// OpenAI tool definitions, each with its index in the request.
    pub tools: Vec<(usize, Value)>,
    /// True if an answer may have more than one call.
    pub parallel: bool,
}

/// The error of a format that cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError {
    /// Index of the tool whose parameters cause the error.
    pub tool: Option<usize>,
    /// Path in the schema, such as `.properties.x`.
    pub path: String,
    pub reason: String,
}

impl FormatError {
    pub fn new(path: &str, reason: impl Into<String>) -> Self {
        Self { tool: None, path: path.into(), reason: reason.into() }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

pub(super) const NO_TEXT: &str = "no text can match it";

/// llguidance's error message without the names of llguidance's internals.
pub(super) fn plain_reason(error: &str) -> String {
    // The regex parser writes the reason in its own line, below the expression. llguidance's lines with the place of
    // the expression in its grammar follow.
    if error.contains("regex parse error") {
        let reason = error.lines().find_map(|line| line.strip_prefix("error: "));
        return format!("the expression is not supported: {}", reason.unwrap_or("it cannot be read"));
    }
    let first = error.lines().next().unwrap_or_default();
    let required = first.strip_prefix("Unsatisfiable schema: required property ");
    if let Some(name) = required.and_then(|rest| rest.strip_suffix(" is unsatisfiable")) {
        let cause = "another part of the schema, such as `additionalProperties: false` beside `allOf`, excludes it";
        return format!("no value is allowed for the required property {name}: {cause}");
    }
    let internal = |words: &[&str]| words.iter().any(|word| first.contains(word));
    if internal(&["NoExtension"]) {
        NO_TEXT.into()
    } else if internal(&["Unable to determine if regex is empty"]) {
        "a `pattern` or `format` together with `minLength`, `maxLength` or another pattern is too complex".into()
    } else if first.starts_with("panic:")
        || internal(&["items; max is", "too many expressions", "fuel", "too large", "TooComplex", "precomputation"])
    {
        "it is too complex: use fewer alternatives, shorter bounds or simpler patterns".into()
    } else {
        first.to_owned()
    }
}

/// A schema that matches every JSON object.
pub fn any_object() -> Value {
    json!({"type": "object"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tokenizer,
        grammar::{CancelFlag, GrammarCompiler},
    };
    use std::sync::Arc;

    #[test]
    fn wrong_expression_error_has_the_reason() {
        let tokenizer = Arc::new(Tokenizer::load(&test_support::demo()).unwrap());
        let compiler = GrammarCompiler::new(tokenizer, &[2040, 2038]);
        for (expression, reason) in [
            ("(a", "unclosed group"),
            ("a)", "unopened group"),
            ("a{2,1}", "invalid repetition count range, the start must be <= the end"),
            ("[z-a]", "invalid character class range, the start must be <= the end"),
            ("[a", "unclosed character class"),
            ("*a", "repetition operator missing expression"),
            ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
            (r"\p{Foo}", "Unicode property not found"),
            (r"(a)\1", "backreferences are not supported"),
            ("(?P<n>a)(?P<n>b)", "duplicate capture group name"),
            ("error: a\n(b", "unclosed group"),
        ] {
            for content in
                [ContentFormat::Regex(expression.into()), ContentFormat::Lark(format!("start: /{expression}/"))]
            {
                let format = OutputFormat { content, tools: None };
                let error = compiler.compile(&CancelFlag::default(), &format, false, None).err().unwrap();
                assert_eq!(error.reason, format!("the expression is not supported: {reason}"), "{expression}");
            }
        }
    }
}
