//! Tests of invalid requests, which must get a 4xx status with OpenAI's error object, and of unusual requests that are
//! valid.

use super::server::{CHAT, COMPLETIONS, Server, Setup, VOCAB, chat, little_memory, with};
use moestro::http::BODY_LIMIT;
use serde_json::{Value, json};

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
    for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
        for body in [
            "",
            "{",
            "null",
            "[]",
            "5",
            "\"text\"",
            "{\"messages\": [}",
            "not json",
            "\u{0}",
            "{} {}",
            "{\"temperature\": 1e999}",
        ] {
            assert_eq!(refused(&server, path, body.as_bytes()).await, (400, Value::Null), "{path} {body:?}");
        }
        assert_eq!(refused(&server, path, b"{\"prompt\": \"\xff\xfe\"}").await.0, 400, "not UTF-8");
        let deep = "[".repeat(100_000);
        assert_eq!(refused(&server, path, deep.as_bytes()).await.0, 400);
    }
}

#[tokio::test]
async fn deep_body_error_says_so() {
    let server = Server::saying("Hello.").await;
    for (depth, problem) in [(200, "nested too deeply"), (100, "")] {
        let deep = "[".repeat(depth) + &"]".repeat(depth);
        let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\", \"odd\": {deep}}}]}}");
        let answer = server.send("POST", CHAT, &[], Some(body.as_bytes())).await;
        let text = answer.text().await;
        assert!(text.contains(problem) && !text.contains("not valid JSON"), "{text}");
    }
}

/// A body for each of the values of each field.
fn each_value(fields: &Value) -> impl Iterator<Item = (Value, &str)> {
    fields.as_object().unwrap().iter().flat_map(|(field, values)| {
        values.as_array().unwrap().iter().map(move |value| (json!({field: value}), &**field))
    })
}

#[tokio::test]
async fn wrong_value_error_names_the_field() {
    let server = Server::saying("</think>\n\nHello.").await;
    let user = json!([{"role": "user", "content": "Hi"}]);
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    let wrong = json!({
        "messages": [null, [], "Hi", {"role": "user"}], "model": [5], "seed": ["lucky"], "stop": [5, vec!["x"; 17]],
        "max_tokens": [-2, 0, "5", 1.5], "max_completion_tokens": [-2], "max_output_tokens": [5], "n": [0, 129],
        "temperature": [-0.1, 2.1, "hot"], "top_p": [1.5], "top_k": [-2], "min_p": [-1, 1.5], "repetition_penalty": [0],
        "presence_penalty": [-2.5, 2.5], "frequency_penalty": [-2.5, 2.5], "logit_bias": [[1]], "logprobs": [5],
        "top_logprobs": [3], "stream": ["yes"], "stream_options": [{"include_usage": true}], "tools": ["all"],
        "tool_choice": ["required"], "response_format": ["text"], "chat_template_kwargs": [[]],
        "reasoning_effort": ["zzz"], "thinking_budget": [-1], "modalities": [["text", "audio"]],
        // Fields of other APIs and programs, and a typing error.
        "n_predict": [5], "think": [false], "grammar": ["root ::= \"x\""],
        "guided_grammar": ["root ::= \"x\""], "min_tokens": [5], "ignore_eos": [true], "stop_token_ids": [[5]],
        "bad_words": [["x"]], "max_tokes": [5],
    });
    let nested = [
        (json!({"messages": ["Hi"]}), "messages[0]"),
        (json!({"messages": [{"role": "wizard", "content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content[0]"),
        (json!({"stream_options": {"include_usage": 3}}), "stream_options.include_usage"),
        (json!({"logit_bias": {"2048": 1}}), "logit_bias.2048"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
        (json!({"logit_bias": {"7": 101}}), "logit_bias.7"),
        (json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
        (json!({"thinking": {"type": "perhaps"}}), "thinking.type"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs"),
        (json!({"tools": tool(json!({}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({"name": "f", "parameters": 5}))}), "tools[0].function.parameters"),
        (json!({"chat_template_kwargs": {"namespace": 1}}), "chat_template_kwargs.namespace"),
        (json!({"chat_template_kwargs": {"raise_exception": 1}}), "chat_template_kwargs.raise_exception"),
        (json!({"functions": [], "tools": []}), "functions"),
    ];
    for (more, param) in each_value(&wrong).chain(nested) {
        let body = with(json!({"messages": user}), more.clone());
        assert_eq!(refused(&server, CHAT, body.to_string().as_bytes()).await, (400, json!(param)), "{more}");
    }
    let wrong = json!({
        "prompt": [null, "", [], [[]], {"text": "x"}, [1, "x"], [VOCAB], [-1], [[1], [5_000_000_000i64]], [1, 2.5],
                   vec!["x"; 2049]],
        "max_tokens": [-2], "n": [0, 129], "response_format": [{"type": "json_object"}], "best_of": [2],
        "logprobs": [21, true], "suffix": ["y"],
    });
    for (more, param) in each_value(&wrong) {
        let body = with(json!({"prompt": "x"}), more);
        assert_eq!(refused(&server, COMPLETIONS, body.to_string().as_bytes()).await, (400, json!(param)), "{body}");
    }
    for (path, body, param) in [
        (CHAT, json!({}), "messages"),
        (COMPLETIONS, json!({}), "prompt"),
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
        server.ask(CHAT, &with(chat("Hi"), more)).await;
    }
    let best = json!({"prompt": "Hi", "suffix": "", "best_of": 1, "max_tokens": 1});
    assert_eq!(server.post(COMPLETIONS, &best).await.status, 200);
    let kind = [("content-type", "Application/JSON ;charset=utf-8")];
    assert_eq!(server.send("POST", CHAT, &kind, Some(chat("Hi").to_string().as_bytes())).await.status, 200);
}

#[tokio::test]
async fn content_type_must_be_json() {
    let server = Server::saying("</think>\n\nHello.").await;
    let body = chat("Hi").to_string();
    let length = body.len().to_string();
    // The types of `curl -d`, of a web page, and of a blob.
    let form = Some("application/x-www-form-urlencoded");
    for sent in [form, Some("text/plain;application/json"), Some("application/jsonp"), Some(""), None] {
        let headers: Vec<_> = sent.map(|sent| ("content-type", sent)).into_iter().collect();
        let headers = [&headers[..], &[("content-length", &*length)]].concat();
        let answer = server.bare("POST", CHAT, &headers, body.as_bytes()).await;
        assert_eq!(answer.status, 415, "{sent:?}");
        let error = answer.json().await["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("-H 'content-type: application/json'"), "{error}");
    }
    assert_eq!(server.evaluated(), 0);
}

#[tokio::test]
async fn body_size_is_limited() {
    let server = Setup::default().start().await;
    let of = |megabytes: usize| "word ".repeat(megabytes << 20 >> 2);
    let long = chat(&of(8)).to_string();
    assert!(long.len() > 10_000_000);
    assert_eq!(refused(&server, CHAT, long.as_bytes()).await, (400, json!("messages")), "longer than the context");
    let unused = with(chat("Hi"), json!({"user": of(8), "max_tokens": 2}));
    assert_eq!(server.post(CHAT, &unused).await.status, 200);
    let text = json!({"prompt": of(BODY_LIMIT >> 20)}).to_string();
    assert!(text.len() > BODY_LIMIT);
    assert_eq!(refused(&server, COMPLETIONS, text.as_bytes()).await, (413, Value::Null));
    assert_eq!(server.get("/health").await.status, 200);
}

/// The search for a stop string needs memory of several times the length of the stop string.
#[tokio::test]
async fn long_stop_strings_count_as_memory() {
    let server = Setup { configure: little_memory, ..Setup::default() }.start().await;
    for (length, status) in [(10_000, 200), (500_000, 413)] {
        let stop = "x".repeat(length);
        assert_eq!(server.post(CHAT, &with(chat("Hi"), json!({"stop": stop}))).await.status, status);
        assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "Hi", "stop": [stop]})).await.status, status);
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
async fn path_that_is_not_utf8_is_unknown() {
    let server = Server::saying("Hello.").await;
    let paths = ["models/%ff", "models/org/%c3%28", "responses/%ff", "responses/%ff/input_items"];
    for (method, path) in paths.map(|path| ("GET", path)).into_iter().chain([("DELETE", "responses/%ff")]) {
        for path in [format!("/v1/{path}"), format!("/{path}")] {
            let answer = server.send(method, &path, &[], None).await;
            assert_eq!(answer.status, 404, "{method} {path}");
            assert_eq!(answer.json().await["error"]["code"], "not_found");
        }
    }
}
