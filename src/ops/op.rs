//! The operations of a forward pass as values.

use super::{
    Weight,
    attention::{Attend, CacheWrite, Heads},
    conv::Conv,
    delta::{Delta, DeltaNet, DeltaRule},
    embedding::Embed,
    experts::{Combine, Experts, Mixture},
    linear::Project,
    mlp::Mlp,
    router::Route,
};
use crate::device::{BufferAccess, Region};

/// One operation of the forward pass: a value that says what to do with which memory, and not how.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    Embed(Embed<'a>),
    Project(Project<'a>),
    Conv(Conv<'a>),
    DeltaRule(DeltaRule<'a>),
    /// By reference: it is four operations in one.
    DeltaNet(&'a DeltaNet<'a>),
    CacheWrite(CacheWrite<'a>),
    Attend(Attend<'a>),
    Mlp(Mlp<'a>),
    Route(Route<'a>),
    Experts(Experts<'a>),
    Combine(Combine<'a>),
}

macro_rules! each {
    ($self:ident, $op:ident => $body:expr) => {
        match $self {
            Op::Embed($op) => $body,
            Op::Project($op) => $body,
            Op::Conv($op) => $body,
            Op::DeltaRule($op) => $body,
            Op::DeltaNet($op) => $body,
            Op::CacheWrite($op) => $body,
            Op::Attend($op) => $body,
            Op::Mlp($op) => $body,
            Op::Route($op) => $body,
            Op::Experts($op) => $body,
            Op::Combine($op) => $body,
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
from!(Embed, Project, Conv, DeltaRule, CacheWrite, Attend, Mlp, Route, Experts, Combine);

impl<'a> From<&'a DeltaNet<'a>> for Op<'a> {
    fn from(op: &'a DeltaNet<'a>) -> Self {
        Op::DeltaNet(op)
    }
}

/// A part of a model that a device may be unable to compute.
#[derive(Clone, Copy)]
pub enum Part<'a> {
    Weight(&'a Weight),
    Heads(&'a Heads),
    /// With the taps of its convolution.
    Delta(&'a Delta, usize),
    /// Laid out in slots.
    Mixture(&'a Mixture),
}
