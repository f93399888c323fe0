//! Fuzzes HTTP requests: the first byte chooses the path, the rest is the body. The model repeats its prompt.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mock_model::MockModel;
use moestro_chat::{Template, Tokenizer, grammar::GrammarCompiler};
use moestro_engine::{self as engine, Options, Sampling};
use moestro::http::{self, LoadedModel, ModelCard, RequestLimits, ServerState};
use moestro_base::metrics::Metrics;
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// `<|im_end|>` of the demo model.
const EOS: u32 = 2040;
const PATHS: [&str; 7] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
];

fn server() -> &'static (Runtime, axum::Router) {
    static SERVER: OnceLock<(Runtime, axum::Router)> = OnceLock::new();
    SERVER.get_or_init(|| {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/moestro-demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo).expect("the demo's tokenizer"));
        let metrics = Metrics::new("fuzz", "cpu");
        let mock = MockModel { vocab: 2048, context: 512, chunk: 32, eos: EOS, ..MockModel::default() };
        let options = Options { eos: vec![EOS], ..Options::default() };
        let (engine, _) = engine::spawn(mock, options, metrics.clone()).expect("a thread");
        let state = Arc::new(ServerState::new(metrics, None, None));
        state.serve_model(LoadedModel {
            engine,
            grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), &[EOS])),
            tokenizer,
            template: Some(Template::load(&demo).expect("the demo's template")),
            card: ModelCard { id: "mock".into(), created: 1, experts_per_token: None, quantization: None },
            defaults: Sampling { temperature: 0.0, ..Sampling::default() },
            thinking: None,
            limits: RequestLimits::default(),
            plan: serde_json::Value::Null,
        });
        (Runtime::new().expect("threads"), http::router(state))
    })
}

fuzz_target!(|data: &[u8]| {
    let Some((&first, body)) = data.split_first() else { return };
    let path = PATHS[usize::from(first) % PATHS.len()];
    let (runtime, router) = server();
    let request = axum::http::Request::post(path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(axum::body::Body::from(body.to_vec()))
        .expect("a request");
    runtime.block_on(async {
        let response = router.clone().oneshot(request).await.expect("a router never fails");
        let status = response.status();
        assert!(!status.is_server_error(), "{path}: {status}");
        let _ = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    });
});
