//! Counts the launches, command buffers and waits of one decoded token of the demo.

use crate::{
    forward::{DEMO, options},
    gpu::HostGpu,
    host::Host,
    queue,
};
use moestro_compute::device::{DeviceError, Gpu, Launch, Region, Slab, SyncPoint, Timeline};
use moestro_model::model::{Model, Rows};
use moestro_model::plan::Parallel;
use std::{
    ops::Range,
    path::Path,
    sync::{Arc, Mutex},
};

/// Counts since the last reset.
#[derive(Default)]
struct Count {
    launches: usize,
    command_buffers: usize,
    waits: usize,
    /// Memory barriers that a queue with overlapping launches would need.
    barriers: usize,
    passed: SyncPoint,
    /// Launches since the last barrier.
    open: Vec<Launch>,
    encoded: bool,
}

impl Count {
    fn hand_over(&mut self) {
        self.command_buffers += usize::from(std::mem::take(&mut self.encoded));
        self.open.clear();
    }
}

struct Counting(HostGpu, Arc<Mutex<Count>>);

impl Gpu for Counting {
    fn name(&self) -> String {
        "counting".into()
    }

    fn working_set(&self) -> Option<u64> {
        None
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        Vec::new()
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        self.0.allocate(bytes)
    }

    fn release(&mut self, buffer: u32) {
        self.0.release(buffer);
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        self.0.adopt(slab, range)
    }

    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
        self.0.address(buffer)
    }

    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        self.0.max_threads(kernel)
    }

    fn has_own_memory(&self) -> bool {
        self.0.has_own_memory()
    }

    fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
        self.0.upload(region)
    }

    fn max_buffer_len(&self) -> usize {
        self.0.max_buffer_len()
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.0.write(region, bytes)
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read(region, bytes)
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        let count = &mut *self.1.lock().unwrap();
        (count.launches, count.encoded) = (count.launches + 1, true);
        if count.open.iter().any(|earlier| launch.conflicts_with(earlier)) {
            count.barriers += 1;
            count.open.clear();
        }
        count.open.push(launch.clone());
        self.0.launch(launch)
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        self.1.lock().unwrap().hand_over();
        self.0.commit()
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        let point = self.sync_point();
        self.wait_for(point)
    }
}

impl Timeline for Counting {
    fn sync_point(&mut self) -> SyncPoint {
        self.0.sync_point()
    }

    fn completed(&mut self) -> SyncPoint {
        self.0.completed()
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        let count = &mut *self.1.lock().unwrap();
        // A wait for a point that is already completed costs no time.
        count.waits += usize::from(point > count.passed);
        count.passed = count.passed.max(point);
        count.hand_over();
        self.0.wait_for(point)
    }
}

#[test]
fn launches_ignore_the_number_of_sequences() {
    let counted = Arc::new(Mutex::new(Count::default()));
    let gpu = Counting(HostGpu::new(Host::fast()), counted.clone());
    let model = queue::load_changed(false, |options| options.plan.parallel = Parallel::Count(5));
    let mut model = queue::move_to(model, gpu);
    let mut states: Vec<_> = (0..5).map(|_| model.start().unwrap()).collect();
    let mut count = |sequences: usize| {
        let mut rows: Vec<_> = states.iter_mut().map(|state| (state, 5)).take(sequences).collect();
        std::mem::take(&mut *counted.lock().unwrap());
        model.forward_each(&mut rows).unwrap();
        let Count { launches, waits, barriers, .. } = &*counted.lock().unwrap();
        (*launches, *waits, *barriers)
    };
    let two = count(2);
    println!("{} launches, {} waits and {} barriers", two.0, two.1, two.2);
    assert_eq!(count(5), two);
}

#[test]
fn decode_launches_and_waits_are_bounded() {
    let mut table = String::from("experts,layers,launches,command_buffers,waits,barriers\n");
    for streaming in [false, true] {
        let counted = Arc::new(Mutex::new(Count::default()));
        let gpu = Box::new(Counting(HostGpu::new(Host::fast()), counted.clone()));
        let mut options = moestro_model::model::LoadOptions { gpu: Some(u64::MAX), ..options(streaming) };
        options.store.prefetch = moestro_compute::experts::Prefetch::Off;
        let model = crate::forward::common::load_with(Path::new(DEMO), options).move_to(gpu);
        let mut model = model.unwrap_or_else(|refused| panic!("{}", refused.error));
        let layers = model.config().layers;
        // In the second pass, every expert that the token uses has a slot.
        for _ in 0..2 {
            let mut state = model.start().unwrap();
            std::mem::take(&mut *counted.lock().unwrap());
            model.forward(&mut state, &[100], Rows::Last).unwrap();
        }
        let count = counted.lock().unwrap();
        let Count { launches, command_buffers, waits, barriers, .. } = &*count;
        assert!(*launches <= 12 * layers, "{launches} launches");
        // The last wait is for the logits.
        assert_eq!(*waits, if streaming { layers + 1 } else { 1 });
        assert!(*command_buffers <= 1 + 2 * layers, "{command_buffers} command buffers");
        let experts = if streaming { "streaming" } else { "resident" };
        table += &format!("{experts},{layers},{launches},{command_buffers},{waits},{barriers}\n");
    }
    println!("{table}");
    let kept = include_str!("../../benches/results/schedule.csv");
    assert_eq!(kept.replace('\r', ""), table, "benches/results/schedule.csv is out of date");
}
