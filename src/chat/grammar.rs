//! Answers held to a form: JSON schemas, regular expressions, Lark grammars and tool calls, compiled by `llguidance` into
//! something that says which tokens may come next.
//!
//! * [`schema`] makes a client's JSON schema into one that can be compiled, or says what is wrong, and where;
//! * [`calls`] writes the grammar of Qwen's tool calls;
//! * [`guide`] walks an answer: reasoning first, with its budget, then the form.
//!
//! Tokens that are markup (`<think>`, `<tool_call>`, `<|im_end|>`, ...) are no text to a grammar: they come where it names
//! them and nowhere else, so no JSON string can hold one.

mod calls;
mod guide;
mod schema;

pub use guide::{NextTokens, TokenConstraint};

use super::Tokenizer;
use guide::Marks;
use llguidance::{
    Matcher, ParserFactory,
    api::{GrammarWithLexer, TopLevelGrammar},
    earley::SlicedBiasComputer,
    regex_to_lark,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId},
};
use serde_json::{Map, Value, json};
use std::{
    fmt,
    sync::{Arc, OnceLock},
};

/// The most bytes of a regular expression or a grammar.
const MOST_TEXT: usize = 64 << 10;

/// The form of an answer, once its reasoning is over.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutputFormat {
    pub content: ContentFormat,
    pub tools: Option<AllowedTools>,
}

/// The form of an answer that calls no tool.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum ContentFormat {
    #[default]
    Text,
    /// JSON of a schema. `strict`: a keyword that cannot be kept is an error; otherwise it is left out.
    Json { schema: Value, strict: bool },
    /// All of the answer matches this expression (Rust's syntax).
    Regex(String),
    /// A grammar in `llguidance`'s variant of Lark.
    Lark(String),
    /// There must be a call.
    Nothing,
}

/// The tools that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct AllowedTools {
    /// OpenAI's definitions, with their places in the request.
    pub tools: Vec<(usize, Value)>,
    /// More than one call in an answer.
    pub parallel: bool,
}

/// A part of a form that cannot be compiled: its place in the schema (`.properties.x`), and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError {
    pub tool: Option<usize>,
    pub path: String,
    pub reason: String,
}

impl FormatError {
    fn new(path: &str, reason: impl Into<String>) -> Self {
        Self { tool: None, path: path.into(), reason: reason.into() }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

/// Compiles forms for one tokenizer.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    eos: Vec<u32>,
    marks: Arc<Marks>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl GrammarCompiler {
    /// `eos`: tokens that end an answer, the model's usual one first.
    pub fn new(tokenizer: Arc<Tokenizer>, eos: &[u32]) -> Self {
        let marks = Arc::new(Marks::new(&tokenizer, eos));
        Self { tokenizer, eos: eos.to_vec(), marks, factory: OnceLock::new() }
    }

    /// Sorts the vocabulary, so that the first answer with a form need not wait for it. Takes 0.7 s for 248,077 tokens.
    pub fn warm_up(&self) {
        // The first compilation says any error.
        drop(self.factory());
    }

    /// An answer of any form that begins in reasoning, which may take `budget` tokens. `calls`: tools may be called.
    pub fn reasoning_budget(&self, calls: bool, budget: usize) -> TokenConstraint {
        TokenConstraint::new(self.tokenizer.clone(), self.marks.clone(), None, calls, true, Some(budget))
    }

    /// An answer of this form. Takes milliseconds, for large schemas up to a second, and the first time as long as
    /// [`GrammarCompiler::warm_up`], if that was not called: not for an async thread.
    pub fn compile(
        &self,
        form: &OutputFormat,
        in_reasoning: bool,
        budget: Option<usize>,
    ) -> Result<TokenConstraint, FormatError> {
        let matcher = self.matcher(form)?;
        Ok(TokenConstraint::new(
            self.tokenizer.clone(),
            self.marks.clone(),
            Some(matcher),
            form.tools.is_some(),
            in_reasoning,
            budget,
        ))
    }

    fn matcher(&self, form: &OutputFormat) -> Result<Matcher, FormatError> {
        let content = match &form.content {
            ContentFormat::Text => Some(GrammarWithLexer::from_lark("start: /(?s:.*)/".into())),
            ContentFormat::Nothing => None,
            ContentFormat::Json { schema, strict } => Some(self.json(schema, *strict)?),
            ContentFormat::Regex(regex) => Some(GrammarWithLexer::from_lark(format!("start: /{}/", {
                bounded(regex)?;
                regex_to_lark(regex, "")
            }))),
            ContentFormat::Lark(text) => {
                bounded(text)?;
                Some(GrammarWithLexer::from_lark(text.clone()))
            }
        };
        let grammars = match (&form.tools, content) {
            (None, None) => return Err(FormatError::new("", "There is no tool to call.")),
            (None, Some(content)) => vec![content],
            (Some(calls), content) => self.with_calls(calls, content)?,
        };
        self.build(grammars).map_err(|why| FormatError::new("", why))
    }

    /// `content`, if any is allowed, or calls; text may stand before calls.
    fn with_calls(
        &self,
        calls: &AllowedTools,
        content: Option<GrammarWithLexer>,
    ) -> Result<Vec<GrammarWithLexer>, FormatError> {
        let text = content.is_some() && self.marks.call.is_some();
        let written = calls::write(calls, self.marks.call.is_some(), |parts| self.build(parts).map(|_| ()))?;
        let start = match (&content, text) {
            (None, _) => "start: calls",
            (Some(GrammarWithLexer { json_schema: None, name: None, .. }), true) => {
                "start: @content | TEXT? calls\nTEXT: /(?s:.+)/"
            }
            (Some(_), _) => "start: @content | calls",
        };
        let mut grammars = vec![GrammarWithLexer::from_lark(format!("{start}\n{}", written.lark))];
        grammars.extend(content.map(|content| GrammarWithLexer { name: Some("content".into()), ..content }));
        grammars.extend(written.values);
        Ok(grammars)
    }

    fn json(&self, schema: &Value, strict: bool) -> Result<GrammarWithLexer, FormatError> {
        let ready = schema::ready(schema, strict)?;
        let compiles = |schema: &Value| self.build(vec![GrammarWithLexer::from_json_schema(schema.clone())]);
        if let Err(why) = compiles(&ready) {
            let (path, reason) = schema::locate(&ready, why, |part| compiles(part).err());
            return Err(FormatError { tool: None, path, reason });
        }
        Ok(GrammarWithLexer::from_json_schema(ready))
    }

    fn build(&self, grammars: Vec<GrammarWithLexer>) -> Result<Matcher, String> {
        let factory = self.factory().map_err(|fault| fault.reason)?;
        let matcher = Matcher::new(factory.create_parser(TopLevelGrammar { grammars, max_tokens: None }));
        match matcher.get_error() {
            None => Ok(matcher),
            Some(error) => Err(error.lines().next().unwrap_or_default().to_owned()),
        }
    }

    fn factory(&self) -> Result<&ParserFactory, FormatError> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer, &self.eos).map_err(|e| e.to_string()));
        factory.as_ref().map_err(|why| FormatError::new("", why.clone()))
    }
}

fn bounded(text: &str) -> Result<(), FormatError> {
    match text.len() {
        length if length > MOST_TEXT => {
            Err(FormatError::new("", format!("it has {length} bytes; {MOST_TEXT} are the most")))
        }
        _ => Ok(()),
    }
}

/// Sorts the vocabulary into a tree, and what JSON strings are made of into trees of their own.
fn factory(tokenizer: &Tokenizer, eos: &[u32]) -> Result<ParserFactory, Box<dyn std::error::Error>> {
    let ids = 0..tokenizer.vocab_size() as TokenId;
    let words: Vec<Vec<u8>> = ids
        .map(|id| {
            let bytes = tokenizer.token_bytes(id);
            let mark = if tokenizer.is_added(id) { &[TokTrie::SPECIAL_TOKEN_MARKER][..] } else { &[] };
            [mark, &*bytes].concat()
        })
        .collect();
    let first = *eos.first().ok_or("the model has no token that ends an answer")?;
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(eos);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &SlicedBiasComputer::json_slices())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// Any JSON object.
pub fn any_object() -> Value {
    json!({"type": "object"})
}

/// An object without keys, where a tool says nothing of its parameters.
fn parameters(tool: &Value) -> Value {
    let function = tool.get("function").unwrap_or(tool);
    match function.get("parameters") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(parameters) => parameters.clone(),
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod valid;
