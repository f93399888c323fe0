//! Jobs that read and write, done by a few threads; compute has [`super::Threads`].

use parking_lot::Mutex;
use std::thread;

/// Does `work(job, room)` for all `jobs`, by up to `threads` threads called `name`, each with a room of its own that `room`
/// makes. Returns what came of them, in their order. The first error ends it: what has not begun is left out.
pub fn each<J, R, T, E>(
    name: &str,
    threads: usize,
    jobs: Vec<J>,
    room: impl Fn() -> Result<R, E> + Sync,
    work: impl Fn(J, &mut R) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E>
where
    J: Send,
    T: Send,
    E: Send,
{
    let more = threads.min(jobs.len()).saturating_sub(1);
    let done = Mutex::new(Ok(Vec::with_capacity(jobs.len())));
    let left = Mutex::new(jobs.into_iter().enumerate());
    let next = || if done.lock().is_ok() { left.lock().next() } else { None };
    let serve = || {
        let served = room().and_then(|mut room| {
            while let Some((number, job)) = next() {
                let result = work(job, &mut room)?;
                if let Ok(done) = &mut *done.lock() {
                    done.push((number, result));
                }
            }
            Ok(())
        });
        if let Err(error) = served {
            let mut done = done.lock();
            // The first error is the cause of any other.
            if done.is_ok() {
                *done = Err(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..more {
            // Without another thread, those that are there do it all.
            let _ = thread::Builder::new().name(name.into()).spawn_scoped(scope, serve);
        }
        serve();
    });
    let mut done = done.into_inner()?;
    done.sort_unstable_by_key(|(number, _)| *number);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn results_are_in_the_order_of_the_jobs() {
        for threads in [0, 1, 2, 7] {
            let squares = each("squares", threads, (0..1000).collect(), || Ok::<_, ()>(0), |job: u64, _| Ok(job * job));
            assert_eq!(squares.unwrap(), (0..1000).map(|job| job * job).collect::<Vec<_>>());
        }
        assert_eq!(each("none", 3, Vec::<u64>::new(), || Ok::<_, ()>(()), |job, ()| Ok(job)), Ok(vec![]));
    }

    #[test]
    fn each_thread_has_one_room() {
        let rooms = AtomicUsize::new(0);
        let room = || Ok::<_, ()>(rooms.fetch_add(1, Ordering::Relaxed));
        let used = each("rooms", 3, vec![(); 500], room, |(), room| Ok(*room)).unwrap();
        assert!(rooms.into_inner() <= 3 && used.iter().all(|room| *room < 3));
    }

    #[test]
    fn the_first_error_ends_it() {
        let begun = AtomicUsize::new(0);
        let all = |bad: usize| {
            each(
                "jobs",
                3,
                (0..1000).collect(),
                || Ok(()),
                |job: usize, ()| {
                    begun.fetch_add(1, Ordering::Relaxed);
                    if job == bad { Err(job) } else { Ok(()) }
                },
            )
        };
        assert_eq!(all(3).unwrap_err(), 3);
        assert!(begun.swap(0, Ordering::Relaxed) < 1000);
        all(2000).unwrap();
        assert_eq!(begun.into_inner(), 1000);
        assert_eq!(each("no room", 3, vec![1, 2], || Err::<(), _>("none"), |job, ()| Ok(job)), Err("none"));
    }
}
