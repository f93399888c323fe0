//! Against a hub of our own.

use super::*;
use server::{COMMIT, Shelf, TestHub, hash};
use std::sync::Mutex;

#[path = "../../../tests/support/hub.rs"]
mod server;

#[path = "../../../tests/support/mutate.rs"]
mod mutate;

#[test]
fn two_thousand_listings_name_nothing_outside_the_cache() {
    let known = serde_json::json!({ "sha": COMMIT, "siblings": model().iter().filter(|(name, _)| *name != listing::INDEX).map(|(name, bytes)| {
        serde_json::json!({ "rfilename": name, "size": bytes.len(), "blobId": COMMIT, "lfs": { "sha256": hash(bytes) } })
    }).collect::<Vec<_>>() });
    let dir = tempfile::tempdir().unwrap();
    let (mut read, mut sound) = (0, 0);
    for seed in 0..2000 {
        let dice = &mut mutate::Dice(seed);
        let mut text = known.to_string().into_bytes();
        if dice.below(2) == 0 {
            mutate::bytes(dice, &mut text);
        } else {
            let mut changed = known.clone();
            mutate::json(dice, &mut changed);
            text = changed.to_string().into_bytes();
        }
        let Ok(listing) = serde_json::from_slice::<Listing>(&text) else { continue };
        read += 1;
        if listing.check().is_err() {
            continue;
        }
        sound += 1;
        assert!(cache::is_hash(&listing.sha));
        for file in listing.small().into_iter().chain(listing.shards(dir.path()).unwrap_or_default()) {
            assert!(!file.name.contains('/') && !file.name.starts_with('.'), "{}", file.name);
            assert!(file.hash().is_none_or(cache::is_hash));
        }
    }
    assert!(read > 100 && sound > 50, "{read} read, {sound} sound");
}

fn client_of(hub: &TestHub, home: &Path) -> Hub {
    Hub {
        endpoint: hub.endpoint.clone(),
        token: Some("key".into()),
        cache: home.join("hub"),
        wait: Duration::from_millis(5),
        piece: PIECE,
    }
}

fn noise(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// A model of two shards, and files that nobody needs.
fn model() -> Vec<(&'static str, Vec<u8>)> {
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", noise(3, 5000)),
        ("model.safetensors.index.json", index.into()),
        ("model-1.safetensors", noise(1, 300_000)),
        ("model-2.safetensors", noise(2, 200_000)),
        ("model-unused.safetensors", noise(9, 1000)),
        ("pytorch_model.bin", noise(4, 1000)),
        ("README.md", b"# hello".to_vec()),
    ]
}

fn is_whole(dir: &Path) -> bool {
    model()[..5].iter().all(|(name, bytes)| fs::read(dir.join(name)).is_ok_and(|found| found == *bytes))
}

#[test]
fn a_model_is_pulled_once() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = client_of(&hub, home.path());
    assert!(client.local("org/name").is_none());
    let steps = Mutex::new(Vec::new());
    let dir = client.pull("org/name", &|here, total| steps.lock().unwrap().push((here, total))).unwrap();
    assert!(is_whole(&dir));
    assert_eq!(dir, home.path().join("hub/models--org--name/snapshots").join(COMMIT));
    assert!(!dir.join("README.md").exists() && !dir.join("model-unused.safetensors").exists());
    let steps = steps.into_inner().unwrap();
    let total: usize = model()[..5].iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(steps.iter().all(|step| step.1 == total as u64), "the total is known and right from the first step");
    assert!(steps.windows(2).all(|pair| pair[0].0 <= pair[1].0));
    assert_eq!(steps.last().unwrap().0, total as u64);
    assert_eq!(client.local("org/name").as_deref(), Some(&*dir));
    // Again: nothing but the listing is asked for.
    let before = hub.shelf.lock().unwrap().requests;
    client.pull("org/name", &|_, _| ()).unwrap();
    assert_eq!(hub.shelf.lock().unwrap().requests, before + 1);
}

#[test]
fn a_broken_connection_is_continued() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    hub.change(|shelf| {
        shelf.breaks = vec![("model-1.safetensors".into(), 100_000), ("model-1.safetensors".into(), 50_000)];
        shelf.refuses = vec![503, 429];
    });
    let dir = client_of(&hub, home.path()).pull("org/name", &|_, _| ()).unwrap();
    assert!(is_whole(&dir));
    assert_eq!(hub.starts("model-1.safetensors"), [0, 100_000, 150_000]);
}

#[test]
fn a_later_run_goes_on_where_the_last_one_stopped() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = client_of(&hub, home.path());
    hub.change(|shelf| {
        shelf.breaks = vec![("model-2.safetensors".into(), 70_000)];
        shelf.breaks.extend(vec![("model-2.safetensors".to_string(), 0); ATTEMPTS as usize + 1]);
    });
    let text = client.pull("org/name", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("model-2.safetensors"), "{text}");
    assert!(client.local("org/name").is_none(), "what is incomplete is not found");
    hub.change(|shelf| {
        shelf.breaks.clear();
        shelf.asked.clear();
    });
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    assert_eq!(hub.starts("model-2.safetensors"), [70_000]);
    assert_eq!(hub.starts("model-1.safetensors"), [0; 0]);
    assert!(client.local("org/name").is_some());
}

#[test]
fn what_other_revisions_have_is_used() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = client_of(&hub, home.path());
    let dir = client.pull("org/name", &|_, _| ()).unwrap();
    fs::rename(&dir, dir.with_file_name("0ld")).unwrap();
    // Complete, but killed before it got its name.
    let blob = home.path().join("hub/models--org--name/blobs").join(hash(&noise(1, 300_000)));
    fs::rename(&blob, blob.with_extension("part")).unwrap();
    hub.change(|shelf| shelf.asked.clear());
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    assert_eq!(hub.starts("model-1.safetensors"), [0; 0], "it is whole, which its hash shows");
    assert_eq!(hub.starts("model-2.safetensors"), [0; 0]);
}

#[test]
fn a_hub_that_says_little_is_enough() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    hub.change(|shelf| shelf.says_little = true);
    let client = client_of(&hub, home.path());
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    let before = hub.shelf.lock().unwrap().asked.len();
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    assert_eq!(hub.shelf.lock().unwrap().asked.len(), before, "nothing is downloaded twice");
}

#[test]
fn neither_more_nor_other_bytes_than_asked_for_are_kept() {
    // Ranges that begin elsewhere, and files that are longer than the listing says.
    for change in [|shelf: &mut Shelf| shelf.shifts = true, |shelf: &mut Shelf| shelf.grows = true] {
        let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
        hub.change(change);
        hub.change(|shelf| shelf.breaks = vec![("model-1.safetensors".into(), 100_000)]);
        let error = client_of(&hub, home.path()).pull("org/name", &|_, _| ()).unwrap_err().to_string();
        assert!(error.contains("the hub sent"), "{error}");
        let blobs = home.path().join("hub/models--org--name/blobs");
        let most = fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).max();
        assert!(most.unwrap() <= 300_000);
    }
}

#[test]
fn damage_is_noticed() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = client_of(&hub, home.path());
    client.pull("org/name", &|_, _| ()).unwrap();
    hub.change(|shelf| shelf.lies = true);
    let dir = client.local("org/name").unwrap();
    fs::remove_file(fs::canonicalize(dir.join("model-2.safetensors")).unwrap()).unwrap();
    fs::remove_file(dir.join("model-2.safetensors")).unwrap();
    let text = client.pull("org/name", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("model-2.safetensors") && text.contains("SHA-256"), "{text}");
    assert!(!dir.join("model-2.safetensors").exists());
    hub.change(|shelf| shelf.lies = false);
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
}

#[test]
fn refusals_in_words() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let mut client = client_of(&hub, home.path());
    let text = client.pull("org/other", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("org/other: the hub has no such model"), "{text}");
    hub.change(|shelf| shelf.token = Some("another".into()));
    let text = client.pull("org/name", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("private or gated; HF_TOKEN must be allowed"), "{text}");
    client.token = None;
    let text = client.pull("org/name", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("HF_TOKEN opens those"), "{text}");
    client.token = Some("another".into());
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    // Nobody there: what is complete is found without asking.
    client.endpoint = "http://127.0.0.1:1".into();
    assert!(client.pull("org/name", &|_, _| ()).is_err());
    assert!(client.local("org/name").is_some());
}

/// A hub that cuts files into pieces of 20,000 bytes, which is fifteen for the first shard.
fn in_pieces(hub: &TestHub, home: &Path) -> Hub {
    Hub { piece: 20_000, ..client_of(hub, home) }
}

#[test]
fn pieces_come_side_by_side() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    hub.change(|shelf| shelf.rate = Some(100_000));
    let began = std::time::Instant::now();
    let steps = Mutex::new(Vec::new());
    let dir = in_pieces(&hub, home.path())
        .pull("org/name", &|here, total| steps.lock().unwrap().push((here, total)))
        .unwrap();
    let seconds = began.elapsed().as_secs_f64();
    assert!(is_whole(&dir));
    let mut starts = hub.starts("model-1.safetensors");
    starts.sort_unstable();
    assert_eq!(starts, (0..15).map(|n| n * 20_000).collect::<Vec<_>>(), "each piece once");
    let most = hub.shelf.lock().unwrap().most_sending;
    assert!(most >= 6, "{most} at a time");
    // One connection would need five seconds for these bytes.
    assert!(seconds < 4.0, "{seconds} s");
    let steps = steps.into_inner().unwrap();
    assert!(steps.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 == pair[1].1));
    assert_eq!(steps.last().unwrap().0, steps.last().unwrap().1);
    let blobs = fs::read_dir(home.path().join("hub/models--org--name/blobs")).unwrap();
    let left = blobs.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e != "lock"));
    assert_eq!(left.count(), 0, "neither parts nor maps stay");
}

#[test]
fn pieces_that_break_are_gone_on_with_now_and_later() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = in_pieces(&hub, home.path());
    let one = "model-1.safetensors".to_string();
    hub.change(|shelf| {
        shelf.breaks = (0..10).map(|n| (one.clone(), 19_000 - n * 7)).collect();
        shelf.breaks.extend((0..400).map(|_| (one.clone(), 0)));
    });
    let text = client.pull("org/name", &|_, _| ()).unwrap_err().to_string();
    assert!(text.contains("model-1.safetensors"), "{text}");
    let blob = home.path().join("hub/models--org--name/blobs").join(hash(&noise(1, 300_000)));
    let map: serde_json::Value = serde_json::from_slice(&fs::read(blob.with_extension("map")).unwrap()).unwrap();
    let missing: u64 =
        map["missing"].as_array().unwrap().iter().map(|r| r[1].as_u64().unwrap() - r[0].as_u64().unwrap()).sum();
    assert!((1..300_000).contains(&missing), "{map}");
    hub.change(|shelf| {
        shelf.breaks.clear();
        shelf.asked.clear();
    });
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    let ranges = map["missing"].as_array().unwrap();
    let starts = hub.starts(&one);
    let inside = |start: &usize| {
        ranges.iter().any(|r| (r[0].as_u64().unwrap()..r[1].as_u64().unwrap()).contains(&(*start as u64)))
    };
    assert!(!starts.is_empty() && starts.iter().all(inside), "{starts:?} of {map}: only what was missing");
}

#[test]
fn a_hub_without_ranges_sends_each_file_once() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    hub.change(|shelf| {
        shelf.whole = true;
        shelf.breaks = vec![("model-2.safetensors".into(), 70_000)];
    });
    assert!(is_whole(&in_pieces(&hub, home.path()).pull("org/name", &|_, _| ()).unwrap()));
    let times = |name| hub.shelf.lock().unwrap().asked.iter().filter(|(file, _)| file == name).count();
    assert_eq!((times("model-1.safetensors"), times("model-2.safetensors")), (1, 2), "what broke begins anew");
}

#[test]
fn pieces_of_two_versions_are_never_one_file() {
    // With a checksum it is found at the end; without, by the ETag, and the file begins anew.
    for says_little in [false, true] {
        let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
        let later = noise(77, 300_000);
        hub.change(|shelf| {
            shelf.says_little = says_little;
            shelf.changes = vec![("model-1.safetensors".into(), 4, later.clone())];
        });
        let pulled = in_pieces(&hub, home.path()).pull("org/name", &|_, _| ());
        match says_little {
            true => assert!(fs::read(pulled.unwrap().join("model-1.safetensors")).unwrap() == later),
            false => {
                let text = pulled.unwrap_err().to_string();
                assert!(text.contains("model-1.safetensors") && text.contains("SHA-256"), "{text}");
            }
        }
    }
}

#[test]
fn two_runs_at_once_bring_each_file_once() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    hub.change(|shelf| shelf.rate = Some(400_000));
    std::thread::scope(|scope| {
        let run = || in_pieces(&hub, home.path()).pull("org/name", &|_, _| ()).unwrap();
        let (one, two) = (scope.spawn(run), scope.spawn(run));
        assert!(is_whole(&one.join().unwrap()) && is_whole(&two.join().unwrap()));
    });
    let mut starts = hub.starts("model-1.safetensors");
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts.len(), hub.starts("model-1.safetensors").len(), "no piece twice");
}
