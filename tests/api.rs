//! API tests: every endpoint over a real port, with a mock model that repeats its prompt or says a fixed answer.

#[path = "api/admin.rs"]
mod admin;
#[path = "api/agents.rs"]
mod agents;
#[path = "api/bodies.rs"]
mod bodies;
#[path = "api/chat.rs"]
mod chat;
#[path = "api/client.rs"]
mod client;
#[path = "api/completions.rs"]
mod completions;
#[path = "api/connections.rs"]
mod connections;
#[path = "api/deadline.rs"]
mod deadline;
#[path = "api/forms.rs"]
mod forms;
#[path = "api/leave.rs"]
mod leave;
#[path = "api/malformed.rs"]
mod malformed;
#[path = "api/messages.rs"]
mod messages;
#[path = "api/models.rs"]
mod models;
#[path = "api/pages.rs"]
mod pages;
#[path = "api/prefill.rs"]
mod prefill;
#[path = "api/responses.rs"]
mod responses;
#[path = "api/server.rs"]
mod server;
