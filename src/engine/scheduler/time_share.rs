//! Divides the time between prompts and the sequences that decode.
//!
//! A chunk of a prompt makes decoding sequences wait. They are owed the same time before the next chunk, so they keep at least
//! half of their rate. A prompt of one chunk may go first once in between: a short request does not wait for a long one.

/// Time that a chunk should take while other requests wait for it, in seconds.
const CHUNK_SECONDS: f64 = 1.0;
/// Fewest rows of such a chunk. A streamed model reads most experts once per chunk, however few rows it has.
const MIN_CHUNK: usize = 256;
/// Largest part of a chunk by which it shrinks.
const MAX_SHRINK: usize = 4;

#[derive(Default)]
pub struct TimeShare {
    /// Seconds that decoding sequences are owed.
    owed: f64,
    /// True if a short prompt went first since the last chunk of a long one.
    jumped: bool,
    /// Rows of a prompt per second.
    rows_per_second: Option<f64>,
}

impl TimeShare {
    /// Rows of the next chunk if it makes other requests wait. `most` is the largest chunk.
    pub fn chunk_rows(&self, most: usize) -> usize {
        let least = MIN_CHUNK.max(most / MAX_SHRINK).min(most);
        let rows = self.rows_per_second.map_or(least, |rate| (rate * CHUNK_SECONDS) as usize);
        rows.clamp(least, most)
    }

    /// True if a chunk may run while sequences decode.
    pub fn may_read(&self) -> bool {
        self.owed <= 0.0
    }

    /// True if a prompt of one chunk may go before older prompts and before decoding sequences.
    pub fn may_jump(&self) -> bool {
        !self.jumped
    }

    /// Records a chunk of a prompt. `jumped`: it was short and went first.
    pub fn record_chunk(&mut self, rows: usize, seconds: f64, jumped: bool) {
        self.jumped = jumped;
        self.owed += seconds;
        if rows >= MIN_CHUNK && seconds > 0.0 {
            let rate = rows as f64 / seconds;
            self.rows_per_second = Some(self.rows_per_second.map_or(rate, |mean| mean + 0.3 * (rate - mean)));
        }
    }

    /// Records a step of the decoding sequences.
    pub fn record_decode(&mut self, seconds: f64) {
        self.owed -= seconds;
        if self.owed <= 0.0 {
            (self.owed, self.jumped) = (0.0, false);
        }
    }

    /// Forgets what is owed, since no sequence decodes.
    pub fn no_one_decodes(&mut self) {
        self.owed = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_gets_as_much_time_as_chunks() {
        let mut share = TimeShare::default();
        let mut spent = [0.0; 2];
        for _ in 0..1000 {
            if share.may_read() {
                share.record_chunk(256, 0.9, false);
                spent[0] += 0.9;
            } else {
                share.record_decode(0.02);
                spent[1] += 0.02;
            }
        }
        assert!(spent[1] >= 0.98 * spent[0], "{spent:?}");
    }

    #[test]
    fn short_prompt_jumps_once_per_debt() {
        let mut share = TimeShare::default();
        share.record_chunk(256, 1.0, false);
        assert!(!share.may_read() && share.may_jump());
        share.record_chunk(50, 0.5, true);
        assert!(!share.may_jump());
        (0..10).for_each(|_| share.record_decode(0.1));
        assert!(!share.may_jump() && !share.may_read());
        (0..6).for_each(|_| share.record_decode(0.1));
        assert!(share.may_jump() && share.may_read());
    }

    #[test]
    fn chunk_shrinks_to_a_second_within_bounds() {
        let mut share = TimeShare::default();
        assert_eq!(share.chunk_rows(2048), 512);
        assert_eq!(share.chunk_rows(100), 100);
        share.record_chunk(1000, 1.0, false);
        assert_eq!([share.chunk_rows(2048), share.chunk_rows(800)], [1000, 800]);
        (0..99).for_each(|_| share.record_chunk(512, 60.0, false));
        assert_eq!(share.chunk_rows(2048), 512);
    }
}
