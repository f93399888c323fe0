//! The compute threads: a fixed crew that runs one parallel job at a time.

/// A crew of compute threads, of which the caller is one.
pub struct Threads {
    count: usize,
}

impl Threads {
    pub fn new(count: usize) -> Self {
        Self { count: count.max(1) }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Calls `job(i)` for every `i` in `0..tasks`, each exactly once, on some thread; returns when all are done.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let work = || loop {
            let task = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            job(task);
        };
        std::thread::scope(|scope| {
            for _ in 1..self.count.min(tasks) {
                scope.spawn(work);
            }
            work();
        });
    }
}
