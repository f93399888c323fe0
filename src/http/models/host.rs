//! Loads and unloads models. One model is in memory at a time, because there may not be memory for two models.
//!
//! A request that names another model waits until that model is loaded. Requests are admitted in order of arrival,
//! model by model: the resident model stays while requests use it, until a request for another model has waited for
//! [`HostTimeouts::max_wait`]. From then on new requests for the resident model wait, too.

use super::{
    host_state::{HostState, HostTimeouts, NextStep, POLL_WITH_WAITERS, ResidentModel, Waiter},
    loaded::{HostedModel, LoadFailure, LoadedModel, ModelLoader},
    names::{self, ModelEntry},
};
use crate::http::{ApiError, health::FAILURE_MAX_AGE};
use moestro_engine::{QueueLimits, QueueShare, error::EngineError};
use parking_lot::Mutex;
use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{self, Notify, OwnedMutexGuard, oneshot},
    task::spawn_blocking,
};

/// Time after which the list of models is read from disk again.
const LIST_MAX_AGE: Duration = Duration::from_secs(5);

/// The time at which the list of models was read, and the list.
type CachedList = (Instant, Arc<Vec<ModelEntry>>);

#[derive(Default)]
pub struct ModelHost {
    loader: Option<Arc<dyn ModelLoader>>,
    timeouts: Mutex<HostTimeouts>,
    max_waiters: usize,
    state: Mutex<HostState>,
    /// Held while a model unloads and while prompt caches are cleared. A model that unloads writes its prompt cache,
    /// and this write must not follow the clearing.
    unloading: Arc<sync::Mutex<()>>,
    /// Wakes [`ModelHost::run`].
    changed: Notify,
    /// The list of models on disk. Locked during a read from disk, so that concurrent requests share one read.
    list: Arc<sync::Mutex<Option<CachedList>>>,
}

impl ModelHost {
    pub fn new(loader: Arc<dyn ModelLoader>, timeouts: HostTimeouts, max_waiters: usize) -> Self {
        Self { loader: Some(loader), timeouts: Mutex::new(timeouts), max_waiters, ..Self::default() }
    }

    pub fn set_timeouts(&self, timeouts: HostTimeouts) {
        *self.timeouts.lock() = timeouts;
        self.changed.notify_one();
    }

    pub fn timeouts(&self) -> HostTimeouts {
        *self.timeouts.lock()
    }

    /// Makes a model resident.
    pub fn install(&self, hosted: HostedModel) {
        let mut state = self.state.lock();
        if state.is_shutting_down {
            hosted.model.engine.drain();
        }
        state.install(hosted);
        drop(state);
        self.changed.notify_one();
    }

    /// Sets the model that is loaded for the first request that names no known model.
    pub fn set_default(&self, id: &str) {
        self.state.lock().last_loaded = Some(id.into());
    }

    /// The model in memory.
    pub fn model(&self) -> Option<Arc<LoadedModel>> {
        self.state.lock().resident.as_ref().map(|resident| resident.model.clone())
    }

    /// Id of the model in memory.
    pub fn loaded_id(&self) -> Option<String> {
        self.state.lock().resident.as_ref().map(|resident| resident.id.clone())
    }

    /// Id of the model that a request without a name gets: the model being loaded, else the last loaded model.
    pub fn current_id(&self) -> Option<String> {
        let state = self.state.lock();
        state.loading.clone().or_else(|| state.last_loaded.clone())
    }

    /// The error of the last load, if the load failed recently and was for the current model.
    pub fn load_failure(&self) -> Option<String> {
        let state = self.state.lock();
        let (at, id, why) = state.load_failure.as_ref()?;
        (state.last_loaded.as_ref() == Some(id) && at.elapsed() < FAILURE_MAX_AGE).then(|| why.clone())
    }

    /// True once a model was loaded or set as the default. From then on, requests are accepted.
    pub fn is_open(&self) -> bool {
        self.state.lock().last_loaded.is_some()
    }

    /// The models on this machine, read from disk at most every five seconds.
    pub async fn list(&self) -> Arc<Vec<ModelEntry>> {
        let Some(loader) = self.loader.clone() else { return Arc::default() };
        let mut cached = self.list.clone().lock_owned().await;
        if let Some((at, list)) = &*cached
            && at.elapsed() < LIST_MAX_AGE
        {
            return list.clone();
        }
        // A blocking task finishes even if its client disconnects, and the next request uses the list.
        let read = move || {
            let list = Arc::new(loader.list());
            *cached = Some((Instant::now(), list.clone()));
            list
        };
        spawn_blocking(read).await.unwrap_or_default()
    }

    /// Clears the prompt cache of the resident model, and the prompt caches of all other models on disk.
    pub async fn clear_prompt_caches(&self) -> Result<(), ApiError> {
        let _no_unload = self.unloading.lock().await;
        let cleared = match self.loader.clone() {
            Some(loader) => spawn_blocking(move || loader.clear_prompt_caches()).await.unwrap_or(Ok(())),
            None => Ok(()),
        };
        // The resident model's cache is cleared last, because the model also deletes what it wrote in the meantime.
        if let Some(model) = self.model() {
            model.engine.clear_prompt_cache();
        }
        cleared.map_err(|error| ApiError::failed(&error))
    }

    /// Id of the model that the requested name stands for. The name of the last loaded model wins over an equally good
    /// match. `None` if the name is unknown.
    pub async fn find(&self, requested: &str) -> Option<String> {
        let last = self.state.lock().last_loaded.clone();
        if let Some(last) = last.as_ref().filter(|last| names::is_exact(requested, last)) {
            return Some(last.clone());
        }
        let list = self.list().await;
        let ids = last.iter().chain(list.iter().map(|entry| &entry.id)).map(String::as_str);
        names::find(requested, ids).map(str::to_owned)
    }

    /// A lease of the requested model. An unknown name means the current model. If the model has yet to be loaded, the
    /// request waits with `share` of at most `max_bytes` of memory.
    ///
    /// # Errors
    /// The name is the id of another model on the hub, too many requests wait, or the server stops or has no model yet.
    pub async fn lease(
        &self,
        requested: Option<&str>,
        share: QueueShare,
        max_bytes: usize,
    ) -> Result<ModelLease, ApiError> {
        let known = match requested {
            Some(requested) => self.find(requested).await,
            None => None,
        };
        let mut state = self.state.lock();
        if state.is_shutting_down {
            return Err(ApiError::from(EngineError::Draining));
        }
        let Some(current) = state.loading.as_ref().or(state.last_loaded.as_ref()) else {
            return Err(ApiError::loading());
        };
        let is_refused = |name: &&str| names::is_too_long(name) || names::is_other_model(name, current);
        let other = requested.filter(|requested| known.is_none() && is_refused(requested));
        if let Some(other) = other {
            return Err(ApiError::no_such_model(names::plain(other), current));
        }
        let model_id = known.as_ref().unwrap_or(current).clone();
        if let Some(model) = state.admit(&model_id, self.timeouts().max_wait) {
            return Ok(ModelLease::Ready(model));
        }
        let (reply, receiver) = oneshot::channel();
        // The first request is the one that the model is loaded for.
        let limits = QueueLimits { requests: self.max_waiters + 1, bytes: max_bytes };
        state.add_waiter(Waiter { model_id, since: Instant::now(), share, reply }, limits)?;
        drop(state);
        self.changed.notify_one();
        Ok(ModelLease::Waiting(receiver))
    }

    /// Unloads the model as soon as it is idle. Returns false if the model is not in memory.
    pub fn unload(&self, id: &str) -> bool {
        let mut state = self.state.lock();
        let Some(resident) = state.resident.as_mut().filter(|resident| resident.id == id) else {
            return false;
        };
        resident.unload_when_idle = true;
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Refuses new and waiting requests. Requests in progress finish within the engine's grace period.
    pub fn shut_down(&self) {
        let mut state = self.state.lock();
        state.is_shutting_down = true;
        for waiter in state.waiters.drain(..) {
            let _ = waiter.reply.send(Err(ApiError::from(EngineError::Draining)));
        }
        if let Some(resident) = &state.resident {
            resident.model.engine.drain();
        }
    }

    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        let is_busy = |resident: &ResidentModel| resident.model.engine.load() != (0, 0);
        state.waiters.is_empty() && !state.resident.as_ref().is_some_and(is_busy)
    }

    /// Unloads the resident model and waits until its memory is free.
    pub fn unload_now(&self) -> impl Future<Output = ()> + use<> {
        let resident = self.state.lock().resident.take();
        async move {
            if let Some(resident) = resident {
                let _ = spawn_blocking(move || resident.unload()).await;
            }
        }
    }

    /// Loads requested models and unloads idle models. Never returns.
    pub async fn run(&self) {
        // The model that was checked last. The resident model answers requests during the check.
        let mut checked: Option<String> = None;
        loop {
            let (step, replaced) = {
                let mut state = self.state.lock();
                checked = checked.filter(|_| !state.waiters.is_empty());
                match (state.next_step(&self.timeouts()), self.unloading.clone().try_lock_owned()) {
                    (NextStep::Wait(limit), _) => (NextStep::Wait(limit), None),
                    (NextStep::Load(id), _) if state.resident.is_some() && checked.as_ref() != Some(&id) => {
                        (NextStep::Check(id), None)
                    }
                    (_, Err(_)) => (NextStep::Wait(Some(POLL_WITH_WAITERS)), None),
                    (step, Ok(guard)) => {
                        if let NextStep::Load(id) = &step {
                            state.loading = Some(id.clone());
                        }
                        (step, state.resident.take().map(|resident| (resident, guard)))
                    }
                }
            };
            match step {
                NextStep::Wait(None) => self.changed.notified().await,
                NextStep::Wait(Some(limit)) => {
                    let _ = tokio::time::timeout(limit, self.changed.notified()).await;
                }
                NextStep::Unload => {
                    tracing::info!("unloading the idle model");
                    let _ = spawn_blocking(move || replaced.map(|(resident, _guard)| resident.unload())).await;
                }
                NextStep::Check(id) => match self.check(&id).await {
                    Ok(()) => checked = Some(id),
                    Err(failure) => self.fail_load(&id, failure),
                },
                NextStep::Load(id) => {
                    checked = None;
                    self.load(replaced, id).await;
                }
            }
        }
    }

    /// Checks a model that will replace the resident model.
    async fn check(&self, id: &str) -> Result<(), LoadFailure> {
        let loader = self.loader()?;
        let id = id.to_owned();
        run_blocking(move || loader.check(&id)).await
    }

    /// Unloads the replaced model and loads another model.
    async fn load(&self, replaced: Option<(ResidentModel, OwnedMutexGuard<()>)>, id: String) {
        let loader = self.loader();
        let requested = id.clone();
        let load = move || {
            if let Some((resident, guard)) = replaced {
                resident.unload();
                drop(guard);
            }
            loader?.load(&requested)
        };
        let loaded = run_blocking(load).await;
        let mut state = self.state.lock();
        state.loading = None;
        match loaded {
            Ok(hosted) if state.is_shutting_down => hosted.model.engine.drain(),
            Ok(hosted) => state.install(hosted),
            Err(failure) => {
                drop(state);
                self.fail_load(&id, failure);
            }
        }
    }

    fn loader(&self) -> Result<Arc<dyn ModelLoader>, LoadFailure> {
        self.loader.clone().ok_or_else(|| "this server cannot load models".into())
    }

    fn fail_load(&self, id: &str, failure: LoadFailure) {
        tracing::error!(model = id, why = failure.detail, "cannot load model");
        self.state.lock().fail_waiters(id, failure);
    }
}

/// Runs `step` on a blocking thread. A panic is an error.
async fn run_blocking<T: Send + 'static>(
    step: impl FnOnce() -> Result<T, LoadFailure> + Send + 'static,
) -> Result<T, LoadFailure> {
    spawn_blocking(step).await.unwrap_or_else(|panic| Err(panic.to_string().as_str().into()))
}

/// A request's model, which is in memory or has yet to be loaded.
pub enum ModelLease {
    Ready(Arc<LoadedModel>),
    Waiting(oneshot::Receiver<Result<Arc<LoadedModel>, ApiError>>),
}

impl ModelLease {
    /// True if the model has yet to be loaded.
    pub fn must_wait(&self) -> bool {
        matches!(self, Self::Waiting(_))
    }

    pub async fn wait(self) -> Result<Arc<LoadedModel>, ApiError> {
        match self {
            ModelLease::Ready(model) => Ok(model),
            ModelLease::Waiting(reply) => reply.await.unwrap_or_else(|_| Err(ApiError::loading())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    };

    /// Counts calls of `list`. Each call returns when the sender is dropped.
    struct SlowLoader {
        lists: Arc<AtomicUsize>,
        release: Mutex<mpsc::Receiver<()>>,
    }

    impl ModelLoader for SlowLoader {
        fn list(&self) -> Vec<ModelEntry> {
            self.lists.fetch_add(1, Relaxed);
            let _ = self.release.lock().recv();
            Vec::new()
        }

        fn load(&self, _: &str) -> Result<HostedModel, LoadFailure> {
            Err("there is none".into())
        }
    }

    #[tokio::test]
    async fn concurrent_and_cancelled_lists_read_once() {
        let lists = Arc::new(AtomicUsize::new(0));
        let (release, wait) = mpsc::channel();
        let loader = SlowLoader { lists: lists.clone(), release: Mutex::new(wait) };
        let host = ModelHost::new(Arc::new(loader), HostTimeouts::default(), 1);
        let cancelled = tokio::time::timeout(Duration::from_millis(5), host.list()).await;
        assert!(cancelled.is_err());
        tokio::join!(host.list(), host.list(), async { drop(release) });
        assert_eq!(lists.load(Relaxed), 1);
    }
}
