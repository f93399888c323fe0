//! The draft of `--draft-model`: looked at before the model is loaded, since it is part of the plan, and loaded behind it.

use super::resolve;
use crate::{
    chat::Tokenizer,
    checkpoint::mtp,
    config::{DraftModel, LoadSettings, ModelSource, Switch},
    engine::{self, DRAFT_CONTEXT, DflashDraft, LookupDraft, ModelDraft, MtpDraft},
    error::CommandError,
    metrics::Metrics,
    model::{self, CheckpointInfo, DflashModel, MtpSource, Qwen, config::json, dflash},
    plan::{DraftFootprint, MachineLimits, Plan, PlanOptions},
};
use std::path::{Path, PathBuf};

/// A draft that has been looked at.
pub enum DraftSource {
    Lookup,
    /// An MTP head: the checkpoint's, if it has one, which may have been asked for outright, or one in a directory.
    Mtp {
        asked: bool,
        beside: Option<PathBuf>,
    },
    Dflash(Box<dflash::DflashCheckpoint>),
    /// A small model, and what it takes.
    Model(PathBuf, Box<model::LoadOptions>, Box<Plan>),
}

impl DraftSource {
    /// Looks at the draft that `load` names, for the model in `dir`. The tokens of a draft model are compared with `tokenizer`'s.
    ///
    /// # Errors
    /// A directory that holds no draft, half of one, or one for another model.
    pub fn new(load: &LoadSettings, dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<Self, CommandError> {
        let named = match load.drafts.as_ref().filter(|drafts| drafts.are_used()).map(|drafts| &drafts.draft) {
            None | Some(DraftModel::Off | DraftModel::Lookup) => return Ok(Self::Lookup),
            Some(DraftModel::Auto) => return Ok(Self::Mtp { asked: false, beside: None }),
            Some(DraftModel::Mtp) => return Ok(Self::Mtp { asked: true, beside: None }),
            Some(DraftModel::Model(named)) => named,
        };
        let draft = resolve(&ModelSource::new(Some(named)))?;
        if mtp::is_alone(&json(&draft)?) {
            return Ok(Self::Mtp { asked: true, beside: Some(draft) });
        }
        if dflash::is_dflash(&dflash::config::read(&draft)?) {
            return Ok(Self::Dflash(Box::new(dflash::DflashCheckpoint::new(&draft, &model::Config::read(dir)?)?)));
        }
        if let Some(target) = tokenizer {
            compare(named, &Tokenizer::load(&draft)?, target)?;
        }
        let options = companion(load);
        // Only its sum is of interest: the model's plan is the one that must fit.
        let plan = CheckpointInfo::new(&draft, &options)?.plan(&MachineLimits::default(), &options.plan)?;
        Ok(Self::Model(draft, Box::new(options), Box::new(plan)))
    }

    /// Its demands on memory, where they are known before the model is.
    pub fn shape(&self) -> DraftFootprint {
        match self {
            DraftSource::Lookup | DraftSource::Mtp { .. } => DraftFootprint::default(),
            DraftSource::Dflash(surveyed) => surveyed.shape(),
            DraftSource::Model(_, _, plan) => DraftFootprint { fixed: plan.total(), ..DraftFootprint::default() },
        }
    }

    /// The draft that is loaded together with the model.
    pub fn drafter(&self) -> MtpSource {
        match self {
            DraftSource::Mtp { beside: None, .. } => MtpSource::Checkpoint,
            DraftSource::Mtp { beside: Some(dir), .. } => MtpSource::Directory(dir.clone()),
            _ => MtpSource::None,
        }
    }

    /// Loads it for `model`, whose plan has room for it.
    pub fn load(&self, model: &Qwen) -> Result<Box<dyn engine::Draft<Qwen>>, CommandError> {
        Ok(match self {
            DraftSource::Lookup => Box::new(LookupDraft),
            DraftSource::Mtp { asked, .. } => match MtpDraft::new(model) {
                Some(mtp) => Box::new(mtp),
                None => {
                    if *asked {
                        tracing::warn!("there is no MTP head to draft with: drafts are looked up");
                    }
                    Box::new(LookupDraft)
                }
            },
            DraftSource::Dflash(surveyed) => {
                Box::new(DflashDraft::new(DflashModel::load(surveyed, model.plan().context, model.compute())?))
            }
            DraftSource::Model(dir, options, _) => {
                let options = model::LoadOptions { compute: Some(model.compute()), ..(**options).clone() };
                // Its reads are not the model's: they are counted apart.
                let draft = Qwen::load(dir, &options, &Metrics::new("", ""), &mut |_, _| ())?;
                Box::new(ModelDraft::new(draft))
            }
        })
    }
}

/// A draft model is resident, and has little context.
fn companion(load: &LoadSettings) -> model::LoadOptions {
    let plan = PlanOptions {
        limit: Some(u64::MAX / 2),
        stream: Switch::Off,
        context: Some(DRAFT_CONTEXT),
        chunk: Some(256),
        prompt_cache: Some(0),
        ..PlanOptions::default()
    };
    model::LoadOptions { threads: load.threads, plan, verify: true, ..model::LoadOptions::default() }
}

/// Fails with the first token that the draft has otherwise.
fn compare(named: &str, draft: &Tokenizer, target: &Tokenizer) -> Result<(), CommandError> {
    let missing = draft.vocab_size().min(target.vocab_size()) as u32;
    let fewer = (draft.vocab_size() < target.vocab_size()).then_some(missing);
    let Some(id) = draft.first_difference(target).or(fewer) else { return Ok(()) };
    let name = |tokenizer: &Tokenizer| tokenizer.token(id).map_or("nothing".into(), |token| format!("{token:?}"));
    let why = format!(
        "--draft-model {named}: it has other tokens than the model; the first is {id}, {} there and {} in the model",
        name(draft),
        name(target)
    );
    Err(CommandError::Usage(why))
}
