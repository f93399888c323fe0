use super::*;
use proptest::prelude::*;

fn sampling(change: impl FnOnce(&mut Sampling)) -> Sampling {
    let mut sampling = Sampling { seed: Some(7), ..Sampling::default() };
    change(&mut sampling);
    sampling
}

fn draw(sampling: Sampling, prompt: &[u32], logits: &[f32]) -> Option<u32> {
    Sampler::new(sampling, prompt, usize::MAX).draw(logits, &TokenMask::Any)
}

/// Computes the probability of every id by the steps in the sampler module's documentation, in f64 and with full sorts.
/// Returns `None` if a value is too close to a threshold.
fn reference(sampling: &Sampling, prompt: &[u32], answer: &[u32], logits: &[f32]) -> Option<Vec<f64>> {
    const CLOSE: f64 = 1e-5;
    let mut row: Vec<f64> = logits.iter().map(|&l| if l.is_nan() { f64::NEG_INFINITY } else { f64::from(l) }).collect();
    for &(id, bias) in &sampling.logit_bias {
        row[id as usize] += f64::from(bias);
    }
    for id in 0..row.len() as u32 {
        let logit = &mut row[id as usize];
        if prompt.contains(&id) || answer.contains(&id) {
            let penalty = f64::from(sampling.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        let count = answer.iter().filter(|&&said| said == id).count();
        if count > 0 {
            *logit -= f64::from(sampling.frequency_penalty) * count as f64 + f64::from(sampling.presence_penalty);
        }
    }
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    let top = row[order[0]];
    let weight = |id: usize| ((row[id] - top) / f64::from(sampling.temperature)).exp();
    if sampling.top_k > 0 {
        let cut = sampling.top_k.min(order.len());
        if cut < order.len() && (row[order[cut - 1]] - row[order[cut]]).abs() < CLOSE {
            return None;
        }
        order.truncate(cut);
    }
    let whole: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut mass = 0.0;
    if sampling.top_p < 1.0 {
        let mut kept = Vec::new();
        for &id in &order {
            if mass >= f64::from(sampling.top_p) {
                break;
            }
            kept.push(id);
            mass += weight(id) / whole;
            if (mass - f64::from(sampling.top_p)).abs() < CLOSE {
                return None;
            }
        }
        order = kept;
    }
    let least = f64::from(sampling.min_p);
    if order.iter().any(|&id| (weight(id) - least).abs() < CLOSE * least) {
        return None;
    }
    order.retain(|&id| weight(id) >= least);
    let whole: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut probabilities = vec![0.0; row.len()];
    for id in order {
        probabilities[id] = weight(id) / whole;
    }
    Some(probabilities)
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    // Some logits are equal and some are NaN. In long rows, `keep` has to lower its `bar` several times.
    let logit = prop_oneof![8 => -6.0..6.0f32, 2 => (-3..3i32).prop_map(|l| l as f32), 1 => Just(f32::NAN)];
    prop::collection::vec(logit, 4..300)
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let penalties = prop_oneof![Just((1.0f32, 0.0f32, 0.0f32)), (0.5..2.0f32, -2.0..2.0f32, -2.0..2.0f32)];
    let filters = (
        prop_oneof![Just(0usize), 1..400usize],
        prop_oneof![Just(1.0f32), 0.0..1.0f32],
        prop_oneof![Just(0.0f32), 0.0..1.0f32],
    );
    let bias = prop::collection::vec((0..4u32, -5.0..5.0f32), 0..3);
    (0.1..3.0f32, filters, penalties, bias).prop_map(|(temperature, filters, penalties, logit_bias)| Sampling {
        temperature,
        top_k: filters.0,
        top_p: filters.1,
        min_p: filters.2,
        repetition_penalty: penalties.0,
        presence_penalty: penalties.1,
        frequency_penalty: penalties.2,
        logit_bias,
        seed: Some(1),
    })
}

#[test]
fn negative_zero_equals_zero() {
    let mut pool = Vec::new();
    largest(&[-1.0, -0.0, 0.0], 2, &mut pool);
    assert_eq!(pool.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), [1, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn filters_match_their_documentation(
        sampling in any_sampling(),
        logits in any_logits(),
        prompt in prop::collection::vec(0..8u32, 0..6),
        answer in prop::collection::vec(0..4u32, 0..6),
    ) {
        prop_assume!(logits.iter().any(|logit| !logit.is_nan()));
        let expected = reference(&sampling, &prompt, &answer, &logits);
        prop_assume!(expected.is_some());
        let expected = expected.unwrap();
        let mut sampler = Sampler::new(sampling, &prompt, usize::MAX);
        if sampler.has_penalties() {
            for &id in &answer {
                *sampler.counts.entry(id).or_default() += 1;
            }
        }
        let drawn = sampler.draw(&logits, &TokenMask::Any).unwrap();
        prop_assert!(expected[drawn as usize] > 0.0, "drew {drawn}, which is filtered out");
        let whole: f64 = sampler.weights.iter().map(|&weight| f64::from(weight)).sum();
        let mut found = vec![0.0; logits.len()];
        for (index, &weight) in sampler.weights.iter().enumerate() {
            let id = sampler.pool.get(index).map_or(index, |candidate| candidate.id as usize);
            found[id] = f64::from(weight) / whole;
        }
        for id in 0..logits.len() {
            prop_assert!((found[id] - expected[id]).abs() < 1e-4, "id {id}: {} instead of {}", found[id], expected[id]);
        }
    }

    #[test]
    fn masked_tokens_are_impossible(
        sampling in any_sampling(),
        logits in any_logits(),
        words in prop::collection::vec(prop_oneof![Just(0u32), Just(u32::MAX), any::<u32>()], 0..10),
    ) {
        let allowed = TokenMask::Only(words);
        let masked: Vec<f32> =
            logits.iter().zip(0..).map(|(&l, id)| if allowed.contains(id) { l } else { f32::NAN }).collect();
        for temperature in [0.0, sampling.temperature] {
            let sampling = Sampling { temperature, ..sampling.clone() };
            let drawn = Sampler::new(sampling.clone(), &[0, 1], usize::MAX).draw(&logits, &allowed);
            prop_assert_eq!(drawn, draw(sampling, &[0, 1], &masked));
            prop_assert!(drawn.is_none_or(|id| allowed.contains(id)));
        }
    }

    #[test]
    fn largest_matches_a_full_sort(logits in any_logits(), count in 0..400usize) {
        let mut pool = Vec::new();
        largest(&logits, count, &mut pool);
        let mut all: Vec<_> =
            logits.iter().zip(0..).map(|(&logit, id)| TokenCandidate { id, value: finite(logit) }).collect();
        all.sort_by(TokenCandidate::order);
        all.truncate(count);
        prop_assert_eq!(pool, all);
    }

    #[test]
    fn logprobs_use_the_raw_softmax(logits in prop::collection::vec(-20.0..20.0f32, 2..200), id in 0..200usize) {
        let id = id % logits.len();
        let found = logprobs(&logits, id as u32, 5, usize::MAX);
        let whole: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let logprob = |id: usize| f64::from(logits[id]) - whole.ln();
        prop_assert!((f64::from(found.logprob) - logprob(id)).abs() < 1e-4);
        prop_assert_eq!(found.top.len(), logits.len().min(5));
        prop_assert!(found.top.is_sorted_by(|a, b| a.1 >= b.1));
        for (id, value) in found.top {
            prop_assert!((f64::from(value) - logprob(id as usize)).abs() < 1e-4);
        }
    }
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [0.0, 1.0, 2.0, -1.0, 0.5];
    let mut sampler = Sampler::new(sampling(|_| {}), &[], usize::MAX);
    let mut counts = [0u32; 5];
    let rounds = 50_000;
    for _ in 0..rounds {
        counts[sampler.draw(&logits, &TokenMask::Any).unwrap() as usize] += 1;
    }
    let expected = reference(&sampling(|_| {}), &[], &[], &logits).unwrap();
    for (id, &count) in counts.iter().enumerate() {
        let share = f64::from(count) / f64::from(rounds);
        // Allows a deviation of five standard deviations.
        let slack = 5.0 * (expected[id] * (1.0 - expected[id]) / f64::from(rounds)).sqrt();
        assert!((share - expected[id]).abs() < slack, "id {id}: {share} instead of {}", expected[id]);
    }
}

#[test]
fn greedy_prefers_lowest_equal_id() {
    let greedy = |logits: &[f32]| draw(sampling(|s| s.temperature = 0.0), &[], logits);
    assert_eq!(greedy(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(greedy(&[f32::NAN, 1.0, f32::NAN, 4.0, f32::NEG_INFINITY]), Some(3));
    assert_eq!(greedy(&[-0.0, 0.0]), Some(0));
    assert_eq!(greedy(&[1.0, f32::INFINITY]), Some(1));
}

#[test]
fn impossible_logits_draw_nothing() {
    for temperature in [0.0, 1.0] {
        for logits in [&[][..], &[f32::NAN, f32::NAN], &[f32::NEG_INFINITY]] {
            assert_eq!(draw(sampling(|s| s.temperature = temperature), &[], logits), None);
        }
    }
}

#[test]
fn extreme_parameters_draw_a_possible_token() {
    let logits = [f32::INFINITY, f32::NAN, f32::MIN, f32::INFINITY, 0.0];
    for temperature in [1e-30, 1.0, f32::MAX] {
        for (top_p, min_p) in [(0.0, 0.0), (f32::NAN, 0.0), (1.0, 9.0), (0.5, f32::NAN)] {
            let odd = sampling(|s| (s.temperature, s.top_p, s.min_p) = (temperature, top_p, min_p));
            let drawn = draw(odd, &[], &logits).unwrap();
            assert_ne!(drawn, 1, "temperature {temperature}, top_p {top_p}, min_p {min_p}");
        }
    }
    // A NaN temperature is greedy.
    assert_eq!(draw(sampling(|s| s.temperature = f32::NAN), &[], &[0.0, 1.0]), Some(1));
}

#[test]
fn padding_is_never_drawn_or_reported() {
    let logits = [1.0, 2.0, 90.0, 80.0];
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(sampling(|s| s.temperature = temperature), &[], 2);
        assert!((0..200).all(|_| sampler.draw(&logits, &TokenMask::Any).unwrap() < 2));
    }
    let shown: Vec<u32> = logprobs(&logits, 1, 4, 2).top.iter().map(|&(id, _)| id).collect();
    assert_eq!(shown, [1, 0]);
}

#[test]
fn draw_depends_on_seed_and_position() {
    let logits: Vec<f32> = (0..50).map(|id| (id % 7) as f32 * 0.1).collect();
    let run = |seed, prompt: &[u32], count| {
        let mut sampler = Sampler::new(sampling(|s| s.seed = Some(seed)), prompt, usize::MAX);
        (0..count).map(|_| sampler.draw(&logits, &TokenMask::Any).unwrap()).collect::<Vec<_>>()
    };
    let whole = run(3, &[1, 2], 40);
    assert_eq!(whole, run(3, &[1, 2], 40));
    assert_ne!(whole, run(4, &[1, 2], 40));
    // A sampler that starts in the middle of an answer draws the same tokens as a sampler that starts at the beginning.
    assert_eq!(whole[10..], run(3, &[9; 12], 30));
}

#[test]
fn missing_seed_is_random() {
    let fresh = || Sampler::new(Sampling::default(), &[], usize::MAX).seed;
    assert_ne!(fresh(), fresh());
}

#[test]
fn penalties_count_tokens_of_the_answer() {
    let logits = [2.0, 1.9, -1.0];
    let greedy = |change: fn(&mut Sampling)| {
        let mut sampler = Sampler::new(sampling(|s| s.temperature = 0.0), &[0], usize::MAX);
        change(&mut sampler.sampling);
        (0..4).map(|_| sampler.draw(&logits, &TokenMask::Any).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(greedy(|_| {}), [0, 0, 0, 0]);
    // The frequency penalty grows with each occurrence in the answer.
    assert_eq!(greedy(|s| s.frequency_penalty = 0.2), [0, 1, 0, 1]);
    // The presence penalty does not grow.
    assert_eq!(greedy(|s| s.presence_penalty = 0.2), [0, 1, 0, 0]);
    let mut sampler = Sampler::new(sampling(|s| (s.temperature, s.repetition_penalty) = (0.0, 1.5)), &[0], usize::MAX);
    assert_eq!(sampler.draw(&logits, &TokenMask::Any), Some(1), "the repetition penalty includes the prompt");
}

/// The published first numbers of SplitMix64 with seed 0.
#[test]
fn mix_matches_splitmix64() {
    let numbers = [1u64, 2, 3].map(|n| mix(INCREMENT.wrapping_mul(n)));
    assert_eq!(numbers, [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]);
}
