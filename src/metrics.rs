//! Every metric, named once. Rooms hold an `Arc<Metrics>` and count at the event itself; `GET /metrics` renders it.
//!
//! Labelled metrics are resolved to their children here, so that counting on a hot path is one atomic addition. Units
//! are base units (seconds, bytes), as Prometheus wants them; `process_*` comes from the crate's own collector, which
//! reads `/proc` and therefore exists on Linux only.

mod board;
mod families;
mod openmetrics;
mod text;

pub use board::Board;
use families::{
    DEPTH, FIRST_TOKEN, INTER_TOKEN, QUEUE, READ, REQUEST, counter, counters, gauge, gauges, histogram, seconds,
};
use parking_lot::Mutex;
use prometheus::{Counter, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};
use std::sync::Arc;
pub use text::{CONTENT_TYPE, OPENMETRICS};

/// All of it. Fields are named after the metric, followed by the values of their labels.
pub struct Metrics {
    registry: Registry,
    /// The experts in memory.
    board: Mutex<Arc<Board>>,
    info: IntGaugeVec,
    /// The labels of `info`: version, device, model.
    running: Mutex<[String; 3]>,

    /// Finished requests by `endpoint` (the route's path) and `status`; [`Metrics::request`] adds to it.
    pub requests: IntCounterVec,
    pub requests_running: IntGauge,
    pub requests_queued: IntGauge,
    /// Prompt tokens that went through the model.
    pub prompt_tokens_computed: IntCounter,
    /// Prompt tokens whose state was still there.
    pub prompt_tokens_cached: IntCounter,
    pub generated_tokens: IntCounter,
    /// Prompts that went on where the request before them ended.
    pub prompt_cache_hits_session: IntCounter,
    /// Prompts that went on from a checkpoint in memory.
    pub prompt_cache_hits_memory: IntCounter,
    /// Prompts that went on from a checkpoint on the disk.
    pub prompt_cache_hits_disk: IntCounter,
    pub prompt_cache_misses: IntCounter,
    /// Tokens of a prompt that were known, where any were.
    pub prompt_cache_hit_tokens: Histogram,
    /// Bytes of checkpoints.
    pub prompt_cache_bytes_memory: IntGauge,
    pub prompt_cache_checkpoints_memory: IntGauge,
    pub prompt_cache_evictions_memory: IntCounter,
    pub prompt_cache_bytes_disk: IntGauge,
    pub prompt_cache_checkpoints_disk: IntGauge,
    pub prompt_cache_evictions_disk: IntCounter,
    /// Checkpoints read back, and the bytes of their states, keys and values.
    pub prompt_cache_disk_reads: IntCounter,
    pub prompt_cache_disk_read_bytes: IntCounter,
    pub prompt_cache_disk_writes: IntCounter,
    pub prompt_cache_disk_written_bytes: IntCounter,
    /// From the arrival in the queue to the first generated token.
    pub time_to_first_token_seconds: Histogram,
    /// Between two generated tokens of one request.
    pub inter_token_seconds: Histogram,
    /// From the request's head to the last byte of the answer.
    pub request_seconds: Histogram,
    /// From the arrival in the queue to the start of the prefill.
    pub queue_seconds: Histogram,
    /// From the start of the prefill to the logits after its last token.
    pub prefill_seconds: Histogram,
    /// From there to the end of the answer.
    pub decode_seconds: Histogram,
    /// Tokens of a prompt, cached ones included.
    pub request_prompt_tokens: Histogram,
    /// Tokens of an answer.
    pub request_generated_tokens: Histogram,
    /// Answers by how they ended; [`Metrics::answered`] adds to it.
    pub answers: IntCounterVec,

    /// Routed experts found in a slot.
    pub lookups_prefill_hit: IntCounter,
    /// Routed experts that had to be read.
    pub lookups_prefill_miss: IntCounter,
    /// Routed experts found in a slot, or on their way to one, because a prefetch had asked for them.
    pub lookups_prefill_prefetched: IntCounter,
    pub lookups_decode_hit: IntCounter,
    pub lookups_decode_miss: IntCounter,
    pub lookups_decode_prefetched: IntCounter,
    pub expert_evictions: IntCounter,
    pub expert_slots: IntGauge,
    pub expert_slots_used: IntGauge,
    /// Times that slots were given back.
    pub memory_pressure: IntCounter,
    /// Prefetched experts that a route asked for afterwards.
    pub prefetches_used: IntCounter,
    /// Prefetched experts that were evicted unused.
    pub prefetches_wasted: IntCounter,

    /// Reads asked of the operating system.
    pub ssd_reads: IntCounter,
    /// Bytes those reads returned, from the disk or from the page cache.
    pub ssd_read_bytes: IntCounter,
    /// Bytes that the disk delivered, as the operating system counts them.
    pub ssd_disk_bytes: IntCounter,
    /// Time of one read.
    pub ssd_read_seconds: Histogram,
    /// Time in which the model had nothing to compute for want of an expert.
    pub ssd_stall_seconds: Counter,
    pub ssd_errors: IntCounter,
    /// Time in which a layer was computed and waited for the checksums of its experts.
    pub pack_check_seconds: Counter,
    /// Records of the loaded model's pack that were found damaged.
    pub pack_damaged_records: IntGauge,
    pub gpu_lost: IntGauge,

    /// Passes that verified a draft, by its kind; drafted tokens by kind and outcome.
    pub draft_cycles: IntCounterVec,
    pub draft_tokens: IntCounterVec,
    /// By cycles that were faster than plain steps.
    pub draft_seconds_saved: Counter,
    /// By cycles that were slower.
    pub draft_seconds_lost: Counter,
    /// Rows of the pass that is under way.
    pub draft_width: IntGauge,
    /// The controller's decisions: the times it went over to a state.
    pub draft_states: IntCounterVec,

    pub memory_trunk: IntGauge,
    pub memory_experts: IntGauge,
    pub memory_kv: IntGauge,
    pub memory_state: IntGauge,
    pub memory_workspace: IntGauge,
    pub memory_draft: IntGauge,
    /// Memory that requests hold now, of that which the plan sets aside for them.
    pub memory_requests: IntGauge,
    pub memory_prompt_cache: IntGauge,
    pub memory_limit_bytes: IntGauge,
    /// The process, as the system counts it; measured when somebody asks.
    process_memory: IntGaugeVec,
}

impl Metrics {
    /// A registry of its own, so that two servers in one process do not share counts. `device` is as in `/health`.
    pub fn new(version: &str, device: &str) -> Arc<Self> {
        let registry = Registry::new();
        let r = &registry;

        let prompt =
            counters(r, "moestro_prompt_tokens_total", "Prompt tokens by where their state came from", &["source"]);
        let lookups = counters(
            r,
            "moestro_expert_lookups_total",
            "Routed experts by phase and by whether they were in memory",
            &["phase", "result"],
        );
        let prefetches =
            counters(r, "moestro_expert_prefetches_total", "Prefetched experts by what became of them", &["outcome"]);
        let drafts = counters(
            r,
            "moestro_draft_tokens_total",
            "Drafted tokens by the draft's kind and by what became of them",
            &["kind", "outcome"],
        );
        let hits = counters(
            r,
            "moestro_prompt_cache_hits_total",
            "Prompts by where their beginning was known from",
            &["source"],
        );
        let cache_bytes = gauges(r, "moestro_prompt_cache_bytes", "Bytes of checkpoints, by place", &["place"]);
        let checkpoints = gauges(r, "moestro_prompt_cache_checkpoints", "Checkpoints, by place", &["place"]);
        let evictions = counters(
            r,
            "moestro_prompt_cache_evictions_total",
            "Checkpoints that gave way to others, by place",
            &["place"],
        );
        let memory = gauges(r, "moestro_memory_bytes", "Memory held, by kind", &["kind"]);
        let answers = counters(r, "moestro_answers_total", "Answers by how they ended", &["finish_reason"]);
        for reason in ["stop", "length", "tool_calls", "cancelled", "error"] {
            answers.with_label_values(&[reason]);
        }
        let labels = ["version", "device", "model"];
        let info = gauges(r, "moestro_build_info", "Always 1; the labels say what is running", &labels);
        info.with_label_values(&[version, device, ""]).set(1);
        #[cfg(target_os = "linux")]
        r.register(Box::new(prometheus::process_collector::ProcessCollector::for_self())).expect("registered once");

        Arc::new(Self {
            info,
            running: Mutex::new([version.into(), device.into(), String::new()]),
            answers,
            requests: counters(
                r,
                "moestro_requests_total",
                "Finished HTTP requests by endpoint and status",
                &["endpoint", "status"],
            ),
            requests_running: gauge(r, "moestro_requests_running", "Requests the model is working on"),
            requests_queued: gauge(r, "moestro_requests_queued", "Requests waiting for the model"),
            prompt_tokens_computed: prompt.with_label_values(&["computed"]),
            prompt_tokens_cached: prompt.with_label_values(&["cached"]),
            generated_tokens: counter(r, "moestro_generated_tokens_total", "Generated tokens"),
            prompt_cache_hits_session: hits.with_label_values(&["session"]),
            prompt_cache_hits_memory: hits.with_label_values(&["memory"]),
            prompt_cache_misses: counter(r, "moestro_prompt_cache_misses_total", "Prompts of which nothing was known"),
            prompt_cache_hit_tokens: histogram(
                r,
                "moestro_prompt_cache_hit_tokens",
                "Known tokens of prompts of which some were known",
                DEPTH,
            ),
            prompt_cache_bytes_memory: cache_bytes.with_label_values(&["memory"]),
            prompt_cache_checkpoints_memory: checkpoints.with_label_values(&["memory"]),
            prompt_cache_evictions_memory: evictions.with_label_values(&["memory"]),
            prompt_cache_hits_disk: hits.with_label_values(&["disk"]),
            prompt_cache_bytes_disk: cache_bytes.with_label_values(&["disk"]),
            prompt_cache_checkpoints_disk: checkpoints.with_label_values(&["disk"]),
            prompt_cache_evictions_disk: evictions.with_label_values(&["disk"]),
            prompt_cache_disk_reads: counter(
                r,
                "moestro_prompt_cache_disk_reads_total",
                "Checkpoints read back from the disk",
            ),
            prompt_cache_disk_read_bytes: counter(
                r,
                "moestro_prompt_cache_disk_read_bytes_total",
                "Bytes of checkpoints read back from the disk",
            ),
            prompt_cache_disk_writes: counter(
                r,
                "moestro_prompt_cache_disk_writes_total",
                "Checkpoints written to the disk",
            ),
            prompt_cache_disk_written_bytes: counter(
                r,
                "moestro_prompt_cache_disk_written_bytes_total",
                "Bytes of checkpoints written to the disk",
            ),
            time_to_first_token_seconds: histogram(
                r,
                "moestro_time_to_first_token_seconds",
                "From the arrival in the queue to the first generated token",
                FIRST_TOKEN,
            ),
            inter_token_seconds: histogram(
                r,
                "moestro_inter_token_seconds",
                "Between two generated tokens of one request",
                INTER_TOKEN,
            ),
            request_seconds: histogram(
                r,
                "moestro_request_seconds",
                "From the head of a generation request to the last byte of its answer",
                REQUEST,
            ),
            queue_seconds: histogram(
                r,
                "moestro_queue_seconds",
                "From the arrival in the queue to the start of the prefill",
                QUEUE,
            ),
            prefill_seconds: histogram(
                r,
                "moestro_prefill_seconds",
                "From the start of the prefill to the logits after the prompt's last token",
                REQUEST,
            ),
            decode_seconds: histogram(
                r,
                "moestro_decode_seconds",
                "From the end of the prefill to the end of the answer",
                REQUEST,
            ),
            request_prompt_tokens: histogram(
                r,
                "moestro_request_prompt_tokens",
                "Tokens of a prompt, cached ones included",
                DEPTH,
            ),
            request_generated_tokens: histogram(r, "moestro_request_generated_tokens", "Tokens of an answer", DEPTH),

            lookups_prefill_hit: lookups.with_label_values(&["prefill", "hit"]),
            lookups_prefill_miss: lookups.with_label_values(&["prefill", "miss"]),
            lookups_prefill_prefetched: lookups.with_label_values(&["prefill", "prefetched"]),
            lookups_decode_hit: lookups.with_label_values(&["decode", "hit"]),
            lookups_decode_miss: lookups.with_label_values(&["decode", "miss"]),
            lookups_decode_prefetched: lookups.with_label_values(&["decode", "prefetched"]),
            expert_evictions: counter(r, "moestro_expert_evictions_total", "Experts that gave up their slot"),
            expert_slots: gauge(r, "moestro_expert_slots", "Slots for experts"),
            expert_slots_used: gauge(r, "moestro_expert_slots_used", "Slots that hold an expert"),
            memory_pressure: counter(
                r,
                "moestro_memory_pressure_total",
                "Times that slots were given back for want of memory",
            ),
            prefetches_used: prefetches.with_label_values(&["used"]),
            prefetches_wasted: prefetches.with_label_values(&["wasted"]),

            ssd_reads: counter(r, "moestro_ssd_reads_total", "Reads of experts asked of the operating system"),
            ssd_read_bytes: counter(
                r,
                "moestro_ssd_read_bytes_total",
                "Bytes those reads returned, from the disk or from the page cache",
            ),
            ssd_disk_bytes: counter(
                r,
                "moestro_ssd_disk_bytes_total",
                "Bytes the disk delivered, as the operating system counts them",
            ),
            ssd_read_seconds: histogram(r, "moestro_ssd_read_seconds", "Time of one read", READ),
            ssd_stall_seconds: seconds(
                r,
                "moestro_ssd_stall_seconds_total",
                "Time in which the model had nothing to compute for want of an expert",
            ),
            ssd_errors: counter(r, "moestro_ssd_errors_total", "Reads that failed or came up short"),
            pack_check_seconds: seconds(
                r,
                "moestro_pack_check_seconds_total",
                "Time in which a layer was computed and waited for its experts' checksums",
            ),
            pack_damaged_records: gauge(
                r,
                "moestro_pack_damaged_records",
                "Damaged records of the model's pack, which are read from the checkpoint instead",
            ),
            gpu_lost: gauge(
                r,
                "moestro_gpu_lost",
                "1 if the model's GPU was given up and the CPU computes in its place",
            ),

            draft_cycles: counters(
                r,
                "moestro_draft_cycles_total",
                "Passes that verified a draft, by its kind",
                &["kind"],
            ),
            draft_tokens: drafts,
            draft_seconds_saved: seconds(
                r,
                "moestro_draft_seconds_saved_total",
                "Time saved by cycles that were faster than as many plain steps",
            ),
            draft_seconds_lost: seconds(
                r,
                "moestro_draft_seconds_lost_total",
                "Time lost by cycles that were slower than as many plain steps",
            ),
            draft_width: gauge(r, "moestro_draft_width", "Rows of the pass that is under way: 1 is a plain step"),
            draft_states: counters(r, "moestro_draft_states_total", "States that drafting went over to", &["state"]),

            memory_trunk: memory.with_label_values(&["trunk"]),
            memory_experts: memory.with_label_values(&["experts"]),
            memory_kv: memory.with_label_values(&["kv"]),
            memory_state: memory.with_label_values(&["state"]),
            memory_workspace: memory.with_label_values(&["workspace"]),
            memory_draft: memory.with_label_values(&["draft"]),
            memory_requests: memory.with_label_values(&["requests"]),
            memory_prompt_cache: memory.with_label_values(&["prompt_cache"]),
            memory_limit_bytes: gauge(r, "moestro_memory_limit_bytes", "The memory plan's limit"),
            process_memory: gauges(r, "moestro_process_memory_bytes", "Memory of the process, measured", &["kind"]),
            board: Mutex::default(),
            registry,
        })
    }

    /// The model computes on `device` after all, and not where [`Metrics::new`] expected it.
    pub fn runs_on(&self, device: &str) {
        self.says(1, device);
    }

    /// The model that is loaded.
    pub fn serves(&self, model: &str) {
        self.says(2, model);
    }

    fn says(&self, label: usize, value: &str) {
        let mut running = self.running.lock();
        running[label] = value.into();
        self.info.reset();
        self.info.with_label_values(&*running).set(1);
    }

    /// Counts an answer that has ended, for one of the reasons that are there from the start.
    pub fn answered(&self, finish_reason: &str, prompt_tokens: usize, generated_tokens: usize) {
        self.answers.with_label_values(&[finish_reason]).inc();
        self.request_prompt_tokens.observe(prompt_tokens as f64);
        self.request_generated_tokens.observe(generated_tokens as f64);
    }

    /// Counts one finished request. `endpoint` must come from a fixed set (the router's paths), never from the client.
    pub fn request(&self, endpoint: &str, status: u16) {
        self.requests.with_label_values(&[endpoint, &status.to_string()]).inc();
    }
}

#[cfg(test)]
mod tests;
