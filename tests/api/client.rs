//! A minimal HTTP/1.1 client. It can read a response chunk by chunk, and can disconnect at any point.

use super::server::{Server, streamed};
use serde_json::{Value, json};
use std::{io, time::Duration};
use tokio::net::TcpStream;

/// Time limit of each response and of each chunk. On two cores with a load of 20, the demo model takes 7 ms per token of a
/// prompt.
const TIMEOUT: Duration = Duration::from_secs(900);

/// A response whose body may not have arrived yet.
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    wire: Wire,
}

impl Server {
    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[], Some(body.to_string().as_bytes())).await
    }

    /// Sends a POST request, checks that the status is 200, and returns the body.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body).await;
        let status = answer.status;
        let body = answer.json().await;
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Sends a POST request, checks that it is refused with this status, and returns the error.
    pub async fn refused(&self, path: &str, body: &Value, status: u16) -> Value {
        let answer = self.post(path, body).await;
        let found = answer.status;
        let answer = answer.json().await;
        assert_eq!(found, status, "{path}: {answer} for {:.1000}", body.to_string());
        answer["error"].clone()
    }

    /// Requests a stream and reads its events, without the final `[DONE]`.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let text = self.post(path, &streamed(body)).await.text().await;
        events(text.strip_suffix("data: [DONE]\n\n").expect("[DONE] at the end"))
    }

    /// Requests a stream that does not end with `[DONE]`, and reads its events.
    pub async fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        events(&self.post(path, &streamed(body)).await.text().await)
    }

    /// The text that the template makes of a chat request.
    pub async fn prompt(&self, body: &Value) -> String {
        let tokens = self.ask("/tokenize", body).await["tokens"].clone();
        self.ask("/detokenize", &json!({"tokens": tokens})).await["prompt"].as_str().unwrap().to_owned()
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Answer {
        tokio::time::timeout(TIMEOUT, self.open(method, path, headers, body)).await.expect("an answer in time")
    }

    async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Answer {
        let length = body.unwrap_or_default().len().to_string();
        let mut all = headers.to_vec();
        if body.is_some() {
            if !headers.iter().any(|(name, _)| *name == "content-type") {
                all.push(("content-type", "application/json"));
            }
            all.push(("content-length", &length));
        }
        self.bare(method, path, &all, body.unwrap_or_default()).await
    }

    /// Sends a request with only `headers`, the header `Host`, and the body.
    pub async fn bare(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let mut wire = Wire { stream, read: Vec::new() };
        let host = if headers.iter().any(|(name, _)| *name == "host") { "" } else { "host: test\r\n" };
        let mut head = format!("{method} {path} HTTP/1.1\r\n{host}connection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        write(&wire.stream, (head + "\r\n").as_bytes()).await;
        write(&wire.stream, body).await;
        let mut lines = Vec::new();
        loop {
            match wire.line().await {
                line if line.is_empty() => break,
                line => lines.push(line),
            }
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines[1..].iter().filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
        Answer { status, headers, wire }
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    pub async fn json(self) -> Value {
        let text = self.text().await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Reads the whole body.
    pub async fn text(mut self) -> String {
        let mut body = Vec::new();
        if let Some(length) = self.header("content-length") {
            body = self.wire.exactly(length.parse().unwrap()).await;
        } else {
            while let Some(chunk) = self.chunk().await {
                body.extend_from_slice(&chunk);
            }
        }
        String::from_utf8(body).unwrap()
    }

    /// Reads the next chunk of a chunked body.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        assert_eq!(self.header("transfer-encoding"), Some("chunked"));
        let read = async {
            let size = usize::from_str_radix(&self.wire.line().await, 16).expect("the body is complete");
            let mut chunk = self.wire.exactly(size + 2).await;
            chunk.truncate(size);
            (size > 0).then_some(chunk)
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("a chunk in time")
    }
}

pub async fn write(stream: &TcpStream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        stream.writable().await.unwrap();
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
        }
    }
}

/// A connection, and the bytes that were read from it in advance.
struct Wire {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Wire {
    /// Reads more bytes. Returns false at the end of the stream.
    async fn more(&mut self) -> bool {
        loop {
            self.stream.readable().await.unwrap();
            let mut buffer = [0; 4096];
            match self.stream.try_read(&mut buffer) {
                Ok(count) => {
                    self.read.extend_from_slice(&buffer[..count]);
                    return count > 0;
                }
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
            }
        }
    }

    /// Reads a line without its end, or the rest of the stream.
    async fn line(&mut self) -> String {
        loop {
            if let Some(end) = self.read.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.read.drain(..end + 2).take(end).collect();
                return String::from_utf8(line).unwrap();
            }
            if !self.more().await {
                return String::from_utf8(self.read.split_off(0)).unwrap();
            }
        }
    }

    async fn exactly(&mut self, count: usize) -> Vec<u8> {
        while self.read.len() < count {
            assert!(self.more().await, "the body ended early");
        }
        self.read.drain(..count).collect()
    }
}

/// The JSON values in the `data:` lines. The name of an event, if it has one, must be its type.
pub fn events(text: &str) -> Vec<Value> {
    let events = text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).map(|event| {
        let (name, data) = event.rsplit_once('\n').unwrap_or(("", event));
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert!(name.is_empty() || name.strip_prefix("event: ") == data["type"].as_str(), "{event}");
        data
    });
    events.collect()
}

/// Replaces the values that differ between runs.
pub fn stable(mut body: Value) -> Value {
    for name in ["id", "created", "system_fingerprint", "timings"] {
        if let Some(value) = body.get_mut(name) {
            *value = name.to_uppercase().into();
        }
    }
    for choice in body.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
        for calls in ["/message/tool_calls", "/delta/tool_calls"] {
            for call in choice.pointer_mut(calls).and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(id) = call.get_mut("id") {
                    *id = "ID".into();
                }
            }
        }
    }
    body
}
