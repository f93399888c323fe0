//! Tests of tools that are defined in the middle of a conversation: `defer_loading`, `tool_reference`, and the tool search
//! of Responses.

use super::{
    client::events,
    server::{CALLS_WITH_WORD, EOS, MESSAGES, RESPONSES, Server, Setup, demo, serve_checkpoint, streamed, with},
};
use moestro_engine::Options;
use moestro_model::model::LoadOptions;
use serde_json::{Value, json};
use std::{path::PathBuf, thread::available_parallelism};
use test_support::{mutate::Dice, random_cases::seeds};
use tokio::task::JoinSet;

/// A call of `tool_search` without reasoning.
const SEARCHES: &str = "</think>\n\n<tool_call>\n<function=tool_search>\n<parameter=query>\nweb\n</parameter>\n\
                        </function>\n</tool_call>";

/// Maximum number of tokens at the end of a prompt that the next prompt does not repeat: the start of the answer.
const NEW: u64 = 8;

async fn server(says: &'static str) -> Server {
    Setup { says: Some(says), context: 8192, ..Setup::default() }.start().await
}

/// A server with a prompt cache whose model calls `tool_search`.
async fn caching_server(dir: PathBuf) -> Server {
    Setup { says: Some(SEARCHES), context: 8192, prompt_cache_dir: Some(dir), ..Setup::default() }.start().await
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"days": {"enum": [7]}}, "required": ["days"], "additionalProperties": false})
}

/// An API with the format of its tools, items and answers.
#[derive(Clone, Copy)]
struct Api {
    path: &'static str,
}

const APIS: [Api; 2] = [Api { path: MESSAGES }, Api { path: RESPONSES }];

impl Api {
    fn is_messages(self) -> bool {
        self.path == MESSAGES
    }

    /// A tool with a long description.
    fn tool(self, name: &str, more: Value) -> Value {
        let description = format!("Tells the weather of many days, {name}.");
        let tool = if self.is_messages() {
            json!({"name": name, "description": description, "input_schema": schema()})
        } else {
            json!({"type": "function", "name": name, "description": description, "parameters": schema()})
        };
        with(tool, more)
    }

    fn search(self) -> Value {
        let parameters = json!({"type": "object", "properties": {"query": {"type": "string"}}});
        if self.is_messages() {
            return json!({"name": "tool_search", "description": "Finds tools.", "input_schema": parameters});
        }
        json!({"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": parameters})
    }

    fn request(self, items: &[Value], tools: &[Value], more: Value) -> Value {
        let body = if self.is_messages() {
            json!({"messages": items, "tools": tools, "max_tokens": 200, "thinking": {"type": "adaptive"}})
        } else {
            json!({"input": items, "tools": tools})
        };
        with(body, more)
    }

    /// A search and its result, which defines `names`.
    fn found(self, id: &str, names: &[&str]) -> Vec<Value> {
        if self.is_messages() {
            let references = names.iter().map(|name| json!({"type": "tool_reference", "tool_name": name}));
            let references: Vec<_> = references.collect();
            let call = json!({"type": "tool_use", "id": id, "name": "tool_search", "input": {"query": "web"}});
            let result = json!({"type": "tool_result", "tool_use_id": id, "content": references});
            return vec![json!({"role": "assistant", "content": [call]}), json!({"role": "user", "content": [result]})];
        }
        let tools: Vec<_> = names.iter().map(|name| self.tool(name, json!({}))).collect();
        vec![
            json!({"type": "tool_search_call", "call_id": id, "execution": "client", "arguments": {"query": "web"}}),
            json!({"type": "tool_search_output", "call_id": id, "execution": "client", "tools": tools}),
        ]
    }

    /// The number of tokens of the prompt, and how many of them were cached.
    async fn usage(self, server: &Server, body: &Value) -> (u64, u64) {
        let usage = &server.ask(self.path, body).await["usage"];
        let number = |path: &str| usage.pointer(path).and_then(Value::as_u64).unwrap();
        if self.is_messages() {
            let cached = number("/cache_read_input_tokens");
            return (number("/input_tokens") + cached, cached);
        }
        (number("/input_tokens"), number("/input_tokens_details/cached_tokens"))
    }

    async fn count(self, server: &Server, items: &[Value], tools: &[Value]) -> u64 {
        let path = if self.is_messages() { "/v1/messages/count_tokens" } else { "/v1/responses/input_tokens" };
        server.ask(path, &self.request(items, tools, json!({}))).await["input_tokens"].as_u64().unwrap()
    }

    /// The arguments of the first call of `f` in an answer, whole and streamed.
    async fn arguments(self, server: &Server, body: &Value) -> Vec<Value> {
        let whole = server.ask(self.path, body).await;
        let events = server.events(self.path, body).await;
        let items = if self.is_messages() { &whole["content"] } else { &whole["output"] };
        let place = items.as_array().unwrap().iter().position(|item| item["name"] == "f").unwrap();
        let call = &items[place];
        let joined = |kind: &str, index: &str, delta: &str| {
            let deltas = events.iter().filter(|event| event["type"] == kind && event[index] == place);
            deltas.filter_map(|event| event.pointer(delta)?.as_str()).collect::<String>()
        };
        if self.is_messages() {
            let streamed = joined("content_block_delta", "index", "/delta/partial_json");
            return vec![call["input"].clone(), serde_json::from_str(&streamed).unwrap()];
        }
        let streamed = joined("response.function_call_arguments.delta", "output_index", "/delta");
        let parse = |text: &str| serde_json::from_str(text).unwrap();
        vec![parse(call["arguments"].as_str().unwrap()), parse(&streamed)]
    }
}

fn question() -> Value {
    json!({"role": "user", "content": "What is the weather?"})
}

#[tokio::test]
async fn search_keeps_the_cached_head() {
    for api in APIS {
        let cache = tempfile::tempdir().unwrap();
        let server = caching_server(cache.path().into()).await;
        let deferred = ["f", "g", "h"].map(|name| api.tool(name, json!({"defer_loading": true})));
        let tools = [&deferred[..1], &[api.search()], &deferred[1..]].concat();
        let head = api.count(&server, &[question()], &[api.search()]).await;
        assert_eq!(api.count(&server, &[question()], &tools).await, head, "{}", api.path);
        let (first, _) = api.usage(&server, &api.request(&[question()], &tools, json!({}))).await;
        assert_eq!(first, head);
        let items = [&[question()][..], &api.found("t", &["g"])].concat();
        let (second, cached) = api.usage(&server, &api.request(&items, &tools, json!({}))).await;
        assert!(cached + NEW >= first && second > first + 40, "{}: {first} then {cached} of {second}", api.path);
        // A client may also send a deferred tool only when it has found it.
        if api.is_messages() {
            let late = [api.search(), deferred[1].clone()];
            assert_eq!(api.count(&server, &items, &late).await, second);
            assert_eq!(api.count(&server, &[question()], &late).await, head);
        } else {
            assert_eq!(api.count(&server, &items, &[api.search()]).await, second);
        }
        let two = [&items[..], &api.found("u", &["h", "f"])].concat();
        let (third, cached) = api.usage(&server, &api.request(&two, &tools, json!({}))).await;
        assert!(cached + NEW >= second && third > second + 80, "{}: {second} then {cached} of {third}", api.path);
    }
}

#[tokio::test]
async fn calls_of_defined_tools_are_checked() {
    let server = server(CALLS_WITH_WORD).await;
    for api in APIS {
        let soon = json!({"days": "soon"});
        let seven = json!({"days": 7});
        let named = if api.is_messages() { "tool" } else { "function" };
        let any = if api.is_messages() { json!({"type": "any"}) } else { json!("required") };
        let named = json!({"type": named, "name": "f"});
        let found = [&[question()][..], &api.found("t", &["f"])].concat();
        for (items, is_deferred, strict, choice, expected) in [
            (vec![question()], false, false, Value::Null, &soon),
            (vec![question()], false, true, Value::Null, &seven),
            // A call of a tool that was not found is read, but not checked.
            (vec![question()], true, true, Value::Null, &soon),
            (found.clone(), true, true, Value::Null, &seven),
            (found.clone(), true, false, any.clone(), &seven),
            (found.clone(), true, false, named.clone(), &seven),
            // The client may force a tool that was not found.
            (vec![question()], true, false, named, &seven),
        ] {
            let tool = api.tool("f", json!({"defer_loading": is_deferred, "strict": strict}));
            let body = api.request(&items, &[tool], json!({"tool_choice": choice}));
            let arguments = api.arguments(&server, &body).await;
            assert_eq!(arguments, [expected.clone(), expected.clone()], "{body}");
        }
        let tool = api.tool("f", json!({"defer_loading": true}));
        let body = api.request(&[question()], &[tool], json!({"tool_choice": any}));
        assert_eq!(server.post(api.path, &body).await.status, 400);
    }
}

#[tokio::test]
async fn search_of_provider_puts_all_tools_first() {
    let server = server(SEARCHES).await;
    for api in APIS {
        let kind = if api.is_messages() { "tool_search_tool_bm25_20251119" } else { "tool_search" };
        let search = json!({"type": kind, "name": "tool_search_tool_bm25"});
        let deferred = api.tool("f", json!({"defer_loading": true}));
        let shown = api.count(&server, &[question()], &[api.tool("f", json!({}))]).await;
        assert_eq!(api.count(&server, &[question()], &[search.clone(), deferred.clone()]).await, shown);
        assert!(api.count(&server, &[question()], &[deferred]).await + 40 < shown);
    }
}

#[tokio::test]
async fn result_of_provider_search_defines_tools() {
    let server = server(SEARCHES).await;
    let api = APIS[0];
    let tools = [api.search(), api.tool("f", json!({"defer_loading": true}))];
    let items = |names: &[&str]| {
        let references: Vec<_> = names.iter().map(|n| json!({"type": "tool_reference", "tool_name": n})).collect();
        let content = json!({"type": "tool_search_tool_search_result", "tool_references": references});
        let blocks = json!([
            {"type": "text", "text": "I search."},
            {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_regex", "input": {"pattern": "f"}},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": content},
            {"type": "text", "text": "Found."},
        ]);
        [question(), json!({"role": "assistant", "content": blocks}), question()]
    };
    let none = api.count(&server, &items(&[]), &tools).await;
    assert!(api.count(&server, &items(&["f"]), &tools).await > none + 40);
    let body = api.request(&items(&["f"])[..2], &tools, json!({"thinking": null}));
    assert_eq!(server.post(MESSAGES, &body).await.status, 200);
}

#[tokio::test]
async fn search_call_of_responses_has_an_item() {
    let server = server(SEARCHES).await;
    let api = APIS[1];
    let tools = [api.search()];
    let whole = server.ask(RESPONSES, &api.request(&[question()], &tools, json!({}))).await;
    let call = &whole["output"][0];
    let expected = json!({"id": call["id"], "type": "tool_search_call", "status": "completed",
                          "call_id": call["call_id"], "execution": "client", "arguments": {"query": "web"}});
    assert_eq!((call, call["call_id"].is_string()), (&expected, true), "{whole}");
    let stream = server.post(RESPONSES, &streamed(&api.request(&[question()], &tools, json!({})))).await;
    let replayed = format!("{RESPONSES}/{}?stream=true", whole["id"].as_str().unwrap());
    for text in [stream.text().await, server.get(&replayed).await.text().await] {
        let events = events(&text);
        let of_items: Vec<_> = events.iter().filter(|event| event.get("output_index").is_some()).collect();
        let kinds: Vec<_> = of_items.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["response.output_item.added", "response.output_item.done"], "{text}");
        assert_eq!(of_items[0]["item"]["arguments"], json!({}));
        assert_eq!(of_items[1]["item"]["arguments"], json!({"query": "web"}));
    }
    // The next request sends only the result of the search. The one after it has the tools from the earlier items.
    let output = json!({"type": "tool_search_output", "call_id": call["call_id"], "tools": [api.tool("f", json!({}))]});
    let more = json!({"previous_response_id": whole["id"]});
    let next = server.ask(RESPONSES, &api.request(&[output], &tools, more)).await;
    let more = json!({"previous_response_id": next["id"], "tool_choice": {"type": "function", "name": "f"},
                      "parallel_tool_calls": false});
    let forced = server.ask(RESPONSES, &api.request(&[question()], &tools, more)).await;
    let call = &forced["output"][0];
    assert_eq!((&call["name"], &call["arguments"]), (&json!("f"), &json!("{\"days\":7}")), "{forced}");
}

#[tokio::test]
async fn additional_tools_are_defined_where_they_stand() {
    let cache = tempfile::tempdir().unwrap();
    let server = caching_server(cache.path().into()).await;
    let api = APIS[1];
    let item = |name: &str| {
        let space = json!({"type": "namespace", "name": "n", "tools": [api.tool(name, json!({}))]});
        json!({"type": "additional_tools", "role": "developer", "tools": [space]})
    };
    // Tools before the first message of the user are at the start of the prompt.
    let rules = json!({"role": "developer", "content": "Be kind."});
    let start = [item("f"), rules.clone(), question()];
    let first = api.count(&server, &start, &[]).await;
    assert_eq!(api.count(&server, &[rules, question()], &[api.tool("f", json!({}))]).await, first);
    // Later tools leave the start as it is.
    let (first_asked, _) = api.usage(&server, &api.request(&start, &[], json!({}))).await;
    let answer = json!({"role": "assistant", "content": "Which town?"});
    let later = [&start[..], &[answer, item("g"), json!({"role": "user", "content": "Oslo"})]].concat();
    let (second, cached) = api.usage(&server, &api.request(&later, &[], json!({}))).await;
    assert!(first_asked == first && cached + NEW >= first && second > first + 40, "{first}: {cached} of {second}");
    let choice = json!({"type": "function", "name": "g"});
    let body = api.request(&later, &[], json!({"tool_choice": choice, "parallel_tool_calls": false}));
    let call = &server.ask(RESPONSES, &body).await["output"][0];
    assert_eq!((&call["name"], &call["namespace"]), (&json!("g"), &json!("n")));
}

/// A conversation of up to eight turns: questions, and searches that find known and unknown tools.
fn random_conversation(api: Api, dice: &mut Dice) -> Vec<Vec<Value>> {
    let names = ["a", "b", "c", "d", "head", "unknown"];
    let mut items = vec![question()];
    let mut conversations = vec![items.clone()];
    for turn in 0..1 + dice.below(7) {
        if dice.below(3) == 0 {
            items.push(json!({"role": "assistant", "content": format!("Answer {}.", dice.below(100))}));
            items.push(json!({"role": "user", "content": format!("Question {}?", dice.below(100))}));
        } else {
            let found: Vec<&str> = (0..dice.below(4)).map(|_| *dice.pick(&names)).collect();
            items.extend(api.found(&format!("t{turn}"), &found));
        }
        conversations.push(items.clone());
    }
    conversations
}

#[tokio::test]
async fn answer_after_searches_equals_fresh_server() {
    compare_with_fresh_server(0..8).await;
}

/// Each two cores have their own servers.
#[tokio::test]
#[ignore = "long: 40 random conversations"]
async fn answers_after_many_searches_equal_fresh_server() {
    let workers = available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
    let mut tasks = JoinSet::new();
    for worker in 0..workers {
        tasks.spawn(compare_with_fresh_server(seeds(40).skip(worker).step_by(workers)));
    }
    tasks.join_all().await;
}

/// Sends random conversations turn by turn, and their last turns to a server that has not cached them.
async fn compare_with_fresh_server(seeds: impl Iterator<Item = u64>) {
    let [one, other] = [demo_server().await, demo_server().await];
    for seed in seeds {
        let mut dice = Dice(seed);
        let api = *dice.pick(&APIS);
        let deferred = ["a", "b", "c", "d"].map(|name| api.tool(name, json!({"defer_loading": true})));
        let tools = [&[api.search(), api.tool("head", json!({}))][..], &deferred].concat();
        let conversations = random_conversation(api, &mut dice);
        let limit = if api.is_messages() { "max_tokens" } else { "max_output_tokens" };
        let body = |items: &[Value], tokens: usize| api.request(items, &tools, json!({limit: tokens}));
        for items in &conversations[..conversations.len() - 1] {
            server_answer(&one, api, &body(items, 4)).await;
        }
        let last = body(&conversations[conversations.len() - 1], 24);
        let warm = server_answer(&one, api, &last).await;
        let cold = with(last.clone(), json!({"cache_prompt": false}));
        assert_eq!(warm, server_answer(&other, api, &cold).await, "seed {seed}: {last}");
    }
}

/// A server with the demo model.
async fn demo_server() -> Server {
    let mut load = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    load.plan.context = Some(8192);
    load.plan.prompt_cache = Some(64 << 20);
    serve_checkpoint(&demo(), &load, Options { eos: vec![EOS], prompt_cache: 64 << 20, ..Options::default() }).await
}

/// The items of an answer without ids.
async fn server_answer(server: &Server, api: Api, body: &Value) -> Value {
    let mut answer = server.ask(api.path, body).await;
    let mut items = answer[if api.is_messages() { "content" } else { "output" }].take();
    for item in items.as_array_mut().unwrap() {
        item["id"] = Value::Null;
        item["call_id"] = Value::Null;
    }
    items
}
