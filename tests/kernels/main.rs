//! Executes every GPU kernel on the CPU, from the same source text that a Mac compiles and with the same launches that
//! a Mac encodes.

mod awake;
mod block_selection;
mod card;
mod check;
mod cost;
mod decode_ahead;
mod dense;
mod doctor;
mod double;
mod expert_tiles;
mod experts;
mod faults;
mod forward;
mod gpu;
mod halves;
mod host;
mod layer_spans;
mod layers;
mod linear;
mod lint;
mod lost;
mod mtp;
mod queue;
mod qwen4_exp;
mod record;
mod sequences;
mod streaming;
mod tiles;
#[path = "../support/trace.rs"]
mod trace;
