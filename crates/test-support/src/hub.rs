//! [`TestHub`]: an HTTP server with one model, `org/name`, and configurable faults.

use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The hub's files, faults and recorded requests.
#[derive(Default)]
pub struct HubState {
    pub files: HashMap<String, Vec<u8>>,
    /// False sizes for the listing, by file name.
    pub listed_sizes: HashMap<String, u64>,
    /// File name and number of bytes. For each entry, the hub once closes the connection after this number of bytes of
    /// the file.
    pub disconnects: Vec<(String, usize)>,
    /// HTTP statuses of the next responses, in reverse order.
    pub statuses: Vec<u16>,
    /// If true, the hub sends bytes that do not match the checksum.
    pub corrupts: bool,
    /// The token that requests must contain.
    pub token: Option<String>,
    /// File and start of every requested range.
    pub requested: Vec<(String, usize)>,
    /// File and length of every requested range.
    pub lengths: Vec<(String, usize)>,
    pub requests: usize,
    /// The `Authorization` header of each request.
    pub tokens: Vec<Option<String>>,
    /// If set, the hub redirects file requests to this address.
    pub redirect_to: Option<String>,
    /// If set, the hub sends this false ETag.
    pub etag: Option<String>,
    /// If set, the hub sends this false commit.
    pub commit: Option<String>,
    /// If true, the listing has no sizes and hashes.
    pub hides_sizes: bool,
    /// If true, the hub ignores ranges and sends whole files.
    pub ignores_ranges: bool,
    /// Maximum bandwidth of each connection in bytes per second.
    pub bytes_per_second: Option<usize>,
    /// If set, the hub sends this many bytes of files, and then waits until a test sets a larger number or `None`.
    pub stops_at: Option<usize>,
    /// Number of bytes of files that the hub has sent.
    pub sent: usize,
    /// Files that change after a number of requests. Each entry has the file name, the number of requests, and the new
    /// bytes.
    pub changes: Vec<(String, usize, Vec<u8>)>,
    /// Number of connections on which the hub is sending.
    pub sending: usize,
    /// Maximum of `sending` so far.
    pub max_sending: usize,
    /// If true, the hub sends ranges that start one byte late.
    pub shifts_ranges: bool,
    /// If true, the hub sends files with an additional byte.
    pub grows_files: bool,
    /// If true, the hub leaves out the header `Content-Range`.
    pub hides_ranges: bool,
    /// If true, the hub leaves out the header `Content-Length` of files.
    pub hides_lengths: bool,
    /// If true, the hub sends whole files with the status of a range.
    pub sends_whole_as_range: bool,
}

#[derive(Clone)]
pub struct TestHub {
    pub state: Arc<Mutex<HubState>>,
    pub endpoint: String,
}

impl TestHub {
    pub fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect();
        let state = Arc::new(Mutex::new(HubState { files, ..HubState::default() }));
        let hub = Self { state, endpoint };
        let served = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = served.clone();
                std::thread::spawn(move || hub.serve(stream));
            }
        });
        hub
    }

    pub fn change(&self, change: impl FnOnce(&mut HubState)) {
        change(&mut self.state.lock().unwrap());
    }

    /// Start of each requested range of a file. Requests for a single byte, which query the size, are not recorded.
    pub fn starts(&self, file: &str) -> Vec<usize> {
        self.state.lock().unwrap().requested.iter().filter(|(name, _)| name == file).map(|(_, from)| *from).collect()
    }

    /// Total length of all requested ranges of a file.
    pub fn sent(&self, file: &str) -> usize {
        self.state.lock().unwrap().lengths.iter().filter(|(name, _)| name == file).map(|(_, bytes)| bytes).sum()
    }

    /// Counts bytes of a file as sent, unless the hub waits because of [`HubState::stops_at`].
    fn may_send(&self, bytes: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        let may_send = state.stops_at.is_none_or(|stops_at| state.sent + bytes <= stops_at);
        state.sent += if may_send { bytes } else { 0 };
        may_send
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = String::new();
        while reader.read_line(&mut head).is_ok_and(|n| n > 2) {}
        let mut state = self.state.lock().unwrap();
        state.requests += 1;
        let field = |name: &str| {
            let line = head.lines().find(|line| line.to_lowercase().starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_string())
        };
        let path = head.split(' ').nth(1).unwrap_or_default().to_string();
        state.tokens.push(field("authorization"));
        let is_denied = state.token.as_ref().is_some_and(|key| field("authorization") != Some(format!("Bearer {key}")));
        let status = if is_denied { Some(401) } else { state.statuses.pop() };
        if let Some(status) = status {
            let _ = write!(stream, "HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        }
        if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
            // As on the hub, a slash is not a part of a revision.
            assert!(path.ends_with("?blobs=true") && !revision.contains('/'));
            let siblings = state.files.iter().map(|(name, bytes)| {
                let lfs = name
                    .ends_with(".safetensors")
                    .then(|| serde_json::json!({ "sha256": hash(bytes), "size": bytes.len() }));
                if state.hides_sizes { serde_json::json!({ "rfilename": name }) } else { serde_json::json!({ "rfilename": name, "size": state.listed_sizes.get(name).copied().unwrap_or(bytes.len() as u64), "blobId": &hash(bytes)[..40], "lfs": lfs }) }
            });
            let commit = state.commit.as_deref().unwrap_or(COMMIT);
            let body = serde_json::json!({ "sha": commit, "siblings": siblings.collect::<Vec<_>>() }).to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            return;
        }
        if let Some(redirect_to) = &state.redirect_to {
            let head = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close";
            let etag = hash(&[]);
            let _ = write!(
                stream,
                "{head}\r\nX-Repo-Commit: {COMMIT}\r\nETag: \"{etag}\"\r\nLocation: {redirect_to}{path}\r\n\r\n"
            );
            return;
        }
        let (_, name) = path.split_once("/resolve/").and_then(|(_, rest)| rest.split_once('/')).unwrap_or_default();
        let name = name.to_string();
        let Some(mut bytes) = state.files.get(&name).cloned() else {
            let _ = write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        };
        let range = if state.ignores_ranges || state.sends_whole_as_range {
            String::new()
        } else {
            field("range").unwrap_or_default()
        };
        let mut ends = range.trim_start_matches("bytes=").split('-');
        let from: usize = ends.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let etag = if name.ends_with(".safetensors") { hash(&bytes) } else { hash(&bytes)[..40].to_string() };
        let etag = state.etag.clone().unwrap_or(etag);
        let commit = state.commit.clone().unwrap_or(COMMIT.into());
        let shift = usize::from(state.shifts_ranges && from > 0);
        if state.grows_files && name.ends_with("1.safetensors") {
            bytes.push(0);
        }
        let to = ends.next().and_then(|n| n.parse::<usize>().ok()).map_or(bytes.len(), |n| n + 1);
        let mut part = bytes[from.min(bytes.len())..to.min(bytes.len())].to_vec();
        if to != from + 1 {
            state.requested.push((name.clone(), from));
            state.lengths.push((name.clone(), part.len()));
            if state.corrupts {
                part.iter_mut().for_each(|byte| *byte ^= 1);
            }
        }
        let partial = if state.ignores_ranges { "200 OK" } else { "206 Partial Content" };
        let range = format!("Content-Range: bytes {}-{}/{}\r\n", from + shift, to.saturating_sub(1), bytes.len());
        let _ = write!(
            stream,
            "HTTP/1.1 {partial}\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\n{}{}Connection: close\r\n\r\n",
            if state.hides_ranges { "" } else { &range },
            if state.hides_lengths { String::new() } else { format!("Content-Length: {}\r\n", part.len()) }
        );
        let disconnect = state.disconnects.iter().position(|(file, _)| *file == name).filter(|_| to != from + 1);
        let sent = disconnect.map_or(part.len(), |i| state.disconnects.remove(i).1);
        let due = state.changes.iter_mut().find(|(file, ..)| *file == name).filter(|_| to != from + 1);
        if let Some(bytes) = due.and_then(|(_, left, bytes)| {
            *left = left.saturating_sub(1);
            (*left == 0).then(|| bytes.clone())
        }) {
            state.changes.retain(|(file, ..)| *file != name);
            state.files.insert(name, bytes);
        }
        let bytes_per_second = state.bytes_per_second;
        let whole = if state.stops_at.is_some() { 1 << 16 } else { part.len() };
        let block_bytes = bytes_per_second.map_or(whole, |bytes_per_second| bytes_per_second / 50).max(1);
        state.sending += 1;
        state.max_sending = state.max_sending.max(state.sending);
        drop(state);
        let part = &part[..sent.min(part.len())];
        for block in part.chunks(block_bytes) {
            while !self.may_send(block.len()) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            if stream.write_all(block).is_err() {
                break;
            }
            if bytes_per_second.is_some() {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        self.state.lock().unwrap().sending -= 1;
    }
}

pub fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
