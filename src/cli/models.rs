//! The commands about models on this machine and in a running server: `list`, `rm`, `ps`, `stop`.

use super::values;
use clap::{Args, builder::BoolishValueParser};
use std::path::PathBuf;

/// The directory of models beside the Hugging Face cache.
#[derive(Debug, Default, Args)]
pub struct Home {
    /// Models of your own: one directory each, NAME or ORG/NAME [default: moestro/models in ~/.local/share or $XDG_DATA_HOME]
    #[arg(long, env = "MOESTRO_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct List {
    #[command(flatten)]
    pub home: Home,
    /// One JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// As `moestro list` names it
    pub name: String,
    #[command(flatten)]
    pub home: Home,
    /// Do not ask
    #[arg(short, long, env = "MOESTRO_YES", value_parser = BoolishValueParser::new())]
    pub yes: bool,
}

/// A server on this machine or elsewhere.
#[derive(Debug, Args)]
pub struct Remote {
    /// The server's address
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// The server's port
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// The server's key
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key)]
    pub api_key: Option<String>,
}

#[derive(Debug, Args)]
pub struct Ps {
    #[command(flatten)]
    pub remote: Remote,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// As `moestro ps` names it
    pub name: String,
    #[command(flatten)]
    pub remote: Remote,
}
