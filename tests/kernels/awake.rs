//! Tests that an idle GPU executes small launches while experts are read, so that its clock stays high.

use crate::{
    double::{Double, Shared},
    host::Host,
};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CommandQueue,
    experts::{ExpertChoice, ExpertMap, ExpertSource, ExpertStore, Options, PIECES, PassSize, Piece},
    ops::{Backend, GpuBackend},
};
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

const READ_TIME: Duration = Duration::from_millis(40);

/// Limit that turns a hang into a failure.
const LIMIT: Duration = Duration::from_secs(60);

/// A disk that takes [`READ_TIME`] for each expert, or until the GPU executes a launch if the test expects one.
struct SlowSource {
    control: Shared,
    expects_launch: Arc<AtomicBool>,
}

impl ExpertSource for SlowSource {
    fn read(&self, _: u32, _: u64, into: &mut [u8]) -> io::Result<usize> {
        let (begin, before) = (Instant::now(), commits(&self.control));
        sleep(READ_TIME);
        while self.expects_launch.load(Ordering::Relaxed) && commits(&self.control) == before && begin.elapsed() < LIMIT
        {
            sleep(Duration::from_millis(1));
        }
        into.fill(1);
        Ok(into.len())
    }

    fn size(&self, _: u32) -> Option<u64> {
        Some(1 << 20)
    }

    fn path(&self, _: u32) -> PathBuf {
        "slow".into()
    }

    fn block(&self) -> usize {
        1
    }
}

/// Number of command buffers committed so far.
fn commits(control: &Shared) -> usize {
    control.lock().unwrap().calls.get("commit").copied().unwrap_or(0)
}

#[test]
fn gpu_stays_awake_only_during_reads() {
    let double = Double::new(Host::fast());
    let control = double.control();
    let mut backend = GpuBackend::new(CommandQueue::new(double));
    let expects_launch = Arc::new(AtomicBool::new(false));
    let source = SlowSource { control: control.clone(), expects_launch: expects_launch.clone() };
    let expert = |index: u64| {
        std::array::from_fn::<_, PIECES, _>(|part| match part {
            0 => Piece { file: 0, offset: index * 4096, len: 64 },
            _ => Piece::default(),
        })
    };
    let map = ExpertMap { layers: vec![(0..4).map(expert).collect()] };
    let store = ExpertStore::with_source(Box::new(source), map, Options::new(4), Metrics::new("0", "cpu")).unwrap();
    let launches_while_fetching = |id: u32, backend: &mut GpuBackend<Double>| {
        let before = commits(&control);
        let choice = ExpertChoice { ids: &[id], k: 1, logits: &[] };
        let mut fetch = store.fetch(0, &choice, PassSize::Small, backend).unwrap();
        while fetch.next(backend).unwrap().is_some() {}
        commits(&control) - before
    };
    assert_eq!(launches_while_fetching(0, &mut backend), 0, "off by default");
    backend.keep_gpu_awake().unwrap();
    expects_launch.store(true, Ordering::Relaxed);
    assert!(launches_while_fetching(1, &mut backend) > 0, "a read is waited for");
    assert_eq!(launches_while_fetching(1, &mut backend), 0, "a hit waits for no read");
    let after = commits(&control);
    sleep(READ_TIME);
    assert_eq!(commits(&control), after, "nothing after the end of a read");
}
