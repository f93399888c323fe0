//! Tests the scores and the selection of an indexer with many blocks, in the order of operations of the CPU.

use crate::{check::Dice, host::Host};
use moestro_compute::device::{Binding, Launch, SkipUse};

const PAGE: usize = 256;

/// The sizes of one launch, for rows that begin at position `start`.
struct Selection {
    start: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    ratio: usize,
    blocks: usize,
}

impl Selection {
    /// Number of scores of a row.
    fn stride(&self) -> usize {
        self.closed(self.tokens - 1)
    }

    /// Number of closed blocks of a row.
    fn closed(&self, row: usize) -> usize {
        (self.start + row + 1) / self.ratio
    }

    fn launch(&self, kernel: &'static str, bindings: Vec<Binding>, grid: [usize; 2], threads: u32) -> Launch {
        let words = [self.start, self.heads, self.dim, 0, self.ratio, self.blocks, 0, self.stride()];
        let mut args: Vec<u32> = words.iter().map(|word| *word as u32).collect();
        // Only the scale of scores is used besides these.
        args.extend([0, 0.5f32.to_bits(), 0, 0, 0, 0, 0, 0, 0, 0]);
        let grid = [grid[0] as u32, grid[1] as u32, 1];
        Launch { kernel, args, bindings, grid, threads, skip: SkipUse::None }
    }
}

/// The score of a block: lane `k % 16` adds value `k`.
fn score(queries: &[f32], key: &[f32]) -> f32 {
    let product = |query: &[f32]| {
        let mut l = [0f32; 16];
        key.iter().zip(query).enumerate().for_each(|(k, (x, y))| l[k % 16] = x.mul_add(*y, l[k % 16]));
        let s: [f32; 8] = std::array::from_fn(|i| l[i] + l[i + 8]);
        (((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))).max(0.0)
    };
    queries.chunks(key.len()).fold(0.0, |sum, query| sum + product(query)) * 0.5
}

#[test]
fn scores_have_the_order_of_the_cpu() {
    let mut random = Dice(1);
    let shapes = [(1, 4, 3, 40), (4, 128, 4, 70), (5, 20, 8, 33), (3, 256, 1, 1), (9, 132, 2, 9), (2, 64, 300, 2)];
    for (heads, dim, ratio, tokens) in shapes {
        let selection = Selection { start: 170 * ratio, tokens, heads, dim, ratio, blocks: 3 + random.below(160) };
        let stride = selection.stride();
        let per_page = PAGE.div_ceil(ratio);
        let pages = (selection.start + tokens).div_ceil(PAGE);
        let table: Vec<u32> = (0..pages as u32).rev().collect();
        let queries = random.normals(tokens * heads * dim);
        let keys = random.normals(pages * per_page * dim);
        let key = |block: usize| {
            let last = (block + 1) * ratio - 1;
            let row = table[last / PAGE] as usize * per_page + last % PAGE / ratio;
            &keys[row * dim..][..dim]
        };
        let mut host = Host::start();
        let scores = host.empty(tokens * stride * 4);
        let table_at = host.words(&table);
        let bindings = vec![
            Binding::read(host.floats(&queries)),
            Binding::read(host.floats(&keys)),
            Binding::read(table_at),
            Binding::write(scores),
            Binding::read(table_at),
        ];
        host.run(&selection.launch("index_scores", bindings, [stride.div_ceil(128), tokens], 128));
        let found = host.read_floats(scores);
        for row in 0..tokens {
            let queries = &queries[row * heads * dim..][..heads * dim];
            let closed = selection.closed(row);
            if closed <= selection.blocks {
                continue;
            }
            let expected: Vec<f32> = (0..closed).map(|block| score(queries, key(block))).collect();
            assert_eq!(found[row * stride..][..closed], expected, "row {row}, {heads} heads of {dim}");
        }
    }
}

#[test]
fn select_takes_highest_and_lowest_indices() {
    let mut random = Dice(2);
    let mut host = Host::start();
    // More than 8,192 scores do not fit into the registers of the threads.
    for (case, (closed, blocks)) in
        [(2, 1), (600, 512), (600, 599), (513, 512), (8192, 512), (8193, 512), (9000, 8500), (20_000, 700), (16_384, 1)]
            .into_iter()
            .enumerate()
    {
        for kind in 0..5 {
            let mut value = || match kind {
                0 => random.normal().abs(),
                // Many equal scores.
                1 => random.below(3) as f32,
                2 => [0.0, f32::MIN_POSITIVE / 8.0, 1.0, f32::INFINITY][random.below(4)],
                3 => 7.0,
                // Few scores are not 0.
                _ => {
                    if random.below(50) == 0 {
                        1.0 + random.normal().abs()
                    } else {
                        0.0
                    }
                }
            };
            let selection = Selection { start: closed - 1, tokens: 1, heads: 1, dim: 4, ratio: 1, blocks };
            let scores: Vec<f32> = (0..closed).map(|_| value()).collect();
            let [from, to] = [host.floats(&scores), host.empty(blocks * 4)];
            let bindings = vec![Binding::read(from), Binding::write(to), Binding::read(from)];
            host.run(&selection.launch("index_select", bindings, [1, 1], 512));
            let mut expected: Vec<u32> = (0..closed as u32).collect();
            expected.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
            expected.truncate(blocks);
            expected.sort_unstable();
            assert!(host.read_words(to) == expected, "case {case}, scores of kind {kind}");
        }
    }
}
