//! Tests of the error for a prompt that is too long. Agents and libraries recognize it by its words, and then shorten
//! the conversation. Without the words, they stop.

use super::server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Server, Setup};
use fancy_regex::Regex;
use moestro::http::{ApiSet, RequestLimits};
use serde_json::{Value, json};

/// The patterns of clients. Each must match: a client may drop one of its patterns.
const PATTERNS: [(&str, &str); 13] = [
    ("litellm 1.110.2, exception_mapping_utils.py, lower case", "(?i)this model's maximum context length is"),
    ("litellm 1.110.2, exception_mapping_utils.py, Anthropic", "prompt is too long"),
    ("langchain-openai 1.7.4, chat_models/base.py", "prompt is too long"),
    ("langchain-anthropic 1.7.10, chat_models.py", "prompt is too long"),
    ("@continuedev/cli 1.5.47, dist/index.js, lower case", "(?i)maximum context length"),
    ("@continuedev/cli 1.5.47, dist/index.js, lower case", "(?i)reduce the length of the messages"),
    ("@earendil-works/pi-ai 1.6.0, opencode-ai 1.18.33", "(?i)prompt is too long"),
    ("@earendil-works/pi-ai 1.6.0, opencode-ai 1.18.33", "(?i)reduce the length of the messages"),
    ("@earendil-works/pi-ai 1.6.0, opencode-ai 1.18.33", r"(?i)maximum context length is \d+ tokens"),
    ("@anthropic-ai/claude-code 2.1.197", r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"),
    ("@qwen-code/qwen-code 0.15.10, contextLengthError.ts", r"(?i)\bprompt\s+(?:is\s+)?too long\b"),
    ("@qwen-code/qwen-code 0.15.10, contextLengthError.ts", r"(?i)\btokens?\s*>\s*[\d,]+\s*(?:maximum|max|limit)\b"),
    ("Anthropic's own error, which other clients parse", r"^prompt is too long: (\d+) tokens > (\d+) maximum"),
];
/// Patterns of other errors. pi, opencode and LiteLLM do not shorten the conversation if one of them matches.
const OTHER_ERRORS: &str = r"(?i)rate[\s_-]*limit|too many requests|timed? ?out|deadline|string_above_max_length";

/// Requests of all APIs with this prompt.
fn requests(prompt: &str) -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": prompt}]);
    vec![
        (CHAT, json!({"messages": messages})),
        (CHAT, json!({"messages": messages, "stream": true, "max_tokens": 5})),
        (COMPLETIONS, json!({"prompt": prompt})),
        (RESPONSES, json!({"input": prompt})),
        (RESPONSES, json!({"input": prompt, "stream": true, "instructions": "Add."})),
        ("/v1/responses/compact", json!({"input": prompt})),
        (MESSAGES, json!({"messages": messages, "max_tokens": 5})),
        (MESSAGES, json!({"messages": messages, "max_tokens": 5, "stream": true})),
        ("/api/chat", json!({"model": "mock", "messages": messages})),
        ("/api/generate", json!({"model": "mock", "prompt": prompt})),
        ("/api/generate", json!({"model": "mock", "prompt": prompt, "raw": true})),
    ]
}

/// Sends a request, checks the error's words and fields, and returns the number of tokens and the limit in it.
async fn refused(server: &Server, path: &str, body: &Value) -> (usize, usize, String) {
    let answer = server.post(path, body).await;
    assert_eq!(answer.status, 400, "{path}");
    let body = answer.json().await;
    let error = &body["error"];
    let message = error["message"].as_str().or(error.as_str()).unwrap_or_else(|| panic!("{path}: {body}")).to_owned();
    for (client, pattern) in PATTERNS {
        assert!(Regex::new(pattern).unwrap().is_match(&message).unwrap(), "{client}, {path}: {message}");
    }
    assert!(!Regex::new(OTHER_ERRORS).unwrap().is_match(&message).unwrap(), "{path}: {message}");
    let counts = Regex::new(PATTERNS[12].1).unwrap().captures(&message).unwrap().unwrap();
    let count = |index: usize| counts.get(index).unwrap().as_str().parse::<usize>().unwrap();
    let (tokens, limit) = (count(1), count(2));
    assert!(tokens > limit, "{message}");
    match path {
        MESSAGES => assert_eq!((&body["type"], &error["type"]), (&json!("error"), &json!("invalid_request_error"))),
        _ if path.starts_with("/api") => {}
        _ => {
            assert_eq!(error["type"], "invalid_request_error");
            assert_eq!(error["code"], "context_length_exceeded");
            assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(tokens), &json!(limit)), "{body}");
            assert!(["messages", "prompt", "input"].iter().any(|param| error["param"] == *param), "{body}");
        }
    }
    (tokens, limit, message)
}

#[tokio::test]
async fn full_context_has_the_clients_words() {
    let server = Setup { context: 64, api: ApiSet::WithOllama, ..Setup::default() }.start().await;
    let long = "one two three four five six seven eight ".repeat(20);
    for (path, body) in requests(&long) {
        let (tokens, limit, message) = refused(&server, path, &body).await;
        assert!(limit == 64 && message.contains("or start the server with a larger --ctx-size."), "{path}: {message}");
        if path == MESSAGES {
            let count = json!({"messages": body["messages"]});
            let counted = server.ask("/v1/messages/count_tokens", &count).await;
            assert_eq!(counted["input_tokens"], tokens);
        }
    }
}

#[tokio::test]
async fn lower_bound_has_the_clients_words() {
    let server = Setup { context: 64, api: ApiSet::WithOllama, ..Setup::default() }.start().await;
    // The first prompt is refused because of its length, the second one after a part of its tokens.
    for long in ["word ".repeat(400_000), "a b c d e f ".repeat(4_000)] {
        for (path, body) in requests(&long) {
            let (tokens, limit, message) = refused(&server, path, &body).await;
            assert_eq!(limit, 64);
            // A text of 2 MB is refused because of its length. Tokenizing its first piece of 20 KB would find fewer.
            assert!(body.to_string().len() < 1 << 20 || tokens > 20 << 10, "{path}: {tokens}");
            let bound = format!("The prompt has at least {tokens} tokens; the rest was not counted.");
            assert!(message.ends_with(&bound), "{path}: {message}");
        }
    }
}

#[tokio::test]
async fn prompt_of_whole_context_leaves_no_room() {
    let server = Setup { context: 64, ..Setup::default() }.start().await;
    let (tokens, limit, message) = refused(&server, COMPLETIONS, &json!({"prompt": vec![5; 64]})).await;
    assert_eq!((tokens, limit), (64, 63));
    assert!(message.contains("is 64 tokens, and an answer needs at least one of them."), "{message}");
    // The tokens of a prompt need room only for themselves if there is no answer.
    let echoed = |tokens: usize| json!({"prompt": vec![5; tokens], "max_tokens": 0, "echo": true});
    refused(&server, COMPLETIONS, &echoed(65)).await;
    server.ask(COMPLETIONS, &echoed(64)).await;
}

#[tokio::test]
async fn error_names_smaller_of_two_limits() {
    let long = ["word ".repeat(100), "word ".repeat(400_000), "a b c d e f ".repeat(4_000)];
    for (context, most) in [(64, 40), (40, 64)] {
        let limits = RequestLimits { max_prompt_tokens: Some(most), ..RequestLimits::default() };
        let server = Setup { context, limits, api: ApiSet::WithOllama, ..Setup::default() }.start().await;
        for (path, body) in long.iter().flat_map(|long| requests(long)) {
            let (_, limit, message) = refused(&server, path, &body).await;
            assert_eq!(limit, 40, "{path}: {message}");
            let flag = if most == 40 { "larger --max-prompt-tokens." } else { "larger --ctx-size." };
            assert!(message.contains(flag), "{path}: {message}");
        }
    }
}

#[tokio::test]
async fn prompt_limit_has_the_clients_words() {
    let limits = RequestLimits { max_prompt_tokens: Some(60), ..RequestLimits::default() };
    let server = Setup { limits, api: ApiSet::WithOllama, ..Setup::default() }.start().await;
    let long = "one two three four five six seven eight ".repeat(20);
    for (path, body) in requests(&long) {
        let (_, limit, message) = refused(&server, path, &body).await;
        assert_eq!(limit, 60, "{path}: {message}");
        assert!(message.contains("60 tokens for prompts, as --max-prompt-tokens says"), "{path}: {message}");
        assert!(message.contains("start the server with a larger --max-prompt-tokens."), "{path}: {message}");
    }
}
