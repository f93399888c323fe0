//! The draft that `--draft-model` names. The draft is inspected before the model is loaded, because the memory plan
//! includes it. The draft is loaded after the model.

use super::checkpoint_meta::resolve;
use crate::{
    config::{DraftModel, LoadSettings, ModelSource},
    error::CommandError,
};
use moestro_base::metrics::Metrics;
use moestro_chat::Tokenizer;
use moestro_engine::{self as engine, DRAFT_CONTEXT, DflashDraft, LookupDraft, ModelDraft, MtpDraft};
use moestro_model::{
    checkpoint::mtp,
    model::{self, CheckpointInfo, DflashModel, MtpSource, Qwen, config::json, dflash},
    plan::{DraftFootprint, MachineLimits, Plan, PlanOptions},
};
use std::path::{Path, PathBuf};

/// A draft that has been inspected.
pub enum DraftSource {
    Lookup,
    /// An MTP head from the model's checkpoint, or from a separate directory. `is_required` is true if the user named
    /// the head.
    Mtp {
        is_required: bool,
        directory: Option<PathBuf>,
    },
    Dflash(Box<dflash::DflashCheckpoint>),
    /// A small model: its directory, its options and its memory plan.
    Model(PathBuf, Box<model::LoadOptions>, Box<Plan>),
}

impl DraftSource {
    /// Inspects the draft that `load` names. `dir` has the model. A draft model must have the same tokens as
    /// `tokenizer`.
    ///
    /// # Errors
    /// The directory has no draft, an incomplete draft, or a draft for another model.
    pub fn new(load: &LoadSettings, dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<Self, CommandError> {
        let named = match load.drafts.as_ref().filter(|drafts| drafts.are_used()).map(|drafts| &drafts.draft_model) {
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
        // Only the total size of this plan is used, so the plan has no limit. The plan of the model checks the limit,
        // and includes this size.
        let plan = CheckpointInfo::new(&draft, &options)?.plan(&MachineLimits::default(), &options.plan)?;
        Ok(Self::Model(draft, Box::new(options), Box::new(plan)))
    }

    /// Memory of the draft, as far as it is known before the model is loaded.
    pub fn footprint(&self) -> DraftFootprint {
        match self {
            DraftSource::Lookup | DraftSource::Mtp { .. } => DraftFootprint::default(),
            DraftSource::Dflash(surveyed) => surveyed.footprint(),
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

    /// Loads the draft for `model`, whose memory plan includes the draft.
    pub fn load(&self, model: &Qwen) -> Result<Box<dyn engine::Draft<Qwen>>, CommandError> {
        Ok(match self {
            DraftSource::Lookup => Box::new(LookupDraft),
            DraftSource::Mtp { is_required, .. } => match MtpDraft::new(model) {
                Some(mtp) => Box::new(mtp),
                None => {
                    if *is_required {
                        tracing::warn!("no MTP head is loaded; falling back to prompt-lookup drafts");
                    }
                    Box::new(LookupDraft)
                }
            },
            DraftSource::Dflash(surveyed) => {
                Box::new(DflashDraft::new(DflashModel::load(surveyed, model.plan().context, model.compute())?))
            }
            DraftSource::Model(dir, options, _) => {
                let options = model::LoadOptions { compute: Some(model.compute()), ..(**options).clone() };
                // The draft gets separate metrics, so that its reads are not counted as reads of the model.
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
        stream: Some(false),
        context: Some(DRAFT_CONTEXT),
        chunk: Some(256),
        prompt_cache: Some(0),
        ..PlanOptions::default()
    };
    // A draft reads text only.
    let vision = model::VisionOptions { disabled: true, max_tokens: None };
    model::LoadOptions { threads: load.flags.threads, plan, vision, verify: true, ..model::LoadOptions::default() }
}

/// Checks that a draft model has the same tokens as the model.
///
/// # Errors
/// The tokens differ. The error names the first difference.
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
