//! Tests the demo with its DFlash draft: the acceptance rate matches the reference, and no answer changes.

use crate::{
    common::fixtures::{self, DEMO},
    draft_matrix::{DFLASH as DRAFT, Engine},
    process::Process,
    program::moestro,
};
use moestro_engine::{DraftPolicy, Sampling};
use serde_json::{Value, json};
use std::path::Path;
use test_support::{files::copy_files, with};

const STORY: &str = "Tell me a story about Paul and a dragon.";

fn engine(dir: &Path, speculate: DraftPolicy) -> Engine {
    Engine::new("dflash", dir, None, speculate)
}

/// The reference accepts 5.44 of 7 tokens on average.
#[test]
fn acceptance_matches_the_reference() {
    let forced = engine(Path::new(DRAFT), DraftPolicy::Force);
    let mut accepted = 0;
    for case in fixtures::demo().0 {
        let (told, _, timings) = forced.answer(&case.prompt_ids, 110, &Sampling::greedy());
        assert!(told.starts_with(&case.greedy_ids) || case.greedy_ids.starts_with(&told), "{}", case.question);
        accepted += timings.accepted_tokens;
    }
    let mean = accepted as f64 / forced.cycles() as f64;
    println!("{accepted} accepted in {} cycles: {mean:.2}", forced.cycles());
    assert!(mean >= 5.3, "{mean}");
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
    let (cases, plain) = (fixtures::demo().0, engine(Path::new(DRAFT), DraftPolicy::Off));
    let expected: Vec<Vec<u32>> =
        cases.iter().map(|case| plain.answer(&case.prompt_ids, 110, &Sampling::greedy()).0).collect();
    for (what, dir, at_most) in [("taps", taps, 0.5), ("mask", mask, 0.2), ("weights", other, 0.2)] {
        let forced = engine(dir.path(), DraftPolicy::Force);
        let mut counted = [0, 0];
        for (case, expected) in cases.iter().zip(&expected) {
            let found = forced.answer(&case.prompt_ids, 110, &Sampling::greedy());
            assert_eq!(found.0, *expected, "{what}");
            counted = [counted[0] + found.2.accepted_tokens, counted[1] + found.2.drafted_tokens];
        }
        println!("{what}: {} of {} accepted in {} cycles", counted[0], counted[1], forced.cycles());
        assert!((counted[0] as f64) < at_most * counted[1] as f64, "{what}: {counted:?}");
    }
}

fn form() -> Value {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "n"], "properties":
        {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}});
    json!({"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}})
}

/// Returns the choices and the usage of an answer.
fn answered(server: &Process, prompt: &str, more: &Value) -> (Value, Value) {
    let body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 120, "seed": 3});
    let answer = server.ask("POST", "/v1/chat/completions", &with(body, more.clone()).to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap();
    (answer["choices"].clone(), answer["usage"]["completion_tokens"].clone())
}

/// The server's draft had accepted and rejected tokens.
fn check_drafted(server: &Process, kind: &str) {
    let [accepted, rejected] = ["accepted", "rejected"]
        .map(|outcome| server.metric(&format!(r#"moestro_draft_tokens_total{{kind="{kind}",outcome="{outcome}"}}"#)));
    println!("{kind}: {accepted} accepted, {rejected} rejected");
    assert!(accepted > 0 && rejected > 0);
}

/// Compares answers over HTTP: response formats, stop strings, biases, penalties, and three answer lengths with their
/// finish reasons.
#[test]
#[ignore = "long: answers of 800 tokens"]
fn server_answers_match_with_and_without_draft() {
    let form = form();
    // The long answers end only at their token limit.
    let endless = |tokens: usize| json!({"max_tokens": tokens, "temperature": 0.7, "logit_bias": {"2040": -100}});
    let requests = [
        (STORY, json!({"temperature": 0}), "stop"),
        (STORY, json!({"temperature": 1.3, "max_tokens": 40}), "length"),
        (
            STORY,
            json!({"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 30}),
            "length",
        ),
        (STORY, json!({"temperature": 0, "stop": ["dragon", "Paul was"]}), "stop"),
        ("What is 12+7?", json!({"temperature": 0, "response_format": form}), "stop"),
        ("What is 12+7?", json!({"temperature": 1.0, "response_format": form, "enable_thinking": false}), "stop"),
        ("How much is 3 times 4?", endless(50), "length"),
        ("Count from 49 to 119 by 10.", endless(200), "length"),
        (STORY, endless(800), "length"),
        (
            "Give me Python code for a sum, then a story about a fox, then 3 instruments.",
            json!({"temperature": 0}),
            "stop",
        ),
    ];
    let none = Process::start(&["--draft-model", "off"]);
    let plain: Vec<_> = requests.iter().map(|(prompt, more, _)| answered(&none, prompt, more)).collect();
    let ours = |more: &[&str]| Process::start(&[&["--draft-model", DRAFT, "--speculation", "force"], more].concat());
    for server in [ours(&[]), ours(&["--stream-experts", "on"])] {
        for ((prompt, more, finish), expected) in requests.iter().zip(&plain) {
            let found = answered(&server, prompt, more);
            assert_eq!(found, *expected, "{prompt} {more}");
            assert_eq!(found.0[0]["finish_reason"], *finish, "{prompt} {more}");
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
        check_drafted(&server, "dflash");
        assert!(server.metric(r#"moestro_memory_bytes{kind="draft"}"#) > 4_000_000);
    }
}

/// Compares answers with the other draft kinds over HTTP: a response format, stop strings, bias and penalties.
#[test]
fn server_answers_match_with_any_draft() {
    let drafts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/drafts");
    let dir = tempfile::tempdir().unwrap();
    let [head, small] = ["head", "small"].map(|name| dir.path().join(name));
    std::fs::create_dir(&head).unwrap();
    std::fs::write(head.join("config.json"), r#"{"model_type": "qwen3_5_mtp"}"#).unwrap();
    std::fs::copy(drafts.join("mtp.safetensors"), head.join("model.safetensors")).unwrap();
    copy_files(drafts.join("model"), &small, &["config.json", "model.safetensors"]);
    copy_files(DEMO, &small, &["tokenizer.json"]);

    let form = form();
    let requests = [
        (STORY, json!({"temperature": 0, "stop": ["dragon", "Paul was"]})),
        (STORY, json!({"temperature": 1.3, "max_tokens": 40})),
        (STORY, json!({"temperature": 0.7, "frequency_penalty": 0.5, "max_tokens": 30, "logit_bias": {"263": -5}})),
        ("What is 12+7?", json!({"temperature": 0, "response_format": form})),
        ("What is 12+7?", json!({"temperature": 1.0, "response_format": form, "enable_thinking": false})),
        (STORY, json!({"temperature": 0.7, "response_format": form, "stop": ["\"n\""]})),
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
        check_drafted(&server, kind);
    }
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
