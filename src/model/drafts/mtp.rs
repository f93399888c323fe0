//! The MTP head (multi-token prediction): one layer of attention and experts that predicts the token after the next from the
//! residual stream after the model's last layer.
//!
//! ```text
//! u = fc [ rms_norm(embed(x[p + 1])) ; rms_norm(rms_norm(h[p])) ]    h[p]: after the last layer; inner norm: the model's
//! m = rms_norm(layer(u))                                             the layer has its own KV cache
//! logits of x[p + 2] = W_head m                                      the model's head
//! ```
//! For further tokens, `m` takes the place of `rms_norm(h)`. The head's experts have their own slots, since their encoding
//! and size often differ from the model's.

use crate::{
    checkpoint::{Checkpoint, DRAFT_BUFFERS, TrunkBuffer, TrunkLoader, index::Index, mtp as files},
    device::Region,
    error::ModelError,
    experts::{self, ExpertMap, ExpertStore, LayerExperts, PassKind},
    metrics::Metrics,
    model::{
        config::{self, Config},
        drafts::hidden_taps::TapBuffers,
        forward::{
            buffers::{Buffers, Scratch},
            forward_layers,
            pass::{Chunk, LayerHooks, Pass},
        },
        options::{LoadOptions, MtpSource},
        placement::{adopt_slots, check_supported, slot_tables},
        shared_backend::SharedBackend,
        state::{
            rollback::Commit,
            sequence::{LayerState, kv_shape},
        },
        weights::{LayerWeights, Network},
    },
    ops::{
        AttentionShape, Backend, BackendLimits, Embedding, ExpertSlots, KvBits, KvCache, KvFormat, Linear, ModelPart,
        Norm, Weight,
    },
    platform::MAX_BLOCK,
};
use std::path::Path;

/// Positions of the head's cache. When it is full, the head restarts with the last [`MTP_ROWS`] rows.
const CACHE_POSITIONS: usize = 1024;
/// Hidden rows that are kept for the head.
pub const MTP_ROWS: usize = 512;

/// A head whose headers were read and checked.
pub struct MtpInfo {
    from: Checkpoint,
    config: Config,
    map: ExpertMap,
    /// Bytes of the trunk.
    trunk: u64,
    /// Slots for the experts.
    pub slots: usize,
}

/// A loaded head.
pub struct MtpHead {
    config: Config,
    net: Network,
    /// The halves of `fc`: for the embedding, and for the hidden row.
    fc: [Weight; 2],
    /// Their norms.
    norms: [Region; 2],
    pub weights: [TrunkBuffer; 2],
    pub store: Option<ExpertStore>,
}

/// A head's state on one device.
pub struct MtpDeviceState {
    slots: ExpertSlots,
    slot_tables: Region,
    kv_shape: AttentionShape,
    cache: KvCache,
    /// Positions of the cache.
    pub positions: usize,
    taps: TapBuffers,
    /// The weight of the model's last norm.
    model_norm: Vec<f32>,
}

/// The head's prediction after its last row.
#[derive(Debug, Clone, Default)]
pub struct MtpPrediction {
    pub logits: Vec<f32>,
    /// Takes the place of a hidden row for the next prediction.
    pub hidden: Vec<f32>,
}

struct MtpWeights {
    fc: [Weight; 2],
    norms: [Region; 2],
    layer: LayerWeights,
    norm: Region,
    map: Vec<LayerExperts>,
}

impl MtpWeights {
    fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, mut map) = (config.hidden, Vec::new());
        let name = |name: &str| format!("{}{name}", files::PREFIX);
        let fc = trunk.columns(&name("fc"), hidden, hidden, 2)?;
        let fc =
            <[Weight; 2]>::try_from(fc).map_err(|_| ModelError::Config("mtp.fc does not have two halves".into()))?;
        let norms = ["embedding", "hidden"].map(|of| name(&format!("pre_fc_norm_{of}.weight")));
        Ok(Self {
            fc,
            norms: [trunk.norm(&norms[0], hidden)?, trunk.norm(&norms[1], hidden)?],
            layer: LayerWeights::load(trunk, &name("layers.0."), true, config, &mut map)?,
            norm: trunk.norm(&name("norm.weight"), hidden)?,
            map,
        })
    }
}

/// Inspects the head that `options` ask for. A head of the checkpoint that is missing or unusable is logged, not an error.
pub fn inspect(
    dir: &Path,
    model: &Config,
    index: &Index,
    options: &LoadOptions,
) -> Result<Option<MtpInfo>, ModelError> {
    match &options.drafter {
        MtpSource::None => Ok(None),
        MtpSource::Directory(head) => {
            let json = config::json(head)?;
            MtpInfo::new(files::open_dir(head, &json)?, model).map(Some)
        }
        MtpSource::Checkpoint => {
            let json = config::json(dir)?;
            let found = files::find(dir, index, &json);
            match found.and_then(|found| found.map(|from| MtpInfo::new(from, model)).transpose()) {
                Ok(None) if files::declared(&json) > 0 => {
                    tracing::info!(
                        "config.json declares an MTP head, but the files have none; falling back to prompt-lookup drafts"
                    );
                    Ok(None)
                }
                Ok(found) => Ok(found),
                Err(error) => {
                    tracing::warn!(%error, "cannot use the MTP head; falling back to prompt-lookup drafts");
                    Ok(None)
                }
            }
        }
    }
}

impl MtpInfo {
    fn new(from: Checkpoint, model: &Config) -> Result<Self, ModelError> {
        let config = Config { layers: 1, full: vec![true], ..model.clone() };
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::measure(&from, &mut ignore);
        let weights = MtpWeights::load(&mut trunk, &config)?;
        let trunk = trunk.len() as u64;
        from.finish()?;
        let map = ExpertMap { layers: weights.map };
        Ok(Self { slots: map.experts(), from, config, map, trunk })
    }

    /// Reduces the slots to a quarter of the head's experts, at least twice what a token needs. For a model whose own
    /// experts do not all fit.
    pub fn stream(&mut self) {
        let all = self.map.experts();
        self.slots = (all / 4).max(2 * self.config.experts_per_token()).min(all);
    }

    /// Bytes of the loaded head: weights, slots, cache, hidden rows.
    pub fn bytes(&self, format: KvFormat) -> u64 {
        let (a, hidden) = (&self.config.attention, self.config.hidden);
        let kv = CACHE_POSITIONS * 2 * a.kv_heads * format.row_bytes(a.dim);
        let rows = (5 * MTP_ROWS + 8) * hidden * 4;
        let slots = self.slots as u64 * self.map.slot_bytes(MAX_BLOCK) as u64;
        self.trunk + slots + (kv + rows) as u64 + 4 * self.map.experts() as u64
    }

    /// Loads the head for a model with the network `model` and the expert store `store`.
    pub fn load(
        self,
        model: &Network,
        options: &LoadOptions,
        store: Option<&ExpertStore>,
    ) -> Result<MtpHead, ModelError> {
        let Self { from, config, map, trunk: len, slots } = self;
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::read(&from, len as usize, &mut ignore)?.with_buffers(DRAFT_BUFFERS);
        let MtpWeights { fc, norms, layer, norm, .. } = MtpWeights::load(&mut trunk, &config)?;
        let weights = trunk.finish()?;
        let mut net = Network { embed: model.embed, layers: vec![layer], norm, head: Some(*model.head()) };
        let store = if map.layers.is_empty() {
            None
        } else {
            let io = options.store.io;
            let threads = store.map_or(1, |_| options.store.threads);
            let options =
                experts::Options { io, threads, prefetch: experts::Prefetch::Off, ..experts::Options::new(slots) };
            // Its own metrics: hits and misses of the head do not count as the model's.
            let store = ExpertStore::open(from.index.files.clone(), map, options, Metrics::new("", ""))?;
            store.fill(&mut |_, _| ())?;
            net.set_expert_layout(&store);
            Some(store)
        };
        Ok(MtpHead { config, net, fc, norms, weights, store })
    }
}

impl MtpDeviceState {
    /// Places `head` on a device. `model_norm` is the model's last norm, `context` the longest sequence.
    pub fn new(
        head: &MtpHead,
        model_norm: Region,
        context: usize,
        backend: &mut dyn Backend,
    ) -> Result<Self, ModelError> {
        let (mut slots, mut tables) = (ExpertSlots::default(), Vec::new());
        if let Some(store) = &head.store {
            slots = adopt_slots(store, backend)?;
            tables = slot_tables(&head.net, store);
        }
        let positions = CACHE_POSITIONS.min(context);
        let kv_shape = kv_shape(&head.config, backend.limits().cache, KvBits::default(), positions, 0);
        check_supported(&head.net, &kv_shape, backend)?;
        head.fc.iter().try_for_each(|weight| backend.accept(ModelPart::Weight(weight)))?;
        let keys = backend.allocate(kv_shape.cache_bytes())?;
        let values = backend.allocate(kv_shape.cache_bytes())?;
        let pages: Vec<u32> = (0..kv_shape.pages() as u32).collect();
        let table = backend.allocate(pages.len() * 4)?;
        backend.write_words(table, &pages)?;
        let cache = KvCache { keys, values, table, recent: [Region::default(); 2] };
        let slot_tables = backend.allocate(tables.len() * 4)?;
        if !tables.is_empty() {
            backend.write_words(slot_tables, &tables)?;
        }
        let mut weight = vec![0.0; head.config.hidden];
        backend.read_floats(model_norm, &mut weight)?;
        let taps = TapBuffers::default();
        Ok(Self { slots, slot_tables, kv_shape, cache, positions, taps, model_norm: weight })
    }
}

impl MtpHead {
    /// Runs the head on `ids` at positions from `at` on, and predicts the token after the last. `hidden` are the rows before
    /// each of `ids`; `own` if they are the head's own and not the model's.
    pub fn predict(
        &self,
        at: usize,
        ids: &[u32],
        (hidden, own): (&[f32], bool),
        state: &mut MtpDeviceState,
        (backend, limits, buffers, scratch): (&mut SharedBackend, BackendLimits, &Buffers, &mut Scratch),
    ) -> Result<MtpPrediction, ModelError> {
        let width = self.config.hidden;
        if ids.is_empty() || hidden.len() != ids.len() * width || at + ids.len() > state.positions {
            return Err(ModelError::Config(format!("the MTP head's cache has no room for {} rows at {at}", ids.len())));
        }
        let mut rows = hidden.to_vec();
        if !own {
            rows.chunks_exact_mut(width).for_each(|row| rms_norm(row, &state.model_norm, self.config.eps));
        }
        let mut buffers = *buffers;
        buffers.slot_tables = state.slot_tables;
        let mut layers = [LayerState::Attention(state.cache)];
        let (mut start, end, mut out) = (at, at + ids.len(), MtpPrediction::default());
        for (ids, rows) in ids.chunks(buffers.rows).zip(rows.chunks(buffers.rows * width)) {
            let kind = if ids.len() == 1 { PassKind::Decode } else { PassKind::Prefill };
            let chunk = Chunk { ids, start, logits: 0..0, kind, half: false, commit: Commit::Now };
            start += ids.len();
            let mut pass = Pass {
                chunk,
                config: &self.config,
                backend: &mut *backend,
                limits,
                buffers: &buffers,
                attention: &state.kv_shape,
                experts: self.store.as_ref(),
                slots: &state.slots,
                scratch: &mut *scratch,
            };
            let mut hooks = LayerHooks::taps_only(&mut state.taps);
            let out = (start == end).then_some(&mut out);
            let done = self.forward(rows, &mut layers, &mut pass, &mut hooks, out);
            pass.finish(done)?;
        }
        Ok(out)
    }

    /// One pass. `rows` are the hidden rows after the model's norm.
    fn forward(
        &self,
        rows: &[f32],
        state: &mut [LayerState],
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
        out: Option<&mut MtpPrediction>,
    ) -> Result<(), ModelError> {
        let (b, tokens, config) = (pass.buffers, pass.rows(), &self.config);
        let [embedding, hidden] = self.fc.each_ref().map(std::slice::from_ref);
        let [embedding_norm, hidden_norm] = self.norms.map(|norm| Some(pass.norm(norm)));
        let (x, y, ids) = (b.normed, b.h, b.ids);

        // u = fc [rms_norm(embed(ids)); rms_norm(rows)], half by half
        pass.write_inputs()?;
        pass.execute(Embedding { table: &self.net.embed, tokens, ids, into: x })?;
        pass.execute(Linear { x, tokens, norm: embedding_norm, matrices: embedding, y, add: false })?;
        pass.backend.write(x.floats(rows.len()), bytemuck::cast_slice(rows))?;
        pass.execute(Linear { x, tokens, norm: hidden_norm, matrices: hidden, y, add: true })?;

        forward_layers(&self.net, state, pass, hooks)?;

        // m = rms_norm(layer(u)) of the last row; logits = W_head m
        let Some(out) = out else { return Ok(()) };
        let keep = Some(x.floats(config.hidden));
        let norm = Some(Norm { weight: self.net.norm, eps: config.eps, keep });
        let (last, matrices) = (b.h.rows(tokens - 1, 1, config.hidden), std::slice::from_ref(self.net.head()));
        pass.execute(Linear { x: last, tokens: 1, norm, matrices, y: b.logits, add: false })?;
        out.logits.resize(config.vocab, 0.0);
        out.hidden.resize(config.hidden, 0.0);
        pass.backend.read_floats(b.logits, &mut out.logits)?;
        Ok(pass.backend.read_floats(x, &mut out.hidden)?)
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight`.
fn rms_norm(row: &mut [f32], weight: &[f32], eps: f32) {
    let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
}
