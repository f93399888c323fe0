//! Checks of `sample`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        check::KernelCheck,
        sample::{BLOCK, Sample, TokenChoice},
    },
};

/// Checks random logits, equal largest logits in one block and in several, and logits that are never chosen. Each with
/// several choices.
pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let sampled = |top_k, top_p, min_p, share| TokenChoice { top_k, temperature: 0.7, top_p, min_p, share };
    let choices = [
        TokenChoice::LIKELIEST,
        sampled(20, 0.95, 0.0, 0.3),
        sampled(20, 0.95, 0.0, 0.999),
        sampled(64, 1.0, 0.2, 0.8),
        sampled(5, 0.0, 0.0, 0.5),
        sampled(40, 1.0, 0.0, 0.61),
    ];
    for count in [1, 40, BLOCK, 2 * BLOCK + 300] {
        let random = b.random.floats(count);
        let largest = |ids: &[usize]| {
            let mut logits = random.clone();
            ids.iter().for_each(|id| logits[id % count] = 1e30);
            logits
        };
        let mut rare = vec![f32::NEG_INFINITY; count];
        rare[count / 2] = f32::MIN;
        rare[count - 1] = f32::NAN;
        let rows = [random.clone(), largest(&[BLOCK + 7, BLOCK + 8, 39]), largest(&[300, 301, 33]), rare];
        for (place, choice) in (0..rows.len()).flat_map(|place| choices.map(|choice| (place, choice))) {
            check(b, &rows, &[(place, choice)], count)?;
        }
        // Rows with different choices, in another order than their places.
        let together: Vec<_> = [2, 0, 3, 1, 0, 2].into_iter().zip(choices).collect();
        check(b, &rows, &together, count)?;
    }
    Ok(())
}

/// Checks the choice from rows of `count` logits. Each place has three more values, which are never chosen.
fn check(
    b: &mut KernelCheck<'_, impl Driver>,
    places: &[Vec<f32>],
    rows: &[(usize, TokenChoice)],
    count: usize,
) -> Result<(), DeviceError> {
    let Some(words) = Sample::scratch_words(rows, count) else { return Ok(()) };
    let values: Vec<f32> = places.iter().flat_map(|row| row.iter().copied().chain([f32::MAX; 3])).collect();
    let logits = b.floats(&values)?;
    let scratch = b.buffer(words)?;
    let ids = b.buffer(rows.len())?;
    b.check(Sample { rows, count, stride: count + 3, logits, scratch, ids }, &[], &[ids])
}
