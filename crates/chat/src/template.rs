//! A model's chat template: renders messages to a prompt, byte for byte as transformers does.

mod definitions;
mod files;
mod messages;
mod python;
mod source;

use crate::error::ChatError;
use files::{DEFAULT, TemplateFiles};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Serde, ValueKind},
};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use std::{collections::BTreeMap, fmt, io, path::Path};

/// Variables of a chat template.
#[derive(Debug)]
pub struct Conversation<'a, M = Json> {
    /// Messages, oldest first. Each serializes to a message of OpenAI's chat completions.
    pub messages: &'a [M],
    /// OpenAI tool definitions.
    pub tools: Option<&'a [Json]>,
    /// Other variables (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: &'a Map<String, Json>,
    /// True if the prompt ends with the start of a new assistant message.
    pub add_generation_prompt: bool,
}

/// A compiled chat template.
///
/// Known differences from Python: integers over 64 bits become floats, `~` and `join` write a float of 1e16 or more
/// with all its digits, and an empty string cannot be sliced backwards.
pub struct Template {
    env: Environment<'static>,
    /// Special tokens such as `bos_token` from `tokenizer_config.json`, which transformers passes to the template as
    /// variables.
    special_tokens: BTreeMap<String, Value>,
    info: Json,
}

/// Name of the template that some models have for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// Maximum number of instructions that one rendering may execute. The maximum is enough for about ten thousand
/// messages, and takes a tenth of a second.
const FUEL: u64 = 1_500_000;

/// Maximum number of bytes of prompt that one rendering may write per byte of its input, in addition to `OUTPUT_BASE`.
const OUTPUT_PER_INPUT: usize = 32;
/// Number of bytes of prompt that one rendering may write for any input.
const OUTPUT_BASE: usize = 16 << 20;

/// Size in bytes of the stack of the rendering thread. A loop can nest values by one level per instruction. Dropping,
/// comparing or printing nested values recurses with less than 700 bytes per level. Only the pages that are touched
/// become real memory.
const RENDER_STACK: usize = 1 << 30;

/// Size in bytes of the stack of the parsing thread. The stack is large enough for the nesting that `source` allows.
const PARSE_STACK: usize = 64 << 20;

impl Template {
    /// Reads the templates in a model's directory.
    ///
    /// # Errors
    /// A file is damaged, or the model has no template.
    pub fn load(dir: &Path) -> Result<Self, ChatError> {
        let why = "it has no chat template: no chat_template.jinja, and none in tokenizer_config.json";
        Self::find(dir)?.ok_or_else(|| ChatError::File { path: dir.to_owned(), why: why.into() })
    }

    /// Like [`Template::load`], but returns `None` if the model has no template, such as a base model.
    pub fn find(dir: &Path) -> Result<Option<Self>, ChatError> {
        let TemplateFiles { sources, tokenizer_config } = TemplateFiles::read(dir)?;
        (!sources.is_empty()).then(|| Self::new(sources, &tokenizer_config)).transpose()
    }

    fn new(sources: BTreeMap<String, String>, config: &Json) -> Result<Self, ChatError> {
        let mut env = environment();
        let mut info = serde_json::json!({"chat_template": sources.get(DEFAULT)});
        for (name, source) in sources {
            let is_special = name != DEFAULT;
            let added = source::prepare(&source).map_err(ChatError::Template).and_then(|source| {
                run_with_stack(PARSE_STACK, || env.add_template_owned(name.clone(), source).map_err(template_error))
            });
            match added {
                Err(error) if is_special => {
                    tracing::warn!(%error, name, "cannot use a special chat template; using the default one");
                }
                added => added?,
            }
        }
        let mut special_tokens = BTreeMap::new();
        for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
            let token = config.get(name);
            if let Some(text) = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str())) {
                info[name] = text.into();
                special_tokens.insert(name.to_string(), Value::from(text));
            }
        }
        Ok(Self { env, special_tokens, info })
    }

    /// True if each source of the template contains `text`.
    pub fn contains(&self, text: &str) -> bool {
        self.env.templates().all(|(_, template)| template.source().contains(text))
    }

    /// The same template with `new` in place of `old` in its source.
    ///
    /// # Errors
    /// The changed source is not a valid template.
    pub fn replace(&self, old: &str, new: &str) -> Result<Self, ChatError> {
        let sources =
            self.env.templates().map(|(name, template)| (name.to_owned(), template.source().replace(old, new)));
        Self::new(sources.collect(), &self.info)
    }

    /// Renders the prompt of a conversation.
    ///
    /// # Errors
    /// [`ChatError::Refused`] if the template rejects the conversation, or if a message is not an object.
    pub fn render<M: Serialize>(&self, conversation: &Conversation<M>) -> Result<String, ChatError> {
        let name = if conversation.tools.is_some() { TOOL_USE } else { DEFAULT };
        let template =
            self.env.get_template(name).or_else(|_| self.env.get_template(DEFAULT)).map_err(template_error)?;
        if let Some(name) =
            conversation.kwargs.keys().find(|name| self.env.globals().any(|(global, _)| global == *name))
        {
            return Err(ChatError::Reserved(name.clone()));
        }
        let messages = messages::for_template(conversation.messages)?;
        let mut variables = self.special_tokens.clone();
        variables.insert("documents".into(), Value::from(()));
        variables.extend(conversation.kwargs.iter().map(|(k, v)| (k.clone(), Value::from(Serde(v)))));
        variables.insert("messages".into(), Value::from(Serde(&messages)));
        variables.insert("tools".into(), Value::from(Serde(conversation.tools)));
        variables.insert("add_generation_prompt".into(), Value::from(conversation.add_generation_prompt));
        let input = messages.iter().chain(conversation.kwargs.values()).map(text_bytes);
        let input: usize = input.chain(conversation.tools.iter().flat_map(|tools| tools.iter()).map(text_bytes)).sum();
        drop(messages);
        let max_bytes = input.saturating_mul(OUTPUT_PER_INPUT).saturating_add(OUTPUT_BASE);
        run_with_stack(RENDER_STACK, || {
            let mut prompt = BoundedOutput { text: Vec::new(), max_bytes, is_full: false };
            let rendered = template.render_captured_to(variables, &mut prompt).map(drop);
            if prompt.is_full {
                return Err(ChatError::Conversation(format!("the prompt is longer than {max_bytes} bytes")));
            }
            rendered.map_err(|error| refusal(&error).unwrap_or_else(|| ChatError::Conversation(error.to_string())))?;
            String::from_utf8(prompt.text).map_err(|error| ChatError::Template(error.to_string()))
        })
    }

    /// The text that the template writes after an assistant's answer, such as `<|im_end|>` and a line feed. `None` if
    /// the template refuses a short conversation.
    pub fn after_answer(&self) -> Option<String> {
        const ANSWER: &str = "Hello";
        let messages = [("user", "Hi"), ("assistant", ANSWER)]
            .map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        let kwargs = Map::new();
        let conversation =
            Conversation { messages: &messages, tools: None, kwargs: &kwargs, add_generation_prompt: false };
        Some(self.render(&conversation).ok()?.rsplit_once(ANSWER)?.1.to_owned())
    }

    /// The template's source, and the special tokens by their names in `tokenizer_config.json`.
    pub fn info(&self) -> &Json {
        &self.info
    }

    /// True if the prompt ends inside the model's reasoning, because the template has opened the reasoning.
    pub fn opens_in_reasoning(prompt: &str) -> bool {
        prompt.strip_suffix('\n').unwrap_or(prompt).ends_with("<think>")
    }
}

/// The prompt that is being written. Writing more than `max_bytes` fails.
struct BoundedOutput {
    text: Vec<u8>,
    max_bytes: usize,
    is_full: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.max_bytes {
            self.is_full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `work` on a separate thread with a stack of `bytes`. A panic in the template engine fails only this request.
fn run_with_stack<T: Send>(bytes: usize, work: impl FnOnce() -> Result<T, ChatError> + Send) -> Result<T, ChatError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(bytes);
        let thread = thread.spawn_scoped(scope, work).map_err(|e| ChatError::Template(e.to_string()))?;
        thread.join().map_err(|_| ChatError::Template("the template engine panicked".into()))?
    })
}

/// Number of bytes of text in a value.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 8,
    }
}

/// Creates a Jinja environment with the settings of transformers.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    // `build` cannot fail here, because it only checks the delimiters, and they are the defaults.
    if let Ok(syntax) = syntax.build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(python::call_method);
    env.set_formatter(|out, _, value| Ok(python::write_str(out, value)?));
    // minijinja's `pprint` and `debug` print Rust's debug format. An error is better than a wrong prompt.
    env.remove_filter("pprint");
    env.remove_global("debug");
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => value.clone(),
        None => Value::from(python::str_of(value)),
    });
    env.add_filter("trim", |value: &Value, chars: Option<&str>| {
        python::strip(&python::str_of(value), chars, true, true).to_string()
    });
    env.add_filter("length", length);
    env.add_filter("count", length);
    // In Python, strings and mappings are sequences, too, because they have a length and items. `None` is not iterable.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::String)
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok() || value.as_str().is_some());
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = python::str_of(&message);
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    env.add_function("strftime_now", |format: &str| {
        jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    env
}

/// Python's `len`, but 0 for an undefined value.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// Marks an error that the template raised by calling `raise_exception`.
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

fn template_error(error: Error) -> ChatError {
    ChatError::Template(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_replaced_in_the_source_only() {
        let sources =
            [(DEFAULT, "{% generation %}<a>{% endgeneration %}{{ eos_token }}{{ x }}"), (TOOL_USE, "{{ '<a>!' }}")];
        let sources = sources.map(|(name, source)| (name.to_owned(), source.to_owned()));
        let template = Template::new(sources.into(), &serde_json::json!({"eos_token": {"content": "<eos>"}})).unwrap();
        let replaced = template.replace("<a>", "<b>").unwrap();
        let kwargs = Map::from_iter([("x".to_owned(), "<a>".into())]);
        for (tools, expected) in [(None, "<b><eos><a>"), (Some(&[][..]), "<b>!")] {
            let conversation: Conversation =
                Conversation { messages: &[], tools, kwargs: &kwargs, add_generation_prompt: false };
            assert_eq!(replaced.render(&conversation).unwrap(), expected);
            assert_eq!(template.render(&conversation).unwrap(), expected.replacen("<b>", "<a>", 1));
        }
    }

    #[test]
    fn panic_of_the_engine_is_an_error() {
        let failed = run_with_stack::<()>(1 << 20, || panic!("as the engine would"));
        assert!(matches!(failed, Err(ChatError::Template(reason)) if reason.contains("panicked")));
    }
}
