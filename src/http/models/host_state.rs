//! State of the model host: the loaded model, the requests that wait for a model, and the next step of the host.
//!
//! At most one model is in memory. [`HostState::next_step`] depends only on this state and the clock.

use super::loaded::{HostedModel, LoadFailure, LoadedModel};
use crate::http::ApiError;
use moestro_engine::{QueueLimits, QueueShare, error::EngineError, retry_seconds};
use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// Interval at which to check whether a busy model is idle while another request waits to replace it.
pub const POLL_WITH_WAITERS: Duration = Duration::from_millis(20);
/// Interval of the same check if no request waits.
pub const POLL_WITHOUT_WAITERS: Duration = Duration::from_secs(1);

/// Times that a model stays in memory, and limits of a request's time.
#[derive(Debug, Clone, Copy)]
pub struct HostTimeouts {
    /// Limit of a request from its arrival to the end of its answer. The time that the request waits is included.
    pub request: Option<Duration>,
    /// Idle time after which a model is unloaded. `None` keeps the model in memory.
    pub keep_alive: Option<Duration>,
    /// Time that a request may wait for another model before the resident model accepts no new requests.
    pub max_wait: Duration,
    /// Idle time before a model is replaced by another model, because the model's client may ask again.
    pub min_idle: Duration,
}

impl Default for HostTimeouts {
    fn default() -> Self {
        Self { request: None, keep_alive: None, max_wait: Duration::from_secs(30), min_idle: Duration::from_secs(1) }
    }
}

#[derive(Default)]
pub struct HostState {
    pub resident: Option<ResidentModel>,
    /// Id of the model being loaded.
    pub loading: Option<String>,
    /// Id of the last model that was loaded. A request that names an unknown model gets this model.
    pub last_loaded: Option<String>,
    /// Requests for models that are not loaded, oldest first.
    pub waiters: VecDeque<Waiter>,
    pub is_shutting_down: bool,
    /// Time, model id and error of the last load, if it failed.
    pub load_failure: Option<(Instant, String, String)>,
}

/// The model in memory.
pub struct ResidentModel {
    pub id: String,
    pub model: Arc<LoadedModel>,
    /// Frees the memory. Blocks until the memory is free.
    unload: Box<dyn FnOnce() + Send>,
    /// Last time a request used the model.
    last_used: Instant,
    /// True to unload the model as soon as it is idle.
    pub unload_when_idle: bool,
    last_polled: Instant,
    /// Total time spent waiting for clients that do not read their answers. The total is limited to
    /// [`HostTimeouts::max_wait`], so that one slow client cannot block every request for another model.
    slow_client_wait: Duration,
}

/// A request that waits for a model to be loaded.
pub struct Waiter {
    pub model_id: String,
    pub since: Instant,
    pub share: QueueShare,
    pub reply: oneshot::Sender<Result<Arc<LoadedModel>, ApiError>>,
}

/// The next action of the host.
#[derive(Debug, PartialEq)]
pub enum NextStep {
    /// Check the model with this id, before the resident model is unloaded for it.
    Check(String),
    /// Unload the resident model if there is one. Then load the model with this id.
    Load(String),
    Unload,
    /// Wait for a change, but at most for the given duration. `None` waits without a limit.
    Wait(Option<Duration>),
}

impl ResidentModel {
    fn new(hosted: HostedModel) -> Self {
        let HostedModel { id, model, unload } = hosted;
        let now = Instant::now();
        Self {
            id,
            model: Arc::new(model),
            unload,
            last_used: now,
            unload_when_idle: false,
            last_polled: now,
            slow_client_wait: Duration::ZERO,
        }
    }

    /// Frees the model. Blocks until the last request has dropped the model.
    pub fn unload(self) {
        drop(self.model);
        (self.unload)();
    }

    /// True if a request uses the model, or will queue the next of several generations. Such a request holds a weak
    /// reference. All waits for such requests together are limited to `max_wait`.
    fn is_busy(&mut self, max_wait: Duration) -> bool {
        let since = mem::replace(&mut self.last_polled, Instant::now());
        if Arc::strong_count(&self.model) > 1 || self.model.engine.load() != (0, 0) {
            return true;
        }
        if Arc::weak_count(&self.model) == 0 {
            self.slow_client_wait = Duration::ZERO;
            return false;
        }
        self.slow_client_wait += since.elapsed().min(POLL_WITHOUT_WAITERS);
        self.slow_client_wait < max_wait
    }
}

impl HostState {
    /// Makes a newly loaded model resident and sends it to the requests that wait for it.
    pub fn install(&mut self, hosted: HostedModel) {
        self.last_loaded = Some(hosted.id.clone());
        self.load_failure = None;
        let resident = ResidentModel::new(hosted);
        for waiter in self.take_waiters(&resident.id) {
            let _ = waiter.reply.send(Ok(resident.model.clone()));
        }
        self.resident = Some(resident);
    }

    /// Fails the requests that wait for a model that cannot be loaded.
    pub fn fail_waiters(&mut self, id: &str, failure: LoadFailure) {
        self.load_failure = Some((Instant::now(), id.to_owned(), failure.detail));
        for waiter in self.take_waiters(id) {
            let _ = waiter.reply.send(Err(ApiError::not_loaded(id, &failure.message)));
        }
    }

    /// Adds a request that waits for a model. If too many wait, gives up waiting requests of another client, or refuses
    /// the new one.
    pub fn add_waiter(&mut self, new: Waiter, limits: QueueLimits) -> Result<(), ApiError> {
        let waiting: Vec<_> = self.waiters.iter().map(|waiter| waiter.share).collect();
        let room = limits.make_room(&waiting, new.share);
        let longest = self.waiters.front().map(|oldest| oldest.since.elapsed()).unwrap_or_default();
        let full = || ApiError::from(EngineError::QueueFull { retry_seconds: retry_seconds(waiting.len(), longest) });
        let given_up = room.ok_or_else(full)?;
        for given_up in given_up.into_iter().rev().filter_map(|index| self.waiters.remove(index)) {
            let _ = given_up.reply.send(Err(full()));
        }
        self.waiters.push_back(new);
        Ok(())
    }

    fn take_waiters(&mut self, id: &str) -> Vec<Waiter> {
        let (taken, kept) = self.waiters.drain(..).partition(|waiter: &Waiter| waiter.model_id == id);
        self.waiters = kept;
        taken.into()
    }

    /// The resident model, if it has this id, is not about to be unloaded, and no request has waited too long for
    /// another model.
    pub fn admit(&mut self, id: &str, max_wait: Duration) -> Option<Arc<LoadedModel>> {
        self.drop_disconnected();
        let is_overdue = self.waiters.front().is_some_and(|waiter| waiter.since.elapsed() >= max_wait);
        let resident = self.resident.as_mut()?;
        if resident.id != id || is_overdue || resident.unload_when_idle && !resident.is_busy(max_wait) {
            return None;
        }
        resident.last_used = Instant::now();
        Some(resident.model.clone())
    }

    /// Removes waiters whose client has disconnected.
    fn drop_disconnected(&mut self) {
        self.waiters.retain(|waiter| !waiter.reply.is_closed());
    }

    pub fn next_step(&mut self, timeouts: &HostTimeouts) -> NextStep {
        self.drop_disconnected();
        let first = self.waiters.front();
        if self.is_shutting_down {
            return NextStep::Wait(None);
        }
        let Some(resident) = &mut self.resident else {
            return first.map_or(NextStep::Wait(None), |waiter| NextStep::Load(waiter.model_id.clone()));
        };
        if resident.is_busy(timeouts.max_wait) {
            resident.last_used = Instant::now();
            return NextStep::Wait(match first {
                _ if resident.unload_when_idle => Some(POLL_WITH_WAITERS),
                Some(_) => Some(POLL_WITH_WAITERS),
                None => timeouts.keep_alive.map(|_| POLL_WITHOUT_WAITERS),
            });
        }
        if resident.unload_when_idle {
            return NextStep::Unload;
        }
        let idle = resident.last_used.elapsed();
        match (first, timeouts.keep_alive) {
            (Some(waiter), _) if idle >= timeouts.min_idle || waiter.since.elapsed() >= timeouts.max_wait => {
                NextStep::Load(waiter.model_id.clone())
            }
            (Some(_), _) => NextStep::Wait(Some(POLL_WITH_WAITERS)),
            (None, Some(limit)) if idle >= limit => NextStep::Unload,
            (None, Some(limit)) => NextStep::Wait(Some(limit - idle)),
            (None, None) => NextStep::Wait(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use moestro_engine::ClientId;

    #[test]
    fn largest_clients_newest_waiter_is_given_up() {
        let mut state = HostState::default();
        let mut add = |key: u64, bytes: usize| {
            let (reply, answer) = oneshot::channel();
            let share = QueueShare { client: ClientId::new(0, key, 0), bytes };
            let waiter = Waiter { model_id: format!("model {key}"), since: Instant::now(), share, reply };
            let added = state.add_waiter(waiter, QueueLimits { requests: 4, bytes: 100 });
            (added.map_err(|refused| refused.status), answer)
        };
        let mut waiting = [10, 10, 10, 10].map(|bytes| {
            let (added, answer) = add(1, bytes);
            assert_eq!(added, Ok(()));
            answer
        });
        let mut given_up = |index: usize| match waiting[index].try_recv() {
            Ok(answer) => Some(answer.err().map(|refused| refused.status.as_u16())),
            Err(_) => None,
        };
        let (added, mut second) = add(2, 10);
        assert_eq!((added, given_up(3)), (Ok(()), Some(Some(429))));
        let (added, mut third) = add(3, 80);
        assert_eq!(added, Err(StatusCode::TOO_MANY_REQUESTS), "it would have more than the first client");
        assert!(third.try_recv().is_err());
        assert_eq!([0, 1, 2].map(&mut given_up), [None, None, None]);
        let (added, _fourth) = add(2, 10);
        assert_eq!((added, given_up(2)), (Ok(()), Some(Some(429))));
        let (added, _) = add(2, 10);
        assert_eq!((added, given_up(1)), (Err(StatusCode::TOO_MANY_REQUESTS), None), "both clients have two");
        assert!(second.try_recv().is_err());
        let ids: Vec<_> = state.waiters.iter().map(|waiter| waiter.model_id.as_str()).collect();
        assert_eq!(ids, ["model 1", "model 1", "model 2", "model 2"]);
    }
}
