//! The draft of `--draft-model`: looked at before the model is loaded, since it is part of the plan, and loaded behind it.

use super::resolve;
use crate::{
    config::{Draft, Drafts, Source},
    engine::{self, Dflash, Lookup},
    error::{CommandError, ModelError},
    model::{self, DFlash, Qwen, dflash},
    plan::DraftShape,
};
use std::path::Path;

/// A draft that has been looked at.
pub enum Found {
    Lookup,
    Dflash(Box<dflash::Surveyed>),
}

impl Found {
    /// Looks at the draft that `drafts` names, for the model in `dir`.
    ///
    /// # Errors
    /// A directory that holds no draft, half of one, or one for another model.
    pub fn new(drafts: Option<&Drafts>, dir: &Path) -> Result<Self, CommandError> {
        let Some(Draft::Model(named)) = drafts.filter(|drafts| drafts.are_used()).map(|drafts| &drafts.draft) else {
            return Ok(Self::Lookup);
        };
        let draft = resolve(&Source::new(Some(named)))?;
        if !dflash::is_dflash(&dflash::config::read(&draft)?) {
            let why = format!("{} holds no draft that Moestro knows: there is DFlash so far", draft.display());
            return Err(CommandError::Usage(why));
        }
        Ok(Self::Dflash(Box::new(dflash::Surveyed::new(&draft, &model::Config::read(dir)?)?)))
    }

    /// Its demands on memory.
    pub fn shape(&self) -> DraftShape {
        match self {
            Found::Lookup => DraftShape::default(),
            Found::Dflash(surveyed) => surveyed.shape(),
        }
    }

    /// Loads it for `model`, whose plan has room for it.
    pub fn load(&self, model: &Qwen) -> Result<Box<dyn engine::Draft<Qwen>>, ModelError> {
        Ok(match self {
            Found::Lookup => Box::new(Lookup),
            Found::Dflash(surveyed) => {
                Box::new(Dflash::new(DFlash::load(surveyed, model.plan().context, model.compute())?))
            }
        })
    }
}
