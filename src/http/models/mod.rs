//! Models on this machine: which model is in memory, and which requests wait for a model.
//!
//! * [`host`] loads and unloads models, one at a time.
//! * [`host_state`] decides what the host does next.
//! * [`lease`] gives a request its model, now or after a load.
//! * [`names`] matches the name in a request with a model.

mod host;
mod host_state;
mod lease;
mod loaded;
mod loader;
mod names;

pub use host::ModelHost;
pub use host_state::HostTimeouts;
pub use lease::WeakModel;
pub use loaded::{LoadedModel, ModelCard, RequestLimits};
pub use loader::{HostedModel, ModelLoader};
pub use names::{CLAUDE_PREFIX, ModelEntry, plain as plain_name};
