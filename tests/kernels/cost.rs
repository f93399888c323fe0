//! What a token costs in launches, command buffers and waits, counted from the plans of the real models.

use moestro::{
    device::Region,
    ops::{
        Codes, Float,
        plan::{
            Attend, Cost, Decay, Delta, Ffn, Layer, Matrix, Memory, Mixer, Mixture, Net, Piece, Residence, Scratch,
            Slots, Step, cost, layer, pass,
        },
    },
};

/// Dimensions of one of the published models (spec section 1).
struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    value_heads: usize,
    experts: usize,
    k: usize,
    inner: usize,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "35B-A3B", hidden: 2048, layers: 40, heads: 16, value_heads: 32, experts: 256, k: 8, inner: 512 },
    Shape { name: "122B-A10B", hidden: 3072, layers: 48, heads: 32, value_heads: 64, experts: 256, k: 8, inner: 1024 },
    Shape { name: "397B-A17B", hidden: 4096, layers: 60, heads: 32, value_heads: 64, experts: 512, k: 10, inner: 1024 },
];

/// A buffer of its own for everything: hazards between launches are then real ones only.
struct Buffers(u32);

impl Buffers {
    fn take(&mut self, len: usize) -> Region {
        self.0 += 1;
        Region { buffer: self.0, offset: 0, len }
    }

    fn matrix(&mut self, bits: u8, rows: usize, cols: usize) -> Matrix {
        let codes = Codes::Affine { bits, group: 64, scale: Float::Bf16 };
        let parts = codes.row_bytes(cols).map(|bytes| self.take(rows * bytes));
        Matrix { codes, rows, cols, gain: 1.0, parts }
    }
}

fn net(shape: &Shape, b: &mut Buffers) -> (Net, Vec<Memory>) {
    let Shape { hidden, inner, experts, .. } = *shape;
    let codes = Codes::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let delta = Delta { key_heads: 16, value_heads: shape.value_heads, dk: 128, dv: 128, eps: 1e-6 };
    let attend =
        Attend { heads: shape.heads, kv_heads: 2, dim: 256, rotary: 64, eps: 1e-6, context: 8192, half: false };
    let piece = |rows: usize, cols: usize| Piece { codes, rows, cols, gain: 1.0, at: [0; 3] };
    let (mut layers, mut memory) = (Vec::new(), Vec::new());
    for index in 0..shape.layers {
        let full = (index + 1) % 4 == 0;
        layers.push(Layer {
            norm: b.take(hidden * 4),
            mixer: if full {
                let project = [2 * attend.heads * 256, 512, 512].map(|rows| b.matrix(4, rows, hidden)).to_vec();
                let out = b.matrix(4, hidden, attend.heads * 256);
                Mixer::Attend { op: attend, project, q_norm: b.take(1024), k_norm: b.take(1024), out }
            } else {
                let rows = [delta.channels(), delta.values(), delta.value_heads, delta.value_heads];
                let project = rows.map(|rows| b.matrix(4, rows, hidden)).to_vec();
                let decay = Decay { rate: b.take(1024), dt_bias: b.take(1024) };
                let (taps, out) = (b.take(delta.channels() * 16), b.matrix(4, hidden, delta.values()));
                Mixer::Delta { op: delta, project, taps, decay, norm: b.take(512), out }
            },
            post_norm: b.take(hidden * 4),
            ffn: Ffn::Moe(Mixture {
                k: shape.k,
                renormalise: true,
                router: b.matrix(8, experts, hidden),
                shared: Some([
                    b.matrix(4, inner, hidden),
                    b.matrix(4, inner, hidden),
                    b.matrix(4, hidden, inner),
                    b.matrix(8, 1, hidden),
                ]),
                gate: piece(inner, hidden),
                up: piece(inner, hidden),
                down: piece(hidden, inner),
                table: b.take(experts * 4),
            }),
        });
        memory.push(if full {
            let bytes = attend.cache_bytes();
            Memory::Attend(moestro::ops::plan::Cache { keys: b.take(bytes), values: b.take(bytes) })
        } else {
            Memory::Delta { conv: b.take(delta.channels() * 12), heads: b.take(delta.values() * 512) }
        });
    }
    let slots = Slots { slabs: vec![b.take(1 << 24)], per_slab: 4, stride: 1 << 22 };
    let (embed, head) = (b.matrix(4, 248_320, hidden), b.matrix(4, 248_320, hidden));
    (Net { embed, layers, norm: b.take(hidden * 4), head, eps: 1e-6, slots }, memory)
}

fn launches(steps: &[Step]) -> usize {
    cost(steps).launches
}

#[test]
fn few_launches_and_no_needless_wait() {
    let mut table = String::from("model,experts,launches,launches_a_layer,command_buffers,waits,barriers\n");
    for shape in &SHAPES {
        let mut b = Buffers(0);
        let (net, memory) = net(shape, &mut b);
        let scratch = Scratch::new(&net.layers, shape.hidden, 1, |bytes| Ok::<_, ()>(b.take(bytes))).unwrap();
        let (ids, logits) = (b.take(4), b.take(248_320 * 4));
        for residence in [Residence::Resident, Residence::Streaming] {
            let steps = pass(&net, &memory, (4000, 1), ids, residence, &scratch, Some((logits, 0..1)));
            let Cost { launches: all, command_buffers, waits } = cost(&steps);
            let most = (0..shape.layers).map(|i| launches(&layer(&net, i, &memory[i], (4000, 1), residence, &scratch)));
            let most = most.max().unwrap();
            assert!(most <= 16, "{} {residence:?}: {most} launches a layer", shape.name);
            assert_eq!(waits, if residence == Residence::Resident { 0 } else { shape.layers });
            assert!(command_buffers <= 1 + 2 * shape.layers);
            let barriers = barriers(&steps);
            let experts = format!("{residence:?}").to_lowercase();
            table += &format!("{},{experts},{all},{most},{command_buffers},{waits},{barriers}\n", shape.name);
        }
    }
    println!("{table}");
    let kept = include_str!("../../benches/results/schedule.csv");
    assert_eq!(kept.replace('\r', ""), table, "benches/results/schedule.csv is out of date");
}

/// Memory barriers a token takes when launches overlap that may.
fn barriers(steps: &[Step]) -> usize {
    let (mut barriers, mut open) = (0, Vec::new());
    for step in steps {
        match step {
            Step::Launch(dispatch) | Step::Late(dispatch) => {
                if open.iter().any(|earlier| dispatch.follows(earlier)) {
                    barriers += 1;
                    open.clear();
                }
                open.push(dispatch.clone());
            }
            Step::Commit | Step::Route(_) | Step::Wait => open.clear(),
            Step::Land(_) | Step::Batches(_) => {}
        }
    }
    barriers
}
