//! Compares eviction scores with their definition.

use moestro_compute::experts::{
    ExpertChoice,
    eviction::{EvictionScores, ExpertKey},
};

fn selected(ids: &[u32], k: usize) -> ExpertChoice<'_> {
    ExpertChoice { ids, k, logits: &[] }
}

#[test]
fn frequent_experts_outscore_rare_ones() {
    let mut scores = EvictionScores::new(1, 4);
    for token in 0..100 {
        scores.update(0, selected(&[if token % 2 == 0 { 0 } else { 1 + token % 3 }], 1));
    }
    assert!((1..4).all(|other| scores.score(0) > scores.score(other)));
    for _ in 0..1000 {
        scores.update(0, selected(&[3], 1));
    }
    assert!(scores.score(3) > 0.9 && scores.score(0) < 0.1);
}

#[test]
fn layers_count_their_own_tokens() {
    let mut scores = EvictionScores::new(2, 2);
    for _ in 0..10 {
        scores.update(0, selected(&[0], 1));
        scores.update(1, selected(&[0], 1));
    }
    scores.update(0, selected(&[0], 1));
    assert_eq!(scores.score(0), scores.score(2));
}

#[test]
fn chunk_update_equals_single_token_updates() {
    let logits = [3.0, 2.0, 1.0, 0.5, 2.5, 2.0, -1.0, 0.0, 4.0];
    let ids = [0, 1, 1, 2, 2, 1];
    let (mut chunk, mut single) = (EvictionScores::new(1, 3), EvictionScores::new(1, 3));
    chunk.update(0, ExpertChoice { ids: &ids, k: 2, logits: &logits });
    for (ids, logits) in ids.chunks(2).zip(logits.chunks(3)) {
        single.update(0, ExpertChoice { ids, k: 2, logits });
    }
    for key in 0..3 {
        assert_eq!(chunk.score(key), single.score(key));
    }
}

#[test]
fn non_finite_logits_give_finite_score() {
    let mut scores = EvictionScores::new(1, 3);
    for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3], [f32::INFINITY, 0.0, 0.0], [0.0; 3], [1e30, -1e30, 0.0]] {
        scores.update(0, ExpertChoice { ids: &[0], k: 1, logits: &logits });
    }
    assert!((0..3).all(|key| scores.score(key).is_finite()));
}

/// The reference in this test computes mean, variance and share over all rows together.
#[test]
fn score_matches_its_definition() {
    let rows = [[3.0f32, 2.0, 1.0, 0.5], [2.5, 2.0, -1.0, 4.0], [0.0, 1.0, 2.0, 3.5]];
    let selected = [[0u32, 1], [3, 0], [3, 2]];
    let mut scores = EvictionScores::new(2, 4);
    for (row, ids) in rows.iter().zip(&selected) {
        scores.update(1, ExpertChoice { ids, k: 2, logits: row });
    }
    let margins = rows.iter().zip(&selected).map(|(row, ids)| {
        let lowest = ids.iter().map(|id| row[*id as usize]).fold(f32::INFINITY, f32::min);
        row.map(|logit| f64::from(logit - lowest))
    });
    let margins: Vec<[f64; 4]> = margins.collect();
    let n = rows.len() as f64;
    let mean: [f64; 4] = std::array::from_fn(|e| margins.iter().map(|row| row[e]).sum::<f64>() / n);
    let variance: [f64; 4] =
        std::array::from_fn(|e| margins.iter().map(|row| (row[e] - mean[e]).powi(2)).sum::<f64>() / n);
    let spread = variance.iter().sum::<f64>() / 4.0;
    for e in 0..4 {
        let share = selected.iter().filter(|ids| ids.contains(&(e as u32))).count() as f64 / n;
        let shrunk = (variance[e] * n + 2.0 * spread) / (n + 2.0);
        let chance = 1.0 / (1.0 + (-1.702 * mean[e] / shrunk.sqrt()).exp());
        let weight = 2.0 * n;
        let expected = (weight * chance + n * share) / (weight + n);
        let found = f64::from(scores.score(4 + e as ExpertKey));
        assert!((found - expected).abs() < 1e-5, "expert {e}: {found}, expected {expected}");
    }
    assert!((0..4).all(|other| scores.score(other) == 0.0), "the other layer is unchanged");
}

#[test]
fn prior_score_weighs_sixteen_tokens() {
    let mut scores = EvictionScores::new(2, 3);
    for (key, prior) in [(0, -1.0), (1, 7.0), (4, 0.5)] {
        scores.set_prior(key, prior);
    }
    assert_eq!([0, 1, 2, 3, 4, 5].map(|key| scores.score(key)), [0.0, 1.0, 0.0, 0.0, 0.5, 0.0]);
    scores.update(1, selected(&[0], 1));
    let expected = [1.0 / 17.0, 0.5 * 16.0 / 17.0, 0.0];
    assert!((3..6).zip(expected).all(|(key, share)| (scores.score(key) - share).abs() < 1e-6));
    scores.set_prior(99, 0.5);
    assert_eq!(scores.score(99), 0.0);
}
