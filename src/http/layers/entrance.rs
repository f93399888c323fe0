//! The entrance for requests whose parsed bodies need memory.
//!
//! A request needs most memory while its prompt is made. Before, it is a body, and afterwards a list of tokens. Requests
//! of many agents that arrive together would fill the memory in this stage, although the queue has room for all of
//! them. So large requests wait until their memory is free. At most an eighth of the memory is used for those inside, and
//! for one that alone needs more. They try about in the order of their arrival, but one that fits passes one that does
//! not. A small request only waits for its memory.

use crate::http::ApiError;
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, timeout, timeout_at},
};

/// Size in bytes above which a request is large. A large request must leave a quarter of the memory to small requests.
pub const LARGE_BYTES: usize = 256 << 10;

/// Longest time that a request waits for memory: at the entrance, where it only holds its body, and before each step.
pub const MAX_WAIT: Duration = Duration::from_secs(30);

/// Time after which a waiting request tries again even if no memory became free.
const RETRY: Duration = Duration::from_millis(200);

/// The memory for all requests, divided by the memory for those whose prompts are made.
const PARTS: usize = 8;

pub struct Entrance {
    max_wait: Duration,
    /// Bytes of the large requests whose prompts are made.
    inside: AtomicUsize,
    /// True while the prompt of a request is made that needs more than its part of the memory.
    has_largest: AtomicBool,
    /// Bytes of the bodies that wait.
    waiting: AtomicUsize,
    /// Notified when memory is free again.
    freed: Notify,
}

/// The room that a request takes at the entrance.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    None,
    Bytes(usize),
    Largest,
}

/// A request whose prompt is made.
pub struct EntrancePlace {
    entrance: Arc<Entrance>,
    share: Share,
}

/// Counts a body that waits.
struct WaitingBody<'a>(&'a Entrance, usize);

impl Entrance {
    pub fn new(max_wait: Duration) -> Arc<Self> {
        let [inside, waiting] = [0, 0].map(AtomicUsize::new);
        Arc::new(Self { max_wait, inside, has_largest: AtomicBool::new(false), waiting, freed: Notify::new() })
    }

    /// Waits until there is room for `bytes` and until `reserve` has reserved them. `total` is the memory for all
    /// requests. Bodies that wait, such as this one of `body` bytes, may take half of it.
    pub async fn enter(
        self: &Arc<Self>,
        body: usize,
        bytes: usize,
        total: impl Fn() -> usize,
        mut reserve: impl FnMut() -> Result<bool, ApiError>,
    ) -> Result<EntrancePlace, ApiError> {
        let waiting = self.waiting.fetch_add(body, Relaxed) + body;
        let _waiting = WaitingBody(self, body);
        if waiting > total() / 2 {
            return Err(ApiError::memory_in_use());
        }
        let wait = async {
            loop {
                let freed = self.freed();
                if let Some(share) = self.take(bytes, total() / PARTS) {
                    let place = EntrancePlace { entrance: self.clone(), share };
                    if reserve()? {
                        return Ok(place);
                    }
                    place.give_back();
                }
                // Another request may just have tried, and have taken the room for a moment.
                freed.await;
            }
        };
        timeout(self.max_wait, wait).await.unwrap_or_else(|_| Err(ApiError::memory_in_use()))
    }

    /// Takes room for a request that needs `bytes`, if there is room. `most` is the part for all that are inside.
    fn take(&self, bytes: usize, most: usize) -> Option<Share> {
        if bytes <= LARGE_BYTES {
            Some(Share::None)
        } else if bytes > most {
            (!self.has_largest.swap(true, Relaxed)).then_some(Share::Largest)
        } else {
            let add = |inside: usize| Some(inside + bytes).filter(|inside| *inside <= most);
            self.inside.fetch_update(Relaxed, Relaxed, add).is_ok().then_some(Share::Bytes(bytes))
        }
    }

    fn give_back(&self, share: Share) {
        match share {
            Share::None => {}
            Share::Bytes(bytes) => _ = self.inside.fetch_sub(bytes, Relaxed),
            Share::Largest => self.has_largest.store(false, Relaxed),
        }
    }

    /// Waits until memory is free again, but at most [`RETRY`]. Memory that becomes free before the wait counts, too.
    pub fn freed(&self) -> impl Future<Output = ()> {
        let freed = self.freed.notified();
        async {
            let _ = timeout(RETRY, freed).await;
        }
    }

    /// The end of a wait for memory that begins now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.max_wait
    }

    /// Lets the next request look for memory again.
    pub fn wake(&self) {
        self.freed.notify_waiters();
    }

    /// True if no request is inside or waits.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.inside.load(Relaxed) == 0 && !self.has_largest.load(Relaxed) && self.waiting.load(Relaxed) == 0
    }
}

/// Waits for `freed`, which may be ready each time that it is made.
///
/// # Errors
/// The deadline has passed.
pub async fn wait_before(deadline: Instant, freed: impl Future<Output = ()>) -> Result<(), ApiError> {
    if Instant::now() >= deadline {
        return Err(ApiError::memory_in_use());
    }
    timeout_at(deadline, freed).await.map_err(|_| ApiError::memory_in_use())
}

impl EntrancePlace {
    /// Gives the place back without a wake-up, after which all that wait would try again and wake each other for ever.
    fn give_back(mut self) {
        self.entrance.give_back(std::mem::replace(&mut self.share, Share::None));
    }
}

impl Drop for EntrancePlace {
    fn drop(&mut self) {
        if self.share != Share::None {
            self.entrance.give_back(self.share);
            self.entrance.wake();
        }
    }
}

impl Drop for WaitingBody<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(self.1, Relaxed);
    }
}
