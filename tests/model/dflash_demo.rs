//! Tests the demo with its DFlash draft: the acceptance rate matches the reference, and no answer changes.

use crate::{
    common::{
        fixtures::{self, DEMO},
        load_with,
    },
    process::Process,
    program::moestro,
};
use moestro_base::metrics::Metrics;
use moestro_engine::{self as engine, DflashDraft, Draft, DraftPolicy, Finish, Request, Sampling, Timings};
use moestro_model::model::{Config, DflashModel, LoadOptions, Qwen, dflash};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

const DRAFT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo-dflash");

fn demo(slots: Option<usize>) -> Qwen {
    let mut options = LoadOptions { threads: Some(2), verify: true, ..LoadOptions::default() };
    options.store.slots = slots;
    load_with(Path::new(DEMO), options)
}

fn draft(dir: &Path, model: &Qwen) -> Box<dyn Draft<Qwen>> {
    let surveyed = dflash::DflashCheckpoint::new(dir, &Config::read(Path::new(DEMO)).unwrap()).unwrap();
    Box::new(DflashDraft::new(DflashModel::load(&surveyed, 2048, model.compute()).unwrap()))
}

struct Engine {
    handle: engine::Handle,
    worker: engine::Worker,
    metrics: Arc<Metrics>,
}

impl Engine {
    fn new(slots: Option<usize>, dir: &Path, speculate: DraftPolicy) -> Self {
        let metrics = Metrics::new("test", "cpu");
        let model = demo(slots);
        let draft = draft(dir, &model);
        let options = engine::Options { eos: vec![2040], speculate, ..engine::Options::default() };
        let (handle, worker) = engine::spawn_with(model, draft, options, metrics.clone()).unwrap();
        Self { handle, worker, metrics }
    }

    fn answer(&self, ids: &[u32], max_tokens: usize, sampling: &Sampling) -> (Vec<u32>, Finish, Timings) {
        let (told, end) = crate::common::ask(&self.handle, Request::new(ids.to_vec(), max_tokens, sampling.clone()));
        let (finish, timings) = end.unwrap();
        (told, finish, timings)
    }

    fn cycles(&self) -> u64 {
        self.metrics.draft_cycles.with_label_values(&["dflash"]).get()
    }

    fn end(self) {
        drop(self.handle);
        self.worker.join().unwrap();
    }
}

/// The reference accepts 5.44 of 7 tokens on average.
#[test]
fn acceptance_matches_the_reference() {
    let engine = Engine::new(None, Path::new(DRAFT), DraftPolicy::Force);
    let mut accepted = 0;
    for case in fixtures::demo().0 {
        let (told, _, timings) = engine.answer(&case.prompt_ids, 110, &Sampling::greedy());
        assert!(told.starts_with(&case.greedy_ids) || case.greedy_ids.starts_with(&told), "{}", case.question);
        accepted += timings.accepted_tokens;
    }
    let mean = accepted as f64 / engine.cycles() as f64;
    println!("{accepted} accepted in {} cycles: {mean:.2}", engine.cycles());
    assert!(mean >= 5.3, "{mean}");
    engine.end();
}

#[test]
#[ignore = "exhaustive: every question, resident and streamed"]
fn answers_match_plain_resident_and_streamed() {
    let seeded = |temperature| Sampling { temperature, seed: Some(11), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 0.8, presence_penalty: 0.3, repetition_penalty: 1.2, ..seeded(0.7) };
    // Bias the answer away from the likeliest tokens.
    let first = &fixtures::demo().0[0];
    let biased = Sampling { logit_bias: vec![(first.greedy_ids[5], -50.0), (300, 2.0)], ..seeded(0.0) };
    let plain = Engine::new(None, Path::new(DRAFT), DraftPolicy::Off);
    let answers = [&biased, &Sampling::greedy()].map(|sampling| plain.answer(&first.prompt_ids, 60, sampling).0);
    assert_ne!(answers[0], answers[1]);
    for slots in [None, Some(64)] {
        let forced = Engine::new(slots, Path::new(DRAFT), DraftPolicy::Force);
        for sampling in [seeded(0.0), seeded(0.7), seeded(1.3), penal.clone(), biased.clone()] {
            let (mut accepted, mut refused) = (0, 0);
            // Sequential requests in one engine: some of them continue the last session, but most do not.
            for (index, case) in fixtures::demo().0.iter().enumerate() {
                let max = [60, 9, 110][index % 3];
                let expected = plain.answer(&case.prompt_ids, max, &sampling);
                let found = forced.answer(&case.prompt_ids, max, &sampling);
                assert_eq!((&found.0, found.1), (&expected.0, expected.1), "{}: {sampling:?} {slots:?}", case.question);
                accepted += found.2.accepted_tokens;
                refused += found.2.drafted_tokens - found.2.accepted_tokens;
                if index == 0 {
                    let next = [&case.prompt_ids[..], &found.0, &[198, 40]].concat();
                    let expected = plain.answer(&next, 20, &sampling);
                    assert_eq!(forced.answer(&next, 20, &sampling).0, expected.0, "{sampling:?} {slots:?}");
                }
            }
            println!("{sampling:?} {slots:?}: {accepted} accepted, {refused} refused");
            assert!(accepted > 0 && refused > 0, "{accepted} and {refused}: the test must not be empty");
        }
        forced.end();
    }
    plain.end();
}

/// A copy of the draft's files, modified by `change`.
fn modified_draft(change: impl Fn(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read(Path::new(DRAFT).join(name)).unwrap();
    let mut config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let mut weights = read("model.safetensors");
    change(&mut config, &mut weights);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    dir
}

/// If the draft has other tapped layers, another mask token or the weights of another draft, fewer of its tokens are
/// accepted, but no answer changes.
#[test]
#[ignore = "long: whole answers"]
fn mismatched_draft_changes_no_answer() {
    let taps = modified_draft(|config, _| config["dflash_config"]["target_layer_ids"] = json!([5, 1, 3]));
    let mask = modified_draft(|config, _| config["dflash_config"]["mask_token_id"] = json!(17));
    let other = modified_draft(|_, weights| {
        let from = weights.len() / 8;
        weights[from..].as_chunks_mut::<2>().0.iter_mut().for_each(|bf16| bf16[1] ^= 0x80);
    });
    let plain = Engine::new(None, Path::new(DRAFT), DraftPolicy::Off);
    for (what, dir, at_most) in [("taps", taps, 0.5), ("mask", mask, 0.2), ("weights", other, 0.2)] {
        let forced = Engine::new(None, dir.path(), DraftPolicy::Force);
        let mut counted = [0, 0];
        for case in fixtures::demo().0 {
            let expected = plain.answer(&case.prompt_ids, 110, &Sampling::greedy()).0;
            let found = forced.answer(&case.prompt_ids, 110, &Sampling::greedy());
            assert_eq!(found.0, expected, "{what}");
            counted = [counted[0] + found.2.accepted_tokens, counted[1] + found.2.drafted_tokens];
        }
        println!("{what}: {} of {} accepted in {} cycles", counted[0], counted[1], forced.cycles());
        assert!((counted[0] as f64) < at_most * counted[1] as f64, "{what}: {counted:?}");
        forced.end();
    }
    plain.end();
}

fn body(prompt: &str, more: Value) -> String {
    let mut body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 120, "seed": 3});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// Compares answers over HTTP: response formats, stop strings, biases, penalties, and three answer lengths with their
/// finish reasons.
#[test]
#[ignore = "long: answers of 800 tokens"]
fn server_answers_match_with_and_without_draft() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "n"], "properties":
        {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}});
    let form = json!({"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}});
    let story = "Tell me a story about Paul and a dragon.";
    // The long answers end only at their token limit.
    let endless = |tokens: usize| json!({"max_tokens": tokens, "temperature": 0.7, "logit_bias": {"2040": -100}});
    let requests = [
        (story, json!({"temperature": 0}), "stop"),
        (story, json!({"temperature": 1.3, "max_tokens": 40}), "length"),
        (
            story,
            json!({"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 30}),
            "length",
        ),
        (story, json!({"temperature": 0, "stop": ["dragon", "Paul was"]}), "stop"),
        ("What is 12+7?", json!({"temperature": 0, "response_format": form}), "stop"),
        ("What is 12+7?", json!({"temperature": 1.0, "response_format": form, "enable_thinking": false}), "stop"),
        ("How much is 3 times 4?", endless(50), "length"),
        ("Count from 49 to 119 by 10.", endless(200), "length"),
        (story, endless(800), "length"),
        (
            "Give me Python code for a sum, then a story about a fox, then 3 instruments.",
            json!({"temperature": 0}),
            "stop",
        ),
    ];
    let none = Process::start(&["--draft-model", "off"]);
    let ours = |more: &[&str]| Process::start(&[&["--draft-model", DRAFT, "--speculation", "force"], more].concat());
    for server in [ours(&[]), ours(&["--stream-experts", "on"])] {
        for (prompt, more, finish) in &requests {
            let body = body(prompt, more.clone());
            let ask = |server: &Process| -> Value {
                serde_json::from_str(&server.ask("POST", "/v1/chat/completions", &body)).unwrap()
            };
            let (expected, found) = (ask(&none), ask(&server));
            assert_eq!(found["choices"], expected["choices"], "{body}");
            assert_eq!(found["usage"]["completion_tokens"], expected["usage"]["completion_tokens"], "{body}");
            assert_eq!(found["choices"][0]["finish_reason"], *finish, "{body}: {found}");
        }
        // Two alternating conversations: each turn continues from a snapshot or starts over.
        let mut talks = [vec![], vec![]];
        for turn in ["What is 12+7?", "And a story about a fox.", "Count from 49 to 119 by 10.", "What is 3 times 4?"] {
            for (talk, system) in talks.iter_mut().zip(["Be brief.", "You are a poet."]) {
                if talk.is_empty() {
                    talk.push(json!({"role": "system", "content": system}));
                }
                talk.push(json!({"role": "user", "content": turn}));
                let [expected, found] = [&none, &server].map(|server| server.chat(talk)["choices"].clone());
                assert_eq!(found, expected, "{talk:?}");
                talk.push(found[0]["message"].clone());
            }
        }
        let count =
            |outcome| server.metric(&format!(r#"moestro_draft_tokens_total{{kind="dflash",outcome="{outcome}"}}"#));
        let (accepted, refused) = (count("accepted"), count("rejected"));
        println!("{accepted} accepted, {refused} refused");
        assert!(accepted > 0 && refused > 0);
        assert!(server.metric(r#"moestro_memory_bytes{kind="draft"}"#) > 4_000_000);
    }
}

/// Compares answers with the other draft kinds over HTTP: a response format, stop strings, bias and penalties.
#[test]
fn server_answers_match_with_any_draft() {
    let drafts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/drafts");
    let dir = tempfile::tempdir().unwrap();
    let [head, small] = ["head", "small"].map(|name| dir.path().join(name));
    [&head, &small].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let copy = |from: &Path, to: PathBuf| assert!(std::fs::copy(from, to).unwrap() > 0);
    std::fs::write(head.join("config.json"), r#"{"model_type": "qwen3_5_mtp"}"#).unwrap();
    copy(&drafts.join("mtp.safetensors"), head.join("model.safetensors"));
    for name in ["config.json", "model.safetensors"] {
        copy(&drafts.join("model").join(name), small.join(name));
    }
    copy(&Path::new(DEMO).join("tokenizer.json"), small.join("tokenizer.json"));

    let properties = json!({"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}});
    let schema =
        json!({"type": "object", "additionalProperties": false, "required": ["name", "n"], "properties": properties});
    let form = json!({"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}});
    let story = "Tell me a story about Paul and a dragon.";
    let requests = [
        (story, json!({"temperature": 0, "stop": ["dragon", "Paul was"]})),
        (story, json!({"temperature": 1.3, "max_tokens": 40})),
        (story, json!({"temperature": 0.7, "frequency_penalty": 0.5, "max_tokens": 30, "logit_bias": {"263": -5}})),
        ("What is 12+7?", json!({"temperature": 0, "response_format": form})),
        ("What is 12+7?", json!({"temperature": 1.0, "response_format": form, "enable_thinking": false})),
        (story, json!({"temperature": 0.7, "response_format": form, "stop": ["\"n\""]})),
    ];
    let none = Process::start(&["--draft-model", "off"]);
    let plain: Vec<_> = requests.iter().map(|(prompt, more)| answered(&none, prompt, more)).collect();
    let streaming = ["--stream-experts", "on", "--expert-io", "buffered"];
    let (head, small) = (head.to_str().unwrap(), small.to_str().unwrap());
    let resident = [("mtp", head), ("model", small), ("lookup", "lookup")].map(|(kind, draft)| (kind, draft, &[][..]));
    let streamed = [("mtp", head), ("model", small), ("dflash", DRAFT), ("lookup", "lookup")];
    for (kind, draft, more) in resident.into_iter().chain(streamed.map(|(kind, draft)| (kind, draft, &streaming[..]))) {
        let args = [&["--draft-model", draft, "--speculation", "force", "--num-draft-tokens", "3"], more].concat();
        let server = Process::start(&args);
        for ((prompt, more), expected) in requests.iter().zip(&plain) {
            assert_eq!(answered(&server, prompt, more), *expected, "{kind}: {prompt} {more}");
        }
        let count =
            |outcome| server.metric(&format!(r#"moestro_draft_tokens_total{{kind="{kind}",outcome="{outcome}"}}"#));
        let (accepted, refused) = (count("accepted"), count("rejected"));
        println!("{kind}: {accepted} accepted, {refused} refused");
        assert!(accepted > 0 && refused > 0);
    }
}

/// Returns the choices and the usage of an answer.
fn answered(server: &Process, prompt: &str, more: &Value) -> (Value, Value) {
    let answer = server.ask("POST", "/v1/chat/completions", &body(prompt, more.clone()));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    (answer["choices"].clone(), answer["usage"]["completion_tokens"].clone())
}

#[test]
fn directory_without_draft_is_rejected() {
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    for (dir, word) in [(tests, "no config.json"), ("/no/such/draft", "no such directory")] {
        let home = tempfile::tempdir().unwrap();
        let run = moestro(home.path()).args(["generate", "-p", "x", "--draft-model", dir]).output().unwrap();
        let text = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && text.contains(word), "{text}");
    }
}
