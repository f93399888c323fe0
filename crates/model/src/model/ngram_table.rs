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
    checkpoint::{Checkpoint, RowFiles, RowTable, index::Index, pack::PackedRows},
    error::ModelError,
};
use moestro_base::{error::StoreError, metrics::Metrics};
use parking_lot::Mutex;
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
        let listed = "language_model.model.ngram";
        let table = if let Some(name) = numbered.iter().find(|name| has(&format!("{name}0"))) {
            let paths: Vec<String> = (0..).map(|shard| format!("{name}{shard}")).take_while(|path| has(path)).collect();
            RowTable::new(from, &paths, &scale, width)?
        } else if has(listed) {
            RowTable::new(from, &[listed.into()], &format!("{listed}.weight_scale"), width)?
        } else if !has(&embedding) && own_file.exists() {
            let index = Index::open_file(&from.index.dir, own_file)?;
            let own = Checkpoint::open_as(index, &Value::Null, |name| Some(name.into()))?;
            RowTable::new(&own, &["ngram".into()], "ngram.weight_scale", width)?
        } else {
            RowTable::new(from, &[embedding], &scale, width)?
        };
        if table.rows != hash.rows {
            let rows = table.rows;
            let expected = hash.rows;
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
    /// The distinct rows that were in the cache.
    found: HashMap<u64, Arc<[u8]>>,
    /// The distinct rows that are read from the disk. The channel closes when all jobs have ended.
    read: mpsc::Receiver<Result<ReadRows, StoreError>>,
}

/// The number and the bytes of each row that a job has read.
type ReadRows = Vec<(u64, Arc<[u8]>)>;

/// The rows of a table for one pass, and the state of its convolution.
pub struct NgramInput<'a> {
    pub table: &'a NgramTable,
    /// The request for the rows of the pass, made before the pass started.
    pub pending: Option<RequestedRows>,
    /// Inputs of the convolution at the last positions. If the rows of the pass belong to several sequences, the rings
    /// of all of them.
    pub history: RowRing,
}

/// The most recently read rows, oldest first in `order`.
#[derive(Default)]
struct RowCache {
    rows: HashMap<u64, Arc<[u8]>>,
    order: VecDeque<u64>,
}

struct RowJob {
    rows: Vec<u64>,
    reply: mpsc::Sender<Result<ReadRows, StoreError>>,
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
            let files = files.clone();
            let receiver = receiver.clone();
            let metrics = metrics.clone();
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

    /// Starts reading the rows of the tokens of one or several sequences: of each, the tokens before and the tokens
    /// whose rows are wanted.
    pub fn request<'t>(&self, sequences: impl IntoIterator<Item = [&'t [u32]; 2]>) -> RequestedRows {
        let rows_of = |[before, ids]: [&[u32]; 2]| self.layout().rows_of(before, ids);
        let wanted: Vec<u64> = sequences.into_iter().flat_map(rows_of).collect();
        let mut distinct = wanted.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let cache = self.cache.lock();
        let mut found = HashMap::new();
        let mut missing = Vec::new();
        for row in distinct {
            match cache.rows.get(&row) {
                Some(bytes) => drop(found.insert(row, bytes.clone())),
                None => missing.push(row),
            }
        }
        self.metrics.ngram_rows_cached.inc_by(found.len() as u64);
        self.metrics.ngram_rows_read.inc_by(missing.len() as u64);
        // Spread the rows over all threads, in jobs of at most `JOB_ROWS` neighbouring rows.
        let size = missing.len().div_ceil(THREADS).clamp(1, JOB_ROWS);
        let (reply, read) = mpsc::channel();
        for rows in missing.chunks(size) {
            // This fails only if all threads have panicked. `wait` then reports that the rows were not read.
            let _ = self.jobs.send(RowJob { rows: rows.to_vec(), reply: reply.clone() });
        }
        RequestedRows { wanted, found, read }
    }

    /// Waits for the rows of a request and decodes them to f32 `[tokens, width]`.
    pub fn wait(&self, pending: RequestedRows) -> Result<Vec<f32>, ModelError> {
        let RequestedRows { wanted, mut found, read } = pending;
        let from = Instant::now();
        let read = Vec::from_iter(read);
        self.metrics.ngram_stall_seconds.inc_by(from.elapsed().as_secs_f64());
        for rows in read {
            found.extend(rows?);
        }
        let mut out = Vec::with_capacity(wanted.len() * self.layout.table.width);
        for row in &wanted {
            let Some(bytes) = found.get(row) else {
                return Err(ModelError::Config(format!("row {row} of the n-gram table was not read")));
            };
            self.layout.table.decode(bytes, &mut out);
        }
        self.cache.lock().keep(&found, self.capacity);
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
        let Ok(RowJob { rows, reply }) = jobs.lock().recv() else { return };
        let read = |row| {
            let bytes = files.read(row, &mut space)?;
            metrics.ngram_read_bytes.inc_by(bytes.len() as u64);
            Ok((row, Arc::from(bytes)))
        };
        // This fails if the pass has ended without waiting for its rows.
        let _ = reply.send(rows.into_iter().map(read).collect());
    }
}
