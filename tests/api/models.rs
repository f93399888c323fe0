//! Several models on one machine, one of them in memory: who waits for whom, what clients are told meanwhile, and what is
//! let go when.

use super::{
    connections::{head, write},
    server::{EOS, Server, Setup, VOCAB, demo},
};
use moestro::{
    chat::{Template, Tokenizer, grammar::GrammarCompiler},
    engine::{self, Options, Sampling, mock::MockModel},
    http::{HostTimeouts, HostedModel, LoadedModel, ModelCard, ModelEntry, ModelHost, ModelLoader, ServerState},
    metrics::Metrics,
};
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::net::TcpSocket;

const CHAT: &str = "/v1/chat/completions";

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Mock models that say which of them they are. `broken` cannot be loaded.
#[derive(Default)]
struct Aviary {
    /// Loads and unloads, in order.
    log: Mutex<Vec<String>>,
    /// The time that a load takes, but that of `first`.
    slow: Duration,
    /// The time that an unload takes.
    lingering: Duration,
}

impl Aviary {
    fn note(&self, what: String) {
        self.log.lock().unwrap().push(what);
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }
}

/// `self` in an `Arc`, which goes on in the closures that unload.
struct Keeper(Arc<Aviary>);

impl ModelLoader for Keeper {
    fn list(&self) -> Vec<ModelEntry> {
        let listed = |id: &str| ModelEntry { id: id.into(), created: SystemTime::UNIX_EPOCH };
        ["first", "org/second", "broken"].map(listed).into()
    }

    fn load(&self, id: &str) -> Result<HostedModel, String> {
        thread::sleep(if id == "first" { Duration::ZERO } else { self.0.slow });
        if id == "broken" {
            return Err("its shards do not fit together".into());
        }
        self.0.note(format!("load {id}"));
        let tokenizer = Arc::new(Tokenizer::load(&demo()).unwrap());
        let answer = Some(tokenizer.encode(&format!("</think>\n\nI am {id}.")).unwrap());
        let delay = milliseconds(2);
        let mock = MockModel { vocab: VOCAB, context: 512, chunk: 32, eos: EOS, answer, delay, ..MockModel::default() };
        let options = Options { eos: vec![EOS], ..Options::default() };
        let (engine, worker) = engine::spawn(mock, options, Metrics::new("0", "cpu")).unwrap();
        let app = LoadedModel {
            engine,
            grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), &[EOS])),
            tokenizer,
            template: Some(Template::load(&demo()).unwrap()),
            card: ModelCard { id: id.into(), created: 1, experts_per_token: None, quantisation: None },
            defaults: Sampling::greedy(),
            thinking: None,
            plan: json!({}),
        };
        let (aviary, name) = (self.0.clone(), id.to_owned());
        let unload = move || {
            worker.join().unwrap();
            thread::sleep(aviary.lingering);
            aviary.note(format!("unload {name}"));
        };
        Ok(HostedModel { id: id.into(), model: app, unload: Box::new(unload) })
    }

    fn clear_prompt_caches(&self) -> Result<(), String> {
        self.0.note("forget".into());
        Ok(())
    }
}

/// A server with the aviary, `first` loaded.
async fn server(aviary: Aviary, times: HostTimeouts) -> (Arc<Aviary>, Server) {
    let aviary = Arc::new(aviary);
    let keeper = Arc::new(Keeper(aviary.clone()));
    let first = keeper.load("first").unwrap();
    let configure = move |state: &mut ServerState| {
        state.models = ModelHost::new(keeper, times, 8);
        state.models.install(first);
    };
    let setup = Setup { loading: true, ..Setup::default() };
    (aviary, setup.start_with(configure).await)
}

fn times() -> HostTimeouts {
    HostTimeouts { linger: milliseconds(50), ..HostTimeouts::default() }
}

fn ask(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "Who?"}]})
}

async fn told(server: &Server, model: &str) -> String {
    let answer = server.ask(CHAT, &ask(model)).await;
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_the_model_that_it_names() {
    let (aviary, server) = server(Aviary::default(), times()).await;
    let states = |list: Value| {
        let state = |model: &Value| format!("{} {}", model["id"].as_str().unwrap(), model["loaded"]);
        list["data"].as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    let list = server.get("/v1/models").await.json().await;
    assert_eq!(states(list), ["first true", "org/second false", "broken false"]);
    assert_eq!(server.get("/v1/models/org/second").await.json().await["id"], "org/second");
    for (asked, meant) in [("first", "first"), ("second", "org/second"), ("gpt-4o", "org/second"), ("first", "first")] {
        assert_eq!(told(&server, asked).await, format!("I am {meant}."), "{asked}");
    }
    // The one before is gone before the next one comes.
    let done = ["load first", "unload first", "load org/second", "unload org/second", "load first"];
    assert_eq!(aviary.log(), done);
    assert_eq!(server.post(CHAT, &ask("org/third")).await.status, 404);
    let list = server.get("/v1/models").await.json().await;
    assert_eq!(states(list), ["first true", "org/second false", "broken false"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_waits_for_its_model() {
    let (aviary, server) = server(Aviary::default(), times()).await;
    let messages = json!({"model": "second", "max_tokens": 20, "messages": [{"role": "user", "content": "Who?"}]});
    assert_eq!(server.ask("/v1/messages", &messages).await["content"][0]["text"], "I am org/second.");
    let responses = server.ask("/v1/responses", &json!({"model": "first", "input": "Who?"})).await;
    assert_eq!(responses["model"], "first");
    assert_eq!(server.ask("/v1/completions", &json!({"model": "second", "prompt": "x"})).await["model"], "org/second");
    server.ask("/tokenize", &json!({"model": "first", "prompt": "x"})).await;
    assert_eq!(aviary.log().len(), 9, "{:?}", aviary.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_waits_is_kept_alive_and_one_that_leaves_loads_nothing() {
    let slow = Duration::from_millis(5500);
    let (aviary, server) = server(Aviary { slow, ..Aviary::default() }, times()).await;
    let mut body = ask("second");
    body["stream"] = true.into();
    let begun = Instant::now();
    let answer = server.post(CHAT, &body).await;
    assert_eq!(answer.status, 200);
    assert!(begun.elapsed() < Duration::from_secs(2), "the head comes before the model");
    // The first one is gone by then; somebody asks for it again and does not wait.
    tokio::time::sleep(milliseconds(500)).await;
    let left = tokio::time::timeout(milliseconds(100), server.post(CHAT, &ask("first"))).await;
    assert!(left.is_err());
    let text = answer.text().await;
    assert!(text.starts_with(": keep-alive\n\n"), "{text}");
    assert!(text.contains("second") && text.ends_with("data: [DONE]\n\n"), "{text}");
    tokio::time::sleep(milliseconds(300)).await;
    assert_eq!(aviary.log(), ["load first", "unload first", "load org/second"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_model_is_part_of_a_requests_time() {
    let request = Some(milliseconds(200));
    let (_, server) =
        server(Aviary { slow: milliseconds(900), ..Aviary::default() }, HostTimeouts { request, ..times() }).await;
    let begun = Instant::now();
    let answer = server.post(CHAT, &ask("second")).await;
    assert_eq!((answer.status, answer.json().await["error"]["code"].clone()), (504, json!("timeout")));
    let mut stream = ask("second");
    stream["stream"] = true.into();
    let text = server.post(CHAT, &stream).await.text().await;
    assert!(text.contains("\"timeout\"") && !text.contains("[DONE]"), "{text}");
    assert!(begun.elapsed() >= milliseconds(400), "{:?}", begun.elapsed());
}

/// Asks `first` for `n` answers of 150 KB and hardly reads until `second` has been heard, which must not take long. Returns
/// the rest up to `end`.
async fn reads_slowly(n: usize, patience: Duration, end: &str) -> String {
    let (aviary, server) = server(Aviary::default(), HostTimeouts { patience, ..times() }).await;
    let prompt: Vec<u32> = (5..355).collect();
    let body = json!({"model": "first", "prompt": prompt, "echo": true, "logprobs": 20, "max_tokens": 4, "n": n,
                      "stream": true})
    .to_string();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    let slow = socket.connect(server.address).await.unwrap();
    write(&slow, head("/v1/completions", body.len()).as_bytes()).await;
    write(&slow, body.as_bytes()).await;
    while server.state.models.model().unwrap().engine.load() == (0, 0) {
        tokio::time::sleep(milliseconds(5)).await;
    }
    let told = tokio::time::timeout(Duration::from_secs(5), told(&server, "second"));
    assert_eq!(told.await.expect("it has not to wait for who reads slowly"), "I am org/second.");
    assert_eq!(aviary.log(), ["load first", "unload first", "load org/second"]);
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
    tokio::time::timeout(Duration::from_secs(5), rest).await.expect("the rest");
    assert!(text.len() > 140_000, "{}", text.len());
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_slowly_has_the_answer_and_not_the_model() {
    reads_slowly(1, Duration::from_secs(30), "data: [DONE]").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_answer_of_who_reads_slowly_is_waited_for_with_patience() {
    let text = reads_slowly(3, milliseconds(300), "model_unloaded").await;
    assert!(!text.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_loaded_is_said_and_the_next_one_is_loaded() {
    let (_, server) = server(Aviary::default(), times()).await;
    let answer = server.post(CHAT, &ask("broken")).await;
    assert_eq!(answer.status, 500);
    let error = answer.json().await["error"].clone();
    assert_eq!(error["code"], "model_not_loaded");
    assert!(error["message"].as_str().unwrap().contains("do not fit together"), "{error}");
    let mut stream = ask("broken");
    stream["stream"] = true.into();
    let text = server.post(CHAT, &stream).await.text().await;
    assert!(text.contains("model_not_loaded") && !text.contains("[DONE]"), "{text}");
    let health = server.get("/health").await;
    assert_eq!((health.status, health.json().await["model"].clone()), (200, Value::Null));
    assert_eq!(told(&server, "anything").await, "I am first.", "by another name the one before is meant");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_in_turn_do_not_reload_each_time() {
    let (patience, linger) = (milliseconds(600), milliseconds(200));
    let (aviary, server) = server(Aviary::default(), HostTimeouts { patience, linger, ..times() }).await;
    let server = Arc::new(server);
    let begun = Instant::now();
    let client = |model: &'static str, count: usize| {
        let server = server.clone();
        tokio::spawn(async move {
            for _ in 0..count {
                assert_eq!(told(&server, model).await, format!("I am {model}."));
                tokio::time::sleep(milliseconds(10)).await;
            }
        })
    };
    let (one, other) = (client("first", 60), client("org/second", 60));
    one.await.unwrap();
    other.await.unwrap();
    // A model comes back once the other one has lingered, or its own client has waited: after 200 ms at the soonest. On a
    // machine that takes its time this happens more often.
    let most = 2 + 2 * begun.elapsed().as_millis() / linger.as_millis();
    let loads = aviary.log().iter().filter(|what| what.starts_with("load")).count() as u128;
    assert!((2..=most).contains(&loads), "{loads} loads for 120 requests, not {most}: {:?}", aviary.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_who_has_waited_long_enough_comes_next() {
    let (_, server) = server(Aviary::default(), HostTimeouts { patience: milliseconds(300), ..times() }).await;
    let server = Arc::new(server);
    let busy = {
        let server = server.clone();
        // Never idle for as long as a model lingers.
        tokio::spawn(async move {
            loop {
                told(&server, "first").await;
            }
        })
    };
    tokio::time::sleep(milliseconds(100)).await;
    let begun = Instant::now();
    assert_eq!(told(&server, "second").await, "I am org/second.");
    assert!(begun.elapsed() > milliseconds(250) && begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    busy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_asks_and_it_goes() {
    let keep_alive = Some(milliseconds(300));
    let (aviary, server) = server(Aviary::default(), HostTimeouts { keep_alive, ..times() }).await;
    assert_eq!(told(&server, "first").await, "I am first.");
    tokio::time::sleep(milliseconds(100)).await;
    assert_eq!(aviary.log(), ["load first"]);
    for _ in 0..100 {
        if aviary.log().len() > 1 {
            break;
        }
        tokio::time::sleep(milliseconds(30)).await;
    }
    assert_eq!(aviary.log(), ["load first", "unload first"]);
    let health = server.get("/health").await.json().await;
    assert_eq!((health["status"].clone(), health["next"].clone()), (json!("ok"), json!("first")));
    assert_eq!(told(&server, "whatever").await, "I am first.");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_can_be_told_to_go() {
    let (aviary, server) = server(Aviary::default(), times()).await;
    assert_eq!(server.post("/models/unload", &json!({"model": "second"})).await.status, 404);
    assert_eq!(server.ask("/models/unload", &json!({"model": "first"})).await["success"], true);
    assert_eq!(told(&server, "first").await, "I am first.");
    assert_eq!(aviary.log(), ["load first", "unload first", "load first"]);
}

/// A model that goes writes down what it remembers.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_forgotten_when_the_model_that_goes_is_gone() {
    let (aviary, server) = server(Aviary { lingering: milliseconds(200), ..Aviary::default() }, times()).await;
    assert_eq!(server.ask("/models/unload", &json!({"model": "first"})).await["success"], true);
    while server.state.models.model().is_some() {
        tokio::time::sleep(milliseconds(5)).await;
    }
    assert_eq!(server.send("DELETE", "/prompt_cache", &[], None).await.status, 204);
    assert_eq!(aviary.log(), ["load first", "unload first", "forget"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_model_when_the_server_goes_is_told() {
    let (_, mut server) = server(Aviary { slow: milliseconds(500), ..Aviary::default() }, times()).await;
    let body = ask("second");
    let waiting = server.post(CHAT, &body);
    let stop = async {
        tokio::time::sleep(milliseconds(150)).await;
        server.state.shut_down();
    };
    let (answer, ()) = tokio::join!(waiting, stop);
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json().await["error"]["code"], "shutting_down");
    server.shut_down();
    server.ended().await;
}
