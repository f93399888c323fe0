//! A record of what was asked for, for benches: one line a route, `d` (decode) or `p` (prefill), layer, experts.

use super::Phase;
use crate::error::StoreError;
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

pub struct Trace {
    out: BufWriter<File>,
}

impl Trace {
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        let file = File::create(path).map_err(|source| StoreError::Io { path: path.to_owned(), source })?;
        Ok(Self { out: BufWriter::new(file) })
    }

    /// A record that cannot be written is not worth ending a request for.
    pub fn route(&mut self, layer: usize, experts: &[u32], phase: Phase) {
        let letter = if phase == Phase::Decode { 'd' } else { 'p' };
        let _ = write!(self.out, "{letter} {layer}");
        for expert in experts {
            let _ = write!(self.out, " {expert}");
        }
        let _ = writeln!(self.out);
    }
}
