//! Drafts by the checkpoint's head for multi-token prediction. The head runs only when a draft is wanted: until then the
//! model's hidden rows are kept, the last few hundred of them.

use super::{Draft, Kind, Outlook, Sequence, Trail};
use crate::{
    error::ModelError,
    model::{MTP_ROWS, Qwen, State, Taps},
};

pub struct Mtp {
    layers: usize,
    /// Positions that the head has room for.
    room: usize,
    trail: Trail,
    /// The sequence's position that is the head's first, and how many it has seen from there on, of the sequence itself:
    /// what stands behind came from drafts and is overwritten.
    base: usize,
    seen: usize,
}

impl Mtp {
    /// `None` if the model has no head.
    pub fn new(model: &Qwen) -> Option<Self> {
        let (config, room) = (model.config(), model.mtp_room()?);
        Some(Self { layers: config.layers, room, trail: Trail::new(config.hidden, MTP_ROWS), base: 0, seen: 0 })
    }
}

impl Draft<Qwen> for Mtp {
    fn kind(&self) -> Kind {
        Kind::Mtp
    }

    fn taps(&self) -> Taps {
        Taps { layers: vec![self.layers - 1], rows: MTP_ROWS }
    }

    fn start(&mut self) {
        self.trail.clear();
        self.seen = 0;
    }

    fn follow(&mut self, len: usize, hidden: &[f32]) {
        self.trail.follow(len, hidden);
    }

    fn propose(
        &mut self,
        model: &mut Qwen,
        _: &mut State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        let len = sequence.seen.len();
        if self.trail.end() != len || self.trail.first() == len {
            return Ok(());
        }
        let at = self.base + self.seen;
        if self.seen == 0 || at < self.trail.first() || at >= len || len + most > self.base + self.room {
            self.base = self.trail.first().max(len - len.min(MTP_ROWS).min(self.room - most));
            self.seen = 0;
        }
        let at = self.base + self.seen;
        // The row of a token predicts the one after the next, with the next one known.
        let ids: Vec<u32> = (at + 1..=len).filter_map(|position| sequence.get(position)).collect();
        let mut predicted = model.mtp(at - self.base, &ids, self.trail.since(at), false)?;
        self.seen = len - self.base;
        while let Some(id) = outlook.draw(&predicted.logits) {
            out.push(id);
            if out.len() == most {
                break;
            }
            predicted = model.mtp(len - self.base + out.len() - 1, &[id], &predicted.hidden, true)?;
        }
        Ok(())
    }
}
