//! Detects whether the norms of a checkpoint store `w` or `1 + w`, by examining their values.
//!
//! Converters of qwen4_exp use both encodings with the same names and shapes. The means of trained residual-stream
//! norms differ: about 0.2 for `w`, and 1.2 for `1 + w`. All norms are examined together, because the ranges of single
//! norms overlap.

use super::Checkpoint;
use crate::error::ModelError;
use moestro_base::error::StoreError;

/// Threshold for the mean of a norm. A norm with a lower mean stores `w`. A norm with a higher mean stores `1 + w`.
const BETWEEN: f32 = 0.6;
/// Minimum fraction of norms that must be on the same side of the threshold.
const AGREEING: f32 = 0.9;

/// True if the norms in `names` store `w` (zero-centred), false if they store `1 + w`.
///
/// # Errors
/// The norms are on both sides of the threshold, or have implausible values.
pub fn is_zero_centred(from: &Checkpoint, names: &[String]) -> Result<bool, ModelError> {
    let mut means = Vec::with_capacity(names.len());
    for name in names {
        let len = from.get(name)?.shape.iter().product();
        means.push(from.vector(name, len)?.iter().sum::<f32>() / len.max(1) as f32);
    }
    means.sort_by(f32::total_cmp);
    let low = means.iter().filter(|mean| **mean < BETWEEN).count() as f32 / means.len().max(1) as f32;
    let [least, largest] = [means.first(), means.last()].map(|mean| mean.copied().unwrap_or_default());
    let is_plausible = least > -1.0 && largest < 3.0;
    if !is_plausible || (low < AGREEING && low > 1.0 - AGREEING) || means.is_empty() {
        let means = format!("{} residual-stream norms are {least} to {largest}", means.len());
        let why = format!("cannot detect whether its norms store w or 1 + w: the means of {means}");
        return Err(StoreError::NotACheckpoint { path: from.index.dir.clone(), why }.into());
    }
    let is_zero_centred = low >= AGREEING;
    let encoding = if is_zero_centred { "w" } else { "1 + w" };
    tracing::info!(encoding, least_mean = least, largest_mean = largest, "detected the encoding of the norms");
    Ok(is_zero_centred)
}
