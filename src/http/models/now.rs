//! The model in memory and who waits: the next step follows from these and the clock.

use super::{Loaded, Times};
use crate::http::{App, api_error::ApiError};
use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// The time between two looks at a busy model, while somebody waits for another one, and while nobody does.
pub const LOOK: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];

#[derive(Default)]
pub struct Now {
    pub on: Option<On>,
    /// The model that is being loaded.
    pub coming: Option<String>,
    /// The model that was loaded last, which any unknown name means.
    pub last: Option<String>,
    pub waiting: VecDeque<Ticket>,
    pub closing: bool,
}

pub struct On {
    pub id: String,
    pub app: Arc<App>,
    unload: Box<dyn FnOnce() + Send>,
    /// When it was last seen to be busy.
    used: Instant,
    /// It is to go as soon as it is not.
    pub going: bool,
    /// When it was last looked at, and for how long it was found to wait for clients that do not read.
    looked: Instant,
    lag: Duration,
}

pub struct Ticket {
    pub id: String,
    pub since: Instant,
    pub reply: oneshot::Sender<Result<Arc<App>, ApiError>>,
}

/// The next step of [`super::Stage::run`].
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Let go of what is loaded, if anything is, and load this.
    Load(String),
    Unload,
    /// Look again when something changes, or after this time.
    Wait(Option<Duration>),
}

impl On {
    /// Waits until nobody holds the model, and frees it. Blocks.
    pub fn leave(self) {
        let Self { app, unload, .. } = self;
        drop(app);
        unload();
    }

    /// True if somebody is answered, or will ask for the next of several answers. For that a model waits no longer than `patience`
    /// in all: a client that hardly reads would keep everybody else from theirs.
    fn is_busy(&mut self, patience: Duration) -> bool {
        let since = mem::replace(&mut self.looked, Instant::now());
        if Arc::strong_count(&self.app) > 1 || self.app.engine.load() != (0, 0) {
            return true;
        }
        if Arc::weak_count(&self.app) == 0 {
            self.lag = Duration::ZERO;
            return false;
        }
        self.lag += since.elapsed().min(LOOK[1]);
        self.lag < patience
    }
}

impl Now {
    pub fn enter(&mut self, loaded: Loaded) {
        let Loaded { id, app, unload } = loaded;
        let on = On {
            id: id.clone(),
            app: Arc::new(app),
            unload,
            used: Instant::now(),
            going: false,
            looked: Instant::now(),
            lag: Duration::ZERO,
        };
        let (here, others) = self.waiting.drain(..).partition(|ticket: &Ticket| ticket.id == id);
        self.waiting = others;
        for ticket in here {
            let _ = ticket.reply.send(Ok(on.app.clone()));
        }
        self.last = Some(id);
        self.on = Some(on);
    }

    pub fn refuse(&mut self, id: &str, why: &str) {
        let (failed, others) = self.waiting.drain(..).partition(|ticket: &Ticket| ticket.id == id);
        self.waiting = others;
        for ticket in failed {
            let _ = ticket.reply.send(Err(ApiError::not_loaded(id, why)));
        }
    }

    /// The loaded model, if it is this one and nobody has waited too long for another one.
    pub fn admit(&mut self, id: &str, patience: Duration) -> Option<Arc<App>> {
        self.sweep();
        let overdue = self.waiting.front().is_some_and(|ticket| ticket.since.elapsed() >= patience);
        let on = self.on.as_mut().filter(|on| on.id == id && !on.going && !overdue)?;
        on.used = Instant::now();
        Some(on.app.clone())
    }

    /// Forgets those who have left.
    fn sweep(&mut self) {
        self.waiting.retain(|ticket| !ticket.reply.is_closed());
    }

    pub fn step(&mut self, times: &Times) -> Step {
        self.sweep();
        let next = self.waiting.front();
        if self.closing {
            return Step::Wait(None);
        }
        let Some(on) = &mut self.on else {
            return next.map_or(Step::Wait(None), |ticket| Step::Load(ticket.id.clone()));
        };
        if on.is_busy(times.patience) {
            on.used = Instant::now();
            let look = if next.is_some() || on.going { Some(LOOK[0]) } else { times.keep_alive.map(|_| LOOK[1]) };
            return Step::Wait(look);
        }
        if on.going {
            return Step::Unload;
        }
        let idle = on.used.elapsed();
        match (next, times.keep_alive) {
            (Some(ticket), _) if idle >= times.linger || ticket.since.elapsed() >= times.patience => {
                Step::Load(ticket.id.clone())
            }
            (Some(_), _) => Step::Wait(Some(LOOK[0])),
            (None, Some(time)) if idle >= time => Step::Unload,
            (None, Some(time)) => Step::Wait(Some(time - idle)),
            (None, None) => Step::Wait(None),
        }
    }
}
