//! Connections that are idle, slow, half-sent or many, and what the others notice of them.

use super::server::{Server, Setup};
use moestro::http::{ServerState, Timeouts};
use serde_json::{Value, json};
use std::{
    io::ErrorKind,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout},
};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const LONG: &str =
    "</think>\n\none two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen.";

fn question(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "Count."}], "stream": stream})
}

pub async fn write(stream: &TcpStream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        stream.writable().await.unwrap();
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
}

/// The bytes that still come until the other side closes.
async fn rest(stream: &TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        stream.readable().await.unwrap();
        let mut buffer = vec![0; 1 << 16];
        match stream.try_read(&mut buffer) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // It was reset: what was on its way is lost.
            Err(_) => return all,
        }
    }
}

async fn closed(stream: &TcpStream) -> Vec<u8> {
    timeout(Duration::from_secs(10), rest(stream)).await.expect("the server closes the connection")
}

pub fn head(path: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n")
}

#[tokio::test]
async fn idle_connections_give_up_their_places() {
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
        server.ask(CHAT, &question(false)).await;
    }
    closed(&idle[0]).await;
}

#[tokio::test]
async fn when_all_are_busy_health_is_still_told() {
    let configure = |state: &mut ServerState| state.max_connections = Some(2);
    let delay = Duration::from_millis(20);
    let server = Setup { says: Some(LONG), delay, configure, ..Setup::default() }.start().await;
    let mut one = server.post(CHAT, &question(true)).await;
    let two = server.post(CHAT, &question(true)).await;
    for path in ["/health", "/metrics"] {
        assert_eq!(server.get(path).await.status, 200);
    }
    let refused = server.post(CHAT, &question(false)).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("2")));
    assert_eq!(refused.json().await["error"]["code"], "connections_busy");
    drop(two);
    while one.chunk().await.is_some() {}
    server.idle().await;
    server.ask(CHAT, &question(false)).await;
}

#[tokio::test]
async fn heads_and_bodies_must_come() {
    let configure = |state: &mut ServerState| {
        let short = Duration::from_millis(150);
        state.timeouts = Timeouts { head: short, body: short, ..Timeouts::default() };
    };
    let server = Setup { says: Some(LONG), configure, ..Setup::default() }.start().await;
    let open = || async { TcpStream::connect(server.address).await.unwrap() };
    let (silent, half, body) = (open().await, open().await, open().await);
    write(&half, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    write(&body, head(CHAT, 100).as_bytes()).await;
    write(&body, b"{\"messages\": ").await;
    assert_eq!(closed(&silent).await, b"");
    closed(&half).await;
    let refused = closed(&body).await;
    assert!(refused.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&refused));
    // A drop now and then does not keep it open for ever.
    let drops = open().await;
    write(&drops, head(CHAT, 10_000).as_bytes()).await;
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(5) && drops.try_write(b" ").is_ok() {
        let mut answer = [0; 16];
        if drops.try_read(&mut answer).is_ok() {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
}

#[tokio::test]
async fn who_does_not_read_is_gone_after_a_while() {
    let configure = |state: &mut ServerState| {
        state.timeouts = Timeouts { write: Duration::from_millis(300), ..Timeouts::default() }
    };
    let setup = Setup { context: 4096, delay: Duration::from_millis(1), configure, ..Setup::default() };
    let server = setup.start().await;
    let body = json!({"prompt": (5..1505).collect::<Vec<u32>>(), "max_tokens": 1500, "logprobs": 20, "stream": true})
        .to_string();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    let stalled = socket.connect(server.address).await.unwrap();
    write(&stalled, head(TEXT, body.len()).as_bytes()).await;
    write(&stalled, body.as_bytes()).await;
    server.load(1, 0).await;
    server.idle().await;
    let evaluated = server.evaluated();
    assert!(evaluated < 2900, "{evaluated} tokens were evaluated for nobody");
}

#[tokio::test]
async fn what_a_slow_client_has_not_taken_of_a_response_is_counted() {
    let server = Server::saying(LONG).await;
    let body = json!({"input": "Hi", "user": "x".repeat(1 << 20), "store": false}).to_string();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8192).unwrap();
    let slow = socket.connect(server.address).await.unwrap();
    write(&slow, head("/v1/responses", body.len()).as_bytes()).await;
    write(&slow, body.as_bytes()).await;
    slow.readable().await.unwrap();
    server.idle().await;
    sleep(Duration::from_millis(50)).await;
    let held = || server.metrics.memory_requests.get();
    assert!(held() > 1 << 20, "{} bytes", held());
    drop(slow);
    let gone = async {
        while held() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(5), gone).await.expect("it is given back");
}

/// 200 idle connections, 20 half-sent bodies and 20 clients that read a byte now and then, beside 10 that behave: these
/// see their first token about as early as alone. `benches/load.py` has the figures of more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_does_not_keep_the_honest_waiting() {
    let setup = Setup { says: Some(LONG), delay: Duration::from_millis(1), max_queue: 64, ..Setup::default() };
    let server = Arc::new(setup.start().await);
    let alone = first_tokens(&server).await;
    let mut crowd = Vec::new();
    for number in 0..240 {
        let stream = TcpStream::connect(server.address).await.unwrap();
        let body = question(true).to_string();
        match number % 12 {
            0 => {
                write(&stream, head(CHAT, body.len()).as_bytes()).await;
                write(&stream, &body.as_bytes()[..20]).await;
            }
            1 => {
                write(&stream, head(CHAT, body.len()).as_bytes()).await;
                write(&stream, body.as_bytes()).await;
            }
            _ => {}
        }
        crowd.push(stream);
    }
    sleep(Duration::from_millis(100)).await;
    server.idle().await;
    let beside = first_tokens(&server).await;
    // Generous, for machines that do much else; the tail would be seconds, or none, without places and limits.
    assert!(beside < 2 * alone + Duration::from_millis(200), "{alone:?} alone, {beside:?} beside a crowd");
    drop(crowd);
}

/// The longest wait for a first token among ten clients that ask five times each.
async fn first_tokens(server: &Arc<Server>) -> Duration {
    let clients: Vec<_> = (0..10)
        .map(|_| {
            let server = server.clone();
            tokio::spawn(async move {
                let mut longest = Duration::ZERO;
                for _ in 0..5 {
                    let asked = Instant::now();
                    let mut answer = server.post(CHAT, &question(true)).await;
                    assert_eq!(answer.status, 200);
                    answer.chunk().await.unwrap();
                    longest = longest.max(asked.elapsed());
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
