//! [`ExpertChoice`]: the router's output for one layer.

/// The kind of forward pass that needs experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// A chunk of a prompt. A chunk needs nearly every expert of a layer, so the number of reads in progress is
    /// limited.
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
    /// Router logits of all experts, `[rows, experts]`, for the eviction scores. Empty if unknown.
    pub logits: &'a [f32],
}
