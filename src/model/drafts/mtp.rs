//! The head for multi-token prediction: one layer of attention and experts that guesses the token after the next from the
//! residual stream behind the model's last layer.
//!
//! ```text
//! u = fc [ rms(embed(x[p + 1])) ; rms(rms(h[p])) ]     h[p]: behind the last layer; the inner norm is the model's last
//! m = rms(layer(u))                                    the layer's cache is the head's own
//! logits of x[p + 2] = head m                          the model's own head; further tokens with m in place of rms(h)
//! ```
//! Its experts have slots of their own: their encoding is often another, and so is the size of a slot.

use crate::model::{
    MtpSource, Qwen,
    config::{self, Config},
    device_state::{self as device_state, DeviceState},
    drafts::hidden_taps::Tapped,
    forward::Pass,
    forward::buffers::Buffers,
    load::{LoadOptions, ModelParts},
    state::sequence::{LayerState, heads},
    weights::{Layer, Network},
};
use crate::{
    checkpoint::{Checkpoint, DRAFT_BUFFERS, TrunkLoader, index::Index, mtp as files},
    device::{Region, Slab},
    error::ModelError,
    experts::{self, ExpertMap, ExpertStore, LayerExperts, PassKind},
    metrics::Metrics,
    ops::{Backend, Embedding, ExpertSlots, KvBits, KvCache, KvFormat, Linear, ModelPart, Norm, Weight},
    platform::MAX_BLOCK,
};
use std::{path::Path, sync::Arc};

/// Positions that the head's cache has room for, and hidden rows that are kept for it: when the room is used up, it begins
/// anew with the last rows.
const ROOM: usize = 1024;
pub const ROWS: usize = 512;

/// A head that was looked at and not loaded.
pub struct Survey {
    from: Checkpoint,
    config: Config,
    map: ExpertMap,
    weights: u64,
    /// ExpertSlots for its experts.
    pub slots: usize,
}

/// A loaded head.
pub(in crate::model) struct Head {
    config: Config,
    pub net: Network,
    /// For the embedding, and for the hidden row.
    pub fc: [Weight; 2],
    norms: [Region; 2],
    pub slabs: [Arc<Slab>; 2],
    pub store: Option<ExpertStore>,
}

/// Its memory on a device.
pub(in crate::model) struct HeadPlace {
    slots: ExpertSlots,
    tables: Region,
    cache: KvCache,
    room: usize,
    tapped: Tapped,
    /// The model's last norm.
    norm: Vec<f32>,
}

/// The head's prediction behind its last row.
#[derive(Debug, Clone, Default)]
pub struct MtpPrediction {
    pub logits: Vec<f32>,
    /// In place of a hidden row, for the token after.
    pub hidden: Vec<f32>,
}

struct Weights {
    fc: [Weight; 2],
    norms: [Region; 2],
    layer: Layer,
    norm: Region,
    map: Vec<LayerExperts>,
}

impl Weights {
    fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, mut map) = (config.hidden, Vec::new());
        let name = |name: &str| format!("{}{name}", files::PREFIX);
        let fc = trunk.columns(&name("fc"), hidden, hidden, 2)?;
        let fc = <[Weight; 2]>::try_from(fc).map_err(|_| ModelError::Config("mtp.fc is no pair".into()))?;
        let norms = ["embedding", "hidden"].map(|of| name(&format!("pre_fc_norm_{of}.weight")));
        Ok(Self {
            fc,
            norms: [trunk.norm(&norms[0], hidden)?, trunk.norm(&norms[1], hidden)?],
            layer: Layer::load(trunk, &name("layers.0."), true, config, &mut map)?,
            norm: trunk.norm(&name("norm.weight"), hidden)?,
            map,
        })
    }
}

/// The head that `options` ask for; one that should be in the checkpoint and is not, or is of no use, is told in the log.
pub(in crate::model) fn survey(
    dir: &Path,
    model: &Config,
    index: &Index,
    options: &LoadOptions,
) -> Result<Option<Survey>, ModelError> {
    match &options.drafter {
        MtpSource::None => Ok(None),
        MtpSource::Directory(beside) => {
            let json = config::json(beside)?;
            Survey::new(files::open_dir(beside, &json)?, model).map(Some)
        }
        MtpSource::Checkpoint => {
            let json = config::json(dir)?;
            let found = files::find(dir, index, &json).and_then(|found| {
                let found = found.map(|from| Survey::new(from, model));
                found.transpose()
            });
            match found {
                Ok(None) if files::declared(&json) > 0 => {
                    tracing::info!("config.json declares an MTP head, and the files have none: drafts are looked up");
                    Ok(None)
                }
                Ok(found) => Ok(found),
                Err(error) => {
                    tracing::warn!(%error, "the MTP head is of no use: drafts are looked up");
                    Ok(None)
                }
            }
        }
    }
}

impl Survey {
    fn new(from: Checkpoint, model: &Config) -> Result<Self, ModelError> {
        let config = Config { layers: 1, full: vec![true], ..model.clone() };
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::measure(&from, &mut ignore);
        let weights = Weights::load(&mut trunk, &config)?;
        let len = trunk.len() as u64;
        from.finish()?;
        let map = ExpertMap { layers: weights.map };
        Ok(Self { slots: map.experts(), from, config, map, weights: len })
    }

    /// When the model's own experts do not all fit, the head's are a quarter of its own, or twice what a token needs.
    pub fn stream(&mut self) {
        let all = self.map.experts();
        self.slots = (all / 4).max(2 * self.config.experts_per_token()).min(all);
    }

    /// All that it takes.
    pub fn bytes(&self, format: KvFormat) -> u64 {
        let (a, hidden) = (&self.config.attention, self.config.hidden);
        let kv = ROOM * 2 * a.kv_heads * format.row_bytes(a.dim);
        // Two of them: what a chunk's rows are normed to, and what is added to them.
        let rows = (5 * ROWS + 8) * hidden * 4;
        let slots = self.slots as u64 * self.map.slot_bytes(MAX_BLOCK) as u64;
        self.weights + slots + (kv + rows) as u64 + 4 * self.map.experts() as u64
    }

    pub(in crate::model) fn load(
        self,
        model: &Network,
        options: &LoadOptions,
        store: Option<&ExpertStore>,
    ) -> Result<Head, ModelError> {
        let Self { from, config, map, weights: len, slots } = self;
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::read(&from, len as usize, &mut ignore)?.with_buffers(DRAFT_BUFFERS);
        let Weights { fc, norms, layer, norm, .. } = Weights::load(&mut trunk, &config)?;
        let slabs = trunk.finish()?;
        let mut net = Network { embed: model.embed, layers: vec![layer], norm, head: Some(*model.head()) };
        let store = if map.layers.is_empty() {
            None
        } else {
            let io = options.store.io;
            let threads = store.map_or(1, |_| options.store.threads);
            let options =
                experts::Options { io, threads, prefetch: experts::Prefetch::Off, ..experts::Options::new(slots) };
            // Apart from the model's experts, whose hits and misses are counted.
            let store = ExpertStore::open(from.index.files.clone(), map, options, Metrics::new("", ""))?;
            store.fill(&mut |_, _| ())?;
            net.lay_out(&store);
            Some(store)
        };
        Ok(Head { config, net, fc, norms, slabs, store })
    }
}

impl HeadPlace {
    pub fn new(head: &mut Head, norm: Region, context: usize, run: &mut dyn Backend) -> Result<Self, ModelError> {
        let slots = head.store.as_ref().map(|store| device_state::slots(store, run)).transpose()?.unwrap_or_default();
        let words = head.store.as_ref().map_or(Vec::new(), |store| device_state::tables(&head.net, store));
        let (room, format) = (ROOM.min(context), run.limits().cache);
        let shape = heads(&head.config, format, KvBits::default(), room, 0);
        device_state::accept(&head.net, &shape, run)?;
        head.fc.iter().try_for_each(|weight| run.accept(ModelPart::Weight(weight)))?;
        let (keys, values) = (run.allocate(shape.cache_bytes())?, run.allocate(shape.cache_bytes())?);
        let numbers: Vec<u32> = (0..shape.pages() as u32).collect();
        let table = run.allocate(numbers.len() * 4)?;
        run.write_words(table, &numbers)?;
        let cache = KvCache { keys, values, table, recent: [Region::default(); 2] };
        let tables = run.allocate(words.len() * 4)?;
        if !words.is_empty() {
            run.write_words(tables, &words)?;
        }
        head.net.set_cache(shape);
        let mut weight = vec![0.0; head.config.hidden];
        run.read_floats(norm, &mut weight)?;
        Ok(Self { slots, tables, cache, room, tapped: Tapped::default(), norm: weight })
    }
}

impl Qwen {
    /// Positions that its MTP head has room for, if it has one.
    pub fn mtp_room(&self) -> Option<usize> {
        self.device_state.borrow().head.as_ref().map(|place| place.room)
    }

    /// Rows of the head, at positions from `at` on of its own: tokens, and the hidden rows `[rows, hidden]` in front of
    /// them; `own` if these are the head's, and not the model's. What stood there and behind is forgotten.
    pub fn mtp(&self, at: usize, ids: &[u32], hidden: &[f32], own: bool) -> Result<MtpPrediction, ModelError> {
        let ModelParts { config, head, .. } = &self.parts;
        let DeviceState { run, limits, buffers, lists, head: place, .. } = &mut *self.device_state.borrow_mut();
        let width = config.hidden;
        let (Some(head), Some(place)) = (head, place) else {
            return Err(ModelError::Config("there is no MTP head".into()));
        };
        if ids.is_empty() || hidden.len() != ids.len() * width || at + ids.len() > place.room {
            return Err(ModelError::Config(format!("the MTP head has no room for {} rows at {at}", ids.len())));
        }
        let mut rows = hidden.to_vec();
        if !own {
            rows.chunks_exact_mut(width).for_each(|row| normalise(row, &place.norm, config.eps));
        }
        let run = &mut **run;
        let (b, mut state) = (Buffers { tables: place.tables, ..*buffers }, [LayerState::Attention(place.cache)]);
        let (mut start, mut out) = (at, MtpPrediction::default());
        for (ids, rows) in ids.chunks(b.rows).zip(rows.chunks(b.rows * width)) {
            let tokens = ids.len();
            let mut pass = Pass {
                config: &head.config,
                net: &head.net,
                run: &mut *run,
                limits: *limits,
                experts: head.store.as_ref(),
                slots: &place.slots,
                b: &b,
                start,
                tokens,
                phase: if tokens == 1 { PassKind::Decode } else { PassKind::Prefill },
                half: false,
                trial: None,
                lists: &mut *lists,
                go_on: &|| true,
                observe: None,
                tapped: &mut place.tapped,
            };
            let last = start + tokens == at + hidden.len() / width;
            let done = pass.predict(head, ids, rows, &mut state, last.then_some(&mut out));
            // As for the model's own passes: nothing runs when slots are let go.
            let end = pass.run.sync_point();
            let waited = pass.run.wait_for(end);
            done?;
            waited?;
            start += tokens;
        }
        Ok(out)
    }
}

impl Pass<'_> {
    fn predict(
        &mut self,
        head: &Head,
        ids: &[u32],
        rows: &[f32],
        state: &mut [LayerState],
        out: Option<&mut MtpPrediction>,
    ) -> Result<(), ModelError> {
        let (b, tokens, config) = (self.b, self.tokens, self.config);
        let norm = |weight| Some(Norm { weight, eps: config.eps, keep: None });
        let [embedding, hidden] = head.fc.each_ref().map(std::slice::from_ref);
        self.run.write_words(b.ids, ids)?;
        self.turn()?;
        self.run.execute(&Embedding { table: &head.net.embed, tokens, ids: b.ids, into: b.normed }.into())?;
        let (x, y) = (b.normed, b.h);
        self.run
            .execute(&Linear { x, tokens, norm: norm(head.norms[0]), matrices: embedding, y, add: false }.into())?;
        self.run.write(b.normed.floats(rows.len()), bytemuck::cast_slice(rows))?;
        self.run.execute(&Linear { x, tokens, norm: norm(head.norms[1]), matrices: hidden, y, add: true }.into())?;
        self.walk(state, &[], &mut |_, _, _| Ok(()))?;
        let Some(out) = out else { return Ok(()) };
        let keep = Some(b.normed.floats(config.hidden));
        let norm = Some(Norm { weight: head.net.norm, eps: config.eps, keep });
        let (x, matrices) = (b.h.rows(tokens - 1, 1, config.hidden), std::slice::from_ref(head.net.head()));
        self.run.execute(&Linear { x, tokens: 1, norm, matrices, y: b.logits, add: false }.into())?;
        out.logits.resize(config.vocab, 0.0);
        out.hidden.resize(config.hidden, 0.0);
        self.run.read_floats(b.logits, &mut out.logits)?;
        Ok(self.run.read_floats(b.normed, &mut out.hidden)?)
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight`.
fn normalise(row: &mut [f32], weight: &[f32], eps: f32) {
    let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
}
