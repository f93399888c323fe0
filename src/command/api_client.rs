//! A client of the server's API, for a server that runs at an address, and for a server inside this process.

use super::text::printable;
use crate::{
    cli::model_args::RemoteArgs,
    error::CommandError,
    http::{self, ServerState},
};
use axum::{
    Router,
    body::{Body, BodyDataStream},
    http::{Request, Response, StatusCode, header},
};
use hyper::{client::conn::http1, service::Service};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use serde_json::{Value, json};
use std::{error::Error, future::Future, io, sync::Arc, time::Duration};
use tokio::{net::TcpStream, runtime, task::JoinSet, time::timeout};
use tokio_stream::StreamExt;

/// Time limit for connecting, and for a request that the server answers immediately.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the head of a response that may need a model, and for each pause of its body. A busy server sends
/// comments within this time.
const SILENCE: Duration = Duration::from_secs(600);

/// A client of one server.
pub struct ApiClient {
    endpoint: Endpoint,
    runtime: runtime::Runtime,
}

enum Endpoint {
    /// A running server.
    Address(RemoteArgs),
    /// A server without a port. Its router is called directly.
    InProcess(Arc<ServerState>, Router),
}

impl ApiClient {
    /// A client of the server at an address. Does not connect yet.
    pub fn remote(args: &RemoteArgs) -> Result<Self, CommandError> {
        Self::new(Endpoint::Address(args.clone()))
    }

    /// A client of a server inside this process.
    pub fn in_process(state: Arc<ServerState>) -> Result<Self, CommandError> {
        let router = http::router(state.clone());
        Self::new(Endpoint::InProcess(state, router))
    }

    fn new(endpoint: Endpoint) -> Result<Self, CommandError> {
        // A thread runs the server inside this process, also between two requests.
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Self { endpoint, runtime: runtime.map_err(CommandError::io("starting threads"))? })
    }

    /// Address of the server, such as `http://127.0.0.1:5413`. `None` for a server inside this process.
    pub fn address(&self) -> Option<String> {
        match &self.endpoint {
            Endpoint::Address(args) => Some(base_url(args)),
            Endpoint::InProcess(..) => None,
        }
    }

    /// Waits for `work`, which may call the asynchronous functions of this client.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Sends a request that the server answers immediately, and returns the JSON of the response. Without a body, the
    /// method is GET.
    ///
    /// # Errors
    /// The server cannot be reached, or the response is an error.
    pub fn ask(&self, path: &str, body: Option<&Value>) -> Result<Value, CommandError> {
        self.ask_within(TIMEOUT, path, body)
    }

    /// Sends a request for which the server may have to load a model, and returns the JSON of the response.
    ///
    /// # Errors
    /// As for [`ApiClient::ask`].
    pub fn ask_model(&self, path: &str, body: &Value) -> Result<Value, CommandError> {
        self.ask_within(SILENCE, path, Some(body))
    }

    fn ask_within(&self, limit: Duration, path: &str, body: Option<&Value>) -> Result<Value, CommandError> {
        self.block_on(within(limit, &self.name(path), async { self.send(path, body).await?.whole().await?.json() }))
    }

    /// The state of the server, if a server of Moestro answers.
    pub fn health(&self) -> Option<Value> {
        self.state().ok().filter(|health| health["version"].is_string())
    }

    /// The state of the server. A server that has no model yet reports its state with an HTTP error.
    ///
    /// # Errors
    /// The server cannot be reached, or does not report a state.
    pub fn state(&self) -> Result<Value, CommandError> {
        self.block_on(within(TIMEOUT, &self.name("/health"), async {
            let response = self.send("/health", None).await?.whole().await?;
            let state = response.checked(&response.unused).ok().filter(|state| state["status"].is_string());
            state.map_or_else(|| response.json(), Ok)
        }))
    }

    /// The entry of a model in the server's list.
    ///
    /// # Errors
    /// The API key is missing or wrong.
    pub fn model(&self, id: &str) -> Result<Option<Value>, CommandError> {
        let list = self.ask("/v1/models", None)?;
        Ok(list["data"].as_array().into_iter().flatten().find(|model| model["id"] == id).cloned())
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
        Ok(self.model(id)?.is_some())
    }

    /// Unloads a model. A running server loads the model again for the next request.
    pub fn unload(&self, model: &str) -> Result<(), CommandError> {
        self.ask("/v1/models/unload", Some(&json!({"model": model}))).map(drop)
    }

    /// Frees the model of a server inside this process. A running server keeps its model.
    pub fn close(self) {
        if let Endpoint::InProcess(state, _) = &self.endpoint {
            self.block_on(state.models.unload_now());
        }
    }

    /// Sends a request whose response is a stream of events.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses the request.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<ApiResponse, CommandError> {
        let response = self.send(path, Some(body)).await?;
        if response.status.is_success() { Ok(response) } else { Err(response.whole().await?.refusal()) }
    }

    async fn send(&self, path: &str, body: Option<&Value>) -> Result<ApiResponse, CommandError> {
        let name = self.name(path);
        let mut request = if body.is_some() { Request::post(path) } else { Request::get(path) };
        request = request.header(header::CONTENT_TYPE, "application/json");
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let mut connection = JoinSet::new();
        let response = match &self.endpoint {
            Endpoint::InProcess(_, router) => {
                let request = request.body(body).map_err(|error| failed(&name, error))?;
                let Ok(response) = TowerToHyperService::new(router.clone()).call(request).await;
                response
            }
            Endpoint::Address(args) => {
                let socket = connect(args).await?;
                let (mut sender, task) =
                    http1::handshake(TokioIo::new(socket)).await.map_err(|error| failed(&name, error))?;
                connection.spawn(task);
                request = request.header(header::HOST, format!("{}:{}", host(args), args.port));
                if let Some(key) = &args.api_key {
                    request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
                }
                let request = request.body(body).map_err(|error| failed(&name, error))?;
                let response = timeout(SILENCE, sender.send_request(request)).await;
                let response = response.map_err(|late| failed(&name, late))?;
                response.map_err(|error| failed(&name, error))?.map(Body::new)
            }
        };
        Ok(ApiResponse::new(name, response, connection))
    }

    /// Names a request in errors.
    fn name(&self, path: &str) -> String {
        format!("asking {}{path}", self.address().unwrap_or_default())
    }
}

/// A response that is being read. Dropping it ends the request.
pub struct ApiResponse {
    /// The request, for errors.
    name: String,
    status: StatusCode,
    body: BodyDataStream,
    /// Bytes of the body that were not used yet.
    unused: Vec<u8>,
    /// The task that reads from the socket. It ends, and the socket is closed, when this response is dropped.
    _connection: JoinSet<hyper::Result<()>>,
}

impl ApiResponse {
    fn new(name: String, response: Response<Body>, connection: JoinSet<hyper::Result<()>>) -> Self {
        let status = response.status();
        let body = response.into_body().into_data_stream();
        Self { name, status, body, unused: Vec::new(), _connection: connection }
    }

    /// Reads the next bytes of the body. Returns false at its end.
    async fn read(&mut self) -> Result<bool, CommandError> {
        match timeout(SILENCE, self.body.next()).await {
            Ok(None) => Ok(false),
            Ok(Some(Ok(bytes))) => {
                self.unused.extend_from_slice(&bytes);
                Ok(true)
            }
            Ok(Some(Err(error))) => Err(failed(&self.name, error)),
            Err(late) => Err(failed(&self.name, late)),
        }
    }

    /// Reads the whole body.
    async fn whole(mut self) -> Result<Self, CommandError> {
        while self.read().await? {}
        Ok(self)
    }

    /// The JSON of a body that was read.
    ///
    /// # Errors
    /// The status or the body is an error, or the body is no JSON.
    fn json(&self) -> Result<Value, CommandError> {
        if self.status.is_success() { self.checked(&self.unused) } else { Err(self.refusal()) }
    }

    /// The error of a response whose status is an error: the server's sentence, or else the status.
    fn refusal(&self) -> CommandError {
        let stated = serde_json::from_slice(&self.unused).ok().and_then(|body| stated_error(&body));
        stated.unwrap_or_else(|| failed(&self.name, format!("the server answers with status {}", self.status)))
    }

    /// The next event of a stream. `None` at its end.
    ///
    /// # Errors
    /// The connection fails, or the server sends an error.
    pub async fn next_event(&mut self) -> Result<Option<Value>, CommandError> {
        loop {
            while let Some(end) = self.unused.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unused.drain(..=end).collect();
                match line.strip_prefix(b"data: ").map(<[u8]>::trim_ascii) {
                    None => {}
                    Some(b"[DONE]") => return Ok(None),
                    Some(event) => return self.checked(event).map(Some),
                }
            }
            if !self.read().await? {
                return Ok(None);
            }
        }
    }

    /// Parses JSON of the server.
    ///
    /// # Errors
    /// It is an error, or no JSON.
    fn checked(&self, text: &[u8]) -> Result<Value, CommandError> {
        let not_json = |error| failed(&self.name, format!("the server's answer is not JSON: {error}"));
        let value = serde_json::from_slice(text).map_err(not_json)?;
        stated_error(&value).map_or(Ok(value), Err)
    }
}

/// The error that a response of the server states.
fn stated_error(response: &Value) -> Option<CommandError> {
    let error = &response["error"];
    if let (Some(prompt), Some(context)) = (error["n_prompt_tokens"].as_u64(), error["n_ctx"].as_u64()) {
        // The server's own sentence speaks to the writer of a client.
        return Some(CommandError::Service(format!("the prompt has {prompt} tokens, the context {context}")));
    }
    // Other servers send the sentence without an object.
    let sentence = error["message"].as_str().or(error.as_str())?;
    Some(CommandError::Service(printable(sentence).into_owned()))
}

/// Waits for the answer to the request `name`.
async fn within<T>(
    limit: Duration,
    name: &str,
    answer: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    timeout(limit, answer).await.unwrap_or_else(|late| Err(failed(name, late)))
}

async fn connect(args: &RemoteArgs) -> Result<TcpStream, CommandError> {
    let bare = host(args).trim_matches(['[', ']']).to_owned();
    let connected = timeout(TIMEOUT, TcpStream::connect((bare, args.port))).await;
    connected.unwrap_or_else(|late| Err(late.into())).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => CommandError::Service(format!(
            "no server at {}:{}: use --host and --port for another address, or `moestro serve` starts one",
            args.host, args.port
        )),
        _ => failed(&format!("connecting to {}", base_url(args)), error),
    })
}

/// Address of a server, such as `http://127.0.0.1:5413`.
pub fn base_url(args: &RemoteArgs) -> String {
    format!("http://{}:{}", host(args), args.port)
}

/// The host to connect to, as in a URL. If the server listens on all addresses, this is the loopback address.
fn host(args: &RemoteArgs) -> String {
    match args.host.as_str() {
        "0.0.0.0" => "127.0.0.1".into(),
        "::" | "[::]" => "[::1]".into(),
        host if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
        host => host.into(),
    }
}

fn failed(name: &str, error: impl Into<Box<dyn Error + Send + Sync>>) -> CommandError {
    CommandError::io(name)(io::Error::other(error))
}
