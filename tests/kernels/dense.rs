//! Runs a model without experts on the kernels. The answers must equal the answers on the CPU, with and without drafts.

use crate::{
    forward::{DEMO, answer, cases, common, options},
    gpu::HostGpu,
    host::Host,
    mtp::answers,
    queue::move_to,
};
use moestro_engine::{Draft, DraftPolicy, LookupDraft, ModelDraft, Sampling};
use moestro_model::model::{LoadOptions, Qwen};
use std::path::Path;

/// A dense model with the demo's tokenizer.
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/model");

fn on_kernels() -> Qwen {
    let options = LoadOptions { gpu: Some(u64::MAX), verify: true, ..options(false) };
    move_to(common::load_with(Path::new(SMALL), options), HostGpu::new(Host::fast()))
}

#[test]
fn dense_model_gives_the_cpu_answers() {
    let case = &cases()[0];
    let (mut cpu, mut gpu) = (common::load_with(Path::new(SMALL), options(false)), on_kernels());
    let (expected, rows) = answer(&mut cpu, &case.prompt_ids, &[], 6);
    let (found, logits) = answer(&mut gpu, &case.prompt_ids, &[7], 6);
    assert_eq!(found, expected);
    for (found, expected) in logits.iter().zip(&rows) {
        let off = common::distance(found, expected);
        assert!(off < 2e-3, "logits off by {off}");
    }
}

#[test]
#[ignore = "long: every kind of draft"]
fn dense_model_answers_ignore_drafts() {
    let story = &cases()[0].prompt_ids;
    let drawn = Sampling { temperature: 1.3, seed: Some(5), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 0.6, logit_bias: vec![(263, -5.0)], ..drawn };
    let mut cpu = common::load_with(Path::new(SMALL), options(false));
    // The text is repeated, so that prompt lookup finds drafts.
    let twice = [&story[..], &answer(&mut cpu, story, &[], 20).0, story].concat();
    let asked = [(twice, Sampling::greedy()), (story.clone(), penal)];
    let plain = answers(on_kernels(), Box::new(LookupDraft), DraftPolicy::Off, &asked);
    let mixture = || common::load_with(Path::new(DEMO), LoadOptions { verify: true, ..options(false) });
    let drafts: [(&str, Box<dyn Draft<Qwen>>, usize); 2] =
        [("lookup", Box::new(LookupDraft), 0), ("a mixture", Box::new(ModelDraft::new(mixture())), 1)];
    for (kind, draft, first) in drafts {
        let found = answers(on_kernels(), draft, DraftPolicy::Force, &asked[first..]);
        let (mut drafted, mut accepted) = (0, 0);
        for ((found, timings), (plain, _)) in found.iter().zip(&plain[first..]) {
            assert_eq!(found, plain, "{kind}");
            (drafted, accepted) = (drafted + timings.drafted_tokens, accepted + timings.accepted_tokens);
        }
        println!("{kind}: {accepted} of {drafted} accepted");
        assert!(0 < accepted && accepted < drafted, "{kind}: {accepted} of {drafted}");
    }
}
