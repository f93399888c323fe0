//! Writes a trace of expert choices, the input of `benches/expert_cache.rs`.
//!
//! The trace has one line per fetch: `d` (decode) or `p` (prefill), the layer, and the distinct experts. If the logits
//! are known, one line per row precedes this line: `n`, the layer, k, and the logit of every expert.

use moestro_compute::experts::{ExpertChoice, FetchObserver, PassSize};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// Creates an observer for `ExpertStore::observe` that writes every choice to the file `path`.
pub fn write_to(path: &Path) -> FetchObserver {
    let mut out = BufWriter::new(File::create(path).expect("the trace file"));
    Box::new(move |layer, choice, size| write_choice(&mut out, layer, choice, size).expect("the trace is written"))
}

fn write_choice(out: &mut impl Write, layer: usize, choice: &ExpertChoice<'_>, size: PassSize) -> std::io::Result<()> {
    let tokens = choice.ids.len() / choice.k.max(1);
    if tokens > 0 && !choice.logits.is_empty() {
        for row in choice.logits.chunks(choice.logits.len() / tokens) {
            write!(out, "n {layer} {}", choice.k)?;
            row.iter().try_for_each(|logit| write!(out, " {logit:.3}"))?;
            writeln!(out)?;
        }
    }
    let mut distinct = choice.ids.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    write!(out, "{} {layer}", if size == PassSize::Small { 'd' } else { 'p' })?;
    distinct.iter().try_for_each(|expert| write!(out, " {expert}"))?;
    writeln!(out)
}
