//! An n-gram table on the disk. The rows of a token depend on token ids only. So a pass requests rows before it starts,
//! and waits for them when the layer of the table begins.
//!
//! The table is far larger than memory. Its rows are read one by one, without the page cache. A small cache keeps the
//! rows that were read last.

use super::{
    ngram_hash::{NgramHash, NgramShape},
    state::row_ring::RowRing,
};
use crate::{
    checkpoint::{Checkpoint, RowFiles, RowTable, index::Index, names::TensorName, pack::PackedRows},
    error::{ModelError, StoreError},
    metrics::Metrics,
};
use parking_lot::{Condvar, Mutex};
use serde_json::Value;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, mpsc},
    time::Instant,
};

/// Number of threads that read rows. A token needs 16 rows, each with a separate read.
const THREADS: usize = 16;
/// Size of the cache of rows in bytes.
pub const CACHE_BYTES: usize = 16 << 20;
/// Maximum number of rows in one read job.
const JOB_ROWS: usize = 64;

/// Estimated bytes of the map and list entries of one row.
const ROW_ENTRY: usize = 96;

/// Number of bytes that a pass needs for each token: its rows as they are read and decoded, with up to 4 bytes per
/// value each.
pub fn bytes_per_token(shape: &NgramShape) -> u64 {
    (2 * 4 * shape.width + shape.table_heads() * ROW_ENTRY) as u64
}

/// The layout of a table in its files, and the hash that chooses the rows of a token.
#[derive(Debug, Clone)]
pub struct NgramLayout {
    pub shape: NgramShape,
    hash: NgramHash,
    pub table: Arc<RowTable>,
}

impl NgramLayout {
    /// Finds the tensors of the table, whose names start with `prefix`, and checks the stored constants of the hash.
    /// The table may also be in its own file, in a tensor called `ngram`. The index may list this file or not.
    pub fn new(from: &Checkpoint, prefix: &str, shape: &NgramShape) -> Result<Self, ModelError> {
        let hash = NgramHash::new(shape);
        let stored = [
            ("layer_multipliers", &hash.multipliers),
            ("ngram_heads_vocab_sizes", &hash.sizes),
            ("ngram_heads_offsets", &hash.offsets),
        ];
        for (name, expected) in stored {
            let name = format!("{prefix}{name}");
            let found = from.integers(&name)?;
            if found.is_some_and(|found| !found.iter().map(|n| *n as u64).eq(expected.iter().copied())) {
                let why = format!("the constants in {name} are not those that config.json gives: {expected:?}");
                return Err(StoreError::NotACheckpoint { path: from.index.dir.clone(), why }.into());
            }
        }
        let width = shape.width / shape.table_heads();
        let embedding = format!("{prefix}ngram_embedding");
        let scale = format!("{embedding}.weight_scale");
        let has = |path: &str| from.has(&format!("{path}.weight"));
        let numbered = [".shard_", ".shards."].map(|part| format!("{embedding}{part}"));
        let own_file = from.index.dir.join(&shape.file);
        let listed = "language_model.ngram";
        let table = if let Some(name) = numbered.iter().find(|name| has(&format!("{name}0"))) {
            let paths: Vec<String> = (0..).map(|shard| format!("{name}{shard}")).take_while(|path| has(path)).collect();
            RowTable::new(from, &paths, &scale, width)?
        } else if has(listed) {
            RowTable::new(from, &[listed.into()], &format!("{listed}.weight_scale"), width)?
        } else if !has(&embedding) && own_file.exists() {
            let index = Index::open_file(&from.index.dir, own_file)?;
            let own = Checkpoint::open_as(index, &Value::Null, |name| TensorName::Text(name.into()))?;
            RowTable::new(&own, &["ngram".into()], "ngram.weight_scale", width)?
        } else {
            RowTable::new(from, &[embedding], &scale, width)?
        };
        if table.rows != hash.rows {
            let (rows, expected) = (table.rows, hash.rows);
            return Err(ModelError::Config(format!("the n-gram table has {rows} rows, not {expected} as configured")));
        }
        Ok(Self { shape: shape.clone(), hash, table: Arc::new(table) })
    }

    /// The rows of each of `ids`, which come after the tokens `before`.
    pub fn rows_of(&self, before: &[u32], ids: &[u32]) -> Vec<u64> {
        self.hash.rows_of(before, ids)
    }
}

/// A request for the rows of a pass.
pub struct RequestedRows {
    /// The rows of each token, head by head.
    wanted: Vec<u64>,
    batch: Arc<RowBatch>,
}

/// The rows of a table for one pass, and the state of its convolution.
pub struct NgramInput<'a> {
    pub table: &'a NgramTable,
    /// The request for the rows of the pass, made before the pass started.
    pub pending: Option<RequestedRows>,
    /// Inputs of the convolution at the last positions.
    pub history: RowRing,
}

/// The distinct rows of a request.
#[derive(Default)]
struct RowBatch {
    state: Mutex<BatchState>,
    rows_read: Condvar,
}

#[derive(Default)]
struct BatchState {
    found: HashMap<u64, Arc<[u8]>>,
    /// Number of jobs that have not ended.
    jobs: usize,
    failure: Option<StoreError>,
}

/// The most recently read rows, oldest first in `order`.
#[derive(Default)]
struct RowCache {
    rows: HashMap<u64, Arc<[u8]>>,
    order: VecDeque<u64>,
}

struct RowJob {
    rows: Vec<u64>,
    batch: Arc<RowBatch>,
}

/// An n-gram table whose rows are read from disk on demand.
pub struct NgramTable {
    layout: NgramLayout,
    cache: Mutex<RowCache>,
    /// Maximum number of rows in the cache.
    capacity: usize,
    jobs: mpsc::Sender<RowJob>,
    metrics: Arc<Metrics>,
}

impl NgramTable {
    /// Opens the table's files, or its `packed` rows, and starts the threads that read them.
    pub fn open(layout: NgramLayout, packed: Option<PackedRows>, metrics: &Arc<Metrics>) -> Result<Self, ModelError> {
        let capacity = CACHE_BYTES / (layout.table.row_len() + ROW_ENTRY);
        let files = Arc::new(RowFiles::open(layout.table.clone(), packed)?);
        let (jobs, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for index in 0..THREADS {
            let (files, receiver, metrics) = (files.clone(), receiver.clone(), metrics.clone());
            let work = move || serve(&files, &receiver, &metrics);
            std::thread::Builder::new().name(format!("ngram-{index}")).spawn(work).map_err(|error| {
                ModelError::Memory(format!("cannot start a thread that reads the n-gram table: {error}"))
            })?;
        }
        Ok(Self { layout, cache: Mutex::default(), capacity, jobs, metrics: metrics.clone() })
    }

    pub fn layout(&self) -> &NgramLayout {
        &self.layout
    }

    /// Starts reading the rows of `ids`, which come after the tokens `before`.
    pub fn request(&self, before: &[u32], ids: &[u32]) -> RequestedRows {
        let wanted = self.layout().rows_of(before, ids);
        let mut distinct = wanted.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let batch = Arc::new(RowBatch::default());
        let cache = self.cache.lock();
        let mut state = batch.state.lock();
        let mut missing = Vec::new();
        for row in distinct {
            match cache.rows.get(&row) {
                Some(bytes) => drop(state.found.insert(row, bytes.clone())),
                None => missing.push(row),
            }
        }
        self.metrics.ngram_rows_cached.inc_by(state.found.len() as u64);
        self.metrics.ngram_rows_read.inc_by(missing.len() as u64);
        // Spread the rows over all threads, in jobs of at most `JOB_ROWS` neighbouring rows.
        let size = missing.len().div_ceil(THREADS).clamp(1, JOB_ROWS);
        for rows in missing.chunks(size) {
            state.jobs += 1;
            if self.jobs.send(RowJob { rows: rows.to_vec(), batch: batch.clone() }).is_err() {
                state.jobs -= 1;
            }
        }
        drop(state);
        RequestedRows { wanted, batch }
    }

    /// Waits for the rows of a request and decodes them to f32 `[tokens, width]`.
    pub fn wait(&self, pending: RequestedRows) -> Result<Vec<f32>, ModelError> {
        let mut state = pending.batch.state.lock();
        if state.jobs > 0 {
            let from = Instant::now();
            while state.jobs > 0 {
                pending.batch.rows_read.wait(&mut state);
            }
            self.metrics.ngram_stall_seconds.inc_by(from.elapsed().as_secs_f64());
        }
        if let Some(failure) = state.failure.take() {
            return Err(failure.into());
        }
        let mut out = Vec::with_capacity(pending.wanted.len() * self.layout.table.width);
        for row in &pending.wanted {
            let Some(bytes) = state.found.get(row) else {
                return Err(ModelError::Config(format!("row {row} of the n-gram table was not read")));
            };
            self.layout.table.decode(bytes, &mut out);
        }
        self.cache.lock().keep(&state.found, self.capacity);
        Ok(out)
    }
}

impl RowCache {
    /// Adds rows, and drops the oldest beyond `capacity`.
    fn keep(&mut self, found: &HashMap<u64, Arc<[u8]>>, capacity: usize) {
        for (row, bytes) in found {
            if self.rows.insert(*row, bytes.clone()).is_none() {
                self.order.push_back(*row);
            }
        }
        while self.order.len() > capacity {
            if let Some(oldest) = self.order.pop_front() {
                self.rows.remove(&oldest);
            }
        }
    }
}

/// The main function of a thread. Reads rows until the table is dropped.
fn serve(files: &RowFiles, jobs: &Mutex<mpsc::Receiver<RowJob>>, metrics: &Metrics) {
    let mut space = Vec::new();
    loop {
        let Ok(RowJob { rows, batch }) = jobs.lock().recv() else { return };
        let mut found = Vec::with_capacity(rows.len());
        let mut failure = None;
        for row in rows {
            match files.read(row, &mut space) {
                Ok(bytes) => {
                    metrics.ngram_read_bytes.inc_by(bytes.len() as u64);
                    found.push((row, Arc::from(bytes)));
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let mut state = batch.state.lock();
        state.found.extend(found);
        state.failure = state.failure.take().or(failure);
        state.jobs -= 1;
        batch.rows_read.notify_all();
    }
}
