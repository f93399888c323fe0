//! A running server as a client sees it: its state, its models, and its streamed answers.

use super::text::printable;
use crate::{cli::model_args::RemoteArgs, error::CommandError};
use serde_json::{Value, json};
use std::{
    io::{self, BufRead, BufReader},
    time::Duration,
};
use ureq::http::Response;

/// Time limit of a request that the server answers immediately.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for connecting, and for each pause of a stream. A busy server sends comments within this time.
const SILENCE: Duration = Duration::from_secs(600);

/// A server at a given address.
#[derive(Debug, Clone)]
pub struct RemoteServer {
    args: RemoteArgs,
    agent: ureq::Agent,
}

impl RemoteServer {
    pub fn new(args: &RemoteArgs) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false).build();
        Self { args: args.clone(), agent: config.into() }
    }

    /// Address of the server, such as `http://127.0.0.1:5413`.
    pub fn base_url(&self) -> String {
        // If the server listens on all addresses, the client connects to the loopback address.
        let host = match self.args.host.as_str() {
            "0.0.0.0" => "127.0.0.1",
            "::" | "[::]" => "::1",
            host => host,
        };
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
        format!("http://{host}:{}", self.args.port)
    }

    pub fn api_key(&self) -> Option<&str> {
        self.args.api_key.as_deref()
    }

    fn authorization(&self) -> String {
        format!("Bearer {}", self.api_key().unwrap_or_default())
    }

    fn post(&self, agent: &ureq::Agent, url: &str, body: &Value) -> Result<Response<ureq::Body>, ureq::Error> {
        let request = agent.post(url).header("authorization", self.authorization());
        request.header("content-type", "application/json").send(body.to_string())
    }

    /// Sends a request and returns the JSON of the response.
    ///
    /// # Errors
    /// The server cannot be reached, or the response is an error.
    pub fn ask(&self, path: &str, body: Option<&Value>) -> Result<Value, CommandError> {
        let url = format!("{}{path}", self.base_url());
        let sent = match body {
            None => self.agent.get(&url).header("authorization", self.authorization()).call(),
            Some(body) => self.post(&self.agent, &url, body),
        };
        let failed = &CommandError::io(format!("asking {url}"));
        let mut answer = sent.map_err(|error| match error {
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let at = format!("{}:{}", self.args.host, self.args.port);
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

    /// The state of the server, if a server runs at the address.
    pub fn health(&self) -> Option<Value> {
        self.ask("/health", None).ok().filter(|health| health["version"].is_string())
    }

    /// True if the server would answer with the model `id`: either this model is loaded, or no model is loaded and the
    /// server can load this model.
    ///
    /// # Errors
    /// The API key is missing or wrong.
    pub fn has_model(&self, id: &str) -> Result<bool, CommandError> {
        let Some(health) = self.health() else { return Ok(false) };
        if health["model"].as_str().is_some_and(|loaded| loaded != id) {
            return Ok(false);
        }
        let list = self.ask("/v1/models", None)?;
        Ok(list["data"].as_array().into_iter().flatten().any(|model| model["id"] == id))
    }

    /// Sends a chat request and calls `each` with every event, until the stream ends or `each` returns false. Blocks.
    ///
    /// # Errors
    /// The connection fails, or the server sends an error.
    pub fn stream_chat(&self, body: &Value, mut each: impl FnMut(&Value) -> bool) -> Result<(), CommandError> {
        let url = format!("{}/v1/chat/completions", self.base_url());
        let failed = &CommandError::io(format!("asking {url}"));
        let config = ureq::Agent::config_builder().timeout_connect(Some(TIMEOUT)).timeout_per_read(Some(SILENCE));
        let agent: ureq::Agent = config.http_status_as_error(false).build().into();
        let answer = self.post(&agent, &url, body).map_err(|error| failed(io::Error::other(error)))?;
        let refused = |event: &Value| {
            let reason = event["error"]["message"].as_str()?;
            Some(CommandError::Service(printable(reason).into_owned()))
        };
        let is_stream = answer.status().is_success();
        let mut lines = BufReader::new(answer.into_body().into_reader());
        if !is_stream {
            let error: Value = serde_json::from_reader(lines).unwrap_or_default();
            return Err(refused(&error).unwrap_or_else(|| failed(io::Error::other("the server refused the request"))));
        }
        let mut line = String::new();
        loop {
            line.clear();
            if lines.read_line(&mut line).map_err(failed)? == 0 {
                return Ok(());
            }
            let Some(data) = line.strip_prefix("data: ").map(str::trim) else { continue };
            if data == "[DONE]" {
                return Ok(());
            }
            let event: Value = serde_json::from_str(data).map_err(|error| failed(error.into()))?;
            if let Some(error) = refused(&event) {
                return Err(error);
            }
            if !each(&event) {
                return Ok(());
            }
        }
    }

    /// Unloads a model. The next request loads the model again.
    pub fn unload(&self, model: &str) -> Result<(), CommandError> {
        self.ask("/v1/models/unload", Some(&json!({"model": model}))).map(drop)
    }
}
