//! Tests of downloads from a test hub that injects faults.

use super::*;
use std::{collections::HashMap, path::Path, sync::Mutex};
use test_support::hub::{COMMIT, HubState, TestHub, hash};

#[test]
fn mutated_listings_name_nothing_outside_cache() {
    let known = serde_json::json!({ "sha": COMMIT, "siblings": model().iter().filter(|(name, _)| *name != INDEX).map(|(name, bytes)| {
        serde_json::json!({ "rfilename": name, "size": bytes.len(), "blobId": COMMIT, "lfs": { "sha256": hash(bytes) } })
    }).collect::<Vec<_>>() });
    let dir = tempfile::tempdir().unwrap();
    let mut parsed = 0;
    let mut valid = 0;
    for seed in 0..2000 {
        let dice = &mut test_support::mutate::Dice(seed);
        let mut text = known.to_string().into_bytes();
        if dice.below(2) == 0 {
            test_support::mutate::bytes(dice, &mut text);
        } else {
            let mut changed = known.clone();
            test_support::mutate::json(dice, &mut changed);
            text = changed.to_string().into_bytes();
        }
        let Ok(listing) = serde_json::from_slice::<RepoListing>(&text) else { continue };
        parsed += 1;
        if listing.check().is_err() {
            continue;
        }
        valid += 1;
        assert!(cache::is_hash(&listing.sha));
        for file in listing.small_files().into_iter().chain(listing.shards(dir.path()).unwrap_or_default()) {
            assert!(file.name.split('/').all(|part| !part.is_empty() && !part.starts_with('.')), "{}", file.name);
            assert!(file.hash().is_none_or(cache::is_hash));
        }
    }
    assert!(parsed > 100 && valid > 50, "{parsed} parsed, {valid} valid");
}

fn hub_of(hub: &TestHub, home: &Path) -> Hub {
    Hub {
        endpoint: hub.endpoint.clone(),
        token: Some("key".into()),
        cache: home.join("hub"),
        is_offline: false,
        retry_delay: Duration::from_millis(5),
        piece_bytes: PIECE_BYTES,
        save_interval: SAVE_INTERVAL,
        interrupt: DownloadInterrupt::default(),
    }
}

/// A hub with [`model`], an empty directory for downloads, and a client.
fn hub_and_client() -> (TestHub, tempfile::TempDir, Hub) {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = hub_of(&hub, home.path());
    (hub, home, client)
}

/// As [`hub_and_client`], with pieces of 20,000 bytes. The first shard has fifteen pieces.
fn hub_with_pieces() -> (TestHub, tempfile::TempDir, Hub) {
    let (hub, home, client) = hub_and_client();
    (hub, home, Hub { piece_bytes: 20_000, ..client })
}

/// Makes the next download of the second shard fail after 70,000 bytes.
fn break_second_shard(state: &mut HubState) {
    state.disconnects = vec![("model-2.safetensors".into(), 70_000)];
    state.disconnects.extend(vec![("model-2.safetensors".to_string(), 0); MAX_ATTEMPTS as usize + 1]);
}

/// Lets downloads succeed again, and forgets what was requested and sent.
fn restart(state: &mut HubState) {
    state.disconnects.clear();
    state.requested.clear();
    state.lengths.clear();
    state.stops_at = None;
}

fn blobs(home: &tempfile::TempDir) -> PathBuf {
    home.path().join("hub/models--org--name/blobs")
}

/// Number of files that a complete download has removed.
fn parts_and_maps(home: &tempfile::TempDir) -> usize {
    let left = fs::read_dir(blobs(home)).unwrap().map(|entry| entry.unwrap().path());
    left.filter(|path| path.extension().is_some_and(|ending| ending != "lock")).count()
}

/// Downloads the model, of which all files must be complete then. Returns its directory.
fn pull(client: &Hub) -> PathBuf {
    let dir = client.pull("org/name", "main", &|_| ()).unwrap();
    assert!(is_pulled(&dir));
    dir
}

fn pull_error(client: &Hub) -> String {
    client.pull("org/name", "main", &|_| ()).unwrap_err().to_string()
}

fn noise(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// A model with two shards, and files that a model does not need.
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
        ("NOTES.md", b"# hello".to_vec()),
    ]
}

fn is_pulled(dir: &Path) -> bool {
    model()[..5].iter().all(|(name, bytes)| fs::read(dir.join(name)).is_ok_and(|found| found == *bytes))
}

#[test]
fn second_pull_requests_only_the_listing() {
    let (hub, home, client) = hub_and_client();
    assert!(client.local("org/name").is_none());
    let steps = Mutex::new(Vec::new());
    let dir = client.pull("org/name", "main", &|now| steps.lock().unwrap().push((now.on_disk, now.total))).unwrap();
    assert!(is_pulled(&dir));
    assert_eq!(dir, home.path().join("hub/models--org--name/snapshots").join(COMMIT));
    assert!(!dir.join("NOTES.md").exists() && !dir.join("model-unused.safetensors").exists());
    let steps = steps.into_inner().unwrap();
    let total: usize = model()[..5].iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(steps.iter().all(|step| step.1 == total as u64), "the total is right from the first step");
    assert!(steps.windows(2).all(|pair| pair[0].0 <= pair[1].0));
    assert_eq!(steps.last().unwrap().0, total as u64);
    assert_eq!(client.local("org/name").as_deref(), Some(&*dir));
    // A second pull requests only the listing.
    let before = hub.state.lock().unwrap().requests;
    client.pull("org/name", "main", &|_| ()).unwrap();
    assert_eq!(hub.state.lock().unwrap().requests, before + 1);
}

#[test]
fn broken_connection_is_resumed() {
    let (hub, _home, client) = hub_and_client();
    hub.change(|state| {
        state.disconnects = vec![("model-1.safetensors".into(), 100_000), ("model-1.safetensors".into(), 50_000)];
        state.statuses = vec![503, 429];
    });
    pull(&client);
    assert_eq!(hub.starts("model-1.safetensors"), [0, 100_000, 150_000]);
}

#[test]
fn blobs_of_other_revisions_are_reused() {
    let (hub, home, client) = hub_and_client();
    let dir = client.pull("org/name", "main", &|_| ()).unwrap();
    fs::rename(&dir, dir.with_file_name("0ld")).unwrap();
    // This is the state on disk if the process was killed between the last byte and the rename.
    let blob = blobs(&home).join(hash(&noise(1, 300_000)));
    fs::rename(&blob, blob.with_extension("part")).unwrap();
    hub.change(|state| state.requested.clear());
    pull(&client);
    assert_eq!(hub.starts("model-1.safetensors"), [0; 0], "its hash shows that it is complete");
    assert_eq!(hub.starts("model-2.safetensors"), [0; 0]);
}

#[test]
fn listing_without_sizes_is_enough() {
    let (hub, _home, client) = hub_and_client();
    hub.change(|state| state.hides_sizes = true);
    pull(&client);
    let before = hub.state.lock().unwrap().requested.len();
    pull(&client);
    assert_eq!(hub.state.lock().unwrap().requested.len(), before, "no file is downloaded twice");
}

#[test]
fn wrong_ranges_and_longer_files_fail() {
    let grows = |state: &mut HubState| state.grows_files = true;
    // The hub sends a range from another offset, or a file that is longer than the listing says, also without a length.
    let changes: [&dyn Fn(&mut HubState); 3] = [&|state| state.shifts_ranges = true, &grows, &|state| {
        grows(state);
        (state.ignores_ranges, state.hides_ranges, state.hides_lengths) = (true, true, true);
        state.disconnects = Vec::new();
    }];
    for change in changes {
        let (hub, home, client) = hub_and_client();
        hub.change(|state| state.disconnects = vec![("model-1.safetensors".into(), 100_000)]);
        hub.change(change);
        let error = pull_error(&client);
        assert!(error.contains(&format!("{} sent ", hub.endpoint)), "{error}");
        let largest = fs::read_dir(blobs(&home)).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).max();
        assert!(largest.unwrap() <= 300_000);
    }
}

#[test]
fn responses_without_content_range_are_enough() {
    for hides_sizes in [false, true] {
        let (hub, _home, client) = hub_with_pieces();
        hub.change(|state| {
            state.hides_ranges = true;
            state.hides_sizes = hides_sizes;
            state.disconnects = vec![("model-1.safetensors".into(), 7_000)];
        });
        pull(&client);
    }
}

#[test]
fn responses_without_range_are_not_mixed_up() {
    for (hides_lengths, sends_whole_as_range) in [(true, false), (true, true), (false, true)] {
        let (hub, _home, client) = hub_with_pieces();
        hub.change(|state| {
            state.hides_ranges = true;
            state.hides_lengths = hides_lengths;
            state.sends_whole_as_range = sends_whole_as_range;
            state.disconnects = vec![("model-1.safetensors".into(), 7_000), ("model-2.safetensors".into(), 70_000)];
        });
        pull(&client);
    }
}

#[test]
fn further_templates_are_pulled() {
    let name = "additional_chat_templates/tool_use.jinja";
    let hub = TestHub::new(&[&model()[..], &[(name, b"tools".to_vec())]].concat());
    let home = tempfile::tempdir().unwrap();
    let dir = pull(&hub_of(&hub, home.path()));
    assert_eq!(fs::read(dir.join(name)).unwrap(), b"tools");
}

#[test]
fn files_in_folders_are_pulled() {
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "weights/model-2.safetensors"}}"#;
    let files = [
        ("config.json", b"{}".to_vec()),
        ("processor_config.json", b"{}".to_vec()),
        (INDEX, index.into()),
        ("model-1.safetensors", noise(1, 300)),
        ("weights/model-2.safetensors", noise(2, 300)),
        ("weights/model-3.safetensors", noise(3, 300)),
        ("optiq/mtp.safetensors", noise(4, 300)),
        ("optiq/optiq_vision.safetensors", noise(5, 300)),
    ];
    let (hub, home) = (TestHub::new(&files), tempfile::tempdir().unwrap());
    let client = hub_of(&hub, home.path());
    let dir = client.pull("org/name", "main", &|_| ()).unwrap();
    for (name, bytes) in &files {
        let found = fs::read(dir.join(name)).ok();
        assert_eq!(found.as_ref(), (*name != "weights/model-3.safetensors").then_some(bytes), "{name}");
    }
    assert_eq!(client.local("org/name").as_deref(), Some(&*dir));
    assert!(client.unused().is_empty());
}

#[test]
fn wrong_variables_get_a_sentence() {
    for endpoint in [ENDPOINT, "http://127.0.0.1:80/hf/", "http://[::1]:80", "https://user:key@mirror.example"] {
        assert_eq!(check_variables(endpoint, Some("hf_key")), Ok(()));
    }
    for endpoint in ["hf-mirror.com", "127.0.0.1:80", "https://", "ftp://a", "http://a b", "http://a/?b=c"] {
        assert!(check_variables(endpoint, None).unwrap_err().starts_with("HF_ENDPOINT is "), "{endpoint}");
    }
    for token in ["a b", "a\nb", "ä"] {
        assert!(check_variables(ENDPOINT, Some(token)).unwrap_err().starts_with("the token, of HF_TOKEN"));
    }
    assert!(["1", "ON", "yes", "True"].iter().all(|word| is_true(word)));
    assert!(["0", "off", "no", "false", "2"].iter().all(|word| !is_true(word)));
}

#[test]
fn no_request_is_sent_offline() {
    let (hub, _home, client) = hub_and_client();
    let offline = Hub { is_offline: true, ..client };
    let error = offline.pull("org/name", "main", &|_| ()).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable(why) if why.contains("HF_HUB_OFFLINE")), "{error}");
    assert_eq!(hub.state.lock().unwrap().requests, 0);
}

#[test]
fn revision_may_have_slashes() {
    let (hub, home, client) = hub_and_client();
    for revision in ["refs/pr/1", "feature/x"] {
        let dir = client.pull("org/name", revision, &|_| ()).unwrap();
        assert!(is_pulled(&dir));
        let reference = home.path().join("hub/models--org--name/refs").join(revision);
        assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
    }
    assert!(client.local("org/name").is_none(), "the main branch was not pulled");
    let requests = hub.state.lock().unwrap().requests;
    for revision in ["", "/", "a/", "/a", "a//b", "a/../b", "..", "a/.b", "a b", "a?b", "a%2Fb"] {
        assert!(client.pull("org/name", revision, &|_| ()).unwrap_err().to_string().contains("is not a branch"));
    }
    assert_eq!(hub.state.lock().unwrap().requests, requests);
}

#[test]
fn model_is_complete_without_unpublished_shards() {
    let (hub, _home, client) = hub_and_client();
    hub.change(|state| _ = state.files.remove("model-2.safetensors"));
    let dir = client.pull("org/name", "main", &|_| ()).unwrap();
    // The model is complete without a request, but not if a file of the repository is lost.
    assert_eq!(client.local("org/name").as_deref(), Some(&*dir));
    fs::remove_file(dir.join("model-1.safetensors")).unwrap();
    assert!(client.local("org/name").is_none());
}

#[test]
fn wrong_checksum_fails_and_removes_file() {
    let (hub, _home, client) = hub_and_client();
    client.pull("org/name", "main", &|_| ()).unwrap();
    hub.change(|state| state.corrupts = true);
    let dir = client.local("org/name").unwrap();
    fs::remove_file(fs::canonicalize(dir.join("model-2.safetensors")).unwrap()).unwrap();
    fs::remove_file(dir.join("model-2.safetensors")).unwrap();
    let text = pull_error(&client);
    assert!(text.contains("model-2.safetensors") && text.contains("SHA-256"), "{text}");
    assert!(!dir.join("model-2.safetensors").exists());
    hub.change(|state| state.corrupts = false);
    pull(&client);
}

#[test]
fn denied_requests_give_hints() {
    let (hub, _home, mut client) = hub_and_client();
    let text = client.pull("org/other", "main", &|_| ()).unwrap_err().to_string();
    assert!(text.contains("org/other: the hub has no such model"), "{text}");
    hub.change(|state| state.token = Some("another".into()));
    let text = pull_error(&client);
    assert!(text.contains("private or gated; HF_TOKEN must grant access"), "{text}");
    client.token = None;
    let text = pull_error(&client);
    assert!(text.contains("set HF_TOKEN or run `hf auth login` to access it"), "{text}");
    client.token = Some("another".into());
    pull(&client);
    // If the hub is unreachable, a complete model is found without a request.
    client.endpoint = "http://127.0.0.1:1".into();
    assert!(client.pull("org/name", "main", &|_| ()).is_err());
    assert!(client.local("org/name").is_some());
}

#[test]
fn pieces_are_transferred_in_parallel() {
    let (hub, home, client) = hub_with_pieces();
    // The hub answers, but sends no shard until six pieces are requested.
    hub.change(|state| state.stops_at = Some(1000));
    let steps = Mutex::new(Vec::new());
    let max = || hub.state.lock().unwrap().max_sending;
    let dir = std::thread::scope(|scope| {
        let pull = || client.pull("org/name", "main", &|now| steps.lock().unwrap().push((now.on_disk, now.total)));
        let pull = scope.spawn(pull);
        for _ in 0..3000 {
            if max() >= 6 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        hub.change(|state| state.stops_at = None);
        pull.join().unwrap().unwrap()
    });
    assert!(is_pulled(&dir));
    let mut starts = hub.starts("model-1.safetensors");
    starts.sort_unstable();
    assert_eq!(starts, (0..15).map(|n| n * 20_000).collect::<Vec<_>>(), "each piece once");
    assert!(max() >= 6, "{} at a time", max());
    let steps = steps.into_inner().unwrap();
    assert!(steps.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 == pair[1].1));
    assert_eq!(steps.last().unwrap().0, steps.last().unwrap().1);
    assert_eq!(parts_and_maps(&home), 0);
}

#[test]
fn finished_file_has_no_progress() {
    let shards: Vec<String> = (0..40).map(|number| format!("model-{number}.safetensors")).collect();
    let map: HashMap<&String, &String> = shards.iter().map(|name| (name, name)).collect();
    let index = serde_json::json!({ "weight_map": map }).to_string().into_bytes();
    let mut files = vec![("config.json", b"{}".to_vec()), (INDEX, index)];
    files.extend(shards.iter().map(|name| (name.as_str(), name.repeat(100).into_bytes())));
    let hub = TestHub::new(&files);
    let home = tempfile::tempdir().unwrap();
    // The progress is saved all the time, also at the moment at which a file is done.
    let client = Hub { save_interval: Duration::ZERO, ..hub_of(&hub, home.path()) };
    client.pull("org/name", "main", &|_| ()).unwrap();
    assert_eq!(parts_and_maps(&home), 0);
}

#[test]
fn interrupted_pieces_resume_where_they_stopped() {
    let (hub, home, client) = hub_with_pieces();
    let one = "model-1.safetensors".to_string();
    hub.change(|state| {
        state.disconnects = (0..10).map(|n| (one.clone(), 19_000 - n * 7)).collect();
        state.disconnects.extend((0..400).map(|_| (one.clone(), 0)));
    });
    let text = pull_error(&client);
    assert!(text.contains("model-1.safetensors"), "{text}");
    assert!(client.local("org/name").is_none(), "an incomplete model is not found");
    let blob = blobs(&home).join(hash(&noise(1, 300_000)));
    let map: serde_json::Value = serde_json::from_slice(&fs::read(blob.with_extension("map")).unwrap()).unwrap();
    let missing: Vec<[u64; 2]> = serde_json::from_value(map["missing"].clone()).unwrap();
    let count: u64 = missing.iter().map(|range| range[1] - range[0]).sum();
    assert!((1..300_000).contains(&count), "{map}");
    hub.change(restart);
    pull(&client);
    let starts = hub.starts(&one);
    let inside = |start: &usize| missing.iter().any(|range| (range[0]..range[1]).contains(&(*start as u64)));
    assert!(!starts.is_empty() && starts.iter().all(inside), "{starts:?} of {map}: only missing ranges");
}

#[test]
fn hub_without_ranges_sends_whole_files() {
    let (hub, _home, client) = hub_with_pieces();
    hub.change(|state| {
        state.ignores_ranges = true;
        state.disconnects = vec![("model-2.safetensors".into(), 70_000)];
    });
    pull(&client);
    let times = |name| hub.state.lock().unwrap().requested.iter().filter(|(file, _)| file == name).count();
    assert_eq!((times("model-1.safetensors"), times("model-2.safetensors")), (1, 2), "an interrupted file restarts");
}

#[test]
fn pieces_of_two_versions_never_mix() {
    // If a file changes during its download, the part file mixes two versions. With a checksum, the final verification
    // fails. Without a checksum, the ETag shows the change, and the download of the file restarts.
    for hides_sizes in [false, true] {
        let (hub, _home, client) = hub_with_pieces();
        let later = noise(77, 300_000);
        hub.change(|state| {
            state.hides_sizes = hides_sizes;
            state.changes = vec![("model-1.safetensors".into(), 4, later.clone())];
        });
        let pulled = client.pull("org/name", "main", &|_| ());
        if hides_sizes {
            assert!(fs::read(pulled.unwrap().join("model-1.safetensors")).unwrap() == later)
        } else {
            let text = pulled.unwrap_err().to_string();
            assert!(text.contains("model-1.safetensors") && text.contains("SHA-256"), "{text}");
        }
    }
}

#[test]
fn concurrent_runs_download_each_piece_once() {
    let (hub, home, _) = hub_with_pieces();
    hub.change(|state| state.bytes_per_second = Some(400_000));
    std::thread::scope(|scope| {
        let run = || pull(&Hub { piece_bytes: 20_000, ..hub_of(&hub, home.path()) });
        (0..2).for_each(|_| drop(scope.spawn(run)));
    });
    let mut starts = hub.starts("model-1.safetensors");
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts.len(), hub.starts("model-1.safetensors").len(), "no piece is requested twice");
}

#[test]
fn oversized_small_file_is_rejected() {
    for (name, size) in [("config.json", 40 << 30), ("model.safetensors.index.json", 200 << 20)] {
        let (hub, _home, client) = hub_and_client();
        hub.change(|state| _ = state.listed_sizes.insert(name.into(), size));
        let text = pull_error(&client);
        assert!(text.contains(name) && text.contains("are allowed"), "{text}");
        assert!(hub.state.lock().unwrap().requested.is_empty(), "no file was requested");
    }
}

#[test]
fn too_many_shards_are_rejected() {
    let names: Vec<String> = (0..1001).map(|n| format!("model-{n}.safetensors")).collect();
    let files: Vec<(&str, Vec<u8>)> = names.iter().map(|name| (name.as_str(), vec![0])).collect();
    let hub = TestHub::new(&files);
    let home = tempfile::tempdir().unwrap();
    let text = pull_error(&hub_of(&hub, home.path()));
    assert!(text.contains("1001 weight files"), "{text}");
    assert!(hub.state.lock().unwrap().requested.is_empty(), "no file was requested");
}

#[test]
fn resumed_download_reports_received_bytes_only() {
    let (hub, _home, client) = hub_and_client();
    hub.change(|state| state.disconnects = (0..10).map(|_| ("model-1.safetensors".to_string(), 0)).collect());
    hub.change(|state| state.disconnects.push(("model-1.safetensors".into(), 100_000)));
    pull_error(&client);
    hub.change(restart);
    let last = Mutex::new(None);
    client.pull("org/name", "main", &|now| *last.lock().unwrap() = Some(now)).unwrap();
    let last = last.into_inner().unwrap().unwrap();
    let sent: usize = hub.state.lock().unwrap().lengths.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!((last.on_disk, last.received), (last.total, sent as u64));
    assert!(last.received < last.total - 90_000, "{last:?}");
}

#[test]
fn interrupted_download_saves_its_progress() {
    let (hub, home, client) = hub_with_pieces();
    hub.change(|state| state.stops_at = Some(60_000));
    let received = Mutex::new(0);
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| client.pull("org/name", "main", &|now| *received.lock().unwrap() = now.received));
        while *received.lock().unwrap() < 40_000 && !pull.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        client.interrupt();
        // Connections that wait for bytes end with the next bytes.
        hub.change(|state| state.stops_at = None);
        assert!(pull.join().unwrap().unwrap_err().to_string().contains("interrupted"));
    });
    let received = *received.lock().unwrap();
    hub.change(restart);
    let resumed = Mutex::new(0);
    // The old client stays interrupted.
    let client = Hub { piece_bytes: 20_000, ..hub_of(&hub, home.path()) };
    client.pull("org/name", "main", &|now| *resumed.lock().unwrap() = now.received).unwrap();
    let total: usize = model()[..5].iter().map(|(_, bytes)| bytes.len()).sum();
    let index = model()[2].1.len();
    assert_eq!(received + *resumed.lock().unwrap(), (total - index) as u64, "no byte was requested twice");
}

#[test]
fn full_disk_is_reported_in_gigabytes() {
    let home = tempfile::tempdir().unwrap();
    let hub = hub_of(&TestHub::new(&model()), home.path());
    let text = hub.check_free_space(1 << 60).unwrap_err().to_string();
    assert!(text.contains("needs 1152921504.6 GB more, but only"), "{text}");
}

#[test]
fn files_of_unfinished_download_are_removed() {
    let (hub, home, client) = hub_and_client();
    let blobs = blobs(&home);
    let [first, second] = [noise(1, 300_000), noise(2, 200_000)].map(|bytes| blobs.join(hash(&bytes)));
    hub.change(break_second_shard);
    pull_error(&client);
    let [unused] = client.unused().try_into().unwrap();
    assert_eq!((&*unused.id, &unused.dir), ("org/name", &blobs));
    assert!([first.clone(), second.with_extension("part")].iter().all(|file| unused.files.contains(file)));
    // Other programs write these.
    let others = [format!("{}.sync.part", "a".repeat(64)), format!("{}.part", "b".repeat(64)), "c".repeat(64)];
    others.iter().for_each(|name| fs::write(blobs.join(name), name).unwrap());
    assert_eq!(client.unused(), [unused]);

    let lock = FileLock::try_lock(File::create(second.with_extension("lock")).unwrap()).unwrap();
    assert!(client.remove_unused("org/name").unwrap_err().to_string().contains("being downloaded"));
    assert!(first.exists());
    drop(lock);
    client.remove_unused("org/name").unwrap();
    assert!(client.unused().is_empty() && !first.exists() && others.iter().all(|name| blobs.join(name).exists()));
    let links = fs::read_dir(home.path().join("hub/models--org--name/snapshots").join(COMMIT)).unwrap();
    assert_eq!(links.count(), 0, "no link leads to a removed file");

    // A complete model is in use, and an older revision of it is not.
    hub.change(|state| state.disconnects.clear());
    pull(&client);
    assert!(client.unused().is_empty());
    hub.change(|state| {
        state.commit = Some("1".repeat(40));
        state.files.insert("model-2.safetensors".into(), noise(7, 200_000));
    });
    client.pull("org/name", "main", &|_| ()).unwrap();
    let [older] = client.unused().try_into().unwrap();
    assert_eq!(older.files, [second]);
    client.remove_unused("org/name").unwrap();
    assert!(client.local("org/name").is_some() && client.unused().is_empty());
}
