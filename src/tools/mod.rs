//! For whoever wants to know a machine, a model or this program better: [`mod@bench`], [`doctor`], [`info`] and [`synth`]. Serving
//! needs none of them.

pub mod belady;
pub mod bench;
pub mod doctor;
pub mod info;
mod measure;
mod simulate;
pub mod synth;
