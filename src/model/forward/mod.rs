//! The forward pass (spec section 2): the same order of operations on every device.
//!
//! ```text
//! h = embed[tokens]
//! for each layer:  h = h + mixer(rms(h))        mixer: gated delta net, or every fourth layer gated attention
//!                  h = h + ffn(rms(h))          ffn: mixture of experts, or dense
//! logits = rms(h) head^T
//! ```

pub mod buffers;
mod moe;

use crate::model::{
    RouterObserver,
    config::Config,
    drafts::hidden_taps::Tapped,
    forward::buffers::{Buffers, LOGITS},
    state::rollback::{DeltaState, Trial},
    state::sequence::LayerState,
    weights::{AttentionWeights, DeltaNetWeights, Dense, Ffn, Mixer, Network},
};
use crate::{
    device::Region,
    error::ModelError,
    experts::{ExpertStore, PassKind},
    ops::{
        self, Attention, Backend, BackendLimits, Conv, DeltaRule, Embedding, ExpertSlots, KvWrite, Linear, Mlp, Norm,
        QkNormRope, Weight,
    },
};
use std::ops::Range;

/// Called at each mark with its number and a delta layer's convolution and delta state.
pub(in crate::model) type Marked<'a> = dyn FnMut(&mut dyn Backend, usize, [Region; 2]) -> Result<(), ModelError> + 'a;

/// Lists that keep their room from pass to pass.
#[derive(Default)]
pub(in crate::model) struct Lists {
    pub turn: Vec<f32>,
    pub moe: moe::Lists,
}

/// Tokens that go through the layers together.
pub(in crate::model) struct Batch<'a> {
    pub ids: &'a [u32],
    /// The rows whose logits are wanted.
    pub logits: Range<usize>,
    /// A prompt's rows want nearly every expert once; those of an answer want what others wanted before.
    pub phase: PassKind,
    /// Rows of a prompt that has more than one, which a device may compute in half precision.
    pub prompt: bool,
    /// A trial has no marks.
    pub trial: Trial,
    pub go_on: &'a (dyn Fn() -> bool + 'a),
}

/// A pass under way: some rows of one sequence.
pub(in crate::model) struct Pass<'a> {
    pub config: &'a Config,
    pub net: &'a Network,
    pub run: &'a mut dyn Backend,
    pub limits: BackendLimits,
    pub experts: Option<&'a ExpertStore>,
    pub slots: &'a ExpertSlots,
    pub b: &'a Buffers,
    /// Positions.
    pub start: usize,
    pub tokens: usize,
    pub phase: PassKind,
    /// Products are in half precision.
    pub half: bool,
    /// The delta nets' states do not take these rows in yet.
    pub trial: Trial,
    pub lists: &'a mut Lists,
    pub go_on: &'a (dyn Fn() -> bool + 'a),
    /// Called with each router's choice that the CPU learns.
    pub observe: Option<&'a mut RouterObserver<'a>>,
    /// Gets the rows that a draft follows.
    pub tapped: &'a mut Tapped,
}

impl Pass<'_> {
    /// All layers. `marks` are numbers of rows, ascending; `mark` gets the delta layers' memory as it was behind each, layer
    /// by layer.
    pub fn layers(
        &mut self,
        ids: &[u32],
        state: &mut [LayerState],
        marks: &[usize],
        mark: &mut Marked<'_>,
    ) -> Result<(), ModelError> {
        let (b, tokens) = (self.b, self.tokens);
        self.run.write_words(b.ids, ids)?;
        self.turn()?;
        self.run.execute(&Embedding { table: &self.net.embed, tokens, ids: b.ids, into: b.h }.into())?;
        self.walk(state, marks, mark)
    }

    /// [`Pass::layers`] behind the embedding.
    pub fn walk(&mut self, state: &mut [LayerState], marks: &[usize], mark: &mut Marked<'_>) -> Result<(), ModelError> {
        let (net, b, tokens) = (self.net, self.b, self.tokens);
        let (mut flush, mut next) = (self.limits.flush, self.limits.flush);
        for (index, (layer, state)) in net.layers.iter().zip(state).enumerate() {
            if !(self.go_on)() {
                return Err(ModelError::GivenUp);
            }
            for from in (0..tokens).step_by(b.block) {
                let rows = from..tokens.min(from + b.block);
                match (&layer.mixer, &mut *state) {
                    (Mixer::Attention(attention), LayerState::Attention(cache)) => {
                        self.attention(layer.norm, attention, cache, rows)?;
                    }
                    (Mixer::DeltaNet(delta), LayerState::DeltaNet(memory)) => {
                        self.delta_net(layer.norm, delta, memory, rows, marks, mark)?;
                    }
                    _ => return Err(ModelError::Config("the state belongs to another model".into())),
                }
            }
            let norm = self.norm(layer.post_norm);
            match &layer.ffn {
                Ffn::Dense(dense) => self.dense(norm, dense)?,
                Ffn::Moe(moe) => {
                    let next = net.layers.get(index + 1).and_then(|layer| layer.ffn.moe());
                    self.moe(index, norm, moe, next)?;
                }
            }
            self.tapped.leave(&mut *self.run, index, b.h, tokens, self.config.hidden)?;
            // A GPU begins while the CPU still encodes, where no layer waits for it. What is handed over at once is computed with
            // fewer pauses.
            let waits = self.experts.is_some_and(|experts| !experts.is_resident());
            if !waits && index + 1 == next {
                self.run.flush()?;
                flush *= 2;
                next += flush;
            }
        }
        Ok(())
    }

    /// The logits of some of the rows, appended to `out`.
    pub fn head(&mut self, rows: Range<usize>, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let (b, hidden, vocab) = (self.b, self.config.hidden, self.config.vocab);
        let head = std::slice::from_ref(self.net.head());
        for first in rows.clone().step_by(LOGITS) {
            let tokens = LOGITS.min(rows.end - first);
            let (x, norm) = (b.h.rows(first, tokens, hidden), Some(self.norm(self.net.norm)));
            self.run.execute(&Linear { x, tokens, norm, matrices: head, y: b.logits, add: false }.into())?;
            let at = out.len();
            out.resize(at + tokens * vocab, 0.0);
            self.run.read_floats(b.logits, &mut out[at..])?;
        }
        Ok(())
    }

    fn norm(&self, weight: Region) -> Norm {
        Norm { weight, eps: self.config.eps, keep: None }
    }

    /// Cosines and sines of this pass's positions.
    pub fn turn(&mut self) -> Result<(), ModelError> {
        let (rotated, theta) = (self.config.attention.rope_dim, self.config.rope_theta);
        let half = rotated / 2;
        let turn = &mut self.lists.turn;
        turn.clear();
        for position in self.start..self.start + self.tokens {
            for j in 0..half {
                let angle = position as f64 * theta.powf(-2.0 * j as f64 / rotated as f64);
                turn.extend([angle.cos() as f32, angle.sin() as f32]);
            }
        }
        Ok(self.run.write(self.b.turn.floats(turn.len()), bytemuck::cast_slice(turn))?)
    }

    /// `h += W_o (softmax(q k^T) v * sigmoid(gate))` of some rows (spec 2.1).
    fn attention(
        &mut self,
        norm: Region,
        attention: &AttentionWeights,
        cache: &crate::ops::KvCache,
        rows: Range<usize>,
    ) -> Result<(), ModelError> {
        let AttentionWeights { shape, qkv, q_norm, k_norm, out } = attention;
        let (b, start, tokens, cache) = (self.b, self.start + rows.start, rows.len(), *cache);
        let (norm, x) = (Some(self.norm(norm)), self.rows(&rows));
        self.run.execute(&Linear { x, tokens, norm, matrices: qkv, y: b.proj, add: false }.into())?;
        let turn = b.turn.rows(rows.start, tokens, self.config.attention.rope_dim);
        let turn = QkNormRope { q_norm: *q_norm, k_norm: *k_norm, rope_table: turn };
        self.run.execute(&KvWrite { shape, start, tokens, proj: b.proj, norm_rope: turn, q: b.out, cache }.into())?;
        let (q, proj, partials, y) = (b.out, b.proj, b.partials, b.y(tokens));
        self.run.execute(&Attention { shape, start, tokens, q, cache, proj, partials, y }.into())?;
        Ok(self.run.execute(&self.back(out, &rows).into())?)
    }

    /// `h += W_out (rms(delta rule(conv(q k v))) * silu(z))` of some rows (spec 2.2). The state is seen behind each of `marks` rows
    /// of the pass: they are walked one by one anyway.
    fn delta_net(
        &mut self,
        norm: Region,
        delta: &DeltaNetWeights,
        memory: &mut DeltaState,
        rows: Range<usize>,
        marks: &[usize],
        mark: &mut Marked<'_>,
    ) -> Result<(), ModelError> {
        let DeltaNetWeights { shape, project, taps, decay, norm: gated, out } = delta;
        let (b, all, trial) = (self.b, rows.len(), self.trial);
        // A mark between two blocks is the former's.
        let past = if rows.start > 0 { marks.partition_point(|mark| *mark <= rows.start) } else { 0 };
        let marks = &marks[past..marks.partition_point(|mark| *mark <= rows.end)];
        let norm = Some(self.norm(norm));
        let [all_proj, all_mixed] =
            trial.and_then(|before| memory.room(shape, before, all)).unwrap_or([b.proj, b.mixed]);
        let project = Linear { x: self.rows(&rows), tokens: all, norm, matrices: project, y: all_proj, add: false };
        let back = self.back(out, &rows);
        // Convolution and rule of some of the rows.
        let walk = |memory: &DeltaState, from: usize, tokens: usize| {
            let (past, stored) = (memory.past(shape), memory.stored(trial, tokens));
            let proj = all_proj.rows(from, tokens, shape.width());
            let mixed = all_mixed.rows(from, tokens, shape.channels());
            let [out, y] = [b.out, b.y(all)].map(|region| region.rows(from, tokens, shape.values()));
            let (decay, norm, state) = (*decay, *gated, memory.heads);
            (
                Conv { shape, tokens, proj, weight: *taps, past, stored, state: memory.conv, out: mixed },
                DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm, out, y },
            )
        };
        if marks.is_empty() {
            let (conv, rule) = walk(memory, 0, all);
            self.run.execute(&(&ops::DeltaNet { project, conv, rule, back }).into())?;
            memory.walked(trial, all);
            return Ok(());
        }
        self.run.execute(&project.into())?;
        let mut from = 0;
        for (index, to) in marks.iter().map(|mark| mark - rows.start).chain([all]).enumerate() {
            if to > from {
                let (conv, rule) = walk(memory, from, to - from);
                self.run.execute(&conv.into())?;
                self.run.execute(&rule.into())?;
                memory.walked(trial, to - from);
            }
            from = to;
            if index < marks.len() {
                mark(&mut *self.run, past + index, [memory.conv, memory.heads])?;
            }
        }
        Ok(self.run.execute(&back.into())?)
    }

    /// `h += y W^T`: the end of a mixer.
    fn back<'w>(&self, out: &'w Weight, rows: &Range<usize>) -> Linear<'w> {
        let (x, tokens) = (self.b.y(rows.len()), rows.len());
        Linear { x, tokens, norm: None, matrices: std::slice::from_ref(out), y: self.rows(rows), add: true }
    }

    /// Rows of the residual stream.
    fn rows(&self, rows: &Range<usize>) -> Region {
        self.b.h.rows(rows.start, rows.len(), self.config.hidden)
    }

    /// `h += Down(silu(Gate x) * Up x)`.
    fn dense(&mut self, norm: Norm, dense: &Dense) -> Result<(), ModelError> {
        let (b, tokens) = (self.b, self.tokens);
        let (gate_up, down) = (&dense.gate_up, &dense.down);
        let (scores, act) = (b.room.scores, b.room.act);
        Ok(self.run.execute(&Mlp { tokens, norm, gate_up, down, scores, act, h: b.h }.into())?)
    }
}
