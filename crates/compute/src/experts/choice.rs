//! [`ExpertChoice`]: the router's output for one layer.

/// How many experts of a layer a forward pass needs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassSize {
    /// The experts of one row, or of a few rows whose experts all fit in the slots. All missing experts are read at
    /// once.
    Small,
    /// The experts of a chunk of a prompt, which are nearly all of a layer, or of decoded rows that need more experts
    /// than there are slots. The number of reads in progress is limited.
    Large,
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
