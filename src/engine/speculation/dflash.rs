//! DFlash as a draft: it follows the model's hidden rows, and proposes a block at a time.

use super::{Draft, Kind, Outlook, Sequence, trail::Trail};
use crate::{
    error::ModelError,
    model::{DflashModel, HiddenTaps, Qwen, QwenState, VERIFY_ROWS},
};

/// Positions whose hidden rows wait to become context, at most. A model that answers without drafts leaves them behind with
/// every token; of a long answer only the last are worth the time.
const WAITING: usize = 64;

pub struct Dflash {
    draft: DflashModel,
    /// Hidden rows of the last positions, not yet context.
    waiting: Trail,
    /// The tokens of the sequence that drafts were last proposed for. Conversations go back to a checkpoint at every turn:
    /// the context in front of it is still the draft's, as far as the tokens are the same.
    known: Vec<u32>,
    begun: Begun,
    /// An error of [`Draft::follow`], which cannot report it.
    failed: Option<ModelError>,
}

/// A sequence that is not known to go on from the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    No,
    /// Nothing of it has been followed.
    Now,
    /// It has been followed from this position on.
    At(usize),
}

impl Dflash {
    pub fn new(draft: DflashModel) -> Self {
        let waiting = Trail::new(draft.config().features(), WAITING);
        Self { draft, waiting, known: Vec::new(), begun: Begun::No, failed: None }
    }

    /// Forgets context in front of a sequence's beginning that turns out to be another's.
    fn recognise(&mut self, seen: &[u32]) {
        let same = self.known.iter().zip(seen).take_while(|(a, b)| a == b).count();
        match std::mem::replace(&mut self.begun, Begun::No) {
            Begun::At(first) if same < first => self.draft.forget(same..first),
            _ => {}
        }
        self.known.truncate(same);
        self.known.extend_from_slice(&seen[same..]);
    }

    /// Makes the waiting rows context.
    fn flush(&mut self) -> Result<(), ModelError> {
        let first = self.waiting.first();
        if first < self.waiting.end() {
            self.draft.append(first, self.waiting.since(first))?;
            self.waiting.clear();
        }
        Ok(())
    }
}

impl Draft<Qwen> for Dflash {
    fn kind(&self) -> Kind {
        Kind::Dflash
    }

    fn taps(&self) -> HiddenTaps {
        // A prompt's every row is context.
        HiddenTaps { layers: self.draft.config().taps.clone(), rows: usize::MAX }
    }

    fn start(&mut self) {
        // Of a sequence that nothing was proposed for, the tokens are not known.
        if let Begun::At(first) = self.begun {
            self.draft.truncate(first);
        }
        self.waiting.clear();
        self.begun = Begun::Now;
    }

    fn follow(&mut self, len: usize, hidden: &[f32]) {
        let rows = hidden.len() / self.draft.config().features();
        let first = len - rows;
        if self.begun == Begun::Now {
            self.begun = Begun::At(first);
            self.draft.truncate(first);
        }
        let mut done = Ok(());
        if first != self.waiting.end() || rows > VERIFY_ROWS {
            done = self.flush();
        }
        if rows > VERIFY_ROWS {
            // A prompt's rows are too many to keep.
            done = done.and_then(|()| self.draft.append(first, hidden));
        } else {
            self.waiting.follow(len, hidden);
        }
        self.failed = self.failed.take().or(done.err());
    }

    fn propose(
        &mut self,
        model: &mut Qwen,
        _: &mut QwenState,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.flush()?;
        self.recognise(sequence.seen);
        let (hidden, config) = (model.config().hidden, self.draft.config());
        let rows = (most + 1).min(config.block).min(VERIFY_ROWS);
        if self.draft.len() != sequence.seen.len() || rows < 2 {
            return Ok(());
        }
        let mut block = vec![config.mask; rows];
        block[0] = sequence.last;
        let block = self.draft.block(&model.embedding(&block)?)?;
        let mut logits = model.score(&block[hidden..])?;
        let mut before = sequence.last;
        for (row, logits) in block[hidden..].chunks_exact(hidden).zip(logits.data.chunks_exact_mut(logits.vocab)) {
            self.draft.score(before, row, logits)?;
            let Some(id) = outlook.draw(logits) else { break };
            out.push(id);
            before = id;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        metrics::Metrics,
        model::{LoadOptions, dflash::DflashCheckpoint},
    };
    use std::{ops::Range, path::Path};

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dflash");

    fn target() -> Qwen {
        let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        options.plan.context = Some(64);
        let dir = Path::new(FIXTURES).join("target");
        Qwen::load(&dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap()
    }

    fn draft(target: &Qwen) -> Dflash {
        let surveyed = DflashCheckpoint::new(&Path::new(FIXTURES).join("draft"), target.config()).unwrap();
        Dflash::new(DflashModel::load(&surveyed, 64, target.compute()).unwrap())
    }

    #[test]
    fn context_that_is_another_sequences_is_forgotten() {
        let target = target();
        let embedded = target.embedding(&[7, 90, 90, 90]).unwrap();
        let width = draft(&target).draft.config().features();
        let hidden: Vec<f32> = (0..30 * width).map(|at| (at as f32 * 0.37).sin()).collect();
        let rows = |positions: Range<usize>| &hidden[positions.start * width..positions.end * width];
        let ids: Vec<u32> = (0..30).collect();
        let mut blocks = Vec::new();
        // As many tokens of the two sequences are the same.
        for same in [5, 20] {
            let first: Vec<u32> = (0..20).map(|at| if at < same { at } else { 90 }).collect();
            let mut dflash = draft(&target);
            // The second one goes on from a checkpoint, so its first twenty positions leave no rows.
            for (ids, from) in [(&first, 0), (&ids, 20)] {
                Draft::<Qwen>::start(&mut dflash);
                Draft::<Qwen>::follow(&mut dflash, ids.len(), rows(from..ids.len()));
                dflash.flush().unwrap();
                dflash.recognise(ids);
            }
            let mut expected = draft(&target).draft;
            expected.append(0, rows(0..20)).unwrap();
            expected.truncate(same as usize);
            expected.append(20, rows(20..30)).unwrap();
            let block = dflash.draft.block(&embedded).unwrap();
            assert_eq!(block, expected.block(&embedded).unwrap(), "{same} tokens are the same");
            blocks.push(block);
        }
        assert_ne!(blocks[0], blocks[1], "the positions between are seen");
    }
}
