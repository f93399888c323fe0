//! Subcommands that serve, chat or manage models, one file per subcommand. `tools` has the subcommands that measure.
//! [`checkpoint_meta`] finds a checkpoint, and [`load`] loads its model.

mod agents;
mod answer_printer;
mod api_client;
mod auto_pack;
pub mod cache;
mod chat_client;
mod chat_input;
mod chat_settings;
pub mod checkpoint_meta;
pub mod completions;
mod confirm;
mod conversation_file;
pub mod device_choice;
mod download_speed;
pub mod draft_source;
pub mod generate;
pub mod launch;
pub mod list;
pub mod load;
pub mod local_models;
pub mod log;
mod log_files;
pub mod man;
mod markdown;
mod model_catalog;
pub mod pack;
pub mod progress;
pub mod ps;
pub mod pull;
pub mod rm;
pub mod run;
pub mod serve;
pub mod service;
pub mod show_config;
pub mod text;
mod word_wrap;
