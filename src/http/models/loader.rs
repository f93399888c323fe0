//! The interface through which the host lists and loads models.

use super::{loaded::LoadedModel, names::ModelEntry};

/// A loaded model together with the function that unloads it.
pub struct HostedModel {
    /// Id in the list of models.
    pub id: String,
    pub model: LoadedModel,
    /// Blocks until the memory is free. The host calls this function after the last request has dropped the model.
    pub unload: Box<dyn FnOnce() + Send>,
}

/// Lists and loads models. All methods block.
pub trait ModelLoader: Send + Sync + 'static {
    fn list(&self) -> Vec<ModelEntry>;

    /// # Errors
    /// A sentence for the client.
    fn load(&self, id: &str) -> Result<HostedModel, String>;

    /// Deletes the prompt caches that all models, loaded or not, have on disk.
    ///
    /// # Errors
    /// A sentence for the client.
    fn clear_prompt_caches(&self) -> Result<(), String> {
        Ok(())
    }
}
