//! Whether the norms of a checkpoint hold `w` or `1 + w`, from their values.
//!
//! Converters of qwen4_exp publish both with the same names and shapes. The values of the norms of the residual streams
//! show the difference: trained ones have means of about 0.2 for `w` and 1.2 for `1 + w`. One decision is made for all
//! norms, because the ranges of single norms overlap.

use super::Checkpoint;
use crate::error::{ModelError, StoreError};

/// A mean below it is that of `w`, a mean above it that of `1 + w`.
const BETWEEN: f32 = 0.6;
/// Minimum fraction of the norms that must agree.
const AGREEING: f32 = 0.9;

/// True if the norms hold `w`, zero-centred; false for `1 + w`. Only the norms in `names` are examined.
///
/// # Errors
/// The norms do not agree.
pub fn is_zero_centred(from: &Checkpoint, names: &[String]) -> Result<bool, ModelError> {
    let mut means = Vec::with_capacity(names.len());
    for name in names {
        let len = from.get(name)?.shape.iter().product();
        means.push(from.vector(name, len)?.iter().sum::<f32>() / len.max(1) as f32);
    }
    means.sort_by(f32::total_cmp);
    let low = means.iter().filter(|mean| **mean < BETWEEN).count() as f32 / means.len().max(1) as f32;
    let range = [means.first(), means.last()].map(|mean| mean.copied().unwrap_or_default());
    let is_plausible = range[0] > -1.0 && range[1] < 3.0;
    if !is_plausible || (low < AGREEING && low > 1.0 - AGREEING) || means.is_empty() {
        let why = format!(
            "cannot tell whether its norms hold w or 1 + w: the means of {} norms of the residual streams are {} to {}",
            means.len(),
            range[0],
            range[1]
        );
        return Err(StoreError::NotACheckpoint { path: from.index.dir.clone(), why }.into());
    }
    let is_zero_centred = low >= AGREEING;
    let encoding = if is_zero_centred { "w" } else { "1 + w" };
    tracing::info!(
        encoding,
        least_mean = range[0],
        largest_mean = range[1],
        "decided what the norms of the model hold"
    );
    Ok(is_zero_centred)
}
