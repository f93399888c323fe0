//! The memory plan: divides the memory limit among the parts of the program, and decides how many experts stay in
//! memory.
//!
//! [`Plan::new`] is a pure function of the model's [`ModelFootprint`], the [`MachineLimits`] and the user's
//! [`PlanOptions`]. The parts of a [`Plan`] are:
//!
//! ```text
//! limit = process + trunk + vision + state + KV(context) + workspace(chunk) + draft(context, chunk) + requests
//!         + prompt cache + slots
//! ```
//!
//! The smallest plan has a context of 4096 tokens, a prefill chunk of 256 rows, and slots for the experts of one token
//! (layers * experts per token). If the smallest plan exceeds the limit, planning fails with an error that lists all
//! parts.
//!
//! Memory beyond the smallest plan is divided: 1/16 for the context (up to 32768 tokens), 1/8 for the chunk (up to 2048
//! rows), 1/16 for the prompt cache (up to 2 GiB), and the rest for slots, until every expert has a slot. Memory left
//! after that extends the context up to the model's maximum. A higher limit therefore never results in fewer slots, a
//! shorter context or a smaller chunk. Values that the user has set are not changed.
//!
//! `size` formats byte counts.

mod size;

pub use size::Size;

use crate::error::ModelError;
use moestro_base::platform::os;
use serde::Serialize;
use std::fmt;

/// Context in tokens: the value in the smallest plan, and the maximum while some experts have no slot.
const CONTEXT: [u64; 2] = [4096, 32768];
/// Prefill chunk in rows: the value in the smallest plan, and the maximum while some experts have no slot.
const CHUNK: [u64; 2] = [256, 2048];
/// Maximum size of the prompt cache in bytes if the user does not set a maximum.
const PROMPT_CACHE: u64 = 2 << 30;
/// Minimum and maximum, in bytes, of a server's memory for requests in progress. Between them, this memory is 1/16 of
/// the limit.
const REQUEST_MEMORY: [u64; 2] = [16 << 20, 128 << 20];
/// Maximum of a server's memory for decoding images, in bytes. Below this maximum, this memory is 1/16 of the limit.
const IMAGE_MEMORY: u64 = 128 << 20;
/// Memory limit in bytes if neither the user nor the system gives a limit.
const FALLBACK_LIMIT: u64 = 4 << 30;
/// Divisor: `1 / PROMPT_CACHE_PAGE_SHARE` of the prompt cache is for pages of keys and values. The rest is for
/// delta-net states. In conversations with short turns, states need more memory than pages.
const PROMPT_CACHE_PAGE_SHARE: u64 = 4;
/// Divisor: with `--parallel auto`, four requests run at the same time if `1 / FREE_FOR_FOUR` of the limit stays free.
const FREE_FOR_FOUR: u64 = 8;
/// Divisor: with `--parallel auto`, the second and further requests may take at most `1 / MAX_PARALLEL_COST` of the
/// limit.
const MAX_PARALLEL_COST: u64 = 32;
/// Number of bytes of a GPU's recommended working set that stay free.
const GPU_RESERVE: u64 = 2 << 30;

/// Memory needs of a model, in bytes unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelFootprint {
    /// All weights except the routed experts.
    pub trunk: u64,
    /// The embedding, a part of `trunk` of which each token reads only one row. 0 if the LM head uses the same matrix.
    pub gathered: u64,
    /// The LM head, a part of `trunk`. Each token reads the whole LM head.
    pub head: u64,
    /// One routed expert as stored in the checkpoint. This is the number of bytes that a miss reads.
    pub expert: u64,
    /// Size of one slot: an expert plus alignment.
    pub slot: u64,
    /// Number of layers with routed experts. 0 for a dense model.
    pub layers: usize,
    /// Number of experts in each layer with routed experts.
    pub experts: usize,
    /// Number of experts that a token uses in each such layer, after `--experts-per-token` is applied.
    pub experts_per_token: usize,
    /// Size of the keys and values of one token in all layers.
    pub kv_per_token: u64,
    /// Delta-net and convolution state of one sequence in all layers.
    pub state: u64,
    /// Memory of each additional live sequence, without pages of keys and values.
    pub sequence: u64,
    /// Further memory of each additional live sequence, for each row of a prefill chunk.
    pub sequence_per_row: u64,
    /// Size of the activations for one row of a prefill chunk.
    pub workspace_per_row: u64,
    /// Size of the activations that do not grow with the chunk: logits and score buffers.
    pub workspace_fixed: u64,
    /// Maximum context of the model, in tokens.
    pub context: usize,
    pub draft: DraftFootprint,
    /// Size of the activations for one image in the vision tower, and of the cache of recent images. 0 without a vision
    /// tower.
    pub vision: u64,
}

/// Additional memory needs of a draft, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftFootprint {
    /// Weights, and buffers that do not grow with the context or the chunk.
    pub fixed: u64,
    /// Number of bytes for each token of the context.
    pub per_token: u64,
    /// Hidden rows for each row of a prefill chunk.
    pub per_row: u64,
}

impl ModelFootprint {
    /// Number of experts in all layers, which is the maximum useful number of slots.
    pub fn total_experts(&self) -> u64 {
        (self.layers as u64).saturating_mul(self.experts as u64)
    }

    /// Number of experts that one token uses in all layers, which is the minimum number of slots.
    pub fn working_set(&self) -> u64 {
        (self.layers as u64).saturating_mul(self.experts_per_token as u64)
    }

    /// All weights.
    pub fn weights(&self) -> u64 {
        self.trunk.saturating_add(self.total_experts().saturating_mul(self.expert))
    }
}

/// Memory limits of the machine, in bytes. `None` if the system does not report a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct MachineLimits {
    pub ram: Option<u64>,
    /// Recommended working set of the GPU (Metal), or free memory of the card (CUDA).
    pub gpu: Option<u64>,
    /// Limit of the control group.
    pub cgroup: Option<u64>,
    /// Memory of this process that belongs to no other part of the plan: code, tokenizer and threads.
    pub process: u64,
}

/// Memory of the process while it serves: 9/8 of `resident`, plus 16 MiB. `resident` is measured before the weights are
/// loaded.
fn process_memory(resident: u64) -> u64 {
    resident + resident / 8 + (16 << 20)
}

impl MachineLimits {
    /// Limits of this machine. Must be called after the tokenizer is loaded and before the weights are loaded, so that
    /// the resident memory is the memory of the process itself.
    pub fn here(gpu: Option<u64>) -> Self {
        Self {
            ram: os::total_memory(),
            gpu,
            cgroup: os::cgroup_limit(),
            process: os::resident_memory().map_or(0, process_memory),
        }
    }

    /// The memory limit of the plan: the value that the user has set, or 75 % of RAM. The value is reduced to the
    /// smallest of:
    /// * RAM.
    /// * 10/11 of the control group's limit. The group's limit includes kernel memory, and the kernel kills a process
    ///   that reaches the group's limit.
    /// * The GPU's working set minus 2 GiB. The window server and Metal also use the working set, and command buffers
    ///   fail slightly above it.
    fn choose(&self, asked: Option<u64>) -> (u64, LimitSource) {
        let ram = self.ram.map(|ram| (if asked.is_some() { ram } else { ram / 4 * 3 }, LimitSource::Ram));
        let gpu = self.gpu.map(|gpu| (gpu.saturating_sub(GPU_RESERVE), LimitSource::Gpu));
        let cgroup = self.cgroup.map(|cgroup| ((cgroup as f64 / 1.1) as u64, LimitSource::Cgroup));
        let asked = asked.map(|asked| (asked, LimitSource::Asked));
        let candidates = [asked, cgroup, ram, gpu].into_iter().flatten();
        candidates.min_by_key(|&(bytes, _)| bytes).unwrap_or((FALLBACK_LIMIT, LimitSource::Fallback))
    }
}

/// The limit that was the smallest and is used for the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    Asked,
    Ram,
    Gpu,
    Cgroup,
    Fallback,
}

/// How many requests run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parallel {
    /// As many as the memory plan finds room for: 4, 2 or 1.
    #[default]
    Auto,
    Count(usize),
}

/// The user's settings. `None` selects the default (see the module's documentation).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanOptions {
    pub limit: Option<u64>,
    /// `--stream-experts`. `None` streams experts if not all experts fit. `true` always streams. `false` never streams,
    /// and a model that does not fit is an error.
    pub stream: Option<bool>,
    pub context: Option<usize>,
    pub chunk: Option<usize>,
    pub prompt_cache: Option<u64>,
    /// Number of requests that run at the same time. These requests share the pages of one context.
    pub parallel: Parallel,
    /// Number of sequences in memory, each with a full context. 0 has the same meaning as 1.
    pub sequences: usize,
    /// True if memory is reserved for HTTP requests: for their bodies and for tokenization.
    pub serving: bool,
    /// True if expert reads go through the page cache. If the model streams, the plan then has slots only for the
    /// experts of two tokens, and leaves the remaining memory to the page cache.
    pub buffered: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            limit: None,
            stream: None,
            context: None,
            chunk: None,
            prompt_cache: None,
            parallel: Parallel::Count(1),
            sequences: 1,
            serving: false,
            buffered: false,
        }
    }
}

/// The place of the experts: all experts in memory, or experts streamed from disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Every expert has its own slot, which is filled once and never evicted.
    Resident,
    /// Experts are read into slots when they are needed.
    Streaming,
}

/// The division of the memory limit. In bytes, except for `slots`, `context` (tokens) and `chunk` (rows).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    pub strategy: Strategy,
    pub limit: u64,
    pub limit_from: LimitSource,
    pub process: u64,
    pub trunk: u64,
    /// Images: activations of the vision tower, and rows and pixels of recent images.
    pub vision: u64,
    pub kv: u64,
    pub state: u64,
    pub workspace: u64,
    /// The draft: its weights, its context, and the hidden rows that it reads.
    pub draft: u64,
    /// Request bodies, and memory for converting request bodies to tokens. 0 unless this process is a server.
    pub requests: u64,
    pub prompt_cache: u64,
    /// The slab that contains all slots.
    pub experts: u64,
    /// Memory left to the page cache. 0 unless experts are streamed through the page cache.
    pub page_cache: u64,
    pub slots: usize,
    /// Fraction of all experts that have a slot, from 0 to 1.
    pub residency: f64,
    /// Total of a plan with every expert in memory, divided by the limit. Above 1, the model must stream.
    pub overcommit: f64,
    pub context: usize,
    pub chunk: usize,
    /// Number of requests that run at the same time.
    pub parallel: usize,
}

impl Plan {
    /// Sum of all parts. The sum is at most `limit`.
    pub fn total(&self) -> u64 {
        self.process
            + self.trunk
            + self.vision
            + self.kv
            + self.state
            + self.workspace
            + self.draft
            + self.requests
            + self.prompt_cache
            + self.experts
    }

    /// Number of pages of `bytes` each, for the context and the prompt cache together.
    pub fn pages(&self, bytes: u64) -> usize {
        usize::try_from((self.kv + self.prompt_cache / PROMPT_CACHE_PAGE_SHARE) / bytes.max(1)).unwrap_or(usize::MAX)
    }

    /// Number of delta-net states of `bytes` each that fit into the part of the prompt cache that is not for pages.
    pub fn states(&self, bytes: u64) -> u64 {
        (self.prompt_cache - self.prompt_cache / PROMPT_CACHE_PAGE_SHARE).checked_div(bytes).unwrap_or(0)
    }

    /// True if the model streams and the memory outside the limit has room for all of its experts. The page cache then
    /// answers most reads, and a miss rarely waits for the disk. A quarter of the memory outside the limit is left to
    /// other programs.
    pub fn page_cache_holds_experts(&self, footprint: &ModelFootprint, machine: &MachineLimits) -> bool {
        let memory = [machine.ram, machine.cgroup].into_iter().flatten().min().unwrap_or(0);
        let spare = memory.saturating_sub(self.limit);
        self.strategy == Strategy::Streaming
            && footprint.total_experts().saturating_mul(footprint.expert) <= spare / 4 * 3
    }

    /// Plans the memory of a model with this footprint within `limits`.
    ///
    /// # Errors
    /// The smallest plan exceeds the limit. The error lists the parts of the smallest plan.
    pub fn new(footprint: &ModelFootprint, limits: &MachineLimits, options: &PlanOptions) -> Result<Self, ModelError> {
        let at = |parallel: usize| Self::with_parallel(footprint, limits, options, parallel);
        let one = match options.parallel {
            Parallel::Count(count) => return at(count.max(1)),
            Parallel::Auto => at(1)?,
        };
        let has_room = one.strategy == Strategy::Resident && one.limit - one.total() >= one.limit / FREE_FOR_FOUR;
        let parallel = if has_room { 4 } else { 2 };
        let cost = (parallel - 1) * (footprint.sequence + one.chunk as u64 * footprint.sequence_per_row);
        let more = at(parallel as usize).ok();
        let more = more.filter(|more| more.strategy == one.strategy && cost <= one.limit / MAX_PARALLEL_COST);
        Ok(more.unwrap_or(one))
    }

    fn with_parallel(
        footprint: &ModelFootprint,
        limits: &MachineLimits,
        options: &PlanOptions,
        parallel: usize,
    ) -> Result<Self, ModelError> {
        let (limit, limit_from) = limits.choose(options.limit);
        let all = footprint.total_experts();
        let sequences = options.sequences.max(1) as u64;
        let [state, kv_per_token] = [footprint.state, footprint.kv_per_token].map(|one| one.saturating_mul(sequences));
        let more = |each: u64| each.saturating_mul(parallel as u64 - 1);
        let state = state.saturating_add(more(footprint.sequence));
        let workspace_per_row = footprint.workspace_per_row.saturating_add(more(footprint.sequence_per_row));
        let DraftFootprint { fixed: draft, per_token, per_row } = footprint.draft;
        let each = [kv_per_token.saturating_add(per_token), workspace_per_row.saturating_add(per_row)];
        let kv = CountRange::new(options.context, CONTEXT, footprint.context as u64, each[0]);
        let rows = CountRange::new(options.chunk, CHUNK, footprint.context as u64, each[1]);
        let prompt_cache = options.prompt_cache.unwrap_or(0);
        let requests = if options.serving { request_memory(limit, footprint) } else { 0 };
        let slots = if options.stream == Some(false) { all } else { footprint.working_set().min(all) };

        // The additions saturate, so a sum that is within the limit has not overflowed.
        let fixed = [
            limits.process,
            footprint.trunk,
            footprint.vision,
            state,
            footprint.workspace_fixed,
            draft,
            requests,
            prompt_cache,
        ];
        let floors = [kv.bytes(kv.floor), rows.bytes(rows.floor), slots.saturating_mul(footprint.slot)];
        let min_total = fixed.into_iter().chain(floors).fold(0, u64::saturating_add);
        let Some(spare) = limit.checked_sub(min_total) else {
            let asked = PlanRefusal {
                footprint,
                limits,
                options,
                limit,
                limit_from,
                kv,
                rows,
                slots,
                requests,
                state,
                min_total,
            };
            return Err(ModelError::Memory(asked.to_string()));
        };

        // Each part gets a fraction of `spare`. Bytes left by rounding a part down are not given to another part,
        // because a higher limit could then shrink that other part.
        let kv_share = (spare / 16).min(kv.bytes(kv.short - kv.floor));
        let rows_share = (spare / 8).min(rows.bytes(rows.short - rows.floor));
        let cache_share = if options.prompt_cache.is_some() { 0 } else { (spare / 16).min(PROMPT_CACHE) };
        let for_slots = spare - kv_share - rows_share - cache_share;
        let fit = (slots + for_slots.checked_div(footprint.slot).unwrap_or(0)).min(all);
        let over = if fit == all { for_slots - (fit - slots) * footprint.slot } else { 0 };
        let context = kv.count(kv_share + over, 256);
        let chunk = rows.count(rows_share, 64);

        let resident = fit == all && options.stream != Some(true);
        let slots = if options.buffered && !resident { fit.min(2 * slots) } else { fit };
        let mut plan = Self {
            strategy: if resident { Strategy::Resident } else { Strategy::Streaming },
            limit,
            limit_from,
            process: limits.process,
            trunk: footprint.trunk,
            vision: footprint.vision,
            kv: context * kv_per_token,
            state,
            workspace: footprint.workspace_fixed + chunk * workspace_per_row,
            draft: draft + context * per_token + chunk * per_row,
            requests,
            prompt_cache: prompt_cache + cache_share,
            experts: slots * footprint.slot,
            page_cache: 0,
            slots: slots as usize,
            residency: if all == 0 { 1.0 } else { slots as f64 / all as f64 },
            overcommit: 0.0,
            context: context as usize,
            chunk: chunk as usize,
            parallel,
        };
        let whole = (plan.total() - plan.experts).saturating_add(all.saturating_mul(footprint.slot));
        plan.overcommit = whole as f64 / limit as f64;
        if options.buffered && !resident {
            plan.page_cache = limit - plan.total();
        }
        Ok(plan)
    }
}

/// A server's memory for requests in progress.
fn request_memory(limit: u64, footprint: &ModelFootprint) -> u64 {
    // The result includes memory to decode images.
    let images = if footprint.vision > 0 { (limit / 16).min(IMAGE_MEMORY) } else { 0 };
    (limit / 16).clamp(REQUEST_MEMORY[0], REQUEST_MEMORY[1]) + images
}

/// The range of a count that the plan chooses (tokens of context, or rows of a chunk), and the number of bytes per
/// unit.
#[derive(Clone, Copy)]
struct CountRange {
    /// Count in the smallest plan.
    floor: u64,
    /// Maximum while some experts have no slot.
    short: u64,
    /// Maximum when all experts have slots.
    max: u64,
    /// Number of bytes per unit (token or row).
    each: u64,
}

impl CountRange {
    fn new(asked: Option<usize>, [floor, short]: [u64; 2], max: u64, each: u64) -> Self {
        match asked {
            Some(asked) => Self { floor: asked as u64, short: asked as u64, max: asked as u64, each },
            None => Self { floor: floor.min(max), short: short.min(max), max, each },
        }
    }

    fn bytes(&self, count: u64) -> u64 {
        count.saturating_mul(self.each)
    }

    /// `floor` plus the number of units that fit into `extra` bytes, rounded down to a multiple of `step`, but at most
    /// `max`.
    fn count(&self, extra: u64, step: u64) -> u64 {
        let count = self.floor.saturating_add(extra.checked_div(self.each).unwrap_or(u64::MAX));
        if count >= self.max { self.max } else { (count - count % step).max(self.floor) }
    }
}

/// The smallest plan of a model, which exceeds the limit. The `Display` implementation writes the error message, which
/// lists all parts.
struct PlanRefusal<'a> {
    footprint: &'a ModelFootprint,
    limits: &'a MachineLimits,
    options: &'a PlanOptions,
    limit: u64,
    limit_from: LimitSource,
    kv: CountRange,
    rows: CountRange,
    slots: u64,
    requests: u64,
    state: u64,
    min_total: u64,
}

impl PlanRefusal<'_> {
    /// A limit in MiB that is sufficient. Takes into account that a higher limit also reserves more memory for
    /// requests. Includes a margin, because the memory of the process differs by a few MiB between starts.
    fn sufficient_mib(&self) -> u64 {
        let margin = (self.limits.process / 16).max(4 << 20);
        let rest = self.min_total.saturating_sub(self.requests).saturating_add(margin);
        let mut limit = rest.saturating_add(self.requests);
        while self.options.serving && rest.saturating_add(request_memory(limit, self.footprint)) > limit {
            limit = rest.saturating_add(request_memory(limit, self.footprint));
        }
        limit.div_ceil(1 << 20)
    }
}

impl fmt::Display for PlanRefusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = match self.limit_from {
            LimitSource::Asked => "--memory-limit",
            LimitSource::Ram => "this machine's memory",
            LimitSource::Gpu => "the GPU's recommended working set",
            LimitSource::Cgroup => "the control group's limit",
            LimitSource::Fallback => "assumed, because the system does not report its memory",
        };
        let footprint = self.footprint;
        write!(f, "the model does not fit in {} ({from}): trunk {}", Size(self.limit), Size(footprint.trunk))?;
        write!(f, " + KV cache for {} tokens {}", self.kv.floor, Size(self.kv.bytes(self.kv.floor)))?;
        write!(f, " + state {}", Size(self.state))?;
        let workspace = footprint.workspace_fixed.saturating_add(self.rows.bytes(self.rows.floor));
        write!(f, " + workspace for chunks of {} tokens {}", self.rows.floor, Size(workspace))?;
        let prompt_cache = self.options.prompt_cache.unwrap_or(0);
        let optional = [
            ("the draft model", footprint.draft.fixed),
            ("images", footprint.vision),
            ("requests", self.requests),
            ("prompt cache", prompt_cache),
        ];
        for (what, bytes) in optional.into_iter().filter(|(_, bytes)| *bytes > 0) {
            write!(f, " + {what} {}", Size(bytes))?;
        }
        write!(f, " + {} expert slots ({} layers x ", self.slots, footprint.layers)?;
        match self.options.stream {
            Some(false) => write!(f, "{}, all of them)", footprint.experts)?,
            _ => write!(f, "{} experts a token)", footprint.experts_per_token)?,
        }
        let experts = Size(self.slots.saturating_mul(footprint.slot));
        let process = Size(self.limits.process);
        write!(f, " {experts} + the program itself {process} = {}", Size(self.min_total))?;
        match self.limit_from {
            LimitSource::Cgroup => write!(f, "; raise the group's limit"),
            _ => write!(f, "; use --memory-limit {}M or more", self.sufficient_mib()),
        }?;
        if self.options.stream == Some(false) {
            write!(f, ", or --stream-experts auto")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
