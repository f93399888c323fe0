//! [`ResidencySets`]: the residency sets of a device, which keep buffers resident in memory between command buffers.

use super::set_assignment::SetAssignment;
use parking_lot::Mutex;
use std::sync::Arc;

/// A residency set of a driver. A clone is a second reference to the same set.
pub trait ResidencySet: Clone + Send {
    type Buffer;

    fn insert(&self, buffer: &Self::Buffer);

    fn remove(&self, buffer: &Self::Buffer);

    /// Makes the buffers resident again. May take long for many buffers.
    fn request_residency(&self);
}

/// The residency sets of a device and the buffers in them.
pub struct ResidencySets<S> {
    assignment: SetAssignment,
    /// The sets are in a mutex, since the residency thread requests residency while the engine's thread adds buffers.
    sets: Arc<Mutex<Vec<S>>>,
}

impl<S: ResidencySet> ResidencySets<S> {
    /// `working_set` is the maximum number of bytes that the device recommends to use.
    pub fn new(working_set: u64) -> Self {
        Self { assignment: SetAssignment::new(working_set), sets: Arc::default() }
    }

    /// Adds a buffer of `bytes` bytes to a set. `create_set` creates a set, which the driver may refuse. Returns the
    /// number of the set. `None` if there is no set: every command buffer must then make the buffer resident.
    pub fn add(&mut self, buffer: &S::Buffer, bytes: u64, create_set: impl FnOnce() -> Option<S>) -> Option<usize> {
        let mut created = None;
        let set = self.assignment.add(bytes, || {
            created = create_set();
            created.is_some()
        })?;
        let mut sets = self.sets.lock();
        sets.extend(created);
        sets.get(set)?.insert(buffer);
        Some(set)
    }

    pub fn remove(&mut self, set: usize, buffer: &S::Buffer, bytes: u64) {
        self.assignment.remove(set, bytes);
        if let Some(set) = self.sets.lock().get(set) {
            set.remove(buffer);
        }
    }

    /// All sets.
    pub fn sets(&self) -> Vec<S> {
        self.sets.lock().clone()
    }

    /// A function that renews the residency of all sets. A request can take seconds, so it holds no lock that
    /// [`ResidencySets::add`] needs.
    pub fn request(&self) -> impl Fn() + Send + use<S> {
        let sets = self.sets.clone();
        move || {
            let sets = sets.lock().clone();
            sets.iter().for_each(S::request_residency);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A set whose requests wait for a message.
    #[derive(Clone)]
    struct SlowSet {
        buffers: Arc<Mutex<Vec<u32>>>,
        wait: Arc<Mutex<mpsc::Receiver<()>>>,
        requests: mpsc::Sender<()>,
    }

    impl ResidencySet for SlowSet {
        type Buffer = u32;

        fn insert(&self, buffer: &u32) {
            self.buffers.lock().push(*buffer);
        }

        fn remove(&self, buffer: &u32) {
            self.buffers.lock().retain(|other| other != buffer);
        }

        fn request_residency(&self) {
            self.requests.send(()).unwrap();
            let _ = self.wait.lock().recv();
        }
    }

    #[test]
    fn buffers_are_added_during_a_request() {
        let (end, wait) = mpsc::channel();
        let (requests, requested) = mpsc::channel();
        let buffers = Arc::default();
        let set = SlowSet { buffers: Arc::clone(&buffers), wait: Arc::new(Mutex::new(wait)), requests };
        let mut sets = ResidencySets::new(1 << 20);
        assert_eq!(sets.add(&7, 1, || None), None);
        assert_eq!(sets.add(&8, 1, || Some(set)), Some(0));
        let request = sets.request();
        std::thread::scope(|scope| {
            scope.spawn(request);
            requested.recv().unwrap();
            assert_eq!(sets.add(&9, 1, || None), Some(0));
            sets.remove(0, &8, 1);
            assert_eq!(*buffers.lock(), [9]);
            end.send(()).unwrap();
        });
    }
}
