//! Against a hub of our own: a thread that speaks as much HTTP as hf-hub asks for.

use super::*;
use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub holds and how it behaves.
#[derive(Default)]
struct Shelf {
    files: HashMap<String, Vec<u8>>,
    /// Sends so many bytes of this file and hangs up, once each.
    breaks: Vec<(String, usize)>,
    /// Answers so many requests with this status first.
    refuses: Vec<u16>,
    /// Sends other bytes than those it has the checksum of.
    lies: bool,
    /// Wants this key.
    token: Option<String>,
    /// `path from-byte` of every file that was asked for.
    asked: Vec<(String, usize)>,
    requests: usize,
}

#[derive(Clone)]
struct TestHub {
    shelf: Arc<Mutex<Shelf>>,
    endpoint: String,
}

impl TestHub {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect();
        let shelf = Arc::new(Mutex::new(Shelf { files, ..Shelf::default() }));
        let hub = Self { shelf, endpoint };
        let served = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = served.clone();
                std::thread::spawn(move || hub.serve(stream));
            }
        });
        hub
    }

    fn change(&self, change: impl FnOnce(&mut Shelf)) {
        change(&mut self.shelf.lock().unwrap());
    }

    /// The bytes asked of a file, by where each request began (those of one byte ask for the size).
    fn starts(&self, file: &str) -> Vec<usize> {
        self.shelf.lock().unwrap().asked.iter().filter(|(name, _)| name == file).map(|(_, from)| *from).collect()
    }

    fn client(&self, home: &Path) -> Hub {
        Hub {
            endpoint: Some(self.endpoint.clone()),
            token: Some("key".into()),
            cache: Cache::new(home.join("hub")),
            wait: Duration::from_millis(5),
        }
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = String::new();
        while reader.read_line(&mut head).is_ok_and(|n| n > 2) {}
        let mut shelf = self.shelf.lock().unwrap();
        shelf.requests += 1;
        let field = |name: &str| {
            let line = head.lines().find(|line| line.to_lowercase().starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_string())
        };
        let path = head.split(' ').nth(1).unwrap_or_default().to_string();
        let denied = shelf.token.as_ref().is_some_and(|key| field("authorization") != Some(format!("Bearer {key}")));
        let status = if denied { Some(401) } else { shelf.refuses.pop() };
        if let Some(status) = status {
            let _ = write!(stream, "HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        }
        if path.starts_with("/api/models/org/name/revision/main") {
            assert!(path.ends_with("?blobs=true"));
            let siblings = shelf.files.iter().map(|(name, bytes)| {
                let lfs = name
                    .ends_with(".safetensors")
                    .then(|| serde_json::json!({ "sha256": hash(bytes), "size": bytes.len() }));
                serde_json::json!({ "rfilename": name, "size": bytes.len(), "blobId": &hash(bytes)[..40], "lfs": lfs })
            });
            let body = serde_json::json!({ "sha": COMMIT, "siblings": siblings.collect::<Vec<_>>() }).to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            return;
        }
        let name = path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/")).unwrap_or_default().to_string();
        let Some(bytes) = shelf.files.get(&name).cloned() else {
            let _ = write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        };
        let range = field("range").unwrap_or_default();
        let mut ends = range.trim_start_matches("bytes=").split('-');
        let from: usize = ends.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let to = ends.next().and_then(|n| n.parse::<usize>().ok()).map_or(bytes.len(), |n| n + 1);
        let etag = if name.ends_with(".safetensors") { hash(&bytes) } else { hash(&bytes)[..40].to_string() };
        let mut part = bytes[from.min(bytes.len())..to.min(bytes.len())].to_vec();
        if to != from + 1 {
            shelf.asked.push((name.clone(), from));
            if shelf.lies {
                part.iter_mut().for_each(|byte| *byte ^= 1);
            }
        }
        let _ = write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {from}-{}/{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            to.saturating_sub(1),
            bytes.len(),
            part.len()
        );
        let broken = shelf.breaks.iter().position(|(file, _)| *file == name).filter(|_| to != from + 1);
        let sent = broken.map_or(part.len(), |i| shelf.breaks.remove(i).1);
        drop(shelf);
        let _ = stream.write_all(&part[..sent.min(part.len())]);
    }
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
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
    let client = hub.client(home.path());
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
    let dir = hub.client(home.path()).pull("org/name", &|_, _| ()).unwrap();
    assert!(is_whole(&dir));
    assert_eq!(hub.starts("model-1.safetensors"), [0, 100_000, 150_000]);
}

#[test]
fn a_later_run_goes_on_where_the_last_one_stopped() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = hub.client(home.path());
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
    let client = hub.client(home.path());
    let dir = client.pull("org/name", &|_, _| ()).unwrap();
    fs::rename(&dir, dir.with_file_name("0ld")).unwrap();
    // Complete, but killed before it got its name.
    let blob = home.path().join("hub/models--org--name/blobs").join(hash(&noise(1, 300_000)));
    fs::rename(&blob, blob.with_extension("part")).unwrap();
    hub.change(|shelf| shelf.asked.clear());
    assert!(is_whole(&client.pull("org/name", &|_, _| ()).unwrap()));
    assert_eq!(hub.starts("model-1.safetensors"), [0]);
    assert_eq!(hub.starts("model-2.safetensors"), [0; 0]);
}

#[test]
fn damage_is_noticed() {
    let (hub, home) = (TestHub::new(&model()), tempfile::tempdir().unwrap());
    let client = hub.client(home.path());
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
    let mut client = hub.client(home.path());
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
    client.endpoint = Some("http://127.0.0.1:1".into());
    assert!(client.pull("org/name", &|_, _| ()).is_err());
    assert!(client.local("org/name").is_some());
}
