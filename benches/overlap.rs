//! Overlap of reads and computation in a streamed prompt. Clocks simulate disk and CPU, so the load of the machine does
//! not matter.
//!
//! ```text
//! cargo bench --bench overlap [-- RESIDENCY [PROMPTS [TOKENS]]]
//! ```
//! The model has 16 layers of 256 experts and slots for RESIDENCY percent (25) of them. A prompt of TOKENS (256) needs
//! half of the experts of every layer, longer prompts need more, and some experts are much more frequent. The disk
//! delivers an expert every 2.1 ms. With 256 tokens, a mixer takes 230 ms and an expert 3 ms. That is five times as
//! long as a 35B model takes on two cores with an SSD of 4.2 GB/s. CPU times grow with the number of tokens, not with
//! the number of experts. For each prompt, prints its seconds, the seconds of the disk alone and of the CPU alone, and
//! the larger of these two divided by the prompt's seconds. The first prompt starts with empty slots.

use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::{CpuTimeline, SyncPoint},
    experts::{ExpertChoice, ExpertMap, ExpertSource, ExpertStore, Options, PIECES, PassSize, Piece, Prefetch},
};
use std::{
    collections::HashSet,
    io,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

const LAYERS: usize = 16;
const EXPERTS: usize = 256;
const BYTES: usize = 4096;
const READ: Duration = Duration::from_micros(2100);
const EXPERT: Duration = Duration::from_micros(3000);
const MIXER: Duration = Duration::from_millis(230);

/// Delivers one expert every [`READ`].
struct SimulatedDisk(Mutex<Instant>);

impl ExpertSource for SimulatedDisk {
    fn read(&self, _: u32, _: u64, into: &mut [u8]) -> io::Result<usize> {
        let due = {
            let mut free = self.0.lock().map_err(|_| io::ErrorKind::Other)?;
            *free = (*free).max(Instant::now()) + READ;
            *free
        };
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        Ok(into.len())
    }

    fn size(&self, _: u32) -> Option<u64> {
        Some((LAYERS * EXPERTS * BYTES) as u64)
    }

    fn path(&self, _: u32) -> PathBuf {
        "simulated".into()
    }

    fn block(&self) -> usize {
        1
    }
}

fn map() -> ExpertMap {
    let expert = |nth: usize| {
        let mut pieces = [Piece::default(); PIECES];
        pieces[0] = Piece { file: 0, offset: (nth * BYTES) as u64, len: BYTES };
        pieces
    };
    let layer = |layer: usize| (0..EXPERTS).map(|e| expert(layer * EXPERTS + e)).collect();
    ExpertMap { layers: (0..LAYERS).map(layer).collect() }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    /// Eight experts for each of `rows` rows. Lower numbers are more frequent, with a different offset in each layer.
    fn rows(&mut self, layer: usize, rows: usize) -> Vec<u32> {
        let mut draw = || (self.below(EXPERTS) * self.below(EXPERTS) / EXPERTS + layer * 37) % EXPERTS;
        (0..rows * 8).map(|_| draw() as u32).collect()
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let number = |at: usize, default: usize| args.get(at).map_or(default, |text| text.parse().expect("a number"));
    let (slots, prompts, tokens) = (LAYERS * EXPERTS * number(0, 25) / 100, number(1, 3), number(2, 256));
    let scaled = |time: Duration| time.mul_f64(tokens as f64 / 256.0);
    println!("prefetch,prompt,seconds,disk_alone,processor_alone,overlap,hits,misses,read_ahead");
    for prefetch in [Prefetch::Off, Prefetch::On] {
        let metrics = Metrics::new("bench", "cpu");
        let options = Options { prefetch, ..Options::new(slots) };
        let source = Box::new(SimulatedDisk(Mutex::new(Instant::now())));
        let experts = ExpertStore::with_source(source, map(), options, metrics.clone()).expect("slots");
        let mut random = Random(7);
        for prompt in 0..prompts {
            let counts = || {
                let (hits, misses) = (metrics.lookups_prefill_hit.get(), metrics.lookups_prefill_miss.get());
                [hits, misses, metrics.lookups_prefill_prefetched.get(), metrics.ssd_reads.get()]
            };
            let asked: Vec<Vec<u32>> = (0..LAYERS).map(|layer| random.rows(layer, tokens / 4)).collect();
            let (before, begin, mut computing) = (counts(), Instant::now(), Duration::ZERO);
            let mut compute = |time: Duration| {
                std::thread::sleep(time);
                computing += time;
            };
            for (layer, ids) in asked.iter().enumerate() {
                compute(scaled(MIXER));
                let different = ids.iter().collect::<HashSet<_>>().len();
                let choice = ExpertChoice { ids, k: 8, logits: &[] };
                let mut taken = experts.fetch(layer, &choice, PassSize::Large, &mut CpuTimeline).expect("experts");
                if let Some(next) = asked.get(layer + 1) {
                    // Nine of ten predictions are right.
                    let wrong =
                        |(place, id): (usize, &u32)| if place % 10 == 0 { (id * 7 + 1) % EXPERTS as u32 } else { *id };
                    let guess: Vec<u32> = next.iter().enumerate().map(wrong).collect();
                    experts.prefetch(layer + 1, &guess, PassSize::Large);
                }
                while let Some(batch) = taken.next(&mut CpuTimeline).expect("reads") {
                    compute(scaled(EXPERT * (EXPERTS / 2 * batch.len()) as u32) / different as u32);
                    batch.release_after(SyncPoint::START);
                }
            }
            let seconds = begin.elapsed().as_secs_f64();
            let [hits, misses, ahead, reads] = std::array::from_fn(|i| counts()[i] - before[i]);
            let (disk, processor) = (READ.as_secs_f64() * reads as f64, computing.as_secs_f64());
            let overlap = disk.max(processor) / seconds;
            println!(
                "{prefetch:?},{prompt},{seconds:.2},{disk:.2},{processor:.2},{overlap:.3},{hits},{misses},{ahead}"
            );
        }
    }
}
