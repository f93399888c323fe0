//! Metrics. One table declares all families, and `docs/metrics.md` is generated from this table.
//!
//! Modules hold an `Arc<Metrics>` and count events where they happen. `GET /metrics` renders all metrics. The children
//! of families with labels are looked up at the start, so that counting on a hot path is one atomic addition. Units are
//! base units (seconds, bytes). `process_*` are the standard metrics of Prometheus's own libraries. A value that the
//! system does not report is omitted.

mod exposition;
mod families;
mod heatmap;

use crate::platform::os;
pub use exposition::{OPENMETRICS, PROMETHEUS};
use families::{FIRST_TOKEN, INTER_TOKEN, QUEUE, READ, REQUEST, ROWS, SEQUENCES, TOKENS};
pub use heatmap::ExpertHeatmap;
use parking_lot::Mutex;
use prometheus::{Counter, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};
use std::sync::Arc;

/// Type of a field. If the table writes `family` after the field, the field is the whole family. Otherwise the field is
/// the child with the listed label values.
macro_rules! field_type {
    (counter family) => {
        IntCounterVec
    };
    (counter $values:tt) => {
        IntCounter
    };
    (seconds $values:tt) => {
        Counter
    };
    (gauge family) => {
        IntGaugeVec
    };
    (gauge $values:tt) => {
        IntGauge
    };
    (histogram $values:tt) => {
        Histogram
    };
}

macro_rules! field_value {
    ($family:ident family) => {
        $family.clone()
    };
    ($family:ident $values:tt) => {{
        let values: &[&str] = &$values;
        $family.with_label_values(values)
    }};
}

/// Declares the metrics: `kind "name" [labels] (buckets) "help" => field [label values], ...;`
macro_rules! metrics {
    ($($kind:ident $name:literal $labels:tt $(($buckets:ident))? $help:literal => $($field:ident $values:tt),+;)+) => {
        /// All metrics. A field is named after its metric and the values of its labels.
        pub struct Metrics {
            registry: Registry,
            heatmap: Mutex<Arc<ExpertHeatmap>>,
            /// Labels of `build_info`: version, device, model.
            build: Mutex<[String; 3]>,
            $($(#[doc = $help] pub $field: field_type!($kind $values),)+)+
        }

        impl Metrics {
            fn register(registry: Registry) -> Self {
                $(
                    let buckets: &[&[f64]] = &[$($buckets)?];
                    let family = families::$kind(&registry, $name, $help, &$labels, &buckets.concat());
                    $(let $field = field_value!(family $values);)+
                )+
                let heatmap = Mutex::new(Arc::new(ExpertHeatmap::new(0, 0, Vec::new)));
                Self { registry, heatmap, build: Mutex::default(), $($($field,)+)+ }
            }
        }

        /// Kind, name, labels and help of every family.
        #[cfg(test)]
        const FAMILIES: &[(&str, &str, &[&str], &str)] = &[$((stringify!($kind), $name, &$labels, $help)),+];
    };
}

metrics! {
    counter "moestro_requests_total" ["endpoint", "status"] "Finished HTTP requests by path (`other`: unknown) and status (499: the client disconnected)" =>
        requests family;
    gauge "moestro_requests_running" [] "Requests that the model is working on" => requests_running [];
    gauge "moestro_requests_queued" [] "Requests that wait for the model" => requests_queued [];
    counter "moestro_admitted_tokens_total" [] "Prompt tokens of requests that left the queue" => admitted_tokens [];
    counter "moestro_preemptions_total" []
        "Sequences that were dropped because older requests needed their memory; they are computed again" =>
        preemptions [];
    histogram "moestro_step_sequences" [] (SEQUENCES) "Sequences of a decode pass" => step_sequences [];
    histogram "moestro_step_rows" [] (ROWS) "Rows of a pass: of a prompt's chunk, or of the sequences that decode" => step_rows [];
    counter "moestro_answers_total" ["finish_reason"] "Answers by how they ended" => answers family;
    counter "moestro_prompt_tokens_total" ["source"] "Prompt tokens, computed or reused from the prompt cache" =>
        prompt_tokens_computed ["computed"], prompt_tokens_cached ["cached"];
    counter "moestro_generated_tokens_total" [] "Generated tokens" => generated_tokens [];
    histogram "moestro_request_prompt_tokens" [] (TOKENS) "Tokens of a prompt, cached tokens included" =>
        request_prompt_tokens [];
    histogram "moestro_request_generated_tokens" [] (TOKENS) "Tokens of an answer" => request_generated_tokens [];

    histogram "moestro_queue_seconds" [] (QUEUE) "Time in the queue" => queue_seconds [];
    histogram "moestro_prefill_seconds" [] (REQUEST)
        "Time from the start of the prefill to the logits of the last prompt token" =>
        prefill_seconds [];
    histogram "moestro_decode_seconds" [] (REQUEST) "Time from the end of the prefill to the end of the answer" =>
        decode_seconds [];
    histogram "moestro_time_to_first_token_seconds" [] (FIRST_TOKEN)
        "Time from arrival in the queue to the first generated token" =>
        time_to_first_token_seconds [];
    histogram "moestro_inter_token_seconds" [] (INTER_TOKEN) "Time between two generated tokens of one request" =>
        inter_token_seconds [];
    histogram "moestro_request_seconds" [] (REQUEST)
        "Time from the head of a generation request to the last byte of its answer" => request_seconds [];

    counter "moestro_prompt_cache_hits_total" ["source"] "Prompts that reused a prefix, by where it was stored" =>
        prompt_cache_hits_session ["session"], prompt_cache_hits_memory ["memory"], prompt_cache_hits_disk ["disk"];
    counter "moestro_prompt_cache_misses_total" [] "Prompts without a cached prefix" => prompt_cache_misses [];
    histogram "moestro_prompt_cache_hit_tokens" [] (TOKENS) "Reused tokens of a prompt that reused any" =>
        prompt_cache_hit_tokens [];
    gauge "moestro_prompt_cache_bytes" ["place"] "Bytes of snapshots" =>
        prompt_cache_bytes_memory ["memory"], prompt_cache_bytes_disk ["disk"];
    gauge "moestro_prompt_cache_checkpoints" ["place"] "Snapshots" =>
        prompt_cache_snapshots_memory ["memory"], prompt_cache_snapshots_disk ["disk"];
    counter "moestro_prompt_cache_evictions_total" ["place"] "Evicted snapshots" =>
        prompt_cache_evictions_memory ["memory"], prompt_cache_evictions_disk ["disk"];
    counter "moestro_prompt_cache_disk_reads_total" [] "Snapshots read from disk" => prompt_cache_disk_reads [];
    counter "moestro_prompt_cache_disk_read_bytes_total" [] "Bytes of snapshots read from disk" =>
        prompt_cache_disk_read_bytes [];
    counter "moestro_prompt_cache_disk_writes_total" [] "Snapshots written to disk" => prompt_cache_disk_writes [];
    counter "moestro_prompt_cache_disk_written_bytes_total" [] "Bytes of snapshots written to disk" =>
        prompt_cache_disk_written_bytes [];

    counter "moestro_expert_lookups_total" ["phase", "result"]
        "Experts that the router selected: in a slot, read on demand, or already requested by a prefetch" =>
        lookups_prefill_hit ["prefill", "hit"], lookups_prefill_miss ["prefill", "miss"],
        lookups_prefill_prefetched ["prefill", "prefetched"], lookups_decode_hit ["decode", "hit"],
        lookups_decode_miss ["decode", "miss"], lookups_decode_prefetched ["decode", "prefetched"];
    counter "moestro_expert_prefetches_total" ["outcome"] "Prefetched experts: selected later, or evicted unused" =>
        prefetches_used ["used"], prefetches_wasted ["wasted"];
    counter "moestro_expert_evictions_total" [] "Evicted experts" => expert_evictions [];
    gauge "moestro_expert_slots" [] "Expert slots" => expert_slots [];
    gauge "moestro_expert_slots_used" [] "Expert slots that hold an expert" => expert_slots_used [];

    counter "moestro_ssd_reads_total" [] "Reads of experts" => ssd_reads [];
    counter "moestro_ssd_read_bytes_total" []
        "Bytes that reads of experts returned, from the disk or from the page cache" =>
        ssd_read_bytes [];
    counter "moestro_ssd_disk_bytes_total" [] "Bytes that the disk delivered, as the operating system counts them" =>
        ssd_disk_bytes [];
    histogram "moestro_ssd_read_seconds" [] (READ) "Duration of a read" => ssd_read_seconds [];
    seconds "moestro_ssd_stall_seconds_total" [] "Time in which the model waited for experts" => ssd_stall_seconds [];
    counter "moestro_ssd_errors_total" [] "Reads that failed or returned too few bytes" => ssd_errors [];
    seconds "moestro_pack_check_seconds_total" [] "Time in which a layer waited for checksums of its experts" =>
        pack_check_seconds [];
    counter "moestro_ngram_rows_total" ["source"] "Rows of the n-gram table, from its cache or read from the disk" =>
        ngram_rows_cached ["cache"], ngram_rows_read ["disk"];
    counter "moestro_ngram_read_bytes_total" [] "Bytes of rows of the n-gram table read from the disk" =>
        ngram_read_bytes [];
    seconds "moestro_ngram_stall_seconds_total" [] "Time in which the model waited for rows of the n-gram table" =>
        ngram_stall_seconds [];
    gauge "moestro_pack_damaged_records" []
        "Damaged records of the loaded pack; they are read from the checkpoint instead" =>
        pack_damaged_records [];
    counter "moestro_images_total" ["source"] "Times that a pass needed an image's rows: computed by the vision tower, or cached" =>
        images_tower ["tower"], images_cache ["cache"];
    seconds "moestro_vision_tower_seconds_total" [] "Time in which the vision tower computed" =>
        vision_tower_seconds [];
    counter "moestro_gpu_router_waits_total" []
        "Times that a streamed model waited for the GPU to read which experts its routers selected" => gpu_router_waits [];
    counter "moestro_gpu_skipped_launches_total" []
        "GPU launches that did nothing useful, because an earlier layer selected an expert that was not in memory" =>
        gpu_skipped_launches [];
    counter "moestro_gpu_interactivity_errors_total" []
        "Passes of a request that macOS ended because they delayed the screen" => gpu_interactivity_errors [];
    gauge "moestro_gpu_lost" [] "1 if the GPU failed and the CPU computes instead" => gpu_lost [];

    counter "moestro_draft_cycles_total" ["kind"] "Passes that verified a draft" => draft_cycles family;
    counter "moestro_draft_tokens_total" ["kind", "outcome"] "Drafted tokens: accepted or rejected" =>
        draft_tokens family;
    seconds "moestro_draft_seconds_saved_total" [] "Time saved by cycles that were faster than plain steps" =>
        draft_seconds_saved [];
    seconds "moestro_draft_seconds_lost_total" [] "Time lost by cycles that were slower than plain steps" =>
        draft_seconds_lost [];
    gauge "moestro_draft_width" [] "Rows of the current pass; 1 is a plain step" => draft_width [];
    counter "moestro_draft_states_total" ["state"] "Changes of the draft controller's state" => draft_states family;

    gauge "moestro_memory_bytes" ["kind"] "Memory that the plan reserves, whether or not it is in use" =>
        memory_process ["process"], memory_trunk ["trunk"], memory_experts ["experts"], memory_kv ["kv"], memory_state ["state"],
        memory_workspace ["workspace"], memory_vision ["vision"], memory_draft ["draft"], memory_requests ["requests"],
        memory_prompt_cache ["prompt_cache"];
    gauge "moestro_request_memory_bytes" [] "Memory in use by requests and stored responses" => request_memory [];
    gauge "moestro_memory_limit_bytes" [] "Limit of the memory plan" => memory_limit_bytes [];
    gauge "moestro_process_memory_bytes" ["kind"] "Memory that the process uses, measured for each scrape; some kinds exist only on Linux or on macOS" =>
        process_memory family;
    seconds "process_cpu_seconds_total" [] "CPU seconds of the process, user and system" => process_cpu_seconds [];
    gauge "process_resident_memory_bytes" [] "Resident memory of the process" => process_resident_memory family;
    gauge "process_virtual_memory_bytes" [] "Address space of the process (Linux)" => process_virtual_memory family;
    gauge "process_open_fds" [] "Open file descriptors" => process_open_fds family;
    gauge "process_max_fds" [] "Limit of open file descriptors" => process_max_fds family;
    gauge "process_threads" [] "Threads of the process (Linux)" => process_threads family;
    gauge "process_start_time_seconds" [] "Start of the process in seconds since 1970 (Linux)" =>
        process_start_time family;
    counter "moestro_memory_pressure_total" [] "Times that expert slots were freed because memory was short" =>
        memory_pressure [];
    gauge "moestro_build_info" ["version", "device", "model"] "Always 1; the labels describe what is running" =>
        build_info family;
}

impl Metrics {
    /// Creates metrics with a separate registry, so that two servers in one process count separately. `device` has the
    /// same names as in `/health`.
    pub fn new(version: &str, device: &str) -> Arc<Self> {
        let metrics = Self::register(Registry::new());
        for reason in ["stop", "length", "tool_calls", "cancelled", "error"] {
            metrics.answers.with_label_values(&[reason]);
        }
        metrics.update_build(|labels| *labels = [version.into(), device.into(), String::new()]);
        Arc::new(metrics)
    }

    /// Changes the device, for example after a GPU failed.
    pub fn set_device(&self, device: &str) {
        self.update_build(|labels| labels[1] = device.into());
    }

    /// Changes the loaded model.
    pub fn set_model(&self, model: &str) {
        self.update_build(|labels| labels[2] = model.into());
    }

    fn update_build(&self, change: impl FnOnce(&mut [String; 3])) {
        let mut labels = self.build.lock();
        change(&mut labels);
        self.build_info.reset();
        self.build_info.with_label_values(&*labels).set(1);
    }

    /// Counts a finished answer. `finish_reason` is one of the values that [`Metrics::new`] creates.
    pub fn record_answer(&self, finish_reason: &str, prompt_tokens: usize, generated_tokens: usize) {
        self.answers.with_label_values(&[finish_reason]).inc();
        self.request_prompt_tokens.observe(prompt_tokens as f64);
        self.request_generated_tokens.observe(generated_tokens as f64);
    }

    /// Counts a finished request. `endpoint` must be one of a fixed set of names, never text from the client.
    pub fn record_request(&self, endpoint: &str, status: u16) {
        self.requests.with_label_values(&[endpoint, &status.to_string()]).inc();
    }

    /// Counts a pass that verified a draft. `saved` is in seconds, and negative if plain steps would have been faster.
    pub fn record_draft(&self, kind: &str, accepted: usize, rejected: usize, saved: f64) {
        self.draft_cycles.with_label_values(&[kind]).inc();
        self.draft_tokens.with_label_values(&[kind, "accepted"]).inc_by(accepted as u64);
        self.draft_tokens.with_label_values(&[kind, "rejected"]).inc_by(rejected as u64);
        if saved > 0.0 {
            self.draft_seconds_saved.inc_by(saved);
        } else {
            self.draft_seconds_lost.inc_by(-saved);
        }
    }

    /// Creates the heatmap of a model that is being loaded. See [`ExpertHeatmap::new`].
    pub fn new_heatmap(
        &self,
        layers: usize,
        experts_per_layer: usize,
        in_memory: impl Fn() -> Vec<usize> + Send + Sync + 'static,
    ) -> Arc<ExpertHeatmap> {
        let heatmap = Arc::new(ExpertHeatmap::new(layers, experts_per_layer, in_memory));
        *self.heatmap.lock() = heatmap.clone();
        heatmap
    }

    /// The heatmap of the model that was loaded last.
    pub fn heatmap(&self) -> Arc<ExpertHeatmap> {
        self.heatmap.lock().clone()
    }

    /// Resets the metrics that describe a loaded model, after the model was unloaded.
    pub fn clear_model(&self) {
        self.new_heatmap(0, 0, Vec::new);
        let reserved = [
            &self.memory_process,
            &self.memory_trunk,
            &self.memory_experts,
            &self.memory_kv,
            &self.memory_state,
            &self.memory_workspace,
            &self.memory_vision,
            &self.memory_draft,
            &self.memory_requests,
            &self.memory_prompt_cache,
        ];
        reserved.into_iter().chain([&self.expert_slots, &self.expert_slots_used]).for_each(|gauge| gauge.set(0));
    }

    /// Renders all metrics in the Prometheus text format, see [`PROMETHEUS`].
    pub fn render(&self) -> String {
        for (kind, bytes) in os::process_memory() {
            self.process_memory.with_label_values(&[kind]).set(bytes as i64);
        }
        self.measure_process();
        exposition::prometheus(&self.registry)
    }

    fn measure_process(&self) {
        let new_seconds = os::cpu_seconds() - self.process_cpu_seconds.get();
        self.process_cpu_seconds.inc_by(new_seconds.max(0.0));
        let stat = os::process_stat();
        let values = [
            (&self.process_resident_memory, os::resident_memory()),
            (&self.process_virtual_memory, stat.as_ref().map(|stat| stat.virtual_memory)),
            (&self.process_open_fds, os::open_files()),
            (&self.process_max_fds, os::max_files()),
            (&self.process_threads, stat.as_ref().map(|stat| stat.threads)),
            (&self.process_start_time, stat.as_ref().map(|stat| stat.started)),
        ];
        for (gauge, value) in values {
            if let Some(value) = value {
                gauge.with_label_values::<&str>(&[]).set(value as i64);
            }
        }
    }

    /// Renders all metrics in the OpenMetrics text format, see [`OPENMETRICS`].
    pub fn render_openmetrics(&self) -> String {
        exposition::openmetrics(&self.render())
    }
}

#[cfg(test)]
mod tests;
