//! The operations of a forward pass as values.

use super::{
    DeltaShape, Weight,
    attention::{Attention, AttentionRows, AttentionShape, KvWrite},
    block_attention::{BlockAttention, BlockAttentionRows, IndexerShape},
    conv::Conv,
    delta::{DeltaNet, DeltaNetRows, DeltaRule},
    embedding::Embedding,
    experts::{CombineExperts, Experts, MoeWeights},
    linear::Linear,
    mlp::Mlp,
    ngram::{NgramInject, NgramInjectRows},
    router::Router,
    sample::Sample,
    streams::{ReadStreams, WriteStreams},
};
use crate::device::{BufferAccess, Region};

/// Defines [`Op`] with one variant for each operation.
macro_rules! operations {
    ($lifetime:lifetime, $($name:ident($operation:ty)),* $(,)?) => {
        /// One operation: what to compute and which memory to read and write. The backend decides how. A large
        /// operation is held by reference.
        #[derive(Debug, Clone, Copy)]
        pub enum Op<$lifetime> {
            $($name($operation)),*
        }

        $(impl<$lifetime> From<$operation> for Op<$lifetime> {
            fn from(op: $operation) -> Self {
                Op::$name(op)
            }
        })*

        impl Op<'_> {
            /// Calls `see` with every activation and state region of the operation and how it is accessed. Weights are
            /// read-only and are not listed.
            pub fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
                match self {
                    $(Op::$name(op) => op.touches(see)),*
                }
            }
        }
    };
}

operations! {
    'a,
    Embedding(Embedding<'a>),
    Linear(Linear<'a>),
    Conv(Conv<'a>),
    DeltaRule(DeltaRule<'a>),
    DeltaNet(&'a DeltaNet<'a>),
    DeltaNetRows(&'a DeltaNetRows<'a>),
    KvWrite(KvWrite<'a>),
    Attention(Attention<'a>),
    AttentionRows(&'a AttentionRows<'a>),
    BlockAttention(&'a BlockAttention<'a>),
    BlockAttentionRows(&'a BlockAttentionRows<'a>),
    ReadStreams(&'a ReadStreams<'a>),
    WriteStreams(WriteStreams<'a>),
    NgramInject(NgramInject<'a>),
    NgramInjectRows(NgramInjectRows<'a>),
    Mlp(Mlp<'a>),
    Router(Router<'a>),
    Experts(Experts<'a>),
    CombineExperts(CombineExperts<'a>),
    Sample(Sample<'a>),
}

/// A part of a model that a backend may not support.
#[derive(Clone, Copy)]
pub enum ModelPart<'a> {
    Weight(&'a Weight),
    Attention(&'a AttentionShape),
    Indexer(&'a IndexerShape),
    Delta(&'a DeltaShape),
    /// A mixture of experts whose weights are stored in slots.
    Moe(&'a MoeWeights),
}
