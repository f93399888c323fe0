//! A model's chat template: messages to prompt, byte for byte as transformers renders it.

use super::{bounds, history, methods, operands, python};
use crate::error::ChatError;
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Serde, ValueKind as Kind},
};
use serde_json::{Map, Value as Json};
use std::{collections::BTreeMap, fmt, io, path::Path};

/// The variables of a chat template.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// OpenAI chat messages, oldest first.
    pub messages: &'a [Json],
    /// OpenAI tool definitions.
    pub tools: Option<&'a [Json]>,
    /// Further variables of the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: &'a Map<String, Json>,
    /// End the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
}

/// A model's chat template, compiled.
///
/// Known to differ from Python: integers beyond 64 bits become floats, and an empty string cannot be sliced backwards.
pub struct Template {
    env: Environment<'static>,
    /// `bos_token` and the like from `tokenizer_config.json`, which transformers gives to the template as variables.
    special: BTreeMap<String, Value>,
    info: Json,
}

/// The template for all conversations, and the one that some models have for those with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Instructions a render may execute: those of some ten thousand messages, and over in a tenth of a second. The text
/// that they make is bounded by `bounds`.
const FUEL: u64 = 1_500_000;

/// Stack of the thread that renders, in bytes. A loop can nest values once an instruction, and dropping, comparing or
/// printing them recurses, with less than 700 bytes a level. Only what is touched is ever real memory.
const STACK: usize = 1 << 30;

/// Stack of the thread that parses: for as many levels as `operands` lets pass.
const PARSING: usize = 64 << 20;

impl Template {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, in a model's directory.
    pub fn load(dir: &Path) -> Result<Self, ChatError> {
        let config: Json = match read(&dir.join("tokenizer_config.json"))? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| ChatError::Template(format!("{}: {e}", dir.join("tokenizer_config.json").display())))?,
            None => Json::Null,
        };
        let sources = match read(&dir.join("chat_template.jinja"))? {
            Some(source) => vec![(DEFAULT.to_string(), source)],
            None => named(config.get("chat_template")),
        };
        if sources.is_empty() {
            let dir = dir.display();
            return Err(ChatError::Template(format!(
                "{dir} has neither chat_template.jinja nor a chat_template in tokenizer_config.json"
            )));
        }
        Self::new(sources, &config)
    }

    fn new(sources: Vec<(String, String)>, config: &Json) -> Result<Self, ChatError> {
        let mut env = environment();
        let source = sources.iter().find(|(name, _)| name == DEFAULT).map(|(_, source)| source.as_str());
        let mut info = serde_json::json!({"chat_template": source});
        for (name, source) in sources {
            let source = operands::counted(&without_generation_marks(&source)).map_err(ChatError::Template)?;
            let add = || env.add_template_owned(name, source).map_err(failed);
            on_a_stack(PARSING, add)?;
        }
        let mut special = BTreeMap::new();
        for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
            let token = config.get(name);
            if let Some(text) = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str())) {
                info[name] = text.into();
                special.insert(name.to_string(), Value::from(text));
            }
        }
        Ok(Self { env, special, info })
    }

    /// The prompt of a conversation. [`ChatError::Refused`] if the template will not have it, or if a tool call in its
    /// history has arguments that are no JSON object.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ChatError> {
        let name = if conversation.tools.is_some() { TOOL_USE } else { DEFAULT };
        let template = self.env.get_template(name).or_else(|_| self.env.get_template(DEFAULT)).map_err(failed)?;
        if let Some(name) =
            conversation.kwargs.keys().find(|name| self.env.globals().any(|(global, _)| global == *name))
        {
            return Err(ChatError::Reserved(name.clone()));
        }
        let messages = history::normalise(conversation.messages)?;
        let mut variables = self.special.clone();
        variables.insert("documents".into(), Value::from(()));
        variables.extend(conversation.kwargs.iter().map(|(k, v)| (k.clone(), Value::from(Serde(v)))));
        variables.insert("messages".into(), Value::from(Serde(&messages)));
        variables.insert("tools".into(), Value::from(Serde(conversation.tools)));
        variables.insert("add_generation_prompt".into(), Value::from(conversation.add_generation_prompt));
        let given = messages.iter().map(|message| text(message)).chain(conversation.kwargs.values().map(text));
        let given = given.chain(conversation.tools.iter().flat_map(|tools| tools.iter()).map(text)).sum();
        on_a_stack(STACK, || {
            bounds::begin(given);
            let mut prompt = bounds::Prompt::default();
            let rendered = template.render_captured_to(variables, &mut prompt).map(drop);
            rendered.map_err(|error| refusal(&error).unwrap_or_else(|| unfit(error)))?;
            String::from_utf8(prompt.0).map_err(|error| ChatError::Template(error.to_string()))
        })
    }

    /// The source, and the special tokens by their names in `tokenizer_config.json`.
    pub fn info(&self) -> &Json {
        &self.info
    }

    /// True if the answer to this prompt begins inside the model's reasoning: the prompt has opened it.
    pub fn opens_in_reasoning(prompt: &str) -> bool {
        prompt.strip_suffix('\n').unwrap_or(prompt).ends_with("<think>")
    }
}

/// Runs `work` on a thread of its own with this much stack, in bytes. A fault in the template engine ends this request, not
/// the server.
fn on_a_stack<T: Send>(stack: usize, work: impl FnOnce() -> Result<T, ChatError> + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(stack);
        let thread = thread.spawn_scoped(scope, work).map_err(|e| ChatError::Template(e.to_string()))?;
        thread.join().map_err(|_| ChatError::Template("the template engine panicked".into()))?
    })
}

/// Bytes of text in a value.
fn text(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + text(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 8,
    }
}

/// The file's text, or nothing if there is no such file.
fn read(path: &Path) -> Result<Option<String>, ChatError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ChatError::Template(format!("{}: {error}", path.display()))),
    }
}

/// `chat_template` is one template, or a list of `{"name", "template"}`.
fn named(chat_template: Option<&Json>) -> Vec<(String, String)> {
    match chat_template {
        Some(Json::String(source)) => vec![(DEFAULT.to_string(), source.clone())],
        Some(Json::Array(list)) => {
            let text = |entry: &Json, key| entry.get(key)?.as_str().map(str::to_string);
            list.iter().filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?))).collect()
        }
        _ => Vec::new(),
    }
}

/// Jinja as transformers sets it up.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    // Cannot fail: only the delimiters are checked, and they are the defaults.
    if let Ok(syntax) = syntax.build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| bounds::write(out, value));
    bounds::install(&mut env);
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => bounds::string(value).map(Value::from),
    });
    env.add_filter("trim", |value: &Value, chars: Option<&str>| {
        bounds::string(value).map(|text| methods::strip(&text, chars, true, true).to_string())
    });
    env.add_filter("length", length);
    env.add_filter("count", length);
    // To Python a string and a mapping are sequences too: they have a length and items. None is nothing to iterate over.
    env.add_test("sequence", |value: &Value| matches!(value.kind(), Kind::Map | Kind::Seq | Kind::String));
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok() || value.as_str().is_some());
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = bounds::string(&message)?;
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    env.add_function("strftime_now", |format: &str| {
        let date = jiff::fmt::strtime::format(format, &jiff::Zoned::now())
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
        bounds::string(&Value::from(date))
    });
    env
}

/// `len`, which is 0 for what is undefined.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// Marks an error as the template's own word.
#[derive(Debug)]
struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn refusal(error: &Error) -> Option<ChatError> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Refusal(message)) = error.downcast_ref() {
            return Some(ChatError::Refused(message.clone()));
        }
        cause = error.source();
    }
    None
}

fn failed(error: Error) -> ChatError {
    ChatError::Template(error.to_string())
}

fn unfit(error: Error) -> ChatError {
    ChatError::Conversation(error.to_string())
}

/// Training marks the model's own words with `{% generation %}`, a tag of transformers; `with` is a block like it that
/// prints what it holds.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%-+}".contains(c) || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
