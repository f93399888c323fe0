//! Counts the drafts of the qwen4_exp MTP head, and compares the counts of the engine with those of a plain loop.

use crate::{
    common::{self, decode, load_with, prefill},
    drafts::count_drafts,
    qwen4_exp::{cases, dir, load, options},
};
use moestro_base::metrics::Metrics;
use moestro_engine::{self as engine, DraftPolicy, MtpDraft, Request, Sampling};
use moestro_model::model::{LoadOptions, MtpSource, Qwen};

/// Number of tokens of an answer.
const ANSWER: usize = 40;

fn with_head() -> Qwen {
    load_with(&dir(), LoadOptions { drafter: MtpSource::Checkpoint, verify: true, ..options() })
}

#[test]
fn engine_counts_drafts_as_a_plain_loop() {
    for case in cases() {
        let mut plain = load();
        let (logits, mut state, _) = prefill(&mut plain, &case.prompt, 1024);
        let (answer, _) = decode(&mut plain, &mut state, logits.row(logits.rows() - 1), ANSWER);
        for width in [1, 2, 3] {
            let model = with_head();
            let draft = Box::new(MtpDraft::new(&model).unwrap());
            let options =
                engine::Options { speculate: DraftPolicy::Force, draft_tokens: width, ..engine::Options::default() };
            let metrics = Metrics::new("test", "cpu");
            let (handle, worker) = engine::spawn_with(model, draft, options, metrics.clone()).unwrap();
            let (found, end) = common::ask(&handle, Request::new(case.prompt.clone(), ANSWER, Sampling::greedy()));
            drop(handle);
            worker.join().unwrap();
            let timings = end.unwrap().1;
            let cycles = metrics.draft_cycles.with_label_values(&["mtp"]).get();
            let counts = [cycles, timings.drafted_tokens as u64, timings.accepted_tokens as u64];
            println!("{}, drafts of {width}: cycles, drafted, accepted {counts:?}", case.name);
            assert_eq!(found, answer);
            assert_eq!(
                counts,
                count_drafts(&mut with_head(), &case.prompt, &answer, [width, ANSWER]),
                "{}, drafts of {width}",
                case.name
            );
        }
    }
}
