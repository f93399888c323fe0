//! Tests that the prompt cache never changes an answer.
//!
//! Random conversations grow, branch and restart, and each answer is compared with the answer of an engine without a
//! cache. In the conversation of an agent, no token is computed twice. A killed server finds its snapshots after a
//! restart.

use crate::{
    common::{Dice, fixtures::DEMO, load_with},
    process::{Process, agent},
};
use moestro_base::metrics::Metrics;
use moestro_chat::{Conversation, Speaker, Template, Tokenizer, message_ends};
use moestro_compute::ops::KvBits;
use moestro_engine::{
    self as engine, Boundary, BoundaryKind, DiskCacheOptions, Event, Handle, Request, Sampling, Worker,
};
use moestro_model::{
    error::ModelError,
    model::{HiddenStates, KvPage, LoadOptions, Logits, Model, ModelInfo, NextToken, PassHooks, Qwen, Rows, Snapshot},
};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use test_support::random_cases::seeds;

/// The demo model, with a count of the tokens that it computes.
struct CountingModel {
    qwen: Qwen,
    tokens: Arc<AtomicUsize>,
}

impl HiddenStates for CountingModel {}

impl Model for CountingModel {
    type State = <Qwen as Model>::State;

    /// The chunks are small, so that snapshots are taken at different positions within a chunk.
    fn info(&self) -> ModelInfo {
        ModelInfo { chunk: 96, ..self.qwen.info() }
    }

    fn start(&mut self) -> Result<Self::State, ModelError> {
        self.qwen.start()
    }

    fn forward_with(
        &mut self,
        state: &mut Self::State,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        self.tokens.fetch_add(ids.len(), Ordering::Relaxed);
        self.qwen.forward_with(state, ids, rows, hooks)
    }

    fn forward_each(&mut self, rows: &mut [(&mut Self::State, u32)], next: &[NextToken]) -> Result<Logits, ModelError> {
        self.tokens.fetch_add(rows.len(), Ordering::Relaxed);
        self.qwen.forward_each(rows, next)
    }

    fn snapshot(&mut self, state: &mut Self::State) -> Result<Snapshot, ModelError> {
        self.qwen.snapshot(state)
    }

    fn restore(&mut self, snapshot: &Snapshot, reuse: Option<Self::State>) -> Result<Self::State, ModelError> {
        self.qwen.restore(snapshot, reuse)
    }

    fn read_page(&mut self, page: &KvPage) -> Result<Vec<u8>, ModelError> {
        self.qwen.read_page(page)
    }

    fn make_page(&mut self, bytes: Vec<u8>) -> Result<Arc<KvPage>, ModelError> {
        self.qwen.make_page(bytes)
    }
}

struct Server {
    engine: Handle,
    worker: Worker,
    tokens: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

impl Server {
    fn new(states: u64, dir: Option<&Path>) -> Self {
        Self::with_kv_bits(KvBits::Sixteen, states, dir)
    }

    /// Starts a server whose cache has room for `states` snapshots of 400 tokens. Loads the snapshots in `dir`.
    fn with_kv_bits(kv_bits: KvBits, states: u64, dir: Option<&Path>) -> Self {
        let mut options = LoadOptions { threads: Some(2), kv_bits, ..LoadOptions::default() };
        options.plan.context = Some(4096);
        let qwen = load_with(Path::new(DEMO), options);
        let size = qwen.info().snapshot_size;
        let tokens = Arc::new(AtomicUsize::new(0));
        let metrics = Metrics::new("test", "cpu");
        let options = engine::Options {
            eos: vec![2040],
            prompt_cache: states * size.bytes(400, 0),
            disk_cache: dir.map(|dir| DiskCacheOptions {
                dir: dir.to_owned(),
                limit: 64 << 20,
                key: "the demo".into(),
            }),
            ..engine::Options::default()
        };
        let (engine, worker) =
            engine::spawn(CountingModel { qwen, tokens: tokens.clone() }, options, metrics.clone()).unwrap();
        Self { engine, worker, tokens, metrics }
    }

    /// Writes the remaining snapshots and stops the server.
    fn stop(self) {
        self.engine.drain();
        self.worker.join().unwrap();
    }

    /// Returns the answer, each token with the bits of its log-probability, and the number of cached prompt tokens.
    fn ask(
        &self,
        ids: &[u32],
        boundaries: &[Boundary],
        max_tokens: usize,
        cache_prompt: bool,
    ) -> (Vec<(u32, u32)>, usize) {
        let request = Request {
            logprobs: Some(0),
            ignore_eos: true,
            boundaries: boundaries.to_vec(),
            cache_prompt,
            ..Request::new(ids.to_vec(), max_tokens, Sampling::greedy())
        };
        let mut events = self.engine.submit(request).unwrap();
        let (mut answer, mut cached) = (Vec::new(), 0);
        loop {
            match events.blocking_recv().unwrap() {
                Event::Started { cached_tokens, .. } => cached = cached_tokens,
                Event::Token { id, logprobs } => answer.push((id, logprobs.unwrap().logprob.to_bits())),
                Event::Done { .. } => return (answer, cached),
                Event::Failed(error) => panic!("{error}"),
                Event::Prefilled { .. } | Event::Prompt(_) => {}
            }
        }
    }
}

/// A conversation: its tokens, and the ends of its messages.
#[derive(Clone, Default)]
struct Dialogue {
    ids: Vec<u32>,
    ends: Vec<Boundary>,
}

impl Dialogue {
    fn say(&mut self, ids: &[u32], kind: BoundaryKind) {
        self.ids.extend_from_slice(ids);
        self.ends.push(Boundary { at: self.ids.len(), kind });
    }

    /// The conversation up to the end of a message.
    fn until(&self, message: usize) -> Self {
        let ends = self.ends[..message].to_vec();
        Self { ids: self.ids[..ends.last().map_or(0, |end| end.at)].to_vec(), ends }
    }
}

/// Runs one random walk: conversations grow, branch, are edited or repeated, and continue with or without the last
/// answer.
fn walk(seed: u64, mut cached: Server, fresh: &Server, restart: &dyn Fn(Server) -> Server) -> Server {
    let mut dice = Dice(seed);
    let system = dice.tokens(30 + 40 * (seed % 7) as usize);
    let mut dialogues: Vec<Dialogue> = Vec::new();
    for step in 0..12 {
        if dice.roll(8) == 0 {
            cached = restart(cached);
        }
        let number = dice.roll(dialogues.len() + 1);
        let mut dialogue = match dialogues.get(number) {
            None => {
                let mut dialogue = Dialogue::default();
                dialogue.say(&system, BoundaryKind::System);
                dialogue
            }
            Some(dialogue) => match dice.roll(4) {
                // In this case, an earlier message is edited.
                0 => dialogue.until(1 + dice.roll(dialogue.ends.len())),
                _ => dialogue.clone(),
            },
        };
        let retry = dialogues.get(number).is_some() && dice.roll(4) == 0;
        if !retry {
            let count = 1 + dice.roll(60);
            let kind = if dice.roll(2) == 0 { BoundaryKind::Query } else { BoundaryKind::Message };
            let message = dice.tokens(count);
            dialogue.say(&message, kind);
        }
        // The added tokens start the answer's message.
        let prompt = [&dialogue.ids[..], &[2039, 77]].concat();
        let max_tokens = 1 + dice.roll(6);
        let (expected, none) = fresh.ask(&prompt, &[], max_tokens, false);
        assert_eq!(none, 0, "the other engine has no cache");
        let (answer, _) = cached.ask(&prompt, &dialogue.ends, max_tokens, true);
        assert_eq!(answer, expected, "walk {seed}, step {step}, prompt of {}", prompt.len());
        if dice.roll(2) == 0 {
            // The client sends the answer back unchanged.
            let answer: Vec<u32> = answer.iter().map(|token| token.0).collect();
            dialogue.say(&[&[2039, 77], &answer[..]].concat(), BoundaryKind::Message);
        }
        match dialogues.get_mut(number) {
            Some(old) if dice.roll(3) > 0 => *old = dialogue,
            _ => dialogues.push(dialogue),
        }
    }
    cached
}

#[test]
fn cache_does_not_change_answers() {
    // The first three are known to evict snapshots and to read them from the disk.
    let walks: Vec<u64> = (0..3).chain(seeds(3).map(|seed| 3 + seed)).collect();
    let (mut known, mut evicted, mut from_disk) = (0, 0, 0);
    // The caches have room for one snapshot, for three, and for all. The last two servers restart from time to time.
    for (part, states, bits) in [(0, 1, KvBits::Sixteen), (1, 3, KvBits::Eight), (2, 40, KvBits::Sixteen)] {
        let dir = tempfile::tempdir().unwrap();
        let fresh = Server::with_kv_bits(bits, 0, None);
        let start = || Server::with_kv_bits(bits, states, Some(dir.path()).filter(|_| states > 1));
        let (disk, lost) = (std::cell::Cell::new(0), std::cell::Cell::new((0, 0, 0)));
        let count = |server: &Server| {
            let (known, evicted, memory) = lost.get();
            let metrics = &server.metrics;
            disk.set(disk.get() + metrics.prompt_cache_hits_disk.get());
            lost.set((
                known + metrics.prompt_tokens_cached.get(),
                evicted + metrics.prompt_cache_evictions_memory.get(),
                memory + metrics.prompt_cache_hits_memory.get(),
            ));
        };
        let restart = |server: Server| {
            count(&server);
            server.stop();
            start()
        };
        let mut cached = start();
        for &seed in walks.iter().skip(part).step_by(3) {
            cached = walk(seed, cached, &fresh, &restart);
        }
        count(&cached);
        let status = cached.engine.prompt_cache();
        assert!(status.bytes <= status.limit, "{status:?}");
        let (tokens, gone, memory) = lost.get();
        assert!(memory > 0, "{states}");
        (known, evicted, from_disk) = (known + tokens, evicted + gone, from_disk + disk.get());
        cached.engine.clear_prompt_cache();
        assert_eq!(cached.engine.prompt_cache().bytes, 0);
    }
    println!("{known} tokens cached, {evicted} snapshots evicted, {from_disk} read from disk");
    assert!(known > 0 && evicted > 0 && from_disk > 0, "{known} {evicted} {from_disk}");
}

#[test]
fn agent_computes_only_new_tokens() {
    let tokenizer = Tokenizer::load(Path::new(DEMO)).unwrap();
    let template = Template::load(Path::new(DEMO)).unwrap();
    for reasoning in [true, false] {
        let server = Server::new(60, None);
        let (mut new, mut earlier) = (0, Vec::<Vec<u32>>::new());
        let mut generated = 0;
        for messages in agent(14, reasoning) {
            let kwargs = serde_json::Map::new();
            let text = template
                .render(&Conversation {
                    messages: &messages,
                    tools: None,
                    kwargs: &kwargs,
                    add_generation_prompt: true,
                })
                .unwrap();
            let ids = tokenizer.encode(&text).unwrap();
            let kind = |speaker| match speaker {
                Speaker::System => BoundaryKind::System,
                Speaker::User => BoundaryKind::Query,
                Speaker::Other => BoundaryKind::Message,
            };
            let ends: Vec<Boundary> = message_ends(&tokenizer, &ids)
                .into_iter()
                .map(|(at, speaker)| Boundary { at, kind: kind(speaker) })
                .collect();
            let shared = |other: &Vec<u32>| ids.iter().zip(other).take_while(|(a, b)| a == b).count();
            new += ids.len() - earlier.iter().map(shared).max().unwrap_or(0);
            generated += server.ask(&ids, &ends, 5, true).0.len() - 1;
            earlier.push(ids);
        }
        // The model evaluates every token of an answer except the last token.
        let computed = server.tokens.load(Ordering::Relaxed) - generated;
        let all: usize = earlier.iter().map(Vec::len).sum();
        let ratio = computed as f64 / new as f64;
        println!("{computed} tokens computed, {new} new, {all} sent: {ratio:.3}");
        assert!(ratio <= 1.05, "{computed} tokens computed, {new} new, {all} sent (reasoning: {reasoning})");
        assert_eq!(server.metrics.prompt_tokens_computed.get(), computed as u64);
        assert!(all > 3 * new, "the conversation must share most of its tokens");
    }
}

#[test]
fn killed_server_keeps_its_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let turns = agent(4, true);
    // The servers share a home directory, in which the program writes the demo's files. They identify the model.
    let home = tempfile::tempdir().unwrap();
    let serve = |dir: &Path| {
        let mut command = std::process::Command::new(crate::program::MOESTRO);
        command.env("HOME", home.path());
        Process::spawn(command, &["--memory-limit", "300M", "--prompt-cache-dir", dir.to_str().unwrap()])
    };
    let first = serve(dir.path());
    for messages in &turns[..3] {
        first.chat(messages);
    }
    // Snapshots are written shortly after the answer.
    let snapshots = |place: &str| first.metric(&format!("moestro_prompt_cache_checkpoints{{place=\"{place}\"}}"));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(300);
    while snapshots("disk") < snapshots("memory") {
        assert!(std::time::Instant::now() < deadline, "{}", first.ask("GET", "/metrics", ""));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(first);

    let second = serve(dir.path());
    // Send the last turn again. The whole prompt is cached except the start of the answer's message.
    let again = second.chat(&turns[2]);
    let [prompt, cached] =
        [&again["usage"]["prompt_tokens"], &again["usage"]["prompt_tokens_details"]["cached_tokens"]]
            .map(|count| count.as_u64().unwrap());
    assert!(prompt - cached < 8, "{again}");
    assert_eq!(second.metric("moestro_prompt_tokens_total{source=\"computed\"}"), prompt - cached);
    // In the next turn, only the answer and the tool result are new.
    let next = second.chat(&turns[3]);
    let known = next["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(known >= cached, "{next}");

    // The answers must equal the answers of a server without snapshots.
    let empty = tempfile::tempdir().unwrap();
    let fresh = serve(empty.path());
    assert_eq!(fresh.chat(&turns[2])["choices"], again["choices"]);
    let body = json!({"messages": turns[3], "temperature": 0, "max_tokens": 12, "cache_prompt": false});
    let other: Value = serde_json::from_str(&fresh.ask("POST", "/v1/chat/completions", &body.to_string())).unwrap();
    assert_eq!(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(other["choices"], next["choices"]);

    // After clearing, the cache is empty.
    assert_eq!(second.ask("DELETE", "/prompt_cache", ""), "");
    let health: Value = serde_json::from_str(&second.ask("GET", "/health", "")).unwrap();
    assert_eq!(health["prompt_cache"]["bytes"], 0);
    assert_eq!(health["prompt_cache"]["disk"]["bytes"], 0);
    assert_eq!(second.chat(&turns[3])["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    // Unloading the model, which begins when it is idle, writes the remaining snapshots. Clearing the cache then removes
    // them although no model is loaded.
    second.ask("POST", "/models/unload", &json!({"model": "moestro-demo"}).to_string());
    while files(dir.path()) == 0 {
        assert!(std::time::Instant::now() < deadline, "no snapshot was written");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(second.ask("DELETE", "/prompt_cache", ""), "");
    // A snapshot that was being written is removed when the write ends.
    while files(dir.path()) > 0 {
        assert!(std::time::Instant::now() < deadline, "{} files", files(dir.path()));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// The number of files of all keys below `root`.
fn files(root: &Path) -> usize {
    let below = |path: &Path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    below(root).iter().map(|key| below(key).len()).sum()
}
