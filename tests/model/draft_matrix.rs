//! Runs every kind of draft with every kind of sampling, with resident and streamed experts. The answers must equal those
//! of plain decoding.

use crate::common::{
    fixtures::{self, DEMO},
    load_with,
};
use moestro_base::metrics::Metrics;
use moestro_engine::{
    self as engine, DflashDraft, Draft, DraftPolicy, Finish, LookupDraft, ModelDraft, MtpDraft, Request, Sampling,
    Timings,
};
use moestro_model::model::{Config, DflashModel, LoadOptions, MtpSource, Qwen, dflash};
use std::{path::Path, sync::Arc};

pub const DFLASH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo-dflash");
const HEAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/mtp.safetensors");
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/model");

/// A directory that contains only an MTP head.
fn head() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"model_type": "qwen3_5_mtp"}"#).unwrap();
    std::fs::copy(HEAD, dir.path().join("model.safetensors")).unwrap();
    dir
}

/// A model that answers requests with one kind of draft.
pub struct Engine {
    handle: engine::Handle,
    metrics: Arc<Metrics>,
}

impl Engine {
    /// An engine with a draft of this `kind` from `dir`, and a model with `slots` expert slots.
    pub fn new(kind: &'static str, dir: &Path, slots: Option<usize>, speculate: DraftPolicy) -> Self {
        let drafter = if kind == "mtp" { MtpSource::Directory(dir.into()) } else { MtpSource::None };
        let mut options = LoadOptions { threads: Some(2), verify: true, drafter, ..LoadOptions::default() };
        options.store.slots = slots;
        let model = load_with(Path::new(DEMO), options);
        let draft: Box<dyn Draft<Qwen>> = match kind {
            "mtp" => Box::new(MtpDraft::new(&model).unwrap()),
            "lookup" => Box::new(LookupDraft),
            "model" => {
                let options = LoadOptions { threads: Some(2), verify: true, ..LoadOptions::default() };
                Box::new(ModelDraft::new(load_with(dir, options)))
            }
            _ => {
                let surveyed = dflash::DflashCheckpoint::new(dir, &Config::read(Path::new(DEMO)).unwrap()).unwrap();
                Box::new(DflashDraft::new(DflashModel::load(&surveyed, 2048, model.compute()).unwrap()))
            }
        };
        let draft_tokens = if kind == "dflash" { 7 } else { 4 };
        let options = engine::Options { eos: vec![2040, 2038], speculate, draft_tokens, ..engine::Options::default() };
        let metrics = Metrics::new("test", "cpu");
        let (handle, _) = engine::spawn_with(model, draft, options, metrics.clone()).unwrap();
        Self { handle, metrics }
    }

    pub fn answer(&self, ids: &[u32], tokens: usize, sampling: &Sampling) -> (Vec<u32>, Finish, Timings) {
        let (generated, end) = crate::common::ask(&self.handle, Request::new(ids.to_vec(), tokens, sampling.clone()));
        let (finish, timings) = end.unwrap();
        (generated, finish, timings)
    }

    /// Number of passes that verified a draft of DFlash.
    pub fn cycles(&self) -> u64 {
        self.metrics.draft_cycles.with_label_values(&["dflash"]).get()
    }
}

/// The kinds of sampling.
fn samplings() -> [Sampling; 5] {
    let seeded = |temperature| Sampling { temperature, seed: Some(5), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 0.6, presence_penalty: 0.3, repetition_penalty: 1.2, ..seeded(1.3) };
    let biased = Sampling { logit_bias: vec![(263, -5.0), (13, 2.0)], top_p: 0.9, ..seeded(0.7) };
    [Sampling::greedy(), seeded(0.7), seeded(1.3), penal, biased]
}

#[test]
#[ignore = "exhaustive: every draft, sampling and number of slots"]
fn drafts_equal_plain_decoding_everywhere() {
    let alone = head();
    let (cases, none) = (fixtures::demo().0, Path::new(""));
    let mut prompts: Vec<_> = cases.iter().map(|case| case.prompt_ids.clone()).collect();
    // The first added prompt extends the answer before it. The second is unrelated to it, and longer than the part of a
    // prompt that drafts read.
    prompts.insert(1, [&prompts[0][..], &cases[0].greedy_ids[..9], &[30, 31, 32]].concat());
    prompts.push((0..700).map(|n| 20 + (n * n * 7 + n * 3) % 1500).collect());
    let plain = Engine::new("lookup", none, None, DraftPolicy::Off);
    // Each sampling answers half of the prompts, in pairs.
    let all = |engine: &Engine| -> Vec<Vec<(Vec<u32>, Finish, Timings)>> {
        let each = |(way, sampling): (usize, &Sampling)| {
            let prompts = prompts.iter().enumerate().filter(|(index, _)| index / 2 % 2 == way % 2);
            prompts.map(|(index, ids)| engine.answer(ids, [40, 25, 90][index % 3], sampling)).collect()
        };
        samplings().iter().enumerate().map(each).collect()
    };
    let expected = all(&plain);
    let kinds = [("lookup", none), ("mtp", alone.path()), ("model", Path::new(SMALL)), ("dflash", Path::new(DFLASH))];
    for (kind, dir) in kinds {
        for slots in [None, Some(64)] {
            let found = all(&Engine::new(kind, dir, slots, DraftPolicy::Force));
            let mut counts = vec![[0, 0]; found.len()];
            for (way, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (nth, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert_eq!((&found.0, found.1), (&expected.0, expected.1), "{kind} {slots:?} {way}: prompt {nth}");
                    let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = found.2;
                    counts[way] = [counts[way][0] + accepted, counts[way][1] + drafted - accepted];
                }
            }
            println!("{kind} {slots:?}: accepted and rejected {counts:?}");
            // Prompt lookup finds few drafts in short answers. All other draft kinds must have accepted and rejected
            // tokens with every sampling.
            let sum = counts.iter().fold([0, 0], |sum, count| [sum[0] + count[0], sum[1] + count[1]]);
            assert!(sum[0] > 0 && sum[1] > 0 && (kind == "lookup" || counts.as_flattened().iter().all(|n| *n > 0)));
        }
    }
}
