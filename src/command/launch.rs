//! `moestro launch`: finds or starts a server, configures a coding agent to use the server, and runs the agent.

use super::{
    agents::{AgentSetup, AgentTarget},
    api_client::{self, ApiClient},
    confirm::confirmed,
    local_models,
    text::{print, print_note, print_to_stderr, printable},
};
use crate::{
    cli,
    config::{ModelSource, config_file::Settings},
    error::CommandError,
};
use moestro_base::platform::os;
use serde_json::{Value, json};
use std::{
    env,
    fs::{self, File},
    io::{self, BufRead, BufReader, IsTerminal},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio, exit},
};
use tokio::signal::unix::{SignalKind, signal};

/// Number of tokens of context up to which a warning is printed. Agents send long system prompts and whole files: the
/// first prompt of Claude Code 2.1.332 has 22,037 tokens of the demo's vocabulary, and 36,198 without its tool search.
const SMALL_CONTEXT: usize = 32_768;

/// Starts an agent. Exits with the agent's exit code.
pub fn run(args: &cli::LaunchArgs, settings: &Settings) -> Result<(), CommandError> {
    let remote = ApiClient::remote(&args.remote)?;
    let dir = os::data_dir().ok_or_else(|| usage("cannot find your home directory, which needs a configuration"))?;
    let AgentSetup { program, install, server_flags, .. } = AgentTarget::default().setup(args.agent, Path::new(""));
    match find_program(program, install) {
        Err(missing) if args.dry_run => print_note(format_args!("moestro: {missing}")),
        found => found?,
    }
    let server_args = server_args(args, server_flags);
    let mut server = None;
    let health = match remote.health() {
        Some(health) => health,
        None if args.dry_run => Value::Null,
        None => {
            server = Some(OwnServer::start(args, &server_args)?);
            remote.health().ok_or_else(|| usage("the server that was started does not answer"))?
        }
    };
    let target = target(&remote, args, settings, &health)?;
    let setup = target.setup(args.agent, &dir.join("agents"));
    let shown = describe(&setup, args);
    if args.dry_run {
        if health.is_null() {
            print(command_line("moestro", &server_args));
        }
        print(shown);
        return Ok(());
    }
    print_to_stderr(shown);
    if target.model == crate::demo::NAME {
        print_note(
            "moestro: the demo model only tests the connection; agents need a model such as those of `moestro list`",
        );
    }
    if target.context <= SMALL_CONTEXT {
        let context = target.context;
        print_note(format_args!(
            "moestro: the context has {context} tokens; agents need more than {SMALL_CONTEXT} (--ctx-size of serve)"
        ));
    }
    if !setup.files.is_empty() {
        if !args.yes && !confirmed("Write these files and start the agent?")? {
            return Ok(());
        }
        write(&setup)?;
    }
    let code = run_agent(&setup, args, server.as_ref().map(|server| server.0.id()))?;
    drop(server);
    if code == 0 { Ok(()) } else { exit(code) }
}

/// Checks that the agent is installed.
///
/// # Errors
/// The agent is not installed.
fn find_program(program: &str, install: &str) -> Result<(), CommandError> {
    let dirs = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&dirs).any(|dir| dir.join(program).is_file()) {
        Ok(())
    } else {
        Err(usage(&format!("{program} is not installed; install it with `{install}`")))
    }
}

/// Arguments of the server that is started if none runs. `flags` help the agent, unless the user has set their variables.
fn server_args(args: &cli::LaunchArgs, flags: &[&str]) -> Vec<String> {
    let is_unset = |flag: &&&str| {
        let name = flag.trim_start_matches('-').replace('-', "_").to_uppercase();
        env::var_os(format!("MOESTRO_{name}")).is_none()
    };
    let mut words = vec!["serve".to_owned()];
    words.extend(args.model.clone());
    words.extend(["--host".to_owned(), args.remote.host.clone(), "--port".to_owned(), args.remote.port.to_string()]);
    words.extend(flags.iter().filter(is_unset).map(|flag| (*flag).to_owned()));
    words
}

/// The model that the agent uses, with its context length and its abilities.
fn target(
    remote: &ApiClient,
    args: &cli::LaunchArgs,
    settings: &Settings,
    health: &Value,
) -> Result<AgentTarget, CommandError> {
    let named = args.model.as_deref().map(|name| {
        let own = settings.models.iter().any(|(known, _)| known == name);
        if own { name.to_owned() } else { local_models::id(&ModelSource::new(Some(name)), &Settings::default()) }
    });
    let served = health["model"].as_str().or(health["next"].as_str()).map(str::to_owned);
    let model = named.or(served).unwrap_or_else(|| crate::demo::NAME.into());
    let known = if health.is_null() { Value::Null } else { card(remote, &model, args.dry_run)? };
    Ok(AgentTarget {
        base_url: api_client::base_url(&args.remote),
        key: args.remote.api_key.clone(),
        context: known["context_length"].as_u64().unwrap_or(SMALL_CONTEXT as u64) as usize,
        has_vision: known["capabilities"]["vision"] == true,
        reasons: known["capabilities"]["reasoning"] == true,
        model,
    })
}

/// The entry of a model in the server's list. Only a loaded model has a context length there, so the model is loaded
/// first, except for a dry run.
fn card(remote: &ApiClient, model: &str, dry_run: bool) -> Result<Value, CommandError> {
    let find = || -> Result<Value, CommandError> {
        let address = remote.address().unwrap_or_default();
        remote.model(model)?.ok_or_else(|| usage(&format!("the server at {address} has no model {model}")))
    };
    let known = find()?;
    if known["context_length"].is_u64() {
        return Ok(known);
    }
    if dry_run {
        print_note(format_args!("moestro: {model} is not loaded, so its context length is not known"));
        return Ok(known);
    }
    print_note(format_args!("loading {model}"));
    let hello = json!([{"role": "user", "content": "Hi"}]);
    remote.ask_model("/v1/chat/completions", &json!({"model": model, "messages": hello, "max_tokens": 1}))?;
    find()
}

/// Shows the files, the variables and the command of a setup. Keys are hidden.
fn describe(setup: &AgentSetup, args: &cli::LaunchArgs) -> String {
    let mut shown = String::new();
    for (path, text) in &setup.files {
        shown += &format!("# {}\n{text}", path.display());
    }
    for (name, value) in &setup.variables {
        let is_secret = name.ends_with("KEY") || name.ends_with("TOKEN");
        let value = if is_secret && args.remote.api_key.is_some() { "(hidden)" } else { value.as_str() };
        shown += &format!("{name}={}\n", quoted(value));
    }
    for name in setup.removed {
        shown += &format!("unset {name}\n");
    }
    shown += &command_line(setup.program, setup.args.iter().chain(&args.args));
    printable(&shown).into_owned()
}

fn command_line<'a>(program: &str, args: impl IntoIterator<Item = &'a String>) -> String {
    let line: Vec<String> =
        std::iter::once(program.to_owned()).chain(args.into_iter().map(|arg| quoted(arg))).collect();
    line.join(" ") + "\n"
}

/// Quotes a word for a shell if needed.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn write(setup: &AgentSetup) -> Result<(), CommandError> {
    for (path, text) in &setup.files {
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| fs::write(path, text)).map_err(CommandError::io(path.display().to_string()))?;
    }
    Ok(())
}

/// Runs the agent until it ends, and returns the agent's exit code. Ctrl-C goes to the agent only. SIGTERM and SIGHUP
/// end this process and the server.
fn run_agent(setup: &AgentSetup, args: &cli::LaunchArgs, server: Option<u32>) -> Result<i32, CommandError> {
    let failed = &CommandError::io(setup.program);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(failed)?;
    let _guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
    runtime.spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => continue,
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            if let Some(id) = server {
                os::terminate(id);
            }
            exit(1);
        }
    });
    let mut command = Command::new(setup.program);
    for name in setup.removed {
        command.env_remove(name);
    }
    command.envs(setup.variables.iter().map(|(name, value)| (name, value)));
    let status = command.args(&setup.args).args(&args.args).status().map_err(failed)?;
    Ok(status.code().unwrap_or(1))
}

/// A server that this process started. The server ends when the agent ends.
struct OwnServer(Child);

impl OwnServer {
    /// Starts `moestro serve` and waits until it is ready. The log of the server goes to a file.
    fn start(args: &cli::LaunchArgs, server_args: &[String]) -> Result<Self, CommandError> {
        let failed = &CommandError::io("starting a server");
        let log = os::state_dir().map_or_else(|| PathBuf::from("/dev/null"), |dir| dir.join("launch.log"));
        log.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        let mut command = Command::new(env::current_exe().map_err(failed)?);
        command.args(server_args);
        if let Some(key) = &args.remote.api_key {
            command.env("MOESTRO_API_KEY", key);
        }
        let log_file = File::create(&log).map_err(failed)?;
        // The server inherits the lock, which keeps `moestro cache` from removing the log.
        let _ = log_file.try_lock_shared();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file);
        // Ctrl-C on the terminal must reach the agent only.
        let mut child = command.process_group(0).spawn().map_err(failed)?;
        print_note(format_args!("starting a server; its log is {}", log.display()));
        let mut line = String::new();
        let stdout = child.stdout.take();
        let read = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        let server = Self(child);
        if matches!(read, Some(Ok(_))) && ready["event"] == "ready" {
            return Ok(server);
        }
        // The server prints why it ends, except after a usage error.
        let log = fs::read_to_string(&log).unwrap_or_default();
        let last = log.lines().next_back().unwrap_or("no message").trim_start_matches("moestro: ");
        let why = ready["detail"].as_str().unwrap_or(last);
        Err(usage(&format!("the server did not start: {why}")))
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        if io::stderr().is_terminal() {
            print_note("stopping the server");
        }
        os::terminate(self.0.id());
        let _ = self.0.wait();
    }
}

fn usage(why: &str) -> CommandError {
    CommandError::Usage(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_shells() {
        assert_eq!(quoted("--port=1"), "--port=1");
        assert_eq!(quoted("What's up?"), "'What'\\''s up?'");
        assert_eq!(quoted(""), "''");
    }
}
