//! Ollama's requests, checked and translated.

use crate::http::{
    ApiError,
    openai::{CommonFields, CompletionPrompt, TextOrIds},
    request::{
        ChatPrompt, GenerationRequest, ImagePart, PromptInput, RequestedFormat, Thinking, body, field_check, fields,
        messages,
        response_format::FormatField,
        sampling_params as params, thinking,
        tools::{self, ToolChoice},
    },
};
use moestro_chat::{
    Message,
    grammar::{ContentFormat, any_object},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Path of the options, for errors.
const OPTIONS: &str = "options.";

/// Fields of both `/api/chat` and `/api/generate`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct OllamaCommon {
    pub model: String,
    stream: Option<bool>,
    options: Option<Map<String, Value>>,
    /// `json`, or a JSON schema.
    format: Option<Value>,
    /// A boolean, or an effort such as `low`.
    think: Option<Value>,
    keep_alive: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub struct OllamaChat {
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
pub struct OllamaGenerate {
    prompt: Option<String>,
    system: Option<String>,
    images: Option<Vec<String>>,
    /// True if the chat template is not used.
    raw: Option<bool>,
}

/// The option that has another name in chat completions.
#[derive(Debug, Deserialize)]
struct OllamaLimit {
    num_predict: Option<i64>,
}

impl OllamaCommon {
    /// True if the model is unloaded after the answer: `keep_alive` is 0, as a number or as a duration.
    pub fn unloads(&self) -> bool {
        match &self.keep_alive {
            Some(Value::String(text)) => text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse() == Ok(0.0),
            Some(other) => other.as_f64() == Some(0.0),
            None => false,
        }
    }

    fn common_fields(&self) -> Result<CommonFields, ApiError> {
        let mut options = self.options.clone().unwrap_or_default();
        field_check::keep_known(&mut options, fields::OLLAMA_OPTIONS, OPTIONS)?;
        body::make_integers(&mut options);
        let options = Value::from(options);
        let OllamaLimit { num_predict } = body::typed_at(OPTIONS, &options)?;
        // The other options have the same names in chat completions.
        let options: CommonFields = body::typed_at(OPTIONS, options)?;
        Ok(CommonFields {
            parent: OPTIONS,
            model: Some(self.model.clone()),
            // Ollama streams by default.
            stream: Some(self.stream.unwrap_or(true)),
            // A negative number means no limit. The server's `--max-tokens` is only a default.
            max_tokens: num_predict.map(|limit| limit.max(-1)),
            ..options
        })
    }

    /// Creates a request with these messages.
    fn chat(self, messages: Vec<Message<ImagePart>>, tools: Vec<Value>) -> Result<GenerationRequest, ApiError> {
        let common = self.common_fields()?;
        let Thinking { enabled, budget } = match self.think {
            Some(Value::Bool(thinks)) => Thinking { enabled: Some(thinks), budget: None },
            Some(Value::String(effort)) => thinking::effort("think", &effort)?,
            None | Some(Value::Null) => Thinking::default(),
            Some(_) => return Err(ApiError::wrong_type("think", "must be a boolean or an effort.")),
        };
        let content = self.format.map(response_format).transpose()?.flatten();
        let max_tokens = params::token_limit("options.num_predict", common.max_tokens, 1)?;
        let stops = common.stops("options.stop")?;
        let mut prompt = ChatPrompt::new(messages, false, tools, tools::chat_path)?;
        let format = RequestedFormat::new(content, &prompt.tools, &ToolChoice::Auto(None), true, tools::chat_path);
        prompt.set_thinking(enabled);
        Ok(GenerationRequest {
            max_tokens,
            format,
            thinking_budget: budget,
            ..GenerationRequest::new(common, stops, PromptInput::Chat(prompt))
        })
    }
}

impl OllamaChat {
    /// Translates the request. Returns `None` for a request without messages, which only loads or unloads the model.
    pub fn into_chat(self, common: OllamaCommon) -> Result<Option<GenerationRequest>, ApiError> {
        let Some(messages) = self.messages.filter(|messages| !messages.is_empty()) else { return Ok(None) };
        common.chat(messages::read_with(messages, translate)?, self.tools.unwrap_or_default()).map(Some)
    }
}

impl OllamaGenerate {
    /// Translates the request. Returns `None` for a request without a prompt, which only loads or unloads the model.
    pub fn into_generation(self, common: OllamaCommon) -> Result<Option<GenerationRequest>, ApiError> {
        let Some(prompt) = self.prompt.filter(|prompt| !prompt.is_empty()) else { return Ok(None) };
        if self.raw == Some(true) {
            let common = common.common_fields()?;
            let max_tokens = params::token_limit("options.num_predict", common.max_tokens, 0)?;
            let stops = common.stops("options.stop")?;
            let prompt = CompletionPrompt::One(TextOrIds::Text(prompt));
            let request = GenerationRequest::new(common, stops, PromptInput::Text(prompt));
            return Ok(Some(GenerationRequest { max_tokens, ..request }));
        }
        let system = self.system.filter(|system| !system.is_empty());
        let system = system.map(|system| json!({"role": "system", "content": system}));
        let user = json!({"role": "user", "content": with_images(prompt.into(), self.images.unwrap_or_default())});
        common.chat(messages::read(system.into_iter().chain([user]).collect())?, Vec::new()).map(Some)
    }
}

fn response_format(format: Value) -> Result<Option<FormatField>, ApiError> {
    match format {
        Value::String(word) if word.is_empty() => Ok(None),
        Value::String(word) if word == "json" => {
            Ok(Some(("format".into(), ContentFormat::Json { schema: any_object(), strict: true })))
        }
        Value::Object(_) => Ok(Some(("format".into(), ContentFormat::Json { schema: format, strict: false }))),
        _ => Err(ApiError::wrong_value("format", "must be `json` or a JSON schema.")),
    }
}

/// Translates a message: its images become parts of the content, and `thinking` becomes `reasoning_content`.
fn translate(mut fields: Map<String, Value>, at: &str, is_new: bool) -> Result<Message<ImagePart>, ApiError> {
    // Ollama's clients send strings. Parts, as in chat completions, are read, too.
    let content = fields.remove("content").filter(|content| !content.is_null()).unwrap_or_else(|| "".into());
    if fields.get("role").is_some_and(|role| role == "assistant") {
        let calls = match fields.remove("tool_calls") {
            Some(Value::Array(calls)) => calls,
            Some(call @ Value::Object(_)) => vec![call],
            _ => Vec::new(),
        };
        let calls = calls.into_iter().map(|call| json!({"type": "function", "function": call["function"]}));
        let calls: Vec<Value> = calls.collect();
        let mut translated = Map::from_iter([("role".into(), "assistant".into()), ("content".into(), content)]);
        if let Some(thinking) = fields.get("thinking").and_then(Value::as_str).filter(|thinking| !thinking.is_empty()) {
            translated.insert("reasoning_content".into(), thinking.into());
        }
        if !calls.is_empty() {
            translated.insert("tool_calls".into(), calls.into());
        }
        return messages::read_message(translated, at, is_new);
    }
    let images: Vec<String> = match fields.remove("images") {
        None | Some(Value::Null) => Vec::new(),
        Some(images) => match serde_json::from_value(images) {
            Ok(images) => images,
            // An image that cannot be read, so that a sentence replaces it.
            Err(_) if !is_new => vec![String::new()],
            Err(_) => {
                return Err(ApiError::wrong_type(format!("{at}.images"), "must be an array of strings in base64."));
            }
        },
    };
    fields.insert("content".into(), with_images(content, images));
    messages::read_message(fields, at, is_new)
}

/// A text or content parts, after images in base64 as content parts.
fn with_images(content: Value, images: Vec<String>) -> Value {
    if images.is_empty() {
        return content;
    }
    let content = match content {
        Value::Array(parts) => parts,
        text => vec![json!({"type": "text", "text": text})],
    };
    let image = |data| json!({"type": "image", "source": {"type": "base64", "data": data}});
    images.into_iter().map(image).chain(content).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_chat::Role;

    fn chat(body: Value) -> Result<Option<GenerationRequest>, ApiError> {
        let common = serde_json::from_value(body.clone()).unwrap();
        serde_json::from_value::<OllamaChat>(body).unwrap().into_chat(common)
    }

    fn generate(body: Value) -> Option<GenerationRequest> {
        let common = serde_json::from_value(body.clone()).unwrap();
        serde_json::from_value::<OllamaGenerate>(body).unwrap().into_generation(common).unwrap()
    }

    #[test]
    fn options_become_sampling_fields() {
        let options =
            json!({"temperature": 0.5, "num_predict": 7, "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 4096});
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let request = chat(json!({"model": "m", "messages": messages, "options": options})).unwrap().unwrap();
        assert_eq!((request.max_tokens, request.stops.clone()), (Some(7), vec!["x".to_owned()]));
        assert_eq!((request.common.temperature, request.common.repeat_penalty), (Some(0.5), Some(1.1)));
        assert!(request.streams(), "Ollama streams by default");
        for (options, message) in [
            (json!({"mirostat": 2}), "options.mirostat is not supported"),
            (json!({"top_p": "x"}), "options.top_p: invalid type: string \"x\", expected a number"),
            (json!({"num_predict": "x"}), "options.num_predict: invalid type: string \"x\", expected an integer"),
            (json!({"temprature": 0}), "There is no field `options.temprature`; did you mean `temperature`?"),
        ] {
            let error = chat(json!({"model": "m", "messages": messages, "options": options})).unwrap_err();
            assert!(error.message().starts_with(message), "{}", error.message());
        }
        let whole = chat(json!({"model": "m", "messages": messages, "options": {"num_predict": 7.0, "top_k": 20.0}}));
        assert_eq!(whole.unwrap().unwrap().max_tokens, Some(7));
    }

    #[test]
    fn negative_num_predict_is_no_limit() {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        for (options, limit) in [
            (json!({}), None),
            (json!({"num_predict": 3}), Some(3)),
            (json!({"num_predict": -1}), Some(usize::MAX)),
            (json!({"num_predict": -2}), Some(usize::MAX)),
        ] {
            let body = json!({"model": "m", "messages": messages, "options": options});
            assert_eq!(chat(body).unwrap().unwrap().max_tokens, limit, "{options}");
            let raw = json!({"model": "m", "prompt": "x", "raw": true, "options": options});
            assert_eq!(generate(raw).unwrap().max_tokens, limit, "{options}");
        }
    }

    #[test]
    fn messages_are_translated() {
        let call = json!({"function": {"name": "f", "arguments": {"a": 1}}});
        let request = chat(json!({"model": "m", "think": true, "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_name": "f"},
        ]}));
        let PromptInput::Chat(prompt) = request.unwrap().unwrap().prompt else { panic!("a chat") };
        assert_eq!(prompt.messages[1].reasoning, Some("hm".to_owned()));
        assert_eq!(prompt.messages[1].calls[0].0["function"], call["function"]);
        assert_eq!(prompt.messages[2].role, Role::Tool);
        assert_eq!(prompt.kwargs["enable_thinking"], true);
        assert!(chat(json!({"model": "m", "messages": []})).unwrap().is_none());
    }

    #[test]
    fn raw_prompt_uses_no_template() {
        let raw = generate(json!({"model": "m", "prompt": "x", "raw": true})).unwrap();
        assert!(matches!(raw.prompt, PromptInput::Text(_)) && raw.max_tokens.is_none());
        let PromptInput::Chat(chat) = generate(json!({"model": "m", "prompt": "x", "system": "s"})).unwrap().prompt
        else {
            panic!("a chat")
        };
        assert_eq!(chat.messages.len(), 2);
        assert!(generate(json!({"model": "m"})).is_none());
    }

    #[test]
    fn zero_keep_alive_unloads() {
        let unloads = |keep_alive: Value| {
            let common: OllamaCommon = serde_json::from_value(json!({"model": "m", "keep_alive": keep_alive})).unwrap();
            common.unloads()
        };
        assert_eq!([json!(0), json!("0"), json!("0s")].map(unloads), [true; 3]);
        assert_eq!([json!("5m"), json!(-1), Value::Null].map(unloads), [false; 3]);
    }
}
