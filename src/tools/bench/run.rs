//! One model, a few runs, and everything that can be counted about them.

use crate::{
    engine,
    error::{CommandError, EngineError, ModelError},
    metrics::Metrics,
    model::{Logits, Model, Qwen, QwenState, Rows},
    platform::os,
    tools::belady,
};
use serde::Serialize;
use std::{ops::Range, sync::Arc, time::Instant};

/// Counts between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Phase {
    pub tokens: usize,
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Routed experts by where they were: in a slot, to be read, or (being) read because they were expected.
    pub hits: u64,
    pub misses: u64,
    pub prefetched: u64,
    /// Lookups of experts that had been kept in a slot, of all lookups.
    pub hit_rate: f64,
    /// Lookups of experts that had been read ahead, of all lookups.
    pub prefetch_rate: f64,
    pub reads: u64,
    /// Bytes that reads of experts returned, a token.
    pub bytes_asked_per_token: f64,
    /// Bytes that the disk delivered to this process, a token; `None` where the system does not count them.
    pub disk_bytes_per_token: Option<f64>,
    /// The part of the time in which there was nothing to compute for want of an expert.
    pub stall_share: f64,
    /// Bytes asked of the disk for experts, by the time the phase took.
    pub read_bytes_per_second: f64,
}

/// One prompt and what was generated after it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    pub prompt: Phase,
    pub decode: Phase,
    /// Decoding's time less its stalls: as if every expert were in memory.
    pub resident_tokens_per_second: f64,
    /// The hit rate of a cache of this size that knows the future.
    pub perfect_hit_rate: f64,
    /// Decoding with that cache, if stalls shrink as misses do.
    pub perfect_tokens_per_second: f64,
    #[serde(skip)]
    asked: Range<usize>,
}

/// A loaded model and what it was asked for.
pub struct Session {
    model: Qwen,
    metrics: Arc<Metrics>,
    /// Every expert looked up, in order: layer times experts a layer, plus the expert.
    asked: Vec<u32>,
    runs: Vec<Run>,
}

impl Session {
    pub fn new(model: Qwen, metrics: Arc<Metrics>) -> Self {
        Self { model, metrics, asked: Vec::new(), runs: Vec::new() }
    }

    /// Evaluates `prompt` and then greedily generates `count` tokens more, end-of-sequence or not.
    pub fn run(&mut self, prompt: &[u32], count: usize) -> Result<(), CommandError> {
        let mut state = self.model.start()?;
        let begin = Moment::now(&self.metrics);
        let mut logits = Logits::default();
        for chunk in prompt.chunks(self.model.info().chunk) {
            logits = self.forward(&mut state, chunk)?;
        }
        let (middle, first) = (Moment::now(&self.metrics), self.asked.len());
        for _ in 0..count {
            let next = argmax(&logits)?;
            logits = self.forward(&mut state, &[next])?;
        }
        let end = Moment::now(&self.metrics);
        self.runs.push(Run {
            prompt: begin.until(&middle, prompt.len(), |counts| counts.prefill),
            decode: middle.until(&end, count, |counts| counts.decode),
            resident_tokens_per_second: 0.0,
            perfect_hit_rate: 0.0,
            perfect_tokens_per_second: 0.0,
            asked: first..self.asked.len(),
        });
        Ok(())
    }

    fn forward(&mut self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        let Self { model, asked, .. } = self;
        let experts = model.shape().experts;
        model.forward_observed(state, ids, Rows::Last, &mut |layer, routes| {
            asked.extend(routes.distinct().iter().map(|id| (layer * experts) as u32 + id));
        })
    }

    /// The runs, compared with what cannot be had: all experts in memory, and a cache that knew what was coming. Both
    /// follow from the measured stalls, and the second one from the lookups of all runs of this session, in order.
    pub fn finish(self) -> Vec<Run> {
        let missed = belady::misses(&self.asked, self.model.plan().slots);
        let mut runs = self.runs;
        for run in &mut runs {
            let lookups = missed.get(run.asked.clone()).unwrap_or_default();
            let least = lookups.iter().filter(|&&miss| miss).count() as f64;
            let decode = &run.decode;
            let stall = decode.stall_share * decode.seconds;
            let read = (decode.misses + decode.prefetched) as f64;
            let remains = if read > 0.0 { (least / read).min(1.0) } else { 0.0 };
            run.resident_tokens_per_second = rate(decode.tokens as f64, decode.seconds - stall);
            run.perfect_hit_rate = 1.0 - rate(least, lookups.len() as f64);
            run.perfect_tokens_per_second = rate(decode.tokens as f64, decode.seconds - stall * (1.0 - remains));
        }
        runs
    }
}

/// The likeliest token of the last row; the lowest of equals.
fn argmax(logits: &Logits) -> Result<u32, EngineError> {
    let last = logits.rows().checked_sub(1).map_or(&[][..], |row| logits.row(row));
    engine::argmax(last).ok_or(EngineError::NoLogits)
}

/// `count / over`, 0 over 0.
fn rate(count: f64, over: f64) -> f64 {
    if over > 0.0 { count / over } else { 0.0 }
}

/// Everything that is counted, at one moment.
struct Moment {
    at: Instant,
    prefill: [u64; 3],
    decode: [u64; 3],
    reads: u64,
    asked: u64,
    disk: Option<u64>,
    stall: f64,
}

impl Moment {
    fn now(m: &Metrics) -> Self {
        Self {
            at: Instant::now(),
            prefill: [&m.lookups_prefill_hit, &m.lookups_prefill_miss, &m.lookups_prefill_prefetched].map(|c| c.get()),
            decode: [&m.lookups_decode_hit, &m.lookups_decode_miss, &m.lookups_decode_prefetched].map(|c| c.get()),
            reads: m.ssd_reads.get(),
            asked: m.ssd_read_bytes.get(),
            disk: os::disk_bytes_read(),
            stall: m.ssd_stall_seconds.get(),
        }
    }

    fn until(&self, end: &Self, tokens: usize, lookups: impl Fn(&Self) -> [u64; 3]) -> Phase {
        let (before, after) = (lookups(self), lookups(end));
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
            read_bytes_per_second: rate(asked, seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token() {
        let of = |data: &[f32]| argmax(&Logits { vocab: 3, data: data.to_vec() });
        assert_eq!(of(&[9.0, 9.0, 9.0, 1.0, 5.0, 5.0]).unwrap(), 1, "of the last row, the lowest of equals");
        assert_eq!(of(&[f32::NAN, 1.0, 0.0]).unwrap(), 1);
        assert!(of(&[]).is_err());
        assert!(of(&[f32::NAN; 3]).is_err());
    }

    #[test]
    fn a_phase_is_what_was_counted_in_between() {
        let metrics = Metrics::new("test", "cpu");
        let begin = Moment::now(&metrics);
        metrics.lookups_decode_hit.inc_by(6);
        metrics.lookups_decode_miss.inc_by(3);
        metrics.lookups_decode_prefetched.inc_by(1);
        metrics.lookups_prefill_miss.inc_by(50);
        metrics.ssd_read_bytes.inc_by(4000);
        metrics.ssd_reads.inc_by(9);
        let end = Moment { at: begin.at + std::time::Duration::from_secs(2), ..Moment::now(&metrics) };
        let phase = begin.until(&end, 4, |counts| counts.decode);
        assert_eq!((phase.hits, phase.misses, phase.prefetched, phase.reads), (6, 3, 1, 9));
        assert_eq!((phase.tokens_per_second, phase.hit_rate, phase.prefetch_rate), (2.0, 0.6, 0.1));
        assert_eq!((phase.bytes_asked_per_token, phase.read_bytes_per_second), (1000.0, 2000.0));
    }
}
