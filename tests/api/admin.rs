//! Tests of administration: health, models, metrics, tokenizer, API keys, origins, paths, methods, loading and
//! shutdown.

use super::{
    client::{Answer, stable},
    server::{CHAT, Server, Setup, chat, streamed, with},
};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn health_describes_model_and_queue() {
    let server = Server::saying("Hello.").await;
    let answer = server.get("/health").await;
    assert_eq!(answer.status, 200);
    let body = answer.json().await;
    assert_eq!(body["status"], "ok");
    assert_eq!(body["model"], "mock");
    assert_eq!(body["context"], 512);
    assert_eq!(body["requests"], json!({"running": 0, "queued": 0}));
    assert_eq!(body["queue"], json!([]));
    assert_eq!(body["plan"], json!({"resident": true}));
}

#[tokio::test]
async fn server_without_model_answers_loading() {
    let server = Setup { loading: true, ..Setup::default() }.start().await;
    let answer = server.get("/health").await;
    assert_eq!((answer.status, answer.json().await["status"].clone()), (503, json!("loading")));
    assert_eq!(server.get("/metrics").await.status, 200);
    for (path, body) in [(CHAT, chat("Hi")), ("/tokenize", json!({"prompt": "x"}))] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 503);
        assert!(answer.header("retry-after").is_some());
        assert_eq!(answer.json().await["error"]["code"], "loading");
    }
    assert_eq!(server.get("/v1/models").await.status, 503);
}

#[tokio::test]
async fn lost_gpu_is_reported_with_status_200() {
    let server = Server::saying("Hello.").await;
    assert!(server.get("/health").await.json().await["gpu"].is_null());
    server.metrics.gpu_lost.set(1);
    let answer = server.get("/health").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json().await["gpu"]["lost"], true);
    server.metrics.gpu_interactivity_errors.inc();
    let gpu = server.get("/health").await.json().await["gpu"].clone();
    assert_eq!((&gpu["lost"], &gpu["interactivity_errors"]), (&true.into(), &1.into()));
    assert!(gpu["remedy"].as_str().unwrap().contains("AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1"), "{gpu}");
}

#[tokio::test]
async fn models() {
    let server = Server::saying("Hello.").await;
    insta::assert_json_snapshot!(server.get("/v1/models").await.json().await);
    assert_eq!(server.get("/v1/models/mock").await.json().await["id"], "mock");
    for unknown in ["/v1/models/other", "/v1/models/org/mock", "/v1/models/org%2Fother"] {
        let answer = server.get(unknown).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.json().await["error"]["code"], "model_not_found");
    }
}

#[tokio::test]
async fn tokenize_and_detokenize() {
    let server = Server::saying("Hello.").await;
    let text = "The cat says 日本 <|im_end|>";
    let answer = server.ask("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await;
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(answer["max_model_len"], 512);
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    assert_eq!(answer["token_strs"].as_array().unwrap().last().unwrap(), "<|im_end|>");
    // The response has the text under two names: the name that vLLM uses and the name that llama-server uses.
    assert_eq!(server.ask("/detokenize", &json!({"tokens": tokens})).await, json!({"prompt": text, "content": text}));
    assert_eq!(server.ask("/tokenize", &json!({"content": text})).await["tokens"], answer["tokens"]);

    let hi = chat("Hi");
    let answer = server.ask("/tokenize", &hi).await;
    assert_eq!(answer["token_strs"], Value::Null);
    let rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n";
    assert_eq!(server.prompt(&hi).await, rendered);
    let asked = server.ask(CHAT, &hi).await;
    assert_eq!(asked["usage"]["prompt_tokens"], answer["count"], "the prompt of the chat endpoint");

    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let quiet = json!({"chat_template_kwargs": {"enable_thinking": false}, "add_generation_prompt": false,
                       "tools": tools});
    let rendered = server.prompt(&with(hi, quiet)).await;
    assert!(rendered.starts_with("<|im_start|>system\n# Tools") && rendered.ends_with("Hi<|im_end|>\n"), "{rendered}");
}

#[tokio::test]
async fn every_documented_operation_is_served() {
    let server = Server::saying("Hello.").await;
    let info = server.get("/tokenizer_info").await.json().await;
    assert_eq!(info["eos_token"], "<|im_end|>");
    assert!(info["chat_template"].as_str().unwrap().contains("add_generation_prompt"));
    let document = server.get("/openapi.json").await.json().await;
    assert_eq!(document["openapi"], "3.1.0");
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            let path = path.replace("{id}", "none");
            let answer = server.send(&method.to_uppercase(), &path, &[], Some(b"{}")).await;
            let status = answer.status;
            // A response with status 204 has no body.
            let text = if status == 204 { String::new() } else { answer.text().await };
            let is_served = !text.contains("Unknown path") && status != 405 && status < 500;
            assert!(is_served, "{method} {path}: {status} {text}");
        }
    }
}

#[tokio::test]
async fn metrics_count_requests_and_tokens() {
    let server = Server::saying("</think>\n\nHello, you.").await;
    let usage = server.ask(CHAT, &chat("Hi")).await["usage"].clone();
    server.post(CHAT, &json!({"messages": []})).await;
    server.get("/nowhere").await;
    // A request is counted after its last byte was sent.
    for (endpoint, status) in [(CHAT, 200), (CHAT, 400), ("other", 404)] {
        let line = format!("moestro_requests_total{{endpoint=\"{endpoint}\",status=\"{status}\"}} 1");
        server.metric(&line).await;
    }
    let answer = server.get("/metrics").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = answer.text().await;
    for line in [
        format!("moestro_requests_total{{endpoint=\"{CHAT}\",status=\"200\"}} 1"),
        format!("moestro_requests_total{{endpoint=\"{CHAT}\",status=\"400\"}} 1"),
        "moestro_requests_total{endpoint=\"other\",status=\"404\"} 1".into(),
        format!("moestro_generated_tokens_total {}", usage["completion_tokens"]),
        format!("moestro_prompt_tokens_total{{source=\"computed\"}} {}", usage["prompt_tokens"]),
        "moestro_prompt_tokens_total{source=\"cached\"} 0".into(),
        "moestro_request_seconds_count 1".into(),
        "moestro_time_to_first_token_seconds_count 1".into(),
        "moestro_queue_seconds_count 1".into(),
        format!("moestro_inter_token_seconds_count {}", usage["completion_tokens"].as_u64().unwrap() - 1),
        "moestro_requests_running 0".into(),
        "moestro_requests_queued 0".into(),
        "moestro_build_info{device=\"cpu\",model=\"mock\",version=\"0.0.0\"} 1".into(),
        "moestro_answers_total{finish_reason=\"stop\"} 1".into(),
        "moestro_answers_total{finish_reason=\"cancelled\"} 0".into(),
        "moestro_prefill_seconds_count 1".into(),
        "moestro_decode_seconds_count 1".into(),
        format!("moestro_request_prompt_tokens_sum {}", usage["prompt_tokens"]),
        format!("moestro_request_generated_tokens_sum {}", usage["completion_tokens"]),
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing from\n{text}");
    }
}

#[tokio::test]
async fn openmetrics_needs_accept_header() {
    let server = Server::saying("Hello.").await;
    let accept = [("accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")];
    let answer = server.send("GET", "/metrics", &accept, None).await;
    let kind = answer.header("content-type").unwrap().to_owned();
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    let text = answer.text().await;
    assert!(text.contains("# TYPE moestro_generated_tokens counter\nmoestro_generated_tokens_total 0\n"), "{text}");
    assert!(text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn api_key_protects_all_other_paths() {
    let server = Setup { says: Some("Hello."), api_key: Some("secret"), ..Setup::default() }.start().await;
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.get("/metrics").await.status, 200);
    for wrong in [None, Some("Bearer wrong"), Some("Bearer secret2"), Some("Basic secret"), Some("secret")] {
        let headers: Vec<_> = wrong.iter().map(|value| ("authorization", *value)).collect();
        for path in ["/v1/models", "/nowhere", CHAT] {
            let answer = server.send("GET", path, &headers, None).await;
            assert_eq!(answer.status, 401, "{wrong:?}");
            assert_eq!(answer.json().await["error"]["code"], "invalid_api_key");
        }
    }
    for right in [("authorization", "Bearer secret"), ("authorization", "bearer  secret"), ("x-api-key", "secret")] {
        assert_eq!(server.send("GET", "/v1/models", &[right], None).await.status, 200, "{right:?}");
    }
    assert_eq!(server.send("GET", "/v1/models", &[("x-api-key", "wrong")], None).await.status, 401);
    assert_eq!(server.get("/v1/models?a=b&key=%73ecret").await.status, 200);
    assert_eq!(server.get("/v1/models?key=wrong").await.status, 401);
}

#[tokio::test]
async fn health_hides_paths_without_the_key() {
    for (api_key, headers, is_shown) in [
        (None, &[][..], true),
        (Some("secret"), &[], false),
        (Some("secret"), &[("x-api-key", "wrong")], false),
        (Some("secret"), &[("x-api-key", "secret")], true),
    ] {
        // Each server gets a new directory, because the previous server may not have released its directory yet.
        let dir = tempfile::tempdir().unwrap();
        let server = Setup { api_key, prompt_cache_dir: Some(dir.path().into()), ..Setup::default() }.start().await;
        let answer = server.send("GET", "/health", headers, None).await;
        assert_eq!(answer.status, 200);
        let health = answer.text().await;
        assert_eq!(health.contains(dir.path().to_str().unwrap()), is_shown, "{health}");
        assert!(health.contains("\"checkpoints\""), "{health}");
    }
    let says = Some("</think>\n\nHello to you.");
    let server = Setup { says, api_key: Some("secret"), fails_on: Some(" you"), ..Setup::default() }.start().await;
    let key = ("x-api-key", "secret");
    assert_eq!(server.send("POST", CHAT, &[key], Some(chat("Hi").to_string().as_bytes())).await.status, 500);
    for (headers, is_shown) in [(&[][..], false), (&[key], true)] {
        let health = server.send("GET", "/health", headers, None).await.json().await;
        assert_eq!(health["status"], "degraded");
        assert_eq!(health["reason"].as_str().unwrap().contains("test error on token"), is_shown, "{health}");
    }
}

#[tokio::test]
async fn cors_headers_follow_configuration() {
    let without_cors = Server::saying("Hello.").await;
    let origin = ("origin", "http://app.example");
    assert_eq!(without_cors.send("GET", "/health", &[origin], None).await.header("access-control-allow-origin"), None);

    let setup = Setup { api_key: Some("secret"), cors: Some("http://app.example"), ..Setup::default() };
    let server = setup.start().await;
    let asks = [
        origin,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let preflight = server.send("OPTIONS", CHAT, &asks, None).await;
    assert_eq!(preflight.status, 200, "a preflight carries no key");
    assert_eq!(preflight.header("access-control-allow-origin"), Some("http://app.example"));
    assert_eq!(preflight.header("access-control-allow-headers"), Some("authorization,content-type"));
    assert!(preflight.header("access-control-allow-methods").unwrap().contains("POST"));
    let refused = server.send("POST", CHAT, &[origin], Some(b"{}")).await;
    assert_eq!(refused.status, 401);
    // With this header, the page can read the error.
    assert_eq!(refused.header("access-control-allow-origin"), Some("http://app.example"));

    let any = Setup { cors: Some("*"), ..Setup::default() }.start().await;
    assert_eq!(any.send("GET", "/health", &[origin], None).await.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused() {
    let server = Server::saying("Hello.").await;
    insta::assert_json_snapshot!("unknown_path", server.get("/nowhere").await.json().await);
    for (method, path) in [("GET", CHAT), ("PUT", "/v1/completions"), ("POST", "/health"), ("DELETE", "/v1/models")] {
        let answer = server.send(method, path, &[], None).await;
        assert_eq!(answer.status, 405, "{method} {path}");
        assert!(answer.header("allow").is_some());
        assert_eq!(answer.json().await["error"]["code"], "method_not_allowed");
    }
    for (path, hint) in [
        ("/v1", "GET /v1\""),
        ("/v1/chat", "GET /v1/chat\""),
        ("/v1/embeddings", "no embeddings"),
        ("/v1/v1/models", "remove /v1"),
        ("/completion", "Use /v1/completions"),
        ("/v1/files/file-1", "stores no files"),
        ("/v1/filesystem", "GET /v1/filesystem\""),
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        let text = answer.text().await;
        assert!(text.contains(hint), "{path}: {text}");
    }
}

#[tokio::test]
async fn path_spellings_are_equivalent() {
    let server = Server::saying("</think>\n\nHello.").await;
    for path in ["/chat/completions", "/chat/completions/", "/v1/chat/completions/"] {
        let answer = server.ask(path, &chat("Hi")).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "Hello.", "{path}");
    }
    let gets = "/models /models/ /v1/models/ /models/mock /v1/models/mock/ /api/v0/models/ /v1/health /v1/health/ \
        /v1/metrics";
    for path in gets.split(' ') {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    // One label for all spellings.
    server.metric(&format!("moestro_requests_total{{endpoint=\"{CHAT}\",status=\"200\"}} 3")).await;
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = Server::saying("Hello.").await;
    let id = |answer: &Answer| answer.header("x-request-id").unwrap().to_owned();
    let (first, second) = (id(&server.get("/health").await), id(&server.get("/nowhere").await));
    assert!(first.starts_with("req_") && second.starts_with("req_") && first != second);
    assert_eq!(id(&server.send("GET", "/health", &[("x-request-id", "mine-1")], None).await), "mine-1");
    assert!(id(&server.send("GET", "/health", &[("x-request-id", "two words")], None).await).starts_with("req_"));
}

#[tokio::test]
async fn model_name_may_be_any_word() {
    let server = Server::saying("</think>\n\nHello.").await;
    for (name, status) in [("default", 200), ("org/Mock", 200), ("org/macaw", 404)] {
        let answer = server.post(CHAT, &with(chat("Hi"), json!({"model": name}))).await;
        assert_eq!(answer.status, status, "{name}");
        let body = answer.json().await;
        match status {
            200 => assert_eq!(stable(body)["model"], "mock"),
            _ => assert_eq!(body["error"]["code"], "model_not_found"),
        }
    }
}

/// A server that shuts down while it answers a request, of which the model computes no further token.
async fn drain_with_running_request(grace: Duration) -> (Server, Answer) {
    const SAYS: &str = "</think>\n\none two three four five six seven eight nine ten";
    let mut server = Setup { says: Some(SAYS), stops_at: 1, grace, ..Setup::default() }.start().await;
    let running = server.post(CHAT, &streamed(&chat("Hi"))).await;
    server.load(1, 0).await;
    server.shut_down();
    for _ in 0..6000 {
        if server.get("/health").await.status == 503 {
            return (server, running);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the server still accepts requests");
}

#[tokio::test]
async fn shutdown_finishes_running_requests() {
    let (server, running) = drain_with_running_request(Duration::from_secs(60)).await;
    assert_eq!(server.refused(CHAT, &chat("Hi"), 503).await["code"], "shutting_down");
    server.resume();
    assert!(running.text().await.ends_with("data: [DONE]\n\n"));
    server.wait_for_end().await;
}

#[tokio::test]
async fn request_after_grace_period_fails() {
    let grace = Duration::from_millis(200);
    let (server, running) = drain_with_running_request(grace).await;
    tokio::time::sleep(grace).await;
    server.resume();
    let text = running.text().await;
    assert!(text.contains("\"code\":\"shutting_down\"") && !text.contains("[DONE]"), "{text}");
    server.wait_for_end().await;
}
