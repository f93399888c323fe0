//! Moestro serves Qwen3.5, 3.6 and 3.8 mixture-of-experts models that are larger than memory.
//!
//! # Layout
//!
//! Imports run one way:
//!
//! ```text
//! http -> engine -> model -> checkpoint -> {ops, experts} -> device -> platform
//! ```
//!
//! `tests/house.rs` fails on any other import. `docs/architecture.md` explains each module, the life of a request and
//! the vocabulary.
//!
//! * [`http`]: OpenAI's, Anthropic's and Ollama's APIs, server-sent events, limits. Does not use tensors.
//! * [`chat`]: messages to tokens, tokens to text, schemas to token masks. Pure functions and small state machines.
//! * [`engine`]: the thread that owns the model. Everything else sends it an [`engine::Request`] and reads
//!   [`engine::Event`]s. Dropping the receiver cancels the request.
//! * [`model`]: the architecture. Read [`model::reference`] first: plain tensors, one function per formula.
//!   `model::forward` is the same architecture as operations on buffers.
//! * [`ops`]: one folder per operation, with its CPU code and its GPU launches.
//! * [`experts`]: reads experts from disk into slots, and decides which experts stay. Computes no part of the model.
//! * [`checkpoint`]: a model's files: names, quantization, packs, downloads.
//! * [`device`]: memory that CPU, SSD and GPU share, and launches on GPUs. Does not depend on operations.
//! * [`platform`]: the operating system: files, threads, memory and its limits.
//! * [`config`] holds checked settings, [`plan`] the memory plan. Every module may use [`metrics`] and [`error`].
//! * [`cli`] declares flags, [`command`] has one file per subcommand, [`tools`] has bench, doctor, info and synth.
//!   [`demo`] is the model inside the binary.
//!
//! A request becomes:
//!
//! ```text
//! ChatRequest -> GenerationRequest -> prompt -> token ids -> engine::Request -> Event -> delta -> SSE frame
//! ```

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
