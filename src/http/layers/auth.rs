//! API key check: a request without the right key gets 401.

use crate::http::{ApiError, ServerState, routes};
use axum::{
    extract::{ConnectInfo, Query, Request, State},
    http::{HeaderMap, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    hint::black_box,
    net::IpAddr,
    sync::Arc,
};

/// Refuses a request without the key, unless its path is public.
pub async fn require_key(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    if routes::is_public(request.uri().path()) || is_authorized(&state, &request) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    }
}

/// True if the request has the key, or no key is set.
pub fn is_authorized(state: &ServerState, request: &Request) -> bool {
    state.api_key().is_none_or(|key| keys(request).iter().any(|given| equals(given, key.as_bytes())))
}

/// Number that identifies the client's address. `None` if the address is unknown. Only the first 64 bits of an IPv6
/// address count, because a machine may choose the others.
pub fn client_address(request: &Request) -> Option<u64> {
    let ConnectInfo(address) = request.extensions().get::<ConnectInfo<IpAddr>>()?;
    Some(match address.to_canonical() {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
    })
}

/// Hash that identifies the client by the keys in its request, whether or not the server requires a key.
pub fn client_hash(request: &Request) -> u64 {
    let mut hasher = DefaultHasher::new();
    keys(request).hash(&mut hasher);
    hasher.finish()
}

/// All keys in a request: `Authorization` (OpenAI clients), `x-api-key` (Anthropic), `?key=` (Google).
fn keys(request: &Request) -> Vec<Vec<u8>> {
    let header = request.headers().get("x-api-key").map(HeaderValue::as_bytes);
    let query = Query::<Vec<(String, String)>>::try_from_uri(request.uri()).unwrap_or_default().0;
    let query = query.into_iter().filter(|(name, _)| name == "key").map(|(_, key)| key.into_bytes());
    bearer_token(request.headers()).into_iter().chain(header).map(<[u8]>::to_vec).chain(query).collect()
}

/// The token of `Authorization: Bearer TOKEN`.
fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Compares two keys in a time that does not depend on the number of equal bytes.
fn equals(given: &[u8], key: &[u8]) -> bool {
    let bytes = given.iter().zip(key);
    bytes.fold(given.len() ^ key.len(), |differences, (a, b)| black_box(differences | usize::from(a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_equal_only_as_a_whole() {
        assert!(equals(b"secret", b"secret"));
        for wrong in [&b"secre"[..], b"secrets", b"Secret", b"", b"\0\0\0\0\0\0"] {
            assert!(!equals(wrong, b"secret"));
        }
    }

    #[test]
    fn address_is_that_of_a_machine() {
        let address = |text: &str| {
            let mut request = Request::default();
            request.extensions_mut().insert(ConnectInfo(text.parse::<IpAddr>().unwrap()));
            client_address(&request)
        };
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("10.0.0.1"), address("::ffff:10.0.0.1"));
        assert_ne!(address("10.0.0.1"), address("10.0.0.2"));
        assert_eq!(client_address(&Request::default()), None);
    }
}
