//! Random mixes of sequences that one model computes together, compared with each sequence alone.

use super::Dice;
use moestro_model::model::{Model, Qwen, QwenState, Rows, SequenceState};

fn tokens(dice: &mut Dice, max: usize, vocab: usize) -> Vec<u32> {
    (0..1 + dice.roll(max)).map(|_| dice.roll(vocab) as u32).collect()
}

fn start(model: &mut Qwen, prompt: &[u32]) -> QwenState {
    let mut state = model.start().unwrap();
    model.forward(&mut state, prompt, Rows::None).unwrap();
    state
}

/// Runs a random mix with tokens below `vocab`: sequences of different lengths start and end, some of them advance
/// together, others verify drafts, and others continue from a snapshot.
pub fn mix(model: &mut Qwen, seed: u64, vocab: usize) {
    let (mut dice, count) = (Dice(seed), 2 + seed as usize % 5);
    let prompts: Vec<_> = (0..count).map(|_| tokens(&mut dice, 40, vocab)).collect();
    let [mut together, mut alone] =
        [(); 2].map(|()| prompts.iter().map(|prompt| start(model, prompt)).collect::<Vec<_>>());
    for step in 0..8 {
        let one = dice.roll(count);
        match dice.roll(5) {
            0 => {
                let draft = tokens(&mut dice, 4, vocab);
                let rejected = dice.roll(draft.len());
                let [found, expected] = [&mut together[one], &mut alone[one]].map(|state| {
                    let logits = model.verify(state, &draft).unwrap();
                    state.reject(rejected).unwrap();
                    logits.data
                });
                assert!(found == expected, "mix {seed}, step {step}: a verify of sequence {one}");
            }
            1 => {
                let prompt = tokens(&mut dice, 40, vocab);
                (together[one], alone[one]) = (start(model, &prompt), start(model, &prompt));
            }
            2 => {
                let snapshot = model.snapshot(&mut together[one]).unwrap();
                together[one] = model.restore(&snapshot, None).unwrap();
            }
            _ => {}
        }
        let ids: Vec<Option<u32>> =
            (0..count).map(|_| (count == 2 || dice.roll(4) > 0).then(|| dice.roll(vocab) as u32)).collect();
        let mut rows: Vec<_> = together.iter_mut().zip(&ids).filter_map(|(state, id)| Some((state, (*id)?))).collect();
        if rows.is_empty() {
            continue;
        }
        let found = model.forward_each(&mut rows, &[]).unwrap();
        let chosen = alone.iter_mut().zip(&ids).filter_map(|(state, id)| Some((state, (*id)?)));
        for (row, (state, id)) in chosen.enumerate() {
            let expected = model.forward(state, &[id], Rows::Last).unwrap();
            assert!(found.row(row) == *expected.data, "mix {seed}, step {step}: row {row} of {ids:?}");
        }
    }
    for (mut together, mut alone) in together.into_iter().zip(alone) {
        let [together, alone] = [&mut together, &mut alone].map(|state| model.snapshot(state).unwrap());
        assert!(together.state == alone.state, "mix {seed}: states");
        assert!(together.pages.len() == alone.pages.len());
    }
}
