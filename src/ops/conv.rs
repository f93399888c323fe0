//! The causal depthwise convolution of a delta layer, followed by SiLU (spec 2.2).

use super::{linear::contiguous, math::silu, simd::wide, view::Rows, view::contiguous_mut};
use crate::device::Compute;
use candle_core::{CpuStorage, CustomOp3, InplaceOp2, Layout, Result, Shape, Tensor, bail};

/// `c[t] = silu(sum over j < K of weight[j] * full[t + j])` where `full` is `state` (`[K - 1, C]`) followed by `x`
/// (`[T, C]`); `weight` is `[K, C]`, its last row meets the current sample. Afterwards `state` holds the last `K - 1` rows
/// of `full`: the raw samples.
pub fn conv(compute: &Compute, x: &Tensor, weight: &Tensor, state: &Tensor) -> Result<Tensor> {
    let y = x.apply_op3_no_bwd(weight, state, &Conv { compute })?;
    state.inplace_op2(x, &Shift)?;
    Ok(y)
}

/// Channels of a task.
const PIECE: usize = 2048;

struct Conv<'a> {
    compute: &'a Compute,
}

impl CustomOp3 for Conv<'_> {
    fn name(&self) -> &'static str {
        "conv"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
        s: &CpuStorage,
        sl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (taps, width) = wl.shape().dims2()?;
        let (x, weight, state) = (Rows::new(x, xl)?, contiguous(w, wl)?, Rows::new(s, sl)?);
        if x.width() != width || state.width() != width || state.count() + 1 != taps {
            bail!("conv: {taps} taps of {width} for rows of {} after {} rows", x.width(), state.count())
        }
        let mut y = vec![0f32; x.count() * width];
        // Channels do not touch each other either, which is all there is to share out in decode.
        let piece = if width.is_multiple_of(PIECE) { PIECE } else { width };
        self.compute.threads.run_pieces(&mut y, piece, &|task, y| {
            let (token, first) = (task * piece / width, task * piece % width);
            for tap in 0..taps {
                let at = token + tap;
                let row = if at < taps - 1 { state.row(at) } else { x.row(at + 1 - taps) };
                add(y, &weight[tap * width + first..], &row[first..]);
            }
            activate(y);
        });
        Ok((CpuStorage::F32(y), Shape::from((x.count(), width))))
    }
}

wide! {
    /// `y += weight * x`.
    fn add(y: &mut [f32], weight: &[f32], x: &[f32]) {
        for ((y, w), x) in y.iter_mut().zip(weight).zip(x) {
            *y = w.mul_add(*x, *y);
        }
    }
}

wide! {
    fn activate(y: &mut [f32]) {
        for y in y {
            *y = silu(*y);
        }
    }
}

struct Shift;

impl InplaceOp2 for Shift {
    fn name(&self) -> &'static str {
        "conv-state"
    }

    fn cpu_fwd(&self, s: &mut CpuStorage, sl: &Layout, x: &CpuStorage, xl: &Layout) -> Result<()> {
        let (kept, width) = sl.shape().dims2()?;
        let (state, x) = (contiguous_mut(s, sl)?, Rows::new(x, xl)?);
        let old = kept.saturating_sub(x.count());
        // Rows that stay move up; the rest comes from `x`.
        state.copy_within((kept - old) * width.., 0);
        for row in old..kept {
            state[row * width..(row + 1) * width].copy_from_slice(x.row(x.count() - (kept - row)));
        }
        Ok(())
    }
}
