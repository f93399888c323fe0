use super::*;
use crate::{Event, Finish, LookupDraft, Options, Request, Sampling, TokenMask, collect, spawn_with};
use mock_model::MockModel;
use moestro_model::model::HiddenTaps;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Answer {
    ids: Vec<u32>,
    finish: Finish,
    timings: Timings,
    logprobs: Vec<Option<f32>>,
}

fn answer(mock: MockModel, mode: DraftPolicy, draft_tokens: usize, request: &Request) -> Answer {
    answer_with(Box::new(LookupDraft), mock, mode, draft_tokens, request)
}

fn answer_with(
    draft: Box<dyn Draft<MockModel>>,
    mock: MockModel,
    mode: DraftPolicy,
    draft_tokens: usize,
    request: &Request,
) -> Answer {
    let options = Options { eos: vec![mock.eos], speculate: mode, draft_tokens, ..Options::default() };
    let metrics = Metrics::new("test", "cpu");
    let (engine, worker) = spawn_with(mock, draft, options, metrics.clone()).unwrap();
    let mut events = engine.submit(request.clone()).unwrap();
    let mut ids = Vec::new();
    let mut logprobs = Vec::new();
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
    // The next request extends the sequence of this request, so rejected tokens must have been removed.
    let mut next = request.clone();
    next.ids.extend(&ids);
    next.ids.push(40);
    let mut events = engine.submit(next).unwrap();
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
    assert!(changes == 0 || mode == DraftPolicy::Auto, "only auto changes its state");
    drop(engine);
    worker.join().unwrap();
    Answer { ids, finish, timings, logprobs }
}

fn request(ids: &[u32], max_tokens: usize, sampling: Sampling) -> Request {
    Request { logprobs: Some(0), ..Request::new(ids.to_vec(), max_tokens, sampling) }
}

#[test]
fn drafts_do_not_change_the_answer() {
    let prompt: Vec<u32> = (0..40).map(|n| [5, 6, 7, 8, 9, 5, 6, 11][n % 8] + (n as u32 / 16)).collect();
    // The prompt contains only parts of the mock's answer, so the model accepts some drafted tokens and rejects other
    // drafted tokens.
    let spoken: Vec<u32> = prompt.iter().enumerate().map(|(n, &id)| if n % 7 == 6 { 30 } else { id }).collect();
    let seeded = |temperature| Sampling { temperature, seed: Some(3), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 9.0, presence_penalty: 1.0, repetition_penalty: 1.3, ..seeded(0.7) };
    let biased = Sampling { logit_bias: vec![(6, -80.0), (31, 20.0)], ..seeded(1.0) };
    for sampling in [seeded(0.0), seeded(0.7), seeded(13.0), penal, biased] {
        for (margin, max_tokens) in [(50.0, 100), (50.0, 13), (4.0, 60)] {
            let mock = || MockModel { answer: Some(spoken.clone()), margin, ..MockModel::default() };
            let request = request(&prompt, max_tokens, sampling.clone());
            let plain = answer(mock(), DraftPolicy::Off, 0, &request);
            assert_eq!(plain.timings.drafted_tokens, 0);
            for width in [1, 3, 7, 15] {
                let forced = answer(mock(), DraftPolicy::Force, width, &request);
                assert_eq!((&forced.ids, forced.finish), (&plain.ids, plain.finish), "{sampling:?} {width}");
                assert_eq!(forced.logprobs, plain.logprobs);
                if margin > 10.0 && sampling.temperature < 1.0 && sampling.frequency_penalty == 0.0 {
                    let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = forced.timings;
                    assert!(0 < accepted && accepted < drafted, "only one outcome: {accepted} of {drafted}");
                }
            }
        }
    }
}

thread_local! {
    static CLOCK: std::cell::Cell<Instant> = std::cell::Cell::new(Instant::now());
}

/// Generates a greedy answer on [`CLOCK`]. Each pass takes a millisecond, regardless of its number of rows. Returns the
/// answer, the elapsed time and the timings.
fn timed(mut mock: MockModel, mode: DraftPolicy, request: &Request) -> (Vec<u32>, Duration, Timings) {
    let mut speculator = Speculator::new(&mut mock, Box::new(LookupDraft), mode, 7, Metrics::new("test", "cpu"));
    speculator.now = || CLOCK.get();
    let mut sequence = Sequence::start(&mut mock).unwrap();
    speculator.start(&mut mock);
    speculator.follow(Some(&sequence));
    let logits = sequence.extend(&mut mock, &request.ids, Rows::Last, &mut PassHooks::default()).unwrap();
    let mut rows = PendingRows::last_of(logits);
    let mut timings = Timings::default();
    let mut sampler = Sampler::new(request.sampling.clone(), &request.ids, usize::MAX);
    let mut ids = Vec::new();
    let begun = CLOCK.get();
    loop {
        let id = sampler.draw_from(rows.current().unwrap(), &TokenMask::Any).unwrap();
        ids.push(id);
        if ids.len() == request.max_tokens {
            return (ids, CLOCK.get() - begun, timings);
        }
        let token = SampledToken {
            id,
            sampler: &sampler,
            masks: None,
            needs_logits: false,
            remaining: request.max_tokens - ids.len(),
            is_alone: true,
        };
        speculator.advance(&mut sequence, &mut mock, &mut rows, &token, &mut timings).unwrap();
        let has_logits = matches!(rows.current(), Some(RowOutput::Logits(_)));
        assert_eq!(has_logits, rows.len() == 1, "a greedy answer needs no logits of drafted rows");
        // Later rows belong to the same pass, so they take no additional time.
        if rows.current == 0 {
            CLOCK.set(CLOCK.get() + Duration::from_millis(1));
        }
    }
}

#[test]
fn cheap_verify_rows_enable_speculation() {
    let mock = MockModel { context: 900, ..MockModel::default() };
    let prompt: Vec<u32> = (0..400).map(|n| 3 + (n * n + n / 7) % 60).collect();
    let request = request(&prompt, 390, Sampling::greedy());
    let (ids, plain, _) = timed(mock.clone(), DraftPolicy::Off, &request);
    assert_eq!((plain, &ids[..]), (Duration::from_millis(389), &prompt[..390]));
    let (auto, took, timings) = timed(mock, DraftPolicy::Auto, &request);
    assert_eq!(auto, ids);
    assert!(timings.accepted_tokens > 200 && took < plain.mul_f64(0.5), "{took:?} {timings:?}");
    let saved = (plain - took).as_secs_f64();
    assert!((0.9 * saved..1.1 * saved).contains(&timings.saved_seconds), "{took:?} {timings:?}");
}

/// A draft that knows the mock's answer and receives its tokens as hidden rows.
struct Oracle {
    answer: Vec<u32>,
    /// Position and hidden row of each observed token.
    observed: Vec<(usize, f32)>,
    /// The draft fails when the sequence has this number of tokens.
    fails_at: usize,
}

impl Draft<MockModel> for Oracle {
    fn kind(&self) -> DraftKind {
        DraftKind::Lookup
    }

    fn taps(&self) -> HiddenTaps {
        HiddenTaps { layers: vec![3, 5], rows: 4 }
    }

    fn start(&mut self) {
        self.observed.clear();
    }

    fn observe(&mut self, len: usize, hidden: &[f32]) {
        let rows = hidden.len() / 2;
        assert!(rows <= 4 && hidden.as_chunks::<2>().0.iter().all(|row| row[0] == row[1]));
        self.observed.extend(hidden.iter().step_by(2).enumerate().map(|(row, value)| (len - rows + row, *value)));
    }

    fn propose(
        &mut self,
        mock: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        request: DraftRequest<'_>,
    ) -> Result<(), ModelError> {
        let DraftRequest { history, max, mut sampler, out } = request;
        if history.end() >= self.fails_at {
            self.fails_at = usize::MAX;
            out.push(7);
            return Err(ModelError::Config("test error".into()));
        }
        for (position, value) in &self.observed {
            assert_eq!(history.get(*position).map(|id| id as f32), Some(*value), "at {position}");
        }
        let end = self.observed.last().map(|last| last.0 + 1);
        assert_eq!(end, Some(history.evaluated.len()), "every pass was observed");
        let next = self.answer.iter().position(|id| *id == history.last).map_or(0, |at| at + 1);
        for id in self.answer[next..].iter().take(max) {
            let mut logits = vec![0.0; mock.vocab];
            logits[*id as usize] = mock.margin;
            out.extend(sampler.draw(&logits));
        }
        Ok(())
    }
}

#[test]
fn draft_observes_every_accepted_row() {
    let spoken: Vec<u32> = (10..50).collect();
    let mock = || MockModel { answer: Some(spoken.clone()), context: 200, ..MockModel::default() };
    for temperature in [0.0, 30.0] {
        let sampling = Sampling { temperature, seed: Some(9), ..Sampling::default() };
        let request = request(&[5, 6, 7, 5, 8, 9, 5, 6, 7, 5, 8], 100, sampling);
        let plain = answer(mock(), DraftPolicy::Off, 0, &request);
        let oracle = Oracle { answer: spoken.clone(), observed: Vec::new(), fails_at: usize::MAX };
        let forced = answer_with(Box::new(oracle), mock(), DraftPolicy::Force, 3, &request);
        assert_eq!(forced.ids, plain.ids);
        let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = forced.timings;
        assert!(drafted > 0 && accepted > 0, "{accepted} of {drafted} at {temperature}");
        // Drafts use the sampler's random numbers. In a greedy answer, the model therefore accepts almost all drafted
        // tokens.
        assert!(temperature > 0.0 || accepted + 1 >= drafted, "{accepted} of {drafted}");
    }
}

#[test]
fn failed_draft_is_not_used_again() {
    let spoken: Vec<u32> = (10..50).collect();
    let mock = || MockModel { answer: Some(spoken.clone()), context: 200, ..MockModel::default() };
    let request = request(&[5, 6, 7], 100, Sampling::greedy());
    let oracle = Oracle { answer: spoken.clone(), observed: Vec::new(), fails_at: 20 };
    let forced = answer_with(Box::new(oracle), mock(), DraftPolicy::Force, 3, &request);
    assert_eq!(forced.ids, spoken);
    assert!((1..20).contains(&forced.timings.drafted_tokens), "{:?}", forced.timings);
}

#[test]
fn drafts_end_at_the_context_limit() {
    let spoken: Vec<u32> = (10..50).collect();
    for context in 17..25 {
        let mock = MockModel { answer: Some(spoken.clone()), context, ..MockModel::default() };
        let oracle = Oracle { answer: spoken.clone(), observed: Vec::new(), fails_at: usize::MAX };
        let options = Options { eos: vec![2], speculate: DraftPolicy::Force, draft_tokens: 3, ..Options::default() };
        let (engine, worker) = spawn_with(mock, Box::new(oracle), options, Metrics::new("test", "cpu")).unwrap();
        let (ids, end) = collect(engine.submit(request(&[5, 6, 7], 100, Sampling::greedy())).unwrap());
        let (finish, timings) = end.unwrap();
        // The last token of an answer is sent but not evaluated.
        assert_eq!((&ids[..], finish), (&spoken[..context - 2], Finish::Length), "a context of {context}");
        assert!(timings.drafted_tokens > 0);
        drop(engine);
        worker.join().unwrap();
    }
}

/// A draft whose tokens are always rejected.
struct Wrong;

impl Draft<MockModel> for Wrong {
    fn kind(&self) -> DraftKind {
        DraftKind::Dflash
    }

    fn propose(
        &mut self,
        _: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        request: DraftRequest<'_>,
    ) -> Result<(), ModelError> {
        request.out.resize(request.max, 1);
        Ok(())
    }
}

#[test]
fn rejected_draft_is_disabled_unless_forced() {
    for (mode, kept) in [(DraftPolicy::Auto, false), (DraftPolicy::Force, true)] {
        let metrics = Metrics::new("test", "cpu");
        let mut speculator = Speculator::new(&mut MockModel::default(), Box::new(Wrong), mode, 7, metrics.clone());
        (0..47).for_each(|_| speculator.check_acceptance(DraftKind::Dflash, 0));
        assert!(speculator.draft.is_some());
        speculator.check_acceptance(DraftKind::Dflash, 0);
        assert_eq!(speculator.draft.is_some(), kept);
        let mut lookup = Speculator::new(&mut MockModel::default(), Box::new(LookupDraft), mode, 7, metrics);
        (0..100).for_each(|_| lookup.check_acceptance(DraftKind::Lookup, 0));
        assert!(lookup.draft.is_some());
    }
}

/// A draft that counts calls of [`Draft::start`].
struct CountStarts(Arc<AtomicUsize>);

impl Draft<MockModel> for CountStarts {
    fn kind(&self) -> DraftKind {
        DraftKind::Model
    }

    fn start(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn propose(
        &mut self,
        _: &mut MockModel,
        _: &mut <MockModel as Model>::State,
        _: DraftRequest<'_>,
    ) -> Result<(), ModelError> {
        Ok(())
    }
}

#[test]
fn draft_starts_with_each_new_sequence() {
    let starts = Arc::<AtomicUsize>::default();
    let options = Options { eos: vec![2], speculate: DraftPolicy::Force, draft_tokens: 3, ..Options::default() };
    let metrics = Metrics::new("test", "cpu");
    let (engine, worker) =
        spawn_with(MockModel::default(), Box::new(CountStarts(starts.clone())), options, metrics).unwrap();
    for (ids, times) in [(&[9u32, 5, 6][..], 1), (&[9, 5, 6, 9, 5, 6, 2, 30], 1), (&[8, 7], 2), (&[9, 5, 6], 3)] {
        let mut events = engine.submit(request(ids, 100, Sampling::greedy())).unwrap();
        while events.blocking_recv().is_some() {}
        assert_eq!(starts.load(Ordering::Relaxed), times, "{ids:?}");
    }
    drop(engine);
    worker.join().unwrap();
}
