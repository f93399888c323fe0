//! A forward pass as steps: what is launched, when it is handed to the GPU, and when the CPU waits. Every wait and every
//! commit of the GPU path is decided here.
//!
//! Resident (every expert has a slot; the router's choice becomes slots on the GPU):
//!
//! ```text
//! CPU  encode | commit | encode | commit | ...           | commit | wait, read logits
//! GPU         [ embed, layers 0-3 ][ layers 4-7 ][ ... ][ norm, head ]
//! ```
//! Commits only keep the GPU busy while the CPU encodes; nothing waits before the logits.
//!
//! Streaming (some experts are on the SSD), for each layer:
//!
//! ```text
//! CPU   wait | ids, ask the store | encode early | commit | reads land ... | encode late, join, next layer | commit, wait
//! GPU        |                    |       [ hits: gate, up ]               |             [ misses: gate, up | down of all,
//! SSD        |                    [ reads of the misses .................. ]               next mixer, router ]
//! ```
//! One wait and two command buffers a layer. The shared expert was projected beside the router's scores, and its down
//! projection runs with all others: the sum over ranks has one order whatever was read when.

use super::*;
use std::ops::Range;

/// Layers between two commits when nothing waits.
const LAYERS_A_COMMIT: usize = 4;

/// A model's weights on the device.
#[derive(Debug, Clone)]
pub struct Net {
    pub embed: Matrix,
    pub layers: Vec<Layer>,
    /// `[hidden]` f32.
    pub norm: Region,
    pub head: Matrix,
    pub eps: f32,
    /// Where experts are; without experts, not looked at.
    pub slots: Slots,
}

/// How the experts of a pass are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// All are in memory: slots are known on the GPU.
    Resident,
    /// The CPU asks the store, layer by layer; a launch for hits, another for misses.
    Streaming,
    /// The CPU asks the store and groups rows by expert, in as many batches as it takes.
    Grouped,
}

/// One step of a pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    Launch(Dispatch),
    /// Hand over what has been encoded; go on.
    Commit,
    /// Hand over and wait: the router's ids of this layer are readable. The CPU asks the store and writes the slots of
    /// what is there to [`Scratch::hits`].
    Route(usize),
    /// Wait for the disk; the CPU writes [`Scratch::misses`] and [`Scratch::places`].
    Land(usize),
    /// Only if something had to be read.
    Late(Dispatch),
    /// Wait for the ids, then run the experts of this layer batch by batch, and add the result to the residual stream.
    Batches(usize),
    /// Hand over and wait for everything.
    Wait,
}

/// A pass over `tokens` rows whose first is at position `start`; `ids` `[tokens]` holds them. With `logits`, the head runs on
/// these rows, too, and leaves `vocab` floats a row there.
pub fn pass(
    net: &Net,
    memory: &[Memory],
    (start, tokens): (usize, usize),
    ids: Region,
    residence: Residence,
    scratch: &Scratch,
    logits: Option<(Region, Range<usize>)>,
) -> Vec<Step> {
    assert!(tokens <= scratch.rows, "{tokens} rows in room for {}", scratch.rows);
    let mut steps = vec![Step::Launch(embed(&net.embed, tokens, ids, scratch.h))];
    for (index, memory) in memory.iter().enumerate() {
        steps.extend(layer(net, index, memory, (start, tokens), residence, scratch));
        if residence == Residence::Resident && (index + 1) % LAYERS_A_COMMIT == 0 {
            steps.push(Step::Commit);
        }
    }
    if let Some((logits, rows)) = logits {
        steps.push(Step::Launch(head(net, rows, scratch, logits)));
    }
    steps.push(Step::Wait);
    steps
}

/// The head on these rows of a pass that has gone through all layers.
pub fn head(net: &Net, rows: Range<usize>, scratch: &Scratch, logits: Region) -> Dispatch {
    let row = net.embed.cols * 4;
    let x = scratch.h.part(rows.start * row, rows.len() * row);
    let norm = Some(Norm { weight: net.norm, eps: net.eps, keep: None });
    let matrices = std::slice::from_ref(&net.head);
    linear(&Linear { x, tokens: rows.len(), norm, matrices, y: logits, add: false })
}

/// One layer of a pass.
pub fn layer(
    net: &Net,
    index: usize,
    memory: &Memory,
    (start, tokens): (usize, usize),
    residence: Residence,
    scratch: &Scratch,
) -> Vec<Step> {
    let layer = &net.layers[index];
    let mixer = layer.mix(memory, net.eps, start, tokens, scratch);
    let mut steps: Vec<Step> =
        mixer.into_iter().chain(layer.choose(net.eps, tokens, scratch)).map(Step::Launch).collect();
    if let Ffn::Moe(moe) = &layer.ffn {
        match residence {
            Residence::Resident => steps.extend(moe.resident(tokens, &net.slots, scratch).map(Step::Launch)),
            Residence::Streaming => steps.extend([
                Step::Route(index),
                Step::Launch(moe.early(tokens, &net.slots, scratch)),
                Step::Commit,
                Step::Land(index),
                Step::Late(moe.late(tokens, &net.slots, scratch)),
                Step::Launch(moe.join(tokens, &net.slots, scratch)),
            ]),
            Residence::Grouped => steps.push(Step::Batches(index)),
        }
    }
    steps
}

/// What a pass costs the CPU and the GPU to get going.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    pub launches: usize,
    pub command_buffers: usize,
    /// Waits of the CPU for the GPU before the last one, which every pass ends with.
    pub waits: usize,
}

/// Counts steps, everything that may have had to be read included. What [`Step::Batches`] does depends on the router and
/// is not counted.
pub fn cost(steps: &[Step]) -> Cost {
    let mut cost = Cost::default();
    for step in steps {
        match step {
            Step::Launch(_) | Step::Late(_) => cost.launches += 1,
            Step::Commit | Step::Wait => cost.command_buffers += 1,
            Step::Route(_) => (cost.command_buffers, cost.waits) = (cost.command_buffers + 1, cost.waits + 1),
            Step::Land(_) | Step::Batches(_) => {}
        }
    }
    cost
}
