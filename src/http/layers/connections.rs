//! Connections: how many there may be, and how long one may be silent.
//!
//! Each has a place. When all are taken, the connection that has been idle longest gives its own up; if every one has a
//! request in progress, a newcomer gets one of a few further places, at which `/health` and `/metrics` are answered and
//! everything else is a 503. So neither idle sockets nor a full house keep anybody from asking how the server is.

use crate::http::{
    ServerState,
    errors::ApiError,
    layers::{body_guard, timeouts::Timeouts},
    routes,
};
use crate::platform::os;
use axum::{
    Router,
    response::{IntoResponse, Response},
};
use hyper::{Request, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, Sleep, sleep},
};

/// The most connections with ordinary places, if the system allows as many files.
const MOST: usize = 1024;
/// Further places, for `/health` and `/metrics`.
const RESERVED: usize = 8;
/// Descriptors left to the model's files and everything else, if there are so many.
const FILES: usize = 256;
/// The most a connection buffers of a request's head, of its body or of an answer (bytes).
const BUFFER: usize = 16 << 10;
/// The most of an answer that the system buffers for a client which does not read (bytes).
const SEND_BUFFER: usize = 64 << 10;

/// Accepts connections until `stop` is told, and closes each after the request in progress then. Whoever holds the other
/// end of `stop` sees by its receivers when all are closed.
pub async fn accept(listener: TcpListener, router: Router, state: Arc<ServerState>, mut stop: watch::Receiver<bool>) {
    let places = Arc::new(Places::new(state.max_connections.unwrap_or_else(places)));
    let patience = state.timeouts;
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // A connection that failed before it was taken, or no descriptor left.
                    tracing::debug!(%error, "accept");
                    places.make_room();
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
            _ = stop.changed() => return,
        };
        let Some(lease) = places.enter().await else { continue };
        let (router, stop) = (router.clone(), stop.clone());
        tokio::spawn(async move {
            if let Err(error) = serve(stream, router, lease, patience, stop).await {
                tracing::debug!(%error, "connection");
            }
        });
    }
}

/// As many connections as leave descriptors for the rest.
fn places() -> usize {
    let limit = os::raise_descriptor_limit().unwrap_or(1024);
    limit.saturating_sub(RESERVED + FILES.min(limit / 2)).clamp(1, MOST)
}

async fn serve(
    stream: TcpStream,
    router: Router,
    lease: Seat,
    patience: Timeouts,
    mut stop: watch::Receiver<bool>,
) -> hyper::Result<()> {
    // Tokens are small packets: collecting them would cost up to 40 ms each.
    let socket = socket2::SockRef::from(&stream);
    if let Err(error) = socket.set_tcp_nodelay(true).and_then(|()| socket.set_send_buffer_size(SEND_BUFFER)) {
        tracing::debug!(%error, "socket options");
    }
    let router = TowerToHyperService::new(router);
    let place = &lease.place;
    let at = place.clone();
    let answer = hyper::service::service_fn(move |request: Request<Incoming>| {
        let busy = Busy::new(at.clone());
        let answer = match at.reserved && !routes::is_status(request.uri().path()) {
            true => None,
            false => Some(router.call(request)),
        };
        async move {
            let answer = match answer {
                Some(answer) => answer.await?,
                None => ApiError::no_place().into_response(),
            };
            Ok::<Response, Infallible>(body_guard::hold(answer, busy))
        }
    });
    let head = if place.reserved { patience.reserved } else { patience.head };
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(head)
            .max_buf_size(BUFFER)
            .keep_alive(!place.reserved)
            .serve_connection(TokioIo::new(Patient::new(stream, patience.write)), answer)
    );
    let mut stopping = *stop.borrow();
    if stopping {
        connection.as_mut().graceful_shutdown();
    }
    loop {
        tokio::select! {
            ended = connection.as_mut() => return ended,
            () = place.leave.notified() => return Ok(()),
            _ = stop.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// All places, and the connections that have one.
struct Places {
    ordinary: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    taken: Mutex<HashMap<u64, Arc<Place>>>,
    count: AtomicU64,
}

/// One connection's place.
struct Place {
    number: u64,
    reserved: bool,
    /// Since when no request has been in progress; `None` while one is.
    idle: Mutex<Option<Instant>>,
    leave: Notify,
    _permit: OwnedSemaphorePermit,
}

/// A taken place; dropping it gives the place back.
struct Seat {
    place: Arc<Place>,
    all: Arc<Places>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.all.taken.lock().remove(&self.place.number);
    }
}

impl Places {
    fn new(ordinary: usize) -> Self {
        Self {
            ordinary: Arc::new(Semaphore::new(ordinary)),
            reserved: Arc::new(Semaphore::new(RESERVED)),
            taken: Mutex::default(),
            count: AtomicU64::new(0),
        }
    }

    /// A place, if there is one or room can be made.
    async fn enter(self: &Arc<Self>) -> Option<Seat> {
        let mut permit = self.ordinary.clone().try_acquire_owned().ok();
        if permit.is_none() && self.make_room() {
            let freed = self.ordinary.clone().acquire_owned();
            permit = tokio::time::timeout(Duration::from_millis(100), freed).await.ok().and_then(Result::ok);
        }
        let reserved = permit.is_none();
        let permit = permit.or_else(|| self.reserved.clone().try_acquire_owned().ok())?;
        let number = self.count.fetch_add(1, Relaxed);
        let idle = Mutex::new(Some(Instant::now()));
        let place = Arc::new(Place { number, reserved, idle, leave: Notify::new(), _permit: permit });
        if !reserved {
            self.taken.lock().insert(number, place.clone());
        }
        Some(Seat { place, all: self.clone() })
    }

    /// Asks the connection that has been idle longest to leave; false if there is none.
    fn make_room(&self) -> bool {
        let mut taken = self.taken.lock();
        let idle = taken.values().filter_map(|place| Some(((*place.idle.lock())?, place.number)));
        let Some(place) = idle.min().and_then(|(_, number)| taken.remove(&number)) else { return false };
        place.leave.notify_one();
        true
    }
}

/// A request in progress, until its answer has been taken whole.
struct Busy(Arc<Place>);

impl Busy {
    fn new(place: Arc<Place>) -> Self {
        *place.idle.lock() = None;
        Self(place)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.idle.lock() = Some(Instant::now());
    }
}

/// A stream that fails when nothing of what is written is taken for too long.
struct Patient {
    stream: TcpStream,
    limit: Duration,
    /// Runs while a write waits.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, alarm: None }
    }

    fn watch<T>(&mut self, context: &mut Context, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.alarm = None;
            return written;
        }
        let limit = self.limit;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep(limit)));
        alarm.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, buffer: &mut ReadBuf) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        slices: &[io::IoSlice],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
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

    /// A process cannot raise a limit that it has lowered, so one of its own has each.
    #[test]
    fn few_descriptors_are_divided_between_connections_and_files() {
        const WANTED: &str = "MOESTRO_TEST_PLACES";
        const NAME: &str =
            "http::layers::connections::tests::few_descriptors_are_divided_between_connections_and_files";
        if let Ok(wanted) = env::var(WANTED) {
            assert_eq!(places().to_string(), wanted);
            return;
        }
        let me = env::current_exe().unwrap();
        for (limit, wanted) in [("100", "42"), ("600", "336")] {
            let shell = format!("ulimit -n {limit} && exec \"$0\" --exact {NAME}");
            let child = Command::new("sh").args(["-c", &shell]).arg(&me).env(WANTED, wanted).output().unwrap();
            let said = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && said.contains("1 passed"), "{limit} descriptors: {said}");
        }
    }
}
