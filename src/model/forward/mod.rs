//! The forward pass: the same order of operations on every device.
//!
//! ```text
//! h = embed[ids]
//! for each layer:  h = h + mixer(rms_norm(h))    mixer: gated attention in every fourth layer, else a gated delta net
//!                  h = h + ffn(rms_norm(h))      ffn: mixture of experts, dense in small models
//! logits = rms_norm(h) W_head^T
//! ```
//!
//! Each step is an operation on buffers. A CPU runs it at once, a GPU encodes it. The mixers and feed-forwards read like
//! their counterparts in [`reference`](mod@crate::model::reference).

mod attention;
pub mod buffers;
mod delta_net;
pub mod head;
mod moe;
pub mod pass;

use crate::{
    device::Region,
    error::ModelError,
    model::{
        state::sequence::LayerState,
        weights::{DenseWeights, Ffn, Mixer, Network},
    },
    ops::{Embedding, Mlp},
};
use pass::{LayerHooks, Pass};

/// Runs a chunk through the whole network and appends the logits it asks for to `logits`.
pub fn forward(
    net: &Network,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
    logits: &mut Vec<f32>,
) -> Result<(), ModelError> {
    pass.backend.prompt(pass.chunk.half.then_some(pass.buffers.half));
    let done = embed(net, pass).and_then(|()| forward_layers(net, state, pass, hooks));
    pass.backend.prompt(None);
    let done = done.and_then(|()| head::append_logits(net, pass, logits));
    pass.finish(done)
}

/// `h = embed[ids]`.
fn embed(net: &Network, pass: &mut Pass<'_>) -> Result<(), ModelError> {
    pass.write_inputs()?;
    let (tokens, ids, into) = (pass.rows(), pass.buffers.ids, pass.buffers.h);
    pass.execute(Embedding { table: &net.embed, tokens, ids, into })
}

/// All layers, from the residual stream h back to h.
pub fn forward_layers(
    net: &Network,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
) -> Result<(), ModelError> {
    let streams = pass.experts.is_some_and(|experts| !experts.is_resident());
    pass.backend.begin_layers(streams);
    for (index, (layer, state)) in net.layers.iter().zip(state).enumerate() {
        hooks.before_layer()?;
        layer.mixer.forward(layer.norm, state, pass, hooks)?;
        let next = net.layers.get(index + 1).map(|next| &next.ffn);
        layer.ffn.forward(index, layer.post_norm, next, pass, hooks)?;
        hooks.after_layer(index, pass)?;
        pass.backend.end_layer()?;
    }
    Ok(())
}

impl Mixer {
    fn forward(
        &self,
        norm: Region,
        state: &mut LayerState,
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
    ) -> Result<(), ModelError> {
        for rows in pass.mixer_blocks() {
            match (self, &mut *state) {
                (Mixer::Attention(attention), LayerState::Attention(cache)) => {
                    attention.forward(norm, rows, *cache, pass)?;
                }
                (Mixer::DeltaNet(delta_net), LayerState::DeltaNet(state)) => {
                    delta_net.forward(norm, rows, state, pass, &mut hooks.marks)?;
                }
                _ => return Err(ModelError::Config("the sequence's state belongs to another model".into())),
            }
        }
        Ok(())
    }
}

impl Ffn {
    fn forward(
        &self,
        index: usize,
        norm: Region,
        next: Option<&Ffn>,
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
    ) -> Result<(), ModelError> {
        match self {
            Ffn::Dense(dense) => dense.forward(norm, pass),
            Ffn::Moe(weights) => moe::forward(index, norm, weights, next.and_then(Ffn::moe), pass, hooks),
        }
    }
}

impl DenseWeights {
    /// `h += W_down (silu(W_gate x) * W_up x)`, `x = rms_norm(h)`.
    fn forward(&self, norm: Region, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let (tokens, norm, h) = (pass.rows(), pass.norm(norm), pass.buffers.h);
        let (scores, act) = (pass.buffers.moe.scores, pass.buffers.moe.act);
        pass.execute(Mlp { tokens, norm, gate_up: &self.gate_up, down: &self.down, scores, act, h })
    }
}
