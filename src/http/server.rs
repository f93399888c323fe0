//! The server: router, layers, start and graceful shutdown.

use crate::http::{
    ApiError, ServerState, admin,
    anthropic::messages,
    layers::{auth, connections, gzip, origin, request_log, unread_body},
    ollama,
    openai::{chat, completions, models, responses},
    openapi, page, routes, tokenize,
};
use axum::{
    Router,
    extract::Request,
    http::{Method, header},
    middleware::{from_fn, from_fn_with_state},
    routing::{delete, get, post},
};
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::watch};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// The APIs that a port serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiSet {
    Standard,
    /// The standard APIs and Ollama's API.
    WithOllama,
}

pub fn router(state: Arc<ServerState>) -> Router {
    router_for(ApiSet::Standard, state)
}

fn router_for(api: ApiSet, state: Arc<ServerState>) -> Router {
    let handlers = [
        ("/v1/chat/completions", post(chat::chat)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/responses", post(responses::responses)),
        ("/v1/responses/compact", post(responses::compact)),
        ("/v1/responses/input_tokens", post(responses::input_tokens)),
        ("/v1/responses/{id}", get(responses::get).delete(responses::delete)),
        ("/v1/responses/{id}/input_items", get(responses::input_items)),
        ("/v1/messages", post(messages::messages)),
        ("/v1/messages/count_tokens", post(messages::count_tokens)),
        ("/v1/models", get(models::models)),
        ("/v1/models/unload", post(admin::unload)),
        ("/openapi.json", get(openapi::openapi)),
        ("/tokenizer_info", get(tokenize::info)),
        ("/tokenize", post(tokenize::tokenize)),
        ("/detokenize", post(tokenize::detokenize)),
        ("/prompt_cache", delete(admin::clear_prompt_cache)),
        ("/health", get(admin::health)),
        ("/metrics", get(admin::metrics)),
        ("/experts", get(admin::experts)),
    ];
    let mut router = Router::new();
    for (path, handler) in handlers {
        for spelling in routes::spellings(path) {
            router = router.route(&spelling, handler.clone());
        }
    }
    let router = match api {
        ApiSet::Standard => router.route("/", get(page::page)),
        ApiSet::WithOllama => router
            .route("/", get(ollama::running))
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(ollama::tags))
            .route("/api/ps", get(ollama::ps))
            .route("/api/show", post(ollama::show))
            .route("/api/chat", post(ollama::chat))
            .route("/api/generate", post(ollama::generate)),
    };
    let router = router
        .route("/api/v0/models/", get(models::lm_studio))
        .route("/v1/models/{*id}", get(models::model))
        .route("/models/{*id}", get(models::model))
        .route("/api/v0/models", get(models::lm_studio))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(request_log::enforce_deadline))
        .layer(from_fn_with_state(state.clone(), gzip::decompress))
        .layer(from_fn_with_state(state.clone(), auth::require_key))
        .layer(from_fn_with_state(state.origins.clone(), origin::check_origin))
        .layer(from_fn_with_state(state.clone(), unread_body::discard));
    with_outer_layers(router, state)
}

/// Answers requests that find no connection slot. Does not discard their bodies: a slow one would hold a reserved slot.
fn refusals(state: Arc<ServerState>) -> Router {
    with_outer_layers(Router::new().fallback(async || ApiError::no_connection_slot()), state)
}

/// Adds the layers that every response passes: log, request id, CORS and the shape of errors.
fn with_outer_layers(router: Router<Arc<ServerState>>, state: Arc<ServerState>) -> Router {
    // The layer added last runs first.
    router
        .layer(cors(&state))
        .layer(from_fn_with_state(state.clone(), request_log::log_request))
        .layer(from_fn(messages::convert_errors))
        .layer(from_fn(ollama::convert_errors))
        .with_state(state)
}

/// Time for connections to send their last bytes after the engine is idle.
const SEND_GRACE: Duration = Duration::from_secs(1);

/// Serves all listeners until `shutdown` completes. After that, new requests get 503, and requests in progress finish
/// within the engine's grace period.
pub async fn serve(
    listeners: Vec<(TcpListener, ApiSet)>,
    state: Arc<ServerState>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let (stop, stopped) = watch::channel(false);
    let with_router = |(listener, api)| (listener, router_for(api, state.clone()));
    let listeners = listeners.into_iter().map(with_router).collect();
    let refusals = refusals(state.clone());
    let mut accepting = tokio::spawn(connections::accept(listeners, refusals, state.clone(), stopped));
    let drain = async {
        shutdown.await;
        state.shut_down();
        while !state.models.is_idle() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = state.models.run() => {}
        // The accept loop ends before `stop` only if it panics.
        ended = &mut accepting => return ended.map_err(io::Error::other),
        () = drain => {}
    }
    stop.send_replace(true);
    // Every connection holds a receiver until it is closed.
    let _ = tokio::time::timeout(SEND_GRACE, stop.closed()).await;
    Ok(())
}

fn cors(state: &ServerState) -> CorsLayer {
    let policy = state.origins.clone();
    let configured = state.cors.clone();
    let origins = if configured.as_ref().is_some_and(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::predicate(move |origin, _| configured.as_ref() == Some(origin) || policy.allows_reading(origin))
    };
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([request_log::REQUEST_ID.clone(), header::RETRY_AFTER])
        .max_age(Duration::from_secs(3600))
}

async fn no_such_path(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::no_such_path(request.method().as_str(), path, routes::hint(path))
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}
