//! Web pages must not use a server that listens for its own machine only. A page can send a request to any address: what it
//! sends without asking is never JSON, so a body must say that it is; it names its origin; and if its own host name was
//! made to point here (DNS rebinding), that name is in `Host`.
//!
//! Bound to another address the server cannot know its names: then names are checked only if some were given. Bodies must
//! be JSON in any case.

use super::{Door, access, api_error::ApiError};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use parking_lot::RwLock;
use std::{net::IpAddr, sync::Arc};

/// The hosts and origins that are allowed. By default any are.
#[derive(Debug, Default)]
pub struct Guard(RwLock<Rules>);

#[derive(Debug, Clone, Default)]
struct Rules {
    /// Beside local names; `None` is any host and any origin.
    hosts: Option<Vec<String>>,
    origin: Option<HeaderValue>,
}

impl Guard {
    /// For a server that listens on `address`, answers to `hosts`, too, and may be called by pages of `origin`.
    pub fn new(address: IpAddr, hosts: &[String], origin: Option<HeaderValue>) -> Self {
        let checked = address.is_loopback() || !hosts.is_empty();
        Self(RwLock::new(Rules { hosts: checked.then(|| hosts.to_vec()), origin }))
    }

    /// From now on the rules of `other` hold.
    pub fn follow(&self, other: &Self) {
        let rules = other.rules();
        *self.0.write() = rules;
    }

    fn rules(&self) -> Rules {
        self.0.read().clone()
    }
}

impl Rules {
    fn allows(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<(), ApiError> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let known = |host: &str| local(host) || hosts.iter().any(|known| known.eq_ignore_ascii_case(host));
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        // A request without a host is let in: every browser sends one.
        let given = headers.get_all(header::HOST).iter().map(text).chain(authority.map(str::to_owned));
        for host in given {
            if !known(name(&host)) {
                return Err(ApiError::wrong_host(name(&host)));
            }
        }
        let any = self.origin.as_ref().is_some_and(|origin| origin == "*");
        for origin in headers.get_all(header::ORIGIN) {
            let text = text(origin);
            let host = text.split_once("://").map(|(_, host)| name(host));
            if !any && self.origin.as_ref() != Some(origin) && !host.is_some_and(known) {
                return Err(ApiError::wrong_origin(&text));
            }
        }
        Ok(())
    }
}

/// The host of `host:port`.
fn name(authority: &str) -> &str {
    let end = match authority.strip_prefix('[').and_then(|rest| rest.find(']')) {
        Some(bracket) => bracket + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    &authority[..end]
}

/// Names of this machine that nobody else can have: `localhost`, 127.0.0.0/8 and `[::1]`.
fn local(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Refuses what a web page may have sent.
pub async fn check(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    if let Err(error) = door.guard.rules().allows(request.headers(), authority.as_deref()) {
        return error.into_response();
    }
    let json = request.headers().get_all(header::CONTENT_TYPE).iter().all(says_json);
    let said = json && request.headers().contains_key(header::CONTENT_TYPE);
    if request.method() == Method::POST && access::takes_json(request.uri().path()) && !said {
        return ApiError::not_json().into_response();
    }
    next.run(request).await
}

/// `application/json`, with parameters or without.
fn says_json(value: &HeaderValue) -> bool {
    let media = value.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default();
    media.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(guard: &Guard, host: &str, origin: Option<&str>) -> Option<u16> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        origin.map(|origin| headers.insert(header::ORIGIN, origin.parse().unwrap()));
        guard.rules().allows(&headers, None).err().map(|error| error.status.as_u16())
    }

    #[test]
    fn on_loopback_hosts_are_local() {
        let guard = Guard::new([127, 0, 0, 1].into(), &["box.lan".into()], None);
        for host in ["localhost", "LOCALHOST:5413", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:5413", "box.lan:1"] {
            assert_eq!(allowed(&guard, host, None), None, "{host}");
        }
        for host in
            ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com:80", "192.168.0.1", "[::2]", "", "[", "[::1", "::1"]
        {
            assert_eq!(allowed(&guard, host, None), Some(403), "{host}");
        }
    }

    #[test]
    fn on_loopback_origins_are_local_or_named() {
        let guard = Guard::new([127, 0, 0, 1].into(), &[], Some("https://chat.example".parse().unwrap()));
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "https://chat.example"] {
            assert_eq!(allowed(&guard, "localhost", Some(origin)), None, "{origin}");
        }
        for origin in
            ["https://evil.com", "http://chat.example", "null", "http://localhost.evil.com", "https://chat.example:1"]
        {
            assert_eq!(allowed(&guard, "localhost", Some(origin)), Some(403), "{origin}");
        }
        let any = Guard::new([127, 0, 0, 1].into(), &[], Some("*".parse().unwrap()));
        assert_eq!(allowed(&any, "localhost", Some("https://evil.com")), None);
    }

    #[test]
    fn elsewhere_names_are_checked_if_given() {
        let guard = Guard::new([0, 0, 0, 0].into(), &[], None);
        assert_eq!(allowed(&guard, "box.lan", Some("https://evil.com")), None);
        let named = Guard::new([0, 0, 0, 0].into(), &["box.lan".into()], None);
        assert_eq!(allowed(&named, "box.lan:5413", None), None);
        assert_eq!(allowed(&named, "evil.com", None), Some(403));
    }

    #[test]
    fn json_is_said_in_several_ways() {
        for said in ["application/json", "Application/JSON; charset=utf-8", " application/json ;x"] {
            assert!(says_json(&said.parse().unwrap()), "{said}");
        }
        for said in
            ["text/plain", "text/plain;application/json", "application/jsonp", "application/x-www-form-urlencoded", ""]
        {
            assert!(!says_json(&said.parse().unwrap()), "{said}");
        }
    }
}
