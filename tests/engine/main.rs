//! Tests of the engine's public interface with a mock model.

mod constraint;
mod kept_sequences;
#[path = "../support/mock_model.rs"]
mod mock_model;
mod parallel;
mod scheduler;
