//! The mixture of experts (spec 2.3), and the dense feed-forward of the small models.
//!
//! ```text
//! x --+-- router --> ids --> experts.ask ----> hits ----> experts --+
//!     |                            |                               |
//!     |                            +-- reads --> as they land -----+--> combine in rank order --> y
//!     +-- shared expert (with the hits, while the disk works) -----+
//! ```
//! Each expert's output goes to a place of its own, and the places are summed in the router's order: so it does not
//! matter what landed first.

use super::{
    config::{Config, FfnShape},
    speed::Kind,
};
use crate::{
    checkpoint::{self, Checkpoint, Layout, Trunk},
    device::{Compute, Immediate, Mark},
    error::ModelError,
    experts::{Choice, Experts, Landed, LayerExperts, Phase},
    ops::{self, Assignment, ExpertView, Job, Routes, Weight, WeightView},
};
use candle_core::{DType, Tensor};

/// Gate, up and down of a feed-forward that stays in memory.
pub struct Mlp {
    pub(super) gate: Weight,
    pub(super) up: Weight,
    pub(super) down: Weight,
}

impl Mlp {
    /// Loads `<prefix>gate_proj` and so on.
    pub fn load(trunk: &mut Trunk<'_>, prefix: &str, hidden: usize, intermediate: usize) -> Result<Self, ModelError> {
        Ok(Self {
            gate: trunk.weight(&format!("{prefix}gate_proj"), intermediate, hidden)?,
            up: trunk.weight(&format!("{prefix}up_proj"), intermediate, hidden)?,
            down: trunk.weight(&format!("{prefix}down_proj"), hidden, intermediate)?,
        })
    }

    /// How its projections are stored.
    pub fn kinds(&self) -> [Kind; 3] {
        [&self.gate, &self.up, &self.down].map(|weight| Kind {
            codes: weight.codes,
            rows: weight.rows,
            cols: weight.cols,
        })
    }

    fn view(&self) -> ExpertView<'_> {
        ExpertView { gate: self.gate.view(), up: self.up.view(), down: self.down.view() }
    }

    /// `Down(silu(Gate x) * Up x)`.
    pub fn forward(&self, compute: &Compute, x: &Tensor) -> Result<Tensor, ModelError> {
        let out = x.zeros_like()?;
        let rows = each_token(x.dim(0)?, 0);
        ops::experts(compute, x, &[Job { expert: self.view(), rows: &rows }], &out)?;
        Ok(out)
    }
}

/// Token `t` to place `first + t`.
fn each_token(tokens: usize, first: usize) -> Vec<Assignment> {
    (0..tokens as u32).map(|token| Assignment { token, place: first as u32 + token }).collect()
}

pub struct Moe {
    layer: usize,
    pub(super) k: usize,
    pub(super) renormalise: bool,
    pub(super) router: Weight,
    pub(super) shared_gate: Weight,
    pub(super) shared: Mlp,
    /// How gate, up and down of every expert are stored.
    pub(super) stacks: [Stack; 3],
}

/// One projection of all experts of a layer.
pub(super) struct Stack {
    pub(super) layout: Layout,
    /// One an expert.
    pub(super) gains: Vec<f32>,
}

impl Moe {
    /// Loads the trunk's part of layer `layer` and finds its experts: their pieces on disk are appended to `map`.
    pub fn load(
        trunk: &mut Trunk<'_>,
        prefix: &str,
        config: &Config,
        layer: usize,
        map: &mut Vec<LayerExperts>,
    ) -> Result<Self, ModelError> {
        let FfnShape::Moe { experts, k, intermediate, shared, renormalise } = config.ffn else {
            return Err(ModelError::Config("a dense model has no experts".into()));
        };
        let (hidden, from) = (config.hidden, trunk.from);
        let mlp = format!("{prefix}mlp.");
        let (stacks, pieces) = find_experts(from, &mlp, experts, hidden, intermediate)?;
        map.push(pieces);
        Ok(Self {
            layer,
            k,
            renormalise,
            router: trunk.weight(&format!("{mlp}gate"), experts, hidden)?,
            shared_gate: trunk.weight(&format!("{mlp}shared_expert_gate"), 1, hidden)?,
            shared: Mlp::load(trunk, &format!("{mlp}shared_expert."), hidden, shared)?,
            stacks,
        })
    }

    /// How every expert's projections are stored.
    pub fn kinds(&self) -> [Kind; 3] {
        [0, 1, 2].map(|index| {
            let Layout { codes, rows, cols, .. } = self.stacks[index].layout;
            Kind { codes, rows, cols }
        })
    }

    /// The experts that each row of `x` (`[T, hidden]`, normed) visits, the shared expert's gate (`[T]`), and the logits of
    /// all experts (`[T, experts]`).
    pub fn route(&self, compute: &Compute, x: &Tensor) -> Result<(Routes, Tensor, Tensor), ModelError> {
        let scores = ops::linear(compute, x, &[&self.router, &self.shared_gate])?;
        let logits = scores.narrow(1, 0, self.router.rows)?;
        let routes = ops::route(&logits, self.k, self.renormalise)?;
        let gate = candle_nn::ops::sigmoid(&scores.narrow(1, self.router.rows, 1)?.contiguous()?)?;
        Ok((routes, gate.flatten_all()?, logits))
    }

    /// `x` is `[T, hidden]`. `next` is the following layer's mixture, whose experts are predicted and read ahead.
    pub fn forward(
        &self,
        compute: &Compute,
        store: &Experts,
        x: &Tensor,
        next: Option<&Moe>,
    ) -> Result<(Tensor, Routes), ModelError> {
        let (tokens, hidden) = x.dims2()?;
        let (routes, gate, logits) = self.route(compute, x)?;
        let phase = if tokens == 1 { Phase::Decode } else { Phase::Prefill };
        let logits = if store.is_resident() { Vec::new() } else { logits.flatten_all()?.to_vec1()? };
        let choice = Choice { ids: &routes.ids, k: routes.k, logits: &logits };
        let mut asked = store.ask(self.layer, &choice, phase, &mut Immediate)?;
        if let Some(next) = next
            && store.wants_prediction(phase)
        {
            // The next layer's router on this layer's input: a guess, read only when nothing better is to be done. While
            // a prompt is at it that is from this layer's last read to the next layer's first: its mixer, above all.
            let (guess, ..) = next.route(compute, x)?;
            store.read_ahead(next.layer, &guess.ids, phase);
        }

        let places = routes.ids.len();
        let out = Tensor::zeros((places + tokens, hidden), DType::F32, x.device())?;
        let shared = each_token(tokens, places);
        let mut early = vec![Job { expert: self.shared.view(), rows: &shared }];
        if !store.is_resident() {
            // The disk is at work: the shared expert must not wait for it.
            ops::experts(compute, x, &early, &out)?;
            early.clear();
        }
        while let Some(batch) = asked.next(&mut Immediate)? {
            let places = batch.iter().flat_map(|landed| landed.places);
            let rows: Vec<_> = places.map(|&place| Assignment { token: place / routes.k as u32, place }).collect();
            let mut rest = rows.as_slice();
            let mut jobs = std::mem::take(&mut early);
            jobs.extend(batch.iter().map(|landed| {
                let (rows, others) = rest.split_at(landed.places.len());
                rest = others;
                self.job(&landed, rows)
            }));
            ops::experts(compute, x, &jobs, &out)?;
            drop(jobs);
            batch.reads_until(Mark::START);
        }
        let shared = out.narrow(0, places, tokens)?;
        let y = ops::combine(compute, &out, &routes.weights, routes.k, Some((&shared, &gate)))?;
        Ok((y, routes))
    }

    fn job<'a>(&self, landed: &Landed<'a>, rows: &'a [Assignment]) -> Job<'a> {
        let expert = landed.expert as usize;
        let view = |index: usize| {
            let Stack { layout, gains } = &self.stacks[index];
            let parts = std::array::from_fn(|part| landed.pieces[3 * index + part]);
            WeightView { codes: layout.codes, rows: layout.rows, cols: layout.cols, gain: gains[expert], parts }
        };
        Job { expert: ExpertView { gate: view(0), up: view(1), down: view(2) }, rows }
    }
}

/// Where a layer's experts lie, in any of the three layouts: stacked (MLX), fused gate and up (Hugging Face), or one
/// tensor an expert (Hugging Face, re-saved).
pub(super) fn find_experts(
    from: &Checkpoint,
    mlp: &str,
    experts: usize,
    hidden: usize,
    intermediate: usize,
) -> Result<([Stack; 3], LayerExperts), ModelError> {
    let lead = [experts];
    if from.find(&format!("{mlp}experts.gate_up_proj")).is_some() {
        let fused = from.dense(&format!("{mlp}experts.gate_up_proj"), &[experts, 2 * intermediate, hidden])?;
        let down = from.dense(&format!("{mlp}experts.down_proj"), &[experts, hidden, intermediate])?;
        let half = Layout { rows: intermediate, ..fused.clone() };
        let pieces = (0..experts).map(|expert| {
            let projections = [(&half, 2 * expert), (&half, 2 * expert + 1), (&down, expert)];
            checkpoint::expert(projections.map(|(layout, index)| checkpoint::pieces(layout, index)))
        });
        let pieces = pieces.collect();
        let stack = |layout: Layout| Stack { layout, gains: vec![1.0; experts] };
        return Ok(([stack(half.clone()), stack(half), stack(down)], pieces));
    }
    let names =
        [("gate_proj", intermediate, hidden), ("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)];
    if from.find(&format!("{mlp}experts.0.gate_proj.weight")).is_some() {
        let mut pieces = Vec::with_capacity(experts);
        let mut first: Option<[Stack; 3]> = None;
        for expert in 0..experts {
            let mut layouts = Vec::with_capacity(3);
            for (name, rows, cols) in names {
                layouts.push(from.layout(&format!("{mlp}experts.{expert}.{name}"), &[], rows, cols)?);
            }
            let Ok(layouts) = <[Layout; 3]>::try_from(layouts) else { continue };
            pieces.push(checkpoint::expert(std::array::from_fn(|index| checkpoint::pieces(&layouts[index], 0))));
            let stacks =
                first.get_or_insert_with(|| layouts.clone().map(|layout| Stack { layout, gains: vec![1.0; experts] }));
            for (stack, layout) in stacks.iter().zip(&layouts) {
                if stack.layout.codes != layout.codes {
                    return Err(ModelError::Config(format!("{mlp}experts.{expert} is not stored like expert 0")));
                }
            }
        }
        if let Some(stacks) = first {
            return Ok((stacks, pieces));
        }
    }
    let mut stacks = Vec::with_capacity(3);
    for (name, rows, cols) in names {
        let path = format!("{mlp}switch_mlp.{name}");
        stacks.push(Stack { layout: from.layout(&path, &lead, rows, cols)?, gains: from.gains(&path, experts)? });
    }
    let stacks: [Stack; 3] = stacks.try_into().map_err(|_| ModelError::Config("three projections an expert".into()))?;
    let pieces = (0..experts).map(|expert| {
        checkpoint::expert(std::array::from_fn(|index| checkpoint::pieces(&stacks[index].layout, expert)))
    });
    let pieces = pieces.collect();
    Ok((stacks, pieces))
}
