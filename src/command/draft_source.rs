//! The draft that `--draft-model` names: inspected before the model is loaded, since it is part of the memory plan, and
//! loaded after the model.

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

/// A draft that was inspected.
pub enum DraftSource {
    Lookup,
    /// An MTP head: the checkpoint's, or one in a separate directory. `is_required`: the user named it.
    Mtp {
        is_required: bool,
        directory: Option<PathBuf>,
    },
    Dflash(Box<dflash::DflashCheckpoint>),
    /// A small model, with its options and its own memory plan.
    Model(PathBuf, Box<model::LoadOptions>, Box<Plan>),
}

impl DraftSource {
    /// Inspects the draft that `load` names, for the model in `dir`. A draft model must have the tokens of `tokenizer`.
    ///
    /// # Errors
    /// The directory has no draft, an incomplete one, or one for another model.
    pub fn new(load: &LoadSettings, dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<Self, CommandError> {
        let named = match load.drafts.as_ref().filter(|drafts| drafts.are_used()).map(|drafts| &drafts.draft) {
            None | Some(DraftModel::Off | DraftModel::Lookup) => return Ok(Self::Lookup),
            Some(DraftModel::Auto) => return Ok(Self::Mtp { is_required: false, directory: None }),
            Some(DraftModel::Mtp) => return Ok(Self::Mtp { is_required: true, directory: None }),
            Some(DraftModel::Model(named)) => named,
        };
        let draft = resolve(&ModelSource::new(Some(named)))?;
        if mtp::is_head_only(&json(&draft)?) {
            return Ok(Self::Mtp { is_required: true, directory: Some(draft) });
        }
        if dflash::is_dflash(&json(&draft)?) {
            return Ok(Self::Dflash(Box::new(dflash::DflashCheckpoint::new(&draft, &model::Config::read(dir)?)?)));
        }
        if let Some(target) = tokenizer {
            check_same_tokens(named, &Tokenizer::load(&draft)?, target)?;
        }
        let options = draft_model_options(load);
        // Only the total size of this plan is used, so it has no limit. The model's own plan checks the limit, with
        // this size included.
        let plan = CheckpointInfo::new(&draft, &options)?.plan(&MachineLimits::default(), &options.plan)?;
        Ok(Self::Model(draft, Box::new(options), Box::new(plan)))
    }

    /// Memory of the draft. Only the part that is known before the model is loaded.
    pub fn shape(&self) -> DraftFootprint {
        match self {
            DraftSource::Lookup | DraftSource::Mtp { .. } => DraftFootprint::default(),
            DraftSource::Dflash(surveyed) => surveyed.shape(),
            DraftSource::Model(_, _, plan) => DraftFootprint { fixed: plan.total(), ..DraftFootprint::default() },
        }
    }

    /// The MTP head that is loaded together with the model.
    pub fn drafter(&self) -> MtpSource {
        match self {
            DraftSource::Mtp { directory: None, .. } => MtpSource::Checkpoint,
            DraftSource::Mtp { directory: Some(dir), .. } => MtpSource::Directory(dir.clone()),
            _ => MtpSource::None,
        }
    }

    /// Loads the draft for `model`, whose plan includes it.
    pub fn load(&self, model: &Qwen) -> Result<Box<dyn engine::Draft<Qwen>>, CommandError> {
        Ok(match self {
            DraftSource::Lookup => Box::new(LookupDraft),
            DraftSource::Mtp { is_required, .. } => match MtpDraft::new(model) {
                Some(mtp) => Box::new(mtp),
                None => {
                    if *is_required {
                        tracing::warn!("the checkpoint has no MTP head; falling back to prompt-lookup drafts");
                    }
                    Box::new(LookupDraft)
                }
            },
            DraftSource::Dflash(surveyed) => {
                Box::new(DflashDraft::new(DflashModel::load(surveyed, model.plan().context, model.compute())?))
            }
            DraftSource::Model(dir, options, _) => {
                let options = model::LoadOptions { compute: Some(model.compute()), ..(**options).clone() };
                // Separate metrics, so that the draft's reads are not counted as the model's.
                let draft = Qwen::load(dir, &options, &Metrics::new("", ""), &mut |_, _| ())?;
                Box::new(ModelDraft::new(draft))
            }
        })
    }
}

/// Options of a draft model: all experts in memory, and a short context.
fn draft_model_options(load: &LoadSettings) -> model::LoadOptions {
    let plan = PlanOptions {
        limit: Some(u64::MAX / 2),
        stream: Switch::Off,
        context: Some(DRAFT_CONTEXT),
        chunk: Some(256),
        prompt_cache: Some(0),
        ..PlanOptions::default()
    };
    // A draft reads text only.
    let vision = model::VisionOptions { disabled: true, max_tokens: None };
    model::LoadOptions { threads: load.threads, plan, vision, verify: true, ..model::LoadOptions::default() }
}

/// # Errors
/// The draft model's tokens differ from the model's. The error names the first difference.
fn check_same_tokens(named: &str, draft: &Tokenizer, target: &Tokenizer) -> Result<(), CommandError> {
    let missing = draft.vocab_size().min(target.vocab_size()) as u32;
    let fewer = (draft.vocab_size() < target.vocab_size()).then_some(missing);
    let Some(id) = draft.first_difference(target).or(fewer) else { return Ok(()) };
    let name = |tokenizer: &Tokenizer| tokenizer.token(id).map_or("missing".into(), |token| format!("{token:?}"));
    let reason = format!(
        "--draft-model {named}: its tokens differ from the model's: token {id} is {} in the draft and {} in the model",
        name(draft),
        name(target)
    );
    Err(CommandError::Usage(reason))
}
