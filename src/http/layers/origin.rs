//! Protection from web pages: checks `Host`, `Origin` and `Content-Type`.
//!
//! Any web page can send requests to a server on the same machine. Without permission it cannot send JSON, so bodies
//! must have a JSON content type. Its `Origin` header names the page. If the page's own host name resolves to this
//! machine (DNS rebinding), `Host` has that name.
//!
//! A server on a non-loopback address cannot know its names. It checks them only if `--allowed-host` gives some.

use crate::http::{errors::ApiError, routes};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use parking_lot::RwLock;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// Hosts and origins that may use the server. By default all may. Clones share their rules.
#[derive(Debug, Clone, Default)]
pub struct OriginPolicy(Arc<RwLock<OriginRules>>);

#[derive(Debug, Clone, Default)]
struct OriginRules {
    /// Allowed host names in addition to local names; `None` allows any host and any origin.
    hosts: Option<Vec<String>>,
    origin: Option<HeaderValue>,
}

impl OriginPolicy {
    /// Rules for a server that listens on `address`, has the names `hosts`, and allows pages of `origin`.
    pub fn new(address: IpAddr, hosts: &[String], origin: Option<HeaderValue>) -> Self {
        let is_checked = address.is_loopback() || !hosts.is_empty();
        let hosts = is_checked.then(|| hosts.to_vec());
        Self(Arc::new(RwLock::new(OriginRules { hosts, origin })))
    }

    /// Takes over the rules of `other`.
    pub fn replace(&self, other: &Self) {
        let rules = other.rules();
        *self.0.write() = rules;
    }

    /// True if a page of this origin may read responses: a local page, or one of the configured origin.
    pub fn allows_reading(&self, origin: &HeaderValue) -> bool {
        let host = origin.to_str().ok().and_then(|origin| Some(host_name(origin.split_once("://")?.1)));
        self.rules().origin.as_ref() == Some(origin) || host.is_some_and(is_loopback)
    }

    fn rules(&self) -> OriginRules {
        self.0.read().clone()
    }
}

impl OriginRules {
    /// Checks the `Host` and `Origin` headers, and the authority of an absolute request URI.
    fn check(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<(), ApiError> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let is_known = |host: &str| is_loopback(host) || hosts.iter().any(|known| known.eq_ignore_ascii_case(host));
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        // A request without a host cannot come from a browser.
        let given = headers.get_all(header::HOST).iter().map(text).chain(authority.map(str::to_owned));
        for host in given {
            if !is_known(host_name(&host)) && !is_local(host_name(&host)) {
                return Err(ApiError::wrong_host(host_name(&host)));
            }
        }
        let allows_any = self.origin.as_ref().is_some_and(|origin| origin == "*");
        for origin in headers.get_all(header::ORIGIN) {
            let text = text(origin);
            let host = text.split_once("://").map(|(_, host)| host_name(host));
            if !allows_any && self.origin.as_ref() != Some(origin) && !host.is_some_and(is_known) {
                return Err(ApiError::wrong_origin(&text));
            }
        }
        Ok(())
    }
}

/// The host of `host:port`.
fn host_name(authority: &str) -> &str {
    let end = match authority.strip_prefix('[').and_then(|rest| rest.find(']')) {
        Some(bracket) => bracket + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    &authority[..end]
}

/// True for `localhost`, 127.0.0.0/8 and `[::1]`. No other machine can have these names.
fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// True for hosts that public DNS cannot resolve to this machine, so DNS rebinding cannot use them: IP addresses, mDNS
/// names, and the name of the host in a Docker container.
fn is_local(host: &str) -> bool {
    let is_v6 = |host: &str| host.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok();
    let name = host.to_ascii_lowercase();
    host.parse::<Ipv4Addr>().is_ok()
        || is_v6(host).is_some()
        || name.ends_with(".local")
        || name == "host.docker.internal"
}

/// Refuses requests that a foreign web page may have sent.
pub async fn check_origin(State(policy): State<OriginPolicy>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    if let Err(error) = policy.rules().check(request.headers(), authority.as_deref()) {
        return error.into_response();
    }
    let mut types = request.headers().get_all(header::CONTENT_TYPE).iter().peekable();
    let is_json = types.peek().is_some() && types.all(is_json_type);
    if request.method() == Method::POST && routes::takes_json(request.uri().path()) && !is_json {
        return ApiError::not_json().into_response();
    }
    next.run(request).await
}

/// True for `application/json`, with or without parameters.
fn is_json_type(value: &HeaderValue) -> bool {
    let media = value.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default();
    media.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(policy: &OriginPolicy, host: &str, origin: Option<&str>) -> Option<u16> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        origin.map(|origin| headers.insert(header::ORIGIN, origin.parse().unwrap()));
        policy.rules().check(&headers, None).err().map(|error| error.status.as_u16())
    }

    #[test]
    fn loopback_server_allows_local_hosts_only() {
        let policy = OriginPolicy::new([127, 0, 0, 1].into(), &["box.lan".into()], None);
        for host in ["localhost", "LOCALHOST:5413", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:5413", "box.lan:1"] {
            assert_eq!(refusal(&policy, host, None), None, "{host}");
        }
        for host in ["192.168.0.1:5413", "[fd00::2]", "studio.local", "Studio.LOCAL:5413", "host.docker.internal:5413"]
        {
            assert_eq!(refusal(&policy, host, None), None, "{host}");
        }
        for host in
            ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com:80", "local.evil.com", "", "[", "[::1", "::1"]
        {
            assert_eq!(refusal(&policy, host, None), Some(403), "{host}");
        }
    }

    #[test]
    fn local_pages_may_read_responses() {
        let policy = OriginPolicy::new([127, 0, 0, 1].into(), &[], Some("https://chat.example".parse().unwrap()));
        for origin in ["http://localhost:3000", "http://127.0.0.1", "https://chat.example"] {
            assert!(policy.allows_reading(&origin.parse().unwrap()), "{origin}");
        }
        for origin in ["https://evil.com", "http://192.168.0.1", "null", "http://localhost.evil.com"] {
            assert!(!policy.allows_reading(&origin.parse().unwrap()), "{origin}");
        }
    }

    #[test]
    fn loopback_server_allows_local_and_given_origins() {
        let policy = OriginPolicy::new([127, 0, 0, 1].into(), &[], Some("https://chat.example".parse().unwrap()));
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "https://chat.example"] {
            assert_eq!(refusal(&policy, "localhost", Some(origin)), None, "{origin}");
        }
        for origin in
            ["https://evil.com", "http://chat.example", "null", "http://localhost.evil.com", "https://chat.example:1"]
        {
            assert_eq!(refusal(&policy, "localhost", Some(origin)), Some(403), "{origin}");
        }
        let any = OriginPolicy::new([127, 0, 0, 1].into(), &[], Some("*".parse().unwrap()));
        assert_eq!(refusal(&any, "localhost", Some("https://evil.com")), None);
    }

    #[test]
    fn other_addresses_check_given_names_only() {
        let policy = OriginPolicy::new([0, 0, 0, 0].into(), &[], None);
        assert_eq!(refusal(&policy, "box.lan", Some("https://evil.com")), None);
        let named = OriginPolicy::new([0, 0, 0, 0].into(), &["box.lan".into()], None);
        assert_eq!(refusal(&named, "box.lan:5413", None), None);
        assert_eq!(refusal(&named, "evil.com", None), Some(403));
    }

    #[test]
    fn json_type_may_have_parameters() {
        for json in ["application/json", "Application/JSON; charset=utf-8", " application/json ;x"] {
            assert!(is_json_type(&json.parse().unwrap()), "{json}");
        }
        for other in
            ["text/plain", "text/plain;application/json", "application/jsonp", "application/x-www-form-urlencoded", ""]
        {
            assert!(!is_json_type(&other.parse().unwrap()), "{other}");
        }
    }
}
