//! [`MockModel`]: a test double that repeats its prompt. Tests of engine and server use it instead of a checkpoint.

mod copied_pages;

use copied_pages::CopiedPages;
use moestro_base::error::StoreError;
use moestro_compute::device::CpuDevice;
use moestro_model::{
    error::ModelError,
    model::{
        HiddenStates, HiddenTaps, Logits, Model, ModelInfo, NextToken, PageSize, PassHooks, Rows, SequenceState,
        Snapshot, SnapshotSize, logits::argmax,
    },
};
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// A model that answers with its prompt, or with [`MockModel::answer`], and then with [`MockModel::eos`].
///
/// The most likely next token depends only on the sequence. While the last tokens match the start of the answer, the
/// model continues the answer. A token that does not match counts as a part of the prompt, and the answer starts again
/// after this token. The end of a prompt must therefore not match the start of its answer.
#[derive(Debug, Clone)]
pub struct MockModel {
    pub vocab: usize,
    pub context: usize,
    pub chunk: usize,
    pub batch: usize,
    /// The threads of [`ModelInfo::threads`].
    pub compute: Option<CpuDevice>,
    pub eos: u32,
    /// The answer to every prompt. If `None`, the answer repeats the prompt.
    pub answer: Option<Vec<u32>>,
    /// The logit of the most likely token. The other logits are between 0 and 1.
    pub margin: f32,
    /// Time to evaluate one token.
    pub delay: Duration,
    /// The model evaluates this many tokens and then waits until a test sets a larger number. Clones share it.
    pub stops_at: Arc<AtomicUsize>,
    /// Called for each pass with its number of tokens.
    pub on_pass: fn(usize),
    /// A pass with this token returns an error.
    pub fails_on: Option<u32>,
    /// A pass with this token panics.
    pub panics_on: Option<u32>,
    /// If true, taking a snapshot during or after an answer fails.
    pub answer_snapshots_fail: bool,
    /// If true, evaluates tokens ahead: the most likely tokens, except that every seventh is wrong. Panics if the
    /// engine then continues with another token.
    pub decodes_ahead: bool,
    /// If true, the next call of [`Model::recover`] reports that the device was lost.
    pub loses_device: Arc<AtomicBool>,
    /// Number of calls of [`Model::recover`]. Clones of the mock share this counter and the next three counters.
    pub recovered: Arc<AtomicUsize>,
    /// Number of tokens evaluated.
    pub evaluated: Arc<AtomicUsize>,
    /// Number of rows of logits computed.
    pub rows: Arc<AtomicUsize>,
    /// Number of logits of earlier passes that were still in use at the start of passes that decode.
    pub used_logits: Arc<AtomicUsize>,
    /// The logits that passes have returned.
    pub returned: Vec<Weak<Vec<f32>>>,
    /// The requested hidden rows. A hidden row contains the id of its token, once per layer.
    pub taps: HiddenTaps,
    /// The tokens of the last pass.
    pub last: Vec<u32>,
    /// Every state and every clone of the mock holds a reference. The reference count shows how many of them exist.
    pub states: Arc<()>,
}

impl Default for MockModel {
    fn default() -> Self {
        Self {
            vocab: 64,
            context: 256,
            chunk: 8,
            batch: 1,
            compute: None,
            eos: 2,
            answer: None,
            margin: 50.0,
            delay: Duration::ZERO,
            stops_at: Arc::new(usize::MAX.into()),
            on_pass: |_| {},
            fails_on: None,
            panics_on: None,
            answer_snapshots_fail: false,
            decodes_ahead: false,
            loses_device: Arc::default(),
            recovered: Arc::default(),
            evaluated: Arc::default(),
            rows: Arc::default(),
            used_logits: Arc::default(),
            returned: Vec::new(),
            taps: HiddenTaps::default(),
            last: Vec::new(),
            states: Arc::default(),
        }
    }
}

/// The state of a sequence: all tokens, the number of prompt tokens, and the number of answer tokens after them.
pub struct MockState {
    tokens: Vec<u32>,
    prompt: usize,
    answered: usize,
    /// The pair `(prompt, answered)` before each token, for [`SequenceState::reject`].
    before: Vec<(usize, usize)>,
    /// The token that was evaluated ahead, and the logits after it.
    ahead: Option<(u32, Result<Vec<f32>, ModelError>)>,
    frozen: CopiedPages,
    _alive: Arc<()>,
}

impl MockModel {
    /// The most likely token after `state`.
    fn next(&self, state: &MockState) -> u32 {
        let answer = self.answer.as_deref().unwrap_or(&state.tokens[..state.prompt]);
        answer.get(state.answered).copied().unwrap_or(self.eos)
    }

    fn append(&self, state: &mut MockState, id: u32) {
        let is_answer = state.prompt > 0 && id == self.next(state);
        state.before.push((state.prompt, state.answered));
        state.tokens.push(id);
        if is_answer {
            state.answered += 1;
        } else {
            state.prompt = state.tokens.len();
            state.answered = 0;
        }
    }

    fn count_used_logits(&self) {
        let used = self.returned.iter().filter(|logits| logits.strong_count() > 0).count();
        self.used_logits.fetch_add(used, Ordering::Relaxed);
    }

    fn logits(&mut self, data: Vec<f32>) -> Logits {
        let logits = Logits { vocab: self.vocab, data: data.into() };
        self.returned.push(Arc::downgrade(&logits.data));
        logits
    }

    /// Appends `ids` and returns the data of their logits.
    fn evaluate(
        &mut self,
        state: &mut MockState,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Vec<f32>, ModelError> {
        assert!(state.ahead.is_none(), "the sequence contains another token");
        let mut logits = Vec::new();
        self.last = ids.to_vec();
        (self.on_pass)(ids.len());
        for (index, &id) in ids.iter().enumerate() {
            std::thread::sleep(self.delay);
            while self.evaluated.load(Ordering::Relaxed) >= self.stops_at.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if hooks.keep_going.is_some_and(|keep_going| !keep_going()) {
                return Err(ModelError::GivenUp);
            }
            self.evaluated.fetch_add(1, Ordering::Relaxed);
            assert!(Some(id) != self.panics_on, "test panic on token {id}");
            if Some(id) == self.fails_on {
                return Err(StoreError::Other(format!("test error on token {id}")).into());
            }
            if state.tokens.len() == self.context {
                return Err(ModelError::ContextFull { context: self.context });
            }
            self.append(state, id);
            if hooks.snapshot_at.contains(&state.tokens.len()) {
                hooks.snapshots.push(self.snapshot(state)?);
            }
            if matches!(rows, Rows::All | Rows::Verify) || (rows == Rows::Last && index + 1 == ids.len()) {
                self.rows.fetch_add(1, Ordering::Relaxed);
                let next = self.next(state) as usize;
                let length = state.tokens.len() as u32;
                logits.extend((0..self.vocab as u32).map(|token| noise(token, length)));
                let row = logits.len() - self.vocab;
                logits[row + next] = self.margin;
            }
        }
        Ok(logits)
    }
}

impl Model for MockModel {
    type State = MockState;

    fn info(&self) -> ModelInfo {
        ModelInfo {
            vocab: self.vocab,
            context: self.context,
            chunk: self.chunk,
            batch: self.batch,
            exact_chunks: true,
            snapshot_size: SnapshotSize { state: 8, page: PageSize::without_indexer(4) },
            pages: None,
            images: None,
            threads: self.compute.as_ref().map(|compute| compute.threads.clone()),
        }
    }

    fn start(&mut self) -> Result<MockState, ModelError> {
        let frozen = CopiedPages::default();
        let _alive = self.states.clone();
        Ok(MockState { tokens: Vec::new(), prompt: 0, answered: 0, before: Vec::new(), ahead: None, frozen, _alive })
    }

    fn forward_with(
        &mut self,
        state: &mut MockState,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        if ids.len() == 1 {
            self.count_used_logits();
        }
        let logits = match state.ahead.take() {
            Some((id, logits)) => {
                assert_eq!((ids, rows), (&[id][..], Rows::Last), "the sequence contains another token");
                logits?
            }
            None => self.evaluate(state, ids, rows, hooks)?,
        };
        if let (Some(usable), Rows::Verify) = (hooks.likeliest_below, rows) {
            let likeliest = |row: &[f32]| argmax(&row[..usable.min(row.len())]).unwrap_or(u32::MAX);
            hooks.likeliest = logits.chunks(self.vocab).map(likeliest).collect();
            return Ok(Logits::default());
        }
        if let Some(NextToken { usable, .. }) =
            hooks.next.filter(|_| self.decodes_ahead && state.tokens.len() < self.context)
        {
            let is_wrong = state.tokens.len().is_multiple_of(7);
            let next = if is_wrong { 63 } else { argmax(&logits[..usable.min(self.vocab)]).unwrap_or(0) };
            let after = self.evaluate(state, &[next], Rows::Last, &mut PassHooks::default());
            state.ahead = Some((next, after));
        }
        Ok(self.logits(logits))
    }

    fn forward_each(&mut self, rows: &mut [(&mut MockState, u32)], _: &[NextToken]) -> Result<Logits, ModelError> {
        self.count_used_logits();
        let mut logits = Vec::new();
        for (state, id) in rows {
            logits.extend(self.evaluate(state, &[*id], Rows::Last, &mut PassHooks::default())?);
        }
        Ok(self.logits(logits))
    }

    /// In a snapshot, the tokens take the place of keys and values (4 bytes per position), and the two counts take the
    /// place of the recurrent state.
    fn snapshot(&mut self, state: &mut MockState) -> Result<Snapshot, ModelError> {
        if self.answer_snapshots_fail && state.answered > 0 {
            return Err(ModelError::Memory("test error: no snapshot of an answer".into()));
        }
        let MockState { tokens, prompt, answered, frozen, .. } = state;
        let counts = [*prompt, *answered].into_iter().flat_map(|count| (count as u32).to_le_bytes()).collect();
        frozen.snapshot(tokens.len(), counts, |range| {
            Ok(tokens[range].iter().flat_map(|token| token.to_le_bytes()).collect())
        })
    }

    fn restore(&mut self, snapshot: &Snapshot, into: Option<MockState>) -> Result<MockState, ModelError> {
        let mut state = into.map_or_else(|| self.start(), Ok)?;
        let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect::<Vec<_>>();
        let MockState { tokens, frozen, .. } = &mut state;
        tokens.truncate(snapshot.len);
        tokens.resize(snapshot.len, 0);
        frozen.restore(snapshot, |range, page| {
            tokens[range].copy_from_slice(&words(page));
            Ok::<_, ModelError>(())
        })?;
        let [prompt, answered] = words(&snapshot.state)[..] else {
            return Err(ModelError::Config("the snapshot belongs to another model".into()));
        };
        state.prompt = prompt as usize;
        state.answered = answered as usize;
        state.before = vec![(state.prompt, state.answered); snapshot.len];
        Ok(state)
    }

    fn recover(&mut self) -> Result<bool, ModelError> {
        self.recovered.fetch_add(1, Ordering::Relaxed);
        Ok(self.loses_device.swap(false, Ordering::Relaxed))
    }
}

impl SequenceState for MockState {
    fn reject(&mut self, rows: usize) -> Result<(), ModelError> {
        let len = self.tokens.len() - rows;
        self.tokens.truncate(len);
        if rows > 0 {
            (self.prompt, self.answered) = self.before[len];
        }
        self.before.truncate(len);
        Ok(())
    }

    fn ahead(&self) -> Option<u32> {
        self.ahead.as_ref().map(|(id, _)| *id)
    }

    fn take_ahead(&mut self) -> Option<u32> {
        self.ahead.take().map(|(id, _)| id)
    }

    fn shared_positions(&self) -> usize {
        self.frozen.shared_positions()
    }
}

impl HiddenStates for MockModel {
    fn set_taps(&mut self, taps: &HiddenTaps) -> Result<(), ModelError> {
        self.taps = taps.clone();
        Ok(())
    }

    fn tapped_rows(&mut self, rows: usize, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let first = self.last.len().saturating_sub(self.taps.rows);
        let kept = self.last[..rows].get(first..).unwrap_or_default();
        *out = kept.iter().flat_map(|id| vec![*id as f32; self.taps.layers.len()]).collect();
        Ok(())
    }
}

/// A number in `0..1` that differs between tokens and positions.
fn noise(token: u32, length: u32) -> f32 {
    let mixed = (token.wrapping_mul(0x9E37_79B1) ^ length.wrapping_mul(0x85EB_CA77)).wrapping_mul(0xC2B2_AE3D);
    (mixed >> 8) as f32 / (1 << 24) as f32
}
