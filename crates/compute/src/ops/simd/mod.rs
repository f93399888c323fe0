//! The base of the code for each instruction set: the list of sets, vectors of sixteen floats, and a macro that compiles
//! a function for each set. All instruction sets give the same bytes.

mod cache_line;
pub(super) mod float;
mod isa;
pub(super) mod math;
mod out_ptr;
pub(crate) mod vector;
mod wide;

pub(crate) use cache_line::CacheLine;
pub use isa::Isa;
pub use out_ptr::OutPtr;
pub(crate) use vector::Vector;
pub(crate) use wide::wide;

#[cfg(test)]
pub(crate) mod tests;
