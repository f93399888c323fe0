//! [`ExpertChoice`]: the router's output for one layer.

/// The kind of forward pass that needs experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// A chunk of a prompt with several rows. It needs nearly every expert of a layer, so the number of reads in
    /// progress is limited. Also a pass that decodes more rows than the slots have room for.
    Prefill,
    /// One row, or a few rows whose experts all fit in the slots. All missing experts are read at once.
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
