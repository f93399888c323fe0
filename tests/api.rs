//! Tests of the HTTP API over a real port: every endpoint, with a mock model that gives a fixed answer or repeats its
//! prompt.

#[path = "api/admin.rs"]
mod admin;
#[path = "api/agents.rs"]
mod agents;
#[path = "api/bodies.rs"]
mod bodies;
#[path = "api/cache_salt.rs"]
mod cache_salt;
#[path = "api/chat.rs"]
mod chat;
#[path = "api/client.rs"]
mod client;
#[path = "api/completions.rs"]
mod completions;
#[path = "api/connections.rs"]
mod connections;
#[path = "api/context_full.rs"]
mod context_full;
#[path = "api/continue_final.rs"]
mod continue_final;
#[path = "api/deadline.rs"]
mod deadline;
#[path = "api/deferred_tools.rs"]
mod deferred_tools;
#[path = "api/desktop_clients.rs"]
mod desktop_clients;
#[path = "api/images.rs"]
mod images;
#[path = "api/leave.rs"]
mod leave;
#[path = "api/malformed.rs"]
mod malformed;
#[path = "api/messages.rs"]
mod messages;
#[path = "api/models.rs"]
mod models;
#[path = "api/mutated_requests.rs"]
mod mutated_requests;
#[path = "api/ollama.rs"]
mod ollama;
#[path = "api/pages.rs"]
mod pages;
#[path = "api/queue.rs"]
mod queue;
#[path = "api/request_memory.rs"]
mod request_memory;
#[path = "api/response_format.rs"]
mod response_format;
#[path = "api/responses.rs"]
mod responses;
#[path = "api/reuse_tools.rs"]
mod reuse_tools;
#[path = "api/server.rs"]
mod server;
#[path = "api/turns.rs"]
mod turns;
#[path = "api/typed_tools.rs"]
mod typed_tools;
#[path = "api/unknown_blocks.rs"]
mod unknown_blocks;
