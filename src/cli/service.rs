//! `moestro service`.

use clap::{Args, Subcommand, builder::BoolishValueParser};

#[derive(Debug, Args)]
pub struct Service {
    #[command(subcommand)]
    pub action: ServiceAction,
}

#[derive(Debug, Subcommand)]
pub enum ServiceAction {
    /// Describe the service to the system and start it
    Install(Install),
    /// Stop it, and take its description away
    Uninstall,
    Start,
    Stop,
    /// Have it read its configuration file again
    Reload,
    /// Its status, from the service manager
    Status,
    /// The end of its log, and what comes
    Logs,
}

#[derive(Debug, Default, Args)]
pub struct Install {
    /// Let the system hold the port, and start with the first connection
    #[arg(long, env = "MOESTRO_ON_DEMAND", value_parser = BoolishValueParser::new())]
    pub on_demand: bool,
    /// On demand: the address to listen on
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// On demand: the port to listen on
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// Show what would be written and run
    #[arg(long, env = "MOESTRO_DRY_RUN", value_parser = BoolishValueParser::new())]
    pub dry_run: bool,
    /// Arguments of `moestro serve`, behind --; under systemd it writes to the user's cache directory only
    #[arg(last = true)]
    pub args: Vec<String>,
}
