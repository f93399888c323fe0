//! A test server: a mock model with the demo model's tokenizer and template, on its own port.

// Two test binaries share this file, and each uses only a part of it.
#![allow(dead_code)]

use mock_model::MockModel;
use moestro::http::{self, ApiSet, LoadedModel, ModelCard, RequestLimits, ServerState};
use moestro_base::metrics::Metrics;
use moestro_chat::{Template, Tokenizer, grammar::GrammarCompiler};
use moestro_engine::{self as engine, DiskCacheOptions, DraftPolicy, Handle, Options, Sampling};
use moestro_model::model::{LoadOptions, Qwen};
use serde_json::{Value, json};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

/// `<|im_end|>`
pub const EOS: u32 = 2040;
pub const VOCAB: usize = 2048;

/// Options of a test server.
pub struct Setup {
    /// The model's answer to every prompt. If `None`, the model repeats the prompt.
    pub says: Option<&'static str>,
    pub delay: Duration,
    /// The model waits after it has evaluated this many tokens, until [`Server::resume`].
    pub stops_at: usize,
    pub speculate: DraftPolicy,
    pub context: usize,
    pub max_queue: usize,
    pub max_queue_bytes: usize,
    pub parallel: usize,
    pub api_key: Option<&'static str>,
    pub cors: Option<&'static str>,
    pub thinking: Option<bool>,
    /// The chat template. If `None`, the demo's template.
    pub template: Option<&'static str>,
    pub limits: RequestLimits,
    /// If set, the model fails at the last token of this text.
    pub fails_on: Option<&'static str>,
    pub grace: Duration,
    /// Directory of the prompt cache. `None` disables the disk cache.
    pub prompt_cache_dir: Option<PathBuf>,
    /// If true, the server starts without a model.
    pub loading: bool,
    /// The APIs that the port serves.
    pub api: ApiSet,
    /// Further changes to the server's state.
    pub configure: fn(&mut ServerState),
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            says: None,
            delay: Duration::ZERO,
            stops_at: usize::MAX,
            speculate: DraftPolicy::Off,
            context: 512,
            max_queue: 16,
            max_queue_bytes: usize::MAX,
            parallel: 1,
            api_key: None,
            cors: None,
            thinking: None,
            template: None,
            limits: RequestLimits::default(),
            fails_on: None,
            grace: Duration::from_secs(5),
            prompt_cache_dir: None,
            loading: false,
            api: ApiSet::Standard,
            configure: |_| (),
        }
    }
}

pub struct Server {
    pub address: SocketAddr,
    pub engine: Handle,
    pub tokenizer: Arc<Tokenizer>,
    pub metrics: Arc<Metrics>,
    pub state: Arc<ServerState>,
    mock: MockModel,
    shutdown: Option<oneshot::Sender<()>>,
    serving: JoinHandle<std::io::Result<()>>,
}

/// A call of the function `f` whose parameter `days` is a word.
pub const CALLS_WITH_WORD: &str = "</think>\n\n<tool_call>\n<function=f>\n<parameter=days>\nsoon\n</parameter>\n\
                                   </function>\n</tool_call>";

/// Makes a stream send an event after 100 ms without one, instead of 5 s.
pub fn frequent_events(state: &mut ServerState) {
    state.timeouts.event = Duration::from_millis(100);
}

/// `body` with further fields.
pub fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/demo/moestro-demo")
}

impl Server {
    /// A server whose model answers every prompt with `says`.
    pub async fn saying(says: &'static str) -> Self {
        Setup { says: Some(says), ..Setup::default() }.start().await
    }

    /// A slow server that sends frequent events. Its model calls the function `f` with a long list in the parameter
    /// `list`. Also returns the list.
    pub async fn calling_with_long_list() -> (Self, Vec<usize>) {
        let list: Vec<usize> = (0..40).collect();
        let says = format!(
            "</think>\n\n<tool_call>\n<function=f>\n<parameter=list>\n{}\n</parameter>\n</function>\n</tool_call>",
            json!(list)
        );
        let delay = Duration::from_millis(5);
        let setup = Setup { says: Some(says.leak()), delay, configure: frequent_events, ..Setup::default() };
        (setup.start().await, list)
    }

    /// Number of tokens that the model has evaluated so far.
    pub fn evaluated(&self) -> usize {
        self.mock.evaluated.load(Ordering::Relaxed)
    }

    /// Waits until the model waits because of [`Setup::stops_at`].
    pub async fn stopped(&self) {
        for _ in 0..6000 {
            if self.evaluated() == self.mock.stops_at.load(Ordering::Relaxed) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the model has evaluated only {} tokens", self.evaluated());
    }

    /// Ends the wait of [`Setup::stops_at`].
    pub fn resume(&self) {
        self.stop_at(usize::MAX);
    }

    /// Changes [`Setup::stops_at`].
    pub fn stop_at(&self, evaluated: usize) {
        self.mock.stops_at.store(evaluated, Ordering::Relaxed);
    }

    /// Like [`Server::load`], but lets a stopped model evaluate a token from time to time. Between two steps, the engine
    /// notices that the client of a waiting request has disconnected.
    pub async fn load_after_steps(&self, running: usize, queued: usize) {
        for _ in 0..6000 {
            if self.engine.load() == (running, queued) {
                return;
            }
            self.mock.stops_at.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{:?} is not ({running}, {queued})", self.engine.load());
    }

    /// Waits until no request is running or waiting.
    pub async fn idle(&self) {
        for _ in 0..6000 {
            if self.engine.load() == (0, 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the engine is still busy: {:?}", self.engine.load());
    }

    /// Waits until exactly `running` requests are running and `queued` requests are waiting.
    pub async fn load(&self, running: usize, queued: usize) {
        for _ in 0..6000 {
            if self.engine.load() == (running, queued) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?} is not ({running}, {queued})", self.engine.load());
    }

    /// Waits until the metrics have the line `line`.
    pub async fn metric(&self, line: &str) {
        for _ in 0..6000 {
            if self.metrics.render().lines().any(|found| found == line) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no {line} in {}", self.metrics.render());
    }

    pub fn shut_down(&mut self) {
        drop(self.shutdown.take());
    }

    pub async fn wait_for_end(self) {
        self.serving.await.unwrap().unwrap();
    }
}

impl Setup {
    pub async fn start(self) -> Server {
        self.start_with(|_| ()).await
    }

    /// Like [`Setup::start`], but `prepare` changes the state before the server starts.
    pub async fn start_with(self, prepare: impl FnOnce(&mut ServerState)) -> Server {
        let tokenizer = Arc::new(Tokenizer::load(&demo()).unwrap());
        let ids = |text: &str| tokenizer.encode(text).unwrap();
        let mock = MockModel {
            vocab: VOCAB,
            context: self.context,
            chunk: 32,
            eos: EOS,
            answer: self.says.map(ids),
            delay: self.delay,
            stops_at: Arc::new(self.stops_at.into()),
            fails_on: self.fails_on.and_then(|text| ids(text).last().copied()),
            ..MockModel::default()
        };
        let metrics = Metrics::new("0.0.0", "cpu");
        let options = Options {
            max_queue: self.max_queue,
            max_queue_bytes: self.max_queue_bytes,
            parallel: self.parallel,
            eos: vec![EOS],
            grace: self.grace,
            speculate: self.speculate,
            prompt_cache: if self.prompt_cache_dir.is_some() { 1 << 20 } else { 0 },
            disk_cache: self.prompt_cache_dir.map(|dir| DiskCacheOptions { dir, limit: 1 << 20, key: "mock".into() }),
            ..Options::default()
        };
        let (engine, _worker) = engine::spawn(mock.clone(), options, metrics.clone()).unwrap();
        let cors = self.cors.map(|origin| origin.parse().unwrap());
        let mut state = ServerState::new(metrics.clone(), self.api_key.map(str::to_owned), cors);
        (self.configure)(&mut state);
        prepare(&mut state);
        let state = Arc::new(state);
        if !self.loading {
            state.serve_model(LoadedModel {
                engine: engine.clone(),
                tokenizer: tokenizer.clone(),
                grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), &[EOS])),
                template: Some(template(self.template)),
                card: ModelCard {
                    id: "mock".into(),
                    created: 1,
                    experts_per_token: Some(2),
                    quantization: Some("4-bit affine, groups of 64".into()),
                },
                defaults: Sampling::greedy(),
                thinking: self.thinking,
                limits: self.limits,
                plan: json!({"resident": true}),
            });
        }
        listen(self.api, state, engine, tokenizer, metrics, mock).await
    }
}

fn template(source: Option<&str>) -> Template {
    let Some(source) = source else { return Template::load(&demo()).unwrap() };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    Template::load(dir.path()).unwrap()
}

/// A server with the checkpoint in `dir`, which has a tokenizer and a chat template.
pub async fn serve_checkpoint(dir: &Path, load: &LoadOptions, options: Options) -> Server {
    let (tokenizer, metrics) = (Arc::new(Tokenizer::load(dir).unwrap()), Metrics::new("0.0.0", "cpu"));
    let model = Qwen::load(dir, load, &metrics, &mut |_, _| ()).unwrap();
    let eos = options.eos.clone();
    let (engine, _worker) = engine::spawn(model, options, metrics.clone()).unwrap();
    let state = Arc::new(ServerState::new(metrics.clone(), None, None));
    state.serve_model(LoadedModel {
        engine: engine.clone(),
        tokenizer: tokenizer.clone(),
        grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), &eos)),
        template: Some(Template::load(dir).unwrap()),
        card: ModelCard { id: "checkpoint".into(), created: 1, experts_per_token: None, quantization: None },
        defaults: Sampling::greedy(),
        thinking: None,
        limits: RequestLimits::default(),
        plan: json!({}),
    });
    listen(ApiSet::Standard, state, engine, tokenizer, metrics, MockModel::default()).await
}

async fn listen(
    api: ApiSet,
    state: Arc<ServerState>,
    engine: Handle,
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    mock: MockModel,
) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = oneshot::channel::<()>();
    let shutdown = async move { drop(receiver.await) };
    let serving = tokio::spawn(http::serve(vec![(listener, api)], state.clone(), shutdown));
    Server { address, engine, tokenizer, metrics, state, mock, shutdown: Some(sender), serving }
}
