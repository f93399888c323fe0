//! DFlash drafts: a small network reads the model's hidden rows and proposes a block of tokens in one pass.

use super::{
    draft::{Draft, DraftKind, DraftRequest},
    hidden_history::HiddenHistory,
};
use moestro_model::{
    error::ModelError,
    model::{DflashModel, HiddenTaps, MAX_VERIFY_ROWS, Qwen, QwenState},
};

/// Maximum number of hidden rows that wait to be appended to the draft's context. While the model decodes without
/// drafts, every token adds a row. Appending all rows of a long answer would take too long, so only the last rows are
/// kept.
const MAX_WAITING: usize = 64;

pub struct DflashDraft {
    network: DflashModel,
    /// Hidden rows of the last positions, which are not appended to the draft's context yet.
    waiting: HiddenHistory,
    /// The tokens of the sequence for which the last draft was made. A new turn of a conversation starts from a
    /// snapshot and is therefore a new sequence. The context of positions at which both sequences have the same tokens
    /// stays valid.
    known: Vec<u32>,
    unverified: Unverified,
    /// An error that occurred in [`Draft::observe`], which cannot return errors.
    error: Option<ModelError>,
}

/// Which part of the draft's context may belong to another sequence, because a sequence has started since the last
/// draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unverified {
    /// No part, because no sequence has started since the last draft.
    No,
    /// The whole context: a sequence has started, and no hidden row of that sequence was received yet.
    Started,
    /// The context before this position. Later context comes from rows of the current sequence.
    Before(usize),
}

impl DflashDraft {
    pub fn new(network: DflashModel) -> Self {
        let waiting = HiddenHistory::new(network.config().features(), MAX_WAITING);
        Self { network, waiting, known: Vec::new(), unverified: Unverified::No, error: None }
    }

    /// Compares the current sequence with the sequence of the last draft, and removes context that belongs to other
    /// tokens.
    fn drop_foreign_context(&mut self, evaluated: &[u32]) {
        let same = self.known.iter().zip(evaluated).take_while(|(a, b)| a == b).count();
        match std::mem::replace(&mut self.unverified, Unverified::No) {
            Unverified::Before(first) if same < first => self.network.forget(same..first),
            _ => {}
        }
        self.known.truncate(same);
        self.known.extend_from_slice(&evaluated[same..]);
    }

    /// Appends the waiting rows to the draft's context.
    fn flush(&mut self) -> Result<(), ModelError> {
        let first = self.waiting.first();
        if first < self.waiting.end() {
            self.network.append(first, self.waiting.since(first))?;
            self.waiting.clear();
        }
        Ok(())
    }
}

impl Draft<Qwen> for DflashDraft {
    fn kind(&self) -> DraftKind {
        DraftKind::Dflash
    }

    fn taps(&self) -> HiddenTaps {
        // The network uses the rows of the whole prompt as context.
        HiddenTaps { layers: self.network.config().taps.clone(), rows: usize::MAX }
    }

    fn start(&mut self) {
        // If no draft was made since the last start, the tokens of the rows since then are unknown.
        if let Unverified::Before(first) = self.unverified {
            self.network.truncate(first);
        }
        self.waiting.clear();
        self.unverified = Unverified::Started;
    }

    fn observe(&mut self, len: usize, hidden: &[f32]) {
        let rows = hidden.len() / self.network.config().features();
        let first = len - rows;
        if self.unverified == Unverified::Started {
            self.unverified = Unverified::Before(first);
            self.network.truncate(first);
        }
        let mut done = Ok(());
        if first != self.waiting.end() || rows > MAX_VERIFY_ROWS {
            done = self.flush();
        }
        if rows > MAX_VERIFY_ROWS {
            // A chunk of a prompt has too many rows to keep, so the rows are appended at once.
            done = done.and_then(|()| self.network.append(first, hidden));
        } else {
            self.waiting.append(len, hidden);
        }
        self.error = self.error.take().or(done.err());
    }

    fn propose(&mut self, model: &mut Qwen, _: &mut QwenState, request: DraftRequest<'_>) -> Result<(), ModelError> {
        let DraftRequest { history, max, mut sampler, out } = request;
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.flush()?;
        self.drop_foreign_context(history.evaluated);
        let hidden = model.config().hidden;
        let vocab = model.config().vocab;
        let config = self.network.config();
        let rows = (max + 1).min(config.block).min(MAX_VERIFY_ROWS);
        if self.network.len() != history.evaluated.len() || rows < 2 {
            return Ok(());
        }
        let mut block = vec![config.mask; rows];
        block[0] = history.last;
        let block = self.network.block(&model.embedding(&block)?)?;
        let mut logits = model.head_logits(&block[hidden..])?;
        let mut before = history.last;
        for (row, logits) in block[hidden..].chunks_exact(hidden).zip(logits.chunks_exact_mut(vocab)) {
            self.network.score(before, row, logits)?;
            let Some(id) = sampler.draw(logits) else { break };
            out.push(id);
            before = id;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_base::metrics::Metrics;
    use moestro_model::model::{LoadOptions, dflash::DflashCheckpoint};
    use std::{ops::Range, path::Path};

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/dflash");

    fn target() -> Qwen {
        let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        options.plan.context = Some(64);
        let dir = Path::new(FIXTURES).join("target");
        Qwen::load(&dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap()
    }

    fn draft(target: &Qwen) -> DflashDraft {
        let surveyed = DflashCheckpoint::new(&Path::new(FIXTURES).join("draft"), target.config()).unwrap();
        DflashDraft::new(DflashModel::load(&surveyed, 64, target.compute()).unwrap())
    }

    #[test]
    fn context_of_another_sequence_is_dropped() {
        let mut target = target();
        let embedded = target.embedding(&[7, 90, 90, 90]).unwrap();
        let width = draft(&target).network.config().features();
        let hidden: Vec<f32> = (0..30 * width).map(|at| (at as f32 * 0.37).sin()).collect();
        let rows = |positions: Range<usize>| &hidden[positions.start * width..positions.end * width];
        let ids: Vec<u32> = (0..30).collect();
        let mut blocks = Vec::new();
        // The first `same` tokens of the two sequences are equal.
        for same in [5, 20] {
            let first: Vec<u32> = (0..20).map(|at| if at < same { at } else { 90 }).collect();
            let mut dflash = draft(&target);
            // The second sequence starts from a snapshot, so it has no hidden rows for its first twenty positions.
            for (ids, from) in [(&first, 0), (&ids, 20)] {
                Draft::<Qwen>::start(&mut dflash);
                Draft::<Qwen>::observe(&mut dflash, ids.len(), rows(from..ids.len()));
                dflash.flush().unwrap();
                dflash.drop_foreign_context(ids);
            }
            let mut expected = draft(&target).network;
            expected.append(0, rows(0..20)).unwrap();
            expected.truncate(same as usize);
            expected.append(20, rows(20..30)).unwrap();
            let block = dflash.network.block(&embedded).unwrap();
            assert_eq!(block, expected.block(&embedded).unwrap(), "{same} tokens are equal");
            blocks.push(block);
        }
        assert_ne!(blocks[0], blocks[1], "the positions between 5 and 20 matter");
    }
}
