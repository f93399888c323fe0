//! Tests drafts for a model on the kernels: the multi-token-prediction head predicts the same tokens as on the CPU, and
//! no kind of draft changes an answer.

use crate::{
    forward::{
        DEMO, cases,
        common::{self, Routes},
        options,
    },
    gpu::HostGpu,
    host::Host,
    queue::move_to,
};
use moestro_base::metrics::Metrics;
use moestro_compute::experts::{ExpertChoice, PassSize};
use moestro_engine::{
    self as engine, DflashDraft, Draft, DraftPolicy, LookupDraft, MtpDraft, Request, Sampling, Timings,
};
use moestro_model::model::{
    DflashModel, HiddenRows, HiddenStates, HiddenTaps, LoadOptions, Model, MtpSource, Qwen, Rows, dflash,
};
use std::{
    path::Path,
    sync::{Arc, Mutex},
};
use test_support::files::copy_dir;

const HEAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/mtp.safetensors");

/// Writes the demo with its MTP head to `at`.
fn with_head(at: &Path) {
    copy_dir(DEMO, at);
    std::fs::copy(HEAD, at.join("mtp.safetensors")).unwrap();
}

fn on_cpu(dir: &Path) -> Qwen {
    common::load_with(dir, LoadOptions { drafter: MtpSource::Checkpoint, ..options(false) })
}

fn on_kernels(dir: &Path, streaming: bool) -> Qwen {
    let options =
        LoadOptions { drafter: MtpSource::Checkpoint, gpu: Some(u64::MAX), verify: true, ..options(streaming) };
    move_to(common::load_with(dir, options), HostGpu::new(Host::fast()))
}

/// The likeliest expert of a row that only `a` has, and the likeliest that only `b` has. `None` if both have the same
/// experts, in any order.
fn swapped_experts(a: &Routes, b: &Routes, row: usize) -> Option<[u32; 2]> {
    let [a, b] = [a, b].map(|routes| &routes.ids[row * routes.k..][..routes.k]);
    let only = |ids: &[u32], others: &[u32]| ids.iter().copied().find(|id| !others.contains(id));
    Some([only(a, b)?, only(b, a)?])
}

/// The logits of each layer's router for a prompt, `[rows, experts]`, on the CPU. A resident model does not read them.
fn router_logits(dir: &Path, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut model = common::load_with(dir, options(true));
    let logits = Arc::new(Mutex::new(vec![Vec::new(); model.config().layers]));
    let log = logits.clone();
    model.store().unwrap().observe(Box::new(move |layer: usize, choice: &ExpertChoice<'_>, _: PassSize| {
        log.lock().unwrap()[layer].extend_from_slice(choice.logits);
    }));
    let mut state = model.start().unwrap();
    model.forward(&mut state, ids, Rows::None).unwrap();
    std::mem::take(&mut *logits.lock().unwrap())
}

/// The weights of `experts` in a row of which `chosen` are the selected experts.
fn weights<const N: usize>(logits: &[f32], chosen: &[u32], experts: [u32; N]) -> [f32; N] {
    let sum: f32 = chosen.iter().map(|&id| logits[id as usize].exp()).sum();
    experts.map(|id| logits[id as usize].exp() / sum)
}

#[test]
fn mtp_head_matches_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    with_head(dir.path());
    let ids: Vec<u32> = (0..40).map(|n| 20 + n * 31).collect();
    let (mut cpu, mut gpu) = (on_cpu(dir.path()), on_kernels(dir.path(), false));
    let width = cpu.config().hidden;
    let followed = |model: &mut Qwen| {
        let (mut hidden, routes) = (Vec::new(), common::record_routes(model));
        model.set_taps(&HiddenTaps { layers: vec![7], rows: 64 }).unwrap();
        let mut state = model.start().unwrap();
        // No logits are computed here, so that the MTP head cannot rely on the model's last norm.
        model.forward(&mut state, &ids[..39], Rows::None).unwrap();
        model.tapped_rows(39, &mut hidden).unwrap();
        (hidden, std::mem::take(&mut *routes.lock().unwrap()))
    };
    let ((expected, cpu_routes), (found, gpu_routes)) = (followed(&mut cpu), followed(&mut gpu));
    let logits = router_logits(dir.path(), &ids[..39]);
    // In this test, the CPU has f32 keys and values. The kernels round keys and values by up to 1.5e-5 of a row's
    // largest value. The rounding can swap two experts of almost equal weight, and the row then differs by a whole
    // expert.
    let mut swapped = 0;
    for (row, (found, expected)) in found.chunks_exact(width).zip(expected.chunks_exact(width)).enumerate() {
        let off = common::distance(found, expected);
        let mut layers = cpu_routes.iter().zip(&gpu_routes).zip(&logits);
        match layers.find_map(|((cpu, gpu), logits)| Some((swapped_experts(cpu, gpu, row)?, cpu, logits))) {
            Some((experts, cpu, logits)) => {
                let logits = &logits[row * logits.len() / 39..(row + 1) * logits.len() / 39];
                let [lost, gained] = weights(logits, &cpu.ids[row * cpu.k..][..cpu.k], experts);
                println!("row {row}: off by {off:.1e}, an expert of weight {lost} instead of {gained}");
                swapped += 1;
                assert!((lost - gained).abs() < 1e-4, "row {row}: {lost} instead of {gained}");
            }
            None => assert!(off < 2e-3, "row {row}: off by {off}"),
        }
    }
    assert!(swapped <= 1, "{swapped} rows have other experts");
    // Test one row, a few rows, and more rows than the slot table is used for.
    for rows in [1, 2, 16, 39] {
        let [expected, found] = [&mut cpu, &mut gpu].map(|model| {
            let first = model.mtp(0, &ids[1..=rows], HiddenRows::OfModel(&expected[..rows * width])).unwrap();
            let next = model.mtp(rows, &[ids[3]], HiddenRows::OfHead(&first.hidden)).unwrap();
            [first.logits, first.hidden, next.logits]
        });
        for (found, expected) in found.iter().zip(&expected) {
            let off = common::distance(found, expected);
            assert!(off < 2e-3, "{rows} rows: off by {off}");
        }
    }
}

pub fn answers(
    model: Qwen,
    draft: Box<dyn Draft<Qwen>>,
    speculate: DraftPolicy,
    asked: &[(Vec<u32>, Sampling)],
) -> Vec<(Vec<u32>, Timings)> {
    let options = engine::Options { eos: vec![2040, 2038], speculate, draft_tokens: 2, ..engine::Options::default() };
    let (handle, worker) = engine::spawn_with(model, draft, options, Metrics::new("test", "gpu")).unwrap();
    let answer = |(ids, sampling): &(Vec<u32>, Sampling)| {
        let (told, end) = common::ask(&handle, Request::new(ids.clone(), 20, sampling.clone()));
        (told, end.unwrap().1)
    };
    let answers = asked.iter().map(answer).collect();
    drop(handle);
    worker.join().unwrap();
    answers
}

fn block(model: &Qwen) -> DflashDraft {
    const DFLASH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo-dflash");
    let surveyed = dflash::DflashCheckpoint::new(Path::new(DFLASH), model.config()).unwrap();
    DflashDraft::new(DflashModel::load(&surveyed, 2048, model.compute()).unwrap())
}

#[test]
#[ignore = "exhaustive: every kind of draft"]
fn answers_ignore_every_draft_kind() {
    let dir = tempfile::tempdir().unwrap();
    with_head(dir.path());
    let cases = cases();
    let (story, sum) = (&cases[0].prompt_ids, &cases[1]);
    let drawn = Sampling { temperature: 1.3, seed: Some(5), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 0.6, logit_bias: vec![(263, -5.0)], ..drawn };
    // The text is repeated, so that prompt lookup finds drafts.
    let twice = [&sum.prompt_ids[..], &sum.greedy_ids[..], &sum.prompt_ids].concat();
    let asked = [(twice, Sampling::greedy()), (story.clone(), penal)];
    let plain = answers(on_kernels(dir.path(), false), Box::new(LookupDraft), DraftPolicy::Off, &asked);
    // The CPU tests run every kind of draft resident and streaming. On the kernels each run takes seconds, so each kind
    // runs only once or twice. A draft model runs on the CPU, as in `dense.rs`.
    let kinds = [("mtp", false), ("mtp", true), ("dflash", false), ("lookup", true)];
    for (kind, streaming) in kinds {
        let model = on_kernels(dir.path(), streaming);
        let draft: Box<dyn Draft<Qwen>> = match kind {
            "mtp" => Box::new(MtpDraft::new(&model).expect("the model has a head")),
            "dflash" => Box::new(block(&model)),
            _ => Box::new(LookupDraft),
        };
        let found = answers(model, draft, DraftPolicy::Force, &asked);
        let (mut drafted, mut accepted) = (0, 0);
        for ((found, timings), (plain, _)) in found.iter().zip(&plain) {
            assert_eq!(found, plain, "{kind}, streaming {streaming}");
            (drafted, accepted) = (drafted + timings.drafted_tokens, accepted + timings.accepted_tokens);
        }
        println!("{kind}, streaming {streaming}: {accepted} of {drafted} accepted");
        assert!(0 < accepted && accepted < drafted, "{kind}: {accepted} of {drafted}");
    }
}
