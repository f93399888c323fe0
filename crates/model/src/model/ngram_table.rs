//! An n-gram table on the disk. The rows of a token depend on token ids only. So a pass requests rows before it starts,
//! and waits for them when the layer of the table begins. The rows of the next chunk of a prompt are read while a GPU
//! computes this chunk.
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
use parking_lot::{Condvar, Mutex};
use serde_json::Value;
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    time::Instant,
};

/// Number of threads that read rows. They wait for the disk most of the time, and a disk reads many rows at once.
const THREADS: usize = 64;
/// Size of the cache of rows in bytes.
pub const CACHE_BYTES: usize = 16 << 20;
/// Maximum number of rows in one read job.
const JOB_ROWS: usize = 64;

/// Estimated bytes of the entries of one row in maps and lists.
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

/// The rows of a pass, or a request for them.
pub enum RequestedRows {
    Pending(RowRequest),
    /// The decoded rows, which were read ahead.
    Ready(Vec<f32>),
}

/// A request for the rows of a pass.
pub struct RowRequest {
    /// Each wanted row, and its index in the result. In the order of the rows.
    places: Vec<(u64, usize)>,
    /// The rows that were in the cache.
    cached: RowBatch,
    /// The rows that are read from the disk. The channel closes when all jobs have ended.
    read: mpsc::Receiver<Result<RowBatch, StoreError>>,
}

/// Distinct rows.
#[derive(Default)]
struct RowBatch {
    /// Index of the first place of each row in [`RowRequest::places`].
    places: Vec<usize>,
    /// The bytes of all rows.
    bytes: Vec<u8>,
}

/// The rows of a table for one pass, and the state of its convolution.
pub struct NgramInput<'a> {
    pub table: &'a NgramTable,
    /// The request for the rows of the pass, made before the pass started.
    pub pending: Option<RequestedRows>,
    /// Inputs of the convolution at the last positions. If the rows of the pass belong to several sequences, the rings
    /// of all of them.
    pub history: RowRing,
    /// The tokens before [`Chunk::following`](super::forward::pass::Chunk::following).
    pub before_following: Vec<u32>,
}

/// Decoded rows of tokens that a later pass is expected to have.
struct RowsAhead {
    /// The tokens before `ids`, on which the rows depend as well.
    before: Vec<u32>,
    ids: Vec<u32>,
    /// The rows of `ids`, `[ids, width]`.
    values: Vec<f32>,
}

/// The most recently read rows.
struct RowCache {
    /// The index of each row in `rows`.
    indices: HashMap<u64, usize>,
    rows: Vec<u64>,
    /// The bytes of `rows`.
    bytes: Vec<u8>,
    /// Size of a row in bytes.
    row_len: usize,
    /// Maximum number of rows.
    capacity: usize,
    /// Index of the oldest row if the cache is full.
    oldest: usize,
}

struct RowJob {
    /// Each row, and the index of the row's first place.
    rows: Vec<(u64, usize)>,
    reply: mpsc::Sender<Result<RowBatch, StoreError>>,
}

/// Jobs for the threads that read rows. Each job wakes one thread. If the threads took turns at a channel, each
/// would wake the next one, and the few rows of a decoded token would be read one after the other.
struct JobQueue {
    /// `None` after the table is dropped.
    jobs: Mutex<Option<VecDeque<RowJob>>>,
    work: Condvar,
}

/// An n-gram table whose rows are read from disk on demand.
pub struct NgramTable {
    layout: NgramLayout,
    cache: Mutex<RowCache>,
    ahead: Mutex<Option<RowsAhead>>,
    jobs: Arc<JobQueue>,
    metrics: Arc<Metrics>,
}

impl NgramTable {
    /// Opens the table's files, or its `packed` rows, and starts the threads that read them.
    pub fn open(layout: NgramLayout, packed: Option<PackedRows>, metrics: &Arc<Metrics>) -> Result<Self, ModelError> {
        let cache = Mutex::new(RowCache::new(layout.table.row_len()));
        let files = Arc::new(RowFiles::open(layout.table.clone(), packed)?);
        let jobs = Arc::new(JobQueue { jobs: Mutex::new(Some(VecDeque::new())), work: Condvar::new() });
        // If a thread cannot start, the table is dropped, and the other threads end.
        let table = Self { layout, cache, ahead: Mutex::default(), jobs, metrics: metrics.clone() };
        for index in 0..THREADS {
            let files = files.clone();
            let jobs = table.jobs.clone();
            let metrics = metrics.clone();
            let mut space = Vec::new();
            let work = move || serve(|row| files.read(row, &mut space), &jobs, &metrics);
            std::thread::Builder::new().name(format!("ngram-{index}")).spawn(work).map_err(|error| {
                ModelError::Memory(format!("cannot start a thread that reads the n-gram table: {error}"))
            })?;
        }
        Ok(table)
    }

    pub fn layout(&self) -> &NgramLayout {
        &self.layout
    }

    /// Starts reading the rows of the tokens of one or several sequences: of each, the tokens before and the tokens
    /// whose rows are wanted.
    pub fn request(&self, sequences: &[[&[u32]; 2]]) -> RequestedRows {
        match sequences {
            [[before, ids]] => match self.take_ahead(before, ids) {
                Some(values) => RequestedRows::Ready(values),
                None => RequestedRows::Pending(self.request_rows(sequences)),
            },
            _ => RequestedRows::Pending(self.request_rows(sequences)),
        }
    }

    /// The rows of `ids` after the tokens `before`, if they were read ahead. A prompt without them drops other rows, so
    /// that rows of only one prompt are in memory.
    fn take_ahead(&self, before: &[u32], ids: &[u32]) -> Option<Vec<f32>> {
        let mut ahead = self.ahead.lock();
        let found = ahead.take_if(|ahead| ids.len() > 1 || ahead.is_for(before, ids))?;
        found.is_for(before, ids).then_some(found.values).map(|mut values| {
            values.truncate(ids.len() * self.layout.shape.width);
            values
        })
    }

    /// Reads and decodes the rows of `ids`, which come after the tokens `before`, for a later pass. This pass reports an
    /// error, because it reads rows again that could not be read.
    pub fn read_ahead(&self, before: &[u32], ids: &[u32]) {
        let rows = self.request_rows(&[[before, ids]]);
        if let Ok(values) = self.collect(rows, |_| ()) {
            *self.ahead.lock() = Some(RowsAhead { before: before.to_vec(), ids: ids.to_vec(), values });
        }
    }

    fn request_rows(&self, sequences: &[[&[u32]; 2]]) -> RowRequest {
        let rows_of = |[before, ids]: [&[u32]; 2]| self.layout().rows_of(before, ids);
        let wanted = sequences.iter().copied().flat_map(rows_of);
        let mut places: Vec<(u64, usize)> = wanted.enumerate().map(|(place, row)| (row, place)).collect();
        places.sort_unstable();
        let mut cached = RowBatch::default();
        let mut missing = Vec::new();
        let cache = self.cache.lock();
        for (index, (row, _)) in places.iter().enumerate() {
            if index > 0 && places[index - 1].0 == *row {
                continue;
            }
            match cache.get(*row) {
                Some(bytes) => cached.push(index, bytes),
                None => missing.push((*row, index)),
            }
        }
        drop(cache);
        self.metrics.ngram_rows_cached.inc_by(cached.places.len() as u64);
        self.metrics.ngram_rows_read.inc_by(missing.len() as u64);
        // Spread the rows over all threads, in jobs of at most `JOB_ROWS` neighbouring rows.
        let size = missing.len().div_ceil(THREADS).clamp(1, JOB_ROWS);
        let (reply, read) = mpsc::channel();
        for rows in missing.chunks(size) {
            self.jobs.push(RowJob { rows: rows.to_vec(), reply: reply.clone() });
        }
        RowRequest { places, cached, read }
    }

    /// Waits for the rows of a request and decodes them to f32 `[tokens, width]`.
    pub fn wait(&self, requested: RequestedRows) -> Result<Vec<f32>, ModelError> {
        match requested {
            RequestedRows::Ready(values) => Ok(values),
            RequestedRows::Pending(rows) => {
                self.collect(rows, |seconds| self.metrics.ngram_stall_seconds.inc_by(seconds))
            }
        }
    }

    /// Calls `waited` with the seconds of each wait for a row.
    fn collect(&self, rows: RowRequest, waited: impl Fn(f64)) -> Result<Vec<f32>, ModelError> {
        let RowRequest { places, cached, read } = rows;
        let table = &self.layout.table;
        let width = table.width;
        let mut out = vec![0.0; places.len() * width];
        let mut missing = places.len();
        let mut next = Some(Ok(cached));
        while let Some(batch) = next {
            let batch = batch?;
            for (first, bytes) in batch.iter(table.row_len()) {
                let (row, place) = places[first];
                table.decode(bytes, &mut out[place * width..(place + 1) * width]);
                missing -= 1;
                for (_, other) in places[first + 1..].iter().take_while(|(other, _)| *other == row) {
                    out.copy_within(place * width..(place + 1) * width, other * width);
                    missing -= 1;
                }
            }
            let mut cache = self.cache.lock();
            batch.iter(table.row_len()).for_each(|(first, bytes)| cache.insert(places[first].0, bytes));
            drop(cache);
            let from = Instant::now();
            next = read.recv().ok();
            waited(from.elapsed().as_secs_f64());
        }
        if missing > 0 {
            return Err(ModelError::Config(format!("{missing} rows of the n-gram table were not read")));
        }
        Ok(out)
    }
}

impl Drop for NgramTable {
    fn drop(&mut self) {
        *self.jobs.jobs.lock() = None;
        self.jobs.work.notify_all();
    }
}

impl JobQueue {
    fn push(&self, job: RowJob) {
        if let Some(jobs) = self.jobs.lock().as_mut() {
            jobs.push_back(job);
        }
        self.work.notify_one();
    }

    /// Waits for a job. `None` after the table is dropped.
    fn next(&self) -> Option<RowJob> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.as_mut()?.pop_front() {
                return Some(job);
            }
            self.work.wait(&mut jobs);
        }
    }
}

impl RowsAhead {
    /// True if the first rows are those of `ids` after the tokens `before`.
    fn is_for(&self, before: &[u32], ids: &[u32]) -> bool {
        self.before == before && self.ids.starts_with(ids)
    }
}

impl RowBatch {
    fn push(&mut self, place: usize, bytes: &[u8]) {
        self.places.push(place);
        self.bytes.extend_from_slice(bytes);
    }

    /// The index of the first place, and the bytes, of each row.
    fn iter(&self, row_len: usize) -> impl Iterator<Item = (usize, &[u8])> {
        self.places.iter().copied().zip(self.bytes.chunks_exact(row_len))
    }
}

impl RowCache {
    fn new(row_len: usize) -> Self {
        let capacity = (CACHE_BYTES / (row_len + ROW_ENTRY)).max(1);
        // A vector that grows takes up to twice its memory.
        let bytes = Vec::with_capacity(capacity * row_len);
        Self { indices: HashMap::new(), rows: Vec::new(), bytes, row_len, capacity, oldest: 0 }
    }

    fn range(&self, index: usize) -> Range<usize> {
        index * self.row_len..(index + 1) * self.row_len
    }

    fn get(&self, row: u64) -> Option<&[u8]> {
        self.indices.get(&row).map(|index| &self.bytes[self.range(*index)])
    }

    /// Adds a row. If the cache is full, the row replaces the oldest.
    fn insert(&mut self, row: u64, bytes: &[u8]) {
        let index = if self.rows.len() < self.capacity { self.rows.len() } else { self.oldest };
        match self.indices.entry(row) {
            Entry::Occupied(_) => return,
            Entry::Vacant(entry) => entry.insert(index),
        };
        if index == self.rows.len() {
            self.rows.push(row);
            self.bytes.extend_from_slice(bytes);
            return;
        }
        self.indices.remove(&std::mem::replace(&mut self.rows[index], row));
        let range = self.range(index);
        self.bytes[range].copy_from_slice(bytes);
        self.oldest = (index + 1) % self.capacity;
    }
}

/// The main function of a thread. Reads rows until the table is dropped. A panic ends the pass with an error.
fn serve(mut read: impl FnMut(u64) -> Result<Vec<u8>, StoreError>, jobs: &JobQueue, metrics: &Metrics) {
    while let Some(RowJob { rows, reply }) = jobs.next() {
        let mut batch = RowBatch::default();
        let read_all = || {
            rows.into_iter().try_for_each(|(row, place)| {
                batch.push(place, &read(row)?);
                Ok(())
            })
        };
        let read = catch_unwind(AssertUnwindSafe(read_all))
            .unwrap_or_else(|_| Err(StoreError::Other("a thread that reads the n-gram table panicked".into())));
        metrics.ngram_read_bytes.inc_by(batch.bytes.len() as u64);
        // This fails if the pass has ended without waiting for its rows.
        let _ = reply.send(read.map(|()| batch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rows_ahead_are_for_the_announced_tokens() {
        let ahead = RowsAhead { before: vec![1, 2], ids: vec![3, 4, 5], values: Vec::new() };
        // A pass may have fewer tokens than announced.
        assert!(ahead.is_for(&[1, 2], &[3, 4, 5]) && ahead.is_for(&[1, 2], &[3]));
        assert!(!ahead.is_for(&[2], &[3, 4, 5]) && !ahead.is_for(&[1, 2], &[3, 4, 6]));
        assert!(!ahead.is_for(&[1, 2], &[3, 4, 5, 6]));
    }

    #[test]
    fn reader_continues_after_a_panic() {
        let jobs = JobQueue { jobs: Mutex::new(Some(VecDeque::new())), work: Condvar::new() };
        let ask = |row: u64| {
            let (reply, read) = mpsc::channel();
            jobs.push(RowJob { rows: vec![(row, 0)], reply });
            read
        };
        let read = |row: u64| if row == 7 { panic!("a test panic") } else { Ok(vec![row as u8]) };
        std::thread::scope(|scope| {
            scope.spawn(|| serve(read, &jobs, &Metrics::new("test", "cpu")));
            let answer = |row| ask(row).recv_timeout(Duration::from_secs(30)).unwrap();
            assert!(answer(7).err().unwrap().to_string().contains("panicked"));
            assert_eq!(answer(8).unwrap().bytes, [8]);
            *jobs.jobs.lock() = None;
            jobs.work.notify_all();
        });
    }

    #[test]
    fn full_cache_replaces_the_oldest_row() {
        let mut cache = RowCache { capacity: 3, ..RowCache::new(2) };
        for row in [5, 6, 5, 7, 8, 6, 9, 10, 5] {
            cache.insert(row, &[row as u8, 1]);
            assert_eq!(cache.get(row), Some(&[row as u8, 1][..]));
        }
        let kept: Vec<u64> = (0..20).filter(|row| cache.get(*row).is_some()).collect();
        assert_eq!((kept, cache.rows.len(), cache.bytes.len()), (vec![5, 9, 10], 3, 6));
    }
}
