//! Tests of the HTTP API over a real port: every endpoint, with a mock model that gives a fixed answer or repeats its
//! prompt.

mod admin;
mod agents;
mod bodies;
mod cache_salt;
mod chat;
mod client;
mod completions;
mod connections;
mod context_full;
mod continue_final;
mod deadline;
mod deferred_tools;
mod desktop_clients;
mod image_placeholder;
mod images;
mod leave;
mod malformed;
mod messages;
mod models;
mod mutated_requests;
mod ollama;
mod pages;
mod queue;
mod request_memory;
mod response_format;
mod responses;
mod reuse_tools;
mod server;
#[cfg(target_os = "linux")]
mod soak;
mod turns;
mod typed_tools;
mod unknown_blocks;
