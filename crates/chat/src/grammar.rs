//! Constrained decoding: JSON schemas, regular expressions, Lark grammars and tool calls, compiled by llguidance into a
//! mask of the tokens that may come next.
//!
//! [`format`] has the formats that a request may ask for. The steps from a format to a mask:
//!
//! 1. [`json_schema`] reads a schema keyword by keyword. It refuses or ignores what a mask cannot enforce, and replaces what
//!    llguidance does not have: [`look_ahead`] rewrites patterns, [`disjoint`] and [`equivalents`] replace keywords, and
//!    [`expressions`] finds out which patterns compile.
//! 2. [`schema_references`] limits how many restrictions apply to one value. [`lark`] checks a client's own grammar.
//! 3. [`tool_calls`] writes the grammar of Qwen's tool calls around the schemas, with [`raw_text`] for strings.
//! 4. [`GrammarCompiler`] compiles all this, and finds the part of a schema that does not compile.
//! 5. [`constraint`] follows one answer: its reasoning, with a token budget, and then its format.
//!
//! Markup tokens (`<think>`, `<tool_call>`, `<|im_end|>`, ...) are not text to a grammar. They are allowed only where
//! the grammar names them, so a JSON string cannot contain a markup token.

mod automaton;
mod constraint;
mod disjoint;
mod equivalents;
mod expressions;
mod format;
mod integer_formats;
mod json_schema;
mod lark;
mod look_ahead;
mod raw_text;
mod schema_references;
mod tool_calls;

pub use constraint::{NextTokens, TokenConstraint};
pub use format::{AllowedTools, ContentFormat, ExactCalls, FormatError, OutputFormat, any_object};

use super::Tokenizer;
use constraint::MarkupTokens;
use format::{NO_TEXT, plain_reason};
use llguidance::{
    Matcher, ParserFactory,
    api::{GrammarWithLexer, TopLevelGrammar},
    earley::SlicedBiasComputer,
    regex_to_lark,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId},
};
use serde_json::Value;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Size in bytes of the stack of the compiling thread. llguidance recurses by about 10 KB for each part of a schema or
/// rule of a grammar. Only the pages that are touched become real memory.
const STACK: usize = 1 << 30;

/// Maximum number of steps that llguidance spends on building the expressions of a grammar. llguidance's default is
/// 1,000,000.
const LEXER_FUEL: u64 = 300_000;
/// Maximum number of lexer states. A state takes one to two kilobytes. llguidance's default is 250,000.
const MAX_LEXER_STATES: usize = 50_000;

/// A flag that cancels a compilation. Once the flag is set, the compilation stops before its next part. Clones share
/// the flag.
#[derive(Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Fails if the flag is set.
    fn check(&self) -> Result<(), String> {
        if self.is_set() { Err("its compilation was cancelled".into()) } else { Ok(()) }
    }
}

/// Compiles formats for one tokenizer.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    eos: Vec<u32>,
    markup: Arc<MarkupTokens>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl GrammarCompiler {
    /// Creates a compiler. `eos` has the tokens that end an answer, with the model's usual end token first.
    pub fn new(tokenizer: Arc<Tokenizer>, eos: &[u32]) -> Self {
        let markup = Arc::new(MarkupTokens::new(&tokenizer, eos));
        Self { tokenizer, eos: eos.to_vec(), markup, factory: OnceLock::new() }
    }

    /// Sorts the vocabulary, so that the first constrained answer does not wait for that. Takes 0.7 s for 248,077
    /// tokens.
    pub fn warm_up(&self) {
        // Errors are ignored here. The first compilation reports them.
        drop(self.factory());
    }

    /// A constraint that only limits the reasoning of an answer, to `budget` tokens. `calls` is true if tools may be
    /// called.
    pub fn reasoning_budget(&self, calls: bool, budget: usize) -> TokenConstraint {
        TokenConstraint::new(self.tokenizer.clone(), self.markup.clone(), None, calls, true, Some(budget))
    }

    /// Compiles the format of an answer. Blocks for milliseconds, for up to a second if the schema is large, and on the
    /// first call also for the time of [`GrammarCompiler::warm_up`]. Fails early if `cancel` is set.
    pub fn compile(
        &self,
        cancel: &CancelFlag,
        format: &OutputFormat,
        in_reasoning: bool,
        budget: Option<usize>,
    ) -> Result<TokenConstraint, FormatError> {
        let matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || self.matcher(format, cancel));
            let thread = thread.map_err(|error| FormatError::new("", format!("cannot start a thread: {error}")))?;
            thread.join().unwrap_or_else(|_| Err(FormatError::new("", "the grammar compiler failed on it")))
        })?;
        Ok(TokenConstraint::new(
            self.tokenizer.clone(),
            self.markup.clone(),
            Some(matcher),
            format.tools.is_some(),
            in_reasoning,
            budget,
        ))
    }

    fn matcher(&self, format: &OutputFormat, cancel: &CancelFlag) -> Result<Matcher, FormatError> {
        let content = match &format.content {
            ContentFormat::Text => Some(GrammarWithLexer::from_lark("start: /(?s:.*)/".into())),
            ContentFormat::Nothing => None,
            ContentFormat::Json { schema, strict } => {
                Some(GrammarWithLexer::from_json_schema(json_schema::prepare(schema, *strict)?))
            }
            ContentFormat::Regex(regex) => {
                lark::check_regex(regex)?;
                Some(GrammarWithLexer::from_lark(format!("start: /{}/", regex_to_lark(regex, ""))))
            }
            ContentFormat::Lark(text) => {
                lark::check_grammar(text)?;
                Some(GrammarWithLexer::from_lark(text.clone()))
            }
        };
        let grammars = match (&format.tools, content.clone()) {
            (None, None) => return Err(FormatError::new("", "There is no tool to call.")),
            (None, Some(content)) => vec![content],
            (Some(tools), content) => {
                let text_before_calls = format.content == ContentFormat::Text;
                self.with_calls(tools, content, text_before_calls, cancel)?
            }
        };
        self.build(grammars, cancel).map_err(|reason| {
            if cancel.is_set() {
                return FormatError::new("", reason);
            }
            let mut tools = format.tools.iter().flat_map(|allowed| &allowed.tools);
            if let Some(error) = tools.find_map(|tool| self.tool_error(tool, cancel)) {
                return error;
            }
            let Some(schema) = content.and_then(|content| content.json_schema) else {
                return FormatError::new("", reason);
            };
            let compile_error = |part: &Value| {
                let part = vec![GrammarWithLexer::from_json_schema(part.clone())];
                self.build(part, cancel).err().filter(|_| !cancel.is_set())
            };
            let (path, reason) = json_schema::locate(&schema, reason, compile_error);
            FormatError::new(&path, reason)
        })
    }

    /// The error of a tool that does not compile alone.
    fn tool_error(&self, tool: &(usize, Value), cancel: &CancelFlag) -> Option<FormatError> {
        let alone = AllowedTools { tools: vec![tool.clone()], parallel: false };
        let reason = self.build(self.with_calls(&alone, None, false, cancel).ok()?, cancel).err()?;
        Some(FormatError { tool: Some(tool.0), ..FormatError::new("", reason) })
    }

    /// The grammar of an answer that is either `content` or tool calls. If `content` is `None`, only calls are allowed.
    /// With `text_before_calls`, `content` is any text, and calls may follow it if calls begin with a markup token, which
    /// text cannot contain.
    fn with_calls(
        &self,
        tools: &AllowedTools,
        content: Option<GrammarWithLexer>,
        text_before_calls: bool,
        cancel: &CancelFlag,
    ) -> Result<Vec<GrammarWithLexer>, FormatError> {
        let calls = tool_calls::write(tools, self.markup.call.is_some(), cancel)?;
        let start = match content {
            Some(_) if text_before_calls && self.markup.call.is_some() => "start: @content calls?",
            Some(_) => "start: @content | calls",
            None => "start: calls",
        };
        let mut grammars = vec![GrammarWithLexer::from_lark(format!("{start}\n{}", calls.lark))];
        grammars.extend(content.map(|content| GrammarWithLexer { name: Some("content".into()), ..content }));
        grammars.extend(calls.values);
        Ok(grammars)
    }

    /// Compiles grammars, and checks that at least one token may start an answer.
    fn build(&self, grammars: Vec<GrammarWithLexer>, cancel: &CancelFlag) -> Result<Matcher, String> {
        cancel.check()?;
        let factory = self.factory().map_err(|error| error.reason)?;
        let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar { grammars, max_tokens: None }));
        if let Some(error) = matcher.get_error() {
            return Err(plain_reason(&error));
        }
        let mask = matcher.compute_mask_or_eos().map_err(|error| plain_reason(&error.to_string()))?;
        let can_begin = !mask.is_zero() && (!matcher.is_stopped() || matcher.is_accepting().unwrap_or(false));
        if can_begin { Ok(matcher) } else { Err(NO_TEXT.into()) }
    }

    fn factory(&self) -> Result<&ParserFactory, FormatError> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer, &self.eos).map_err(|e| e.to_string()));
        factory.as_ref().map_err(|reason| FormatError::new("", reason.clone()))
    }
}

/// Sorts the vocabulary into a prefix tree, and the tokens that occur in JSON strings into separate trees.
fn factory(tokenizer: &Tokenizer, eos: &[u32]) -> Result<ParserFactory, Box<dyn std::error::Error>> {
    let ids = 0..tokenizer.vocab_size() as TokenId;
    let words: Vec<Vec<u8>> = ids
        .map(|id| {
            let bytes = tokenizer.token_bytes(id);
            let marker = if tokenizer.is_added(id) { &[TokTrie::SPECIAL_TOKEN_MARKER][..] } else { &[] };
            [marker, &*bytes].concat()
        })
        .collect();
    let first = *eos.first().ok_or("the model has no token that ends an answer")?;
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(eos);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &SlicedBiasComputer::json_slices())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.initial_lexer_fuel = LEXER_FUEL;
    limits.max_lexer_states = MAX_LEXER_STATES;
    Ok(factory)
}

#[cfg(test)]
mod tests;
