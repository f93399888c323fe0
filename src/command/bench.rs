use crate::{cli, error::CommandError};
pub fn run(_typed: cli::Bench) -> Result<(), CommandError> {
    Ok(())
}
