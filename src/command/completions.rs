//! `moestro completions` and `moestro man`: shell completions and manual pages, generated from the command line.

use crate::{cli::Cli, error::CommandError};
use clap::CommandFactory;
use std::{fs, path::Path};

/// Generates a completion script.
pub fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "moestro", &mut script);
    script
}

/// Writes `moestro.1` and a page for each subcommand into `dir`.
///
/// # Errors
/// The directory cannot be written.
pub fn man(dir: &Path) -> Result<(), CommandError> {
    let written = fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
    written.map_err(|source| CommandError::Io { what: dir.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(dir.path()).unwrap();
        for page in ["moestro.1", "moestro-serve.1", "moestro-info.1"] {
            assert!(fs::read_to_string(dir.path().join(page)).unwrap().contains(".TH"), "{page}");
        }
    }
}
