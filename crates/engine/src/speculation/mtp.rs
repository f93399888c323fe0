//! Drafts by the checkpoint's multi-token-prediction (MTP) head.
//!
//! The head runs only when tokens must be proposed. Until then, [`MtpDraft`] stores the hidden rows of the last few
//! hundred tokens.

use super::{
    draft::{Draft, DraftKind, DraftRequest},
    hidden_history::HiddenHistory,
};
use moestro_model::{
    error::ModelError,
    model::{HiddenRows, HiddenTaps, MTP_ROWS, Qwen, QwenState},
};

pub struct MtpDraft {
    /// Number of layers of the model. The head reads the hidden rows of the last layer.
    layers: usize,
    /// Number of positions in the head's own context.
    capacity: usize,
    hidden: HiddenHistory,
    /// Position in the sequence of the first token in the head's context.
    base: usize,
    /// Number of positions from `base` on that the head has evaluated, not counting drafted tokens. The next call
    /// overwrites the positions of drafted tokens.
    evaluated: usize,
}

impl MtpDraft {
    /// Returns `None` if the model has no MTP head.
    pub fn new(model: &Qwen) -> Option<Self> {
        let config = model.config();
        let capacity = model.mtp_capacity()?;
        let hidden = HiddenHistory::new(config.residual_width(), MTP_ROWS);
        Some(Self { layers: config.layers, capacity, hidden, base: 0, evaluated: 0 })
    }

    /// The first position that the head must evaluate to draft `max` tokens after a sequence of `len` tokens.
    ///
    /// The head continues after its last position if possible. Otherwise the head starts again, at the earliest
    /// position that the stored hidden rows and its context allow.
    fn first_position(&mut self, len: usize, max: usize) -> usize {
        let next = self.base + self.evaluated;
        let is_full = len + max > self.base + self.capacity;
        if self.evaluated == 0 || next < self.hidden.first() || next >= len || is_full {
            self.base = self.hidden.first().max(len - len.min(MTP_ROWS).min(self.capacity - max));
            self.evaluated = 0;
        }
        self.base + self.evaluated
    }
}

impl Draft<Qwen> for MtpDraft {
    fn kind(&self) -> DraftKind {
        DraftKind::Mtp
    }

    fn taps(&self) -> HiddenTaps {
        HiddenTaps { layers: vec![self.layers - 1], rows: MTP_ROWS }
    }

    fn start(&mut self) {
        self.hidden.clear();
        self.evaluated = 0;
    }

    fn observe(&mut self, len: usize, hidden: &[f32]) {
        self.hidden.append(len, hidden);
    }

    fn propose(&mut self, model: &mut Qwen, _: &mut QwenState, request: DraftRequest<'_>) -> Result<(), ModelError> {
        let DraftRequest { history, max, mut sampler, out } = request;
        let len = history.evaluated.len();
        if self.hidden.end() != len || self.hidden.first() == len {
            return Ok(());
        }
        let from = self.first_position(len, max);
        // The head predicts token `n + 2` from the hidden row of token `n` and the id of token `n + 1`.
        let ids: Vec<u32> = (from + 1..=len).filter_map(|position| history.get(position)).collect();
        let mut predicted = model.mtp(from - self.base, &ids, HiddenRows::OfModel(self.hidden.since(from)))?;
        self.evaluated = len - self.base;
        while let Some(id) = sampler.draw(&predicted.logits) {
            out.push(id);
            if out.len() == max {
                break;
            }
            predicted = model.mtp(len - self.base + out.len() - 1, &[id], HiddenRows::OfHead(&predicted.hidden))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_continues_or_restarts_within_its_context() {
        for (capacity, base, evaluated, rows, len, max, expected) in [
            // The head continues, even if the new tokens take the last free positions of its context.
            (20, 4, 6, 4..12, 12, 3, (10, 4, 6)),
            (20, 4, 6, 4..21, 21, 3, (10, 4, 6)),
            (20, 4, 6, 4..22, 22, 3, (5, 5, 0)),
            // The head has evaluated no position, all positions, or positions whose hidden rows are no longer stored.
            (20, 4, 0, 6..12, 12, 3, (6, 6, 0)),
            (20, 4, 7, 6..12, 12, 3, (11, 4, 7)),
            (20, 4, 8, 6..12, 12, 3, (6, 6, 0)),
            (20, 4, 1, 5..12, 12, 3, (5, 4, 1)),
            (20, 4, 1, 6..12, 12, 3, (6, 6, 0)),
            // The head restarts at the earliest position that its context and the stored rows allow.
            (8, 0, 0, 0..12, 12, 3, (7, 7, 0)),
            (8, 0, 0, 10..12, 12, 3, (10, 10, 0)),
            (40, 0, 0, 0..12, 12, 3, (0, 0, 0)),
            (MTP_ROWS + 100, 0, 0, 0..MTP_ROWS + 9, MTP_ROWS + 9, 3, (9, 9, 0)),
        ] {
            let mut hidden = HiddenHistory::new(1, MTP_ROWS);
            hidden.append(rows.end, &vec![0.0; rows.len()]);
            let mut draft = MtpDraft { layers: 1, capacity, hidden, base, evaluated };
            let from = draft.first_position(len, max);
            let found = (from, draft.base, draft.evaluated);
            assert_eq!(found, expected, "{capacity} {base} {evaluated} {rows:?} {len} {max}");
        }
    }
}
