//! The operations of a forward pass as values.

use super::{
    Weight,
    attention::{Attention, AttentionRows, AttentionShape, KvWrite},
    block_attention::{BlockAttention, IndexerShape},
    conv::Conv,
    delta::{DeltaNet, DeltaNetRows, DeltaRule, DeltaShape},
    embedding::Embedding,
    experts::{CombineExperts, Experts, MoeWeights},
    linear::Linear,
    mlp::Mlp,
    ngram::NgramInject,
    router::Router,
    streams::{ReadStreams, WriteStreams},
};
use crate::device::{BufferAccess, Region};

/// One operation: what to compute and which memory to read and write. The backend decides how.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    Embedding(Embedding<'a>),
    Linear(Linear<'a>),
    Conv(Conv<'a>),
    DeltaRule(DeltaRule<'a>),
    /// Held by reference, because a [`DeltaNet`] contains four operations.
    DeltaNet(&'a DeltaNet<'a>),
    DeltaNetRows(&'a DeltaNetRows<'a>),
    KvWrite(KvWrite<'a>),
    Attention(Attention<'a>),
    AttentionRows(&'a AttentionRows<'a>),
    /// Held by reference, because a [`BlockAttention`] is large.
    BlockAttention(&'a BlockAttention<'a>),
    ReadStreams(&'a ReadStreams<'a>),
    WriteStreams(WriteStreams<'a>),
    NgramInject(NgramInject<'a>),
    Mlp(Mlp<'a>),
    Router(Router<'a>),
    Experts(Experts<'a>),
    CombineExperts(CombineExperts<'a>),
}

macro_rules! each {
    ($self:ident, $op:ident => $body:expr) => {
        match $self {
            Op::Embedding($op) => $body,
            Op::Linear($op) => $body,
            Op::Conv($op) => $body,
            Op::DeltaRule($op) => $body,
            Op::DeltaNet($op) => $body,
            Op::DeltaNetRows($op) => $body,
            Op::KvWrite($op) => $body,
            Op::Attention($op) => $body,
            Op::AttentionRows($op) => $body,
            Op::BlockAttention($op) => $body,
            Op::ReadStreams($op) => $body,
            Op::WriteStreams($op) => $body,
            Op::NgramInject($op) => $body,
            Op::Mlp($op) => $body,
            Op::Router($op) => $body,
            Op::Experts($op) => $body,
            Op::CombineExperts($op) => $body,
        }
    };
}
pub(super) use each;

impl Op<'_> {
    /// Calls `see` with every activation and state region of the operation and how it is accessed. Weights are
    /// read-only and are not listed.
    pub fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        each!(self, op => op.touches(see));
    }
}

macro_rules! from {
    ($($name:ident),*) => {
        $(impl<'a> From<$name<'a>> for Op<'a> {
            fn from(op: $name<'a>) -> Self {
                Op::$name(op)
            }
        })*
    };
}
from!(
    Embedding,
    Linear,
    Conv,
    DeltaRule,
    KvWrite,
    Attention,
    WriteStreams,
    NgramInject,
    Mlp,
    Router,
    Experts,
    CombineExperts
);

/// Like `from`, for operations that [`Op`] holds by reference.
macro_rules! from_reference {
    ($($name:ident),*) => {
        $(impl<'a> From<&'a $name<'a>> for Op<'a> {
            fn from(op: &'a $name<'a>) -> Self {
                Op::$name(op)
            }
        })*
    };
}
from_reference!(AttentionRows, BlockAttention, DeltaNet, DeltaNetRows, ReadStreams);

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
