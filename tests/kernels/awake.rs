//! Tests that an idle GPU executes small launches while experts are read, so that its clock stays high.

use crate::{double::Double, host::Host};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::{CommandQueue, Gpu},
    experts::{ExpertChoice, ExpertMap, ExpertSource, ExpertStore, Options, PIECES, PassKind, Piece},
    ops::{Backend, GpuBackend},
};
use std::{io, path::PathBuf, thread::sleep, time::Duration};

const READ_TIME: Duration = Duration::from_millis(40);

/// A disk that takes [`READ_TIME`] for each expert.
struct SlowSource;

impl ExpertSource for SlowSource {
    fn read(&self, _: u32, _: u64, into: &mut [u8]) -> io::Result<usize> {
        sleep(READ_TIME);
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

#[test]
fn gpu_stays_awake_only_during_reads() {
    let double = Double::new(Host::fast());
    let control = double.control();
    let mut backend = GpuBackend::new(Box::new(CommandQueue::new(double)) as Box<dyn Gpu>);
    let commits = || control.lock().unwrap().calls.get("commit").copied().unwrap_or(0);
    let expert = |index: u64| {
        std::array::from_fn::<_, PIECES, _>(|part| match part {
            0 => Piece { file: 0, offset: index * 4096, len: 64 },
            _ => Piece::default(),
        })
    };
    let map = ExpertMap { layers: vec![(0..4).map(expert).collect()] };
    let store = ExpertStore::with_source(Box::new(SlowSource), map, Options::new(4), Metrics::new("0", "cpu")).unwrap();
    let launches_while_fetching = |id: u32, backend: &mut GpuBackend<Box<dyn Gpu>>| {
        let before = commits();
        let choice = ExpertChoice { ids: &[id], k: 1, logits: &[] };
        let mut fetch = store.fetch(0, &choice, PassKind::Decode, backend).unwrap();
        while fetch.next(backend).unwrap().is_some() {}
        commits() - before
    };
    assert_eq!(launches_while_fetching(0, &mut backend), 0, "off by default");
    backend.keep_gpu_awake().unwrap();
    assert!(launches_while_fetching(1, &mut backend) > 0, "a read is waited for");
    assert_eq!(launches_while_fetching(1, &mut backend), 0, "a hit waits for no read");
    let after = commits();
    sleep(READ_TIME);
    assert_eq!(commits(), after, "nothing after the end of a read");
}
