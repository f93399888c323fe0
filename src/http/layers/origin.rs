//! Protection from web pages: checks `Host`, `Origin` and `Content-Type`.
//!
//! Any web page can send requests to a server on the same machine. Without permission (CORS), a page cannot send JSON,
//! so bodies must have a JSON content type, except on Ollama's paths. The `Origin` header of a request names the page.
//! If the page's own host name resolves to this machine (DNS rebinding), the `Host` header has that name.
//!
//! A server that has a key and listens on another address than loopback checks `Host` and `Origin` only if
//! `--allowed-host` is set, because a foreign page does not know the key. A server without a key accepts only local
//! names and the names of `--allowed-host`.

use crate::http::{ApiError, quote, routes};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use moestro_base::platform::os;
use parking_lot::{Mutex, RwLock};
use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// Maximum number of refused host names that are logged.
const LOGGED_HOSTS: usize = 100;

/// Hosts and origins that may use the server. By default, all hosts and origins may. Clones share the rules.
#[derive(Debug, Clone, Default)]
pub struct OriginPolicy {
    rules: Arc<RwLock<OriginRules>>,
    /// Refused host names that were logged.
    logged: Arc<Mutex<HashSet<String>>>,
}

#[derive(Debug, Clone, Default)]
struct OriginRules {
    /// Allowed host names in addition to local names. `None` allows any host and any origin.
    hosts: Option<Vec<String>>,
    origin: Option<HeaderValue>,
}

impl OriginPolicy {
    /// Rules for a server that listens on `address`, has the names `hosts`, and allows pages of `origin`. `has_key` is
    /// true if clients must send a key.
    pub fn new(address: IpAddr, hosts: &[String], origin: Option<HeaderValue>, has_key: bool) -> Self {
        let is_checked = address.is_loopback() || !has_key || !hosts.is_empty();
        let own_name = os::host_name().filter(|name| !name.is_empty());
        let hosts = is_checked.then(|| hosts.iter().cloned().chain(own_name).collect());
        Self { rules: Arc::new(RwLock::new(OriginRules { hosts, origin })), logged: Arc::default() }
    }

    /// Replaces the rules by the rules of `other`.
    pub fn replace(&self, other: &Self) {
        let rules = other.rules();
        *self.rules.write() = rules;
    }

    /// True if a page of this origin may read responses. This is a local page, or a page of the configured origin.
    pub fn allows_reading(&self, origin: &HeaderValue) -> bool {
        let host = origin.to_str().ok().and_then(|origin| Some(host_name(origin.split_once("://")?.1)));
        self.rules().origin.as_ref() == Some(origin) || host.is_some_and(is_loopback)
    }

    fn rules(&self) -> OriginRules {
        self.rules.read().clone()
    }

    /// Logs a refused host name, unless the name was logged before.
    fn log_refused(&self, host: &str) {
        let host = quote(host).into_owned();
        let mut logged = self.logged.lock();
        if logged.len() < LOGGED_HOSTS && logged.insert(host.clone()) {
            tracing::warn!(host, "refused a request: the host is not a local name; allow it with --allowed-host");
        }
    }
}

/// Reason for refusing a request.
#[derive(Debug, PartialEq)]
enum OriginRefusal {
    Host(String),
    Origin(String),
}

impl OriginRules {
    /// Checks the `Host` and `Origin` headers, and the authority of an absolute request URI.
    fn check(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<(), OriginRefusal> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let is_known = |host: &str| is_loopback(host) || hosts.iter().any(|known| known.eq_ignore_ascii_case(host));
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        // A request without a host cannot come from a browser.
        let given = headers.get_all(header::HOST).iter().map(text).chain(authority.map(str::to_owned));
        let given: Vec<String> = given.collect();
        if let Some(host) = given.iter().map(|host| host_name(host)).find(|host| !is_known(host) && !is_local(host)) {
            return Err(OriginRefusal::Host(host.to_owned()));
        }
        let allows_any = self.origin.as_ref().is_some_and(|origin| origin == "*");
        for origin in headers.get_all(header::ORIGIN) {
            let text = text(origin);
            let page = text.split_once("://").map(|(_, page)| page);
            // The server's own page has the same host as the request, which was checked above.
            let is_own = page.is_some_and(|page| given.iter().any(|host| host == page));
            let is_allowed = allows_any || is_own || self.origin.as_ref() == Some(origin);
            if !is_allowed && !page.is_some_and(|page| is_known(host_name(page))) {
                return Err(OriginRefusal::Origin(text));
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
/// names, names below `.internal`, such as `host.docker.internal`, and names without a dot. Compose and proxies have
/// such names for a service.
fn is_local(host: &str) -> bool {
    let is_v6 = |host: &str| host.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok();
    let name = host.to_ascii_lowercase();
    let is_address = host.parse::<Ipv4Addr>().is_ok() || is_v6(host).is_some();
    let is_label = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let has_no_dot = !host.is_empty() && host.chars().all(is_label);
    is_address || has_no_dot || name.ends_with(".local") || name.ends_with(".internal")
}

/// Refuses requests that a foreign web page may have sent.
pub async fn check_origin(State(policy): State<OriginPolicy>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    match policy.rules().check(request.headers(), authority.as_deref()) {
        Ok(()) => {}
        Err(OriginRefusal::Host(host)) => {
            policy.log_refused(&host);
            return ApiError::wrong_host(&host).into_response();
        }
        Err(OriginRefusal::Origin(origin)) => return ApiError::wrong_origin(&origin).into_response(),
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

    /// The refusal of a request with this host and origin.
    fn refusal(policy: &OriginPolicy, host: &str, origin: Option<&str>) -> Option<OriginRefusal> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        origin.map(|origin| headers.insert(header::ORIGIN, origin.parse().unwrap()));
        policy.rules().check(&headers, None).err()
    }

    fn policy(address: [u8; 4], hosts: &[&str], origin: Option<&str>, has_key: bool) -> OriginPolicy {
        let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
        OriginPolicy::new(address.into(), &hosts, origin.map(|origin| origin.parse().unwrap()), has_key)
    }

    #[test]
    fn loopback_server_allows_local_hosts_only() {
        let rules = policy([127, 0, 0, 1], &["box.lan"], None, true);
        let own = ["localhost", "LOCALHOST:5413", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:5413", "box.lan:1"];
        let private =
            ["192.168.0.1:5413", "[fd00::2]", "studio.local", "Studio.LOCAL:5413", "host.docker.internal:5413"];
        for host in own.iter().chain(&private).chain(&["moestro:5413", "llm_backend", "GPU-1"]) {
            assert_eq!(refusal(&rules, host, None), None, "{host}");
        }
        let foreign = ["evil.com", "evil.", "localhost.evil.com", "127.0.0.1.evil.com:80", "local.evil.com"];
        for host in foreign.iter().chain(&["a b", "", "[", "[::1", "::1"]) {
            assert!(refusal(&rules, host, None).is_some(), "{host}");
        }
    }

    #[test]
    fn local_pages_may_read_responses() {
        let rules = policy([127, 0, 0, 1], &[], Some("https://chat.example"), true);
        for origin in ["http://localhost:3000", "http://127.0.0.1", "https://chat.example"] {
            assert!(rules.allows_reading(&origin.parse().unwrap()), "{origin}");
        }
        for origin in ["https://evil.com", "http://192.168.0.1", "null", "http://moestro", "http://localhost.evil.com"]
        {
            assert!(!rules.allows_reading(&origin.parse().unwrap()), "{origin}");
        }
    }

    #[test]
    fn loopback_server_allows_local_and_given_origins() {
        let rules = policy([127, 0, 0, 1], &[], Some("https://chat.example"), true);
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "https://chat.example"] {
            assert_eq!(refusal(&rules, "localhost", Some(origin)), None, "{origin}");
        }
        for origin in
            ["https://evil.com", "http://chat.example", "null", "http://localhost.evil.com", "https://chat.example:1"]
        {
            assert!(refusal(&rules, "localhost", Some(origin)).is_some(), "{origin}");
        }
        let any = policy([127, 0, 0, 1], &[], Some("*"), true);
        assert_eq!(refusal(&any, "localhost", Some("https://evil.com")), None);
    }

    #[test]
    fn other_addresses_check_names_without_key() {
        let open = policy([0, 0, 0, 0], &[], None, false);
        for host in ["192.168.0.1:5413", "studio.local", "host.docker.internal:5413", "localhost"] {
            assert_eq!(refusal(&open, host, None), None, "{host}");
        }
        assert_eq!(refusal(&open, &os::host_name().unwrap(), None), None, "the machine's own name");
        assert_eq!(refusal(&open, "box.lan:5413", None), Some(OriginRefusal::Host("box.lan".into())));
        let with_key = policy([0, 0, 0, 0], &[], None, true);
        assert_eq!(refusal(&with_key, "box.lan", Some("https://evil.com")), None);
        let named = policy([0, 0, 0, 0], &["box.lan"], None, true);
        assert_eq!(refusal(&named, "box.lan:5413", None), None);
        assert_eq!(refusal(&named, "evil.com", None), Some(OriginRefusal::Host("evil.com".into())));
    }

    #[test]
    fn own_page_is_allowed() {
        let rules = policy([0, 0, 0, 0], &[], None, false);
        assert_eq!(refusal(&rules, "192.168.0.1:5413", Some("http://192.168.0.1:5413")), None);
        for origin in ["http://192.168.0.2:5413", "http://192.168.0.1:3000"] {
            assert_eq!(refusal(&rules, "192.168.0.1:5413", Some(origin)), Some(OriginRefusal::Origin(origin.into())));
        }
    }

    #[test]
    fn refused_host_is_logged_once() {
        let policy = OriginPolicy::default();
        for host in ["a.example", "a.example", "b.example"] {
            policy.log_refused(host);
        }
        assert_eq!(policy.logged.lock().len(), 2);
        (0..1000).for_each(|i| policy.log_refused(&format!("{i}.example")));
        assert_eq!(policy.logged.lock().len(), LOGGED_HOSTS);
    }
}
