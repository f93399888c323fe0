//! Divides the time between prompts and the sequences that decode, and chooses the size of a prompt's chunks.
//!
//! A chunk makes decoding sequences wait. They are owed the same time before the next chunk, so they keep at least half of
//! their rate. A short prompt may pass both: it does not wait until decoding has had its time, nor until a longer prompt is
//! complete. The time of chunks that pass is limited, so that a stream of short requests stops no other request.

/// Time that a chunk should take while other requests wait for it, in seconds.
pub const CHUNK_SECONDS: f64 = 0.5;
/// Sizes of a chunk: the largest one, and halves of it.
const SIZES: usize = 6;
/// Fewest rows of such a chunk.
const MIN_ROWS: usize = 32;
/// A chunk takes at most this multiple of the time per row that the best size takes. Most of the time of a small chunk can be
/// fixed: a streamed model reads most experts once per chunk, however few rows it has.
const MAX_COST: f64 = 1.5;
/// Weight of a new measurement.
const NEW_WEIGHT: f64 = 0.3;

#[derive(Default)]
pub struct TimeShare {
    /// Seconds that decoding sequences are owed.
    owed: f64,
    /// Seconds of chunks since then that did not wait until decoding had its time.
    passed_decoding: f64,
    /// Seconds of chunks that passed an older prompt, less those of the older prompt.
    passed_prompt: f64,
    /// Seconds of the last chunk that did not pass.
    last_chunk: f64,
    /// Measured seconds of a chunk of the largest size, half of it, and so on.
    seconds: [Option<f64>; SIZES],
}

impl TimeShare {
    /// Rows of the next chunk if it makes other requests wait. `most` is the largest chunk.
    pub fn chunk_rows(&self, most: usize) -> usize {
        let sizes = (0..SIZES).filter(|size| *size == 0 || most >> size >= MIN_ROWS);
        let least = most >> sizes.clone().next_back().unwrap_or(0);
        let expected: Vec<_> = sizes.filter_map(|size| Some((most >> size, self.expected(size)?))).collect();
        let cost = |&(rows, seconds): &(usize, f64)| seconds / rows as f64;
        let limit = MAX_COST * expected.iter().map(cost).fold(f64::INFINITY, f64::min);
        // A chunk is at most twice as large as the largest measured one, since an estimate can be wrong.
        let largest = most >> self.seconds.iter().position(Option::is_some).unwrap_or(0);
        let mut efficient = expected.iter().filter(|size| cost(size) <= limit && size.0 / 2 <= largest);
        let next = expected.iter().find(|size| size.0 / 2 <= largest);
        let smallest = efficient.clone().next_back().or(next);
        efficient.find(|size| size.1 <= CHUNK_SECONDS).or(smallest).map_or(least, |size| size.0)
    }

    /// Seconds that a chunk of this size should take. `None` if no size near it was measured.
    fn expected(&self, size: usize) -> Option<f64> {
        let known = |size: usize| self.seconds.get(size).copied().flatten();
        // A smaller chunk than those measured takes the same time per row. Beyond the two largest that are measured, time grows
        // with rows as between those. With one of them, twice the rows take no more time.
        let from_larger = (0..size).rev().find_map(|larger| Some(known(larger)? / (1 << (size - larger)) as f64));
        let from_smaller = || {
            let largest = (size..SIZES).find(|&size| known(size).is_some())?;
            let seconds = known(largest)?;
            let Some(half) = known(largest + 1) else { return Some(seconds).filter(|_| largest == size + 1) };
            let grown = 2 * ((1 << (largest - size)) - 1);
            Some(seconds + f64::from(grown) * (seconds - half).max(0.0))
        };
        known(size).or(from_larger).or_else(from_smaller)
    }

    /// True if a chunk may run while sequences decode. `is_short`: it completes its prompt.
    pub fn may_read(&self, is_short: bool) -> bool {
        self.owed <= 0.0 || (is_short && self.passed_decoding < self.allowance())
    }

    /// True if a short prompt may pass an older one.
    pub fn may_pass(&self) -> bool {
        self.passed_prompt < self.allowance()
    }

    /// Maximum number of seconds of chunks that may pass.
    fn allowance(&self) -> f64 {
        self.last_chunk.max(CHUNK_SECONDS)
    }

    /// Records a chunk of a prompt. `most` is the largest chunk. `passed`: the chunk passed an older prompt.
    pub fn record_chunk(&mut self, rows: usize, most: usize, seconds: f64, passed: bool) {
        match self.owed > 0.0 {
            true => self.passed_decoding += seconds,
            false => self.last_chunk = seconds,
        }
        self.owed += seconds;
        self.passed_prompt += if passed { seconds } else { -seconds.min(self.passed_prompt) };
        if let Some(size) = (0..SIZES).find(|size| most >> size == rows) {
            let mean = self.seconds[size].map_or(seconds, |mean| mean + NEW_WEIGHT * (seconds - mean));
            self.seconds[size] = Some(mean);
        }
    }

    /// Records a step of the decoding sequences.
    pub fn record_decode(&mut self, seconds: f64) {
        self.owed -= seconds;
        if self.owed <= 0.0 {
            (self.owed, self.passed_decoding) = (0.0, 0.0);
        }
    }

    /// Forgets what is owed, since no sequence decodes.
    pub fn no_one_decodes(&mut self) {
        (self.owed, self.passed_decoding) = (0.0, 0.0);
    }
}
