//! Connections: how many there may be, and how long a client may be silent.
//!
//! Each connection has a slot. If all slots are taken, the connection that has been idle longest is closed. If all
//! slots have a request in progress, a new connection gets a reserved slot. A connection in a reserved slot may only
//! request `/health` and `/metrics`. Any other request gets a 503. Status requests thus work even if the server is
//! full.

use super::{body_guard, timeouts::Timeouts};
use crate::{
    http::{ServerState, routes},
    platform::{KeepAwake, os},
};
use axum::{Router, response::Response};
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, Sleep, sleep},
};

/// Maximum number of connections in ordinary slots. The limit on open files may allow fewer connections.
const MAX_SLOTS: usize = 1024;
/// Number of reserved slots, which are for `/health` and `/metrics`.
const RESERVED_SLOTS: usize = 8;
/// Number of file descriptors kept for the model's files and everything else, if the limit on open files is high
/// enough.
const OTHER_FILES: usize = 256;
/// Maximum number of bytes that a connection buffers, of the head or the body of a request or of a response.
const BUFFER_BYTES: usize = 16 << 10;
/// Maximum number of bytes of a response that the operating system buffers for a client that does not read.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Time without a packet after which the operating system probes whether the client still exists. A client that loses
/// power or its network never closes the connection, and its request would otherwise run to its end.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
/// Interval of further probes. The connection fails after several probes without an answer.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Accepts connections until `stop` is true. Then closes each connection after the request in progress. Every
/// connection holds a clone of `stop`, so the sender of `stop` knows when all connections are closed. The router
/// `refusals` answers the requests that a reserved slot does not allow.
pub async fn accept(
    listeners: Vec<(TcpListener, Router)>,
    refusals: Router,
    state: Arc<ServerState>,
    mut stop: watch::Receiver<bool>,
) {
    let slots = ConnectionSlots::new(state.max_connections.unwrap_or_else(max_slots));
    loop {
        let (stream, router) = tokio::select! {
            accepted = accept_any(&listeners) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // The client has disconnected, or no file descriptor is free.
                    tracing::debug!(%error, "cannot accept a connection");
                    slots.evict_idle();
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
            _ = stop.changed() => return,
        };
        let Some(slot) = slots.take().await else { continue };
        let (refusals, timeouts, stop) = (refusals.clone(), state.timeouts, stop.clone());
        tokio::spawn(async move {
            if let Err(error) = serve(stream, [router, refusals], slot, timeouts, stop).await {
                tracing::debug!(%error, "connection failed");
            }
        });
    }
}

/// The next connection of any listener, and that listener's router.
async fn accept_any(listeners: &[(TcpListener, Router)]) -> io::Result<(TcpStream, Router)> {
    poll_fn(|context| {
        let mut accepted = listeners
            .iter()
            .map(|(listener, router)| listener.poll_accept(context).map_ok(|(stream, _)| (stream, router.clone())));
        accepted.find(Poll::is_ready).unwrap_or(Poll::Pending)
    })
    .await
}

/// Number of ordinary slots that leaves enough file descriptors for everything else.
fn max_slots() -> usize {
    let limit = os::raise_descriptor_limit().unwrap_or(1024);
    limit.saturating_sub(RESERVED_SLOTS + OTHER_FILES.min(limit / 2)).clamp(1, MAX_SLOTS)
}

async fn serve(
    stream: TcpStream,
    [router, refusals]: [Router; 2],
    slot: Arc<ConnectionSlot>,
    timeouts: Timeouts,
    mut stop: watch::Receiver<bool>,
) -> hyper::Result<()> {
    if let Err(error) = set_options(&stream) {
        tracing::debug!(%error, "cannot set socket options");
    }
    let [router, refusals] = [router, refusals].map(TowerToHyperService::new);
    let answer = |request: Request<Incoming>| {
        let busy = BusyGuard::new(slot.clone());
        let is_refused = slot.is_reserved && !routes::is_status(request.uri().path());
        let answer = if is_refused { refusals.call(request) } else { router.call(request) };
        async move { Ok::<Response, Infallible>(body_guard::hold(answer.await?, busy)) }
    };
    let stream = TokioIo::new(WriteTimeoutStream { stream, limit: timeouts.write, timer: None });
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(if slot.is_reserved { timeouts.reserved } else { timeouts.head })
            .max_buf_size(BUFFER_BYTES)
            .keep_alive(!slot.is_reserved)
            .serve_connection(stream, hyper::service::service_fn(answer))
    );
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = slot.evicted.notified() => return Ok(()),
        _ = stop.wait_for(|is_stopping| *is_stopping) => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        ended = connection => ended,
        () = slot.evicted.notified() => Ok(()),
    }
}

fn set_options(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    // A token is a small packet, and Nagle's algorithm would delay each packet by up to 40 ms.
    socket.set_tcp_nodelay(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL))
}

struct ConnectionSlots {
    ordinary: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    /// Ordinary slots in use. An idle slot can be evicted.
    taken: Mutex<Vec<Weak<ConnectionSlot>>>,
}

/// Slot of one connection. The slot is free again when this value is dropped.
struct ConnectionSlot {
    is_reserved: bool,
    /// Start of the pause between two requests. `None` while a request is in progress.
    idle_since: Mutex<Option<Instant>>,
    evicted: Notify,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionSlots {
    fn new(ordinary: usize) -> Self {
        let semaphore = |slots| Arc::new(Semaphore::new(slots));
        Self { ordinary: semaphore(ordinary), reserved: semaphore(RESERVED_SLOTS), taken: Mutex::default() }
    }

    /// Takes a free ordinary slot, an ordinary slot freed by eviction, or a reserved slot. Returns `None` if no slot is
    /// free.
    async fn take(&self) -> Option<Arc<ConnectionSlot>> {
        let mut permit = self.ordinary.clone().try_acquire_owned().ok();
        if permit.is_none() && self.evict_idle() {
            let freed = self.ordinary.clone().acquire_owned();
            permit = tokio::time::timeout(Duration::from_millis(100), freed).await.ok().and_then(Result::ok);
        }
        let is_reserved = permit.is_none();
        let permit = permit.or_else(|| self.reserved.clone().try_acquire_owned().ok())?;
        let idle_since = Mutex::new(Some(Instant::now()));
        let slot = Arc::new(ConnectionSlot { is_reserved, idle_since, evicted: Notify::new(), _permit: permit });
        if !is_reserved {
            let mut taken = self.taken.lock();
            taken.retain(|slot| slot.strong_count() > 0);
            taken.push(Arc::downgrade(&slot));
        }
        Some(slot)
    }

    /// Closes the connection that has been idle longest. Returns false if no connection is idle.
    fn evict_idle(&self) -> bool {
        let mut taken = self.taken.lock();
        let idle_since = |slot: &Weak<ConnectionSlot>| *slot.upgrade()?.idle_since.lock();
        let idle = taken.iter().enumerate().filter_map(|(index, slot)| Some((idle_since(slot)?, index)));
        let Some((_, longest)) = idle.min() else { return false };
        if let Some(slot) = taken.swap_remove(longest).upgrade() {
            slot.evicted.notify_one();
        }
        true
    }
}

/// Marks a slot as busy until the response is sent.
struct BusyGuard {
    slot: Arc<ConnectionSlot>,
    _awake: KeepAwake,
}

impl BusyGuard {
    fn new(slot: Arc<ConnectionSlot>) -> Self {
        *slot.idle_since.lock() = None;
        Self { slot, _awake: KeepAwake::begin() }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        *self.slot.idle_since.lock() = Some(Instant::now());
    }
}

/// A stream that fails if the client reads none of the written bytes for too long.
struct WriteTimeoutStream {
    stream: TcpStream,
    limit: Duration,
    /// Timer of the pending write. `None` if no write is pending.
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for WriteTimeoutStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, buffer: &mut ReadBuf) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for WriteTimeoutStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{env, process::Command};

    #[tokio::test]
    async fn accepted_socket_probes_its_client() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connect = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(connect, listener.accept());
        let (_client, (stream, _)) = (client.unwrap(), accepted.unwrap());
        assert!(!SockRef::from(&stream).keepalive().unwrap());
        set_options(&stream).unwrap();
        assert!(SockRef::from(&stream).keepalive().unwrap());
        assert!(stream.nodelay().unwrap());
    }

    /// Each limit needs a separate process, because a process cannot raise a limit that it has lowered.
    #[test]
    fn descriptors_are_shared_with_files() {
        const EXPECTED: &str = "MOESTRO_TEST_SLOTS";
        const NAME: &str = "http::layers::connections::tests::descriptors_are_shared_with_files";
        if let Ok(expected) = env::var(EXPECTED) {
            assert_eq!(max_slots().to_string(), expected);
            return;
        }
        let test = env::current_exe().unwrap();
        for (limit, expected) in [("100", "42"), ("600", "336")] {
            let shell = format!("ulimit -n {limit} && exec \"$0\" --exact {NAME}");
            let child = Command::new("sh").args(["-c", &shell]).arg(&test).env(EXPECTED, expected).output().unwrap();
            let output = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && output.contains("1 passed"), "{limit} descriptors: {output}");
        }
    }
}
