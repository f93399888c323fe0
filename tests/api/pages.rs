//! Tests of requests from web pages: from another origin, and with a host name that resolves to a loopback address (DNS
//! rebinding).

use super::server::{CHAT, Server, Setup};
use moestro::http::OriginPolicy;

const BODY: &[u8] = br#"{"messages": [{"role": "user", "content": "Hi"}]}"#;

async fn loopback_server() -> Server {
    let says = Some("</think>\n\nHello.");
    let configure = |state: &mut moestro::http::ServerState| {
        state.origins = OriginPolicy::new([127, 0, 0, 1].into(), &[], None, false)
    };
    Setup { says, configure, ..Setup::default() }.start().await
}

async fn status(server: &Server, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let length = BODY.len().to_string();
    let body = if path == CHAT { BODY } else { b"" };
    let more: &[(&str, &str)] =
        if path == CHAT { &[("content-type", "application/json"), ("content-length", &length)] } else { &[] };
    let method = if path == CHAT { "POST" } else { "GET" };
    let answer = server.bare(method, path, &[headers, more].concat(), body).await;
    (answer.status, answer.text().await)
}

#[tokio::test]
async fn rebound_host_name_is_refused() {
    let server = loopback_server().await;
    for path in [CHAT, "/v1/models", "/metrics"] {
        let (code, text) = status(&server, path, &[("host", "rebound.evil.com:5413")]).await;
        assert_eq!(code, 403, "{path}");
        assert!(text.contains("--allowed-host rebound.evil.com"), "{text}");
        for host in ["localhost:5413", "127.0.0.1", "[::1]:80"] {
            assert_eq!(status(&server, path, &[("host", host)]).await.0, 200, "{path} {host}");
        }
    }
    assert_eq!(status(&server, "http://evil.com/v1/models", &[("host", "localhost")]).await.0, 403, "an absolute URL");
}

#[tokio::test]
async fn local_page_may_read_responses() {
    let server = loopback_server().await;
    let origin = ("origin", "http://localhost:3000");
    let preflight = [("host", "localhost"), origin, ("access-control-request-method", "POST")];
    let response = server.bare("OPTIONS", CHAT, &preflight, b"").await;
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, Some(origin.1)));
    let foreign = [("host", "localhost"), ("origin", "https://evil.com"), ("access-control-request-method", "POST")];
    let response = server.bare("OPTIONS", CHAT, &foreign, b"").await;
    assert_eq!(response.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn page_of_another_origin_is_refused() {
    let server = loopback_server().await;
    for origin in ["https://evil.com", "null", "http://localhost.evil.com"] {
        let (code, text) = status(&server, CHAT, &[("host", "localhost"), ("origin", origin)]).await;
        assert_eq!(code, 403, "{origin}");
        assert!(text.contains("--cors"), "{text}");
    }
    assert_eq!(server.evaluated(), 0);
    let (code, _) = status(&server, CHAT, &[("host", "localhost"), ("origin", "http://localhost:3000")]).await;
    assert_eq!(code, 200);
}
