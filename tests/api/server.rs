//! A test server: a mock model with the demo model's tokenizer and template, on its own port.

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
pub use test_support::{demo, with};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const MESSAGES: &str = "/v1/messages";
pub const RESPONSES: &str = "/v1/responses";

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

pub const THINKS: &str = "12 + 7 is 19.\n</think>\n\n12 + 7 = 19.";

pub const CALLS: &str = "I look it up.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\
                         Paris\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";

/// Two calls, one of them with text that is no parameter.
pub const STRAY: &str = "</think>\n\n<tool_call>\n<function=get_weather>\nstray\n<parameter=city>\nParis\n</parameter>\n\
                         </function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>";

/// A call of the function `f` whose parameter `days` is a word.
pub const CALLS_WITH_WORD: &str = "</think>\n\n<tool_call>\n<function=f>\n<parameter=days>\nsoon\n</parameter>\n\
                                   </function>\n</tool_call>";

/// Makes a stream send an event after 100 ms without one, instead of 5 s.
pub fn frequent_events(state: &mut ServerState) {
    state.timeouts.event = Duration::from_millis(100);
}

/// Gives requests so little memory that a test can fill it.
pub fn little_memory(state: &mut ServerState) {
    state.memory.set_plan(12 << 20);
}

/// The conversation of a chat in which [`CALLS`] was the answer to a question, and a tool has a result. `parameters` are
/// those of the tool.
pub fn chat_after_calls(parameters: &Value) -> Value {
    let arguments = json!({"city": "Paris", "days": 3}).to_string();
    let function = json!({"name": "get_weather", "parameters": parameters});
    let call = json!({"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}});
    json!({
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "user", "content": "What is 12+7?"},
            {"role": "assistant", "reasoning_content": "I look it up.", "content": "One moment.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
    })
}

/// A conversation with one message of the user.
pub fn chat(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

/// The request `body` for a stream.
pub fn streamed(body: &Value) -> Value {
    with(body.clone(), json!({"stream": true}))
}

/// Waits until `is_done`. Panics with `state` after a minute.
pub async fn wait_until(is_done: impl Fn() -> bool, state: impl Fn() -> String) {
    for _ in 0..6000 {
        if is_done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{}", state());
}

impl Server {
    /// A server whose model answers every prompt with `says`.
    pub async fn saying(says: &'static str) -> Self {
        Setup { says: Some(says), ..Setup::default() }.start().await
    }

    /// A server that sends frequent events. Its model calls the function `f` with a long list in the parameter `list`,
    /// and evaluates tokens only in [`Server::evaluate_slowly`]. Also returns the list.
    pub async fn calling_with_long_list() -> (Self, Vec<usize>) {
        let list: Vec<usize> = (0..40).collect();
        let says = format!(
            "</think>\n\n<tool_call>\n<function=f>\n<parameter=list>\n{}\n</parameter>\n</function>\n</tool_call>",
            json!(list)
        );
        let setup = Setup { says: Some(says.leak()), stops_at: 0, configure: frequent_events, ..Setup::default() };
        (setup.start().await, list)
    }

    /// Number of tokens that the model has evaluated so far.
    pub fn evaluated(&self) -> usize {
        self.mock.evaluated.load(Ordering::Relaxed)
    }

    /// Waits until the model waits because of [`Setup::stops_at`].
    pub async fn stopped(&self) {
        let stops_at = self.mock.stops_at.load(Ordering::Relaxed);
        wait_until(|| self.evaluated() == stops_at, || format!("only {} tokens are evaluated", self.evaluated())).await;
    }

    /// Ends the wait of [`Setup::stops_at`].
    pub fn resume(&self) {
        self.mock.stops_at.store(usize::MAX, Ordering::Relaxed);
    }

    /// Like [`Server::load`], but lets a stopped model evaluate a token from time to time. Between two steps, the engine
    /// notices that the client of a waiting request has disconnected.
    pub async fn load_after_steps(&self, running: usize, queued: usize) {
        for _ in 0..6000 {
            if self.engine.load() == (running, queued) {
                return;
            }
            self.evaluate_one();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{:?} is not ({running}, {queued})", self.engine.load());
    }

    /// Lets a stopped model evaluate one token. Calls before it has done so add none, so that a model that begins late
    /// makes up for nothing.
    fn evaluate_one(&self) {
        self.mock.stops_at.store(self.evaluated() + 1, Ordering::Relaxed);
    }

    /// Lets a stopped model evaluate one token per `time` until `work` is done. The server's tasks and these steps have the
    /// same thread. If a busy machine delays the thread, the model waits, too, unlike with [`Setup::delay`].
    pub async fn evaluate_slowly<T>(&self, time: Duration, work: impl Future<Output = T>) -> T {
        let steps = async {
            loop {
                tokio::time::sleep(time).await;
                self.evaluate_one();
            }
        };
        tokio::select! {
            done = work => done,
            () = steps => unreachable!("the steps never end"),
        }
    }

    /// Waits until no request is running or waiting.
    pub async fn idle(&self) {
        self.load(0, 0).await;
    }

    /// Waits until exactly `running` requests are running and `queued` requests are waiting.
    pub async fn load(&self, running: usize, queued: usize) {
        let state = || format!("{:?} is not ({running}, {queued})", self.engine.load());
        wait_until(|| self.engine.load() == (running, queued), state).await;
    }

    /// Waits until the metrics have the line `line`.
    pub async fn metric(&self, line: &str) {
        let has_line = || self.metrics.render().lines().any(|found| found == line);
        wait_until(has_line, || format!("no {line} in {}", self.metrics.render())).await;
    }

    /// Waits until no request runs or holds memory.
    pub async fn memory_is_free(&self) {
        self.idle().await;
        self.metric("moestro_request_memory_bytes 0").await;
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
            let mut model = loaded("mock", engine.clone(), tokenizer.clone(), &[EOS], template(self.template));
            model.thinking = self.thinking;
            model.limits = self.limits;
            model.plan = json!({"resident": true});
            model.card.experts_per_token = Some(2);
            model.card.quantization = Some("4-bit affine, groups of 64".into());
            state.serve_model(model);
        }
        listen(self.api, state, engine, tokenizer, metrics, mock).await
    }
}

/// A model with default settings.
pub fn loaded(id: &str, engine: Handle, tokenizer: Arc<Tokenizer>, eos: &[u32], template: Template) -> LoadedModel {
    LoadedModel {
        engine,
        grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), eos)),
        tokenizer,
        template: Some(template),
        card: ModelCard { id: id.into(), created: 1, experts_per_token: None, quantization: None },
        defaults: Sampling::greedy(),
        thinking: None,
        limits: RequestLimits::default(),
        plan: json!({}),
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
    serve_checkpoint_with(dir, load, options, |_| ()).await
}

/// A server with the checkpoint in `dir` and with changes to its state.
pub async fn serve_checkpoint_with(
    dir: &Path,
    load: &LoadOptions,
    options: Options,
    configure: impl FnOnce(&mut ServerState),
) -> Server {
    let (tokenizer, metrics) = (Arc::new(Tokenizer::load(dir).unwrap()), Metrics::new("0.0.0", "cpu"));
    let model = Qwen::load(dir, load, &metrics, &mut |_, _| ()).unwrap();
    let eos = options.eos.clone();
    let (engine, _worker) = engine::spawn(model, options, metrics.clone()).unwrap();
    let mut state = ServerState::new(metrics.clone(), None, None);
    configure(&mut state);
    let state = Arc::new(state);
    let template = Template::load(dir).unwrap();
    state.serve_model(loaded("checkpoint", engine.clone(), tokenizer.clone(), &eos, template));
    listen(ApiSet::WithOllama, state, engine, tokenizer, metrics, MockModel::default()).await
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
