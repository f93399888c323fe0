//! Formats byte counts.

use std::fmt;

/// A byte count, displayed as `1.50 GiB`.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x400 => write!(f, "{} B", self.0),
            0x400..0x10_0000 => write!(f, "{:.1} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", bytes / (1u64 << 20) as f64),
            _ => write!(f, "{:.2} GiB", bytes / (1u64 << 30) as f64),
        }
    }
}
