//! The request of the Responses API, checked and translated.

use crate::http::{
    ApiError, ServerState,
    layers::{MemoryPermit, value_bytes},
    openai::{
        CommonFields, JsonSchema, ResponseFormat,
        responses::{
            items,
            store::{ResponseStore, StoredItem},
        },
    },
    quote,
    request::{
        ChatPrompt, GenerationRequest, ParsedValues, PromptInput, RequestedFormat, Thinking, body, fields,
        response_format::{self, FormatField},
        sampling_params as params, thinking,
        tools::{self, DEFER_LOADING, ToolChoice},
    },
};
use axum::body::Body;
use moestro_chat::{Message, Role};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

/// Value of `include` for the log-probabilities of the text.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Value of `include` for the `encrypted_content` of reasoning items.
pub const ENCRYPTED_REASONING: &str = "reasoning.encrypted_content";

/// Type of a tool search, and the name of its function.
pub const TOOL_SEARCH: &str = "tool_search";

#[derive(Debug, Default, Deserialize)]
pub struct ResponsesRequest {
    /// The fields that have the same name in chat completions.
    #[serde(skip)]
    pub common: CommonFields,
    input: Option<Value>,
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub store: Option<bool>,
    pub max_output_tokens: Option<i64>,
    pub top_logprobs: Option<i64>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Option<ResponsesReasoning>,
    pub text: Option<TextFields>,
    pub include: Option<Vec<String>>,
    pub metadata: Option<Map<String, Value>>,
    pub user: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub struct ResponsesReasoning {
    pub effort: Option<String>,
    pub summary: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub struct TextFields {
    pub format: Option<Value>,
    pub verbosity: Option<String>,
}

/// Reads a request. Returns the request, the items of earlier responses, the items of the input, and a permit for the
/// memory of all items.
pub async fn read(
    state: &ServerState,
    body: Body,
) -> Result<(ResponsesRequest, Vec<Value>, Vec<Value>, MemoryPermit), ApiError> {
    let (common, request, mut permit) =
        body::request::<_, ResponsesRequest>(state, body, fields::RESPONSES, ParsedValues::Translated).await?;
    // In the Responses API, `stream_options` only controls obfuscation, which this server does not have.
    let mut request = ResponsesRequest { common: CommonFields { stream_options: None, ..common }, ..request };
    let history = match &request.previous_response_id {
        Some(id) => {
            // The items of earlier responses are copied and translated.
            let history = state.responses.history(id, |bytes| permit.grow(2 * bytes))?;
            history.ok_or_else(|| ApiError::no_such_response(id, "previous_response_id"))?
        }
        None => Vec::new(),
    };
    let input = request.take_input(&state.responses, &mut permit)?;
    Ok((request, history, input, permit))
}

impl ResponsesRequest {
    /// The functions of the request and of its items, including the functions in namespaces.
    fn functions(&self, items: &[Value]) -> Result<Vec<Value>, ApiError> {
        let mut functions = Vec::new();
        for (index, it) in self.tools.iter().flatten().enumerate() {
            let is_namespace = it["type"] == "namespace";
            for (inner, it) in items::members(it).iter().enumerate() {
                let at =
                    if is_namespace { format!("tools[{index}].tools[{inner}]") } else { format!("tools[{index}]") };
                functions.extend(tool(it, &at)?);
            }
        }
        let mut names: BTreeSet<String> = functions.iter().filter_map(function_name).collect();
        let first = items::first_items(items).len();
        for (index, item) in items.iter().enumerate() {
            // An error in an item would repeat with each further request of the conversation.
            let found = items::tools(item).flat_map(items::members).filter_map(|it| tool(it, "").ok().flatten());
            for mut function in found.filter(tools::is_valid) {
                if index >= first {
                    function[DEFER_LOADING] = true.into();
                }
                if function_name(&function).is_some_and(|name| names.insert(name)) {
                    functions.push(function);
                }
            }
        }
        // A search that OpenAI's servers would run is not needed if the model reads all tools from the start.
        if self.all_tools(items::first_items(items)).any(|tool| tool["type"] == TOOL_SEARCH && !is_search(tool)) {
            functions.iter_mut().for_each(|function| *function = tools::without_deferral(function));
        }
        Ok(functions)
    }

    /// The tools of the request and of `items` that the model never calls.
    fn ignored_tools<'a>(&'a self, items: impl IntoIterator<Item = &'a Value>) -> IgnoredTools {
        let is_offered = |tool: &Value| tool["type"] == "function" || tool["type"] == "namespace" || is_search(tool);
        let tools = self.all_tools(items).filter(|tool| tool["type"].is_string() && !is_offered(tool));
        IgnoredTools(tools.flat_map(|tool| IgnoredTools::keys(tool, |field| [FieldKey::Any, field])).collect())
    }

    /// The tools of the request and of `items`, with namespaces as one tool.
    fn all_tools<'a>(&'a self, items: impl IntoIterator<Item = &'a Value>) -> impl Iterator<Item = &'a Value> {
        self.tools.iter().flatten().chain(items.into_iter().flat_map(items::tools))
    }

    /// Maps the name of each function that is in a namespace to the name of the namespace.
    pub fn namespaces<'a>(&'a self, items: impl Iterator<Item = &'a Value>) -> BTreeMap<String, String> {
        let mut namespaces = BTreeMap::new();
        for space in self.all_tools(items).filter(|tool| tool["type"] == "namespace") {
            for function in items::members(space) {
                if let (Some(name), Some(space)) = (function["name"].as_str(), space["name"].as_str()) {
                    namespaces.entry(name.to_owned()).or_insert_with(|| space.to_owned());
                }
            }
        }
        namespaces
    }

    /// True if the client runs tool searches.
    pub fn has_search<'a>(&'a self, items: impl Iterator<Item = &'a Value>) -> bool {
        self.all_tools(items).any(is_search)
    }

    /// Changes the request so that the answer is a single text, without calls, reasoning, text format,
    /// log-probabilities or stream.
    pub fn answer_as_text(&mut self) {
        self.tool_choice = Some("none".into());
        self.reasoning = Some(ResponsesReasoning { effort: Some("none".into()), summary: None });
        self.text = None;
        self.common.stream = None;
        self.include = None;
        self.top_logprobs = None;
    }

    /// True if `include` names this part of the answer. Names other than [`LOGPROBS`] and [`ENCRYPTED_REASONING`]
    /// concern tools that OpenAI's servers run.
    pub fn includes(&self, part: &str) -> bool {
        self.include.iter().flatten().any(|name| name == part)
    }

    /// Takes the items of `input`. References to items are replaced by copies of the items. `permit` grows by the memory
    /// of the copies and of their translation.
    pub fn take_input(&mut self, store: &ResponseStore, permit: &mut MemoryPermit) -> Result<Vec<Value>, ApiError> {
        let items = match self.input.take() {
            Some(Value::String(text)) => vec![json!({"type": "message", "role": "user", "content": text})],
            Some(Value::Array(items)) => items,
            None if self.previous_response_id.is_some() => Vec::new(),
            None => return Err(ApiError::json(Some("input".into()), "missing field `input`")),
            Some(_) => {
                return Err(ApiError::wrong_type("input", "must be a string or an array of items."));
            }
        };
        // All items are found before the first copy, because the memory of a copy may evict the next item.
        let mut found = BTreeMap::new();
        for (index, item) in items.iter().enumerate() {
            if let Some(id) = referenced_id(item)
                && !found.contains_key(id)
            {
                let stored = store.item(id);
                let stored = stored.ok_or_else(|| ApiError::no_such_item(id, &format!("input[{index}]")))?;
                found.insert(id.to_owned(), stored);
            }
        }
        permit.grow(found.values().filter_map(StoredItem::value).map(value_bytes).sum())?;
        let found: BTreeMap<String, Value> =
            found.into_iter().filter_map(|(id, stored)| Some((id, stored.value()?.clone()))).collect();
        let resolve = |item: Value| match referenced_id(&item).and_then(|id| found.get(id)) {
            Some(stored) => {
                permit.grow(3 * value_bytes(stored))?;
                Ok(stored.clone())
            }
            None => Ok(item),
        };
        items.into_iter().map(resolve).collect()
    }

    /// Translates the request. `history` has the items of earlier responses, and `input` has the items of this request.
    pub fn into_generation(mut self, history: Vec<Value>, input: Vec<Value>) -> Result<GenerationRequest, ApiError> {
        let thinking = self.thinking()?;
        let ignored = self.ignored_tools(history.iter().chain(&input));
        let mut prompt = self.conversation(history, input)?;
        prompt.set_thinking(thinking.enabled);
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        let choice = self.tool_choice.as_ref().filter(|choice| !choice.is_null());
        let choice =
            choice.map_or(Ok(ToolChoice::Auto(None)), |choice| tool_choice(choice, &prompt.tools, &ignored))?;
        prompt.forbids_calls = choice == ToolChoice::None;
        let content = self.text.as_mut().and_then(|text| text.format.take()).filter(|format| !format.is_null());
        let content = content.map(response_format).transpose()?.flatten();
        let format = RequestedFormat::new(content, &prompt.tools, &choice, parallel, tool_path);
        let common = mem::take(&mut self.common);
        common.check()?;
        let logprobs = self.includes(LOGPROBS).then(|| self.top_logprobs.unwrap_or(0));
        let stops = common.stops("stop")?;
        Ok(GenerationRequest {
            max_tokens: params::token_limit("max_output_tokens", self.max_output_tokens, 1)?,
            logprobs: logprobs.map(|top| params::alternatives("top_logprobs", top)).transpose()?,
            format,
            thinking_budget: thinking.budget,
            parallel_tool_calls: parallel,
            ..GenerationRequest::new(common, stops, PromptInput::Chat(prompt))
        })
    }

    fn thinking(&self) -> Result<Thinking, ApiError> {
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref());
        effort.map_or(Ok(Thinking::default()), |word| thinking::effort("reasoning.effort", word))
    }

    /// Translates the conversation.
    fn conversation(&mut self, mut items: Vec<Value>, input: Vec<Value>) -> Result<ChatPrompt, ApiError> {
        if self.top_logprobs.is_some_and(|top| top != 0) && !self.includes(LOGPROBS) {
            return Err(ApiError::wrong_value("top_logprobs", format!("is only allowed if include has `{LOGPROBS}`.")));
        }
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.take().filter(|text| !text.is_empty()) {
            messages.push(Message::new(Role::System, instructions));
        }
        let new = input.len();
        items.extend(input);
        let tools = self.functions(&items)?;
        messages.extend(items::to_messages(&items, new)?);
        if messages.is_empty() {
            return Err(ApiError::wrong_value("input", "is empty; it must have at least one message."));
        }
        let mut prompt = ChatPrompt::new(messages, false, tools, tool_path)?;
        prompt.param = "input";
        Ok(prompt)
    }
}

/// The tools that the model never calls, by the fields with which `tool_choice` names them: `type`, `name` and
/// `server_label`. A tool has a key for each choice of the fields that `tool_choice` may leave out.
struct IgnoredTools(BTreeSet<[FieldKey; 3]>);

const IDENTITY: [&str; 3] = ["type", "name", "server_label"];

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum FieldKey {
    Any,
    Absent,
    Text(String),
}

impl IgnoredTools {
    /// True if a tool has the fields of `named`. A tool may lack a field: `name` may be the name of a tool of an MCP server,
    /// which the request does not list.
    fn has(&self, named: &Value) -> bool {
        if !IDENTITY.iter().all(|&at| named[at].is_null() || named[at].is_string()) {
            return false;
        }
        let either = |field| match field {
            FieldKey::Absent => [FieldKey::Any, FieldKey::Any],
            text => [FieldKey::Absent, text],
        };
        Self::keys(named, either).any(|key| self.0.contains(&key))
    }

    /// The keys of a tool. `of` returns the keys of one of the two fields that may be absent.
    fn keys(tool: &Value, of: impl Fn(FieldKey) -> [FieldKey; 2]) -> impl Iterator<Item = [FieldKey; 3]> {
        let [kind, name, label] =
            IDENTITY.map(|at| tool[at].as_str().map_or(FieldKey::Absent, |text| FieldKey::Text(text.to_owned())));
        let labels = of(label);
        of(name).into_iter().flat_map(move |name| labels.clone().map(|label| [kind.clone(), name.clone(), label]))
    }
}

/// The id of the stored item to which an item of the input refers. A reference may omit its type.
fn referenced_id(item: &Value) -> Option<&str> {
    let is_bare = item.get("type").is_none_or(Value::is_null) && item.get("role").is_none();
    item["id"].as_str().filter(|_| item["type"] == "item_reference" || is_bare)
}

/// Path of a tool's field in the Responses API.
fn tool_path(index: usize, field: &str) -> String {
    format!("tools[{index}].{field}")
}

/// True for a tool search that the client runs.
fn is_search(tool: &Value) -> bool {
    tool["type"] == TOOL_SEARCH && tool["execution"] == "client"
}

fn function_name(function: &Value) -> Option<String> {
    function["function"]["name"].as_str().map(str::to_owned)
}

/// Translates a function, or a tool search that the client runs. Returns `None` for `custom` tools and for tools that
/// OpenAI's servers run. The API allows this, because a model need not call a tool.
fn tool(tool: &Value, at: &str) -> Result<Option<Value>, ApiError> {
    match tool["type"].as_str() {
        Some(kind) if kind == "function" || is_search(tool) => {
            let search = Value::from(TOOL_SEARCH);
            let name = if kind == TOOL_SEARCH { Some(&search) } else { tool.get("name") };
            let fields = [("name", name)].into_iter();
            let fields = fields.chain(["description", "parameters"].map(|field| (field, tool.get(field))));
            let given = fields
                .filter_map(|(field, value)| Some((field.to_owned(), value.filter(|value| !value.is_null())?.clone())));
            Ok(Some(tools::with_function(tool, given.collect())))
        }
        Some(kind) => {
            tracing::info!(kind = &*quote(kind), "tool ignored: the server supports only tools of type function");
            Ok(None)
        }
        None => Err(ApiError::wrong_value(format!("{at}.type"), "must be `function`.")),
    }
}

/// Reads `tool_choice`. `tools` has the functions, and `ignored` the tools that the model never calls.
fn tool_choice(choice: &Value, tools: &[Value], ignored: &IgnoredTools) -> Result<ToolChoice, ApiError> {
    let choice = match (choice, choice["type"].as_str()) {
        (Value::String(word), _) => ToolChoice::from_word(word)?,
        (_, Some("function")) => ToolChoice::function(&choice["name"], tools, "tool_choice.name")?,
        (_, Some("allowed_tools")) => {
            let name = |named: &Value| match named["type"].as_str() {
                Some(kind) if kind != "function" => named.get("name").cloned().unwrap_or_else(|| kind.into()),
                _ => named["name"].clone(),
            };
            ToolChoice::allowed(choice, name, |named| ignored.has(named), tools, "tool_choice")?
        }
        (_, kind) => {
            let kind = kind.unwrap_or("missing");
            let text = format!(
                "tool_choice.type is {}; tool_choice must be `auto`, `none`, `required`, a function or \
                 `allowed_tools`.",
                quote(kind)
            );
            return Err(ApiError::unsupported("tool_choice", text));
        }
    };
    choice.with_tools(tools)
}

/// `text.format`. In chat completions, the schema is one level deeper, in `json_schema`. Some clients send that here, too.
#[derive(Debug, Deserialize)]
struct TextFormat {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
    strict: Option<bool>,
    json_schema: Option<JsonSchema>,
    regex: Option<String>,
    lark: Option<String>,
}

fn response_format(format: Value) -> Result<Option<FormatField>, ApiError> {
    if !format.is_object() {
        return Err(ApiError::wrong_type("text.format", "must be an object."));
    }
    let TextFormat { kind, schema, strict, json_schema, regex, lark } = body::typed_at("text.format.", format)?;
    let json_schema = json_schema.filter(|_| schema.is_none()).or(Some(JsonSchema { schema, strict }));
    let format = ResponseFormat { kind, json_schema, schema: None, regex, lark };
    response_format::from_response_format(&format, "text.format", "schema")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::layers::memory::RequestMemory;
    use moestro_base::metrics::Metrics;
    use test_support::thread_cpu::cpu_time_of;

    fn request(more: Value) -> ResponsesRequest {
        let body = test_support::with(json!({"input": "Hi"}), more);
        let common = serde_json::from_value(body.clone()).unwrap();
        ResponsesRequest { common, ..serde_json::from_value(body).unwrap() }
    }

    fn permit() -> MemoryPermit {
        RequestMemory::new(&Metrics::new("0", "cpu")).permit()
    }

    fn generation(more: Value) -> Result<GenerationRequest, ApiError> {
        let mut request = request(more);
        let items = request.take_input(&ResponseStore::default(), &mut permit()).unwrap();
        request.into_generation(Vec::new(), items)
    }

    /// The conversation that these fields are translated into.
    fn chat(more: Value) -> ChatPrompt {
        let PromptInput::Chat(chat) = generation(more).unwrap().prompt else { panic!("a chat") };
        chat
    }

    #[test]
    fn instructions_become_the_system_message() {
        let chat = chat(json!({"instructions": "Be kind."}));
        let texts: Vec<_> =
            chat.messages.iter().map(|message| message.content.as_ref().unwrap().text().unwrap()).collect();
        assert_eq!((chat.messages[0].role, texts), (Role::System, vec!["Be kind.", "Hi"]));
    }

    #[test]
    fn tools_are_nested_one_level_deeper() {
        let schema = json!({"type": "object"});
        let f = json!({"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": true});
        let chat = chat(json!({"tools": [f, {"type": "web_search"}]}));
        let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
        assert_eq!(chat.tools, [json!({"type": "function", "function": function})]);
        let choice = |choice: Value| tool_choice(&choice, &chat.tools, &IgnoredTools(BTreeSet::new()));
        let names = || Some(vec!["f".to_owned()]);
        assert_eq!(choice(json!({"type": "function", "name": "f"})), Ok(ToolChoice::Required(names())));
        let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]});
        assert_eq!(choice(allowed), Ok(ToolChoice::Auto(names())));
        assert!(choice(json!({"type": "web_search"})).is_err());
    }

    /// All lists of up to three allowed tools, of functions, of tools that the server ignores, and of unknown tools.
    #[test]
    fn allowed_tools_may_name_ignored_tools() {
        let tools = json!([
            {"type": "function", "name": "f"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            {"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "custom", "name": "patch"},
        ]);
        let functions =
            [json!({"type": "function", "name": "f"}), json!({"type": "function", "name": "g"}), json!({"name": "f"})];
        let ignored = [
            json!({"type": "web_search"}),
            json!({"type": "mcp", "server_label": "a"}),
            json!({"type": "mcp"}),
            json!({"type": "mcp", "server_label": "a", "name": "search"}),
            json!({"type": "custom", "name": "patch"}),
        ];
        let unknown = [
            json!({"type": "function", "name": "web_search"}),
            json!({"type": "function"}),
            json!({"type": "image_generation"}),
            json!({"type": "mcp", "server_label": "b"}),
            json!({"type": "mcp", "server_label": 5}),
            json!({"type": "custom", "name": "f2"}),
            json!({"type": "namespace", "name": "n"}),
            json!("f"),
        ];
        let kinds = [&functions[..], &ignored, &unknown];
        let all: Vec<(usize, &Value)> =
            kinds.iter().enumerate().flat_map(|(kind, of)| of.iter().map(move |tool| (kind, tool))).collect();
        for mode in ["auto", "required"] {
            for picked in 0..all.len().pow(3) {
                let list: Vec<_> =
                    (0..1 + picked as u32 % 3).map(|at| all[picked / all.len().pow(at) % all.len()]).collect();
                let has = |kind: usize| list.iter().any(|(of, _)| *of == kind);
                let names = list.iter().filter(|(kind, _)| *kind == 0);
                let names: BTreeSet<_> = names.map(|(_, tool)| tool["name"].as_str().unwrap().to_owned()).collect();
                let names: Vec<_> = names.into_iter().collect();
                let expected = match (has(2), has(0), mode) {
                    (true, ..) => None,
                    (_, true, "auto") => Some(ToolChoice::Auto(Some(names))),
                    (_, true, _) => Some(ToolChoice::Required(Some(names))),
                    (_, false, "auto") => Some(ToolChoice::None),
                    (_, false, _) => None,
                };
                let named: Vec<_> = list.iter().map(|(_, tool)| tool).collect();
                let choice = json!({"type": "allowed_tools", "mode": mode, "tools": named});
                let request = request(json!({"tools": tools, "tool_choice": choice}));
                let (functions, ignored) = (request.functions(&[]).unwrap(), request.ignored_tools(&[]));
                let found = tool_choice(&choice, &functions, &ignored);
                if let Err(error) = &found {
                    assert_eq!(error.body()["error"]["param"], "tool_choice.tools", "{choice}");
                }
                assert_eq!(found.ok(), expected, "{choice}");
            }
        }
    }

    #[test]
    fn many_tools_are_matched_in_linear_time() {
        for kinds in [["x"; 2], ["mcp"; 2], ["function", "x"]] {
            let tool = |at: usize| json!({"type": kinds[at % 2], "name": format!("f{at}"), "server_label": "a"});
            let tools: Vec<Value> = (0..10_000).map(tool).collect();
            let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": tools});
            let time = cpu_time_of(|| drop(generation(json!({"tools": tools, "tool_choice": choice})).unwrap()));
            assert!(time.as_secs() < 5, "{time:?}");
        }
    }

    #[test]
    fn error_names_the_field_of_this_api() {
        let f = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
        let bad = json!({"type": "function", "name": "f", "parameters": 5});
        for (more, param) in [
            (json!({"tools": [bad]}), "tools[0].parameters"),
            (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
            (json!({"tools": [f], "tool_choice": {"type": "function", "name": "g"}}), "tool_choice.name"),
            (json!({"tools": [f], "tool_choice": {"type": "allowed_tools"}}), "tool_choice.tools"),
            (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
            (json!({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}), "text.format.strict"),
            (json!({"text": {"format": {"type": "regex"}}}), "text.format.regex"),
            (json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"input": []}), "input"),
        ] {
            let error = generation(more.clone()).err().unwrap_or_else(|| panic!("{more}"));
            assert_eq!(error.body()["error"]["param"], param, "{more}");
            assert!(error.message().starts_with(param), "{}", error.message());
        }
    }

    #[test]
    fn additional_tools_items_are_offered() {
        let function = json!({"type": "function", "name": "f"});
        let input = json!([{"type": "additional_tools", "tools": [function]}, {"role": "user", "content": "Hi"}]);
        let chat = chat(json!({"input": input, "tools": [{"type": "function", "name": "g"}]}));
        assert_eq!(chat.messages.len(), 1);
        let names: Vec<_> = chat.tools.iter().map(|tool| tool["function"]["name"].clone()).collect();
        assert_eq!(names, ["g", "f"]);
    }

    #[test]
    fn functions_in_a_namespace_are_offered() {
        let f = |name: &str| json!({"type": "function", "name": name});
        let tools = json!({"tools": [f("a"), {"type": "namespace", "name": "n", "tools": [f("b"), f("c")]}]});
        let request = request(tools);
        assert_eq!(request.namespaces([].iter()), BTreeMap::from([("b".into(), "n".into()), ("c".into(), "n".into())]));
        let offered = request.functions(&[]).unwrap();
        let names: Vec<_> = offered.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "c"]);
    }

    #[test]
    fn item_reference_is_replaced_by_the_item() {
        let store = ResponseStore::default();
        let message = json!({"id": "msg_1", "type": "message", "role": "assistant", "content": []});
        store.insert(None, Vec::new(), &json!({"id": "resp_1", "output": [message]}));
        let ask = |item: Value| request(json!({"input": [item]})).take_input(&store, &mut permit());
        assert_eq!(ask(json!({"type": "item_reference", "id": "msg_1"})).unwrap(), std::slice::from_ref(&message));
        assert_eq!(ask(json!({"id": "msg_1"})).unwrap(), [message]);
        assert_eq!(ask(json!({"type": "item_reference", "id": "msg_2"})).unwrap_err().status, 404);
    }

    #[test]
    fn repeated_references_each_count_toward_memory() {
        let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
        let (store, mut permit) = (ResponseStore::within(memory.clone()), memory.permit());
        store.insert(
            None,
            Vec::new(),
            &json!({"id": "r", "output": [{"id": "m", "text": "x".repeat(200_000)}, {"id": "n"}]}),
        );
        let mut ask = |times: usize| {
            let last = json!({"id": "n"});
            let input = [&vec![json!({"id": "m"}); times - 1][..], &[last]].concat();
            request(json!({"input": input})).take_input(&store, &mut permit)
        };
        assert_eq!(ask(2).unwrap().len(), 2);
        // The copies of the first item evict the response with the second one.
        assert_eq!(ask(1000).unwrap_err().status, 413);
        assert!((600_000..200_000_000).contains(&permit.bytes()), "{}", permit.bytes());
    }
}
