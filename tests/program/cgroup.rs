//! Tests of memory limits: the peak stays below every limit, and a control group with that limit plus 10 % kills no
//! process.
//!
//! Creating a memory control group (v1 or v2) needs privileges. Without privileges, the test prints a note, and the
//! memory is measured but the limits are not enforced.

#![cfg(target_os = "linux")]

use crate::{group::Group, process::Process, program::isolate};
use base64::{Engine, engine::general_purpose::STANDARD};
use moestro::{
    demo,
    tools::synth::{self, Dimensions},
};
use std::{
    path::Path,
    process::Output,
    thread,
    time::{Duration, Instant},
};
use test_support::process_memory::memory;

const MIB: u64 = 1 << 20;

/// Writes a model of 120 MB. Nearly all bytes belong to experts.
fn model(dir: &Path) {
    let dimensions = Dimensions {
        hidden: 512,
        layers: 8,
        heads: 4,
        linear_key_heads: 4,
        linear_value_heads: 8,
        experts: 64,
        expert_hidden: 256,
        shared_hidden: 256,
        vocab: 2048,
        ..Dimensions::of_35b()
    };
    let tokenizer_files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let options = synth::SynthOptions {
        dimensions,
        seed: 1,
        router_skew: 0.5,
        eos_token_ids: vec![2040],
        shard: 50 << 20,
        threads: 2,
        extras: tokenizer_files.map(|name| (name.to_owned(), demo::file(name).unwrap().to_vec())).into(),
    };
    synth::write(dir, &options, &|_| ()).unwrap();
}

fn bench(model: &Path, group: Option<&Group>, limit: u64, io: &str) -> Output {
    let mut command = crate::group::command(group);
    isolate(&mut command, model);
    command
        .arg("bench")
        .arg(model)
        .args(["--prompt-tokens", "200", "--gen-tokens", "12", "--repeat", "1", "--json", "--expert-io", io])
        .args(["--memory-limit", &limit.to_string()])
        .output()
        .unwrap()
}

#[test]
fn peak_memory_stays_under_the_limit() {
    // In the build directory, because the directory for temporary files may be small.
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = root.path().join("model");
    model(&dir);
    let group = Group::new();
    if group.is_none() {
        eprintln!("cannot create a memory control group: limits are measured, not enforced");
    }
    // A limit that is too small is refused with a message. The smallest sufficient limit depends on the number of cores. The limits
    // below exceed it by a quarter of the experts up
    // to twice the experts.
    let output = bench(&dir, None, MIB, "auto");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the model does not fit in 1.0 MiB (--memory-limit)"), "{stderr}");
    let least = stderr.split_once("; use --memory-limit ").and_then(|(_, rest)| rest.split_once("M or more"));
    let least = least.unwrap_or_else(|| panic!("no limit in {stderr}")).0.parse::<u64>().unwrap() * MIB;
    let experts: u64 = dir.read_dir().unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let mut residencies = Vec::new();
    for limit in [experts / 4, experts / 2, experts, 2 * experts].map(|more| least + more) {
        for io in ["direct", "buffered"] {
            if let Some(group) = &group {
                group.set_margin(limit);
            }
            let output = bench(&dir, group.as_ref(), limit, io);
            let stderr = String::from_utf8_lossy(&output.stderr);
            if io == "direct" && stderr.contains("does not support direct reads") {
                eprintln!("this file system does not support direct reads");
                continue;
            }
            assert!(output.status.success(), "{limit} {io}: {:?} {stderr}", output.status);
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let peak = report["peak_memory"].as_u64().unwrap();
            assert!(peak <= limit, "{io}: {peak} bytes at the peak, the limit is {limit}");
            assert!(report["plan"]["limit"].as_u64().unwrap() <= limit);
            if io == "direct" {
                residencies.push(report["plan"]["residency"].as_f64().unwrap());
            }
        }
    }
    assert!(residencies.windows(2).all(|pair| pair[0] <= pair[1]), "{residencies:?}");
    assert!(residencies.first() < Some(&0.7) && residencies.last() == Some(&1.0), "{residencies:?}");
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
}

#[test]
fn image_memory_stays_under_the_limit() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vision");
    let limit = 300 * MIB;
    let group = Group::with_margin(limit);
    let home = tempfile::tempdir().unwrap();
    let mut command = crate::group::command(group.as_ref());
    isolate(&mut command, home.path());
    let output = command
        .arg("bench")
        .arg(fixture.join("mlx_4bit"))
        .arg("--image")
        .arg(fixture.join("images/noise.jpg"))
        .args([
            "--prompt-tokens",
            "20",
            "--repeat",
            "3",
            "--threads",
            "2",
            "--json",
            "--memory-limit",
            &limit.to_string(),
        ])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?} {stderr}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["image_tokens"], 10);
    let [peak, planned] = ["peak_memory", "planned"].map(|name| report[name].as_u64().unwrap());
    assert!(peak <= limit && planned > 0, "{peak} bytes at the peak, {planned} planned for images");
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
}

/// A square picture, either black or with noise in colour.
fn png(side: u32, is_noise: bool) -> Vec<u8> {
    let (colour, bytes) =
        if is_noise { (image::ExtendedColorType::Rgb8, 3) } else { (image::ExtendedColorType::L8, 1) };
    let noise = |at: u32| if is_noise { (at.wrapping_mul(2_654_435_761) >> 13) as u8 } else { 0 };
    let pixels: Vec<u8> = (0..side * side * bytes).map(noise).collect();
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    image::ImageEncoder::write_image(encoder, &pixels, side, side, colour).unwrap();
    out
}

/// Ends the server. Its memory must have stayed below the limit, and the kernel must have killed no process.
fn check_peak(server: Process, group: Option<Group>, limit: u64) {
    let peak = memory(server.id(), "VmHWM");
    println!("{peak} bytes at the peak of {limit}");
    assert!(peak <= limit, "{peak} bytes at the peak, the limit is {limit}");
    drop(server);
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
}

#[test]
fn hostile_images_stay_under_the_limit() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision/mlx_4bit");
    let limit = 300 * MIB;
    let group = Group::with_margin(limit);
    let limit_text = limit.to_string();
    let server = Process::spawn(
        crate::group::command(group.as_ref()),
        &["--memory-limit", &limit_text, "--ctx-size", "1024", fixture],
    );
    let ask = |pictures: &[&Vec<u8>]| {
        let part = |picture: &&Vec<u8>| {
            let url = format!("data:image/png;base64,{}", STANDARD.encode(picture));
            serde_json::json!({"type": "image_url", "image_url": {"url": url}})
        };
        let parts: Vec<serde_json::Value> = pictures.iter().map(part).collect();
        server.chat(&[serde_json::json!({"role": "user", "content": parts})])
    };
    // Two pictures of 49 and 64 million pixels in a few hundred kilobytes, a picture of common size, and a small
    // picture.
    let [bomb, larger, fitting, small] =
        [(7000, false), (8000, false), (800, true), (100, true)].map(|(side, noise)| png(side, noise));
    for pictures in [vec![&bomb], vec![&larger], vec![&bomb, &larger], vec![&fitting], vec![&small; 16], vec![&small]] {
        let answer = ask(&pictures);
        assert!(answer["error"]["message"].is_string() || answer["choices"].is_array(), "{answer}");
    }
    assert!(ask(&[&bomb])["error"].is_object(), "a bomb does not fit in the memory of requests");
    let answer = ask(&[&fitting]);
    assert!(answer["choices"].is_array(), "an image of common size fits: {answer}");
    assert!(ask(&[&small])["choices"].is_array());
    check_peak(server, group, limit);
}

#[test]
#[ignore = "long: fills a prompt cache"]
fn full_prompt_cache_stays_in_plan() {
    let root = tempfile::tempdir().unwrap();
    let (dir, checkpoints) = (root.path().join("model"), root.path().join("checkpoints"));
    model(&dir);
    let limit = 150 * MIB;
    let group = Group::with_margin(limit);
    let (limit_text, dir_text) = (limit.to_string(), checkpoints.to_str().unwrap());
    let args = [
        "--memory-limit",
        &limit_text,
        "--prompt-cache",
        "24M",
        "--prompt-cache-dir",
        dir_text,
        "--expert-io",
        "direct",
    ];
    let mut args = args.to_vec();
    args.extend(["--ctx-size", "2048", dir.to_str().unwrap()]);
    let server = Process::spawn(crate::group::command(group.as_ref()), &args);
    let talk = |number: usize, turns: usize| -> Vec<serde_json::Value> {
        let words =
            |turn: usize| (0..100).map(|k| format!("w{} ", (number * 7 + turn * 3 + k * k) % 97)).collect::<String>();
        let role = |turn: usize| if turn.is_multiple_of(2) { "user" } else { "assistant" };
        (0..turns).map(|turn| serde_json::json!({"role": role(turn), "content": words(turn)})).collect()
    };
    for number in 0..8 {
        for turns in [1, 3] {
            let answer = server.chat(&talk(number, turns));
            assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 200, "{answer}");
        }
    }
    let health: serde_json::Value = serde_json::from_str(&server.ask("GET", "/health", "")).unwrap();
    let cache = &health["prompt_cache"];
    let [held, most] = ["bytes", "limit"].map(|name| cache[name].as_u64().unwrap());
    assert_eq!(most, 24 * MIB);
    assert_eq!(health["plan"]["prompt_cache"], most);
    assert!(held <= most && held > most / 2, "{cache}");
    assert!(server.metric("moestro_prompt_cache_evictions_total{place=\"memory\"}") > 0);
    assert!(server.metric("moestro_prompt_cache_hits_total{source=\"memory\"}") > 0);
    check_peak(server, group, limit);
}

/// Tests four clients, each of which fills the context of its sequence.
#[test]
#[ignore = "long: fills the context of four sequences"]
fn full_sequences_stay_in_plan() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    model(&dir);
    let limit = 150 * MIB;
    let group = Group::with_margin(limit);
    let limit_text = limit.to_string();
    let server = Process::spawn(
        crate::group::command(group.as_ref()),
        &["--memory-limit", &limit_text, "--parallel", "4", "--ctx-size", "1024", dir.to_str().unwrap()],
    );
    thread::scope(|scope| {
        for client in 0..4 {
            let server = &server;
            scope.spawn(move || {
                let prompt: Vec<u32> = (0..100).map(|at| 100 + (at * 7 + client * 13) % 1500).collect();
                // Without the end token, all answers have full length.
                let body = serde_json::json!({"prompt": prompt, "max_tokens": 924, "logit_bias": {"2040": -100}});
                let answer = server.ask("POST", "/v1/completions", &body.to_string());
                let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
                assert_eq!(answer["usage"]["completion_tokens"], 924, "{answer}");
            });
        }
    });
    assert!(server.metric("moestro_step_sequences_sum") > server.metric("moestro_step_sequences_count"));
    check_peak(server, group, limit);
}

/// Lowers the group's limit while the server answers. The server must free slots, must not be killed, and must not
/// change answers. When the limit rises, the server must restore the slots. The test runs twice: with all experts in
/// memory, and with a part of the experts.
#[test]
#[ignore = "long: waits for a memory shortage"]
fn lower_limit_frees_expert_slots() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    model(&dir);
    for start in [300, 170].map(|mib| mib * MIB) {
        let Some(group) = Group::new() else {
            eprintln!("cannot create a memory control group");
            return;
        };
        group.set(start);
        let server = Process::spawn(
            crate::group::command(Some(&group)),
            &["--prompt-cache", "1M", "--ctx-size", "1024", dir.to_str().unwrap()],
        );
        let ask = |number: usize| {
            let words: String = (0..40).map(|k| format!("w{} ", (number * 7 + k * k) % 97)).collect();
            let answer = server.chat(&[serde_json::json!({"role": "user", "content": words})]);
            answer["choices"][0]["message"].to_string()
        };
        let resident = || memory(server.id(), "VmRSS");
        let [slots, pressure] =
            ["moestro_expert_slots", "moestro_memory_pressure_total"].map(|name| || server.metric(name));
        let expected: Vec<String> = (0..6).map(ask).collect();
        assert!(expected.iter().any(|answer| *answer != expected[0]), "{expected:?}");
        let (all, before) = (slots(), resident());
        assert_eq!((all == 512, pressure()), (start > 200 * MIB, 0), "{all} slots");

        // The new limit removes a quarter of the experts. The margin that must stay free removes some more. Pages of
        // files do not count, because they may belong to the control group of another process.
        let end = memory(server.id(), "RssAnon") - all * (230 << 10) / 4;
        let asking = std::sync::atomic::AtomicBool::new(true);
        thread::scope(|scope| {
            let going = scope.spawn(|| {
                let mut asked = 0;
                while asking.load(std::sync::atomic::Ordering::Relaxed) || asked < 6 {
                    assert_eq!(ask(asked % 6), expected[asked % 6], "answer {asked}");
                    asked += 1;
                }
                asked
            });
            let (mut limit, began) = (start, Instant::now());
            while limit > end && began.elapsed() < Duration::from_secs(600) && !going.is_finished() {
                let lower = (limit - limit / 50).max(end);
                if group.try_set(lower).is_ok() {
                    limit = lower;
                }
                thread::sleep(Duration::from_millis(300));
            }
            asking.store(false, std::sync::atomic::Ordering::Relaxed);
            let asked = going.join().unwrap();
            println!("{start}: down to {limit} of {end} in {:?}, {asked} answers", began.elapsed());
            assert_eq!(limit, end, "the limit could not be lowered");
        });
        let (left, now) = (slots(), resident());
        println!("{all} slots, then {left}; {before} bytes, then {now}; freed slots {} times", pressure());
        assert!(left < all && pressure() > 0, "{left} of {all}");
        assert!(before - now > (all - left) * (170 << 10), "{before} bytes, then {now}");
        assert_eq!(group.kills(), 0);

        group.set(start);
        let began = Instant::now();
        let is_soon = |seconds: u64| began.elapsed() < Duration::from_secs(seconds);
        while slots() < all && (is_soon(20) || slots() <= left && is_soon(300)) {
            (0..6).for_each(|number| assert_eq!(ask(number), expected[number]));
        }
        println!("{} slots after {:?}", slots(), began.elapsed());
        assert!(slots() > left, "no slot came back");
        drop(server);
        assert_eq!(group.kills(), 0);
    }
}
