//! HTTP overhead: time per token of the demo model from the engine directly, and through the server as a chat stream.
//!
//! Prints both times and their ratio. The client runs on the same machine, so its cost is included. Both measurements
//! alternate, so that other load affects both. criterion cannot alternate.

use moestro::http::{self, LoadedModel, ModelCard, RequestLimits, ServerState};
use moestro_base::metrics::Metrics;
use moestro_chat::{Conversation, Template, Tokenizer, grammar::GrammarCompiler};
use moestro_engine::{self as engine, Event, Handle, Options, Request, Sampling};
use moestro_model::model::{self, Qwen};
use serde_json::{Map, Value, json};
use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Instant,
};

const ROUNDS: usize = 60;
const EOS: [u32; 2] = [2040, 2038];

fn main() {
    let dir = test_support::demo();
    let metrics = Metrics::new("bench", "cpu");
    let model = Qwen::load(&dir, &model::LoadOptions::default(), &metrics, &mut |_, _| {}).expect("the demo model");
    let options = Options { eos: EOS.into(), ..Options::default() };
    let (engine, _worker) = engine::spawn(model, options, metrics.clone()).expect("a thread");
    let tokenizer = Arc::new(Tokenizer::load(&dir).expect("a tokenizer"));
    let template = Template::load(&dir).expect("a template");

    let messages = [json!({"role": "user", "content": "Tell me a story about Paul and a dragon."})];
    let conversation =
        Conversation { messages: &messages, tools: None, kwargs: &Map::new(), add_generation_prompt: true };
    let prompt = template.render(&conversation).expect("a prompt");
    let ids = tokenizer.encode(&prompt).expect("ids");
    let body =
        json!({"messages": messages, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}});
    let body = body.to_string();

    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let address = runtime.block_on(serve(engine.clone(), tokenizer, template, metrics));

    let (mut direct, mut served, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (engine, server) = (time_engine(&engine, &ids), time_stream(address, &body));
        // The first round only fills caches.
        if round > 0 {
            direct.push(engine);
            served.push(server);
            ratios.push(server / engine);
        }
    }
    println!("engine alone      {:>8.3} ms per token", median(&mut direct) * 1e3);
    println!("as a chat stream  {:>8.3} ms per token", median(&mut served) * 1e3);
    println!("ratio             {:>8.3} (median of {ROUNDS} pairs)", median(&mut ratios));
}

async fn serve(engine: Handle, tokenizer: Arc<Tokenizer>, template: Template, metrics: Arc<Metrics>) -> SocketAddr {
    let state = Arc::new(ServerState::new(metrics, None, None));
    state.serve_model(LoadedModel {
        engine,
        grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), &[2040])),
        tokenizer,
        template: Some(template),
        card: ModelCard { id: "demo".into(), created: 0, experts_per_token: None, quantization: None },
        defaults: Sampling::default(),
        thinking: None,
        limits: RequestLimits::default(),
        plan: Value::Null,
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(http::serve(vec![(listener, http::ApiSet::Standard)], state, std::future::pending()));
    address
}

/// Seconds per token without HTTP, from the first token to the last.
fn time_engine(engine: &Handle, ids: &[u32]) -> f64 {
    let request = Request { cache_prompt: false, ..Request::new(ids.to_vec(), 400, Sampling::greedy()) };
    let mut events = engine.submit(request).expect("a place in the queue");
    let (mut first, mut tokens) = (None, 0u32);
    loop {
        match events.blocking_recv().expect("an event") {
            Event::Token { .. } => {
                first.get_or_insert_with(Instant::now);
                tokens += 1;
            }
            Event::Done { .. } => break,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    first.expect("a token").elapsed().as_secs_f64() / f64::from(tokens)
}

/// Seconds per token as a client of the server sees them.
fn time_stream(address: SocketAddr, body: &str) -> f64 {
    let mut connection = TcpStream::connect(address).expect("a connection");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\
                content-type: application/json\r\ncontent-length:";
    write!(connection, "{head} {}\r\n\r\n{body}", body.len()).expect("a request");
    let (mut first, mut last, mut usage) = (None, None, String::new());
    for line in BufReader::new(connection).lines().map_while(Result::ok) {
        if line.starts_with("data: {") {
            // The first chunk arrives with the first token.
            first.get_or_insert_with(Instant::now);
            usage = line;
        } else if line == "data: [DONE]" {
            last = Some(Instant::now());
            break;
        }
    }
    let usage: Value = serde_json::from_str(&usage["data: ".len()..]).expect("a chunk");
    let tokens = usage["usage"]["completion_tokens"].as_f64().expect("a count");
    (last.expect("an end") - first.expect("a chunk")).as_secs_f64() / tokens
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
