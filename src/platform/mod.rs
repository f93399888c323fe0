//! The operating system: files and how they are read, threads, memory and its limits, services. The only room, with
//! `device`, that knows which system it is.

mod file;
mod jobs;
pub mod os;
mod pages;
pub mod partial;
pub mod service;
mod small;
mod threads;

pub use file::{Access, File, MAX_BLOCK};
pub use jobs::each;
pub use pages::zeros;
pub use small::{Stamp, check_small, open_regular, read_small};
pub use threads::Threads;
