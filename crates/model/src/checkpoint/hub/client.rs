//! [`HubClient`] sends HTTP requests to a hub or a mirror. Responses are untrusted.

use moestro_base::error::StoreError;
use std::{io::Read, time::Duration};
use ureq::{
    Agent, Body,
    http::{HeaderMap, Response},
};

/// Maximum number of consecutive attempts in which no byte arrives.
pub const MAX_ATTEMPTS: u32 = 5;
/// Maximum number of redirects per request.
const MAX_REDIRECTS: u32 = 6;
/// A connection is closed if it transfers no byte for this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of a listing in bytes. The listing of a model with thousands of files has about one million bytes.
const MAX_LISTING_BYTES: u64 = 32 << 20;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("status {status}")]
    Status {
        status: u16,
        /// The hub's error code, such as `GatedRepo`.
        code: String,
    },
    /// The connection failed. A retry may help.
    #[error("{0}")]
    Connection(String),
    /// The response is invalid. A retry does not help.
    #[error("{0}")]
    Invalid(String),
}

impl RequestError {
    /// True if a retry may help.
    pub fn is_temporary(&self) -> bool {
        match self {
            RequestError::Status { status, .. } => *status == 429 || *status >= 500,
            RequestError::Connection(_) => true,
            RequestError::Invalid(_) => false,
        }
    }
}

/// A client of one hub.
pub struct HubClient {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// A response to a request for part of a file.
pub struct FileResponse {
    /// Size of the whole file. `None` if the hub does not report the size.
    pub size: Option<u64>,
    /// True if the body is the requested range. False if the body is the whole file.
    pub is_range: bool,
    /// The file's ETag. `None` if the hub does not send an ETag.
    pub etag: Option<String>,
    pub body: Box<dyn Read>,
}

impl HubClient {
    /// `endpoint` is `https://host[:port]`, optionally with a path. Trusts the system's certificate authorities.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            // `get` itself follows redirects, so that it can withhold the token from other hosts.
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("moestro/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_per_read(Some(IDLE_TIMEOUT))
            .timeout_per_write(Some(IDLE_TIMEOUT));
        #[cfg(feature = "hub")]
        let config = {
            use ureq::tls::{RootCerts, TlsConfig};
            config.tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
        };
        Self { agent: config.build().new_agent(), endpoint: endpoint.trim_end_matches('/').into(), token }
    }

    /// Requests the JSON document at `path` below the endpoint.
    pub fn json<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, RequestError> {
        let response = self.get(path, &[])?;
        let mut text = Vec::new();
        let read = response.into_body().into_reader().take(MAX_LISTING_BYTES + 1).read_to_end(&mut text);
        read.map_err(|error| RequestError::Connection(error.to_string()))?;
        if text.len() as u64 > MAX_LISTING_BYTES {
            return Err(RequestError::Invalid(format!("a response of more than {MAX_LISTING_BYTES} bytes")));
        }
        serde_json::from_slice(&text).map_err(|_| {
            RequestError::Invalid(match text.trim_ascii_start().first() {
                Some(b'<') => "a web page instead of a listing, perhaps the login page of this network".into(),
                _ => "a response that is not a listing of files".into(),
            })
        })
    }

    /// The bytes of the file at `path` from `start` to `end` (inclusive). A hub without range support returns the whole
    /// file. A hub whose responses do not show whether they are the range is asked for the whole file.
    pub fn range(&self, path: &str, start: u64, end: u64) -> Result<FileResponse, RequestError> {
        let (status, headers, response) = self.file(path, &[("range", &format!("bytes={start}-{end}"))])?;
        if status != 206 {
            return Ok(response);
        }
        let Some(text) = header(&headers, "content-range") else {
            // Some mirrors leave the header out. The length of the body then shows whether the body is the range.
            return match response.size {
                Some(length) if length == end - start + 1 => {
                    Ok(FileResponse { size: None, is_range: true, ..response })
                }
                _ => self.whole(path),
            };
        };
        // The form is `bytes FIRST-LAST/SIZE`. SIZE may be `*`.
        let range = text.strip_prefix("bytes ");
        let (range, size) = range.and_then(|range| range.split_once('/')).unwrap_or_default();
        match range.split_once('-').and_then(|(first, _)| first.parse::<u64>().ok()) {
            Some(first) if first == start => Ok(FileResponse { size: size.parse().ok(), is_range: true, ..response }),
            _ => Err(RequestError::Invalid(format!("range {range:?} instead of bytes from {start} on"))),
        }
    }

    /// The whole file at `path`.
    pub fn whole(&self, path: &str) -> Result<FileResponse, RequestError> {
        Ok(self.file(path, &[])?.2)
    }

    /// Requests the file at `path`. Returns status, headers, and the response as if its body were the whole file.
    fn file(&self, path: &str, headers: &[(&str, &str)]) -> Result<(u16, HeaderMap, FileResponse), RequestError> {
        // Forbid compression, since byte offsets refer to the uncompressed file.
        let headers = [headers, &[("accept-encoding", "identity")]].concat();
        let (head, body) = self.get(path, &headers)?.into_parts();
        let size = header(&head.headers, "content-length").and_then(|text| text.parse().ok());
        let etag = header(&head.headers, "etag").map(str::to_owned);
        let response = FileResponse { size, is_range: false, etag, body: Box::new(body.into_reader()) };
        Ok((head.status.as_u16(), head.headers, response))
    }

    /// Sends a GET request and follows redirects. Sends the token only to the endpoint's origin.
    fn get(&self, path: &str, headers: &[(&str, &str)]) -> Result<Response<Body>, RequestError> {
        let home = origin(&self.endpoint).unwrap_or_default().to_lowercase();
        let mut url = format!("{}/{path}", self.endpoint);
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let is_home = origin(&url).is_some_and(|origin| origin.to_lowercase() == home);
            if let Some(token) = self.token.as_ref().filter(|_| is_home) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| RequestError::Connection(error.to_string()))?;
            let status = response.status().as_u16();
            match (status, header(response.headers(), "location")) {
                (200..=299, _) => return Ok(response),
                (301 | 302 | 303 | 307 | 308, Some(to)) => {
                    let next = resolve(&url, to)
                        .ok_or_else(|| RequestError::Invalid(format!("a redirect to the invalid address {to:?}")))?;
                    if url.starts_with("https://") && !next.starts_with("https://") {
                        return Err(RequestError::Invalid(format!("a redirect from https to {next:?}")));
                    }
                    url = next;
                }
                _ => {
                    let code = header(response.headers(), "x-error-code").unwrap_or_default().to_owned();
                    return Err(RequestError::Status { status, code });
                }
            }
        }
        Err(RequestError::Invalid(format!("more than {MAX_REDIRECTS} redirects")))
    }

    /// Converts the error of a request for a model or a file of the model to a message with a hint for the user.
    pub fn describe(&self, id: &str, file: &str, error: RequestError) -> StoreError {
        let what = if file.is_empty() { id.to_owned() } else { format!("{id}, {file}") };
        let endpoint = &self.endpoint;
        let why = match error {
            RequestError::Status { code, .. } if code == "GatedRepo" => {
                let hint = match self.token {
                    Some(_) => "with the account of your token (HF_TOKEN)",
                    None => "and set HF_TOKEN or run `hf auth login`",
                };
                format!("the model is gated: accept its licence at {endpoint}/{id} {hint}")
            }
            RequestError::Status { status: 401 | 403, .. } => {
                let hint = match self.token {
                    Some(_) => "HF_TOKEN must grant access to it",
                    None => "set HF_TOKEN or run `hf auth login` to access it",
                };
                format!("the hub denied access: the model does not exist, or it is private or gated; {hint}")
            }
            RequestError::Status { code, .. } if code == "RevisionNotFound" => "the model has no such revision".into(),
            RequestError::Status { status: 404, .. } => "the hub has no such model or file".into(),
            RequestError::Status { status: 429, .. } => "the hub's rate limit is exceeded; try again later".into(),
            RequestError::Status { status, .. } => format!("the hub returned status {status}"),
            RequestError::Invalid(why) => format!("{endpoint} sent {why}"),
            RequestError::Connection(why) => {
                let why = format!("cannot reach {endpoint}: {why}; check the network, HTTPS_PROXY and HF_ENDPOINT");
                if file.is_empty() {
                    return StoreError::Unreachable(format!("{what}: {why}"));
                }
                why
            }
        };
        StoreError::Other(format!("{what}: {why}"))
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Scheme, host and port of a URL.
fn origin(url: &str) -> Option<&str> {
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |end| start + end);
    // Reject `@`. With a user name before the host, another host could look like the endpoint.
    (matches!(&url[..start], "http://" | "https://") && end > start && !url[start..end].contains('@'))
        .then(|| &url[..end])
}

/// The absolute URL of a redirect from `url` to `to`. `None` if the result is not a valid HTTP URL.
fn resolve(url: &str, to: &str) -> Option<String> {
    let from = origin(url)?;
    let next = if to.contains("://") {
        to.to_owned()
    } else if let Some(rest) = to.strip_prefix("//") {
        format!("{}://{rest}", url.split_once("://")?.0)
    } else if to.starts_with('/') {
        format!("{from}{to}")
    } else {
        let path = url[from.len()..].split(['?', '#']).next()?;
        format!("{from}{}/{to}", path.rsplit_once('/').map_or("", |(dir, _)| dir))
    };
    origin(&next).is_some().then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_resolve_to_valid_origins() {
        let from = "https://hub.example:8443/org/name/resolve/main/a?x=/y";
        for (to, next) in [
            ("/cdn/a", Some("https://hub.example:8443/cdn/a")),
            ("b", Some("https://hub.example:8443/org/name/resolve/main/b")),
            ("//cdn.example/a", Some("https://cdn.example/a")),
            ("http://cdn.example/a", Some("http://cdn.example/a")),
            ("file:///etc/passwd", None),
            ("https://hub.example:8443@evil.example/a", None),
            ("https://", None),
        ] {
            assert_eq!(resolve(from, to).as_deref(), next, "{to}");
        }
        assert_eq!(origin("https://hub.example?x"), Some("https://hub.example"));
        assert_eq!(origin("ftp://hub.example/"), None);
    }
}
