//! HTTP as a hub speaks it, with little trust: an answer may come from anybody's mirror.

use std::{io, io::Read, time::Duration};
use ureq::{
    Agent, Body,
    http::{HeaderMap, Response},
    tls::{RootCerts, TlsConfig},
};

/// Redirects that are followed for one answer.
const HOPS: u32 = 6;
/// A connection on which nothing arrives for so long is given up.
const SILENCE: Duration = Duration::from_secs(60);
/// Bytes of a listing at most; a model of thousands of files takes one million.
const LISTING: u64 = 32 << 20;

/// The reason for which there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("status {0}")]
    Status(u16),
    /// The connection; trying again may help.
    #[error("{0}")]
    Broken(String),
    /// The answer makes no sense; it will not be better next time.
    #[error("{0}")]
    Nonsense(String),
    /// Our own disk.
    #[error("{0}")]
    Disk(io::Error),
}

impl Failure {
    /// True if trying again may help.
    pub fn passes(&self) -> bool {
        match self {
            Failure::Status(status) => *status == 429 || *status >= 500,
            Failure::Broken(_) => true,
            Failure::Nonsense(_) | Failure::Disk(_) => false,
        }
    }
}

/// One hub.
pub struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// The bytes of a file that an answer brings.
pub struct Part {
    /// Bytes of the whole file, if the hub says.
    pub size: Option<u64>,
    /// These bytes are the part that was asked for; else the file begins.
    pub ranged: bool,
    /// The file's ETag.
    pub tag: Option<String>,
    pub body: Box<dyn Read>,
}

impl Client {
    /// `endpoint`: `https://host[:port]`, perhaps with a path. The certificates are those that the system trusts.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            // We follow redirects ourselves: the token must not.
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("moestro/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE));
        Self { agent: config.build().new_agent(), endpoint: endpoint.trim_end_matches('/').into(), token }
    }

    /// The JSON at `path` below the endpoint.
    pub fn json<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let answer = self.get(path, None)?;
        let mut text = Vec::new();
        let read = answer.into_body().into_reader().take(LISTING + 1).read_to_end(&mut text);
        read.map_err(|error| Failure::Broken(error.to_string()))?;
        if text.len() as u64 > LISTING {
            return Err(Failure::Nonsense(format!("an answer of more than {LISTING} bytes")));
        }
        serde_json::from_slice(&text)
            .map_err(|error| Failure::Nonsense(format!("an answer that is no listing: {error}")))
    }

    /// The file at `path` from byte `start` on, or from its beginning, if the hub knows nothing else.
    pub fn part(&self, path: &str, start: u64, end: Option<u64>) -> Result<Part, Failure> {
        let end = end.map(|end| end.to_string()).unwrap_or_default();
        let answer = self.get(path, Some(&format!("bytes={start}-{end}")))?;
        let (head, body) = answer.into_parts();
        let body = Box::new(body.into_reader());
        let tag = field(&head.headers, "etag").map(str::to_owned);
        if head.status != 206 {
            let size = field(&head.headers, "content-length").and_then(|text| text.parse().ok());
            return Ok(Part { size, ranged: false, tag, body });
        }
        // `bytes FIRST-LAST/SIZE`, where SIZE may be `*`.
        let range = field(&head.headers, "content-range").and_then(|text| text.strip_prefix("bytes "));
        let (range, size) = range.and_then(|range| range.split_once('/')).unwrap_or_default();
        match range.split_once('-').and_then(|(first, _)| first.parse::<u64>().ok()) {
            Some(first) if first == start => Ok(Part { size: size.parse().ok(), ranged: true, tag, body }),
            _ => Err(Failure::Nonsense(format!("bytes from {start} on were asked for, {range:?} came"))),
        }
    }

    /// Asks, and follows redirects; the token goes to the endpoint's own origin alone.
    fn get(&self, path: &str, range: Option<&str>) -> Result<Response<Body>, Failure> {
        let home = origin(&self.endpoint).unwrap_or_default().to_lowercase();
        let mut url = format!("{}/{path}", self.endpoint);
        for _ in 0..=HOPS {
            let mut request = self.agent.get(&url);
            if let Some(range) = range {
                // Compressed bytes have other places.
                request = request.header("range", range).header("accept-encoding", "identity");
            }
            let ours = origin(&url).is_some_and(|origin| origin.to_lowercase() == home);
            if let Some(token) = self.token.as_ref().filter(|_| ours) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let answer = request.call().map_err(|error| Failure::Broken(error.to_string()))?;
            let status = answer.status().as_u16();
            match (status, field(answer.headers(), "location")) {
                (200..=299, _) => return Ok(answer),
                (301 | 302 | 303 | 307 | 308, Some(to)) => {
                    let next = resolve(&url, to)
                        .ok_or_else(|| Failure::Nonsense(format!("a redirect to {to:?}, which is no address")))?;
                    if url.starts_with("https://") && !next.starts_with("https://") {
                        return Err(Failure::Nonsense(format!("a redirect from https to {next:?}")));
                    }
                    url = next;
                }
                _ => return Err(Failure::Status(status)),
            }
        }
        Err(Failure::Nonsense(format!("more than {HOPS} redirects")))
    }
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> Option<&str> {
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |end| start + end);
    // A name and password before the host would hide which host it is.
    (matches!(&url[..start], "http://" | "https://") && end > start && !url[start..end].contains('@'))
        .then(|| &url[..end])
}

/// The target of a redirect at `url` to `to`.
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
    fn where_a_redirect_leads() {
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
