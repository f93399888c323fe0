//! `ExpertChoice`: the experts that a layer needs, and the kind of forward pass.

/// The kind of forward pass that needs experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// A chunk of a prompt. It needs nearly every expert of a layer, so a bounded number of reads is queued at a time.
    Prefill,
    /// One token, or the few tokens of a draft. All missing experts are read at once.
    Decode,
}

/// The experts that the router of a layer selected for some rows.
#[derive(Debug, Clone, Copy)]
pub struct ExpertChoice<'a> {
    /// The selected experts, `k` per row. Assignment `row * k + rank` is one (token, rank) pair.
    pub ids: &'a [u32],
    pub k: usize,
    /// Every expert's logit, `[rows, experts]`; empty if unknown. Used for eviction scores.
    pub logits: &'a [f32],
}
