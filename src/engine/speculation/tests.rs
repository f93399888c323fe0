use super::*;
use crate::engine::{Allowed, Event, Finish, Options, Request, Sampling, hear, mock::MockModel, spawn_with};
use crate::model::{HiddenTaps, PassHooks};

struct Answer {
    ids: Vec<u32>,
    finish: Finish,
    timings: Timings,
    logprobs: Vec<Option<f32>>,
}

fn answer(mock: MockModel, speculate: Speculate, draft_tokens: usize, request: &Request) -> Answer {
    answer_with(Box::new(Lookup), mock, speculate, draft_tokens, request)
}

fn answer_with(
    draft: Box<dyn Draft<MockModel>>,
    mock: MockModel,
    speculate: Speculate,
    draft_tokens: usize,
    request: &Request,
) -> Answer {
    let options = Options { eos: vec![mock.eos], speculate, draft_tokens, ..Options::default() };
    let metrics = Metrics::new("test", "cpu");
    let (engine, worker) = spawn_with(mock, draft, options, metrics.clone()).unwrap();
    let mut events = engine.submit(request.clone()).unwrap();
    let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
    let (finish, timings) = loop {
        match events.blocking_recv().unwrap() {
            Event::Token { id, logprobs: found } => {
                ids.push(id);
                logprobs.push(found.map(|found| found.logprob));
            }
            Event::Done { finish, timings } => break (finish, timings),
            Event::Failed(error) => panic!("{error}"),
            Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_) => {}
        }
    };
    // The next request goes on from this one's session: what was taken back must be gone.
    let mut again = request.clone();
    again.ids.extend(&ids);
    again.ids.push(40);
    let mut events = engine.submit(again).unwrap();
    while let Some(event) = events.blocking_recv() {
        if let Event::Started { cached_tokens, .. } = event {
            assert!(cached_tokens + 1 >= request.ids.len() + ids.len().saturating_sub(1), "{cached_tokens}");
        }
    }
    let counted = |outcome| metrics.draft_tokens.with_label_values(&["lookup", outcome]).get();
    let counted = counted("accepted") + counted("rejected");
    assert!(counted >= timings.drafted_tokens as u64);
    let states = ["calibrate", "plain", "probe", "speculate"];
    let changes: u64 = states.iter().map(|state| metrics.draft_states.with_label_values(&[state]).get()).sum();
    assert!(changes == 0 || speculate == Speculate::Auto, "nothing else changes its mind");
    drop(engine);
    worker.join().unwrap();
    Answer { ids, finish, timings, logprobs }
}

fn request(ids: &[u32], max_tokens: usize, sampling: Sampling) -> Request {
    Request { logprobs: Some(0), ..Request::new(ids.to_vec(), max_tokens, sampling) }
}

#[test]
fn the_answer_is_the_same_with_and_without() {
    let prompt: Vec<u32> = (0..40).map(|n| [5, 6, 7, 8, 9, 5, 6, 11][n % 8] + (n as u32 / 16)).collect();
    // The mock's answer is in the prompt in part only, so that drafts are right for a while, then wrong.
    let said: Vec<u32> = prompt.iter().enumerate().map(|(n, &id)| if n % 7 == 6 { 30 } else { id }).collect();
    let seeded = |temperature| Sampling { temperature, seed: Some(3), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 9.0, presence_penalty: 1.0, repetition_penalty: 1.3, ..seeded(0.7) };
    let biased = Sampling { logit_bias: vec![(6, -80.0), (31, 20.0)], ..seeded(1.0) };
    for sampling in [seeded(0.0), seeded(0.7), seeded(13.0), penal, biased] {
        for (margin, max_tokens) in [(50.0, 100), (50.0, 13), (4.0, 60)] {
            let mock = || MockModel { answer: Some(said.clone()), margin, ..MockModel::default() };
            let request = request(&prompt, max_tokens, sampling.clone());
            let plain = answer(mock(), Speculate::Off, 0, &request);
            assert_eq!(plain.timings.drafted_tokens, 0);
            for width in [1, 3, 7, 15] {
                let forced = answer(mock(), Speculate::Force, width, &request);
                assert_eq!((&forced.ids, forced.finish), (&plain.ids, plain.finish), "{sampling:?} {width}");
                assert_eq!(forced.logprobs, plain.logprobs);
                if margin > 10.0 && sampling.temperature < 1.0 && sampling.frequency_penalty == 0.0 {
                    let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = forced.timings;
                    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}: the test must not be empty");
                }
            }
        }
    }
}

thread_local! {
    static CLOCK: std::cell::Cell<Instant> = std::cell::Cell::new(Instant::now());
}

/// A greedy answer on [`CLOCK`], of which each pass takes a millisecond however many rows it has; and how long it took.
fn timed(mut mock: MockModel, speculate: Speculate, request: &Request) -> (Vec<u32>, Duration, Timings) {
    let options = Options { speculate, draft_tokens: 7, ..Options::default() };
    let mut speculation = Speculation::new(&mut mock, Box::new(Lookup), &options, Metrics::new("test", "cpu"));
    speculation.now = || CLOCK.get();
    let mut session = Session::start(&mock).unwrap();
    speculation.start(&mut mock, false);
    let logits = session.extend(&mut mock, &request.ids, Rows::Last, &mut PassHooks::default()).unwrap();
    let (mut step, mut timings) = (Step::first(logits), Timings::default());
    let mut sampler = Sampler::new(request.sampling.clone(), &request.ids, usize::MAX);
    let (mut told, begun) = (Vec::new(), CLOCK.get());
    loop {
        let id = sampler.draw(step.row().unwrap(), &Allowed::Any).unwrap();
        told.push(id);
        if told.len() == request.max_tokens {
            return (told, CLOCK.get() - begun, timings);
        }
        let drawn = Drawn { id, sampler: &sampler, ahead: None, room: request.max_tokens - told.len() };
        speculation.advance(&mut session, &mut mock, &mut step, &drawn, &mut timings).unwrap();
        // A row that is not the first is of the pass before.
        if step.row == 0 {
            CLOCK.set(CLOCK.get() + Duration::from_millis(1));
        }
    }
}

#[test]
fn rows_that_are_cheap_together_are_speculated_with() {
    let mock = MockModel { context: 900, ..MockModel::default() };
    let prompt: Vec<u32> = (0..400).map(|n| 3 + (n * n + n / 7) % 60).collect();
    let request = request(&prompt, 390, Sampling::greedy());
    let (ids, plain, _) = timed(mock.clone(), Speculate::Off, &request);
    assert_eq!((plain, &ids[..]), (Duration::from_millis(389), &prompt[..390]));
    let (auto, took, timings) = timed(mock, Speculate::Auto, &request);
    assert_eq!(auto, ids);
    assert!(timings.accepted_tokens > 200 && took < plain.mul_f64(0.5), "{took:?} {timings:?}");
    let saved = (plain - took).as_secs_f64();
    assert!((0.9 * saved..1.1 * saved).contains(&timings.saved_seconds), "{took:?} {timings:?}");
}

/// Knows what the mock says, and is shown its tokens as hidden rows.
struct Oracle {
    answer: Vec<u32>,
    /// Of each of the last tokens: its place and the row it left.
    followed: Vec<(usize, f32)>,
    /// Fails once the sequence is so long.
    fails_at: usize,
}

impl Draft<MockModel> for Oracle {
    fn kind(&self) -> Kind {
        Kind::Lookup
    }

    fn taps(&self) -> HiddenTaps {
        HiddenTaps { layers: vec![3, 5], rows: 4 }
    }

    fn start(&mut self) {
        self.followed.clear();
    }

    fn follow(&mut self, len: usize, hidden: &[f32]) {
        let rows = hidden.len() / 2;
        assert!(rows <= 4 && hidden.as_chunks::<2>().0.iter().all(|row| row[0] == row[1]));
        self.followed.extend(hidden.iter().step_by(2).enumerate().map(|(row, value)| (len - rows + row, *value)));
    }

    fn propose(
        &mut self,
        mock: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        if sequence.end() >= self.fails_at {
            self.fails_at = usize::MAX;
            out.push(7);
            return Err(ModelError::Config("told to fail".into()));
        }
        for (place, value) in &self.followed {
            assert_eq!(sequence.get(*place).map(|id| id as f32), Some(*value), "at {place}");
        }
        let last = self.followed.last().map(|last| last.0 + 1);
        assert_eq!(last, Some(sequence.seen.len()), "every pass was followed");
        let said = self.answer.iter().position(|id| *id == sequence.last).map_or(0, |at| at + 1);
        for id in self.answer[said..].iter().take(most) {
            let mut logits = vec![0.0; mock.vocab];
            logits[*id as usize] = mock.margin;
            out.extend(outlook.draw(&logits));
        }
        Ok(())
    }
}

#[test]
fn a_draft_is_shown_every_row_that_stays() {
    let said: Vec<u32> = (10..50).collect();
    let mock = || MockModel { answer: Some(said.clone()), context: 200, ..MockModel::default() };
    for temperature in [0.0, 30.0] {
        let sampling = Sampling { temperature, seed: Some(9), ..Sampling::default() };
        let request = request(&[5, 6, 7, 5, 8, 9, 5, 6, 7, 5, 8], 100, sampling);
        let plain = answer(mock(), Speculate::Off, 0, &request);
        let oracle = Oracle { answer: said.clone(), followed: Vec::new(), fails_at: usize::MAX };
        let forced = answer_with(Box::new(oracle), mock(), Speculate::Force, 3, &request);
        assert_eq!(forced.ids, plain.ids);
        let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = forced.timings;
        assert!(drafted > 0 && accepted > 0, "{accepted} of {drafted} at {temperature}");
        // At a temperature at which everything is likely, too, the sampler's own numbers draw the drafts.
        assert!(temperature > 0.0 || accepted + 1 >= drafted, "{accepted} of {drafted}");
    }
}

#[test]
fn a_draft_that_fails_is_not_asked_again() {
    let said: Vec<u32> = (10..50).collect();
    let mock = || MockModel { answer: Some(said.clone()), context: 200, ..MockModel::default() };
    let request = request(&[5, 6, 7], 100, Sampling::greedy());
    let oracle = Oracle { answer: said.clone(), followed: Vec::new(), fails_at: 20 };
    let forced = answer_with(Box::new(oracle), mock(), Speculate::Force, 3, &request);
    assert_eq!(forced.ids, said);
    assert!((1..20).contains(&forced.timings.drafted_tokens), "{:?}", forced.timings);
}

#[test]
fn a_draft_does_not_reach_beyond_the_context() {
    let said: Vec<u32> = (10..50).collect();
    for context in 17..25 {
        let mock = MockModel { answer: Some(said.clone()), context, ..MockModel::default() };
        let oracle = Oracle { answer: said.clone(), followed: Vec::new(), fails_at: usize::MAX };
        let options = Options { eos: vec![2], speculate: Speculate::Force, draft_tokens: 3, ..Options::default() };
        let (engine, worker) = spawn_with(mock, Box::new(oracle), options, Metrics::new("test", "cpu")).unwrap();
        let (told, end) = hear(engine.submit(request(&[5, 6, 7], 100, Sampling::greedy())).unwrap());
        let (finish, timings) = end.unwrap();
        // The last token is told and not evaluated.
        assert_eq!((&told[..], finish), (&said[..context - 2], Finish::Length), "a context of {context}");
        assert!(timings.drafted_tokens > 0);
        drop(engine);
        worker.join().unwrap();
    }
}

/// A draft that is always wrong.
struct Wrong;

impl Draft<MockModel> for Wrong {
    fn kind(&self) -> Kind {
        Kind::Dflash
    }

    fn propose(
        &mut self,
        _: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        _: Sequence<'_>,
        most: usize,
        _: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        out.resize(most, 1);
        Ok(())
    }
}

#[test]
fn a_draft_that_does_not_fit_is_switched_off_unless_it_is_forced() {
    for (speculate, kept) in [(Speculate::Auto, false), (Speculate::Force, true)] {
        let options = Options { speculate, ..Options::default() };
        let metrics = Metrics::new("test", "cpu");
        let mut speculation = Speculation::new(&mut MockModel::default(), Box::new(Wrong), &options, metrics);
        (0..11).for_each(|_| speculation.judge(Kind::Dflash, 0));
        assert!(speculation.draft.is_some());
        speculation.judge(Kind::Dflash, 0);
        assert_eq!(speculation.draft.is_some(), kept);
        let mut looked_up =
            Speculation::new(&mut MockModel::default(), Box::new(Lookup), &options, speculation.metrics);
        (0..100).for_each(|_| looked_up.judge(Kind::Lookup, 0));
        assert!(looked_up.draft.is_some());
    }
}

/// Counts how often a sequence begins for it.
struct Begins(Arc<std::sync::atomic::AtomicUsize>);

impl Draft<MockModel> for Begins {
    fn kind(&self) -> Kind {
        Kind::Model
    }

    fn start(&mut self) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn propose(
        &mut self,
        _: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        _: Sequence<'_>,
        _: usize,
        _: &mut Outlook<'_>,
        _: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        Ok(())
    }
}

#[test]
fn a_draft_is_told_of_each_sequence_that_does_not_go_on() {
    let begun = Arc::<std::sync::atomic::AtomicUsize>::default();
    let options = Options { eos: vec![2], speculate: Speculate::Force, draft_tokens: 3, ..Options::default() };
    let metrics = Metrics::new("test", "cpu");
    let (engine, worker) = spawn_with(MockModel::default(), Box::new(Begins(begun.clone())), options, metrics).unwrap();
    for (ids, times) in [(&[9u32, 5, 6][..], 1), (&[9, 5, 6, 9, 5, 6, 2, 30], 1), (&[8, 7], 2), (&[9, 5, 6], 3)] {
        let mut events = engine.submit(request(ids, 100, Sampling::greedy())).unwrap();
        while events.blocking_recv().is_some() {}
        assert_eq!(begun.load(std::sync::atomic::Ordering::Relaxed), times, "{ids:?}");
    }
    drop(engine);
    worker.join().unwrap();
}
