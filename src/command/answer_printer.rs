//! Prints an answer on the terminal while it streams, and its figures at the end.

use super::{
    markdown::MarkdownView,
    text::{PrintableStream, print_to_stderr, width, wrapped},
    word_wrap::WordWrap,
};
use crate::error::CommandError;
use moestro_engine::Timings;
use std::{
    env,
    io::{self, IsTerminal, Write},
    mem,
};

/// Number of tokens of a prompt from which progress is shown. Shorter prompts are evaluated too fast for that.
const LONG_PROMPT: usize = 1_024;

/// A complete or interrupted answer.
#[derive(Debug, Default)]
pub struct TerminalAnswer {
    pub content: String,
    pub reasoning: String,
    /// `None` if the user interrupted the answer.
    pub end: Option<AnswerEnd>,
}

/// The end of an answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerEnd {
    /// True if the token limit ended the answer.
    pub is_cut: bool,
    pub timings: Timings,
}

/// Describes an answer in one line: `prompt 76 tokens (44 cached), 5861 tok/s; answer 30 tokens, 16.2 tok/s`.
pub fn figures(timings: &Timings) -> String {
    let speed = |tokens: usize, seconds: f64| match tokens as f64 / seconds {
        speed if seconds <= 0.0 || tokens == 0 || !speed.is_finite() => String::new(),
        speed if speed < 100.0 => format!(", {speed:.1} tok/s"),
        speed => format!(", {speed:.0} tok/s"),
    };
    let Timings { prompt_tokens, cached_tokens, generated_tokens, drafted_tokens, accepted_tokens, .. } = *timings;
    let cached = if cached_tokens == 0 { String::new() } else { format!(" ({cached_tokens} cached)") };
    let prompt_speed = speed(prompt_tokens.saturating_sub(cached_tokens), timings.prompt_seconds);
    let answer_speed = speed(generated_tokens, timings.decode_seconds);
    let drafts = match drafted_tokens {
        0 => String::new(),
        drafted => format!("; {accepted_tokens} of {drafted} drafted tokens accepted"),
    };
    format!(
        "prompt {prompt_tokens} tokens{cached}{prompt_speed}; answer {generated_tokens} tokens{answer_speed}{drafts}"
    )
}

/// True if the stream is a terminal that shows colours: `NO_COLOR` is not set, and `TERM` is not dumb.
fn has_colours(stream: &impl IsTerminal) -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_set("NO_COLOR") && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

pub fn print_dimmed(text: &str) {
    let stderr = io::stderr();
    let text = wrapped(text, &stderr);
    let (begin, end) = if has_colours(&stderr) { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    print_to_stderr(format_args!("{begin}{text}{end}\n"));
}

/// Prints an answer while it streams. Content goes to stdout, and reasoning to stderr, dimmed on a terminal. If only
/// stdout is a terminal, reasoning is omitted. On a terminal, Markdown is drawn, lines are broken between words, and
/// control characters are replaced, because they could change the terminal's state.
pub struct AnswerPrinter {
    dims: bool,
    shows_reasoning: bool,
    /// The reasoning that is being printed on a terminal.
    reasoning_lines: Option<WordWrap>,
    shows_progress: bool,
    /// `None` if stdout is not a terminal, and gets the content as it is.
    view: Option<MarkdownView>,
    printable_content: PrintableStream,
    printable_reasoning: PrintableStream,
    content: String,
    reasoning: String,
}

impl AnswerPrinter {
    pub fn new() -> Self {
        let stdout = io::stdout();
        Self {
            dims: has_colours(&io::stderr()),
            shows_reasoning: io::stderr().is_terminal() || !stdout.is_terminal(),
            reasoning_lines: None,
            shows_progress: false,
            view: stdout.is_terminal().then(|| MarkdownView::new(has_colours(&stdout))),
            printable_content: PrintableStream::default(),
            printable_reasoning: PrintableStream::default(),
            content: String::new(),
            reasoning: String::new(),
        }
    }

    /// Shows how much of a long prompt has been evaluated.
    pub fn progress(&mut self, tokens: usize, total: usize) {
        if self.dims && total >= LONG_PROMPT {
            self.shows_progress = true;
            let percent = 100 * tokens / total.max(1);
            print_to_stderr(format_args!(
                "\r\x1b[K\x1b[2mreading the prompt: {tokens} of {total} tokens ({percent} %)\x1b[0m"
            ));
        }
    }

    pub fn reasoning(&mut self, text: &str) {
        self.end_progress();
        self.reasoning.push_str(text);
        if !self.shows_reasoning {
            return;
        }
        let begins = self.reasoning_lines.is_none() && self.dims;
        let lines = self.reasoning_lines.get_or_insert_default();
        lines.width = width(&io::stderr());
        lines.push(&self.printable_reasoning.push(text));
        print_to_stderr(format_args!("{}{}", if begins { "\x1b[2m" } else { "" }, lines.take()));
    }

    pub fn content(&mut self, text: &str) -> Result<(), CommandError> {
        self.end_progress();
        self.end_reasoning();
        self.content.push_str(text);
        match &mut self.view {
            Some(view) => write_content(&view.push(&self.printable_content.push(text), width(&io::stdout()))),
            None => write_content(text),
        }
    }

    /// Ends the printing, after which [`TerminalAnswer::end`] is not set yet.
    pub fn finish(mut self) -> Result<TerminalAnswer, CommandError> {
        self.end_progress();
        self.end_reasoning();
        if !self.content.is_empty() {
            let rest = self.view.as_mut().map_or(String::new(), MarkdownView::finish);
            write_content(&(rest + "\n"))?;
        }
        Ok(TerminalAnswer { content: self.content, reasoning: self.reasoning, end: None })
    }

    fn end_progress(&mut self) {
        if mem::take(&mut self.shows_progress) {
            print_to_stderr("\r\x1b[K");
        }
    }

    fn end_reasoning(&mut self) {
        if let Some(mut lines) = self.reasoning_lines.take() {
            print_to_stderr(format_args!("{}{}\n", lines.finish(), if self.dims { "\x1b[0m\n" } else { "" }));
        }
    }
}

fn write_content(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(CommandError::io("writing the answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_are_one_short_line() {
        let stats = Timings {
            prompt_tokens: 76,
            cached_tokens: 44,
            generated_tokens: 30,
            prompt_seconds: 0.01,
            decode_seconds: 2.0,
            ..Timings::default()
        };
        assert_eq!(figures(&stats), "prompt 76 tokens (44 cached), 3200 tok/s; answer 30 tokens, 15.0 tok/s");
        let drafted = Timings { drafted_tokens: 9, accepted_tokens: 3, ..Timings::default() };
        assert!(figures(&drafted).ends_with("; 3 of 9 drafted tokens accepted"), "{}", figures(&drafted));
    }
}
