//! Layers that a request passes before its handler (log, key, origin, compression, memory), and its connection.

pub mod auth;
pub mod body_guard;
pub mod connections;
pub mod entrance;
pub mod gzip;
pub mod memory;
pub mod origin;
pub mod request_log;
pub mod timeouts;
pub mod unread_body;

pub use memory::{MemoryPermit, RequestMemory, value_bytes};
pub use origin::OriginPolicy;
pub use request_log::{REQUEST_ID, RequestLog, TARGET as REQUEST_LOG, unique_id};
pub use timeouts::{Timeouts, with_deadline};
