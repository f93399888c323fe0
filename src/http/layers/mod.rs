//! Layers that a request passes before its handler (log, key, origin, compression, memory), and its connection.

pub mod auth;
pub mod body_guard;
pub mod connections;
pub mod gzip;
pub mod memory;
pub mod origin;
pub mod request_log;
pub mod timeouts;
