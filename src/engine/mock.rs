//! A test double: a model that repeats what it was told, and then ends. It ships with the library, so that the tests of
//! the engine and of the server run without a checkpoint; no command uses it.

use crate::{
    error::{ModelError, StoreError},
    model::{
        CopiedPages, HiddenStates, HiddenTaps, Logits, Model, ModelInfo, PassHooks, Rows, SequenceState, Snapshot,
        SnapshotSize,
    },
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Repeats its prompt, or says [`MockModel::answer`], and then [`MockModel::eos`].
///
/// The likeliest next token follows from the sequence alone: as long as the tokens continue the answer it is in the
/// middle of answering; any other token belongs to a prompt, which ends where the answer begins. So a prompt must not
/// end in what its own answer begins with.
#[derive(Debug, Clone)]
pub struct MockModel {
    pub vocab: usize,
    pub context: usize,
    pub chunk: usize,
    pub eos: u32,
    /// Said after any prompt; `None` repeats the prompt.
    pub answer: Option<Vec<u32>>,
    /// The likeliest logit's lead over the others, which lie between 0 and 1.
    pub margin: f32,
    /// Time that one token takes.
    pub delay: Duration,
    /// Evaluating this token is an error.
    pub fails_on: Option<u32>,
    /// Evaluating this token is a panic.
    pub panics_on: Option<u32>,
    /// Taking a snapshot behind an answer is an error.
    pub no_answers_kept: bool,
    /// Calls of [`Model::recover`]; clones share it.
    pub recovered: Arc<AtomicUsize>,
    /// Tokens evaluated so far; clones share it, so a test can watch.
    pub evaluated: Arc<AtomicUsize>,
    /// Rows of logits so far; clones share it.
    pub rows: Arc<AtomicUsize>,
    /// Hidden rows that are wanted; each is its token, once a layer.
    pub taps: HiddenTaps,
    /// The tokens of the last pass.
    pub last: Vec<u32>,
    /// Each state that is alive owns it, beside the mocks.
    pub states: Arc<()>,
}

impl Default for MockModel {
    fn default() -> Self {
        Self {
            vocab: 64,
            context: 256,
            chunk: 8,
            eos: 2,
            answer: None,
            margin: 50.0,
            delay: Duration::ZERO,
            fails_on: None,
            panics_on: None,
            no_answers_kept: false,
            recovered: Arc::default(),
            evaluated: Arc::default(),
            rows: Arc::default(),
            taps: HiddenTaps::default(),
            last: Vec::new(),
            states: Arc::default(),
        }
    }
}

/// All tokens so far, how many of them are prompt, and how many of the answer have been said.
pub struct Heard {
    tokens: Vec<u32>,
    prompt: usize,
    said: usize,
    /// `(prompt, said)` before each token, for [`SequenceState::reject`].
    before: Vec<(usize, usize)>,
    frozen: CopiedPages,
    _alive: Arc<()>,
}

impl MockModel {
    /// The likeliest token after `heard`.
    fn next(&self, heard: &Heard) -> u32 {
        let answer = self.answer.as_deref().unwrap_or(&heard.tokens[..heard.prompt]);
        answer.get(heard.said).copied().unwrap_or(self.eos)
    }

    fn hear(&self, heard: &mut Heard, id: u32) {
        let expected = heard.prompt > 0 && id == self.next(heard);
        heard.before.push((heard.prompt, heard.said));
        heard.tokens.push(id);
        if expected {
            heard.said += 1;
        } else {
            heard.prompt = heard.tokens.len();
            heard.said = 0;
        }
    }
}

impl Model for MockModel {
    type State = Heard;

    fn info(&self) -> ModelInfo {
        ModelInfo {
            vocab: self.vocab,
            context: self.context,
            chunk: self.chunk,
            snapshot_size: SnapshotSize { state: 8, position: 4 },
            pages: None,
        }
    }

    fn start(&self) -> Result<Heard, ModelError> {
        Ok(Heard {
            tokens: Vec::new(),
            prompt: 0,
            said: 0,
            before: Vec::new(),
            frozen: CopiedPages::default(),
            _alive: self.states.clone(),
        })
    }

    fn forward_with(
        &mut self,
        heard: &mut Heard,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        let mut logits = Logits { vocab: self.vocab, data: Vec::new() };
        self.last = ids.to_vec();
        for (index, &id) in ids.iter().enumerate() {
            if hooks.keep_going.is_some_and(|keep_going| !keep_going()) {
                return Err(ModelError::GivenUp);
            }
            std::thread::sleep(self.delay);
            self.evaluated.fetch_add(1, Ordering::Relaxed);
            assert!(Some(id) != self.panics_on, "the mock was told to panic on token {id}");
            if Some(id) == self.fails_on {
                return Err(StoreError::Other(format!("the mock was told to fail on token {id}")).into());
            }
            if heard.tokens.len() == self.context {
                return Err(ModelError::ContextFull { context: self.context });
            }
            self.hear(heard, id);
            if hooks.snapshot_at.contains(&heard.tokens.len()) {
                hooks.snapshots.push(self.snapshot(heard)?);
            }
            if rows == Rows::All || (rows == Rows::Last && index + 1 == ids.len()) {
                self.rows.fetch_add(1, Ordering::Relaxed);
                let (next, length) = (self.next(heard) as usize, heard.tokens.len() as u32);
                logits.data.extend((0..self.vocab as u32).map(|token| noise(token, length)));
                let row = logits.data.len() - self.vocab;
                logits.data[row + next] = self.margin;
            }
        }
        Ok(logits)
    }

    fn verify(&mut self, heard: &mut Heard, ids: &[u32]) -> Result<Logits, ModelError> {
        self.forward_with(heard, ids, Rows::All, &mut PassHooks::default())
    }

    /// The tokens are the keys and values, 4 bytes each; where in them it is, is the state.
    fn snapshot(&self, heard: &mut Heard) -> Result<Snapshot, ModelError> {
        if self.no_answers_kept && heard.said > 0 {
            return Err(ModelError::Memory("the mock was told to keep no answers".into()));
        }
        let Heard { tokens, prompt, said, frozen, .. } = heard;
        let state = [*prompt, *said].into_iter().flat_map(|count| (count as u32).to_le_bytes()).collect();
        frozen.snapshot(tokens.len(), state, |range| {
            Ok(tokens[range].iter().flat_map(|token| token.to_le_bytes()).collect())
        })
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<Heard>) -> Result<Heard, ModelError> {
        let mut heard = into.map_or_else(|| self.start(), Ok)?;
        let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect::<Vec<_>>();
        let Heard { tokens, frozen, .. } = &mut heard;
        tokens.truncate(snapshot.len);
        tokens.resize(snapshot.len, 0);
        frozen.restore(snapshot, |range, page| {
            tokens[range].copy_from_slice(&words(page));
            Ok::<_, ModelError>(())
        })?;
        let [prompt, said] = words(&snapshot.state)[..] else {
            return Err(ModelError::Config("the snapshot belongs to another model".into()));
        };
        (heard.prompt, heard.said) = (prompt as usize, said as usize);
        heard.before = vec![(heard.prompt, heard.said); snapshot.len];
        Ok(heard)
    }

    fn recover(&mut self) -> Result<bool, ModelError> {
        self.recovered.fetch_add(1, Ordering::Relaxed);
        Ok(false)
    }
}

impl SequenceState for Heard {
    fn reject(&mut self, rows: usize) -> Result<(), ModelError> {
        let len = self.tokens.len() - rows;
        self.tokens.truncate(len);
        if rows > 0 {
            (self.prompt, self.said) = self.before[len];
        }
        self.before.truncate(len);
        Ok(())
    }

    fn shared_positions(&self) -> usize {
        self.frozen.held()
    }
}

impl HiddenStates for MockModel {
    fn set_taps(&mut self, taps: &HiddenTaps) -> Result<(), ModelError> {
        self.taps = taps.clone();
        Ok(())
    }

    fn tapped_rows(&mut self, rows: usize, into: &mut Vec<f32>) -> Result<(), ModelError> {
        let first = self.last.len().saturating_sub(self.taps.rows);
        let kept = self.last[..rows].get(first..).unwrap_or_default();
        *into = kept.iter().flat_map(|id| vec![*id as f32; self.taps.layers.len()]).collect();
        Ok(())
    }
}

/// Something in 0..1 that differs from token to token and from place to place.
fn noise(token: u32, length: u32) -> f32 {
    let mixed = (token.wrapping_mul(0x9E37_79B1) ^ length.wrapping_mul(0x85EB_CA77)).wrapping_mul(0xC2B2_AE3D);
    (mixed >> 8) as f32 / (1 << 24) as f32
}
