//! Tests of the engine's public interface with a mock model.

mod constraint;
mod kept_sequences;
mod parallel;
mod scheduler;
mod shared_head;
