//! CpuMemory aligned to cache lines.

/// 64 bytes that begin where a line of the cache does: the widest register.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CacheLine([u8; 64]);

impl CacheLine {
    pub const ZERO: Self = Self([0; 64]);
}
