//! Connections: how many there may be, and how long a client may be silent.
//!
//! Each connection has a slot. If all slots are taken, the connection that has been idle longest is closed. If all
//! slots have a request in progress, a new connection gets a reserved slot. A connection in a reserved slot may only
//! request `/health` and `/metrics`. Any other request gets a 503. If all reserved slots are taken, the reserved
//! connection that has been idle longest is closed. Status requests thus work even if the server is full, and even if
//! other clients open silent connections all the time.

use super::{body_guard, timeouts::Timeouts};
use crate::http::{ServerState, routes};
use axum::{Router, extract::ConnectInfo, response::Response};
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use moestro_base::platform::{KeepAwake, os};
use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    mem::MaybeUninit,
    net::Shutdown,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    task::yield_now,
    time::{Instant, Sleep, sleep, timeout},
};

/// Maximum number of connections in ordinary slots. The limit on open files may allow fewer connections.
const MAX_SLOTS: usize = 1024;
/// Maximum number of reserved slots, which are for `/health` and `/metrics`. Connections that are opened at a high rate
/// replace each other in these slots. With more slots, each connection has more time to send its request.
const RESERVED_SLOTS: usize = 128;
/// Share of the limit on open files that reserved slots may use.
const RESERVED_SHARE: usize = 8;
/// Maximum time that a new connection waits for a slot while all reserved slots have a request in progress. Such a
/// request takes less than a millisecond.
const SLOT_WAIT: Duration = Duration::from_millis(100);
/// Maximum number of idle connections that are asked for unread bytes when one of them is evicted.
const ASKED_SLOTS: usize = 128;
/// Interval at which a connection that has bytes to read is checked for whether the client has closed it.
const CLOSED_CHECK: Duration = Duration::from_millis(100);
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
    let (ordinary, reserved) = slot_limits(os::raise_descriptor_limit().unwrap_or(1024));
    let slots = ConnectionSlots::new(state.max_connections.unwrap_or(ordinary), reserved);
    loop {
        let (stream, router) = tokio::select! {
            accepted = accept_any(&listeners) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // The client has disconnected, or no file descriptor is free.
                    tracing::debug!(%error, "cannot accept a connection");
                    drop(slots.evict_idle(SlotKind::Ordinary).or_else(|| slots.evict_idle(SlotKind::Reserved)));
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
            _ = stop.changed() => return,
        };
        let Some(slot) = slots.take(stream).await else { continue };
        let refusals = refusals.clone();
        let timeouts = state.timeouts;
        let stop = stop.clone();
        tokio::spawn(async move {
            if let Err(error) = serve([router, refusals], slot, timeouts, stop).await {
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

/// Numbers of ordinary and reserved slots that leave enough of `limit` file descriptors for everything else.
fn slot_limits(limit: usize) -> (usize, usize) {
    let reserved = (limit / RESERVED_SHARE).clamp(1, RESERVED_SLOTS);
    (limit.saturating_sub(reserved + OTHER_FILES.min(limit / 2)).clamp(1, MAX_SLOTS), reserved)
}

async fn serve(
    [router, refusals]: [Router; 2],
    slot: Arc<ConnectionSlot>,
    timeouts: Timeouts,
    mut stop: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let stream = slot.stream.clone();
    if let Err(error) = set_options(&stream) {
        tracing::debug!(%error, "cannot set socket options");
    }
    let [router, refusals] = [router, refusals].map(TowerToHyperService::new);
    let is_reserved = slot.kind == SlotKind::Reserved;
    let address = stream.peer_addr().map(|address| ConnectInfo(address.ip())).ok();
    let answer = |mut request: Request<Incoming>| {
        if let Some(address) = address {
            request.extensions_mut().insert(address);
        }
        let busy = BusyGuard::new(slot.clone());
        let is_refused = is_reserved && !routes::is_status(request.uri().path());
        let answer = if is_refused { refusals.call(request) } else { router.call(request) };
        async move { Ok::<Response, Infallible>(body_guard::hold(answer.await?, busy)) }
    };
    let stream = TokioIo::new(WriteTimeoutStream { stream, limit: timeouts.write, timer: None });
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(if is_reserved { timeouts.reserved } else { timeouts.head })
            .max_buf_size(BUFFER_BYTES)
            .keep_alive(!is_reserved)
            .serve_connection(stream, hyper::service::service_fn(answer))
    );
    tokio::select! {
        // A request that has arrived is read, and a short answer is sent, before the connection is closed.
        biased;
        ended = connection.as_mut() => return ended,
        () = slot.evicted.notified() => return Ok(()),
        () = closed_by_client(&slot.stream) => return Ok(()),
        _ = stop.wait_for(|is_stopping| *is_stopping) => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        ended = connection => ended,
        () = slot.evicted.notified() => Ok(()),
        () = closed_by_client(&slot.stream) => Ok(()),
    }
}

/// Waits until the client has closed the connection. hyper notices this only if the client has sent nothing after the
/// request in progress.
async fn closed_by_client(stream: &TcpStream) {
    while stream.ready(Interest::READABLE).await.is_ok_and(|ready| !ready.is_read_closed()) {
        sleep(CLOSED_CHECK).await;
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
    /// Slots in use. An idle slot can be evicted.
    taken: Mutex<Vec<Weak<ConnectionSlot>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotKind {
    Ordinary,
    Reserved,
}

/// Slot of one connection. The slot is free again when the connection is closed, or when it is evicted.
struct ConnectionSlot {
    kind: SlotKind,
    /// Start of the pause between two requests. `None` while a request is in progress.
    idle_since: Mutex<Option<Instant>>,
    evicted: Notify,
    stream: Arc<TcpStream>,
    /// `None` after the slot was evicted.
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl ConnectionSlot {
    /// True if the client has sent bytes that the server has not read. The bytes may be a request.
    fn has_unread_bytes(&self) -> bool {
        SockRef::from(&*self.stream).peek(&mut [MaybeUninit::uninit()]).is_ok_and(|bytes| bytes > 0)
    }
}

impl ConnectionSlots {
    fn new(ordinary: usize, reserved: usize) -> Self {
        let semaphore = |slots| Arc::new(Semaphore::new(slots));
        Self { ordinary: semaphore(ordinary), reserved: semaphore(reserved), taken: Mutex::default() }
    }

    /// Takes a free slot, or the slot of an idle connection, which is closed. Tries ordinary slots first, then reserved
    /// slots. Returns `None` if all reserved slots stay busy.
    async fn take(&self, stream: TcpStream) -> Option<Arc<ConnectionSlot>> {
        let find = |kind| self.free(kind).try_acquire_owned().ok().or_else(|| self.evict_idle(kind));
        let (kind, permit) = match find(SlotKind::Ordinary) {
            Some(permit) => (SlotKind::Ordinary, permit),
            None => (
                SlotKind::Reserved,
                match find(SlotKind::Reserved) {
                    Some(permit) => permit,
                    None => timeout(SLOT_WAIT, self.free(SlotKind::Reserved).acquire_owned()).await.ok()?.ok()?,
                },
            ),
        };
        let slot = Arc::new(ConnectionSlot {
            kind,
            idle_since: Mutex::new(Some(Instant::now())),
            evicted: Notify::new(),
            stream: Arc::new(stream),
            permit: Mutex::new(Some(permit)),
        });
        self.add(&slot);
        // Evicted connections are closed before more connections are accepted, so that few descriptors are in use.
        yield_now().await;
        Some(slot)
    }

    fn add(&self, slot: &Arc<ConnectionSlot>) {
        let mut taken = self.taken.lock();
        taken.retain(|slot| slot.strong_count() > 0);
        taken.push(Arc::downgrade(slot));
    }

    fn free(&self, kind: SlotKind) -> Arc<Semaphore> {
        match kind {
            SlotKind::Ordinary => self.ordinary.clone(),
            SlotKind::Reserved => self.reserved.clone(),
        }
    }

    /// Closes the connection that has been idle longest, and returns its permit. Prefers connections whose bytes the
    /// server has all read: other connections may have sent a request, and their tasks have not run since. Returns
    /// `None` if no connection is idle.
    fn evict_idle(&self, kind: SlotKind) -> Option<OwnedSemaphorePermit> {
        let mut taken = self.taken.lock();
        let idle = |(index, slot): (usize, &Weak<ConnectionSlot>)| {
            let slot = slot.upgrade().filter(|slot| slot.kind == kind)?;
            let since = (*slot.idle_since.lock())?;
            Some((since, index, slot))
        };
        let mut idle: Vec<_> = taken.iter().enumerate().filter_map(idle).collect();
        idle.sort_unstable_by_key(|(since, index, _)| (*since, *index));
        let silent = idle.iter().take(ASKED_SLOTS).position(|(.., slot)| !slot.has_unread_bytes());
        let (_, index, slot) = idle.into_iter().nth(silent.unwrap_or(0))?;
        taken.swap_remove(index);
        slot.evicted.notify_one();
        slot.permit.lock().take()
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
    stream: Arc<TcpStream>,
    limit: Duration,
    /// Timer of the pending write. `None` if no write is pending.
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for WriteTimeoutStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context, buffer: &mut ReadBuf) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|bytes| buffer.advance(bytes))),
            }
        }
    }
}

impl AsyncWrite for WriteTimeoutStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        while self.stream.poll_write_ready(context)?.is_ready() {
            match self.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    self.timer = None;
                    return Poll::Ready(written);
                }
            }
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Does nothing, because a socket has no buffer to flush.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{env, process::Command};

    #[tokio::test]
    async fn accepted_socket_probes_its_client() {
        let (_client, stream) = pair(&TcpListener::bind("127.0.0.1:0").await.unwrap()).await;
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
            assert_eq!(format!("{:?}", slot_limits(os::raise_descriptor_limit().unwrap())), expected);
            return;
        }
        let test = env::current_exe().unwrap();
        for (limit, expected) in [("100", "(38, 12)"), ("600", "(269, 75)"), ("1024", "(640, 128)")] {
            let shell = format!("ulimit -n {limit} && exec \"$0\" --exact {NAME}");
            let child = Command::new("sh").args(["-c", &shell]).arg(&test).env(EXPECTED, expected).output().unwrap();
            let output = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && output.contains("1 passed"), "{limit} descriptors: {output}");
        }
    }

    async fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let connect = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(connect, listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    #[tokio::test]
    async fn oldest_silent_connection_is_evicted_first() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slots = ConnectionSlots::new(1, 3);
        let (_busy, busy) = pair(&listener).await;
        let busy = BusyGuard::new(slots.take(busy).await.unwrap());
        let mut clients = Vec::new();
        let mut taken = Vec::new();
        for _ in 0..3 {
            let (client, stream) = pair(&listener).await;
            clients.push(client);
            taken.push(slots.take(stream).await.unwrap());
        }
        assert!(taken.iter().all(|slot| slot.kind == SlotKind::Reserved));
        let is_evicted = |slot: &ConnectionSlot| slot.permit.lock().is_none();
        let evicted = |taken: &[Arc<ConnectionSlot>]| -> Vec<_> { taken.iter().map(|slot| is_evicted(slot)).collect() };
        // The oldest client has sent a request, and its connection's task has not run yet.
        clients[0].writable().await.unwrap();
        clients[0].try_write(b"GET /health").unwrap();
        while !taken[0].has_unread_bytes() {
            yield_now().await;
        }
        let (_newer, newer) = pair(&listener).await;
        taken.push(slots.take(newer).await.unwrap());
        assert_eq!(evicted(&taken), [false, true, false, false]);
        // A request in progress is never evicted, and a client that has left is.
        let _answering = BusyGuard::new(taken[0].clone());
        drop(clients.remove(2));
        let (_newest, newest) = pair(&listener).await;
        taken.push(slots.take(newest).await.unwrap());
        assert_eq!(evicted(&taken), [false, true, true, false, false]);
        assert!(!is_evicted(&busy.slot) && taken.iter().all(|slot| slot.kind == SlotKind::Reserved));
    }

    #[tokio::test]
    async fn newcomer_waits_for_a_busy_reserved_slot() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slots = ConnectionSlots::new(1, 1);
        let mut clients = Vec::new();
        let mut busy = Vec::new();
        for _ in 0..2 {
            let (client, stream) = pair(&listener).await;
            clients.push(client);
            busy.push(BusyGuard::new(slots.take(stream).await.unwrap()));
        }
        let (_client, stream) = pair(&listener).await;
        let (_other, refused) = pair(&listener).await;
        assert!(slots.take(refused).await.is_none(), "both slots stay busy");
        let (slot, ()) = tokio::join!(slots.take(stream), async { drop(busy.pop()) });
        assert!(slot.is_some_and(|slot| slot.kind == SlotKind::Reserved));
    }
}
