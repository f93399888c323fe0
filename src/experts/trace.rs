//! A record of what was asked for, for `benches/expert_cache.rs`. One line a layer: `d` (decode) or `p` (prefill), layer,
//! distinct experts. Before it, if the logits are known, one line a row: `n`, layer, k, and every expert's logit.

use super::{Choice, Phase};
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

    // A record that cannot be written is not worth ending a request for: hence the results are let go.

    pub fn ask(&mut self, layer: usize, choice: &Choice<'_>, distinct: impl Iterator<Item = u32>, phase: Phase) {
        let tokens = choice.ids.len() / choice.k.max(1);
        if tokens > 0 && !choice.logits.is_empty() {
            for row in choice.logits.chunks(choice.logits.len() / tokens) {
                let _ = write!(self.out, "n {layer} {}", choice.k);
                for logit in row {
                    let _ = write!(self.out, " {logit:.3}");
                }
                let _ = writeln!(self.out);
            }
        }
        let _ = write!(self.out, "{} {layer}", if phase == Phase::Decode { 'd' } else { 'p' });
        for expert in distinct {
            let _ = write!(self.out, " {expert}");
        }
        let _ = writeln!(self.out);
    }
}
