use super::*;
use crate::{
    engine::{Finish, Handle, Options, Request, Sampling, hear, mock::MockModel, spawn},
    metrics::Metrics,
};
use std::sync::{Arc, Mutex};

/// Only these tokens, one after the other.
#[derive(Clone, Default)]
struct Script {
    tokens: Vec<u32>,
    came: Arc<Mutex<Vec<u32>>>,
    at: usize,
}

impl Constraint for Script {
    fn allowed(&mut self) -> Result<Allowed, String> {
        assert!(self.tokens.get(self.at) != Some(&60), "told to panic");
        let id = self.tokens.get(self.at).ok_or("the script is over")?;
        let mut words = vec![0; 2];
        words[*id as usize / 32] |= 1 << (id % 32);
        Ok(Allowed::Only(words))
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.came.lock().unwrap().push(id);
        self.at += 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn engine() -> Handle {
    spawn(MockModel::default(), Options { eos: vec![2], ..Options::default() }, Metrics::new("test", "cpu")).unwrap().0
}

fn answer(engine: &Handle, script: &Script, ignore_eos: bool) -> (Vec<u32>, Result<Finish, String>) {
    let request = Request {
        ignore_eos,
        constraint: Some(Box::new(script.clone())),
        ..Request::new(vec![9, 8, 7], 20, Sampling::greedy())
    };
    let (tokens, end) = hear(engine.submit(request).unwrap());
    (tokens, end.map(|(finish, _)| finish).map_err(|error| error.to_string()))
}

#[test]
fn an_answer_keeps_to_its_form_and_ends_where_it_may() {
    let engine = engine();
    for ignore_eos in [false, true] {
        let script = Script { tokens: vec![40, 41, 9, 63, 2], ..Script::default() };
        assert_eq!(answer(&engine, &script, ignore_eos), (vec![40, 41, 9, 63], Ok(Finish::Stop)));
        assert_eq!(*script.came.lock().unwrap(), [40, 41, 9, 63], "it sees every token but the one that ends");
    }
}

#[test]
fn a_constraint_that_fails_ends_its_request_only() {
    let engine = engine();
    let script = Script { tokens: vec![40, 41], ..Script::default() };
    let (tokens, end) = answer(&engine, &script, false);
    assert_eq!((tokens.len(), end), (2, Err("the answer could not be held to its form: the script is over".into())));
    let script = Script { tokens: vec![40, 60], ..Script::default() };
    assert_eq!(answer(&engine, &script, false).1.unwrap_err(), "the answer could not be held to its form: it panicked");
    let script = Script { tokens: vec![5, 2], ..Script::default() };
    assert_eq!(answer(&engine, &script, false), (vec![5], Ok(Finish::Stop)));
}

#[test]
fn a_bit_a_token() {
    let allowed = Allowed::Only(vec![1 << 31, 1]);
    assert_eq!((0..100).filter(|&id| allowed.contains(id)).collect::<Vec<_>>(), [31, 32]);
    assert!(Allowed::Any.contains(7));
}

#[test]
fn a_copy_is_behind_what_was_drawn_and_goes_its_own_way() {
    let script = Script { tokens: vec![5, 6, 7, 8], ..Script::default() };
    let ahead = Ahead::start(Box::new(script)).unwrap();
    assert!(ahead.allowed().unwrap().contains(5));
    ahead.drew(5);
    let mut copy = ahead.fork().unwrap();
    assert!(copy.allowed().unwrap().contains(6));
    copy.accept(6).unwrap();
    assert!(copy.allowed().unwrap().contains(7));
    assert!(ahead.allowed().unwrap().contains(6) && !Allowed::Only(vec![0]).contains(6));
    ahead.drew(6);
    assert!(ahead.allowed().unwrap().contains(7));
}
