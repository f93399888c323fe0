//! Drafts by the checkpoint's head for multi-token prediction. The head runs only when a draft is wanted: until then the
//! model's hidden rows are kept, the last few hundred of them.

use super::{Draft, Kind, Outlook, Sequence, Trail};
use crate::{
    error::ModelError,
    model::{HiddenTaps, MTP_ROWS, Qwen, QwenState},
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

    /// The position from which on the head looks at a sequence of `len` tokens, to draft `most`: where it left off if it still
    /// can, else as far back as there are hidden rows and there is room.
    fn begin(&mut self, len: usize, most: usize) -> usize {
        let at = self.base + self.seen;
        if self.seen == 0 || at < self.trail.first() || at >= len || len + most > self.base + self.room {
            self.base = self.trail.first().max(len - len.min(MTP_ROWS).min(self.room - most));
            self.seen = 0;
        }
        self.base + self.seen
    }
}

impl Draft<Qwen> for Mtp {
    fn kind(&self) -> Kind {
        Kind::Mtp
    }

    fn taps(&self) -> HiddenTaps {
        HiddenTaps { layers: vec![self.layers - 1], rows: MTP_ROWS }
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
        _: &mut QwenState,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        let len = sequence.seen.len();
        if self.trail.end() != len || self.trail.first() == len {
            return Ok(());
        }
        let at = self.begin(len, most);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A head with room for `room` positions, of which it has `seen` from `base` on; the rows of positions `rows` are kept.
    fn mtp(room: usize, base: usize, seen: usize, rows: std::ops::Range<usize>) -> Mtp {
        let mut trail = Trail::new(1, MTP_ROWS);
        trail.follow(rows.end, &vec![0.0; rows.len()]);
        Mtp { layers: 1, room, trail, base, seen }
    }

    #[test]
    fn the_head_goes_on_where_it_left_off_or_begins_anew() {
        for (room, base, seen, rows, len, most, wanted) in [
            // It goes on; and does so with the last room that there is.
            (20, 4, 6, 4..12, 12, 3, (10, 4, 6)),
            (20, 4, 6, 4..21, 21, 3, (10, 4, 6)),
            (20, 4, 6, 4..22, 22, 3, (5, 5, 0)),
            // It has seen nothing, all of it, or rows that are gone.
            (20, 4, 0, 6..12, 12, 3, (6, 6, 0)),
            (20, 4, 7, 6..12, 12, 3, (11, 4, 7)),
            (20, 4, 8, 6..12, 12, 3, (6, 6, 0)),
            (20, 4, 1, 5..12, 12, 3, (5, 4, 1)),
            (20, 4, 1, 6..12, 12, 3, (6, 6, 0)),
            // As far back as the room allows, and no further than the rows go.
            (8, 0, 0, 0..12, 12, 3, (7, 7, 0)),
            (8, 0, 0, 10..12, 12, 3, (10, 10, 0)),
            (40, 0, 0, 0..12, 12, 3, (0, 0, 0)),
            (MTP_ROWS + 100, 0, 0, 0..MTP_ROWS + 9, MTP_ROWS + 9, 3, (9, 9, 0)),
        ] {
            let mut head = mtp(room, base, seen, rows.clone());
            let at = head.begin(len, most);
            assert_eq!((at, head.base, head.seen), wanted, "{room} {base} {seen} {rows:?} {len} {most}");
        }
    }
}
