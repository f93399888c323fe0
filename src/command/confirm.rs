//! Asks the user to confirm an action.

use super::text::print_to_stderr;
use crate::error::CommandError;
use std::io::{self, BufRead, IsTerminal};

/// Asks a question on the terminal. Returns true if the user confirms.
///
/// # Errors
/// stdin is not a terminal.
pub fn confirmed(question: &str) -> Result<bool, CommandError> {
    if !io::stdin().is_terminal() {
        return Err(CommandError::Usage(format!("{question} Use --yes to confirm: stdin is not a terminal")));
    }
    print_to_stderr(format_args!("{question} [y/N] "));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(CommandError::io("reading the answer"))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
