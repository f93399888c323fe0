//! The router's choice: softmax over all experts, the k likeliest, renormalised (spec 2.3).

use super::view::Rows;
use candle_core::{Result, Storage, Tensor, bail};

/// Which experts each token visits, likeliest first, and how much each counts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routes {
    /// Experts a token.
    pub k: usize,
    /// `T * k` experts.
    pub ids: Vec<u32>,
    /// `T * k` weights.
    pub weights: Vec<f32>,
}

/// Routes every row of `logits` (`[T, experts]`, f32). With `renormalise` a token's weights sum to one. Of equal logits
/// the expert of lower number goes first.
pub fn route(logits: &Tensor, k: usize, renormalise: bool) -> Result<Routes> {
    let (storage, layout) = logits.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("route: the logits are not on the CPU") };
    let rows = Rows::new(storage, layout)?;
    let mut routes = Routes { k, ..Routes::default() };
    let mut order: Vec<u32> = Vec::with_capacity(rows.width());
    for token in 0..rows.count() {
        let row = rows.row(token);
        order.clear();
        order.extend(0..row.len() as u32);
        let before = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        if k < order.len() {
            order.select_nth_unstable_by(k, before);
        }
        let chosen = &mut order[..k.min(row.len())];
        chosen.sort_unstable_by(before);
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weigh = |id: u32| (row[id as usize] - most).exp();
        let sum: f32 =
            if renormalise { chosen.iter().map(|&id| weigh(id)).sum() } else { (0..row.len() as u32).map(weigh).sum() };
        routes.weights.extend(chosen.iter().map(|&id| weigh(id) / sum));
        routes.ids.extend_from_slice(chosen);
    }
    Ok(routes)
}
