//! A Hugging Face hub of our own: threads that speak as much HTTP as a download asks for. It holds one model, `org/name`.

use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The hub's files and its faults.
#[derive(Default)]
pub struct Shelf {
    pub files: HashMap<String, Vec<u8>>,
    /// Sends so many bytes of this file and hangs up, once each.
    pub breaks: Vec<(String, usize)>,
    /// Answers so many requests with this status first.
    pub refuses: Vec<u16>,
    /// Sends other bytes than those it has the checksum of.
    pub lies: bool,
    /// Wants this key.
    pub token: Option<String>,
    /// `path from-byte` of every file that was asked for.
    pub asked: Vec<(String, usize)>,
    /// `path bytes` of what those were.
    pub lengths: Vec<(String, usize)>,
    pub requests: usize,
    /// The keys that came with requests.
    pub keys: Vec<Option<String>>,
    /// Sends everybody who wants a file to this address.
    pub elsewhere: Option<String>,
    /// Calls files, and its commit, by these names.
    pub etag: Option<String>,
    pub commit: Option<String>,
    /// Lists neither sizes nor hashes.
    pub says_little: bool,
    /// Knows no ranges: sends the whole file whatever is asked for.
    pub whole: bool,
    /// Sends so many bytes a second over each connection.
    pub rate: Option<usize>,
    /// Files that change behind so many requests: their next bytes.
    pub changes: Vec<(String, usize, Vec<u8>)>,
    /// Connections that are sending now, and the most there were at a time.
    pub sending: usize,
    pub most_sending: usize,
    /// Sends a part that begins a byte late, and files that are a byte longer.
    pub shifts: bool,
    pub grows: bool,
}

#[derive(Clone)]
pub struct TestHub {
    pub shelf: Arc<Mutex<Shelf>>,
    pub endpoint: String,
}

impl TestHub {
    pub fn new(files: &[(&str, Vec<u8>)]) -> Self {
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

    pub fn change(&self, change: impl FnOnce(&mut Shelf)) {
        change(&mut self.shelf.lock().unwrap());
    }

    /// The bytes asked of a file, by where each request began (those of one byte ask for the size).
    pub fn starts(&self, file: &str) -> Vec<usize> {
        self.shelf.lock().unwrap().asked.iter().filter(|(name, _)| name == file).map(|(_, from)| *from).collect()
    }

    /// The bytes of all parts of a file that were asked for.
    #[allow(dead_code)] // One of the two tests that use this file counts them.
    pub fn sent(&self, file: &str) -> usize {
        self.shelf.lock().unwrap().lengths.iter().filter(|(name, _)| name == file).map(|(_, bytes)| bytes).sum()
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
        shelf.keys.push(field("authorization"));
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
                match shelf.says_little {
                    true => serde_json::json!({ "rfilename": name }),
                    false => serde_json::json!({ "rfilename": name, "size": bytes.len(), "blobId": &hash(bytes)[..40], "lfs": lfs }),
                }
            });
            let commit = shelf.commit.as_deref().unwrap_or(COMMIT);
            let body = serde_json::json!({ "sha": commit, "siblings": siblings.collect::<Vec<_>>() }).to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            return;
        }
        if let Some(elsewhere) = &shelf.elsewhere {
            let head = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close";
            let etag = hash(&[]);
            let _ = write!(
                stream,
                "{head}\r\nX-Repo-Commit: {COMMIT}\r\nETag: \"{etag}\"\r\nLocation: {elsewhere}{path}\r\n\r\n"
            );
            return;
        }
        let (_, name) = path.split_once("/resolve/").and_then(|(_, rest)| rest.rsplit_once('/')).unwrap_or_default();
        let name = name.to_string();
        let Some(mut bytes) = shelf.files.get(&name).cloned() else {
            let _ = write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        };
        let range = if shelf.whole { String::new() } else { field("range").unwrap_or_default() };
        let mut ends = range.trim_start_matches("bytes=").split('-');
        let from: usize = ends.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let to = ends.next().and_then(|n| n.parse::<usize>().ok()).map_or(bytes.len(), |n| n + 1);
        let etag = if name.ends_with(".safetensors") { hash(&bytes) } else { hash(&bytes)[..40].to_string() };
        let etag = shelf.etag.clone().unwrap_or(etag);
        let commit = shelf.commit.clone().unwrap_or(COMMIT.into());
        let shift = usize::from(shelf.shifts && from > 0);
        if shelf.grows && name.ends_with("1.safetensors") {
            bytes.push(0);
        }
        let mut part = bytes[from.min(bytes.len())..to.min(bytes.len())].to_vec();
        if to != from + 1 {
            shelf.asked.push((name.clone(), from));
            shelf.lengths.push((name.clone(), part.len()));
            if shelf.lies {
                part.iter_mut().for_each(|byte| *byte ^= 1);
            }
        }
        let partial = if shelf.whole { "200 OK" } else { "206 Partial Content" };
        let _ = write!(
            stream,
            "HTTP/1.1 {partial}\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\nContent-Range: bytes {}-{}/{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            from + shift,
            to.saturating_sub(1),
            bytes.len(),
            part.len()
        );
        let broken = shelf.breaks.iter().position(|(file, _)| *file == name).filter(|_| to != from + 1);
        let sent = broken.map_or(part.len(), |i| shelf.breaks.remove(i).1);
        let due = shelf.changes.iter_mut().find(|(file, ..)| *file == name).filter(|_| to != from + 1);
        if let Some(bytes) = due.and_then(|(_, left, bytes)| {
            *left = left.saturating_sub(1);
            (*left == 0).then(|| bytes.clone())
        }) {
            shelf.changes.retain(|(file, ..)| *file != name);
            shelf.files.insert(name, bytes);
        }
        let rate = shelf.rate;
        shelf.sending += 1;
        shelf.most_sending = shelf.most_sending.max(shelf.sending);
        drop(shelf);
        let part = &part[..sent.min(part.len())];
        for block in part.chunks(rate.map_or(part.len(), |rate| rate / 50).max(1)) {
            if stream.write_all(block).is_err() {
                break;
            }
            if rate.is_some() {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        self.shelf.lock().unwrap().sending -= 1;
    }
}

pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
