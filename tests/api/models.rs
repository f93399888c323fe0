//! Tests of several models on one machine, with one model in memory: which request waits, what clients see, and when a
//! model is unloaded.

use super::{
    client::Answer,
    connections::post_slowly,
    server::{
        CHAT, COMPLETIONS, EOS, MESSAGES, RESPONSES, Server, Setup, VOCAB, chat, demo, frequent_events, loaded,
        streamed, wait_until, with,
    },
};
use mock_model::MockModel;
use moestro::http::{HostTimeouts, HostedModel, LoadFailure, ModelEntry, ModelHost, ModelLoader, ServerState};
use moestro_base::metrics::Metrics;
use moestro_chat::{Template, Tokenizer};
use moestro_engine::{self as engine, Options};
use serde_json::{Value, json};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Mock models that answer with their own id. `broken` cannot be loaded.
#[derive(Default)]
struct MockModels {
    /// The loads and unloads so far, in order.
    log: Mutex<Vec<String>>,
    /// While true, loads of models other than `first` wait.
    holds_loads: AtomicBool,
    /// Time that the unload of a model takes.
    unload_time: Duration,
    /// If true, `first` cannot be loaded a second time.
    breaks: bool,
    /// If true, the settings of `broken` are invalid.
    has_invalid_settings: bool,
    /// A further model in the list.
    also: Option<&'static str>,
    /// Maximum number of requests that a model runs at the same time. 0 means 1.
    parallel: usize,
    /// If set, a model waits after it has evaluated this many tokens.
    stops_at: Option<Arc<AtomicUsize>>,
}

impl MockModels {
    fn record(&self, event: String) {
        self.log.lock().unwrap().push(event);
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// Makes loads wait until the returned value is dropped.
    fn hold_loads(&self) -> HeldLoads<'_> {
        self.holds_loads.store(true, Relaxed);
        HeldLoads(self)
    }
}

struct HeldLoads<'a>(&'a MockModels);

impl Drop for HeldLoads<'_> {
    fn drop(&mut self) {
        self.0.holds_loads.store(false, Relaxed);
    }
}

/// Loads the mocks. The closures that unload a model hold references to the mocks.
struct MockLoader(Arc<MockModels>);

impl ModelLoader for MockLoader {
    fn list(&self) -> Vec<ModelEntry> {
        let listed = |id: &str| ModelEntry { id: id.into(), created: SystemTime::UNIX_EPOCH, size: 4096 };
        ["first", "org/second", "broken"].into_iter().chain(self.0.also).map(listed).collect()
    }

    fn check(&self, id: &str) -> Result<(), LoadFailure> {
        let is_invalid = self.0.has_invalid_settings && id == "broken";
        if is_invalid { Err("its settings are invalid".into()) } else { Ok(()) }
    }

    fn load(&self, id: &str) -> Result<HostedModel, LoadFailure> {
        while id != "first" && self.0.holds_loads.load(Relaxed) {
            thread::sleep(milliseconds(1));
        }
        if id == "broken" || self.0.breaks && id == "first" && !self.0.log().is_empty() {
            return Err("its shards do not fit together".into());
        }
        self.0.record(format!("load {id}"));
        let tokenizer = Arc::new(Tokenizer::load(&demo()).unwrap());
        let answer = Some(tokenizer.encode(&format!("</think>\n\nI am {id}.")).unwrap());
        let delay = milliseconds(2);
        let stops_at = self.0.stops_at.clone().unwrap_or_else(|| Arc::new(usize::MAX.into()));
        let mock = MockModel {
            vocab: VOCAB,
            context: 2048,
            chunk: 32,
            eos: EOS,
            answer,
            delay,
            stops_at,
            ..MockModel::default()
        };
        let options = Options { eos: vec![EOS], parallel: self.0.parallel, ..Options::default() };
        let (engine, worker) = engine::spawn(mock, options, Metrics::new("0", "cpu")).unwrap();
        let model = loaded(id, engine, tokenizer, &[EOS], Template::load(&demo()).unwrap());
        let (mocks, name) = (self.0.clone(), id.to_owned());
        let unload = move || {
            worker.join().unwrap();
            thread::sleep(mocks.unload_time);
            mocks.record(format!("unload {name}"));
        };
        Ok(HostedModel { id: id.into(), model, unload: Box::new(unload) })
    }

    fn clear_prompt_caches(&self) -> Result<(), String> {
        self.0.record("clear".into());
        Ok(())
    }
}

/// A server with the mock models. `first` is loaded.
async fn server(mocks: MockModels, timeouts: HostTimeouts) -> (Arc<MockModels>, Server) {
    let mocks = Arc::new(mocks);
    let loader = Arc::new(MockLoader(mocks.clone()));
    let first = loader.load("first").unwrap();
    let configure = move |state: &mut ServerState| {
        frequent_events(state);
        state.models = ModelHost::new(loader, timeouts, 8);
        state.models.install(first);
    };
    let setup = Setup { loading: true, ..Setup::default() };
    (mocks, setup.start_with(configure).await)
}

fn timeouts() -> HostTimeouts {
    HostTimeouts { min_idle: milliseconds(50), ..HostTimeouts::default() }
}

fn ask(model: &str) -> Value {
    with(chat("Who?"), json!({"model": model}))
}

async fn answer_of(server: &Server, model: &str) -> String {
    let answer = server.ask(CHAT, &ask(model)).await;
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn request_gets_the_model_it_names() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let states = |list: Value| {
        let state = |model: &Value| format!("{} {}", model["id"].as_str().unwrap(), model["loaded"]);
        list["data"].as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    let list = server.get("/v1/models").await.json().await;
    assert_eq!(states(list), ["first true", "org/second false", "broken false"]);
    assert_eq!(server.get("/v1/models/org/second").await.json().await["id"], "org/second");
    for (requested, id) in [("first", "first"), ("second", "org/second"), ("gpt-4o", "org/second"), ("first", "first")]
    {
        assert_eq!(answer_of(&server, requested).await, format!("I am {id}."), "{requested}");
    }
    // A model is unloaded before the next model is loaded.
    let expected = ["load first", "unload first", "load org/second", "unload org/second", "load first"];
    assert_eq!(mocks.log(), expected);
    assert_eq!(server.post(CHAT, &ask("org/third")).await.status, 404);
    // A long name is not repeated.
    for (name, status) in [("x".repeat(256), 200), ("x".repeat(257), 404), ("x".repeat(5 << 20), 404)] {
        let answer = server.post(CHAT, &ask(&name)).await;
        assert_eq!((answer.status, answer.text().await.len() < 10_000), (status, true));
    }
    let list = server.get("/v1/models").await.json().await;
    assert_eq!(states(list), ["first true", "org/second false", "broken false"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn list_suits_three_clients() {
    let (_, server) = server(MockModels::default(), timeouts()).await;
    let ids = |list: &Value| -> Vec<String> {
        let models = list["data"].as_array().unwrap().iter();
        models.map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    };
    let list = server.get("/v1/models").await.json().await;
    assert_eq!((ids(&list), list.get("models")), (vec!["first".into(), "org/second".into(), "broken".into()], None));
    assert_eq!(list["data"][1]["size"], 4096, "the page shows the size of each model");
    // Claude Code shows only ids that begin with the name `claude`.
    let headers = [("anthropic-version", "2023-06-01")];
    let list = server.send("GET", "/v1/models?limit=1000", &headers, None).await.json().await;
    assert!(ids(&list).contains(&"claude-local/org/second".to_owned()), "{list}");
    assert_eq!(server.get("/v1/models/claude-local/org/second").await.json().await["id"], "claude-local/org/second");
    assert_eq!(answer_of(&server, "claude-local/org/second").await, "I am org/second.");
    // Codex requires the field `models`.
    let list = server.get("/v1/models?client_version=0.169.0").await.json().await;
    assert_eq!((list["models"].clone(), ids(&list).len()), (json!([]), 3));
    let list = server.get("/api/v0/models").await.json().await;
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["state"]), (&json!("org/second"), &json!("loaded")));
    assert_eq!(list["data"][0]["capabilities"], json!(["tool_use"]));
    assert!(list["data"][0]["max_context_length"].is_u64() && list["data"][1]["state"] == "not-loaded", "{list}");
    // Anthropic's `capabilities` are an object of other names.
    let list = server.get("/v1/models").await.json().await;
    assert_eq!(list["data"][0]["capabilities"]["chat"], true);
    for path in ["/v1/models", "/v1/models/org/second"] {
        let found = server.send("GET", path, &headers, None).await.json().await;
        let model = found.get("data").map_or(&found, |data| &data[0]);
        assert_eq!((model.get("capabilities"), &model["lifecycle"]), (None, &json!("active")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_api_waits_for_its_model() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let messages = with(ask("second"), json!({"max_tokens": 20}));
    assert_eq!(server.ask(MESSAGES, &messages).await["content"][0]["text"], "I am org/second.");
    let responses = server.ask(RESPONSES, &json!({"model": "first", "input": "Who?"})).await;
    assert_eq!(responses["model"], "first");
    assert_eq!(server.ask(COMPLETIONS, &json!({"model": "second", "prompt": "x"})).await["model"], "org/second");
    server.ask("/tokenize", &json!({"model": "first", "prompt": "x"})).await;
    assert_eq!(mocks.log().len(), 9, "{:?}", mocks.log());
}

/// Reads a stream until it contains `end` `count` times.
async fn read_until(answer: &mut Answer, end: &str, count: usize) -> String {
    let mut text = String::new();
    let read = async {
        while text.matches(end).count() < count {
            text += &String::from_utf8(answer.chunk().await.expect("more of the stream")).unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read).await.unwrap_or_else(|_| panic!("no {end}"));
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_stream_is_kept_alive() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let held = mocks.hold_loads();
    // Some clients count only events, not comments. Messages and Responses therefore send some events while the request
    // waits.
    let messages = with(streamed(&ask("second")), json!({"max_tokens": 20}));
    let mut messages = server.post(MESSAGES, &messages).await;
    let mut responses = server.post(RESPONSES, &json!({"model": "second", "input": "Who?", "stream": true})).await;
    let mut answer = server.post(CHAT, &streamed(&ask("second"))).await;
    assert_eq!(answer.status, 200, "the head arrives before the model is loaded");
    // `first` was unloaded. A client that requests `first` and disconnects must not cause a load.
    wait_until(|| mocks.log().len() == 2, || format!("{:?}", mocks.log())).await;
    let disconnected = tokio::time::timeout(milliseconds(100), server.post(CHAT, &ask("first"))).await;
    assert!(disconnected.is_err());
    let waited = read_until(&mut answer, ": keep-alive\n\n", 2).await;
    assert!(waited.starts_with(": keep-alive\n\n"), "{waited}");
    let waited = read_until(&mut messages, "\"text_delta\",\"text\":\"\"", 1).await;
    assert!(waited.contains("message_start"), "{waited}");
    let waited = read_until(&mut responses, "event: response.in_progress", 2).await;
    assert_eq!(waited.matches("event: response.created").count(), 1);
    drop(held);
    let text = answer.text().await;
    assert!(text.contains("second") && text.ends_with("data: [DONE]\n\n"), "{text}");
    let text = messages.text().await;
    assert!(text.contains("econd") && text.ends_with("{\"type\":\"message_stop\"}\n\n"), "{text}");
    assert!(!text.contains("message_start\""), "{text}");
    let text = responses.text().await;
    assert!(text.contains("\"model\":\"org/second\"") && text.contains("response.completed"), "{text}");
    assert!(!text.contains("event: response.created"), "{text}");
    tokio::time::sleep(milliseconds(300)).await;
    assert_eq!(mocks.log(), ["load first", "unload first", "load org/second"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_includes_wait_for_model() {
    let request = Some(milliseconds(200));
    let (mocks, server) = server(MockModels::default(), HostTimeouts { request, ..timeouts() }).await;
    let _held = mocks.hold_loads();
    let start = Instant::now();
    assert_eq!(server.refused(CHAT, &ask("second"), 504).await["code"], "timeout");
    let text = server.post(CHAT, &streamed(&ask("second"))).await.text().await;
    assert!(text.contains("\"timeout\"") && !text.contains("[DONE]"), "{text}");
    assert!(start.elapsed() >= milliseconds(400), "{:?}", start.elapsed());
}

/// Requests `n` answers of 150 KB from `first`, but reads no answer until `second` has answered. `second` must not take
/// long. Returns the rest of the stream up to `end`.
async fn read_slowly(n: usize, max_wait: Duration, end: &str) -> String {
    let (mocks, server) = server(MockModels::default(), HostTimeouts { max_wait, ..timeouts() }).await;
    let prompt: Vec<u32> = (5..355).collect();
    let body = json!({"model": "first", "prompt": prompt, "echo": true, "logprobs": 20, "max_tokens": 4, "n": n});
    let slow = post_slowly(&server, COMPLETIONS, &streamed(&body)).await;
    // The answer has begun once its first event arrives.
    let (mut begun, mut begin) = (0, vec![0; 4096]);
    while !String::from_utf8_lossy(&begin[..begun]).contains("data: ") {
        begun = slow.peek(&mut begin).await.unwrap();
        tokio::time::sleep(milliseconds(5)).await;
    }
    let answer = tokio::time::timeout(Duration::from_secs(300), answer_of(&server, "second"));
    assert_eq!(answer.await.expect("it does not wait for the slow client"), "I am org/second.");
    assert_eq!(mocks.log(), ["load first", "unload first", "load org/second"]);
    let (mut text, mut buffer) = (String::new(), vec![0; 1 << 16]);
    let rest = async {
        while !text.contains(end) {
            slow.readable().await.unwrap();
            if let Ok(count) = slow.try_read(&mut buffer) {
                assert!(count > 0, "{text}");
                text += &String::from_utf8_lossy(&buffer[..count]);
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), rest).await.expect("the rest");
    assert!(text.len() > 140_000, "{}", text.len());
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_client_does_not_hold_the_model() {
    read_slowly(1, Duration::from_secs(900), "data: [DONE]").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_client_loses_model_between_choices() {
    let text = read_slowly(3, milliseconds(300), "model_unloaded").await;
    assert!(!text.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_load_is_reported() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let error = server.refused(CHAT, &ask("broken"), 500).await;
    assert_eq!(error["code"], "model_not_loaded");
    assert!(error["message"].as_str().unwrap().contains("do not fit together"), "{error}");
    let text = server.post(CHAT, &streamed(&ask("broken"))).await.text().await;
    assert!(text.contains("model_not_loaded") && !text.contains("[DONE]"), "{text}");
    let health = server.get("/health").await;
    assert_eq!((health.status, health.json().await["model"].clone()), (200, Value::Null));
    assert_eq!(answer_of(&server, "anything").await, "I am first.", "an unknown name gets the last loaded model");
    let (broken, first) = (ask("broken"), ask("first"));
    let (refused, answered) = tokio::join!(server.post(CHAT, &broken), server.post(CHAT, &first));
    assert_eq!((refused.status, answered.status), (500, 200), "a request that waited during the failed load");
    let loads: Vec<String> = mocks.log().into_iter().filter(|event| event.starts_with("load")).collect();
    assert!((2..=3).contains(&loads.len()) && loads.iter().all(|load| load == "load first"), "{loads:?}");
}

/// Codex shortens a conversation only after `response.failed` with the code of a full context.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_responses_stream_keeps_error_fields() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let long = json!({"model": "second", "input": "word ".repeat(3000)});
    let mut body = long.clone();
    let mut errors = Vec::new();
    for is_held in [true, false] {
        let held = is_held.then(|| mocks.hold_loads());
        let failed = async {
            let events = server.events(RESPONSES, &body).await;
            let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
            assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
            assert_eq!(kinds.last(), Some(&"response.failed"));
            assert!(events.iter().enumerate().all(|(number, event)| event["sequence_number"] == number), "{events:?}");
            events.last().unwrap()["response"].clone()
        };
        let release = async {
            tokio::time::sleep(milliseconds(100)).await;
            drop(held);
        };
        let (failed, ()) = tokio::join!(failed, release);
        assert_eq!(failed["status"], "failed");
        errors.push(failed["error"].clone());
        body = with(body, json!({"model": "broken"}));
    }
    assert_eq!(errors[1]["code"], "model_not_loaded");
    answer_of(&server, "second").await;
    let of_loaded = server.refused(RESPONSES, &long, 400).await;
    assert_eq!((&of_loaded["code"], &of_loaded["param"]), (&json!("context_length_exceeded"), &json!("input")));
    assert_eq!(errors[0], of_loaded);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_degraded_after_failed_load() {
    let (mocks, server) = server(MockModels { breaks: true, ..MockModels::default() }, timeouts()).await;
    server.ask("/models/unload", &json!({"model": "first"})).await;
    assert_eq!(server.post(CHAT, &ask("first")).await.status, 500);
    let health = server.get("/health").await;
    assert_eq!((health.status, health.json().await["status"].clone()), (503, json!("degraded")));
    assert_eq!(answer_of(&server, "second").await, "I am org/second.");
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(mocks.log(), ["load first", "unload first", "load org/second"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alternating_clients_do_not_reload_each_time() {
    let (max_wait, min_idle) = (milliseconds(600), milliseconds(200));
    let (mocks, server) = server(MockModels::default(), HostTimeouts { max_wait, min_idle, ..timeouts() }).await;
    let server = Arc::new(server);
    let start = Instant::now();
    let client = |model: &'static str, count: usize| {
        let server = server.clone();
        tokio::spawn(async move {
            for _ in 0..count {
                assert_eq!(answer_of(&server, model).await, format!("I am {model}."));
                tokio::time::sleep(milliseconds(10)).await;
            }
        })
    };
    let (one, other) = (client("first", 60), client("org/second", 60));
    one.await.unwrap();
    other.await.unwrap();
    // A model is replaced when it was idle for `min_idle` or a request has waited for `max_wait`, so at most once per
    // 200 ms. On a slow machine the test takes longer, so more replacements are allowed.
    let max_loads = 2 + 2 * start.elapsed().as_millis() / min_idle.as_millis();
    let loads = mocks.log().iter().filter(|event| event.starts_with("load")).count() as u128;
    assert!((2..=max_loads).contains(&loads), "{loads} loads for 120 requests, not {max_loads}: {:?}", mocks.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_served_after_patience() {
    // `first` is never idle for the time `min_idle`, after which a waiting request may replace a model.
    let (max_wait, min_idle) = (milliseconds(300), Duration::from_secs(600));
    let (_, server) = server(MockModels::default(), HostTimeouts { max_wait, min_idle, ..timeouts() }).await;
    let server = Arc::new(server);
    let busy = {
        let server = server.clone();
        tokio::spawn(async move {
            loop {
                answer_of(&server, "first").await;
            }
        })
    };
    tokio::time::sleep(milliseconds(100)).await;
    let start = Instant::now();
    assert_eq!(answer_of(&server, "second").await, "I am org/second.");
    assert!(start.elapsed() >= max_wait && start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    busy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_model_is_unloaded() {
    let keep_alive = milliseconds(300);
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    let asked = Instant::now();
    assert_eq!(answer_of(&server, "first").await, "I am first.");
    // On a busy machine, a request may come so late that the model is already unloaded.
    server.state.models.set_timeouts(HostTimeouts { keep_alive: Some(keep_alive), ..timeouts() });
    wait_until(|| mocks.log().len() > 1, || format!("{:?}", mocks.log())).await;
    assert_eq!(mocks.log(), ["load first", "unload first"]);
    assert!(asked.elapsed() >= keep_alive, "{:?}", asked.elapsed());
    let health = server.get("/health").await.json().await;
    assert_eq!((health["status"].clone(), health["next"].clone()), (json!("ok"), json!("first")));
    assert_eq!(answer_of(&server, "whatever").await, "I am first.");
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_model_accepts_requests_before_its_unload() {
    // The model evaluates enough tokens for a second answer, and too few to end the first.
    let stops_at = Arc::new(AtomicUsize::new(100));
    let mocks = MockModels { parallel: 2, stops_at: Some(stops_at.clone()), ..MockModels::default() };
    let (mocks, server) = server(mocks, timeouts()).await;
    // Without an end-of-text token, the answer has its maximum length.
    let long = with(ask("first"), json!({"max_tokens": 900, "logit_bias": {EOS.to_string(): -100}}));
    let stream = server.post(CHAT, &streamed(&long)).await;
    assert_eq!(server.ask("/models/unload", &json!({"model": "first"})).await["success"], true);
    stops_at.fetch_add(400, Relaxed);
    assert_eq!(answer_of(&server, "first").await, "I am first.");
    assert_eq!((mocks.log(), server.state.models.model().unwrap().engine.load().0), (vec!["load first".into()], 1));
    stops_at.store(usize::MAX, Relaxed);
    assert!(stream.text().await.ends_with("data: [DONE]\n\n"));
    assert_eq!(answer_of(&server, "first").await, "I am first.");
    assert_eq!(mocks.log(), ["load first", "unload first", "load first"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn exact_name_wins_over_loaded_model() {
    let (mocks, server) = server(MockModels { also: Some("org/first"), ..MockModels::default() }, timeouts()).await;
    assert_eq!(server.post("/models/unload", &json!({"model": "org/first"})).await.status, 404);
    assert_eq!(answer_of(&server, "other/first").await, "I am first.", "an unlisted name means the loaded model");
    assert_eq!(answer_of(&server, "org/first").await, "I am org/first.");
    assert_eq!(answer_of(&server, "FIRST").await, "I am first.");
    let expected = ["load first", "unload first", "load org/first", "unload org/first", "load first"];
    assert_eq!(mocks.log(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_hub_id_loads_nothing() {
    let (mocks, server) = server(MockModels::default(), timeouts()).await;
    server.ask("/models/unload", &json!({"model": "first"})).await;
    wait_until(|| mocks.log().len() == 2, || format!("{:?}", mocks.log())).await;
    let body = ask("openai/gpt-4");
    for body in [&body, &streamed(&body)] {
        assert_eq!(server.refused(CHAT, body, 404).await["code"], "model_not_found");
    }
    assert_eq!(mocks.log(), ["load first", "unload first"]);
    assert_eq!(answer_of(&server, "openai/first").await, "I am first.");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_unload_nothing() {
    let mocks = MockModels { has_invalid_settings: true, ..MockModels::default() };
    let (mocks, server) = server(mocks, timeouts()).await;
    let (broken, first) = (ask("broken"), ask("first"));
    let (refused, answered) = tokio::join!(server.post(CHAT, &broken), server.post(CHAT, &first));
    assert_eq!((refused.status, answered.status), (500, 200));
    let message = refused.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("settings are invalid"), "{message}");
    assert_eq!(answer_of(&server, "first").await, "I am first.");
    assert_eq!(mocks.log(), ["load first"]);
}

/// A model writes its prompt cache while it is unloaded. Clearing the cache must wait for this write.
#[tokio::test(flavor = "multi_thread")]
async fn cache_is_cleared_after_unload() {
    let mocks = MockModels { unload_time: milliseconds(200), ..MockModels::default() };
    let (mocks, server) = server(mocks, timeouts()).await;
    assert_eq!(server.ask("/models/unload", &json!({"model": "first"})).await["success"], true);
    wait_until(|| server.state.models.model().is_none(), || "the model is still loaded".into()).await;
    assert_eq!(server.send("DELETE", "/prompt_cache", &[], None).await.status, 204);
    assert_eq!(mocks.log(), ["load first", "unload first", "clear"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_refuses_waiting_request() {
    let (mocks, mut server) = server(MockModels::default(), timeouts()).await;
    let held = mocks.hold_loads();
    let body = ask("second");
    let waiting = server.refused(CHAT, &body, 503);
    let stop = async {
        // The request waits for its model.
        wait_until(|| mocks.log().len() == 2, || format!("{:?}", mocks.log())).await;
        server.state.shut_down();
    };
    let (error, ()) = tokio::join!(waiting, stop);
    assert_eq!(error["code"], "shutting_down");
    drop(held);
    server.shut_down();
    server.wait_for_end().await;
}
