//! Tests of `cache_salt` in every API: requests with different salts share no cached prompt.

use super::server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Setup, with};
use serde_json::{Value, json};

const QUESTION: &str = "Where did Paul and Mia go with the small red boat on Sunday morning?";

#[tokio::test]
async fn cache_salt_separates_cached_prompts() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup { says: Some("To the lake."), prompt_cache_dir: Some(dir.path().into()), ..Setup::default() };
    let server = setup.start().await;
    // Each endpoint is asked a different question, so that it finds only its own prompts in the cache.
    let user = |name: &str| json!([{"role": "user", "content": format!("{name}: {QUESTION}")}]);
    for (path, body, cached) in [
        (COMPLETIONS, json!({"prompt": QUESTION}), "/usage/prompt_tokens_details/cached_tokens"),
        (CHAT, json!({"messages": user("Chat")}), "/usage/prompt_tokens_details/cached_tokens"),
        (RESPONSES, json!({"input": user("Responses")}), "/usage/input_tokens_details/cached_tokens"),
        (MESSAGES, json!({"messages": user("Messages"), "max_tokens": 20}), "/usage/cache_read_input_tokens"),
    ] {
        let salted = |salt: Value| with(body.clone(), json!({"cache_salt": salt}));
        let cached = async |salt: Value| {
            let answer = server.ask(path, &salted(salt)).await;
            answer.pointer(cached).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {cached} in {answer}"))
        };
        // All chat prompts start with the same few tokens. Without a salt, these tokens are cached by other questions.
        assert_eq!(cached(json!("alice")).await, 0, "{path}");
        assert_eq!(cached(json!("bob")).await, 0, "{path}");
        assert!(cached(Value::Null).await < 10, "{path}");
        for salt in [json!("alice"), json!("bob"), Value::Null] {
            assert!(cached(salt.clone()).await > 10, "{path}, {salt}");
        }
        for salt in [json!(""), json!(5), json!(["alice"]), json!({})] {
            let error = server.refused(path, &salted(salt.clone()), 400).await;
            assert!(error.to_string().contains("cache_salt"), "{path}, {salt}: {error}");
        }
    }
}
