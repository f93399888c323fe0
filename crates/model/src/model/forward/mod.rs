//! The forward pass: the same order of operations on every device.
//!
//! ```text
//! h = embed[ids]                                 an image's tokens have the vision tower's rows instead
//! for each layer:  h = h + mixer(rms_norm(h))    mixer: gated attention in every fourth layer, else a gated delta net
//!                  h = h + ffn(rms_norm(h))      ffn: a mixture of experts, or a dense MLP
//! logits = rms_norm(h) W_head^T
//! ```
//! Loading chooses the parts of each layer: how the layer reads and writes the residual, which mixer and feed-forward
//! the layer has, and whether rows of an n-gram table are added before the layer. With several residual streams, a
//! mixture of the streams takes the place of `rms_norm(h)`, and h holds a part's result until the result is added to
//! each stream.
//!
//! Each step is an operation on buffers, which a CPU executes immediately and a GPU encodes into a command buffer. The
//! mixers and feed-forwards read like their counterparts in [`reference`](mod@crate::model::reference).

mod attention;
pub mod buffers;
mod delta_net;
pub mod head;
mod layer_span;
mod moe;
mod ngram;
pub mod pass;

use crate::{
    error::ModelError,
    model::{
        state::sequence::LayerState,
        weights::{DenseWeights, Ffn, LayerWeights, Mixer, Network},
    },
};
use moestro_compute::ops::{Embedding, Mlp};
use pass::{LayerHooks, PartInput, Pass};

/// The output of a pass for the rows whose logits the chunk asks for.
pub enum PassOutput<'a> {
    /// Nothing yet. The work is submitted without waiting, and the logits stay in
    /// [`Buffers::logits`](buffers::Buffers::logits).
    Submitted,
    Logits(&'a mut [f32]),
    /// The likeliest token of each row, of the ids below `usable`.
    Likeliest {
        usable: usize,
        ids: &'a mut [u32],
    },
}

/// Runs a chunk through the whole network and fills `output`. `state` has the states of all layers, of all sequences of
/// the chunk.
pub fn forward(
    net: &Network,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
    output: PassOutput<'_>,
) -> Result<(), ModelError> {
    let is_only_submitted = matches!(output, PassOutput::Submitted);
    pass.backend.set_half_buffers(pass.chunk.half.then_some(pass.buffers.half));
    let done = embed(net, pass).and_then(|()| forward_layers(net, state, pass, hooks));
    let done = done.and_then(|()| pass.read_ahead());
    pass.backend.set_half_buffers(None);
    let done = done.and_then(|()| match output {
        PassOutput::Submitted => {
            head::write_logits(net, pass, pass.chunk.logits.clone())?;
            Ok(pass.backend.flush()?)
        }
        PassOutput::Logits(logits) => head::read_logits(net, pass, logits),
        PassOutput::Likeliest { usable, ids } => head::read_likeliest(net, pass, usable, ids),
    });
    if done.is_ok() && is_only_submitted { Ok(()) } else { pass.finish(done) }
}

/// `h = embed[ids]`. Tokens of images get the rows of the images instead.
fn embed(net: &Network, pass: &mut Pass<'_>) -> Result<(), ModelError> {
    pass.write_inputs()?;
    let tokens = pass.rows();
    let ids = pass.buffers.ids;
    let into = pass.buffers.h;
    pass.execute(Embedding { table: &net.embed, tokens, ids, into })?;
    pass.write_image_rows()?;
    pass.write_streams(None)
}

/// Runs all layers. Reads and updates the residual.
pub fn forward_layers(
    net: &Network,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
) -> Result<(), ModelError> {
    let streams = pass.experts.is_some_and(|experts| !experts.is_resident());
    pass.backend.begin_layers(streams);
    layer_span::reset(pass);
    let mut index = 0;
    while let Some(layer) = net.layers.get(index) {
        let count = layer_span::layer_count(index, pass, hooks);
        index = if count > 1 {
            layer_span::run(net, index..index + count, state, pass, hooks)?
        } else {
            layer_span::report_choices(net, pass)?;
            layer.forward(index, net, state, pass, hooks)?;
            index + 1
        };
    }
    layer_span::report_choices(net, pass)
}

impl LayerWeights {
    fn forward(
        &self,
        index: usize,
        net: &Network,
        state: &mut [LayerState],
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
    ) -> Result<(), ModelError> {
        let x = self.forward_mixer(index, state, pass, hooks)?;
        let next = net.layers.get(index + 1).map(|next| &next.ffn);
        self.ffn.forward(index, x, next, pass)?;
        self.end(index, pass, hooks)
    }

    /// The start of [`LayerWeights::forward`]. Returns the input of the feed-forward.
    fn forward_mixer(
        &self,
        index: usize,
        state: &mut [LayerState],
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
    ) -> Result<PartInput, ModelError> {
        hooks.before_layer()?;
        if let Some(ngram) = &self.ngram {
            ngram.forward(pass, &mut hooks.marks)?;
        }
        let x = pass.read(&self.before_mixer)?;
        self.mixer.forward(x, state.get_mut(index), pass, hooks)?;
        pass.write(&self.before_mixer)?;
        pass.read(&self.before_ffn)
    }

    /// The end of [`LayerWeights::forward`], after the feed-forward.
    fn end(&self, index: usize, pass: &mut Pass<'_>, hooks: &mut LayerHooks<'_>) -> Result<(), ModelError> {
        pass.write(&self.before_ffn)?;
        hooks.after_layer(index, pass)?;
        Ok(pass.backend.end_layer()?)
    }
}

impl Mixer {
    fn forward(
        &self,
        x: PartInput,
        mut state: Option<&mut LayerState>,
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
    ) -> Result<(), ModelError> {
        for rows in pass.mixer_blocks() {
            match (self, state.as_deref_mut()) {
                (Mixer::Attention(attention), Some(LayerState::Attention(cache, index))) => {
                    attention.forward(x, rows, *cache, *index, pass, &mut hooks.marks)?;
                }
                (Mixer::DeltaNet(delta_net), Some(LayerState::DeltaNet(state))) => {
                    delta_net.forward(x, rows, state, pass, &mut hooks.marks)?;
                }
                _ => return Err(foreign_state()),
            }
        }
        Ok(())
    }
}

fn foreign_state() -> ModelError {
    ModelError::Config("the sequence's state belongs to another model".into())
}

impl Ffn {
    fn forward(&self, index: usize, x: PartInput, next: Option<&Ffn>, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        match self {
            Ffn::Dense(dense) => dense.forward(x, pass),
            Ffn::Moe(weights) => moe::forward(index, x, weights, next.and_then(Ffn::moe), pass),
        }
    }
}

impl DenseWeights {
    /// `h += W_down (silu(W_gate x) * W_up x)`, `x = rms_norm(h)`.
    fn forward(&self, x: PartInput, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let Some(norm) = x.norm else {
            return Err(ModelError::Config("a dense feed-forward needs a model with one residual stream".into()));
        };
        let tokens = pass.rows();
        let h = pass.buffers.h;
        let scores = pass.buffers.moe.scores;
        let act = pass.buffers.moe.act;
        pass.execute(Mlp { tokens, norm, gate_up: &self.gate_up, down: &self.down, scores, act, h })
    }
}
