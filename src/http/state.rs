//! Server state shared by all handlers.

use crate::http::{
    ApiError,
    health::StorageHealth,
    layers::{OriginPolicy, RequestMemory, Timeouts},
    models::{HostedModel, LoadedModel, ModelHost, ModelLease},
    openai::responses::ResponseStore,
    request::{ImageUrls, RememberedTools},
};
use axum::http::HeaderValue;
use moestro_base::metrics::Metrics;
use moestro_engine::QueueShare;
use parking_lot::RwLock;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Default limit of a request body in bytes: enough for the largest accepted image in base64, and a conversation. Ten
/// megabytes of text are about two million tokens. The server thus reads an overlong prompt and refuses it with a
/// message about the context length.
pub const BODY_LIMIT: usize = 32 << 20;

pub struct ServerState {
    pub metrics: Arc<Metrics>,
    /// API key. If set, every path except `/`, `/health` and `/metrics` requires the key.
    api_key: RwLock<Option<String>>,
    /// Origin of web pages that may use the server. `*` allows any origin.
    pub cors: Option<HeaderValue>,
    /// Maximum size of a request body in bytes.
    pub body_limit: usize,
    pub memory: Arc<RequestMemory>,
    pub origins: OriginPolicy,
    /// Maximum number of connections with a request in progress. If `None`, the maximum depends on the limit on open
    /// files.
    pub max_connections: Option<usize>,
    pub timeouts: Timeouts,
    pub storage_health: Arc<StorageHealth>,
    /// True if the billing header of Claude Code stays in the prompt.
    pub keep_billing_header: bool,
    /// Hosts that images may be fetched from.
    pub image_urls: Arc<ImageUrls>,
    /// Tools of earlier requests. `None` without `--reuse-tools`.
    pub remembered_tools: Option<Arc<RememberedTools>>,
    /// Stored responses, which `previous_response_id` can name.
    pub responses: Arc<ResponseStore>,
    pub models: ModelHost,
    is_shutting_down: AtomicBool,
}

impl ServerState {
    pub fn new(metrics: Arc<Metrics>, api_key: Option<String>, cors: Option<HeaderValue>) -> Self {
        let memory = RequestMemory::new(&metrics);
        Self {
            metrics,
            api_key: RwLock::new(api_key),
            cors,
            body_limit: BODY_LIMIT,
            origins: OriginPolicy::default(),
            max_connections: None,
            timeouts: Timeouts::default(),
            storage_health: Arc::default(),
            keep_billing_header: false,
            image_urls: Arc::default(),
            remembered_tools: None,
            responses: ResponseStore::within(memory.clone()),
            memory,
            models: ModelHost::default(),
            is_shutting_down: AtomicBool::new(false),
        }
    }

    /// Installs a model that is never unloaded, for a server without other models.
    pub fn serve_model(&self, model: LoadedModel) {
        self.metrics.set_model(&model.card.id);
        self.models.install(HostedModel { id: model.card.id.clone(), model, unload: Box::new(|| ()) });
    }

    /// Gives requests without tools the tools of the conversation that they continue.
    pub fn reuse_tools(&mut self) {
        self.remembered_tools = Some(RememberedTools::within(self.memory.clone()));
    }

    pub fn set_api_key(&self, api_key: Option<String>) {
        *self.api_key.write() = api_key;
    }

    pub fn api_key(&self) -> Option<String> {
        self.api_key.read().clone()
    }

    /// Refuses new requests with 503. Requests in progress finish within the engine's grace period.
    pub fn shut_down(&self) {
        self.is_shutting_down.store(true, Relaxed);
        self.models.shut_down();
    }

    pub fn is_shutting_down(&self) -> bool {
        self.is_shutting_down.load(Relaxed)
    }

    /// Returns an error until a model has been loaded or set as the default.
    pub fn ensure_ready(&self) -> Result<(), ApiError> {
        self.models.is_open().then_some(()).ok_or_else(ApiError::loading)
    }

    /// A lease of the requested model. `share` is the request's share of the queue if the model has yet to be loaded.
    pub async fn lease(&self, requested: Option<&str>, share: QueueShare) -> Result<ModelLease, ApiError> {
        self.models.lease(requested, share, self.memory.waiting_limit()).await
    }
}
