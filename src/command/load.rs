//! Loads a model: options from the flags, the draft, the weights, the device, and the engine's thread.

use super::{
    checkpoint_meta::CheckpointMeta,
    device_choice::{self, DeviceChoice},
    draft_source::DraftSource,
    progress,
};
use crate::{
    cli::model_args::DraftArgs,
    config::LoadSettings,
    error::CommandError,
    http::{HostedModel, LoadedModel, ModelCard, RequestLimits},
};
use moestro_base::metrics::Metrics;
use moestro_chat::grammar::GrammarCompiler;
use moestro_compute::experts::ReadMode;
use moestro_engine as engine;
use moestro_model::{
    model::{self, CheckpointInfo, Model, Qwen, StoreOptions, VisionOptions, config::FfnShape},
    plan::{MachineLimits, Plan, PlanOptions, Size},
};
use serde_json::Value;
use std::{
    io::{self, IsTerminal},
    path::Path,
    sync::Arc,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// Adds the speculation flags to the engine's options.
pub fn speculation(drafts: Option<&DraftArgs>, options: engine::Options) -> engine::Options {
    let Some(drafts) = drafts.filter(|drafts| drafts.are_used()) else { return options };
    engine::Options { speculate: drafts.speculation, draft_tokens: drafts.num_draft_tokens, ..options }
}

/// Starts the engine's thread.
pub fn start_engine(
    model: Qwen,
    draft: Box<dyn engine::Draft<Qwen>>,
    options: engine::Options,
    metrics: Arc<Metrics>,
) -> Result<(engine::Handle, engine::Worker), CommandError> {
    engine::spawn_with(model, draft, options, metrics).map_err(CommandError::io("starting the engine thread"))
}

/// Starts the engine of a loaded model with these speculation flags, and makes the model ready for requests. `options`
/// has what a server sets.
pub fn host_model(
    id: &str,
    checkpoint: CheckpointMeta,
    loaded: ReadyModel,
    drafts: Option<&DraftArgs>,
    options: engine::Options,
    metrics: &Arc<Metrics>,
) -> Result<HostedModel, CommandError> {
    let quantization = checkpoint.quantization();
    let defaults = checkpoint.generation.sampling();
    let CheckpointMeta { tokenizer, template, generation, .. } = checkpoint;
    let grammars = Arc::new(GrammarCompiler::new(tokenizer.clone(), &generation.eos));
    let options = engine::Options {
        eos: generation.eos,
        usable_vocab: tokenizer.vocab_size().min(loaded.model.info().vocab),
        prompt_cache: loaded.model.plan().prompt_cache,
        ..speculation(drafts, options)
    };
    let (engine, worker) = start_engine(loaded.model, loaded.draft, options, metrics.clone())?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let model = LoadedModel {
        engine,
        tokenizer,
        grammars,
        template,
        card: ModelCard { id: id.into(), created, experts_per_token: loaded.experts_per_token, quantization },
        defaults,
        thinking: None,
        limits: RequestLimits::default(),
        plan: loaded.plan,
    };
    // The engine writes its snapshots before it ends.
    Ok(HostedModel { id: id.into(), model, unload: Box::new(move || drop(worker.join())) })
}

/// A loaded model with its draft.
pub struct ReadyModel {
    pub model: Qwen,
    /// The draft. The default is prompt lookup.
    pub draft: Box<dyn engine::Draft<Qwen>>,
    /// Name of the device: `cpu`, `metal` or `cuda`.
    pub device: &'static str,
    /// Number of experts per token. `None` for a dense model.
    pub experts_per_token: Option<usize>,
    /// The memory plan, with the name of the device.
    pub plan: serde_json::Value,
    /// Number of bytes that the plan reserves for requests.
    pub requests: u64,
}

/// Converts the loading flags to the model's options.
pub fn options(load: &LoadSettings) -> model::LoadOptions {
    let cores = thread::available_parallelism().map_or(usize::MAX, usize::from);
    let flags = &load.flags;
    if let Some(threads) = flags.threads.filter(|&threads| threads > cores) {
        tracing::warn!(
            "--threads {threads}: this machine has {cores} cores; more threads than cores slow decoding down"
        );
    }
    model::LoadOptions {
        threads: flags.threads,
        plan: PlanOptions {
            prompt_cache: load.prompt_cache,
            limit: flags.memory_limit,
            stream: flags.stream_experts.decided(),
            context: flags.ctx_size,
            chunk: flags.prefill_chunk,
            parallel: load.parallel,
            sequences: 1,
            serving: load.serving,
            buffered: flags.expert_io == ReadMode::Buffered,
        },
        experts_per_token: flags.experts_per_token,
        max_experts_per_token: load.max_experts_per_token,
        verify: load.drafts.as_ref().is_some_and(DraftArgs::are_used),
        kv_bits: flags.kv_bits,
        vision: VisionOptions { disabled: flags.no_vision, max_tokens: flags.image_max_tokens },
        store: StoreOptions {
            slots: None,
            io: flags.expert_io,
            threads: flags.io_threads,
            prefetch: flags.prefetch,
            warm: true,
            ..StoreOptions::default()
        },
        gpu_awake: flags.gpu_awake.decided(),
        ..model::LoadOptions::default()
    }
}

/// Inspects the draft, and returns it with the options of the model.
fn inspect_draft(
    checkpoint: &CheckpointMeta,
    load: &LoadSettings,
    gpu: Option<u64>,
) -> Result<(DraftSource, model::LoadOptions), CommandError> {
    let found = DraftSource::new(load, &checkpoint.dir, Some(&checkpoint.tokenizer))?;
    let options = model::LoadOptions { gpu, draft: found.footprint(), drafter: found.drafter(), ..options(load) };
    Ok((found, options))
}

/// Checks a model's tensors and memory plan as [`load_model`] does, without loading the weights. `gpu` is the GPU's
/// working set. The plan counts no memory for the process itself, whose memory includes another model now.
pub fn check_model(checkpoint: &CheckpointMeta, load: &LoadSettings, gpu: Option<u64>) -> Result<(), CommandError> {
    let (_, options) = inspect_draft(checkpoint, load, gpu)?;
    let limits = MachineLimits { process: 0, ..MachineLimits::here(gpu) };
    CheckpointInfo::new(&checkpoint.dir, &options)?.plan(&limits, &options.plan)?;
    Ok(())
}

/// Loads a model on the CPU and shows a progress bar.
pub fn load_weights(
    dir: &Path,
    name: &str,
    options: &model::LoadOptions,
    metrics: &Arc<Metrics>,
) -> Result<Qwen, CommandError> {
    let bar = progress::bytes(0, format!("Loading {name}"));
    let model = Qwen::load(dir, options, metrics, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(model?)
}

/// Loads a model with its draft, and moves it to the chosen device.
pub fn load_model(
    checkpoint: &CheckpointMeta,
    load: &LoadSettings,
    chosen: DeviceChoice,
    metrics: &Arc<Metrics>,
) -> Result<ReadyModel, CommandError> {
    let (found, options) = inspect_draft(checkpoint, load, chosen.working_set())?;
    let model = load_weights(&checkpoint.dir, &checkpoint.name, &options, metrics)?;
    let model = chosen.place(model)?;
    let draft = found.load(&model)?;
    if let Some(images) = model.info().images {
        tracing::info!(most_tokens = images.max_tokens(), "the model reads images");
    }
    let device = device_choice::name(&model);
    metrics.set_device(device);
    let experts_per_token = match model.config().ffn {
        FfnShape::Moe { k, .. } => Some(k),
        FfnShape::Dense { .. } => None,
    };
    log_for_files(&format!("memory plan of {}: {}", checkpoint.name, plan_line(model.plan())));
    let requests = model.plan().requests;
    let mut plan = serde_json::to_value(model.plan()).unwrap_or_default();
    plan["device"] = device.into();
    plan["reserved"] = model.plan().total().into();
    Ok(ReadyModel { model, draft, device, experts_per_token, plan, requests })
}

/// Logs a line whose content a server on a terminal also prints, so the log on a terminal has it at DEBUG only.
pub fn log_for_files(line: &str) {
    if io::stdout().is_terminal() && io::stderr().is_terminal() {
        tracing::debug!("{line}");
    } else {
        tracing::info!("{line}");
    }
}

/// Describes a memory plan in one line: `2.51 GiB of 8.00 GiB: trunk 1.20 GiB, ...; 24 % of the experts in memory,
/// context 32768 tokens`.
fn plan_line(plan: &Plan) -> String {
    let parts = [
        ("trunk", plan.trunk),
        ("experts", plan.experts),
        ("keys and values", plan.kv),
        ("workspace", plan.workspace),
        ("prompt cache", plan.prompt_cache),
        ("draft", plan.draft),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| format!("{name} {}", Size(*bytes)));
    let parts: Vec<String> = parts.collect();
    let residency = describe_residency(plan.residency);
    let total = Size(plan.total());
    let limit = Size(plan.limit);
    format!("{total} of {limit}: {}; {residency}, context {} tokens", parts.join(", "), plan.context)
}

/// Describes a memory plan: `on cpu, all experts in memory, context 32768`.
pub fn describe_plan(plan: &Value) -> String {
    let device = plan["device"].as_str().unwrap_or("?");
    let experts = describe_residency(plan["residency"].as_f64().unwrap_or(1.0));
    format!("on {device}, {experts}, context {}", plan["context"])
}

fn describe_residency(share: f64) -> String {
    if share < 1.0 {
        format!("{:.0} % of the experts in memory", share * 100.0)
    } else {
        "all experts in memory".into()
    }
}
