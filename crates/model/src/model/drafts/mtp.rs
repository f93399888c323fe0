//! The MTP head (multi-token prediction): one layer of attention and experts that predicts the token after the next
//! from the residual stream after the model's last layer.
//!
//! ```text
//! u = fc [ rms_norm(embed(x[p + 1])) ; rms_norm(rms_norm(h[p])) ]    h[p]: after the last layer; inner norm: model's
//! m = rms_norm(layer(u))                                             the layer has its own KV cache
//! logits of x[p + 2] = W_head m                                      the model's head
//! ```
//! For further tokens, `m` takes the place of `rms_norm(h)`. In a model with several residual streams, the streams R
//! take the place of h:
//!
//! ```text
//! u[c] = fc_hidden n[c] + fc_embedding rms_norm(embed(x[p + 1]))     n = rms_norm(R[p]) over all streams at once
//! R' = layer(u);  logits of x[p + 2] = W_head mixture(R')            R' takes the place of R for further tokens
//! ```
//! The head's experts have their own slots, because their encoding and size often differ from the model's.

use crate::{
    checkpoint::{Checkpoint, TrunkBuffer, TrunkLoader, index::Index, mtp as files, names::MTP},
    error::ModelError,
    model::{
        config::{self, Config},
        drafts::norm,
        forward::{
            buffers::{Buffers, Scratch},
            forward_layers,
            pass::{Chunk, LayerHooks, Pass},
        },
        hidden_taps::TapBuffers,
        options::{LoadOptions, MtpSource},
        placement::{adopt_slots, check_supported, slot_tables},
        positions::RowPositions,
        state::{
            kv_pages::PAGE,
            sequence::{LayerState, MAX_RING_BLOCK, kv_shape},
        },
        weights::{LayerWeights, Network, Residual},
    },
};
use moestro_base::{metrics::Metrics, platform::MAX_BLOCK};
use moestro_compute::{
    device::Region,
    experts::{self, ExpertMap, ExpertStore, LayerExperts},
    ops::{
        AttentionShape, Backend, BackendLimits, Embedding, ExpertSlots, IndexCache, KvBits, KvCache, KvFormat, Linear,
        ModelPart, Norm, ReservedBuffer, Weight,
    },
};
use std::path::Path;

/// Capacity of the head's KV cache in positions. When it is full, the head restarts with the last [`MTP_ROWS`] rows.
const CACHE_POSITIONS: usize = 1024;
/// Number of hidden rows that are kept for the head.
pub const MTP_ROWS: usize = 512;

/// An MTP head whose file headers were read and checked.
pub struct MtpInfo {
    from: Checkpoint,
    config: Config,
    map: ExpertMap,
    /// Number of bytes of all weights except the experts.
    trunk: u64,
    /// Number of slots for the experts.
    pub slots: usize,
}

/// A loaded MTP head.
pub struct MtpHead {
    config: Config,
    net: Network,
    /// The halves of `fc`: for the embedding, and for the hidden row or each of its streams.
    fc: [Weight; 2],
    /// Weights of the norms before the two halves of `fc`.
    norms: [Region; 2],
    pub weights: [TrunkBuffer; 2],
    pub store: Option<ExpertStore>,
}

/// The state of the MTP head on one device.
pub struct MtpDeviceState {
    slots: ExpertSlots,
    slot_tables: Region,
    kv_shape: AttentionShape,
    cache: KvCache,
    index: IndexCache,
    /// Capacity of the cache in positions.
    pub positions: usize,
    taps: TapBuffers,
    /// The weight of the norm of hidden rows: the model's last norm or, with several streams, the head's own norm over
    /// all streams.
    hidden_norm: Vec<f32>,
}

/// The hidden rows before the tokens that the head runs on, `[tokens, width]`.
#[derive(Debug, Clone, Copy)]
pub enum HiddenRows<'a> {
    /// The model's output.
    OfModel(&'a [f32]),
    /// The head's own output, [`MtpPrediction::hidden`].
    OfHead(&'a [f32]),
}

/// The parts of the model's device state that the head shares.
pub struct PassDevice<'a> {
    pub backend: &'a mut dyn Backend,
    pub limits: BackendLimits,
    pub buffers: &'a Buffers,
    pub scratch: &'a mut Scratch,
}

/// The head's prediction after its last row.
#[derive(Debug, Clone, Default)]
pub struct MtpPrediction {
    pub logits: Vec<f32>,
    /// The head's own hidden row, used in place of a model's hidden row for the next prediction.
    pub hidden: Vec<f32>,
}

struct MtpWeights {
    fc: [Weight; 2],
    norms: [Region; 2],
    layer: LayerWeights,
    before_head: Residual,
    map: Vec<LayerExperts>,
}

impl MtpWeights {
    fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let mut map = Vec::new();
        let name = |name: &str| format!("{MTP}{name}");
        let fc = match config.streams {
            None => trunk.columns(&name("fc"), hidden, hidden, 2)?,
            Some(_) => {
                let mut half = |half: &str| trunk.weight(&name(half), hidden, hidden);
                vec![half("fc_embedding")?, half("fc_hidden")?]
            }
        };
        let fc =
            <[Weight; 2]>::try_from(fc).map_err(|_| ModelError::Config("mtp.fc does not have two halves".into()))?;
        let norms = ["embedding", "hidden"].map(|of| name(&format!("pre_fc_norm_{of}.weight")));
        Ok(Self {
            fc,
            norms: [trunk.norm(&norms[0], hidden)?, trunk.norm(&norms[1], config.residual_width())?],
            layer: LayerWeights::load(trunk, &name("layers.0."), true, config, &mut map)?,
            before_head: Residual::load(trunk, config, &name("norm.weight"), &name("hyper_connection_mixer."), false)?,
            map,
        })
    }
}

/// Inspects the head that `options` ask for. If the checkpoint's head is missing or unusable, logs a warning and
/// returns `None`.
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
                Ok(None) if files::declared_layers(&json) > 0 => {
                    tracing::debug!(
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
        let config = Config { layers: 1, full: vec![true], ngrams: Vec::new(), ..model.clone() };
        let mut trunk = TrunkLoader::measure(&from);
        let weights = MtpWeights::load(&mut trunk, &config)?;
        let trunk = trunk.len() as u64;
        from.finish()?;
        let map = ExpertMap { layers: weights.map };
        Ok(Self { slots: map.experts(), from, config, map, trunk })
    }

    /// Reduces the slots to a quarter of the head's experts, but at least twice the experts of a token. Called if the
    /// model's own experts do not all fit into memory.
    pub fn stream(&mut self) {
        let all = self.map.experts();
        self.slots = (all / 4).max(2 * self.config.experts_per_token()).min(all);
    }

    /// Number of bytes of the loaded head: weights, expert slots, cache and hidden rows.
    pub fn bytes(&self, format: KvFormat) -> u64 {
        let a = &self.config.attention;
        let width = self.config.residual_width();
        let kv = CACHE_POSITIONS * 2 * a.kv_heads * format.row_bytes(a.dim);
        let rows = (5 * MTP_ROWS + 8) * width * 4;
        let index = self.config.indexer.map_or(0, |indexer| {
            CACHE_POSITIONS / PAGE * indexer.key_bytes(PAGE)
                + (MAX_RING_BLOCK + indexer.ratio) * indexer.recent_width() * 4
        });
        let slots = self.slots as u64 * self.map.slot_bytes(MAX_BLOCK) as u64;
        self.trunk + slots + (kv + rows + index) as u64 + 4 * self.map.experts() as u64
    }

    /// Loads the head for a model with the network `model` and the expert store `store`.
    pub fn load(
        self,
        model: &Network,
        options: &LoadOptions,
        store: Option<&ExpertStore>,
    ) -> Result<MtpHead, ModelError> {
        let Self { from, config, map, trunk: len, slots } = self;
        let mut trunk = TrunkLoader::read(&from, len as usize)?
            .with_buffers([ReservedBuffer::MtpMatrices, ReservedBuffer::MtpVectors]);
        let MtpWeights { fc, norms, layer, before_head, .. } = MtpWeights::load(&mut trunk, &config)?;
        trunk.report_zero();
        let weights = trunk.finish()?;
        let mut net = Network { embed: model.embed, layers: vec![layer], before_head, head: Some(*model.head()) };
        let store = if map.layers.is_empty() {
            None
        } else {
            let io = options.store.io;
            let threads = store.map_or(1, |_| options.store.threads);
            let options =
                experts::Options { io, threads, prefetch: experts::Prefetch::Off, ..experts::Options::new(slots) };
            // The head has its own metrics, so that its hits and misses are not counted as the model's.
            let store = ExpertStore::open(from.index.files.clone(), map, options, Metrics::new("", ""))?;
            store.fill(&mut |_, _| ())?;
            net.set_expert_layout(&store);
            Some(store)
        };
        Ok(MtpHead { config, net, fc, norms, weights, store })
    }
}

impl MtpDeviceState {
    /// Places `head` on a device. `model_last` has the weights with which the model's output head reads the residual.
    /// `context` is the length of the longest sequence.
    pub fn new(
        head: &MtpHead,
        model_last: &Residual,
        context: usize,
        backend: &mut dyn Backend,
    ) -> Result<Self, ModelError> {
        let mut slots = ExpertSlots::default();
        let mut tables = Vec::new();
        if let Some(store) = &head.store {
            slots = adopt_slots(store, ReservedBuffer::MtpExpertTable, backend)?;
            tables = slot_tables(&head.net, store);
        }
        let positions = CACHE_POSITIONS.min(context);
        let kv_shape = kv_shape(&head.config, &backend.limits(), KvBits::default(), positions, 0);
        check_supported(&head.net, &kv_shape, backend)?;
        head.fc.iter().try_for_each(|weight| backend.accept(ModelPart::Weight(weight)))?;
        let keys = backend.allocate(kv_shape.cache_bytes())?;
        let values = backend.allocate(kv_shape.cache_bytes())?;
        let pages: Vec<u32> = (0..kv_shape.pages() as u32).collect();
        let table = backend.allocate(pages.len() * 4)?;
        backend.write_words(table, &pages)?;
        let cache = KvCache { keys, values, table, recent: [Region::default(); 2] };
        let mut index = IndexCache::default();
        if let Some(indexer) = &head.config.indexer {
            let capacity = backend.limits().max_mixer_rows.min(MAX_RING_BLOCK) + indexer.ratio;
            index.keys = backend.allocate(pages.len() * indexer.key_bytes(PAGE))?;
            index.recent = backend.allocate(capacity * indexer.recent_width() * 4)?;
            index.capacity = capacity;
        }
        let slot_tables = backend.allocate(tables.len() * 4)?;
        if !tables.is_empty() {
            backend.write_words(slot_tables, &tables)?;
        }
        let norm = match model_last {
            Residual::Norm(norm) => *norm,
            Residual::Streams(_) => head.norms[1],
        };
        let mut hidden_norm = vec![0.0; head.config.residual_width()];
        backend.read_floats(norm, &mut hidden_norm)?;
        let taps = TapBuffers::default();
        Ok(Self { slots, slot_tables, kv_shape, cache, index, positions, taps, hidden_norm })
    }
}

impl MtpHead {
    /// Runs the head on `ids` at positions from `at` on, and predicts the token after the last of `ids`. `hidden` has
    /// the hidden row before each of `ids`.
    pub fn predict(
        &self,
        at: usize,
        ids: &[u32],
        hidden: HiddenRows<'_>,
        state: &mut MtpDeviceState,
        device: PassDevice<'_>,
    ) -> Result<MtpPrediction, ModelError> {
        let width = self.config.residual_width();
        let count = ids.len();
        let (HiddenRows::OfModel(rows) | HiddenRows::OfHead(rows)) = hidden;
        if ids.is_empty() || rows.len() != count * width || at + count > state.positions {
            return Err(ModelError::Config(format!("the MTP head's cache is too small for {count} rows at {at}")));
        }
        let mut rows = rows.to_vec();
        if matches!(hidden, HiddenRows::OfModel(_)) || self.config.streams.is_some() {
            norm(&mut rows, &state.hidden_norm, self.config.eps);
        }
        let PassDevice { backend, limits, buffers, scratch } = device;
        let mut buffers = *buffers;
        buffers.slot_tables = state.slot_tables;
        let mut layers = [LayerState::Attention(state.cache, state.index)];
        let mut start = at;
        let end = at + count;
        let mut out = MtpPrediction::default();
        for (ids, rows) in ids.chunks(buffers.rows).zip(rows.chunks(buffers.rows * width)) {
            // Only distances within the head's own context matter. So a row's position is its index in that context,
            // even after images.
            let chunk = Chunk::new(ids, start, RowPositions::new(start, start, &[]));
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
                ngrams: Vec::new(),
                scratch: &mut *scratch,
            };
            let mut hooks = LayerHooks::taps_only(&mut state.taps);
            let out = (start == end).then_some(&mut out);
            let done = self.forward(rows, &mut layers, &mut pass, &mut hooks, out);
            pass.finish(done)?;
        }
        Ok(out)
    }

    /// Runs one pass. `rows` are the hidden rows after their norm.
    fn forward(
        &self,
        rows: &[f32],
        state: &mut [LayerState],
        pass: &mut Pass<'_>,
        hooks: &mut LayerHooks<'_>,
        out: Option<&mut MtpPrediction>,
    ) -> Result<(), ModelError> {
        self.fuse(rows, pass)?;
        forward_layers(&self.net, state, pass, hooks)?;

        // m = rms_norm(layer(u)) of the last row, or the mixture of its streams; logits = W_head m
        let Some(out) = out else { return Ok(()) };
        let b = pass.buffers;
        let config = &self.config;
        let row = pass.rows() - 1..pass.rows();
        let mixed = b.normed.floats(config.hidden);
        let matrices = std::slice::from_ref(self.net.head());
        let (x, norm, hidden) = match &self.net.before_head {
            Residual::Norm(weight) => {
                let norm = Norm { weight: *weight, eps: config.eps, keep: Some(mixed) };
                (pass.residual(&row), Some(norm), mixed)
            }
            Residual::Streams(mix) => {
                pass.mix_streams(mix, &row, mixed, [Region::default(); 2])?;
                (mixed, None, pass.residual(&row))
            }
        };
        pass.execute(Linear { x, tokens: 1, norm, matrices, y: b.logits, add: false })?;
        out.logits.resize(config.vocab, 0.0);
        out.hidden.resize(config.residual_width(), 0.0);
        pass.backend.read_floats(b.logits, &mut out.logits)?;
        Ok(pass.backend.read_floats(hidden, &mut out.hidden)?)
    }

    /// Computes `u` from the embeddings of the pass's tokens and the hidden rows.
    fn fuse(&self, rows: &[f32], pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let b = pass.buffers;
        let tokens = pass.rows();
        let [embedding, hidden] = self.fc.each_ref().map(std::slice::from_ref);
        let x = b.normed;
        let y = b.h;
        let ids = b.ids;
        pass.write_inputs()?;
        pass.execute(Embedding { table: &self.net.embed, tokens, ids, into: x })?;
        let norm = Some(pass.norm(self.norms[0]));
        pass.execute(Linear { x, tokens, norm, matrices: embedding, y, add: false })?;
        let Some(streams) = &self.config.streams else {
            // u = fc [rms_norm(embed(ids)); rms_norm(rows)], half by half
            let norm = Some(pass.norm(self.norms[1]));
            pass.backend.write(x.floats(rows.len()), bytemuck::cast_slice(rows))?;
            return pass.execute(Linear { x, tokens, norm, matrices: hidden, y, add: true });
        };
        // u[c] = fc_embedding rms_norm(embed(ids)) + fc_hidden rows[c], stream by stream
        pass.write_streams(None)?;
        for block in pass.mixer_blocks() {
            let width = streams.width();
            let x = b.stream.of(streams, block.len()).normed;
            let y = pass.residual(&block);
            let tokens = block.len() * streams.count;
            pass.backend.write(x, bytemuck::cast_slice(&rows[block.start * width..block.end * width]))?;
            pass.execute(Linear { x, tokens, norm: None, matrices: hidden, y, add: true })?;
        }
        Ok(())
    }
}
