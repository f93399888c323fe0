//! The operations of a forward pass as values.

use super::{
    Weight,
    attention::{Attention, AttentionShape, KvWrite},
    conv::Conv,
    delta::{DeltaNet, DeltaRule, DeltaShape},
    embedding::Embedding,
    experts::{CombineExperts, Experts, MoeWeights},
    linear::Linear,
    mlp::Mlp,
    router::Router,
};
use crate::device::{BufferAccess, Region};

/// One operation of the forward pass: a value that says what to do with which memory, and not how.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    Embedding(Embedding<'a>),
    Linear(Linear<'a>),
    Conv(Conv<'a>),
    DeltaRule(DeltaRule<'a>),
    /// By reference: it is four operations in one.
    DeltaNet(&'a DeltaNet<'a>),
    KvWrite(KvWrite<'a>),
    Attention(Attention<'a>),
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
            Op::KvWrite($op) => $body,
            Op::Attention($op) => $body,
            Op::Mlp($op) => $body,
            Op::Router($op) => $body,
            Op::Experts($op) => $body,
            Op::CombineExperts($op) => $body,
        }
    };
}
pub(super) use each;

impl Op<'_> {
    /// Shows every activation and state that the operation touches, and how. Weights are not listed: nothing writes them.
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
from!(Embedding, Linear, Conv, DeltaRule, KvWrite, Attention, Mlp, Router, Experts, CombineExperts);

impl<'a> From<&'a DeltaNet<'a>> for Op<'a> {
    fn from(op: &'a DeltaNet<'a>) -> Self {
        Op::DeltaNet(op)
    }
}

/// A part of a model that a device may be unable to compute.
#[derive(Clone, Copy)]
pub enum ModelPart<'a> {
    Weight(&'a Weight),
    Attention(&'a AttentionShape),
    Delta(&'a DeltaShape),
    /// Laid out in slots.
    Moe(&'a MoeWeights),
}
