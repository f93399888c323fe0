//! The prompt cache changes what is computed and never what is answered: random walks over trees of conversations, each
//! answer compared with that of an engine that remembers nothing, with restarts in between; an agent's conversation, of
//! which nothing is computed twice; and a server that is killed and remembers.

mod common;
#[path = "support/process.rs"]
mod process;

use common::load_with;
use moestro::{
    chat::{Conversation, Speaker, Template, Tokenizer, message_ends},
    engine::{self, Boundary, BoundaryKind, DiskCacheOptions, Event, Handle, Request, Sampling, Worker},
    error::ModelError,
    metrics::Metrics,
    model::{HiddenStates, LoadOptions, Logits, Model, ModelInfo, PassHooks, Qwen, Rows, Snapshot},
    ops::KvBits,
};
use process::{Process, agent};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo");

/// The demo model, with a count of what it is really asked to compute.
struct Counted {
    qwen: Qwen,
    tokens: Arc<AtomicUsize>,
}

impl HiddenStates for Counted {}

impl Model for Counted {
    type State = <Qwen as Model>::State;

    /// Chunks are small, so that marks and the ends of chunks meet in many ways.
    fn info(&self) -> ModelInfo {
        ModelInfo { chunk: 96, ..self.qwen.info() }
    }

    fn start(&self) -> Result<Self::State, ModelError> {
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

    fn verify(&mut self, state: &mut Self::State, ids: &[u32]) -> Result<Logits, ModelError> {
        self.qwen.verify(state, ids)
    }

    fn snapshot(&self, state: &mut Self::State) -> Result<Snapshot, ModelError> {
        self.qwen.snapshot(state)
    }

    fn restore(&self, snapshot: &Snapshot, reuse: Option<Self::State>) -> Result<Self::State, ModelError> {
        self.qwen.restore(snapshot, reuse)
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
        Self::keeping(KvBits::Sixteen, states, dir)
    }

    /// With room for `states` states of 400 tokens, and with what was left in `dir`.
    fn keeping(kv_bits: KvBits, states: u64, dir: Option<&Path>) -> Self {
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
            engine::spawn(Counted { qwen, tokens: tokens.clone() }, options, metrics.clone()).unwrap();
        Self { engine, worker, tokens, metrics }
    }

    /// Stops, when what is to be kept has been written.
    fn stop(self) {
        self.engine.drain();
        self.worker.join().unwrap();
    }

    /// The answer, each token with the bits of its log-probability; and how many tokens of the prompt were known.
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

/// Numbers that look random, the same at every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        ((self.0 >> 33) as usize) % sides
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| 100 + self.roll(1500) as u32).collect()
    }
}

/// A conversation: its tokens, and where its messages end.
#[derive(Clone, Default)]
struct Talk {
    ids: Vec<u32>,
    ends: Vec<Boundary>,
}

impl Talk {
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

/// One walk: a few conversations that grow, branch, are edited, asked again and continued with the answer or another.
fn walk(seed: u64, mut cached: Server, fresh: &Server, again: &dyn Fn(Server) -> Server) -> Server {
    let mut dice = Dice(seed);
    let system = dice.tokens(30 + 40 * (seed % 7) as usize);
    let mut talks: Vec<Talk> = Vec::new();
    for step in 0..12 {
        if dice.roll(8) == 0 {
            cached = again(cached);
        }
        let number = dice.roll(talks.len() + 1);
        let mut talk = match talks.get(number) {
            None => {
                let mut talk = Talk::default();
                talk.say(&system, BoundaryKind::System);
                talk
            }
            Some(talk) => match dice.roll(4) {
                // An earlier message is written anew.
                0 => talk.until(1 + dice.roll(talk.ends.len())),
                _ => talk.clone(),
            },
        };
        let retry = talks.get(number).is_some() && dice.roll(4) == 0;
        if !retry {
            let count = 1 + dice.roll(60);
            let kind = if dice.roll(2) == 0 { BoundaryKind::Query } else { BoundaryKind::Message };
            let message = dice.tokens(count);
            talk.say(&message, kind);
        }
        // The opening of the answer.
        let prompt = [&talk.ids[..], &[2039, 77]].concat();
        let max_tokens = 1 + dice.roll(6);
        let (expected, none) = fresh.ask(&prompt, &[], max_tokens, false);
        assert_eq!(none, 0, "the other engine remembers nothing");
        let (answer, _) = cached.ask(&prompt, &talk.ends, max_tokens, true);
        assert_eq!(answer, expected, "walk {seed}, step {step}, prompt of {}", prompt.len());
        if dice.roll(2) == 0 {
            // The client sends the answer back as it was.
            let answer: Vec<u32> = answer.iter().map(|token| token.0).collect();
            talk.say(&[&[2039, 77], &answer[..]].concat(), BoundaryKind::Message);
        }
        match talks.get_mut(number) {
            Some(old) if dice.roll(3) > 0 => *old = talk,
            _ => talks.push(talk),
        }
    }
    cached
}

/// As many as `MOESTRO_WALKS` says: 200 by hand.
#[test]
fn answers_do_not_depend_on_what_is_remembered() {
    let walks: u64 = std::env::var("MOESTRO_WALKS").map_or(9, |walks| walks.parse().unwrap());
    let (mut known, mut evicted, mut from_disk) = (0, 0, 0);
    // A cache for one checkpoint, for a few, and for all; the last two are restarted now and then.
    for (part, states, bits) in [(0, 1, KvBits::Sixteen), (1, 3, KvBits::Eight), (2, 40, KvBits::Sixteen)] {
        let dir = tempfile::tempdir().unwrap();
        let fresh = Server::keeping(bits, 0, None);
        let start = || Server::keeping(bits, states, Some(dir.path()).filter(|_| states > 1));
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
        let again = |server: Server| {
            count(&server);
            server.stop();
            start()
        };
        let mut cached = start();
        for seed in (part..walks).step_by(3) {
            cached = walk(seed, cached, &fresh, &again);
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
    println!("{walks} walks: {known} tokens known, {evicted} checkpoints evicted, {from_disk} read from the disk");
    assert!(known > 0 && evicted > 0 && from_disk > 0, "{known} {evicted} {from_disk}");
}

#[test]
fn an_agent_computes_what_is_new() {
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
        // Of an answer all but the last token went through the model.
        let computed = server.tokens.load(Ordering::Relaxed) - generated;
        let all: usize = earlier.iter().map(Vec::len).sum();
        let ratio = computed as f64 / new as f64;
        println!("{computed} tokens computed, {new} new, {all} sent: {ratio:.3}");
        assert!(ratio <= 1.05, "{computed} tokens computed, {new} new, {all} sent (reasoning: {reasoning})");
        assert_eq!(server.metrics.prompt_tokens_computed.get(), computed as u64);
        assert!(all > 3 * new, "a conversation that shares little shows little");
    }
}

#[test]
fn a_killed_server_computes_at_most_the_last_message() {
    let dir = tempfile::tempdir().unwrap();
    let turns = agent(4, true);
    let serve = |dir: &Path| Process::start(&["--memory-limit", "300M", "--prompt-cache-dir", dir.to_str().unwrap()]);
    let first = serve(dir.path());
    for messages in &turns[..3] {
        first.chat(messages);
    }
    // They are written within moments of the answer.
    let checkpoints = |place: &str| first.metric(&format!("moestro_prompt_cache_checkpoints{{place=\"{place}\"}}"));
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while checkpoints("disk") < checkpoints("memory") {
        assert!(std::time::Instant::now() < patience, "{}", first.ask("GET", "/metrics", ""));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(first);

    let second = serve(dir.path());
    // The turn that was answered last, asked again: all of it but the opening of the answer is known.
    let again = second.chat(&turns[2]);
    let [prompt, cached] =
        [&again["usage"]["prompt_tokens"], &again["usage"]["prompt_tokens_details"]["cached_tokens"]]
            .map(|count| count.as_u64().unwrap());
    assert!(prompt - cached < 8, "{again}");
    assert_eq!(second.metric("moestro_prompt_tokens_total{source=\"computed\"}"), prompt - cached);
    // The next turn, of which the answer and its result are new.
    let next = second.chat(&turns[3]);
    let known = next["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(known >= cached, "{next}");

    // The same answers as of a server that remembers nothing.
    let empty = tempfile::tempdir().unwrap();
    let fresh = serve(empty.path());
    assert_eq!(fresh.chat(&turns[2])["choices"], again["choices"]);
    let body = json!({"messages": turns[3], "temperature": 0, "max_tokens": 12, "cache_prompt": false});
    let other: Value = serde_json::from_str(&fresh.ask("POST", "/v1/chat/completions", &body.to_string())).unwrap();
    assert_eq!(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(other["choices"], next["choices"]);

    // Emptied, it has nothing.
    assert_eq!(second.ask("DELETE", "/prompt_cache", ""), "");
    let health: Value = serde_json::from_str(&second.ask("GET", "/health", "")).unwrap();
    assert_eq!(health["prompt_cache"]["bytes"], 0);
    assert_eq!(health["prompt_cache"]["disk"]["bytes"], 0);
    assert_eq!(second.chat(&turns[3])["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    // So it is when nothing is in memory that could know what it left, which is written at the latest when it goes.
    second.ask("POST", "/models/unload", &json!({"model": "moestro-demo"}).to_string());
    assert!(files(dir.path()) > 0);
    assert_eq!(second.ask("DELETE", "/prompt_cache", ""), "");
    assert_eq!(files(dir.path()), 0);
}

/// Files of all keys below `root`.
fn files(root: &Path) -> usize {
    let below = |path: &Path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    below(root).iter().map(|key| below(key).len()).sum()
}
