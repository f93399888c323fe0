//! Runs the demo checkpoint (`models/demo`) with every operation on the kernels. The greedy tokens must equal the
//! tokens on the CPU, resident or streaming, for any split of the prompt. Also checks the number of expert reads of a
//! streaming prompt.

#[path = "../common/mod.rs"]
pub mod common;

use crate::{
    card::max_log_prob_difference,
    gpu::HostGpu,
    host::Host,
    queue::{move_to, place},
};
use common::{argmax, fixtures::Case, load_with};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CpuArithmetic,
    experts::{ExpertChoice, PassSize, Prefetch, ReadMode},
    ops::{KvBits, KvFormat},
};
use moestro_model::model::{KvPage, LoadOptions, Model, PAGE, Qwen, Rows, Snapshot, StoreOptions};
use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex},
};

pub use common::fixtures::DEMO;

pub fn options(streaming: bool) -> LoadOptions {
    let store = StoreOptions { io: ReadMode::Buffered, ..StoreOptions::default() };
    let mut options = LoadOptions { math: CpuArithmetic::F32, threads: Some(1), store, ..LoadOptions::default() };
    if streaming {
        // If expert reads go through the page cache, the plan has slots for the working sets of two tokens.
        options.plan.stream = Some(true);
        options.plan.buffered = true;
    }
    options
}

/// The demo, planned for a GPU and placed on `gpu`.
pub fn planned(options: LoadOptions, gpu: HostGpu) -> Qwen {
    let options = LoadOptions { gpu: Some(u64::MAX), ..options };
    move_to(load_with(Path::new(DEMO), options), gpu)
}

fn resident(gpu: HostGpu) -> Qwen {
    planned(options(false), gpu)
}

fn fast() -> HostGpu {
    HostGpu::new(Host::fast())
}

pub fn cases() -> Vec<Case> {
    common::fixtures::demo().0
}

/// Greedy ids, and the logits from which each id was chosen.
pub fn answer(model: &mut Qwen, prompt: &[u32], chunks: &[usize], count: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut state = model.start().unwrap();
    let mut rest = prompt;
    let mut row = Vec::new();
    for chunk in chunks.iter().copied().chain(std::iter::once(usize::MAX)) {
        let (now, later) = rest.split_at(chunk.min(rest.len()));
        if !now.is_empty() {
            row = model.forward(&mut state, now, Rows::Last).unwrap().data.to_vec();
        }
        rest = later;
    }
    let (mut ids, mut rows) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let id = argmax(&row);
        ids.push(id);
        rows.push(row);
        row = model.forward(&mut state, &[id], Rows::Last).unwrap().data.to_vec();
    }
    (ids, rows)
}

/// Checks every other prompt from `first` on, so that two test threads share the work.
fn demo_prompts_match_the_cpu(first: usize) {
    let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), options(false)), resident(fast()));
    let cases = cases();
    assert_eq!(cases.len(), 8);
    for case in cases.iter().skip(first).step_by(2) {
        let (expected, rows) = answer(&mut cpu, &case.prompt_ids, &[], case.greedy_ids.len());
        let (found, logits) = answer(&mut gpu, &case.prompt_ids, &[], case.greedy_ids.len());
        assert_eq!(found, expected, "{}", case.question);
        let mut worst = 0f32;
        for (found, expected) in logits.iter().zip(&rows) {
            // In this test, the CPU has f32 keys and values, and the kernels have 16 bits.
            worst = worst.max(max_log_prob_difference(found, expected));
        }
        println!("{}: log-probabilities off by {worst:.1e}", case.question);
        assert!(worst < 2e-3, "{}: log-probabilities off by {worst}", case.question);
    }
}

#[test]
#[ignore = "long: whole answers"]
fn demo_even_prompts_match_the_cpu() {
    demo_prompts_match_the_cpu(0);
}

#[test]
#[ignore = "long: whole answers"]
fn demo_odd_prompts_match_the_cpu() {
    demo_prompts_match_the_cpu(1);
}

#[test]
#[ignore = "long: whole answers"]
fn quantized_cache_equals_the_cpu_bytes() {
    let cases = cases();
    // The prompt is so long that the last rows read quantized keys and values.
    let ids: Vec<u32> = cases.iter().flat_map(|case| [&case.prompt_ids[..], &case.greedy_ids].concat()).collect();
    let ids = &ids[..ids.len().min(170)];
    assert!(ids.len() > 128);
    for kv_bits in [KvBits::Eight, KvBits::Four] {
        let options = || LoadOptions { kv_bits, ..options(false) };
        let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), options()), planned(options(), fast()));
        let [(expected, rows), (found, logits)] = [answer(&mut cpu, ids, &[], 2), answer(&mut gpu, ids, &[130], 2)];
        assert_eq!(found, expected, "{kv_bits:?}");
        for (found, expected) in logits.iter().zip(&rows) {
            let off = common::distance(found, expected);
            println!("{kv_bits:?}: off by {off:.1e}");
            // If a key or value is between two integers, the devices may round it differently.
            assert!(off < 2e-2, "{kv_bits:?}: logits off by {off}");
        }
    }
}

#[test]
fn sequence_continues_from_snapshot() {
    let case = cases().swap_remove(2);
    let mut gpu = resident(fast());
    let (expected, rows) = answer(&mut gpu, &case.prompt_ids, &[], 1);
    let mut state = gpu.start().unwrap();
    let marks = [5, case.prompt_ids.len() - 3];
    let (row, taken) = common::forward_with_snapshots(&mut gpu, &mut state, &case.prompt_ids, Rows::Last, &marks);
    assert_eq!(*row.data, rows[0]);
    let mut into = Some(state);
    for snapshot in taken {
        let mut state = gpu.restore(&snapshot, into.take()).unwrap();
        let row = gpu.forward(&mut state, &case.prompt_ids[snapshot.len..], Rows::Last).unwrap();
        assert_eq!((argmax(&row.data), &*row.data), (expected[0], &rows[0]), "from {}", snapshot.len);
    }
}

#[test]
fn shared_pages_are_not_written() {
    let mut gpu = place(fast(), false);
    let (size, pool, len) = (gpu.info().snapshot_size, gpu.info().pages.unwrap(), PAGE + 3);
    // All keys and values of the page are between 0 and 1.
    let dim = gpu.config().attention.dim;
    let page = |rows: usize| -> Vec<u8> {
        // The codes of a head's rows, then their scales.
        let head = |head: usize| {
            let integers = (head * rows * dim..(head + 1) * rows * dim).map(|n| (n * 37 % 101 * 323) as i16);
            integers.flat_map(i16::to_le_bytes).chain((1f32 / 32_639.0).to_le_bytes().repeat(rows))
        };
        (0..pool.page_bytes() as usize / PAGE / KvFormat::I16.row_bytes(dim)).flat_map(head).collect()
    };
    let pages = [PAGE, len - PAGE].map(|rows| Arc::new(page(rows).into())).to_vec();
    let made = Snapshot { len, pages, state: vec![0; size.state as usize].into() };
    let mut state = gpu.restore(&made, None).unwrap();
    let snapshot = gpu.snapshot(&mut state).unwrap();
    let free = pool.free();
    let mut other = gpu.restore(&snapshot, None).unwrap();
    assert_eq!(free - pool.free(), 1, "the whole page is shared");
    let mut row = |state: &mut _, id: u32| gpu.forward(state, &[id], Rows::Last).unwrap().data;
    // The sequences alternate. If they shared a page, each would see the writes of the other.
    let (first, second, third) = (row(&mut state, 5), row(&mut other, 90), row(&mut state, 33));
    let mut alone = Model::restore(&mut gpu, &made, None).unwrap();
    let mut row = |id: u32| gpu.forward(&mut alone, &[id], Rows::Last).unwrap().data;
    assert!(row(5) == first && row(33) == third && first != second);
    let same = |(held, made): (&Arc<KvPage>, &Arc<KvPage>)| gpu.read_page(held).unwrap() == made.copied().unwrap();
    assert!(snapshot.pages.iter().zip(&made.pages).all(same));
}

#[test]
#[ignore = "exhaustive: many cuts"]
fn logits_ignore_prompt_chunking() {
    let case = cases().swap_remove(3);
    let mut gpu = resident(fast());
    let expected = answer(&mut gpu, &case.prompt_ids, &[], 2);
    for chunks in [vec![1; case.prompt_ids.len()], vec![16, 5], vec![20]] {
        assert!(answer(&mut gpu, &case.prompt_ids, &chunks, 2) == expected, "chunks {chunks:?}");
    }
}

#[test]
#[ignore = "exhaustive: many numbers of slots"]
fn logits_ignore_expert_placement() {
    let case = cases().swap_remove(3);
    let (prompt, count) = (&case.prompt_ids, 6);
    let expected = answer(&mut resident(fast()), prompt, &[], count);
    // Reads go through the page cache, as on a GPU. The model has either as many slots as the plan allows, or only one
    // slot more than the four experts of a token and layer.
    for (slots, chunks) in [(None, vec![]), (None, vec![1; prompt.len()]), (Some(5), vec![]), (Some(5), vec![7])] {
        let mut options = options(true);
        options.store.slots = slots;
        if slots.is_none() {
            options.store.io = ReadMode::Auto;
        }
        let mut streaming = planned(options, fast());
        let store = streaming.store().unwrap();
        assert!(!store.is_resident() && store.slots() <= slots.unwrap_or(2 * 8 * 4), "{} slots", store.slots());
        let found = answer(&mut streaming, prompt, &chunks, count);
        assert!(found == expected, "{slots:?} slots, chunks {chunks:?}");
        assert_eq!(found.0, case.greedy_ids[..count]);
    }
}

#[test]
#[ignore = "long: compiles and runs with sanitizers"]
fn forward_pass_is_clean_under_sanitizers() {
    let mut model = resident(HostGpu::new(Host::sanitized()));
    // Run a chunk with grouped experts, a few rows together, and one token.
    answer(&mut model, &cases().swap_remove(1).prompt_ids, &[17], 1);
}

/// Evaluates 64 tokens in chunks of `chunk`, with eight slots for the 32 experts of a layer. Checks that each
/// expert is requested and read once per layer and chunk. Returns the number of reads.
fn read(chunk: usize) -> u64 {
    const LAYERS: usize = 8;
    let mut options = LoadOptions { gpu: Some(u64::MAX), ..options(true) };
    (options.plan.chunk, options.plan.context) = (Some(chunk), Some(1024));
    (options.store.slots, options.store.prefetch) = (Some(8), Prefetch::Off);
    let metrics = Metrics::new("test", "gpu");
    let qwen = Qwen::load(Path::new(DEMO), &options, &metrics, &mut |_, _| ()).unwrap();
    let mut model = move_to(qwen, fast());
    let prompt: Vec<u32> = cases().iter().flat_map(|case| case.prompt_ids.clone()).take(64).collect();
    let fetches = Arc::new(Mutex::new((Vec::new(), 0)));
    let log = fetches.clone();
    model.store().unwrap().observe(Box::new(move |layer: usize, choice: &ExpertChoice<'_>, _: PassSize| {
        let (layers, asked) = &mut *log.lock().unwrap();
        layers.push(layer);
        *asked += choice.ids.iter().collect::<BTreeSet<_>>().len() as u64;
    }));
    let mut state = model.start().unwrap();
    model.forward(&mut state, &prompt, Rows::None).unwrap();
    let (layers, asked) = fetches.lock().unwrap().clone();
    let chunks = prompt.len().div_ceil(chunk);
    assert_eq!(layers, (0..chunks).flat_map(|_| 0..LAYERS).collect::<Vec<_>>(), "once a layer and chunk");
    let (hits, misses) = (metrics.lookups_prefill_hit.get(), metrics.lookups_prefill_miss.get());
    assert_eq!(hits + misses, asked);
    assert_eq!(metrics.ssd_read_bytes.get(), misses * model.footprint().expert);
    assert!(misses > asked / 2, "with few slots most experts must be read: {misses} of {asked}");
    asked
}

#[test]
#[ignore = "long: a prompt of several chunks"]
fn chunk_reads_each_expert_once() {
    let whole = read(64);
    assert!(read(32) > whole, "two chunks must cost more reads");
}

#[test]
fn allocated_memory_matches_the_plan() {
    let gpu = fast();
    let count = gpu.count.clone();
    let mut options = options(true);
    // The plan reserves memory for partial results of attention at the longest context.
    options.plan.context = Some(moestro_model::model::Config::read(Path::new(DEMO)).unwrap().context);
    let mut model = planned(options, gpu);
    let _state = model.start().unwrap();
    let (plan, taken) = (model.plan(), count.lock().unwrap().allocated as u64);
    // A quarter of the prompt cache is for pages of keys and values.
    let planned = plan.kv + plan.prompt_cache / 4 + plan.state + plan.workspace;
    assert!(taken <= planned, "{taken} bytes, planned {planned}");
    assert!(taken > planned / 10 * 9, "{taken} bytes, planned {planned}: the rest would be slots");
}
