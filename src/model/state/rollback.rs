//! A delta net's memory, and the rows that it has not taken in for good.
//!
//! Its state cannot be rewound. So a verify walks its rows without writing the state, and leaves what they were projected to
//! on a tape. Taking rows back makes the tape shorter, and nothing else; the next pass walks those that stayed again, in
//! registers, in front of its own. No state is copied, no weight is read twice.

use crate::model::config::Config;
use crate::{
    device::{DeviceError, Region},
    ops::{Backend, DeltaShape, Replay},
};

/// Rows of a verify at most: as many as the kernels of decoding take.
pub const ROWS: usize = 16;

/// The last `taps - 1` raw samples, `[taps - 1, C]`, and the heads' matrices, `[Hv, Dv, Dk]`; f32.
#[derive(Debug, Clone, Copy)]
pub struct DeltaState {
    pub conv: Region,
    pub heads: Region,
    /// Made with the first verify.
    pub tape: Option<Tape>,
}

/// Rows that the state has not seen.
#[derive(Debug, Clone, Copy)]
pub struct Tape {
    /// `[2, ROWS, width]`: a verify writes one half while it reads the other.
    proj: Region,
    /// `[2, ROWS, channels]`.
    mixed: Region,
    /// Where the rows are.
    half: usize,
    rows: usize,
}

/// A pass's rows: they stay, or they are a trial that may be taken back, behind so many others of it.
pub type Trial = Option<usize>;

/// Bytes of all tapes.
pub fn cost(config: &Config) -> u64 {
    let (nets, shape) = (config.layers - config.full_layers(), config.delta);
    if nets > 0 { (nets * 2 * ROWS * (shape.width() + shape.channels()) * 4) as u64 } else { 0 }
}

impl DeltaState {
    /// Makes room for a trial's rows.
    pub fn tape(&mut self, shape: &DeltaShape, run: &mut dyn Backend) -> Result<(), DeviceError> {
        if self.tape.is_none() {
            let [proj, mixed] = [shape.width(), shape.channels()].map(|width| 2 * ROWS * width * 4);
            let [proj, mixed] = [run.allocate(proj)?, run.allocate(mixed)?];
            self.tape = Some(Tape { proj, mixed, half: 0, rows: 0 });
        }
        Ok(())
    }

    /// The rows that the state has not seen.
    pub fn past(&self, shape: &DeltaShape) -> Replay {
        let Some(Tape { proj, mixed, half, rows, .. }) = self.tape else { return Replay::default() };
        let part = |region: Region, width: usize| region.rows(half * ROWS, rows, width);
        Replay { rows, proj: part(proj, shape.width()), mixed: part(mixed, shape.channels()) }
    }

    /// Where `rows` further ones of a trial are projected to and convolved, behind `before` others.
    pub fn room(&self, shape: &DeltaShape, before: usize, rows: usize) -> Option<[Region; 2]> {
        let Tape { proj, mixed, half, .. } = self.tape?;
        let half = if before == 0 { 1 - half } else { half };
        Some(
            [(proj, shape.width()), (mixed, shape.channels())]
                .map(|(region, width)| region.rows(half * ROWS + before, rows, width)),
        )
    }

    /// Rows that the state now has to know, of the past ones and then of `rows` new ones.
    pub fn stored(&self, trial: Trial, rows: usize) -> usize {
        let past = self.tape.map_or(0, |tape| tape.rows);
        match trial {
            None => past + rows,
            Some(0) => past,
            Some(_) => 0,
        }
    }

    /// `rows` have been walked.
    pub fn walked(&mut self, trial: Trial, rows: usize) {
        let Some(tape) = &mut self.tape else { return };
        match trial {
            None => tape.rows = 0,
            Some(0) => *tape = Tape { half: 1 - tape.half, rows, ..*tape },
            Some(_) => tape.rows += rows,
        }
    }

    /// The last `rows` on the tape never were.
    pub fn take_back(&mut self, rows: usize) {
        self.tape.iter_mut().for_each(|tape| tape.rows = tape.rows.saturating_sub(rows));
    }

    /// The sequence is another one.
    pub fn clear(&mut self) {
        self.tape.iter_mut().for_each(|tape| tape.rows = 0);
    }
}
