//! Tests of `moestro pull`. `HF_ENDPOINT` contains the address of a test hub.

#![cfg(feature = "hub")]

use crate::program;
use moestro::demo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};
use test_support::hub::{COMMIT, TestHub};

fn moestro(args: &[&str], endpoint: &str, home: &Path) -> Output {
    command(args, endpoint, home).output().unwrap()
}

fn command(args: &[&str], endpoint: &str, home: &Path) -> Command {
    let mut command = program::moestro(home);
    command.args(args).env("HF_HOME", home.join("hf"));
    command.env("HF_ENDPOINT", endpoint).env("HF_TOKEN", "key");
    command
}

fn demo_files() -> Vec<(&'static str, Vec<u8>)> {
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    names.iter().map(|&name| (name, demo::file(name).unwrap().to_vec())).collect()
}

/// All files below a directory.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn hostile_hub_writes_nothing_outside_cache() {
    for (etag, commit) in [
        (Some("../../../../mine"), None),
        (Some("/HOME/mine"), None),
        (None, Some("../../../../../mine")),
        (None, Some("/HOME/mine")),
    ] {
        let home = tempfile::tempdir().unwrap();
        let mine = home.path().join("mine");
        std::fs::write(&mine, "precious").unwrap();
        let path_in_home = |text: Option<&str>| text.map(|text| text.replace("/HOME", home.path().to_str().unwrap()));
        let hub = TestHub::new(&demo_files());
        hub.change(|state| (state.etag, state.commit) = (path_in_home(etag), path_in_home(commit)));
        let pulled = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
        let stderr = String::from_utf8_lossy(&pulled.stderr);
        assert_eq!(std::fs::read_to_string(&mine).unwrap(), "precious", "{etag:?} {commit:?}: {stderr}");
        let inside = home.path().join("hf/hub/models--org--name");
        let outside: Vec<_> =
            files_below(home.path()).into_iter().filter(|path| !path.starts_with(&inside) && *path != mine).collect();
        assert!(outside.is_empty(), "{outside:?}");
        // A wrong ETag is harmless. An invalid commit makes the pull fail.
        assert_eq!(pulled.status.success(), commit.is_none(), "{stderr}");
        assert!(commit.is_none() || stderr.contains("is not a commit"), "{stderr}");
    }
}

#[test]
fn token_is_sent_to_hub_only() {
    let (hub, cdn) = (TestHub::new(&demo_files()), TestHub::new(&demo_files()));
    hub.change(|state| {
        state.redirect_to = Some(cdn.endpoint.clone());
        state.token = Some("key".into());
        state.hides_sizes = true;
    });
    let home = tempfile::tempdir().unwrap();
    let pulled = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    assert!(pulled.status.success(), "{}", String::from_utf8_lossy(&pulled.stderr));
    let tokens = |hub: &TestHub| hub.state.lock().unwrap().tokens.clone();
    assert!(tokens(&hub).iter().all(|token| token.as_deref() == Some("Bearer key")));
    assert!(tokens(&cdn).len() >= 5 && tokens(&cdn).iter().all(Option::is_none), "{:?}", tokens(&cdn));
    // The two servers redirect to each other, so there is a redirect loop.
    cdn.change(|state| state.redirect_to = Some(hub.endpoint.clone()));
    let home = tempfile::tempdir().unwrap();
    let pulled = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    let stderr = String::from_utf8_lossy(&pulled.stderr);
    assert!(!pulled.status.success() && stderr.contains("redirects"), "{stderr}");
}

/// Kills a pull by SIGKILL while pieces of a shard are transferred in parallel. The next run must request only the
/// missing bytes.
#[test]
fn killed_pull_is_resumed() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors"}}"#;
    let shard: Vec<u8> = (0..100u64 << 20).step_by(8).flat_map(|at| (at * 0x9E37_79B9).to_le_bytes()).collect();
    let files = [
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.to_vec()),
        ("model-1.safetensors", shard.clone()),
    ];
    let hub = TestHub::new(&files);
    hub.change(|state| state.bytes_per_second = Some(1 << 20));
    // In the build directory, because the directory for temporary files may be small.
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut killed = command(&["pull", "org/name"], &hub.endpoint, home.path()).spawn().unwrap();
    // Wait until several pieces are transferred and the progress was saved once.
    let blob =
        home.path().join("hf/hub/models--org--name/blobs").join(test_support::hub::hash(&shard)).with_extension("map");
    let saved_missing = || {
        let map: serde_json::Value = serde_json::from_slice(&std::fs::read(&blob).ok()?).ok()?;
        let ranges = map["missing"].as_array()?.iter();
        Some(ranges.map(|range| range[1].as_u64().unwrap() - range[0].as_u64().unwrap()).sum::<u64>())
    };
    let began = std::time::Instant::now();
    let max_sending = || hub.state.lock().unwrap().max_sending;
    while max_sending() <= 2 || saved_missing().is_none_or(|missing| missing == 100 << 20) {
        assert!(began.elapsed().as_secs() < 60 && killed.try_wait().unwrap().is_none());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let missing = saved_missing().unwrap() as usize;
    println!("{missing} bytes were missing; {} connections", max_sending());
    // Another hub, because this one may still read requests that the killed program sent.
    let hub = TestHub::new(&files);
    let again = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let dir = String::from_utf8(again.stdout).unwrap();
    assert!(std::fs::read(Path::new(dir.trim()).join("model-1.safetensors")).unwrap() == shard);
    assert_eq!(hub.sent("model-1.safetensors"), missing, "bytes on disk were not requested again");
}

#[test]
fn pulled_demo_works_offline() {
    let files = demo_files();
    let hub = TestHub::new(&files);
    hub.change(|state| {
        state.disconnects = vec![("model.safetensors".into(), 5_000_000)];
        state.token = Some("key".into());
    });
    let home = tempfile::tempdir().unwrap();

    let pulled = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    let (stderr, dir) = (String::from_utf8_lossy(&pulled.stderr), String::from_utf8_lossy(&pulled.stdout));
    assert!(pulled.status.success(), "{stderr}");
    assert_eq!(Path::new(dir.trim()), home.path().join("hf/hub/models--org--name/snapshots").join(COMMIT));
    assert_eq!(hub.starts("model.safetensors"), [0, 5_000_000], "resumed where the connection broke");
    for (name, bytes) in &files {
        assert_eq!(&std::fs::read(Path::new(dir.trim()).join(name)).unwrap(), bytes);
    }

    // From here on, the hub is unreachable.
    let unreachable = "http://127.0.0.1:1";
    let again = moestro(&["pull", "org/name"], unreachable, home.path());
    assert!(again.status.success() && again.stdout == pulled.stdout);
    assert!(String::from_utf8_lossy(&again.stderr).contains("cannot reach the hub"));
    let info = moestro(&["info", "org/name", "--json"], unreachable, home.path());
    let report: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!((&report["model"], &report["plan"]["strategy"]), (&"org/name".into(), &"resident".into()));
    // A copy on this machine does not hide that the newest revision cannot be downloaded.
    hub.change(|state| {
        state.commit = Some("1".repeat(40));
        state.files.insert("model.safetensors".into(), vec![1; 1000]);
        state.corrupts = true;
    });
    let failed = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(stderr.contains("SHA-256") && stderr.contains("the complete copy on this machine was kept"), "{stderr}");
    assert_eq!((failed.status.code(), failed.stdout.is_empty()), (Some(1), true), "{stderr}");
    let other = moestro(&["serve", "org/other"], &hub.endpoint, home.path());
    let stderr = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && stderr.contains("org/other: the hub has no such model"), "{stderr}");
}

/// Serves `hub` through TLS as `localhost`, with a certificate of an unknown authority. Returns the address of the
/// endpoint.
fn serve_tls(hub: &TestHub) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls");
    let chain = vec![CertificateDer::from_pem_file(dir.join("localhost.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(dir.join("localhost.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let plain = hub.endpoint.trim_start_matches("http://").to_owned();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, plain) = (config.clone(), plain.clone());
            std::thread::spawn(move || {
                let session = rustls::ServerConnection::new(config).unwrap();
                let mut tls = rustls::StreamOwned::new(session, stream);
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") {
                    // A client that does not know the certificate authority disconnects at this point.
                    let Ok(1) = tls.read(&mut byte) else { return };
                    head.push(byte[0]);
                }
                let mut answer = Vec::new();
                let mut hub = TcpStream::connect(&plain).unwrap();
                hub.write_all(&head).unwrap();
                hub.read_to_end(&mut answer).unwrap();
                let _ = tls.write_all(&answer);
                tls.conn.send_close_notify();
                let _ = tls.flush();
            });
        }
    });
    endpoint
}

#[test]
fn system_certificate_authorities_are_trusted() {
    let hub = TestHub::new(&demo_files());
    let endpoint = serve_tls(&hub);
    let authority = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls/authority.pem");
    for named in [None, Some(authority)] {
        let home = tempfile::tempdir().unwrap();
        let mut pull = command(&["pull", "org/name"], &endpoint, home.path());
        if let Some(authority) = &named {
            pull.env("SSL_CERT_FILE", authority);
        }
        let pulled = pull.output().unwrap();
        let stderr = String::from_utf8_lossy(&pulled.stderr);
        assert_eq!(pulled.status.success(), named.is_some(), "{stderr}");
        let requests = hub.state.lock().unwrap().requests;
        match named {
            Some(_) => assert!(requests >= 5, "{requests}"),
            None => assert!(requests == 0 && stderr.to_lowercase().contains("certificate"), "{stderr}"),
        }
    }
}
