//! `moestro run`: a chat on the terminal. Ctrl-C interrupts an answer, Ctrl-D ends the chat.

use super::{
    answer_printer::{TerminalAnswer, figures, print_dimmed},
    chat_client::{ChatClient, message},
    chat_input::{LineEditor, LineEvent},
    chat_settings::{self, AnswerOptions, ChatSettings},
    conversation_file, generate, local_models, progress, pull,
    text::{print_line, print_note, printable, wrapped},
};
use crate::{
    cli::model_args::RemoteArgs,
    config::{self, GenerateConfig, ModelSource, config_file::Settings},
    demo,
    error::CommandError,
};
use moestro_base::platform::DeferredSignals;
use serde_json::{Value, json};
use std::{
    future::pending,
    io,
    path::{Path, PathBuf},
    process::exit,
    thread,
};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

const HELP: &str = "\
/set              show the settings; /set NAME VALUE changes one, /set NAME
                  resets it: temp, top-p, top-k, min-p, repeat-penalty,
                  seed, max-tokens, thinking (on, off), system
/image PATH       show the model a picture together with the next text
/retry            answer the last message again
/clear            delete the conversation
/save FILE        write the conversation to a file
/load FILE        continue the conversation of a file
/model            list the models; /model NAME changes the model
/show             show the model and the settings
/help, /bye       show this help, end the chat

\"\"\"               starts and ends a text of several lines; a line that
                  ends in \\ continues on the next line
Up, Down, Ctrl-R  earlier texts, also of earlier chats; a line that
                  starts with a space is not saved
Ctrl-C            interrupts an answer or a download, or clears the line
Ctrl-D            ends the chat; so does Ctrl-C twice on an empty line";

/// Commands of the chat. A command that may have an argument ends with a space.
const COMMANDS: [&str; 12] =
    ["set ", "image ", "retry", "clear", "save ", "load ", "model ", "show", "help", "bye", "exit", "quit"];

/// Completions of the Tab key: the commands, and the settings of `/set`. Only `/bye` is completed to end the chat.
fn completions() -> Vec<String> {
    let commands = COMMANDS.iter().filter(|name| !["exit", "quit"].contains(name)).map(|name| format!("/{name}"));
    commands.chain(chat_settings::NAMES.iter().map(|name| format!("/set {name} "))).collect()
}

/// Answers the prompt once if there is a prompt. Otherwise starts a chat.
pub fn run(config: GenerateConfig, remote: &RemoteArgs, settings: &Settings) -> Result<(), CommandError> {
    let model = ChatClient::open(&config, remote, settings)?;
    if model.id == demo::NAME && !progress::is_quiet() {
        print_note(demo::ABOUT);
    }
    if config.prompt.is_some() {
        return generate::answer_once(model, &config);
    }
    let answer_options = AnswerOptions::new(&config);
    let mut chat = ChatSession {
        model: Some(model),
        settings: ChatSettings { answer_options, system: config.system.clone() },
        messages: Vec::new(),
        next_images: Vec::new(),
        file: None,
        config,
        remote: remote.clone(),
        catalog: settings.clone(),
    };
    chat.run()?;
    if let Some(model) = chat.model.take() {
        model.close();
    }
    Ok(())
}

struct ChatSession {
    /// `None` only while the chat changes to another model.
    model: Option<ChatClient>,
    settings: ChatSettings,
    messages: Vec<Value>,
    /// Images of the next message: parts of its content.
    next_images: Vec<Value>,
    /// The file of `/save` or `/load`, which `/save` may overwrite.
    file: Option<PathBuf>,
    config: GenerateConfig,
    remote: RemoteArgs,
    catalog: Settings,
}

impl ChatSession {
    fn run(&mut self) -> Result<(), CommandError> {
        if let Some(model) = &self.model {
            print_to_user(&model.describe());
        }
        print_line("/help shows the commands");
        let mut input = LineEditor::new(completions())?;
        let mut twice = false;
        loop {
            let text = match input.read()? {
                LineEvent::Text(text) => text,
                // Ctrl-C on a line with text only clears the line.
                LineEvent::Interrupted { had_text: true } => {
                    twice = false;
                    continue;
                }
                LineEvent::Interrupted { .. } if !twice => {
                    twice = true;
                    print_dimmed("Ctrl-D ends the chat; so does Ctrl-C again");
                    continue;
                }
                LineEvent::Interrupted { .. } | LineEvent::End => return Ok(()),
            };
            twice = false;
            match command(&text) {
                _ if text.trim().is_empty() => {}
                Some(("bye" | "exit" | "quit", "")) => return Ok(()),
                Some((name, rest)) => match self.execute(name, rest) {
                    Ok(line) if line.is_empty() => {}
                    Ok(line) => print_to_user(&line),
                    Err(CommandError::Usage(why)) => print_to_user(&why),
                    Err(error) => return Err(error),
                },
                None => {
                    let question = self.question(&text);
                    if self.send(question)? {
                        self.next_images.clear();
                    } else if !self.next_images.is_empty() {
                        print_note("the image goes with the next text; /clear removes it");
                    }
                }
            }
        }
    }

    /// Executes a command and returns the text to print.
    fn execute(&mut self, name: &str, rest: &str) -> Result<String, CommandError> {
        let usage = |why: &str| Err(CommandError::Usage(why.into()));
        match name {
            "set" => self.settings.set(rest).map_err(CommandError::Usage),
            "help" | "?" => Ok(HELP.into()),
            "clear" => {
                self.messages.clear();
                self.next_images.clear();
                Ok("the conversation is empty".into())
            }
            "image" if rest.is_empty() => usage("/image needs the path of a PNG, JPEG, WebP or GIF file"),
            "image" => with_ctrl_c(|| self.add_image(rest)).map_err(CommandError::Usage),
            "retry" => {
                let before = self.messages.clone();
                let Some(question) = self.last_question() else { return usage("there is no message to answer again") };
                if !self.send(question)? {
                    self.messages = before;
                }
                Ok(String::new())
            }
            "save" if self.messages.iter().any(|message| message["content"].is_array()) => {
                usage("the conversation has images; /clear deletes it")
            }
            "save" if rest.is_empty() && self.file.is_none() => usage("name a file: /save FILE"),
            "save" => {
                let path = if rest.is_empty() { self.file.clone().unwrap_or_default() } else { rest.into() };
                let may_replace = self.file.as_ref() == Some(&path);
                conversation_file::save(&path, may_replace, self.settings.system.as_deref(), &self.messages)?;
                let line = format!("saved {} messages to {}", self.messages.len(), path.display());
                self.file = Some(path);
                Ok(line)
            }
            "load" if rest.is_empty() => usage("name a file: /load FILE"),
            "load" => {
                let (system, messages) = conversation_file::load(rest.as_ref())?;
                self.settings.system = system;
                self.messages = messages;
                self.file = Some(rest.into());
                Ok(format!("loaded {} messages", self.messages.len()))
            }
            "model" if rest.is_empty() => {
                let all = local_models::all(&self.catalog, None);
                let current = self.model.as_ref().map_or("", |model| &model.id);
                let line = |entry: local_models::CatalogEntry| {
                    let mark = if entry.id == current { "* " } else { "  " };
                    format!("{mark}{}", entry.id)
                };
                Ok(all.into_iter().map(line).collect::<Vec<_>>().join("\n"))
            }
            "model" => with_ctrl_c(|| self.switch(rest)),
            "show" => {
                let model = self.model.as_ref().map_or(String::new(), ChatClient::describe);
                Ok(format!("{model}\n{} messages\n{}", self.messages.len(), self.settings))
            }
            "bye" | "exit" | "quit" => usage(&format!("/{name} alone ends the chat")),
            _ => usage(&format!("no command /{name}; /help lists the commands")),
        }
    }

    /// Reads an image for the next message. Returns a line to show to the user.
    fn add_image(&mut self, path: &str) -> Result<String, String> {
        let Some(model) = &self.model else { return Ok(String::new()) };
        let (image, tokens) = model.read_image(&config::expand(path))?;
        self.next_images.push(image);
        Ok(format!("{path}: {tokens} tokens; the next text goes with it"))
    }

    /// Removes the last question and the messages after it. Returns the question.
    fn last_question(&mut self) -> Option<Value> {
        let at = self.messages.iter().rposition(|message| message["role"] == "user")?;
        self.messages.drain(at..).next()
    }

    /// Unloads the model and loads another model. The conversation continues. If the other model cannot be loaded, the
    /// first model is loaded again.
    fn switch(&mut self, name: &str) -> Result<String, CommandError> {
        let entry = local_models::all(&self.catalog, None).into_iter().find(|entry| entry.id == name);
        let source = entry.map_or_else(|| ModelSource::new(Some(name)), |entry| entry.source);
        let before = (self.config.model.clone(), self.catalog.model.take());
        self.catalog.model = self.catalog.models.iter().any(|(known, _)| known == name).then(|| name.to_owned());
        self.config.model = source;
        if let Some(model) = self.model.take() {
            model.close();
        }
        let refused = match ChatClient::open(&self.config, &self.remote, &self.catalog) {
            Ok(model) => {
                let line = model.describe();
                self.model = Some(model);
                return Ok(line);
            }
            Err(error) => error,
        };
        (self.config.model, self.catalog.model) = before;
        self.model = Some(ChatClient::open(&self.config, &self.remote, &self.catalog)?);
        Err(CommandError::Usage(refused.to_string()))
    }

    /// The user's message with this text and the next images.
    fn question(&self, text: &str) -> Value {
        if self.next_images.is_empty() {
            return message("user", text);
        }
        let mut content = self.next_images.clone();
        content.push(json!({"type": "text", "text": text}));
        json!({"role": "user", "content": content})
    }

    /// Sends a message to the model. A failed answer does not end the chat. Returns false if the answer has failed, and
    /// the message is then not part of the conversation.
    fn send(&mut self, question: Value) -> Result<bool, CommandError> {
        let Some(model) = &self.model else { return Ok(false) };
        self.messages.push(question);
        let system = self.settings.system.iter().map(|text| message("system", text));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let answer = model.answer(&messages, &self.settings.answer_options, interrupted());
        let TerminalAnswer { content, reasoning, end } = match answer {
            Err(error @ (CommandError::Service(_) | CommandError::Io { .. })) => {
                self.messages.pop();
                print_note(format_args!("moestro: {error}"));
                return Ok(false);
            }
            other => other?,
        };
        match end {
            Some(end) => print_dimmed(&figures(&end.timings)),
            None => print_dimmed("interrupted"),
        }
        let mut reply = message("assistant", &content);
        reply["reasoning_content"] = reasoning.into();
        self.messages.push(reply);
        Ok(true)
    }
}

/// Parses `/name rest`. A name may be misspelt. A path that starts with a slash is not a command, such as `/usr` at the
/// start of a question.
fn command(text: &str) -> Option<(&str, &str)> {
    let line = text.trim();
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let name = word.strip_prefix('/')?;
    let is_known = COMMANDS.iter().any(|known| known.trim_end() == name) || name == "?";
    let is_name = name.starts_with(char::is_alphabetic) && !name.contains('/');
    (is_known || is_name && !Path::new(word).exists()).then_some((name, rest.trim()))
}

/// Waits for Ctrl-C.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        pending().await
    }
}

/// Calls `work`. Ctrl-C interrupts its download, or ends the program if there is no download or it was interrupted
/// before. By default, Ctrl-C ends a program, but not any more after [`interrupted`] has waited for it once.
fn with_ctrl_c<T>(work: impl FnOnce() -> T) -> T {
    let Ok(runtime) = runtime::Builder::new_current_thread().enable_all().build() else { return work() };
    let context = runtime.enter();
    let Ok(mut ctrl_c) = signal(SignalKind::interrupt()) else { return work() };
    drop(context);
    let (running, mut ended) = oneshot::channel::<()>();
    thread::scope(|scope| {
        let watch = move || {
            // Other signals that end the process must reach the thread that saves a download.
            let _signals = DeferredSignals::begin();
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = &mut ended => return,
                        _ = ctrl_c.recv() => if !pull::interrupt() { exit(130) },
                    }
                }
            })
        };
        // If the thread cannot be started, Ctrl-C has no effect.
        let _ = thread::Builder::new().name("ctrl-c".into()).spawn_scoped(scope, watch);
        let outcome = work();
        drop(running);
        outcome
    })
}

/// Prints a line of the chat itself.
fn print_to_user(line: &str) {
    print_line(wrapped(&printable(line), &io::stdout()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_not_a_command() {
        assert_eq!(command("/set temp 0"), Some(("set", "temp 0")));
        assert_eq!(command(" /bye "), Some(("bye", "")));
        for (text, name) in
            [("/hlep", "hlep"), ("/modle x", "modle"), ("/sytem you are", "sytem"), ("/top-p 0.9", "top-p")]
        {
            assert_eq!(command(text).map(|(name, _)| name), Some(name), "not sent to the model");
        }
        assert_eq!(command("/save a b.json"), Some(("save", "a b.json")));
        assert_eq!(command("/etc/passwd"), None);
        assert_eq!(command("/usr is large"), None);
        assert_eq!(command("/* a comment */ int x;"), None);
        assert_eq!(command("/image ~/a b.png"), Some(("image", "~/a b.png")));
        assert_eq!(command("hello /bye"), None);
    }

    #[test]
    fn every_setting_and_command_is_completed() {
        let words = completions();
        for name in chat_settings::NAMES {
            assert!(words.contains(&format!("/set {name} ")), "{name}");
        }
        for name in COMMANDS.map(str::trim_end).iter().filter(|name| !["exit", "quit"].contains(name)) {
            assert!(words.iter().any(|word| word.trim() == format!("/{name}")) && HELP.contains(&format!("/{name}")));
        }
        assert!(HELP.lines().all(|line| line.chars().count() <= 80));
    }
}
