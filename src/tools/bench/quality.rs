//! `bench --quality`: measures how keys and values of 8 and 4 bits change the probabilities of a text and the answer
//! after the text, compared with 16 bits.

use super::load_model;
use crate::{
    command::{load::options, text::show},
    config::LoadSettings,
    error::CommandError,
};
use moestro_base::metrics::Metrics;
use moestro_compute::ops::KvBits;
use moestro_engine::error::EngineError;
use moestro_model::{
    model::{Logits, Model, Qwen, QwenState, Rows, logits::argmax},
    plan::Size,
};
use serde::Serialize;
use std::{fmt, path::Path};

/// Number of tokens per pass. The logits of these tokens are kept for two sequences at the same time, and must fit into
/// the memory that the plan leaves for the process.
const ROWS: usize = 16;

/// The whole report, with the structure that `--json` prints.
#[derive(Debug, Serialize)]
struct QualityReport {
    /// Number of tokens of the text.
    tokens: usize,
    rows: Vec<KvBitsResult>,
}

/// Results for one bit width.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct KvBitsResult {
    bits: u32,
    /// Number of bytes of keys and values per token, in all layers.
    bytes: u64,
    perplexity: f64,
    /// Perplexity of the same text with 16 bits.
    exact_perplexity: f64,
    /// Mean Kullback-Leibler divergence from the 16-bit distributions, in nats.
    divergence: f64,
    /// Largest difference between the log-probabilities of a token of the text with 16 bits and with fewer bits.
    worst: f64,
    /// Fraction of positions whose most likely token is the same.
    same: f64,
    /// Number of tokens of the greedy answer with 16 bits.
    answer: usize,
    /// Number of tokens at the start of the answer that are the same as with 16 bits.
    answer_same: usize,
}

pub fn run(dir: &Path, load: &LoadSettings, text: &[u32], answer: usize, json: bool) -> Result<(), CommandError> {
    let mut options = options(load);
    let asked = match load.flags.kv_bits {
        KvBits::Sixteen => vec![KvBits::Eight, KvBits::Four],
        one => vec![one],
    };
    options.kv_bits = KvBits::Sixteen;
    options.plan.sequences = 1 + asked.len();
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let mut model = load_model(dir, load, options, text.len() + answer, &metrics)?;
    let report = QualityReport { tokens: text.len(), rows: compare(&mut model, &asked, text, answer)? };
    show(&report, json);
    Ok(())
}

/// A sequence with its own bit width. Several sequences share one model.
struct EvalSequence {
    bits: KvBits,
    state: QwenState,
    /// Logits of the last token.
    last: Vec<f32>,
}

impl EvalSequence {
    fn new(model: &mut Qwen, bits: KvBits) -> Result<Self, CommandError> {
        model.set_kv_bits(bits)?;
        Ok(Self { bits, state: model.start()?, last: Vec::new() })
    }

    fn forward(&mut self, model: &mut Qwen, ids: &[u32]) -> Result<Logits, CommandError> {
        model.set_kv_bits(self.bits)?;
        let logits = model.forward(&mut self.state, ids, Rows::All)?;
        self.last = logits.row(ids.len() - 1).to_vec();
        Ok(logits)
    }

    /// Generates a greedy answer of `count` tokens. Stops at the first token that differs from `expected`.
    fn answer(&mut self, model: &mut Qwen, count: usize, expected: Option<&[u32]>) -> Result<Vec<u32>, CommandError> {
        let mut answer = Vec::new();
        while answer.len() < count {
            let next = argmax(&self.last).ok_or(EngineError::NoLogits)?;
            answer.push(next);
            if expected.is_some_and(|expected| expected[answer.len() - 1] != next) {
                break;
            }
            self.forward(model, &[next])?;
        }
        Ok(answer)
    }
}

/// Compares each bit width of `asked` with 16 bits.
fn compare(model: &mut Qwen, asked: &[KvBits], text: &[u32], answer: usize) -> Result<Vec<KvBitsResult>, CommandError> {
    let mut exact = EvalSequence::new(model, KvBits::Sixteen)?;
    let mut quantized = Vec::new();
    for bits in asked {
        let sequence = EvalSequence::new(model, *bits)?;
        let bits = if *bits == KvBits::Four { 4 } else { 8 };
        quantized.push((sequence, KvBitsResult { bits, bytes: model.kv_bytes(), ..KvBitsResult::default() }));
    }
    for (number, ids) in text.chunks(ROWS).enumerate() {
        let logits = exact.forward(model, ids)?;
        let next = text.get(number * ROWS + 1..).unwrap_or_default();
        for (sequence, sums) in &mut quantized {
            sums.add([&logits, &sequence.forward(model, ids)?], next);
        }
    }
    let expected = exact.answer(model, answer, None)?;
    let mut out = Vec::new();
    for (mut sequence, mut sums) in quantized {
        sums.finish(text.len().saturating_sub(1).max(1) as f64);
        sums.answer = answer;
        let answer = sequence.answer(model, answer, Some(&expected))?;
        sums.answer_same = answer.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        out.push(sums);
    }
    Ok(out)
}

impl KvBitsResult {
    /// Adds rows of logits: first with 16 bits, then with fewer bits. `next` has the tokens after these rows. The
    /// fields are sums until [`Self::finish`].
    fn add(&mut self, logits: [&Logits; 2], next: &[u32]) {
        for (row, next) in next.iter().enumerate().take(logits[0].rows()) {
            let next = *next as usize;
            let [exact, quantized] = logits.map(|logits| log_softmax(logits.row(row)));
            self.exact_perplexity -= exact[next];
            self.perplexity -= quantized[next];
            self.divergence += exact.iter().zip(&quantized).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            self.worst = self.worst.max((exact[next] - quantized[next]).abs());
            let [a, b] = logits.map(|logits| argmax(logits.row(row)));
            self.same += f64::from(u8::from(a == b));
        }
    }

    fn finish(&mut self, count: f64) {
        self.exact_perplexity = (self.exact_perplexity / count).exp();
        self.perplexity = (self.perplexity / count).exp();
        self.divergence /= count;
        self.same /= count;
    }
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = row.iter().map(|x| f64::from(x - max).exp()).sum::<f64>().ln();
    row.iter().map(|x| f64::from(x - max) - total).collect()
}

impl fmt::Display for QualityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} tokens of text, keys and values in fewer bits compared with 16", self.tokens)?;
        writeln!(f)?;
        writeln!(
            f,
            "bits  B/token    perplexity   with 16   change %   divergence   worst log-prob   same choice %   answer"
        )?;
        for row in &self.rows {
            let KvBitsResult { bits, perplexity, exact_perplexity, divergence, worst, answer, answer_same, .. } = row;
            let bytes = Size(row.bytes).to_string();
            let same = 100.0 * row.same;
            let change = 100.0 * (perplexity / exact_perplexity - 1.0);
            write!(f, "{bits:>4} {bytes:>9}   {perplexity:>10.4} {exact_perplexity:>9.4}   {change:>+8.3}   ")?;
            writeln!(f, "{divergence:>10.6}   {worst:>14.5}   {same:>13.2}   {answer_same} of {answer}")?;
        }
        writeln!(f, "\nanswer: leading tokens of the greedy answer that are the same")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_model::model::LoadOptions;

    #[test]
    fn sixteen_bits_match_and_four_differ() {
        let dir = crate::demo::unpack().unwrap();
        let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
        options.plan.context = Some(1024);
        let mut model = Qwen::load(&dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap();
        let text = super::super::prompt(&dir, None, 200).unwrap();
        let all = compare(&mut model, &[KvBits::Sixteen, KvBits::Eight, KvBits::Four], &text, 5).unwrap();
        let [none, eight, four] = &all[..] else { panic!("{all:?}") };
        assert_eq!((none.divergence, none.worst, none.same, none.answer_same), (0.0, 0.0, 1.0, 5));
        assert_eq!(none.perplexity, none.exact_perplexity);
        assert!(four.divergence > eight.divergence && eight.divergence > 0.0, "{four:?} {eight:?}");
        assert_eq!(four.exact_perplexity, none.perplexity);
        assert!(four.bytes < eight.bytes && eight.bytes < none.bytes);
    }
}
