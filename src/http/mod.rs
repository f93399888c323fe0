//! The server: OpenAI's API over HTTP/1.1, and a little of vLLM's. This room knows no tensor.
//!
//! `body` reads JSON, `check` and `prompt` turn it into an engine's request, `transcript` turns the engine's events back
//! into text, and `chat` and `completions` write it down as one body or, through `wire` and `stream`, as server-sent events.
//! `messages` and `responses` translate other formats into the one `conversation` and back. `models` has the model that answers. `access`
//! accounts for every request and `budget` for its memory; `connections` holds them, `guard` keeps web pages out, `api_error` says no, and `page`
//! is what a browser sees.
//!
//! A [`Door`] can be opened before there is a model: until [`Door::open`] it answers `/health` and `/metrics`, and
//! everything else with 503.

mod access;
mod admin;
mod answers;
mod api_error;
mod body;
mod budget;
mod chat;
mod check;
mod choices;
mod completions;
mod connections;
mod conversation;
mod encoding;
mod fields;
mod form;
mod guard;
mod held;
mod messages;
mod models;
mod openapi;
mod page;
mod prefill;
mod prompt;
mod responses;
mod scored;
mod scores;
mod stream;
mod thinking;
mod tokens;
mod transcript;
mod types;
mod wire;

use crate::{
    chat::{Template, Tokenizer, grammar::Grammars},
    engine::{Handle, Sampling},
    metrics::Metrics,
};
use answers::{Envelope, Usage};
use api_error::ApiError;
use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, Method, header},
    middleware::{from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
pub use budget::Budget;
pub use connections::Patience;
pub use guard::Guard;
pub use models::{Listed, Loaded, Loader, Stage, Times};
use parking_lot::RwLock;
use std::{
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{net::TcpListener, sync::watch};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// A body of ten megabytes is a prompt of two million tokens, and still gets an answer that says so.
pub const BODY_LIMIT: usize = 16 << 20;

/// The time that connections have to send the rest of their answers once the engine is idle.
const LINGER: Duration = Duration::from_secs(1);

/// A model as clients know it.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// As it is listed: `org/name` from the hub, else a name.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Experts that each token visits; `None` for a dense model.
    pub experts_per_token: Option<usize>,
    /// The encoding of the weights, in words.
    pub quantisation: Option<String>,
}

/// A loaded model, with its engine, tokenizer and template.
pub struct App {
    pub engine: Handle,
    pub tokenizer: Arc<Tokenizer>,
    /// Compiles the forms that answers must have.
    pub grammars: Arc<Grammars>,
    /// Without one there is no chat, only completions.
    pub template: Option<Template>,
    pub card: ModelCard,
    /// Sampling where a request does not say.
    pub defaults: Sampling,
    /// `enable_thinking` where a request does not say.
    pub thinking: Option<bool>,
    /// The memory plan, for `/health`.
    pub plan: serde_json::Value,
}

/// The server's state, with or without a model.
pub struct Door {
    pub metrics: Arc<Metrics>,
    /// If set, every path but `/health` and `/metrics` wants it.
    api_key: RwLock<Option<String>>,
    /// The origin that browsers may call from; `*` is any.
    pub cors: Option<HeaderValue>,
    /// The most bytes of a body.
    pub body_limit: usize,
    /// The memory of all requests.
    pub budget: Arc<Budget>,
    /// The hosts and origins that are let in.
    pub guard: Guard,
    /// The most connections with a request in progress; `None` is what the system's limits allow.
    pub places: Option<usize>,
    pub patience: Patience,
    health: Arc<admin::Health>,
    /// Leave the billing header that Claude Code sends in the prompt.
    pub keep_billing_header: bool,
    /// Responses that clients may go on from.
    responses: responses::Store,
    /// The model that answers, and those that could.
    pub models: Stage,
    closing: AtomicBool,
}

impl Door {
    pub fn new(metrics: Arc<Metrics>, api_key: Option<String>, cors: Option<HeaderValue>) -> Self {
        let budget = Budget::new(&metrics);
        Self {
            metrics,
            api_key: RwLock::new(api_key),
            cors,
            body_limit: BODY_LIMIT,
            guard: Guard::default(),
            places: None,
            patience: Patience::default(),
            health: Arc::default(),
            keep_billing_header: false,
            responses: responses::Store::within(budget.clone()),
            budget,
            models: Stage::default(),
            closing: AtomicBool::new(false),
        }
    }

    /// This one model is loaded, and stays.
    pub fn open(&self, app: App) {
        self.metrics.serves(&app.card.id);
        self.models.enter(Loaded { id: app.card.id.clone(), app, unload: Box::new(|| ()) });
    }

    /// The key that is wanted from now on.
    pub fn want(&self, api_key: Option<String>) {
        *self.api_key.write() = api_key;
    }

    fn key(&self) -> Option<String> {
        self.api_key.read().clone()
    }

    /// From now on new requests get 503; the engine gives the accepted ones its grace.
    pub fn close(&self) {
        self.closing.store(true, Relaxed);
        self.models.close();
    }

    fn closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Fails as long as there never was a model.
    fn ready(&self) -> Result<(), ApiError> {
        self.models.is_open().then_some(()).ok_or_else(ApiError::loading)
    }

    /// The model that a request means, when it is loaded.
    async fn app(&self, asked: Option<&str>) -> Result<Arc<App>, ApiError> {
        self.models.seat(asked).await?.taken().await
    }
}

/// All routes.
pub fn router(door: Arc<Door>) -> Router {
    let routes = [
        ("/v1/chat/completions", post(chat::chat)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/responses", post(responses::responses)),
        ("/v1/responses/{id}", get(responses::get).delete(responses::delete)),
        ("/v1/messages", post(messages::messages)),
        ("/v1/messages/count_tokens", post(messages::count_tokens)),
        ("/v1/models", get(admin::models)),
        ("/v1/models/unload", post(admin::unload)),
        ("/openapi.json", get(openapi::openapi)),
        ("/tokenizer_info", get(tokens::info)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/prompt_cache", delete(admin::clear_prompt_cache)),
        ("/health", get(admin::health)),
        ("/metrics", get(admin::metrics)),
        ("/experts", get(admin::experts)),
    ];
    let mut router = Router::new();
    for (path, handler) in routes {
        for spelling in access::spellings(path) {
            router = router.route(&spelling, handler.clone());
        }
    }
    let router = router
        .route("/", get(page::page))
        .route("/v1/models/{*id}", get(admin::model))
        .route("/models/{*id}", get(admin::model))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(access::limit))
        .layer(encoding::inflate())
        .layer(from_fn(encoding::check))
        .layer(from_fn_with_state(door.clone(), access::authorize))
        .layer(from_fn_with_state(door.clone(), guard::check));
    let router = match &door.cors {
        Some(origin) => router.layer(cors(origin)),
        None => router,
    };
    router.layer(from_fn_with_state(door.clone(), access::account)).layer(from_fn(messages::shape)).with_state(door)
}

/// Serves until `shutdown`, then drains: new requests get 503 while the accepted ones end within the engine's grace.
pub async fn serve(listener: TcpListener, door: Arc<Door>, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let (stop, stopped) = watch::channel(false);
    let mut accepting = tokio::spawn(connections::accept(listener, router(door.clone()), door.clone(), stopped));
    let drain = async {
        shutdown.await;
        door.close();
        while !door.models.is_idle() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = door.models.run() => {}
        // Accepting ends by itself only if it panics.
        ended = &mut accepting => return ended.map_err(io::Error::other),
        () = drain => {}
    }
    stop.send_replace(true);
    // The receivers are gone when the connections are.
    let _ = tokio::time::timeout(LINGER, stop.closed()).await;
    Ok(())
}

fn cors(origin: &HeaderValue) -> CorsLayer {
    let origins = if origin == "*" { AllowOrigin::any() } else { AllowOrigin::exact(origin.clone()) };
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([access::REQUEST_ID.clone(), header::RETRY_AFTER])
        .max_age(Duration::from_secs(3600))
}

async fn no_such_path(request: Request) -> Response {
    ApiError::no_such_path(request.method().as_str(), request.uri().path()).into_response()
}

async fn wrong_method(request: Request) -> Response {
    ApiError::wrong_method(request.method().as_str(), request.uri().path()).into_response()
}

/// What all chunks of one answer share. It does not hold the model: a client that reads slowly would keep it in memory.
struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
}

impl Head {
    fn new(app: &App, prefix: &str, object: &'static str) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (id, model) = (format!("{prefix}-{}", access::unique()), app.card.id.clone());
        Self { id, object, created, model, tokenizer: app.tokenizer.clone() }
    }

    fn envelope<'a, C>(&'a self, choices: &'a [C], usage: Option<Option<Usage>>) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            system_fingerprint: concat!("moestro-", env!("CARGO_PKG_VERSION")),
            choices,
            usage,
            timings: usage.flatten().map(|usage| usage.timings).filter(|timings| timings.drafted_tokens > 0),
            prompt_progress: None,
        }
    }
}
