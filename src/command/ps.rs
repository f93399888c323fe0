//! `moestro ps` and `stop`: show or unload the model of a running server.

use super::printable;
use crate::{cli, error::CommandError};
use serde_json::{Value, json};
use std::{io, time::Duration};

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

struct RemoteServer<'a> {
    typed: &'a cli::RemoteArgs,
    agent: ureq::Agent,
}

impl<'a> RemoteServer<'a> {
    fn new(typed: &'a cli::RemoteArgs) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false).build();
        Self { typed, agent: config.into() }
    }

    fn url(&self, path: &str) -> String {
        let host = &self.typed.host;
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.clone() };
        format!("http://{host}:{}{path}", self.typed.port)
    }

    /// Sends a request and returns the JSON of the response.
    ///
    /// # Errors
    /// The server cannot be reached, or the response is an error.
    fn ask(&self, path: &str, body: Option<&Value>) -> Result<Value, CommandError> {
        let key = format!("Bearer {}", self.typed.api_key.as_deref().unwrap_or_default());
        let sent = match body {
            None => self.agent.get(self.url(path)).header("authorization", &key).call(),
            Some(body) => self
                .agent
                .post(self.url(path))
                .header("authorization", &key)
                .header("content-type", "application/json")
                .send(body.to_string()),
        };
        let failed = |source| CommandError::Io { what: format!("asking {}", self.url(path)), source };
        let mut answer = sent.map_err(|error| match error {
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let at = format!("{}:{}", self.typed.host, self.typed.port);
                CommandError::Service(format!(
                    "no server at {at}: use --host and --port for another address, or `moestro serve` starts one"
                ))
            }
            error => failed(io::Error::other(error)),
        })?;
        let text = answer.body_mut().read_to_string().map_err(|error| failed(io::Error::other(error)))?;
        let answer: Value = serde_json::from_str(&text).map_err(|error| failed(error.into()))?;
        match answer["error"]["message"].as_str() {
            Some(reason) => Err(CommandError::Service(printable(reason).into_owned())),
            None => Ok(answer),
        }
    }
}

/// Prints the loaded model and its load, or that no model is loaded.
pub fn ps(typed: &cli::PsArgs) -> Result<(), CommandError> {
    let health = RemoteServer::new(&typed.remote).ask("/health", None)?;
    println!("{}", printable(&line(&health)));
    Ok(())
}

fn line(health: &Value) -> String {
    let Some(model) = health["model"].as_str() else {
        return match health["status"].as_str() {
            Some("ok") => "no model is in memory; the next request loads one".into(),
            status => format!("no model is in memory: {}", status.unwrap_or("unknown status")),
        };
    };
    let parts = ["trunk", "kv", "state", "workspace", "experts", "prompt_cache"];
    let bytes: f64 = parts.iter().filter_map(|part| health["plan"][part].as_f64()).sum();
    let (device, context) = (health["plan"]["device"].as_str().unwrap_or("?"), &health["context"]);
    let (running, queued) = (&health["requests"]["running"], &health["requests"]["queued"]);
    format!("{model}  {:.1} GB  {device}  context {context}  {running} running, {queued} waiting", bytes / 1e9)
}

/// Makes the server unload a model. The next request loads it again.
pub fn stop(typed: &cli::StopArgs) -> Result<(), CommandError> {
    RemoteServer::new(&typed.remote).ask("/v1/models/unload", Some(&json!({"model": typed.name}))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaded_model_is_one_line() {
        let health = json!({"status": "ok", "model": "x", "context": 4096, "requests": {"running": 1, "queued": 2},
            "plan": {"trunk": 1_000_000_000u64, "experts": 500_000_000, "device": "cpu", "limit": 7}});
        assert_eq!(line(&health), "x  1.5 GB  cpu  context 4096  1 running, 2 waiting");
        assert!(line(&json!({"status": "ok", "model": null})).contains("the next request"));
        assert_eq!(line(&json!({"status": "loading"})), "no model is in memory: loading");
    }
}
