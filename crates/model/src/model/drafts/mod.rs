//! Drafts that compute from the model's hidden rows: the checkpoint's MTP head and DFlash.

pub mod dflash;
pub mod mtp;

/// `x / sqrt(mean(x^2) + eps) * weight`, row by row. The weight is used as stored.
fn norm(x: &mut [f32], weight: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let scale = (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32 + eps).sqrt().recip();
        row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * weight);
    }
}
