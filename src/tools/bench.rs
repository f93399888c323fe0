//! `moestro bench`: measures prefill and decode on this machine, with hit rates, disk reads and stalls.

mod drafts;
mod image;
mod quality;
mod report;
pub(super) mod run;

use crate::command::{
    checkpoint_meta::resolve,
    device_choice::{self, DeviceChoice},
    load::{load_weights, options},
    local_models,
    text::show,
};
use crate::{
    cli,
    config::{self, LoadSettings, ModelSource, config_file::Settings},
    error::CommandError,
};
use moestro_base::{
    error::StoreError,
    metrics::Metrics,
    platform::{Access, DataFile, os},
};
use moestro_chat::Tokenizer;
use moestro_model::model::{self, Model, Qwen};
use report::{BenchReport, BenchSetup, median_run};
use run::BenchSession;
use std::{path::Path, sync::Arc};

/// Default prompt: plain English, included in the binary. The prompt is text, because a router chooses different
/// experts for random tokens.
const TEXT: &str = include_str!("../../LICENSE-APACHE");

pub fn run(args: cli::tool_args::BenchArgs, settings: &Settings) -> Result<(), CommandError> {
    let source = ModelSource::new(args.model.model.as_deref());
    let load = LoadSettings::new(args.load).map_err(CommandError::Usage)?;
    let dir = resolve(&source)?;
    let prompt = prompt(&dir, args.text.as_deref(), args.prompt_tokens)?;
    if args.quality {
        return quality::run(&dir, &load, &prompt, args.gen_tokens, args.json);
    }
    if let Some(draft_model) = args.draft_model {
        let num_draft_tokens = args.num_draft_tokens;
        let speculation = args.speculation;
        let drafts = cli::model_args::DraftArgs { draft_model, num_draft_tokens, speculation };
        let load = LoadSettings { drafts: Some(drafts), ..load };
        return drafts::run(&dir, &load, &prompt, args.gen_tokens, args.repeat, args.json);
    }
    let options = options(&load);
    let needed = args.prompt_tokens + args.gen_tokens;
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let (sessions, runs_each) = if args.cold { (args.repeat, 1) } else { (1, args.repeat) };
    let mut runs = Vec::new();
    let mut setup = None;
    for _ in 0..sessions {
        let mut model = load_model(&dir, &load, options.clone(), needed, &metrics)?;
        setup = Some(BenchSetup::new(device_choice::name(&model), &model, &load));
        if let Some(file) = &args.image {
            return image::run(&mut model, file, &prompt, args.repeat, args.json);
        }
        if args.cold {
            drop_cached(&dir)?;
        }
        let mut session = BenchSession { model, metrics: metrics.clone() };
        for _ in 0..runs_each {
            runs.push(session.run(&prompt, args.gen_tokens)?);
        }
    }
    let model = local_models::id(&source, settings);
    let Some(setup) = setup else { return Ok(()) };
    let median = median_run(&runs);
    let peak_memory = os::peak_resident_memory();
    show(&BenchReport { model, setup, cold: args.cold, runs, median, peak_memory }, args.json);
    Ok(())
}

/// Loads the model on the device that `load` selects. Fails if the context has fewer than `needed` tokens.
fn load_model(
    dir: &Path,
    load: &LoadSettings,
    mut options: model::LoadOptions,
    needed: usize,
    metrics: &Arc<Metrics>,
) -> Result<Qwen, CommandError> {
    // Without this, a run would start with the experts that an earlier run saved, and runs could not be compared.
    options.store.warm = false;
    let device = DeviceChoice::new(load)?;
    options.gpu = device.working_set();
    let model = device.place(load_weights(dir, &config::name(dir), &options, metrics)?)?;
    let context = model.info().context;
    if context < needed {
        return Err(CommandError::Usage(format!("the context is {context} tokens; use --ctx-size {needed}")));
    }
    Ok(model)
}

/// `count` tokens of the file or of [`TEXT`]. A text that is too short is repeated. Without a tokenizer, the bytes of
/// the text are mapped to ids over the whole vocabulary.
fn prompt(dir: &Path, file: Option<&Path>, count: usize) -> Result<Vec<u32>, CommandError> {
    let read =
        |path: &Path| std::fs::read_to_string(path).map_err(CommandError::io(format!("--text {}", path.display())));
    let text = file.map_or_else(|| Ok(TEXT.into()), read)?;
    if text.is_empty() {
        return Err(CommandError::Usage("the text is empty".into()));
    }
    let ids: Vec<u32> = if dir.join("tokenizer.json").exists() {
        Tokenizer::load(dir)?.encode(&text)?
    } else {
        let vocab = model::Config::read(dir)?.vocab;
        text.bytes().map(|byte| (byte as usize * 7919 % vocab) as u32).collect()
    };
    Ok(ids.iter().copied().cycle().take(count).collect())
}

/// Removes the checkpoint's files from the page cache.
fn drop_cached(dir: &Path) -> Result<(), StoreError> {
    let index = moestro_model::checkpoint::index::Index::open(dir)?;
    for path in &index.files {
        let file = DataFile::open(path, Access::Buffered).map_err(StoreError::at(path))?;
        file.drop_cached(0, file.len() as usize);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_has_requested_length() {
        let dir = crate::demo::unpack().unwrap();
        let long = prompt(&dir, None, 10_000).unwrap();
        assert_eq!(long.len(), 10_000);
        assert_eq!(prompt(&dir, None, 7).unwrap(), long[..7]);
        let file = dir.join("config.json");
        assert_ne!(prompt(&dir, Some(&file), 7).unwrap(), long[..7]);
        assert!(prompt(&dir, Some(&dir.join("none")), 7).is_err());
    }
}
