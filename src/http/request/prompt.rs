//! Prompts: renders conversations to text, tokenizes text, and accounts for the memory of both.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, memory, value_bytes},
    models::LoadedModel,
    openai::{CompletionPrompt, TextOrIds},
    request::{ChatPrompt, content_parts::reference_sentence, sampling_params as params, tools},
};
use moestro_chat::{Conversation, Message, Speaker, Template, Tokenizer, error::ChatError, message_ends};
use moestro_engine::{Boundary, BoundaryKind, Image, PlacedImage};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, mem, sync::Arc};

/// Maximum number of choices of one completion request, and of its prompts, as in OpenAI's API.
const MAX_CHOICES: usize = 2048;

impl LoadedModel {
    /// Renders a conversation with these messages and tokenizes it. `permit` grows by the tokens. Refuses a prompt
    /// whose text certainly has more than `limit` tokens.
    pub async fn encode_chat(
        self: &Arc<Self>,
        permit: &mut MemoryPermit,
        messages: Vec<Message<Arc<Image>>>,
        chat: ChatPrompt,
        limit: usize,
    ) -> Result<EncodedChat, ApiError> {
        let variables = memory::rendering_bytes(chat.tools.iter().chain(chat.kwargs.values()));
        let working = variables + messages.iter().map(memory::message_bytes).sum::<usize>();
        let images = messages.iter().flat_map(Message::images).cloned().collect();
        let model = self.clone();
        let (prompt, chat) = permit.run(working, move || model.render_now(messages, chat)).await??;
        let in_reasoning = chat
            .end_marker
            .as_ref()
            .map_or_else(|| Template::opens_in_reasoning(&prompt), |marker| marker.in_reasoning);
        let ids = self.encode(permit, prompt, limit, chat.param).await?;
        let (ids, images) = self.place_images(ids, images, chat.param)?;
        Ok(EncodedChat { ids, images, in_reasoning, chat })
    }

    /// Renders and tokenizes a conversation with the tools of an earlier request. Returns `None` if there are no such
    /// tools, if the prompt has more than `most` tokens with them, or if it cannot have them for another reason.
    pub async fn encode_with_reused_tools(
        self: &Arc<Self>,
        permit: &MemoryPermit,
        messages: &[Message<Arc<Image>>],
        chat: &ChatPrompt,
        most: usize,
    ) -> Option<EncodedChat> {
        let tools = chat.reused_tools.as_ref()?;
        let copied: usize = tools.iter().map(value_bytes).chain(messages.iter().map(memory::message_bytes)).sum();
        let mut own = permit.reserve(copied).ok()?;
        let chat = ChatPrompt { tools: tools.to_vec(), forbids_calls: true, ..chat.clone() };
        let encoded = self.encode_chat(&mut own, messages.to_vec(), chat, most).await;
        encoded.ok().filter(|encoded| encoded.ids.len() <= most)
    }

    fn render_now(
        &self,
        messages: Vec<Message<Arc<Image>>>,
        mut chat: ChatPrompt,
    ) -> Result<(String, ChatPrompt), ApiError> {
        let Some(template) = &self.template else {
            let message = "This model has no chat template. Use /v1/completions.";
            return Err(ApiError::unsupported(chat.param, message));
        };
        chat.set_thinking(self.thinking.or(chat.default_thinking));
        let image_marker = self.image_marker(&messages);
        let marked = image_marker.as_ref().map(|marker| marker.template(template)).transpose()?;
        let prompt = render_with_tools(marked.as_ref().unwrap_or(template), messages, &mut chat);
        let prompt = prompt.map_err(|error| ApiError::of_conversation(error, chat.param))?;
        let prompt = match &chat.end_marker {
            Some(marker) => marker.cut(prompt)?,
            None => prompt,
        };
        let prompt = match image_marker {
            Some(marker) => marker.write_placeholders(&prompt),
            None => prompt,
        };
        Ok((prompt, chat))
    }

    /// Tokenizes a prompt. Refuses a prompt of more than `limit` tokens as soon as that is certain, which may be before or
    /// during tokenization. The limit is the context or `--max-prompt-tokens`. `param` names the prompt in errors.
    pub async fn encode(
        &self,
        permit: &mut MemoryPermit,
        text: String,
        limit: usize,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        let is_prompt_limit = limit < self.engine.context();
        let fewest = self.tokenizer.min_tokens(&text);
        if fewest > limit {
            return Err(ApiError::over_limit_early(fewest, limit, is_prompt_limit, param));
        }
        let (ids, is_whole) = self.tokenize(permit, text, limit).await?;
        if is_whole { Ok(ids) } else { Err(ApiError::over_limit_early(ids.len(), limit, is_prompt_limit, param)) }
    }

    /// The token ids of all prompts of a completion request, which asks for `n` choices for each prompt.
    pub async fn encode_all(
        &self,
        permit: &mut MemoryPermit,
        prompt: CompletionPrompt,
        n: usize,
        limit: usize,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let given = match prompt {
            CompletionPrompt::One(prompt) => vec![prompt],
            CompletionPrompt::Many(prompts) => prompts,
        };
        if given.len() > MAX_CHOICES {
            let text = format!("The request has {} prompts; at most {MAX_CHOICES} are allowed.", given.len());
            return Err(ApiError::invalid("prompt", text));
        }
        if given.len() * n > MAX_CHOICES {
            let problem = format!(
                "is {n}, and prompt has {} prompts: {} choices together; at most {MAX_CHOICES} are allowed.",
                given.len(),
                given.len() * n
            );
            return Err(ApiError::wrong_value("n", problem));
        }
        let mut prompts = Vec::with_capacity(given.len());
        for prompt in given {
            prompts.push(match prompt {
                TextOrIds::Text(text) => self.encode(permit, text, limit, "prompt").await?,
                TextOrIds::Ids(ids) => params::token_ids("prompt", &ids, self.engine.vocab())?,
            });
        }
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid("prompt", "The prompt is empty; it must have at least one token."));
        }
        Ok(prompts)
    }

    /// Tokenizes text piece by piece. `permit` grows by the memory of the tokens. Stops after more than `limit` tokens.
    /// Returns the tokens, and true if the whole text was tokenized.
    pub async fn tokenize(
        &self,
        permit: &mut MemoryPermit,
        text: String,
        limit: usize,
    ) -> Result<(Vec<u32>, bool), ApiError> {
        let text = Arc::new(text);
        let mut ids = Vec::new();
        let mut start = 0;
        while start < text.len() && ids.len() <= limit {
            let tokenizer = self.tokenizer.clone();
            let text = text.clone();
            let end = start + tokenizer.piece_len(&text[start..]);
            // A long word needs more memory than is set aside for each step.
            let working = memory::tokenizing_bytes(end - start);
            let encode = move || tokenizer.encode_piece(&text[start..end]);
            let more = permit.run(working, encode).await??;
            permit.grow(memory::token_bytes(more.len()))?;
            ids.extend(more);
            start = end;
        }
        Ok((ids, start == text.len()))
    }
}

/// The token ids of a conversation.
pub struct EncodedChat {
    pub ids: Vec<u32>,
    pub images: Vec<PlacedImage>,
    /// True if the answer starts in the reasoning.
    pub in_reasoning: bool,
    /// The conversation without its messages.
    pub chat: ChatPrompt,
}

/// Renders messages, with the tools that are not deferred at the start. Reorders the tools.
fn render_with_tools<I>(
    template: &Template,
    mut messages: Vec<Message<I>>,
    chat: &mut ChatPrompt,
) -> Result<String, ChatError> {
    let (deferred, head): (Vec<_>, Vec<_>) = mem::take(&mut chat.tools).into_iter().partition(tools::is_deferred);
    define_tools(template, &mut messages, &deferred, !head.is_empty(), &chat.kwargs);
    let prompt = template.render(&Conversation {
        messages: &messages,
        tools: (!head.is_empty()).then_some(&*head),
        kwargs: &chat.kwargs,
        add_generation_prompt: chat.add_generation_prompt,
    });
    chat.tools = head;
    chat.tools.extend(deferred);
    prompt
}

/// Writes the definition of each deferred tool where a message refers to the tool for the first time. A sentence replaces
/// other references. `explains_calls` is true if the start of the prompt has tools.
fn define_tools<I>(
    template: &Template,
    messages: &mut [Message<I>],
    deferred: &[Value],
    explains_calls: bool,
    kwargs: &Map<String, Value>,
) {
    let name = |tool: &Value| tool["function"]["name"].as_str().unwrap_or_default().to_owned();
    let mut by_name: BTreeMap<String, &Value> = deferred.iter().rev().map(|tool| (name(tool), tool)).collect();
    let referenced = messages.iter().flat_map(Message::tools).filter_map(|name| by_name.remove(name));
    let referenced: Vec<Value> = referenced.map(tools::without_deferral).collect();
    let texts = template.definitions(&referenced, explains_calls, kwargs);
    let mut texts: BTreeMap<String, String> = referenced.iter().map(name).zip(texts).collect();
    for message in messages {
        message.define_tools(|name| texts.remove(name).unwrap_or_else(|| reference_sentence(name)));
    }
}

/// Positions where other prompts are likely to branch off from this prompt.
pub fn boundaries(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<Boundary> {
    let kind = |speaker| match speaker {
        Speaker::System => BoundaryKind::System,
        Speaker::User => BoundaryKind::Query,
        Speaker::Other => BoundaryKind::Message,
    };
    let ends = message_ends(tokenizer, ids).into_iter();
    ends.map(|(at, speaker)| Boundary { at, kind: kind(speaker) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::messages;
    use serde_json::json;

    const START_OF_ANSWER: &str = "<|im_start|>assistant\n<think>\n";

    fn tool(name: &str, defer: bool) -> Value {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}, "defer_loading": defer})
    }

    /// The prompt of a conversation with the demo's template.
    fn prompt(messages: &[Value], tools: &[Value]) -> String {
        let template = Template::load(&test_support::demo()).unwrap();
        let messages = messages::read(messages.to_vec()).unwrap();
        let mut chat = ChatPrompt::new(messages, false, tools.to_vec(), tools::chat_path).unwrap();
        let messages = mem::take(&mut chat.messages);
        render_with_tools(&template, messages, &mut chat).unwrap()
    }

    fn search(found: &[&str]) -> [Value; 2] {
        let call = json!({"type": "function", "function": {"name": "search", "arguments": "{}"}});
        let references: Vec<_> =
            found.iter().map(|name| json!({"type": "tool_reference", "tool_name": name})).collect();
        [
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "1", "content": references}),
        ]
    }

    #[test]
    fn reference_defines_deferred_tool_and_keeps_head() {
        let system = json!({"role": "system", "content": "Be kind."});
        for start in [vec![system], Vec::new()] {
            let mut messages = [&start[..], &[json!({"role": "user", "content": "Hi"})]].concat();
            let tools = [tool("f", true), tool("search", false), tool("g", true)];
            let before = prompt(&messages, &tools);
            assert_eq!(before, prompt(&messages, &[tool("search", false)]));
            messages.extend(search(&["g", "f"]));
            let after = prompt(&messages, &tools);
            assert!(after.starts_with(before.strip_suffix(START_OF_ANSWER).unwrap()), "{after}");
            let definition = |name: &str| tools::without_deferral(&tool(name, true)).to_string();
            let [f, g] = ["f", "g"].map(|name| definition(name).replace("\":", "\": ").replace(",\"", ", \""));
            assert!(after.contains(&format!("<tool_response>\n{g}\n{f}\n</tool_response>")), "{after}");
            messages.extend(search(&["f", "search", "unknown"]));
            let again = prompt(&messages, &tools);
            assert!(again.starts_with(after.strip_suffix(START_OF_ANSWER).unwrap()), "{again}");
            let sentences = ["f", "search", "unknown"].map(reference_sentence).join("\n");
            assert!(again.contains(&format!("<tool_response>\n{sentences}\n</tool_response>")), "{again}");
            assert_eq!(again.matches(&f).count(), 1);
        }
    }

    #[test]
    fn first_reference_explains_calls_without_head_tools() {
        let messages = [&[json!({"role": "user", "content": "Hi"})][..], &search(&["f", "g"])].concat();
        let text = prompt(&messages, &[tool("f", true), tool("g", true)]);
        assert!(!text.starts_with("<|im_start|>system") && text.matches("# Tools").count() == 1, "{text}");
        assert!(text.contains("<tool_response>\n# Tools\n\n<tools>\n{"), "{text}");
    }
}
