//! Tests of idle, slow, incomplete and many connections, and of their effect on other clients.

use super::{
    client::write,
    server::{CHAT, COMPLETIONS, MESSAGES, Server, Setup, chat, streamed, wait_until},
};
use moestro::http::{ServerState, Timeouts};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    io::{ErrorKind, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpSocket, TcpStream},
    runtime::Builder,
    time::{sleep, timeout},
};

const LONG: &str =
    "</think>\n\none two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen.";

/// Reads until the server closes the connection.
async fn read_to_end(stream: &TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        stream.readable().await.unwrap();
        let mut buffer = vec![0; 1 << 16];
        match stream.try_read(&mut buffer) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The connection was reset, so bytes in flight are lost.
            Err(_) => return all,
        }
    }
}

async fn wait_for_close(stream: &TcpStream) -> Vec<u8> {
    timeout(Duration::from_secs(60), read_to_end(stream)).await.expect("the server closes the connection")
}

fn head(path: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n")
}

/// Sends a whole POST request.
pub async fn post(stream: &TcpStream, path: &str, body: &Value) {
    let body = body.to_string();
    write(stream, (head(path, body.len()) + &body).as_bytes()).await;
}

/// Sends a POST request from a client whose socket holds little of the response.
pub async fn post_slowly(server: &Server, path: &str, body: &Value) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    let stream = socket.connect(server.address).await.unwrap();
    post(&stream, path, body).await;
    stream
}

#[tokio::test]
async fn idle_connections_are_evicted() {
    let configure = |state: &mut ServerState| state.max_connections = Some(4);
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let mut idle = Vec::new();
    for number in 0..40 {
        let stream = TcpStream::connect(server.address).await.unwrap();
        if number % 2 == 0 {
            write(&stream, b"POST /v1/chat/completions HTTP/1.1\r\nhost: ").await;
        }
        idle.push(stream);
    }
    for _ in 0..3 {
        assert_eq!(server.get("/health").await.status, 200);
        server.ask(CHAT, &chat("Count.")).await;
    }
    wait_for_close(&idle[0]).await;
}

#[tokio::test]
async fn health_answers_when_all_slots_are_busy() {
    let configure = |state: &mut ServerState| state.max_connections = Some(2);
    let server = Setup { says: Some(LONG), stops_at: 0, configure, ..Setup::default() }.start().await;
    let mut one = server.post(CHAT, &streamed(&chat("Count."))).await;
    let two = server.post(CHAT, &streamed(&chat("Count."))).await;
    for path in ["/health", "/metrics"] {
        assert_eq!(server.get(path).await.status, 200);
    }
    for (path, kind, code) in [(CHAT, Value::Null, json!("connections_busy")), (MESSAGES, json!("error"), Value::Null)]
    {
        let refused = server.post(path, &chat("Count.")).await;
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("2")));
        assert!(refused.header("x-request-id").is_some());
        let body = refused.json().await;
        assert_eq!((&body["type"], &body["error"]["code"]), (&kind, &code), "{body}");
    }
    assert!(server.post("/api/chat", &chat("Count.")).await.json().await["error"].is_string());
    drop(two);
    server.resume();
    while one.chunk().await.is_some() {}
    server.idle().await;
    server.ask(CHAT, &chat("Count.")).await;
}

/// Opens five times 120 connections, more than there are reserved slots. The connections of a round all arrive before
/// the server runs: the first and the last are health checks.
#[tokio::test]
async fn health_answers_in_a_burst_of_connections() {
    let configure = |state: &mut ServerState| state.max_connections = Some(1);
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let _busy = half_body(&server).await;
    let mut silent = Vec::new();
    for round in 0..5 {
        let mut checks = Vec::new();
        for number in 0..120 {
            let mut stream = std::net::TcpStream::connect(server.address).unwrap();
            match number {
                0 | 119 => {
                    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
                    stream.set_nonblocking(true).unwrap();
                    checks.push(TcpStream::from_std(stream).unwrap());
                    continue;
                }
                1 => stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ").unwrap(),
                2 => stream.write_all(head(CHAT, 100).as_bytes()).unwrap(),
                _ => {}
            }
            silent.push(stream);
        }
        for check in &checks {
            let answer = wait_for_close(check).await;
            assert!(answer.starts_with(b"HTTP/1.1 200 "), "{round}: {}", String::from_utf8_lossy(&answer));
        }
    }
}

/// Clients open silent connections, half heads and refused requests as fast as they can, from threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_answers_beside_a_flood_of_connections() {
    let configure = |state: &mut ServerState| state.max_connections = Some(1);
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let _busy = half_body(&server).await;
    let (address, stop) = (server.address, Arc::new(AtomicBool::new(false)));
    let flood = |sent: String, opened: usize| {
        let stop = stop.clone();
        std::thread::spawn(move || {
            let mut open = VecDeque::new();
            while !stop.load(Relaxed) {
                if let Ok(mut stream) = std::net::TcpStream::connect(address) {
                    let _ = stream.write_all(sent.as_bytes());
                    open.push_back(stream);
                }
                if open.len() > opened {
                    open.pop_front();
                }
            }
        })
    };
    let half = "GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ".to_owned();
    let floods = [flood(String::new(), 300), flood(half, 300), flood(head(CHAT, 100), 30)];
    sleep(Duration::from_millis(200)).await;
    for number in 0..100 {
        let path = if number % 2 == 0 { "/health" } else { "/metrics" };
        // A busy machine may stop the client before it sends its request. The server then closes the silent connection.
        let mut tries = 0;
        while !is_answered(&server, path).await {
            tries += 1;
            assert!(tries < 5, "{number}");
        }
    }
    stop.store(true, Relaxed);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
}

/// Sends a GET request as soon as the connection is open. True if its status is 200.
async fn is_answered(server: &Server, path: &str) -> bool {
    let Ok(stream) = TcpStream::connect(server.address).await else { return false };
    let _ = stream.try_write(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes());
    wait_for_close(&stream).await.starts_with(b"HTTP/1.1 200 ")
}

/// A connection whose body never ends.
async fn half_body(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address).await.unwrap();
    write(&stream, (head(CHAT, 1 << 20) + "{").as_bytes()).await;
    wait_until(|| server.metrics.request_memory.get() > 0, || "the body is not read".into()).await;
    stream
}

#[tokio::test]
async fn slow_heads_time_out() {
    let configure = |state: &mut ServerState| state.timeouts.head = Duration::from_secs(1);
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let open = || async { TcpStream::connect(server.address).await.unwrap() };
    let (silent, half) = (open().await, open().await);
    // The server may have closed the connection before this thread runs.
    let _ = half.try_write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ");
    assert_eq!(wait_for_close(&silent).await, b"");
    wait_for_close(&half).await;
}

#[tokio::test]
async fn slow_bodies_time_out() {
    let configure = |state: &mut ServerState| state.timeouts.body = Duration::from_secs(1);
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let open = || async { TcpStream::connect(server.address).await.unwrap() };
    let body = open().await;
    write(&body, (head(CHAT, 100) + "{\"messages\": ").as_bytes()).await;
    let refused = wait_for_close(&body).await;
    assert!(refused.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&refused));
    // A client that sends single bytes from time to time does not keep the connection open.
    let drops = open().await;
    write(&drops, head(CHAT, 10_000).as_bytes()).await;
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(60) && drops.try_write(b" ").is_ok() {
        let mut answer = [0; 16];
        if drops.try_read(&mut answer).is_ok() {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    assert!(since.elapsed() < Duration::from_secs(60), "the connection stays open");
}

#[tokio::test]
async fn client_that_does_not_read_is_disconnected() {
    let configure = |state: &mut ServerState| {
        state.timeouts = Timeouts { write: Duration::from_millis(300), ..Timeouts::default() }
    };
    let stops_at = 2800;
    let server = Setup { context: 4096, stops_at, configure, ..Setup::default() }.start().await;
    let prompt: Vec<u32> = (5..1505).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1500, "logprobs": 20, "stream": true});
    let _stalled = post_slowly(&server, COMPLETIONS, &body).await;
    server.metric("moestro_request_seconds_count 1").await;
    server.resume();
    server.idle().await;
    assert!(server.evaluated() <= stops_at + 1, "the model ran after the client had stopped reading");
}

#[tokio::test]
async fn unread_response_counts_as_request_memory() {
    let server = Server::saying(LONG).await;
    let held = || server.metrics.request_memory.get();
    for (path, body) in [
        ("/v1/responses", json!({"input": "Hi", "user": "x".repeat(1 << 20), "store": false})),
        ("/tokenize", json!({"prompt": "word ".repeat(100_000)})),
        ("/detokenize", json!({"tokens": vec![1000; 100_000]})),
    ] {
        let slow = post_slowly(&server, path, &body).await;
        slow.readable().await.unwrap();
        server.idle().await;
        sleep(Duration::from_millis(50)).await;
        assert!(held() > 1 << 20, "{path}: {} bytes", held());
        drop(slow);
        wait_until(|| held() == 0, || format!("{path}: {} bytes are not freed", held())).await;
    }
}

/// Tests that 200 idle connections, 20 incomplete bodies and 20 clients that read nothing do not delay the first token
/// of 10 other clients. No timeout ends the slow clients. `benches/load.py` measures larger numbers.
#[tokio::test]
async fn slow_clients_do_not_delay_others() {
    let configure = |state: &mut ServerState| {
        let never = Duration::from_secs(3600);
        state.timeouts = Timeouts { head: never, body: never, write: never, ..Timeouts::default() };
    };
    let setup = || Setup { context: 2048, max_queue: 64, stops_at: 0, configure, ..Setup::default() };
    // Each server has its own threads, so that the clients notice if all threads of a server wait.
    let start = || async {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Arc::new(Box::leak(Box::new(runtime)).spawn(setup().start()).await.unwrap())
    };
    let [quiet, server] = [start().await, start().await];
    quiet.resume();
    let mut crowd = Vec::new();
    for number in 0..220 {
        let stream = TcpStream::connect(server.address).await.unwrap();
        if number % 11 == 0 {
            write(&stream, (head(CHAT, 100) + "{\"messages\": ").as_bytes()).await;
        }
        crowd.push(stream);
    }
    for first in 5..25 {
        // About 400 KB. The buffers of a connection have less than 200 KB.
        let prompt: Vec<u32> = (first..first + 600).collect();
        let body = json!({"prompt": prompt, "max_tokens": 600, "logprobs": 20, "stream": true});
        crowd.push(post_slowly(&server, COMPLETIONS, &body).await);
    }
    server.load(1, 19).await;
    server.resume();
    // The engine waits for no client.
    server.idle().await;
    // A busy machine can be slow at times.
    let mut tries = Vec::new();
    while tries.last().is_none_or(|(alone, beside)| *beside >= 2 * *alone + Duration::from_secs(1)) {
        assert!(tries.len() < 10, "times alone and with slow clients: {tries:?}");
        let alone = first_tokens(&quiet).await;
        let beside = timeout(Duration::from_secs(60) + 10 * alone, first_tokens(&server)).await;
        tries.push((alone, beside.expect("the others wait for slow clients")));
    }
    // An answer was waiting for its client. The system may notice late that the client reads again.
    let slow = &crowd[220];
    let mut answer = 0;
    let read = async {
        while answer < 300_000 {
            slow.readable().await.unwrap();
            answer += slow.try_read(&mut [0; 1 << 16]).unwrap_or(0);
        }
    };
    timeout(Duration::from_secs(300), read).await.expect("a long answer");
}

/// The longest time to a first token among ten clients with five requests each.
async fn first_tokens(server: &Arc<Server>) -> Duration {
    let clients: Vec<_> = (0..10)
        .map(|_| {
            let server = server.clone();
            tokio::spawn(async move {
                let mut longest = Duration::ZERO;
                for _ in 0..5 {
                    let start = Instant::now();
                    let mut answer = server.post(CHAT, &streamed(&chat("Count."))).await;
                    assert_eq!(answer.status, 200);
                    answer.chunk().await.unwrap();
                    longest = longest.max(start.elapsed());
                    while answer.chunk().await.is_some() {}
                }
                longest
            })
        })
        .collect();
    let mut longest = Duration::ZERO;
    for client in clients {
        longest = longest.max(client.await.unwrap());
    }
    longest
}
