//! Moestro serves Qwen3.5, 3.6 and 3.8 mixture-of-experts models that are larger than memory.
//!
//! # Layout
//!
//! This crate is the program: command line, subcommands and HTTP. The rooms below it are crates of their own, and imports
//! run one way:
//!
//! ```text
//! moestro -> moestro-engine -> moestro-model -> moestro-compute -> moestro-base
//! moestro -> moestro-chat -> moestro-base
//! ```
//!
//! `docs/architecture.md` explains each room, the life of a request and the vocabulary.
//!
//! * [`http`]: OpenAI's, Anthropic's and Ollama's APIs, server-sent events, limits. Does not use tensors.
//! * [`config`] holds checked settings. [`cli`] declares flags, [`command`] has one file per subcommand, [`tools`] has
//!   bench, doctor, info and synth. [`service`] writes the files of launchd and systemd. [`demo`] is the model inside the
//!   binary.
//! * [`moestro_chat`]: messages to tokens, tokens to text, schemas to token masks. Pure functions and small state
//!   machines.
//! * [`moestro_engine`]: the thread that owns the model. Everything else sends it a [`moestro_engine::Request`] and reads
//!   [`moestro_engine::Event`]s. Dropping the receiver cancels the request.
//! * [`moestro_model`]: a model's files, its architecture, and the memory plan.
//! * [`moestro_compute`]: memory shared with GPUs, operations, and experts read from disk.
//! * [`moestro_base`]: the operating system, metrics, and errors of files.
//!
//! A request becomes:
//!
//! ```text
//! request of an API -> GenerationRequest -> prompt -> token ids -> engine::Request -> Event -> delta -> SSE frame
//! ```

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod cli;
pub mod command;
pub mod config;
pub mod demo;
pub mod error;
pub mod http;
pub mod service;
pub mod tools;
