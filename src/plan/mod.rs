//! The memory plan: what goes into memory under the limit, and how many experts stay there.
//!
//! A pure function from a model's [`ModelFootprint`], the machine's [`MachineLimits`] and the user's [`PlanOptions`] to a [`Plan`]:
//!
//! ```text
//! limit = process + trunk + state + KV(context) + workspace(chunk) + draft(context, chunk) + requests + prompt cache + slots
//! ```
//!
//! Defaults: the context starts at 4096 tokens, the prefill chunk at 256 rows, the slots at one token's working set (layers x
//! experts per token); if these do not fit, the plan is refused with the sum. Of what is then left, 1/16 goes to the context (up
//! to 32768 tokens), 1/8 to the chunk (up to 2048 rows), 1/16 to the prompt cache (up to 2 GiB), and the rest to slots, until
//! every expert has one. Only then the context grows on, up to the model's own. So a higher limit never means fewer slots, a
//! shorter context or a smaller chunk. The user's values are taken as they are.

mod estimate;
mod machine;
mod pages;
mod size;

pub use estimate::{Bandwidth, Estimate, HIT_RATES, HitRates, Overhead, estimate};
pub use machine::{MACHINES, Machine, Simulation, simulate};
pub use size::Size;

use crate::{config::Switch, error::ModelError, platform::os};
use serde::Serialize;
use std::fmt;

/// Context by default where memory is short, and the most it takes while experts still lack slots (tokens).
const CONTEXT: [u64; 2] = [4096, 32768];
/// The same for the prefill chunk (rows).
const CHUNK: [u64; 2] = [256, 2048];
/// The most the prompt cache takes by default (bytes).
const PROMPT_CACHE: u64 = 2 << 30;
/// A server's memory for requests it has not answered: 1/16 of the limit, within these (bytes).
const REQUESTS: [u64; 2] = [16 << 20, 128 << 20];
/// The limit where neither the user nor the system gives one (bytes).
const FALLBACK: u64 = 4 << 30;
/// Bytes of a GPU's recommended working set that stay free.
const GPU_RESERVE: u64 = 2 << 30;

/// A model's demands on memory. Bytes unless said otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelFootprint {
    /// Everything but the routed experts.
    pub trunk: u64,
    /// The part of `trunk` of which a token reads only one row: the embedding (0 if the head shares it).
    pub gathered: u64,
    /// The part of `trunk` that makes the logits: one matrix, which a token reads from end to end.
    pub head: u64,
    /// One routed expert as the checkpoint stores it: what a miss reads.
    pub expert: u64,
    /// One slot: an expert with its alignment.
    pub slot: u64,
    /// Layers with routed experts (0 for a dense model).
    pub layers: usize,
    /// Experts in each of them.
    pub experts: usize,
    /// Experts a token is routed to in each layer, after `--experts-per-token`.
    pub experts_per_token: usize,
    /// Keys and values of one token, all layers.
    pub kv_per_token: u64,
    /// Delta-net and convolution state of one sequence, all layers.
    pub state: u64,
    /// Activations of one row of a prefill chunk.
    pub workspace_per_row: u64,
    /// Activations that do not depend on the chunk: logits, score buffers.
    pub workspace_fixed: u64,
    /// The longest context the model was made for (tokens).
    pub context: usize,
    pub draft: DraftFootprint,
}

/// A draft's demands on memory beside the model's, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftFootprint {
    /// Its weights, and whatever else does not grow.
    pub fixed: u64,
    /// Bytes that it keeps of one token of the context.
    pub per_token: u64,
    /// Hidden rows of one row of a prefill chunk.
    pub per_row: u64,
}

impl ModelFootprint {
    /// Experts in all layers together: as many slots as there can be use for.
    pub fn total_experts(&self) -> u64 {
        (self.layers as u64).saturating_mul(self.experts as u64)
    }

    /// Experts one token needs: the fewest slots that a plan may have.
    pub fn working_set(&self) -> u64 {
        (self.layers as u64).saturating_mul(self.experts_per_token as u64)
    }

    /// All weights.
    pub fn weights(&self) -> u64 {
        self.trunk.saturating_add(self.total_experts().saturating_mul(self.expert))
    }
}

/// The machine's limits, in bytes; `None` where the system does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct MachineLimits {
    pub ram: Option<u64>,
    /// The GPU's recommended working set (Metal), or what is free on the card (CUDA).
    pub gpu: Option<u64>,
    /// The control group's limit.
    pub cgroup: Option<u64>,
    /// Memory of this process apart from the plan's other terms: code, tokenizer, threads.
    pub process: u64,
}

/// What is `resident` before the weights are, 1/8 and 16 MiB more for what serving adds.
fn process_memory(resident: u64) -> u64 {
    resident + resident / 8 + (16 << 20)
}

impl MachineLimits {
    /// This machine's limits. Call it when the tokenizer is loaded and the weights are not: what is in use is the process's.
    pub fn here(gpu: Option<u64>) -> Self {
        Self {
            ram: os::total_memory(),
            gpu,
            cgroup: os::cgroup_limit(),
            process: os::resident_memory().map_or(0, process_memory),
        }
    }

    /// The limit to plan with: what the user asked for, else 75 % of RAM; never above RAM, 10/11 of the control group's limit
    /// (beyond that the kernel's own use could get us killed), or 2 GiB less than the GPU recommends (what the window server
    /// and Metal itself take counts, too, and a little above it a command buffer fails for want of memory).
    fn choose(&self, asked: Option<u64>) -> (u64, LimitSource) {
        let ram = self.ram.map(|ram| (if asked.is_some() { ram } else { ram / 4 * 3 }, LimitSource::Ram));
        let gpu = self.gpu.map(|gpu| (gpu.saturating_sub(GPU_RESERVE), LimitSource::Gpu));
        let cgroup = self.cgroup.map(|cgroup| ((cgroup as f64 / 1.1) as u64, LimitSource::Cgroup));
        let asked = asked.map(|asked| (asked, LimitSource::Asked));
        let candidates = [asked, cgroup, ram, gpu].into_iter().flatten();
        candidates.min_by_key(|&(bytes, _)| bytes).unwrap_or((FALLBACK, LimitSource::Fallback))
    }
}

/// The limit that was the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    Asked,
    Ram,
    Gpu,
    Cgroup,
    Fallback,
}

/// The user's settings; `None` is the default described at the top.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PlanOptions {
    pub limit: Option<u64>,
    /// `--stream-experts`: auto is resident if all experts fit, else streaming; on streams even then; off is resident
    /// or a refusal.
    pub stream: Switch,
    pub context: Option<usize>,
    pub chunk: Option<usize>,
    pub prompt_cache: Option<u64>,
    /// Sequences that are held at once, all of the same context; 0 is one.
    pub sequences: usize,
    /// Requests come over HTTP, so memory is set aside for their bodies and for tokenizing them.
    pub serving: bool,
    /// Buffered expert reads: the page cache serves the experts, so while streaming the slots stay few (two tokens'
    /// working sets) and the rest of the limit is left to the page cache.
    pub buffered: bool,
}

/// Experts are read once, or as they are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Every expert has its slot, filled once, never evicted.
    Resident,
    Streaming,
}

/// The contents of memory: bytes, but for `slots`, `context` (tokens) and `chunk` (rows).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    pub strategy: Strategy,
    pub limit: u64,
    pub limit_from: LimitSource,
    pub process: u64,
    pub trunk: u64,
    pub kv: u64,
    pub state: u64,
    pub workspace: u64,
    /// The draft: its weights, its context, the hidden rows that it follows.
    pub draft: u64,
    /// Bodies of requests, and what becomes of them up to their tokens (servers only).
    pub requests: u64,
    pub prompt_cache: u64,
    /// The slab of all slots.
    pub experts: u64,
    /// Left to the page cache (buffered streaming only).
    pub page_cache: u64,
    pub slots: usize,
    /// The part of all experts that has a slot: 0 to 1.
    pub residency: f64,
    /// The model's size with every expert in memory, over the limit: above 1 it must stream.
    pub overcommit: f64,
    pub context: usize,
    pub chunk: usize,
}

impl Plan {
    /// All that the plan commits: at most `limit`.
    pub fn total(&self) -> u64 {
        self.process
            + self.trunk
            + self.kv
            + self.state
            + self.workspace
            + self.draft
            + self.requests
            + self.prompt_cache
            + self.experts
    }

    /// Plans `shape` under `limits` as `options` say.
    ///
    /// # Errors
    /// `ModelError::Memory` with the sum in words if not even the smallest working set fits.
    pub fn new(shape: &ModelFootprint, limits: &MachineLimits, options: &PlanOptions) -> Result<Self, ModelError> {
        let (limit, limit_from) = limits.choose(options.limit);
        let all = shape.total_experts();
        let sequences = options.sequences.max(1) as u64;
        let [state, kv_per_token] = [shape.state, shape.kv_per_token].map(|one| one.saturating_mul(sequences));
        let DraftFootprint { fixed: draft, per_token, per_row } = shape.draft;
        let each = [kv_per_token.saturating_add(per_token), shape.workspace_per_row.saturating_add(per_row)];
        let kv = CountRange::new(options.context, CONTEXT, shape.context as u64, each[0]);
        let rows = CountRange::new(options.chunk, CHUNK, shape.context as u64, each[1]);
        let prompt_cache = options.prompt_cache.unwrap_or(0);
        let requests = if options.serving { (limit / 16).clamp(REQUESTS[0], REQUESTS[1]) } else { 0 };
        let slots = if options.stream == Switch::Off { all } else { shape.working_set().min(all) };

        // Nothing of a plan is beyond counting, once its least sum is not beyond the limit.
        let fixed = [limits.process, shape.trunk, state, shape.workspace_fixed, draft, requests, prompt_cache];
        let floors = [kv.bytes(kv.floor), rows.bytes(rows.floor), slots.saturating_mul(shape.slot)];
        let least = fixed.into_iter().chain(floors).fold(0, u64::saturating_add);
        let Some(spare) = limit.checked_sub(least) else {
            let asked = PlanRefusal {
                shape,
                limits,
                options,
                limit,
                limit_from,
                kv,
                rows,
                slots,
                requests,
                prompt_cache,
                state,
                least,
            };
            return Err(ModelError::Memory(asked.to_string()));
        };

        // The shares are of `spare`, not of what rounding leaves of it: so more memory never means less of anything.
        let kv_share = (spare / 16).min(kv.bytes(kv.short - kv.floor));
        let rows_share = (spare / 8).min(rows.bytes(rows.short - rows.floor));
        let cache_share = if options.prompt_cache.is_some() { 0 } else { (spare / 16).min(PROMPT_CACHE) };
        let for_slots = spare - kv_share - rows_share - cache_share;
        let fit = (slots + for_slots.checked_div(shape.slot).unwrap_or(0)).min(all);
        let over = if fit == all { for_slots - (fit - slots) * shape.slot } else { 0 };
        let context = kv.count(kv_share + over, 256);
        let chunk = rows.count(rows_share, 64);

        let resident = fit == all && options.stream != Switch::On;
        let slots = if options.buffered && !resident { fit.min(2 * slots) } else { fit };
        let mut plan = Self {
            strategy: if resident { Strategy::Resident } else { Strategy::Streaming },
            limit,
            limit_from,
            process: limits.process,
            trunk: shape.trunk,
            kv: context * kv_per_token,
            state,
            workspace: shape.workspace_fixed + chunk * shape.workspace_per_row,
            draft: draft + context * per_token + chunk * per_row,
            requests,
            prompt_cache: prompt_cache + cache_share,
            experts: slots * shape.slot,
            page_cache: 0,
            slots: slots as usize,
            residency: if all == 0 { 1.0 } else { slots as f64 / all as f64 },
            overcommit: 0.0,
            context: context as usize,
            chunk: chunk as usize,
        };
        let whole = (plan.total() - plan.experts).saturating_add(all.saturating_mul(shape.slot));
        plan.overcommit = whole as f64 / limit as f64;
        if options.buffered && !resident {
            plan.page_cache = limit - plan.total();
        }
        Ok(plan)
    }
}

/// A count that a plan may choose (tokens of context, rows of a chunk), and the cost of each.
#[derive(Clone, Copy)]
struct CountRange {
    /// At least so many.
    floor: u64,
    /// At most so many while experts lack slots.
    short: u64,
    /// At most so many in any case.
    most: u64,
    each: u64,
}

impl CountRange {
    fn new(asked: Option<usize>, [floor, short]: [u64; 2], most: u64, each: u64) -> Self {
        match asked {
            Some(asked) => Self { floor: asked as u64, short: asked as u64, most: asked as u64, each },
            None => Self { floor: floor.min(most), short: short.min(most), most, each },
        }
    }

    fn bytes(&self, count: u64) -> u64 {
        count.saturating_mul(self.each)
    }

    /// The floor and what `extra` bytes add to it, in steps of `step`.
    fn count(&self, extra: u64, step: u64) -> u64 {
        let count = self.floor.saturating_add(extra.checked_div(self.each).unwrap_or(u64::MAX));
        if count >= self.most { self.most } else { (count - count % step).max(self.floor) }
    }
}

/// The refusal of a plan: the sum, in words.
struct PlanRefusal<'a> {
    shape: &'a ModelFootprint,
    limits: &'a MachineLimits,
    options: &'a PlanOptions,
    limit: u64,
    limit_from: LimitSource,
    kv: CountRange,
    rows: CountRange,
    slots: u64,
    requests: u64,
    prompt_cache: u64,
    state: u64,
    least: u64,
}

impl fmt::Display for PlanRefusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = match self.limit_from {
            LimitSource::Asked => "--memory-limit",
            LimitSource::Ram => "this machine's memory",
            LimitSource::Gpu => "the GPU's recommended working set",
            LimitSource::Cgroup => "the control group's limit",
            LimitSource::Fallback => "assumed, as the system does not tell its memory",
        };
        let shape = self.shape;
        write!(f, "the model does not fit in {} ({from}): trunk {}", Size(self.limit), Size(shape.trunk))?;
        write!(f, " + KV cache for {} tokens {}", self.kv.floor, Size(self.kv.bytes(self.kv.floor)))?;
        write!(f, " + state {}", Size(self.state))?;
        let workspace = shape.workspace_fixed.saturating_add(self.rows.bytes(self.rows.floor));
        write!(f, " + workspace for chunks of {} tokens {}", self.rows.floor, Size(workspace))?;
        if shape.draft.fixed > 0 {
            write!(f, " + the draft model {}", Size(shape.draft.fixed))?;
        }
        if self.requests > 0 {
            write!(f, " + requests {}", Size(self.requests))?;
        }
        if self.prompt_cache > 0 {
            write!(f, " + prompt cache {}", Size(self.prompt_cache))?;
        }
        write!(f, " + {} expert slots ({} layers x ", self.slots, shape.layers)?;
        match self.options.stream {
            Switch::Off => write!(f, "{}, all of them)", shape.experts)?,
            _ => write!(f, "{} experts a token)", shape.experts_per_token)?,
        }
        let (experts, process) = (Size(self.slots.saturating_mul(shape.slot)), Size(self.limits.process));
        write!(f, " {experts} + the program itself {process} = {}", Size(self.least))?;
        match self.limit_from {
            LimitSource::Cgroup => write!(f, "; raise the group's limit"),
            _ => write!(f, "; --memory-limit {}M or more would do", self.least.div_ceil(1 << 20)),
        }?;
        if self.options.stream == Switch::Off {
            write!(f, ", or --stream-experts auto")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
