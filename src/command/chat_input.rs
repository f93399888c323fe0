//! Line editor of a terminal chat. The history is kept between chats.

use super::text::print_note;
use crate::error::CommandError;
use moestro_base::platform::os;
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
    cell::Cell,
    fs::DirBuilder,
    io::{self, IsTerminal},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

/// Maximum number of texts in the history. Together with [`MAX_ENTRY_BYTES`], this keeps the file below 16 MiB.
const MAX_ENTRIES: usize = 1_000;
/// Maximum number of bytes of a text in the history.
const MAX_ENTRY_BYTES: usize = 16 << 10;

/// The user's input at the prompt.
#[derive(Debug, PartialEq)]
pub enum LineEvent {
    Text(String),
    /// Ctrl-C: discards the line, which may be empty.
    Interrupted {
        had_text: bool,
    },
    /// Ctrl-D, or the terminal was closed.
    End,
}

/// Reads texts from the terminal.
pub struct LineEditor {
    editor: Editor<LineHelper, FileHistory>,
    /// The history file. `None` after an error of the file.
    file: Option<PathBuf>,
}

impl LineEditor {
    /// Creates an editor. `words` are the completions of the Tab key.
    ///
    /// # Errors
    /// The terminal cannot be opened.
    pub fn new(words: Vec<String>) -> Result<Self, CommandError> {
        // stdout may be a file while the user types on the terminal.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).history_ignore_space(true).max_history_size(MAX_ENTRIES);
        let config = config.map_err(failed)?.build();
        let history = FileHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history).map_err(failed)?;
        editor.set_helper(Some(LineHelper { words, has_text: Cell::new(false) }));
        let mut input = Self { editor, file: os::state_dir().map(|dir| dir.join("history")) };
        if let Some(file) = &input.file {
            let loaded = input.editor.load_history(file);
            if !matches!(&loaded, Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound) {
                input.disable_history_on_error(loaded);
            }
        }
        Ok(input)
    }

    /// Reads the next text, which may have several lines.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub fn read(&mut self) -> Result<LineEvent, CommandError> {
        if let Some(helper) = self.editor.helper() {
            helper.has_text.set(false);
        }
        match self.editor.readline(">>> ") {
            Ok(text) => {
                self.add_to_history(&text)?;
                Ok(LineEvent::Text(whole_text(&text).unwrap_or(text)))
            }
            Err(ReadlineError::Interrupted) => {
                let had_text = self.editor.helper().is_some_and(|helper| helper.has_text.get());
                Ok(LineEvent::Interrupted { had_text })
            }
            Err(ReadlineError::Eof) => Ok(LineEvent::End),
            Err(error) => Err(failed(error)),
        }
    }

    fn add_to_history(&mut self, text: &str) -> Result<(), CommandError> {
        if text.trim().is_empty() || text.len() > MAX_ENTRY_BYTES {
            return Ok(());
        }
        let new = self.editor.add_history_entry(text).map_err(failed)?;
        if let Some(file) = self.file.as_deref().filter(|_| new) {
            let kept = create_private_dir(file)
                .map_err(ReadlineError::Io)
                .and_then(|()| self.editor.history_mut().append(file));
            self.disable_history_on_error(kept);
        }
        Ok(())
    }

    /// Reports an error of the history file once. The chat continues without the file.
    fn disable_history_on_error(&mut self, kept: Result<(), ReadlineError>) {
        if let Err(error) = kept
            && let Some(file) = self.file.take()
        {
            print_note(format_args!("moestro: {}: {error}; this chat's history is not saved", file.display()));
        }
    }
}

/// Creates the directory of `file`, accessible to its owner only.
fn create_private_dir(file: &Path) -> io::Result<()> {
    file.parent().map_or(Ok(()), |dir| DirBuilder::new().recursive(true).mode(0o700).create(dir))
}

fn failed(error: ReadlineError) -> CommandError {
    CommandError::io("reading from the terminal")(io::Error::other(error))
}

/// Decides whether a text is complete, and completes commands.
struct LineHelper {
    words: Vec<String>,
    /// True if the line is not empty. Needed because the editor reports Ctrl-C without the text.
    has_text: Cell<bool>,
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
        let prefix = line.get(..at).unwrap_or_default();
        let fits = |word: &&String| prefix.starts_with('/') && word.starts_with(prefix);
        Ok((0, self.words.iter().filter(fits).cloned().collect()))
    }
}

impl Hinter for LineHelper {
    type Hint = String;

    /// Called after each change of the line.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.has_text.set(!line.is_empty());
        None
    }
}

impl Highlighter for LineHelper {}

impl Helper for LineHelper {}

/// Returns the text if it is complete. A complete text is one line, several lines that all end in a backslash except
/// the last, or the lines between two `"""`.
fn whole_text(text: &str) -> Option<String> {
    const FENCE: &str = "\"\"\"";
    if let Some(inner) = text.trim_start().strip_prefix(FENCE) {
        return inner.trim_end().strip_suffix(FENCE).map(|text| text.trim_matches('\n').to_owned());
    }
    (!text.ends_with('\\')).then(|| text.replace("\\\n", "\n"))
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
