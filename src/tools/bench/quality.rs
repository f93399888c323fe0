//! `bench --quality`: what keys and values of few bits do to a text's probabilities and to the answer behind it, beside 16 bits.

use super::load_with_bar;
use crate::{
    command::{device::Chosen, kv_bits, options, show},
    config::{self, Load},
    engine,
    error::{CommandError, EngineError},
    metrics::Metrics,
    model::{Logits, Model, Qwen, Rows, State},
    ops::KvBits,
    plan::Size,
};
use serde::Serialize;
use std::{fmt, path::Path};

/// Tokens evaluated at once: their logits are all looked at.
const ROWS: usize = 64;

/// All of it; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    /// Of the text.
    tokens: usize,
    rows: Vec<Compared>,
}

/// One number of bits.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct Compared {
    bits: u32,
    /// Bytes of keys and values of a token, all layers.
    bytes: u64,
    perplexity: f64,
    /// The same with 16 bits.
    exact_perplexity: f64,
    /// The mean divergence of the distributions from those with 16 bits (Kullback and Leibler, nats).
    divergence: f64,
    /// The largest difference of the log-probability of a token of the text.
    worst: f64,
    /// The part of all places at which the likeliest token is the same.
    same: f64,
    /// Tokens of the greedy answer, and how many are the same up to the first that is not.
    answer: usize,
    answer_same: usize,
}

pub fn run(dir: &Path, load: &Load, text: &[u32], answer: usize, json: bool) -> Result<(), CommandError> {
    let mut options = options(load);
    options.kv_bits = KvBits::Sixteen;
    options.store.warm = false;
    let chosen = Chosen::new(load)?;
    options.gpu = chosen.working_set();
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let mut model = chosen.place(load_with_bar(dir, &options, &metrics)?)?;
    let needed = text.len() + answer;
    if model.context() < needed {
        let why = format!("the context is {} tokens; --ctx-size {needed} would do", model.context());
        return Err(CommandError::Usage(why));
    }
    let asked = match load.kv_bits {
        config::KvBits::Sixteen => vec![config::KvBits::Eight, config::KvBits::Four],
        one => vec![one],
    };
    let compared = asked.into_iter().map(|bits| compare(&mut model, kv_bits(bits), text, answer));
    let report = Report { tokens: text.len(), rows: compared.collect::<Result<_, _>>()? };
    show(&report, json);
    Ok(())
}

/// Two sequences through one model, in turns.
struct Two {
    bits: KvBits,
    exact: State,
    few: State,
}

impl Two {
    fn forward(&mut self, model: &mut Qwen, ids: [&[u32]; 2]) -> Result<[Logits; 2], CommandError> {
        model.keep_in(KvBits::Sixteen)?;
        let exact = model.forward(&mut self.exact, ids[0], Rows::All)?;
        model.keep_in(self.bits)?;
        Ok([exact, model.forward(&mut self.few, ids[1], Rows::All)?])
    }
}

fn compare(model: &mut Qwen, bits: KvBits, text: &[u32], answer: usize) -> Result<Compared, CommandError> {
    model.keep_in(KvBits::Sixteen)?;
    let exact = model.start()?;
    model.keep_in(bits)?;
    let mut two = Two { bits, exact, few: model.start()? };
    let mut sums =
        Compared { bits: if bits == KvBits::Four { 4 } else { 8 }, bytes: model.kv_bytes(), ..Compared::default() };
    let mut last = [Logits::default(), Logits::default()];
    let (mut nats, mut exact_nats) = (0.0, 0.0);
    for (number, ids) in text.chunks(ROWS).enumerate() {
        last = two.forward(model, [ids, ids])?;
        for row in 0..ids.len() {
            let Some(next) = text.get(number * ROWS + row + 1).map(|id| *id as usize) else { break };
            let [exact, few] = last.each_ref().map(|logits| log_softmax(logits.row(row)));
            exact_nats -= exact[next];
            nats -= few[next];
            sums.divergence += exact.iter().zip(&few).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            sums.worst = sums.worst.max((exact[next] - few[next]).abs());
            let [a, b] = last.each_ref().map(|logits| engine::likeliest(logits.row(row)));
            sums.same += f64::from(u8::from(a == b));
        }
    }
    let count = text.len().saturating_sub(1).max(1) as f64;
    (sums.perplexity, sums.exact_perplexity) = ((nats / count).exp(), (exact_nats / count).exp());
    (sums.divergence, sums.same) = (sums.divergence / count, sums.same / count);
    sums.answer = answer;
    let mut same = true;
    for _ in 0..answer {
        let row = |logits: &Logits| {
            let last = logits.rows().checked_sub(1).map_or(&[][..], |row| logits.row(row));
            engine::likeliest(last).ok_or(EngineError::NoLogits)
        };
        let [a, b] = [row(&last[0])?, row(&last[1])?];
        same &= a == b;
        sums.answer_same += usize::from(same);
        if !same {
            break;
        }
        last = two.forward(model, [&[a], &[b]])?;
    }
    Ok(sums)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = row.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln();
    row.iter().map(|x| f64::from(x - most) - total).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} tokens of text, keys and values in few bits beside 16", self.tokens)?;
        writeln!(f)?;
        writeln!(
            f,
            "bits   a token   perplexity   with 16   change %   divergence   worst log-prob   same choice %   answer"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:>4} {:>9}   {:>10.4} {:>9.4}   {:>+8.3}   {:>10.6}   {:>14.5}   {:>13.2}   {} of {}",
                row.bits,
                Size(row.bytes).to_string(),
                row.perplexity,
                row.exact_perplexity,
                100.0 * (row.perplexity / row.exact_perplexity - 1.0),
                row.divergence,
                row.worst,
                100.0 * row.same,
                row.answer_same,
                row.answer,
            )?;
        }
        writeln!(f, "\nanswer: how many tokens of the greedy answer are the same up to the first that is not")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Options;

    #[test]
    fn sixteen_bits_beside_themselves_differ_in_nothing_and_four_in_something() {
        let dir = crate::demo::unpack().unwrap();
        let mut options = Options { threads: Some(2), ..Options::default() };
        options.wishes.context = Some(1024);
        let mut model = Qwen::load(&dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap();
        let text = super::super::prompt(&dir, None, 300).unwrap();
        let none = compare(&mut model, KvBits::Sixteen, &text, 5).unwrap();
        assert_eq!((none.divergence, none.worst, none.same, none.answer_same), (0.0, 0.0, 1.0, 5));
        assert_eq!(none.perplexity, none.exact_perplexity);
        let eight = compare(&mut model, KvBits::Eight, &text, 5).unwrap();
        let four = compare(&mut model, KvBits::Four, &text, 5).unwrap();
        assert!(four.divergence > eight.divergence && eight.divergence > 0.0, "{four:?} {eight:?}");
        assert_eq!(four.exact_perplexity, none.perplexity);
        assert!(four.bytes < eight.bytes && eight.bytes < none.bytes);
    }
}
