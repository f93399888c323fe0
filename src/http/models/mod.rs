//! Models on this machine: which model is in memory, and which requests wait for a model.
//!
//! * [`host`] loads and unloads models, one at a time, and leases them to requests.
//! * [`host_state`] decides what the host does next.
//! * [`names`] matches the name in a request with a model.

mod host;
mod host_state;
mod loaded;
mod names;

pub use host::{ModelHost, ModelLease};
pub use host_state::HostTimeouts;
pub use loaded::{HostedModel, LoadFailure, LoadedModel, ModelCard, ModelLoader, RequestLimits};
pub use names::{CLAUDE_PREFIX, ModelEntry, plain as plain_name};
