//! Moestro serves Qwen3.5/3.6 mixture-of-experts models that are larger than memory.
//!
//! # Layout
//!
//! Imports run one way: `http -> engine -> model -> checkpoint -> {ops, experts} -> device -> platform`. `tests/house.rs` fails on any other edge.
//!
//! * [`http`] is what clients see: OpenAI's wire format, axum routes, server-sent events. It knows no tensor.
//! * [`chat`] turns messages into tokens and tokens into text, and knows which tokens a schema allows: pure functions and
//!   small state machines.
//! * [`engine`] is the one thread that owns the model. Everything else sends it a [`engine::Request`] and reads
//!   [`engine::Event`]s; a receiver that is dropped is a cancellation.
//! * [`model`] is Qwen3.5. [`model::reference`] is the text to read first: plain tensors, one function a formula. The rest is
//!   the same, fast: embedding, layers of gated attention or gated delta net with a mixture of experts, head.
//! * [`ops`] has one folder for each operation: what it means, its CPU code, its launches. Devices run them as values.
//! * [`experts`] brings bytes from disk into slots. It knows no mathematics.
//! * [`checkpoint`] knows the files: their names, how each matrix is stored, packs, the hub.
//! * [`device`] is memory that CPU, SSD and GPU see, and what runs launches on it. It knows no operation.
//! * [`platform`] is the operating system: files, threads, memory and its limits.
//! * [`config`] says what was asked for, checked; [`plan`] what it costs in memory; [`metrics`] and [`error`] are leaves
//!   that every room may use.
//!
//! * [`cli`] says what was typed, [`command`] has one file for each subcommand that serves, with what they share; [`tools`] has
//!   the others (bench, doctor, info, synth). They sit on top of everything, with `main.rs`; [`demo`] is the model inside
//!   the binary.
//!
//! A request's way: `ChatRequest -> String -> ids -> Request -> logits -> Event -> delta -> SSE frame`.

pub mod chat;
pub mod checkpoint;
pub mod cli;
pub mod command;
pub mod config;
pub mod demo;
pub mod device;
pub mod engine;
pub mod error;
pub mod experts;
pub mod http;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod plan;
pub mod platform;
pub mod tools;

// Unit tests share helpers with the integration tests, which name this crate.
#[cfg(test)]
extern crate self as moestro;
