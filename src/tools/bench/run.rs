//! Runs a prompt and its answer, and counts tokens, expert lookups, reads and stalls in each phase.

use crate::error::CommandError;
use moestro_base::{metrics::Metrics, platform::os};
use moestro_engine::error::EngineError;
use moestro_model::model::{Logits, Model, NextToken, PassHooks, Qwen, Rows, TokenChoice, logits};
use serde::Serialize;
use std::{sync::Arc, time::Instant};

/// Counts of one phase. A rate is 0 if its denominator is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Phase {
    pub tokens: usize,
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Number of expert lookups that found the expert in a slot.
    pub hits: u64,
    /// Number of expert lookups whose expert had to be read.
    pub misses: u64,
    /// Number of expert lookups whose expert the prefetcher had already read or was reading.
    pub prefetched: u64,
    /// Fraction of all lookups that are hits.
    pub hit_rate: f64,
    /// Fraction of all lookups that are prefetched.
    pub prefetch_rate: f64,
    pub reads: u64,
    /// Number of bytes per token that expert reads requested.
    pub bytes_asked_per_token: f64,
    /// Number of bytes per token that the disk delivered to this process. `None` if the system does not count these
    /// bytes.
    pub disk_bytes_per_token: Option<f64>,
    /// Fraction of the time in which computation waited for an expert.
    pub stall_share: f64,
    /// Number of rows of n-gram tables that were read from the disk.
    pub ngram_rows: u64,
    /// Fraction of the time in which computation waited for a row of an n-gram table.
    pub ngram_stall_share: f64,
    /// Number of waits per token for the GPU to read the routers' choices, while experts are streamed.
    pub gpu_waits_per_token: f64,
    /// Number of launches per token that did nothing, because an earlier layer missed an expert.
    pub gpu_skipped_launches_per_token: f64,
    /// Number of bytes that expert reads requested, per second of the phase.
    pub read_bytes_per_second: f64,
}

/// One prompt and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Run {
    pub prompt: Phase,
    pub decode: Phase,
    /// Decoding speed without the time of stalls, as if every expert were in memory.
    pub resident_tokens_per_second: f64,
}

/// A loaded model whose runs are measured.
pub struct BenchSession {
    pub model: Qwen,
    pub metrics: Arc<Metrics>,
}

impl BenchSession {
    /// Evaluates `prompt`, then generates `count` tokens greedily. End-of-sequence tokens do not stop the generation.
    pub fn run(&mut self, prompt: &[u32], count: usize) -> Result<Run, CommandError> {
        let mut state = self.model.start()?;
        let begin = Counters::now(&self.metrics);
        let mut logits = Logits::default();
        let mut following = prompt;
        for chunk in prompt.chunks(self.model.info().chunk) {
            following = &following[chunk.len()..];
            let mut hooks = PassHooks { following, ..PassHooks::default() };
            logits = self.model.forward_with(&mut state, chunk, Rows::Last, &mut hooks)?;
        }
        let middle = Counters::now(&self.metrics);
        let likeliest = NextToken { usable: self.model.info().vocab, choice: TokenChoice::LIKELIEST };
        for _ in 0..count {
            let next = argmax(&logits)?;
            let mut hooks = PassHooks { next: Some(likeliest), ..PassHooks::default() };
            logits = self.model.forward_with(&mut state, &[next], Rows::Last, &mut hooks)?;
        }
        let end = Counters::now(&self.metrics);
        let decode = middle.until(&end, count, |counts| counts.decode);
        let stall = decode.stall_share * decode.seconds;
        Ok(Run {
            prompt: begin.until(&middle, prompt.len(), |counts| counts.prefill),
            decode,
            resident_tokens_per_second: rate(count as f64, decode.seconds - stall),
        })
    }
}

/// Most likely token of the last row. If several tokens are equally likely, the lowest id.
fn argmax(logits: &Logits) -> Result<u32, EngineError> {
    let last = logits.rows().checked_sub(1).map_or(&[][..], |row| logits.row(row));
    logits::argmax(last).ok_or(EngineError::NoLogits)
}

/// `count / over`, or 0 if `over` is 0.
fn rate(count: f64, over: f64) -> f64 {
    if over > 0.0 { count / over } else { 0.0 }
}

/// Values of all counters at one point in time.
struct Counters {
    at: Instant,
    prefill: [u64; 3],
    decode: [u64; 3],
    reads: u64,
    asked: u64,
    disk: Option<u64>,
    stall: f64,
    ngram_rows: u64,
    ngram_stall: f64,
    gpu: [u64; 2],
}

impl Counters {
    fn now(m: &Metrics) -> Self {
        Self {
            at: Instant::now(),
            prefill: [&m.lookups_prefill_hit, &m.lookups_prefill_miss, &m.lookups_prefill_prefetched].map(|c| c.get()),
            decode: [&m.lookups_decode_hit, &m.lookups_decode_miss, &m.lookups_decode_prefetched].map(|c| c.get()),
            reads: m.ssd_reads.get(),
            asked: m.ssd_read_bytes.get(),
            disk: os::disk_bytes_read(),
            stall: m.ssd_stall_seconds.get(),
            ngram_rows: m.ngram_rows_read.get(),
            ngram_stall: m.ngram_stall_seconds.get(),
            gpu: [m.gpu_router_waits.get(), m.gpu_skipped_launches.get()],
        }
    }

    fn until(&self, end: &Self, tokens: usize, lookups: impl Fn(&Self) -> [u64; 3]) -> Phase {
        let before = lookups(self);
        let after = lookups(end);
        let [hits, misses, prefetched] = std::array::from_fn(|i| after[i] - before[i]);
        let seconds = (end.at - self.at).as_secs_f64();
        let asked = (end.asked - self.asked) as f64;
        let per_token = |bytes: f64| rate(bytes, tokens as f64);
        Phase {
            tokens,
            seconds,
            tokens_per_second: rate(tokens as f64, seconds),
            hits,
            misses,
            prefetched,
            hit_rate: rate(hits as f64, (hits + misses + prefetched) as f64),
            prefetch_rate: rate(prefetched as f64, (hits + misses + prefetched) as f64),
            reads: end.reads - self.reads,
            bytes_asked_per_token: per_token(asked),
            disk_bytes_per_token: self.disk.zip(end.disk).map(|(before, after)| per_token((after - before) as f64)),
            stall_share: rate(end.stall - self.stall, seconds),
            ngram_rows: end.ngram_rows - self.ngram_rows,
            ngram_stall_share: rate(end.ngram_stall - self.ngram_stall, seconds),
            gpu_waits_per_token: per_token((end.gpu[0] - self.gpu[0]) as f64),
            gpu_skipped_launches_per_token: per_token((end.gpu[1] - self.gpu[1]) as f64),
            read_bytes_per_second: rate(asked, seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_last_row_and_lowest_id() {
        let of = |data: &[f32]| argmax(&Logits { vocab: 3, data: data.to_vec().into() });
        assert_eq!(of(&[9.0, 9.0, 9.0, 1.0, 5.0, 5.0]).unwrap(), 1, "last row, lowest id of equal logits");
        assert_eq!(of(&[f32::NAN, 1.0, 0.0]).unwrap(), 1);
        assert!(of(&[]).is_err());
        assert!(of(&[f32::NAN; 3]).is_err());
    }

    #[test]
    fn phase_counts_the_difference() {
        let metrics = Metrics::new("test", "cpu");
        let begin = Counters::now(&metrics);
        metrics.lookups_decode_hit.inc_by(6);
        metrics.lookups_decode_miss.inc_by(3);
        metrics.lookups_decode_prefetched.inc_by(1);
        metrics.lookups_prefill_miss.inc_by(50);
        metrics.ssd_read_bytes.inc_by(4000);
        metrics.ssd_reads.inc_by(9);
        metrics.ngram_rows_read.inc_by(7);
        metrics.ngram_stall_seconds.inc_by(0.5);
        metrics.gpu_router_waits.inc_by(8);
        metrics.gpu_skipped_launches.inc_by(20);
        let end = Counters { at: begin.at + std::time::Duration::from_secs(2), ..Counters::now(&metrics) };
        let phase = begin.until(&end, 4, |counts| counts.decode);
        assert_eq!((phase.hits, phase.misses, phase.prefetched, phase.reads), (6, 3, 1, 9));
        assert_eq!((phase.tokens_per_second, phase.hit_rate, phase.prefetch_rate), (2.0, 0.6, 0.1));
        assert_eq!((phase.ngram_rows, phase.ngram_stall_share), (7, 0.25));
        assert_eq!((phase.gpu_waits_per_token, phase.gpu_skipped_launches_per_token), (2.0, 5.0));
        assert_eq!((phase.bytes_asked_per_token, phase.read_bytes_per_second), (1000.0, 2000.0));
    }
}
