//! Tests of constrained answers, and of constraints that fail.

use super::scheduler::{ask, engine, options, request};
use mock_model::MockModel;
use moestro_engine::{Constraint, Finish, Handle, Options, Request, TokenMask, collect, error::EngineError};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

/// Allows exactly the sequence `tokens`. Panics if the next token is 60.
#[derive(Clone, Default)]
struct Script {
    tokens: Vec<u32>,
    accepted: Arc<Mutex<Vec<u32>>>,
    at: usize,
}

impl Constraint for Script {
    fn allowed(&mut self) -> Result<TokenMask, String> {
        assert!(self.tokens.get(self.at) != Some(&60), "test panic");
        let id = self.tokens.get(self.at).ok_or("the script is over")?;
        let mut words = vec![0; 2];
        words[*id as usize / 32] |= 1 << (id % 32);
        Ok(TokenMask::Only(words))
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.accepted.lock().unwrap().push(id);
        self.at += 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn answer(engine: &Handle, script: &Script, ignore_eos: bool) -> (Vec<u32>, Result<Finish, String>) {
    let constraint: Option<Box<dyn Constraint>> = Some(Box::new(script.clone()));
    let (tokens, end) = ask(engine, Request { ignore_eos, constraint, ..request(&[9, 8, 7], 20) });
    let reason = |error| match error {
        EngineError::Constraint(reason) => reason,
        other => panic!("{other}"),
    };
    (tokens, end.map(|(finish, _)| finish).map_err(reason))
}

#[test]
fn constrained_answer_ends_where_allowed() {
    let (engine, ..) = engine(&MockModel::default(), options());
    for ignore_eos in [false, true] {
        let script = Script { tokens: vec![40, 41, 9, 63, 2], ..Script::default() };
        assert_eq!(answer(&engine, &script, ignore_eos), (vec![40, 41, 9, 63], Ok(Finish::Stop)));
        let accepted = script.accepted.lock().unwrap();
        assert_eq!(*accepted, [40, 41, 9, 63], "every token but the end-of-sequence token");
    }
}

#[test]
fn failing_constraint_ends_only_its_request() {
    let (engine, ..) = engine(&MockModel::default(), options());
    let script = Script { tokens: vec![40, 41], ..Script::default() };
    let (tokens, end) = answer(&engine, &script, false);
    assert_eq!((tokens.len(), end), (2, Err("the script is over".into())));
    let script = Script { tokens: vec![40, 60], ..Script::default() };
    assert_eq!(answer(&engine, &script, false).1.unwrap_err(), "the grammar thread panicked");
    let script = Script { tokens: vec![5, 2], ..Script::default() };
    assert_eq!(answer(&engine, &script, false), (vec![5], Ok(Finish::Stop)));
}

#[test]
fn failing_constraint_leaves_other_requests() {
    let mock = MockModel { delay: Duration::from_millis(1), batch: 4, ..MockModel::default() };
    let (engine, ..) = engine(&mock, Options { parallel: 3, ..options() });
    let ids: Vec<u32> = (10..60).collect();
    let other = engine.submit(request(&ids, 100)).unwrap();
    for tokens in [vec![40, 60], vec![40, 41]] {
        answer(&engine, &Script { tokens, ..Script::default() }, false).1.unwrap_err();
    }
    assert_eq!(collect(other).0, ids);
}

#[test]
fn token_mask_has_one_bit_per_token() {
    let mask = TokenMask::Only(vec![1 << 31, 1]);
    assert_eq!((0..100).filter(|&id| mask.contains(id)).collect::<Vec<_>>(), [31, 32]);
    assert!(TokenMask::Any.contains(7));
}
