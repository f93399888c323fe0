//! The HTTP server: OpenAI's, Anthropic's and Ollama's APIs over HTTP/1.1. This module does not use tensors.
//!
//! * [`server`] has the router, the layers, start and shutdown; [`state`] is shared by all handlers.
//! * `routes` is the table of paths, and `errors` has every status with its reason.
//! * `generate` is the life of a generation request of any API.
//! * `layers` wraps every request: log, key, origin, connections, timeouts, gzip, memory.
//! * `request` turns a body of any API into an engine request.
//! * `output` turns engine events into text, reasoning and tool calls.
//! * `openai`, `anthropic` and `ollama` are the wire formats; [`sse`] writes their streams.
//! * `models` loads one model at a time and queues requests for other models.
//! * `admin` answers `/health`, `/metrics` and `/experts`, unloads models, and clears the prompt cache. `health` says
//!   whether the model's files can be read. `tokenize` has the tokenizer's endpoints, `openapi` writes `/openapi.json`.
//! * `page` is the chat in the browser, joined from the files in `page/`.
//!
//! The server answers before a model is loaded: `/metrics` and the page work, and `/health` and all requests that need
//! a model get 503.

mod admin;
mod anthropic;
mod errors;
mod generate;
mod health;
mod layers;
mod models;
mod ollama;
mod openai;
mod openapi;
mod output;
mod page;
mod request;
mod routes;
mod server;
mod sse;
mod state;
mod tokenize;

use errors::{ApiError, quote};
pub use layers::{OriginPolicy, REQUEST_LOG, RequestMemory, Timeouts};
pub use models::{
    HostTimeouts, HostedModel, LoadFailure, LoadedModel, ModelCard, ModelEntry, ModelHost, ModelLoader, RequestLimits,
};
pub use request::ImageUrls;
pub use server::{ApiSet, router, serve};
pub use state::{BODY_LIMIT, ServerState};
