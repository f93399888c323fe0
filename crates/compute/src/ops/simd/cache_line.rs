//! Cache-line aligned memory.

/// 64 bytes that start at a cache line, as many as the widest register has.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CacheLine([u8; 64]);

impl CacheLine {
    pub const ZERO: Self = Self([0; 64]);
}
