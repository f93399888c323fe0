//! The texts that are typed in a chat: edited on the line, found again with the arrow keys, kept beyond the chat.

use crate::{error::CommandError, platform::os};
use rustyline::{
    Behavior, Config, Context, Editor, Helper,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::{FileHistory, History},
    validate::{ValidationContext, ValidationResult, Validator},
};
use std::{
    fs::DirBuilder,
    io::{self, IsTerminal},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

/// Texts that are kept. One that is longer than `LONGEST` bytes is not, so the file stays below 16 MiB.
const KEPT: usize = 1_000;
const LONGEST: usize = 16 << 10;

/// An answer to the prompt.
#[derive(Debug, PartialEq)]
pub enum LineEvent {
    Text(String),
    /// Ctrl-C: the line is thrown away.
    Interrupted,
    /// Ctrl-D, or the terminal is gone.
    End,
}

/// Reads texts from the terminal.
pub struct LineEditor {
    editor: Editor<LineHelper, FileHistory>,
    /// The file of earlier texts, while it can be written.
    file: Option<PathBuf>,
}

impl LineEditor {
    /// An input whose Tab completes to `words`.
    ///
    /// # Errors
    /// The terminal's.
    pub fn new(words: &'static [&'static str]) -> Result<Self, CommandError> {
        // An answer may go into a file while its question is typed on the terminal.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).history_ignore_space(true).max_history_size(KEPT);
        let config = config.map_err(failed)?.build();
        let history = FileHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history).map_err(failed)?;
        editor.set_helper(Some(LineHelper { words }));
        let mut input = Self { editor, file: os::state_dir().map(|dir| dir.join("history")) };
        if let Some(file) = &input.file {
            let loaded = input.editor.load_history(file);
            if !matches!(&loaded, Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound) {
                input.or_forget(loaded);
            }
        }
        Ok(input)
    }

    /// The next text, of one line or several.
    ///
    /// # Errors
    /// The terminal's.
    pub fn read(&mut self) -> Result<LineEvent, CommandError> {
        match self.editor.readline(">>> ") {
            Ok(typed) => {
                self.keep(&typed)?;
                Ok(LineEvent::Text(whole_text(&typed).unwrap_or(typed)))
            }
            Err(ReadlineError::Interrupted) => Ok(LineEvent::Interrupted),
            Err(ReadlineError::Eof) => Ok(LineEvent::End),
            Err(error) => Err(failed(error)),
        }
    }

    fn keep(&mut self, typed: &str) -> Result<(), CommandError> {
        if typed.trim().is_empty() || typed.len() > LONGEST {
            return Ok(());
        }
        let new = self.editor.add_history_entry(typed).map_err(failed)?;
        if let Some(file) = self.file.as_deref().filter(|_| new) {
            let kept =
                private_dir(file).map_err(ReadlineError::Io).and_then(|()| self.editor.history_mut().append(file));
            self.or_forget(kept);
        }
        Ok(())
    }

    /// A history that cannot be kept is told once, and disturbs no chat.
    fn or_forget(&mut self, kept: Result<(), ReadlineError>) {
        if let Err(error) = kept
            && let Some(file) = self.file.take()
        {
            eprintln!("moestro: {}: {error}; what is typed now is forgotten at the end", file.display());
        }
    }
}

/// The directory of `file`, for its owner only.
fn private_dir(file: &Path) -> io::Result<()> {
    file.parent().map_or(Ok(()), |dir| DirBuilder::new().recursive(true).mode(0o700).create(dir))
}

fn failed(error: ReadlineError) -> CommandError {
    CommandError::Io { what: "reading from the terminal".into(), source: io::Error::other(error) }
}

/// Knows when a text is complete, and how a command goes on.
struct LineHelper {
    words: &'static [&'static str],
}

impl Validator for LineHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let whole = whole_text(context.input()).is_some();
        Ok(if whole { ValidationResult::Valid(None) } else { ValidationResult::Incomplete })
    }
}

impl Completer for LineHelper {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let begun = line.get(..at).unwrap_or_default();
        let fits = |word: &&&str| begun.starts_with('/') && word.starts_with(begun);
        Ok((0, self.words.iter().filter(fits).map(|word| (*word).to_owned()).collect()))
    }
}

impl Hinter for LineHelper {
    type Hint = String;
}

impl Highlighter for LineHelper {}

impl Helper for LineHelper {}

/// The text, if it is complete: a line, several of which each but the last ends in a backslash, or all that stands between
/// `"""`.
fn whole_text(typed: &str) -> Option<String> {
    const FENCE: &str = "\"\"\"";
    if let Some(inner) = typed.trim_start().strip_prefix(FENCE) {
        return inner.trim_end().strip_suffix(FENCE).map(|text| text.trim_matches('\n').to_owned());
    }
    (!typed.ends_with('\\')).then(|| typed.replace("\\\n", "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_lines_are_one_text() {
        assert_eq!(whole_text("one line"), Some("one line".into()));
        assert_eq!(whole_text("goes on\\"), None);
        assert_eq!(whole_text("goes on\\\nhere"), Some("goes on\nhere".into()));
        assert_eq!(whole_text("\"\"\"a"), None);
        assert_eq!(whole_text("\"\"\"\na\n\nb\\\n\"\"\" "), Some("a\n\nb\\".into()));
        assert_eq!(whole_text("\"\"\"a\"\"\""), Some("a".into()));
        assert_eq!(whole_text("\"\"\""), None);
    }
}
