//! From a loaded model to one whose weights a GPU sees: the same bytes in the same slabs, and copies of the small vectors.

use crate::{
    device::{Gpu, Region, Slab, Span},
    error::ModelError,
    experts::Experts,
    model::{
        attention::Attention,
        config::Config,
        delta::DeltaNet,
        moe::{Mlp, Moe, Stack},
        qwen::{self, Qwen},
    },
    ops::{
        Weight,
        plan::{Attend, Decay, Delta, Ffn, Layer, Matrix, Mixer, Mixture, Net, Piece, Slots},
    },
};
use candle_core::Tensor;
use std::{collections::HashMap, sync::Arc};

/// Kernels load 16 bytes at a time.
const ALIGN: usize = 16;
/// Adopted ranges start at multiples of this: the largest page of any Mac.
const PAGE: usize = 16384;
/// Slabs that a kernel can be given.
const SLABS: usize = 4;

/// Puts a model's parts where `gpu` sees them.
pub struct Loader<'a, G> {
    gpu: &'a mut G,
    /// Slabs that are adopted already, by address.
    slabs: HashMap<*const Slab, Region>,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, ModelError> {
    Err(ModelError::Config(why.into()))
}

impl<'a, G: Gpu> Loader<'a, G> {
    pub fn new(gpu: &'a mut G) -> Self {
        Self { gpu, slabs: HashMap::new() }
    }

    /// The whole model. Refuses what the kernels cannot do.
    pub fn net(&mut self, qwen: &Qwen) -> Result<Net, ModelError> {
        let (config, net) = (qwen.config(), &qwen.net);
        let slots = qwen.store().map(|store| self.slots(store)).transpose()?;
        let layers = net.layers.iter().enumerate();
        let layers = layers.map(|(index, layer)| self.layer(qwen, index, layer)).collect::<Result<Vec<_>, _>>()?;
        Ok(Net {
            embed: self.matrix(&net.embed)?,
            layers,
            norm: self.tensor(&net.norm)?,
            head: self.matrix(net.head.as_ref().unwrap_or(&net.embed))?,
            eps: config.eps,
            slots: slots.unwrap_or(Slots { slabs: Vec::new(), per_slab: 1, stride: ALIGN }),
        })
    }

    fn layer(&mut self, qwen: &Qwen, index: usize, layer: &qwen::Layer) -> Result<Layer, ModelError> {
        Ok(Layer {
            norm: self.tensor(&layer.input_norm)?,
            mixer: match &layer.mixer {
                qwen::Mixer::Delta(delta) => self.delta(delta, qwen.config())?,
                qwen::Mixer::Attention(attention) => self.attention(attention, qwen)?,
            },
            post_norm: self.tensor(&layer.post_norm)?,
            ffn: match (&layer.ffn, qwen.store()) {
                (qwen::Ffn::Moe(moe), Some(store)) => Ffn::Moe(self.mixture(moe, store, index)?),
                (qwen::Ffn::Moe(_), None) => return refuse("the experts are not loaded"),
                (qwen::Ffn::Dense(mlp), _) => Ffn::Dense(self.mlp(mlp)?),
            },
        })
    }

    fn delta(&mut self, delta: &DeltaNet, config: &Config) -> Result<Mixer, ModelError> {
        let shape = &config.delta;
        if shape.taps != 4 || shape.key_dim > 256 {
            return refuse(format!("on a GPU, convolutions have 4 taps and key heads at most 256, not {shape:?}"));
        }
        let (key_heads, value_heads) = (shape.key_heads, shape.value_heads);
        Ok(Mixer::Delta {
            op: Delta { key_heads, value_heads, dk: shape.key_dim, dv: shape.value_dim, eps: config.eps },
            project: self.matrices([&delta.qkv, &delta.z, &delta.b, &delta.a])?,
            taps: self.tensor(&delta.conv)?,
            decay: Decay { rate: self.vector(&delta.heads.decay)?, dt_bias: self.vector(&delta.heads.dt_bias)? },
            norm: self.tensor(&delta.norm)?,
            out: self.matrix(&delta.out)?,
        })
    }

    fn attention(&mut self, attention: &Attention, qwen: &Qwen) -> Result<Mixer, ModelError> {
        let (shape, eps) = (&qwen.config().attention, qwen.config().eps);
        if shape.dim > 256 || shape.heads > 32 * shape.kv_heads {
            return refuse(format!("on a GPU, heads are at most 256 and 32 share a key, not {shape:?}"));
        }
        let (heads, kv_heads, dim, rotary) = (shape.heads, shape.kv_heads, shape.dim, shape.rotated);
        Ok(Mixer::Attend {
            op: Attend { heads, kv_heads, dim, rotary, eps, context: qwen.plan().context, half: false },
            project: self.matrices([&attention.q, &attention.k, &attention.v])?,
            q_norm: self.vector(&attention.q_norm)?,
            k_norm: self.vector(&attention.k_norm)?,
            out: self.matrix(&attention.o)?,
        })
    }

    fn mlp(&mut self, mlp: &Mlp) -> Result<[Matrix; 3], ModelError> {
        Ok([self.matrix(&mlp.gate)?, self.matrix(&mlp.up)?, self.matrix(&mlp.down)?])
    }

    fn mixture(&mut self, moe: &Moe, store: &Experts, index: usize) -> Result<Mixture, ModelError> {
        let experts = moe.router.rows;
        if experts > 1024 || moe.k > 31 {
            return refuse(format!(
                "on a GPU, a layer has at most 1024 experts and 31 a token, not {experts} and {}",
                moe.k
            ));
        }
        let spans = |expert: usize| store.spans(index, expert as u32).unwrap_or_default();
        let first = spans(0);
        if (0..experts).any(|e| spans(e) != first) || first.iter().any(|span| span.start % ALIGN != 0) {
            let how = "`moestro pack` lays them out so; on Linux, so does --expert-io buffered";
            return refuse(format!("the experts of layer {index} are not laid out alike in their slots: {how}"));
        }
        let piece = |projection: usize, stack: &Stack| {
            let gain = stack.gains.first().copied().unwrap_or(1.0);
            if stack.gains.iter().any(|other| *other != gain) {
                return refuse("on a GPU, the experts of a layer have one global scale");
            }
            let at = std::array::from_fn(|part| first[3 * projection + part].start);
            let (codes, rows, cols) = (stack.layout.codes, stack.layout.rows, stack.layout.cols);
            if cols % 16 != 0 {
                return refuse(format!("on a GPU, rows of experts are multiples of 16, not {cols}"));
            }
            Ok(Piece { codes, rows, cols, gain, at })
        };
        let slots = (0..experts).map(|e| store.slot_of(index, e as u32).map_or(u32::MAX, |slot| slot.index() as u32));
        let table: Vec<u8> = slots.flat_map(u32::to_le_bytes).collect();
        let [gate, up, down] = self.mlp(&moe.shared)?;
        Ok(Mixture {
            k: moe.k,
            renormalise: moe.renormalise,
            router: self.matrix(&moe.router)?,
            shared: Some([gate, up, down, self.matrix(&moe.shared_gate)?]),
            gate: piece(0, &moe.stacks[0])?,
            up: piece(1, &moe.stacks[1])?,
            down: piece(2, &moe.stacks[2])?,
            table: self.bytes(&table)?,
        })
    }

    /// The store's slab in as few pieces as the GPU takes, each a whole number of slots and of pages.
    fn slots(&mut self, store: &Experts) -> Result<Slots, ModelError> {
        let (stride, count) = (store.slot_bytes(), store.slots());
        if stride % ALIGN != 0 {
            return refuse(format!("slots of {stride} bytes"));
        }
        let whole = (1..=PAGE).find(|n| n * stride % PAGE == 0).unwrap_or(PAGE);
        let longest = self.gpu.longest() / stride;
        let per_slab = if count <= longest { count } else { longest / whole * whole };
        if per_slab == 0 || count.div_ceil(per_slab) > SLABS {
            let total = count * stride;
            return refuse(format!("{total} bytes of slots are more than {SLABS} buffers of this GPU hold"));
        }
        let ranges = (0..count).step_by(per_slab).map(|first| first * stride..count.min(first + per_slab) * stride);
        let slabs = ranges.map(|range| Ok(self.gpu.adopt(store.slab(), range)?)).collect::<Result<_, ModelError>>()?;
        Ok(Slots { slabs, per_slab, stride })
    }

    fn matrices<const N: usize>(&mut self, weights: [&Weight; N]) -> Result<Vec<Matrix>, ModelError> {
        weights.into_iter().map(|weight| self.matrix(weight)).collect()
    }

    fn matrix(&mut self, weight: &Weight) -> Result<Matrix, ModelError> {
        let mut parts = [Region { buffer: 0, offset: 0, len: 0 }; 3];
        for (part, span) in parts.iter_mut().zip(&weight.parts) {
            if !span.is_empty() {
                *part = self.span(span)?;
            }
        }
        Ok(Matrix { codes: weight.codes, rows: weight.rows, cols: weight.cols, gain: weight.gain, parts })
    }

    fn span(&mut self, span: &Span) -> Result<Region, ModelError> {
        let slab = span.slab();
        let whole = match self.slabs.get(&Arc::as_ptr(slab)) {
            Some(region) => *region,
            None if slab.len() > self.gpu.longest() => {
                return refuse(format!("the trunk's {} bytes are more than one buffer of this GPU holds", slab.len()));
            }
            None => *self.slabs.entry(Arc::as_ptr(slab)).or_insert(self.gpu.adopt(slab, 0..slab.len())?),
        };
        if !span.offset().is_multiple_of(ALIGN) {
            return refuse(format!("a matrix at byte {} of the trunk", span.offset()));
        }
        Ok(whole.part(span.offset(), span.len()))
    }

    fn tensor(&mut self, tensor: &Tensor) -> Result<Region, ModelError> {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        self.vector(&values)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Region, ModelError> {
        self.bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<Region, ModelError> {
        let region = self.gpu.allocate(bytes.len())?;
        self.gpu.write(region, bytes)?;
        Ok(region)
    }
}
