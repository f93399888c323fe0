//! The model in memory: one at a time. A request that names another one waits until it is loaded; the one before
//! has been let go by then, since there may not be memory for two.
//!
//! Requests wait in the order in which they came, and are let in model by model: while the loaded model is asked, it
//! stays, until somebody has waited for another one for [`Times::patience`]. From then on its requests wait, too.

mod names;
mod now;
mod seat;

pub use names::Listed;
pub use seat::{Again, Seat, in_time};

use super::{App, api_error::ApiError};
use crate::error::EngineError;
use names::{find, means};
use now::{LOOK, Now, On, Step, Ticket};
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

/// The list of models is read again from the disk after this time.
const FRESH: Duration = Duration::from_secs(5);

/// A model that is in memory now.
pub struct Loaded {
    /// As it is listed.
    pub id: String,
    pub app: App,
    /// Waits until the memory is given back; called when nobody holds the model any more. Blocks.
    pub unload: Box<dyn FnOnce() + Send>,
}

/// The time that a model stays, and that a request may take.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// From its arrival to the end of its answer, for whatever it waits.
    pub request: Option<Duration>,
    /// One that nobody has asked for so long gives its memory back.
    pub keep_alive: Option<Duration>,
    /// One that is asked ever again keeps those waiting for so long who want another one.
    pub patience: Duration,
    /// After its last answer it stays for so long: its client may be about to ask again.
    pub linger: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { request: None, keep_alive: None, patience: Duration::from_secs(30), linger: Duration::from_secs(1) }
    }
}

/// Finds models and loads them. Both block.
pub trait Loader: Send + Sync + 'static {
    fn list(&self) -> Vec<Listed>;

    /// # Errors
    /// A sentence for the client.
    fn load(&self, id: &str) -> Result<Loaded, String>;

    /// Removes what any model, loaded or not, has left of prompts on the disk.
    ///
    /// # Errors
    /// A sentence for the client.
    fn forget_prompts(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Models, and when they were looked up.
type Found = (Instant, Arc<Vec<Listed>>);

/// The model that answers.
#[derive(Default)]
pub struct Stage {
    loader: Option<Arc<dyn Loader>>,
    times: Mutex<Times>,
    /// Requests that may wait for a model.
    most: usize,
    now: Mutex<Now>,
    /// Held while a model goes, and while prompts are forgotten: what it writes down last must not come behind that.
    leaving: Arc<sync::Mutex<()>>,
    /// Somebody waits, or a model has come.
    changed: Notify,
    /// Held while the models are looked up: one look at a time, whose list all have who waited for it.
    found: Arc<sync::Mutex<Option<Found>>>,
}

impl Stage {
    /// `most` requests may wait for a model.
    pub fn new(loader: Arc<dyn Loader>, times: Times, most: usize) -> Self {
        Self { loader: Some(loader), times: Mutex::new(times), most, ..Self::default() }
    }

    /// These times hold from now on.
    pub fn keep(&self, times: Times) {
        *self.times.lock() = times;
        self.changed.notify_one();
    }

    pub fn times(&self) -> Times {
        *self.times.lock()
    }

    /// This model answers from now on.
    pub fn enter(&self, loaded: Loaded) {
        let mut now = self.now.lock();
        if now.closing {
            loaded.app.engine.drain();
        }
        now.enter(loaded);
        drop(now);
        self.changed.notify_one();
    }

    /// This model answers when somebody asks, and is loaded then.
    pub fn rest(&self, id: &str) {
        self.now.lock().last = Some(id.into());
    }

    /// The model that is loaded.
    pub fn app(&self) -> Option<Arc<App>> {
        self.now.lock().on.as_ref().map(|on| on.app.clone())
    }

    /// The id of the model that is loaded.
    pub fn loaded(&self) -> Option<String> {
        self.now.lock().on.as_ref().map(|on| on.id.clone())
    }

    /// The model that is loaded, or being loaded, or would be for a request that names none.
    pub fn name(&self) -> Option<String> {
        let now = self.now.lock();
        now.coming.clone().or_else(|| now.last.clone())
    }

    /// True once there was a model: from then on requests are let in.
    pub fn is_open(&self) -> bool {
        self.now.lock().last.is_some()
    }

    /// The models on this machine; looked up at most every five seconds.
    pub async fn listed(&self) -> Arc<Vec<Listed>> {
        let Some(loader) = self.loader.clone() else { return Arc::default() };
        let mut found = self.found.clone().lock_owned().await;
        if let Some((at, list)) = &*found
            && at.elapsed() < FRESH
        {
            return list.clone();
        }
        // A client that leaves does not end the look: the next one waits for it.
        let look = move || {
            let list = Arc::new(loader.list());
            *found = Some((Instant::now(), list.clone()));
            list
        };
        spawn_blocking(look).await.unwrap_or_default()
    }

    /// Empties the prompt cache: the model's that is loaded, and what any other has left on the disk.
    pub async fn forget_prompts(&self) -> Result<(), ApiError> {
        let _stays = self.leaving.lock().await;
        // The loaded model's own list of files goes last, with whatever it has written meanwhile.
        let left = match self.loader.clone() {
            Some(loader) => spawn_blocking(move || loader.forget_prompts()).await.unwrap_or(Ok(())),
            None => Ok(()),
        };
        if let Some(app) = self.app() {
            app.engine.clear_prompt_cache();
        }
        left.map_err(|error| ApiError::failed(&error))
    }

    /// A seat for a request that names this model. A name that is not listed means the model that is loaded.
    pub async fn seat(&self, asked: Option<&str>) -> Result<Seat, ApiError> {
        let last = self.now.lock().last.clone();
        let named = match (asked, last) {
            (Some(asked), Some(last)) if means(asked, &last) => Some(last),
            (Some(asked), _) => find(asked, &self.listed().await),
            (None, _) => None,
        };
        let mut now = self.now.lock();
        if now.closing {
            return Err(ApiError::from(EngineError::Draining));
        }
        let Some(last) = now.coming.as_ref().or(now.last.as_ref()) else { return Err(ApiError::loading()) };
        let id = named.unwrap_or_else(|| last.clone());
        if let Some(app) = now.admit(&id, self.times().patience) {
            return Ok(Seat::Here(app));
        }
        if now.waiting.len() > self.most {
            return Err(ApiError::from(EngineError::QueueFull));
        }
        let (reply, seat) = oneshot::channel();
        now.waiting.push_back(Ticket { id, since: Instant::now(), reply });
        drop(now);
        self.changed.notify_one();
        Ok(Seat::Later(seat))
    }

    /// Lets go of the model as soon as nobody is being answered, if it is this one.
    pub fn stop(&self, id: &str) -> bool {
        let mut now = self.now.lock();
        let Some(on) = now.on.as_mut().filter(|on| means(id, &on.id)) else { return false };
        on.going = true;
        drop(now);
        self.changed.notify_one();
        true
    }

    /// Nobody is let in any more; who was, is answered within the engine's grace.
    pub fn close(&self) {
        let mut now = self.now.lock();
        now.closing = true;
        for ticket in now.waiting.drain(..) {
            let _ = ticket.reply.send(Err(ApiError::from(EngineError::Draining)));
        }
        if let Some(on) = &now.on {
            on.app.engine.drain();
        }
    }

    pub fn is_idle(&self) -> bool {
        let now = self.now.lock();
        now.waiting.is_empty() && now.on.as_ref().is_none_or(|on| on.app.engine.load() == (0, 0))
    }

    /// Lets go of the model and waits until its memory is given back.
    pub fn leave(&self) -> impl Future<Output = ()> + use<> {
        let on = self.now.lock().on.take();
        async move {
            if let Some(on) = on {
                let _ = spawn_blocking(move || on.leave()).await;
            }
        }
    }

    /// Loads what is waited for and lets go of what nobody wants, for ever.
    pub async fn run(&self) {
        loop {
            let (step, before) = {
                let mut now = self.now.lock();
                match (now.step(&self.times()), self.leaving.clone().try_lock_owned()) {
                    (Step::Wait(time), _) => (Step::Wait(time), None),
                    (_, Err(_)) => (Step::Wait(Some(LOOK[0])), None),
                    (step, Ok(held)) => {
                        if let Step::Load(id) = &step {
                            now.coming = Some(id.clone());
                        }
                        (step, now.on.take().map(|on| (on, held)))
                    }
                }
            };
            match step {
                Step::Wait(None) => self.changed.notified().await,
                Step::Wait(Some(time)) => {
                    let _ = tokio::time::timeout(time, self.changed.notified()).await;
                }
                Step::Unload => {
                    tracing::info!("the model gives its memory back");
                    let _ = spawn_blocking(move || before.map(|(on, _held)| on.leave())).await;
                }
                Step::Load(id) => self.load(before, id).await,
            }
        }
    }

    async fn load(&self, before: Option<(On, OwnedMutexGuard<()>)>, id: String) {
        let (wanted, loader) = (id.clone(), self.loader.clone());
        let loaded = spawn_blocking(move || {
            if let Some((before, held)) = before {
                before.leave();
                drop(held);
            }
            loader.map_or_else(|| Err("it was let go for good".into()), |loader| loader.load(&wanted))
        });
        let loaded = loaded.await.unwrap_or_else(|panic| Err(panic.to_string()));
        let mut now = self.now.lock();
        now.coming = None;
        match loaded {
            Ok(loaded) if now.closing => loaded.app.engine.drain(),
            Ok(loaded) => now.enter(loaded),
            Err(why) => {
                tracing::error!(model = id, why, "a model could not be loaded");
                now.refuse(&id, &why);
            }
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

    /// Counts its looks, which end when the other end of the channel is gone.
    struct Slow(Arc<AtomicUsize>, Mutex<mpsc::Receiver<()>>);

    impl Loader for Slow {
        fn list(&self) -> Vec<Listed> {
            self.0.fetch_add(1, Relaxed);
            let _ = self.1.lock().recv();
            Vec::new()
        }

        fn load(&self, _: &str) -> Result<Loaded, String> {
            Err("there is none".into())
        }
    }

    #[tokio::test]
    async fn models_are_looked_up_once_however_many_ask_and_whoever_leaves() {
        let (looks, (go, wait)) = (Arc::new(AtomicUsize::new(0)), mpsc::channel());
        let stage = Stage::new(Arc::new(Slow(looks.clone(), Mutex::new(wait))), Times::default(), 1);
        let gone = tokio::time::timeout(Duration::from_millis(5), stage.listed()).await;
        assert!(gone.is_err());
        tokio::join!(stage.listed(), stage.listed(), async { drop(go) });
        assert_eq!(looks.load(Relaxed), 1);
    }
}
