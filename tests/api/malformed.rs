//! Tests of invalid requests, which must get a 4xx status with OpenAI's error object, and of unusual requests that are
//! valid.

use super::server::{Server, Setup, with};
use moestro::http::BODY_LIMIT;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// Sends `body`, checks the shape of the error, and returns the status and the error's `param`.
async fn refused(server: &Server, path: &str, body: &[u8]) -> (u16, Value) {
    let answer = server.send("POST", path, &[], Some(body)).await;
    let status = answer.status;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let body = answer.json().await;
    let error = body["error"].as_object().unwrap_or_else(|| panic!("{status}: {body}"));
    let fields: Vec<_> = error.keys().map(String::as_str).collect();
    let lengths = if error["code"] == "context_length_exceeded" { &["n_prompt_tokens", "n_ctx"][..] } else { &[] };
    assert_eq!(fields, [&["message", "type", "param", "code"], lengths].concat());
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
    assert_eq!(error["type"], "invalid_request_error");
    (status, error["param"].clone())
}

#[tokio::test]
async fn invalid_json_is_refused() {
    let server = Server::saying("Hello.").await;
    for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
        for body in ["", "{", "null", "[]", "5", "\"text\"", "{\"messages\": [}", "not json", "\u{0}", "{} {}"] {
            assert_eq!(refused(&server, path, body.as_bytes()).await.0, 400, "{path} {body:?}");
        }
        assert_eq!(refused(&server, path, b"{\"prompt\": \"\xff\xfe\"}").await.0, 400, "not UTF-8");
        let deep = "[".repeat(100_000);
        assert_eq!(refused(&server, path, deep.as_bytes()).await.0, 400);
    }
}

#[tokio::test]
async fn wrong_value_error_names_the_field() {
    let server = Server::saying("</think>\n\nHello.").await;
    let user = json!([{"role": "user", "content": "Hi"}]);
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    for (more, param) in [
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "Hi"}), "messages"),
        (json!({"messages": {"role": "user"}}), "messages"),
        (json!({"messages": ["Hi"]}), "messages[0]"),
        (json!({"messages": [{"role": "wizard", "content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content[0]"),
        (json!({"model": 5}), "model"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"max_output_tokens": 5}), "max_output_tokens"),
        (json!({"n_predict": 5}), "n_predict"),
        (json!({"think": false}), "think"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": "5"}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"max_completion_tokens": -2}), "max_completion_tokens"),
        (json!({"n": 129}), "n"),
        (json!({"n": 0}), "n"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"top_k": -5}), "top_k"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"presence_penalty": -2.5}), "presence_penalty"),
        (json!({"frequency_penalty": 2.5}), "frequency_penalty"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias.99999"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"seed": "lucky"}), "seed"),
        (json!({"stop": 5}), "stop"),
        (json!({"stop": vec!["x"; 17]}), "stop"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"logprobs": 5}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs"),
        (json!({"tools": "all"}), "tools"),
        (json!({"tools": tool(json!({}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({"name": "f", "parameters": 5}))}), "tools[0].function.parameters"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tools": tool(json!({"name": "f"})), "tool_choice": {"type": "function"}}),
            "tool_choice.function.name",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": "text"}), "response_format"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        (json!({"chat_template_kwargs": {"namespace": 1}}), "chat_template_kwargs.namespace"),
        (json!({"chat_template_kwargs": {"raise_exception": 1}}), "chat_template_kwargs.raise_exception"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (json!({"functions": [], "tools": []}), "functions"),
        (json!({"grammar": "root ::= \"x\""}), "grammar"),
        (json!({"guided_grammar": "root ::= \"x\""}), "guided_grammar"),
        (json!({"reasoning_effort": "zzz"}), "reasoning_effort"),
        (json!({"max_tokes": 5}), "max_tokes"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"min_tokens": 5}), "min_tokens"),
        (json!({"ignore_eos": true}), "ignore_eos"),
        (json!({"stop_token_ids": [5]}), "stop_token_ids"),
        (json!({"bad_words": ["x"]}), "bad_words"),
    ] {
        let body = with(json!({"messages": user}), more.clone());
        assert_eq!(refused(&server, CHAT, body.to_string().as_bytes()).await, (400, json!(param)), "{more}");
    }
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": {"text": "x"}}), "prompt"),
        (json!({"prompt": [1, "x"]}), "prompt"),
        (json!({"prompt": [1, 99999]}), "prompt"),
        (json!({"prompt": "x", "max_tokens": -2}), "max_tokens"),
        (json!({"prompt": "x", "n": 0}), "n"),
        (json!({"prompt": "x", "n": 129}), "n"),
        (json!({"prompt": "x", "response_format": {"type": "json_object"}}), "response_format"),
        (json!({"prompt": "x", "best_of": 2}), "best_of"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "x", "logprobs": true}), "logprobs"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": vec!["x"; 2049]}), "prompt"),
    ] {
        assert_eq!(refused(&server, TEXT, body.to_string().as_bytes()).await, (400, json!(param)), "{body}");
    }
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": user}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [99999]}), "tokens"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
    ] {
        assert_eq!(refused(&server, path, body.to_string().as_bytes()).await, (400, json!(param)), "{body}");
    }
    assert_eq!(server.engine.load(), (0, 0));
    assert_eq!(server.evaluated(), 0, "an invalid request must not reach the model");
}

#[tokio::test]
async fn unusual_values_are_accepted() {
    let server = Server::saying("</think>\n\nHello.").await;
    for more in [
        json!({"temperature": null, "stop": null, "tools": null, "stream": null, "max_tokens": null, "n": null}),
        json!({"n": 1, "top_k": -1, "stop": [], "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}),
        json!({"user": "me", "metadata": {"a": "b"}, "store": true, "frobnicate": [1, 2, 3]}),
        json!({"max_tokens": -1, "verbosity": "low"}),
        json!({"max_tokens": 4_000_000_000u32, "temperature": 2, "seed": -5, "logit_bias": {"5": -100}}),
    ] {
        let body = with(json!({"messages": [{"role": "user", "content": "Hi"}]}), more.clone());
        let answer = server.post(CHAT, &body).await;
        let status = answer.status;
        assert_eq!(status, 200, "{more}: {}", answer.text().await);
    }
    let best = json!({"prompt": "Hi", "suffix": "", "best_of": 1, "max_tokens": 1});
    assert_eq!(server.post(TEXT, &best).await.status, 200);
    let body = br#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
    let head = server.send("POST", CHAT, &[("content-type", "application/json; charset=utf-8")], Some(body)).await;
    assert_eq!(head.status, 200);
}

#[tokio::test]
async fn content_type_must_be_json() {
    let server = Server::saying("</think>\n\nHello.").await;
    let body = br#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
    for (kind, sent) in
        [("curl -d", Some("application/x-www-form-urlencoded")), ("a web page", Some("text/plain")), ("a blob", None)]
    {
        let headers: Vec<_> = sent.map(|sent| ("content-type", sent)).into_iter().collect();
        let length = body.len().to_string();
        let answer = server.bare("POST", CHAT, &[&headers[..], &[("content-length", &*length)]].concat(), body).await;
        assert_eq!(answer.status, 415, "{kind}");
        let error = answer.json().await["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("-H 'content-type: application/json'"), "{error}");
    }
    assert_eq!(server.evaluated(), 0);
}

#[tokio::test]
async fn body_size_is_limited() {
    let server = Setup::default().start().await;
    let of = |megabytes: usize| "word ".repeat(megabytes << 20 >> 2);
    let chat = json!({"messages": [{"role": "user", "content": of(8)}]}).to_string();
    assert!(chat.len() > 10_000_000);
    assert_eq!(refused(&server, CHAT, chat.as_bytes()).await, (400, json!("messages")), "longer than the context");
    let unused = json!({"messages": [{"role": "user", "content": "Hi"}], "user": of(8), "max_tokens": 2});
    assert_eq!(server.post(CHAT, &unused).await.status, 200);
    let text = json!({"prompt": of(BODY_LIMIT >> 20)}).to_string();
    assert!(text.len() > BODY_LIMIT);
    assert_eq!(refused(&server, TEXT, text.as_bytes()).await, (413, Value::Null));
    assert_eq!(server.get("/health").await.status, 200);
}

/// The search for a stop string needs memory of several times the length of the stop string.
#[tokio::test]
async fn long_stop_strings_count_as_memory() {
    let server = Setup { configure: |state| state.memory.set_plan(12 << 20), ..Setup::default() }.start().await;
    for (length, status) in [(10_000, 200), (500_000, 413)] {
        let stop = "x".repeat(length);
        let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "stop": stop});
        assert_eq!(server.post(CHAT, &chat).await.status, status);
        assert_eq!(server.post(TEXT, &json!({"prompt": "Hi", "stop": [stop]})).await.status, status);
    }
}

/// Text is tokenized in pieces. A word is never split, so the memory for a long word grows with its length.
#[tokio::test]
async fn long_word_exceeds_request_memory() {
    let server = Setup { configure: |state| state.memory.set_plan(32 << 20), ..Setup::default() }.start().await;
    let text = |word: &str, bytes: usize| json!({"prompt": word.repeat(bytes / word.len())}).to_string();
    for text in [text("word ", 200_000), text("a", 30_000)] {
        let answer = server.send("POST", "/tokenize", &[], Some(text.as_bytes())).await;
        assert_eq!(answer.status, 200, "{}", text.len());
    }
    assert_eq!(refused(&server, "/tokenize", text("a", 100_000).as_bytes()).await, (413, Value::Null));
}

#[tokio::test]
async fn prompt_over_context_error_has_lengths() {
    let server = Setup { context: 64, ..Setup::default() }.start().await;
    let long = "one two three four five six seven eight ".repeat(20);
    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": long}]})),
        (TEXT, json!({"prompt": long})),
        (TEXT, json!({"prompt": vec![5; 64]})),
        (TEXT, json!({"prompt": vec![5; 65], "max_tokens": 0, "echo": true})),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400);
        let error = answer.json().await["error"].clone();
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().contains("64 tokens"), "{error}");
    }
    // The text is refused because of its length. If it were tokenized, it would be refused after the first piece of 20
    // KB.
    let error = server.post(TEXT, &json!({"prompt": "word ".repeat(400_000)})).await.json().await["error"].clone();
    let min_tokens = error["message"].as_str().and_then(|text| text.split("at least ").nth(1)?.split(' ').next());
    assert!(min_tokens.is_some_and(|min_tokens| min_tokens.parse::<usize>().unwrap() > 20 << 10), "{error}");
    let fits = json!({"prompt": vec![5; 64], "max_tokens": 0, "echo": true});
    assert_eq!(server.post(TEXT, &fits).await.status, 200);
}
