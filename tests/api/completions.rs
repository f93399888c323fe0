//! Tests of `/v1/completions`. The model repeats its prompt.

use super::{
    client::{events, stable},
    server::{CHAT, COMPLETIONS, EOS, MESSAGES, RESPONSES, Server, Setup, little_memory, wait_until, with},
};
use moestro_engine::DraftPolicy;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const TEXT: &str = "The capital of France is Paris.";

async fn mock() -> Server {
    Setup::default().start().await
}

/// The token ids of `text`.
fn ids(server: &Server, text: &str) -> Vec<u32> {
    server.tokenizer.encode(text).unwrap()
}

#[tokio::test]
async fn body_has_text_and_usage() {
    let server = mock().await;
    insta::assert_json_snapshot!(stable(server.ask(COMPLETIONS, &json!({"prompt": TEXT, "max_tokens": 100})).await));
}

#[tokio::test]
async fn max_tokens_defaults_to_sixteen() {
    let server = Server::saying("one two three four five six seven eight nine ten eleven twelve thirteen").await;
    let answer = server.ask(COMPLETIONS, &json!({"prompt": TEXT})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn prompt_may_be_text_or_ids() {
    let server = mock().await;
    let (first, second) = ("A fox.", "One two three.");
    let texts = async |prompt: Value| -> Vec<String> {
        let answer = server.ask(COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 50})).await;
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index));
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(json!(first)).await, [first]);
    assert_eq!(texts(json!([first, second])).await, [first, second]);
    assert_eq!(texts(json!(ids(&server, first))).await, [first]);
    assert_eq!(texts(json!([ids(&server, first), ids(&server, second)])).await, [first, second]);
    assert_eq!(texts(json!([ids(&server, first), second])).await, [first, second]);
}

#[tokio::test]
async fn prompts_may_exceed_the_queue() {
    let server = Setup { max_queue: 1, ..Setup::default() }.start().await;
    let prompts: Vec<String> = (0..20).map(|n| format!("Number {n}.")).collect();
    let answer = server.ask(COMPLETIONS, &json!({"prompt": prompts, "max_tokens": 50})).await;
    for (choice, prompt) in answer["choices"].as_array().unwrap().iter().zip(&prompts) {
        assert_eq!(choice["text"], *prompt);
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn choices_are_generated_at_the_same_time() {
    let setup = |parallel, stops_at| Setup { parallel, stops_at, delay: Duration::from_millis(1), ..Setup::default() };
    let body = json!({"prompt": [TEXT, "A fox."], "n": 2, "max_tokens": 12, "temperature": 2, "seed": 5});
    let alone = setup(1, usize::MAX).start().await.ask(COMPLETIONS, &body).await;
    let [passes, sequences] = ["decode_passes", "decoding_sequences"].map(|name| &alone["timings"][name]);
    assert_eq!(passes, sequences, "{alone}");
    // The model begins when three choices are submitted.
    let server = setup(3, 0).start().await;
    let begin = async {
        let load = || server.engine.load();
        wait_until(|| load().0 + load().1 == 3, || format!("{:?}", load())).await;
        server.resume();
    };
    let (together, ()) = tokio::join!(server.ask(COMPLETIONS, &body), begin);
    assert_eq!((&together["choices"], &together["usage"]), (&alone["choices"], &alone["usage"]));
    let [passes, sequences] =
        ["decode_passes", "decoding_sequences"].map(|name| together["timings"][name].as_u64().unwrap());
    assert!(sequences > passes, "{together}");
    // A stream sends the choices one after another, although they are generated at the same time.
    let with_usage = with(body.clone(), json!({"stream_options": {"include_usage": true}}));
    let chunks = server.stream(COMPLETIONS, &with_usage).await;
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &alone["usage"]));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["usage"].is_null()));
    for (index, choice) in alone["choices"].as_array().unwrap().iter().enumerate() {
        let parts = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|part| part["index"] == index);
        let parts: Vec<&Value> = parts.collect();
        let text: String = parts.iter().map(|part| part["text"].as_str().unwrap()).collect();
        assert_eq!(text, *choice["text"].as_str().unwrap(), "choice {index}");
        let (end, before) = parts.split_last().unwrap();
        assert_eq!(end["finish_reason"], choice["finish_reason"]);
        assert!(before.iter().all(|part| part["finish_reason"].is_null()));
    }
    server.idle().await;
}

#[tokio::test]
async fn choices_compute_their_prompt_once() {
    let dir = tempfile::tempdir().unwrap();
    let delay = Duration::from_millis(1);
    let setup = Setup { parallel: 4, delay, prompt_cache_dir: Some(dir.path().to_owned()), ..Setup::default() };
    let server = setup.start().await;
    let text = "A long prompt that all choices share. ".repeat(4);
    let answer = server.ask(COMPLETIONS, &json!({"prompt": text, "n": 4, "max_tokens": 3})).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 4);
    server.idle().await;
    // The model evaluates the prompt, the prompt's last token again for each other choice, and all tokens of each
    // answer except the last.
    assert_eq!(server.evaluated(), ids(&server, &text).len() + 3 + 4 * 2);
}

#[tokio::test]
async fn timings_accompany_the_usage() {
    let server = Setup { speculate: DraftPolicy::Force, ..Setup::default() }.start().await;
    let text = TEXT.repeat(3);
    let answer = server.ask(COMPLETIONS, &json!({"prompt": [&text, &text], "max_tokens": 50})).await;
    assert_eq!(answer["choices"][0]["text"], text);
    let counts =
        |answer: &Value| ["drafted_tokens", "accepted_tokens"].map(|name| answer["timings"][name].as_u64().unwrap());
    let [drafted, accepted] = counts(&answer);
    assert!(0 < accepted && accepted <= drafted, "{answer}");
    assert!(answer["timings"]["saved_seconds"].is_f64(), "{answer}");
    let body = json!({"prompt": text, "max_tokens": 50, "stream_options": {"include_usage": true}});
    let chunks = server.stream(COMPLETIONS, &body).await;
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(counts(last).map(|count| 2 * count), [drafted, accepted]);
    assert!(chunks.iter().all(|chunk| chunk.get("timings").is_none()));
    // An answer that a stop string ends has the same timings.
    let observed = server.metrics.decode_seconds.get_sample_count();
    let stopped = server.ask(COMPLETIONS, &json!({"prompt": text, "max_tokens": 50, "stop": "Paris"})).await;
    assert_eq!(stopped["choices"][0]["text"], "The capital of France is ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(counts(&stopped)[1] > 0 && stopped["timings"]["decode_passes"].as_u64() > Some(0), "{stopped}");
    assert_eq!(server.metrics.decode_seconds.get_sample_count(), observed + 1);
    let timings = &server.ask(COMPLETIONS, &json!({"prompt": "A fox.", "max_tokens": 1})).await["timings"];
    assert_eq!((&timings["predicted_n"], &timings["drafted_tokens"]), (&json!(1), &json!(0)));
    assert!(timings["prompt_n"].as_u64() > Some(1) && timings["prompt_ms"].as_f64() > Some(0.0), "{timings}");
    assert!(timings["predicted_per_second"].is_f64(), "{timings}");
    let per_token = |kind: &str| {
        let [ms, per_token] = ["ms", "per_token_ms"].map(|name| timings[format!("{kind}_{name}")].as_f64().unwrap());
        (ms / timings[format!("{kind}_n")].as_f64().unwrap() - per_token).abs() < 1e-6
    };
    assert!(per_token("prompt") && per_token("predicted"), "{timings}");
}

#[tokio::test]
async fn echo_precedes_the_answer() {
    let server = mock().await;
    let body = json!({"prompt": TEXT, "max_tokens": 50, "echo": true});
    assert_eq!(server.ask(COMPLETIONS, &body).await["choices"][0]["text"], TEXT.repeat(2));
    let body = json!({"prompt": TEXT, "max_tokens": 0, "echo": true});
    let answer = server.ask(COMPLETIONS, &body).await;
    assert_eq!(answer["choices"][0]["text"], TEXT);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let chunks = server.stream(COMPLETIONS, &json!({"prompt": TEXT, "max_tokens": 3, "echo": true})).await;
    let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert!(text.starts_with(TEXT) && text.len() > TEXT.len());
}

#[tokio::test]
async fn logprobs_have_one_entry_per_token() {
    let server = mock().await;
    let answer = server.ask(COMPLETIONS, &json!({"prompt": "A fox.", "max_tokens": 50, "logprobs": 2})).await;
    insta::assert_json_snapshot!(rounded(answer["choices"][0]["logprobs"].clone()));
}

/// A body contains the log-probabilities of all prompts. A stream sends the log-probabilities of each prompt when it is
/// complete, so only the longest prompt counts.
#[tokio::test]
async fn logprobs_of_prompts_count_as_memory() {
    let server = Setup { configure: little_memory, ..Setup::default() }.start().await;
    let body = |words: usize, prompts: usize, stream: bool| {
        let prompts = vec!["word ".repeat(words); prompts];
        json!({"prompt": prompts, "max_tokens": 1, "echo": true, "logprobs": 20, "stream": stream})
    };
    for body in [body(300, 200, false), body(460, 1, true)] {
        assert_eq!(server.refused(COMPLETIONS, &body, 413).await["code"], "request_too_large");
        server.memory_is_free().await;
    }
    assert_eq!(server.ask(COMPLETIONS, &body(300, 1, false)).await["choices"].as_array().unwrap().len(), 1);
    server.memory_is_free().await;
    assert!(server.stream(COMPLETIONS, &body(300, 4, true)).await.len() >= 4);
    server.memory_is_free().await;
}

/// The second choice waits until the first one is written, with its log-probabilities.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_choice_counts_as_memory() {
    let setup = Setup { parallel: 2, context: 8192, configure: little_memory, ..Setup::default() };
    let server = setup.start().await;
    let body = |n: usize, tokens: usize| {
        json!({"prompt": "One", "max_tokens": tokens, "logprobs": 20, "n": n, "stream": true,
               "logit_bias": {EOS.to_string(): -100}})
    };
    for (n, tokens, is_refused) in [(1, 4000, false), (2, 100, false), (2, 4000, true)] {
        let text = server.post(COMPLETIONS, &body(n, tokens)).await.text().await;
        assert_eq!(text.ends_with("data: [DONE]\n\n"), !is_refused, "{n} x {tokens}");
        let has_error = text.contains("memory_in_use") || text.contains("request_too_large");
        assert_eq!(has_error, is_refused, "{n} x {tokens}");
        server.memory_is_free().await;
    }
}

/// Rounds numbers, because math libraries differ in the last digit.
fn rounded(mut value: Value) -> Value {
    match &mut value {
        Value::Number(number) if number.is_f64() => return json!((number.as_f64().unwrap() * 1e3).round() / 1e3),
        Value::Array(list) => list.iter_mut().for_each(|item| *item = rounded(item.take())),
        Value::Object(map) => map.values_mut().for_each(|item| *item = rounded(item.take())),
        _ => {}
    }
    value
}

/// Sends the request of lm-evaluation-harness: context and continuation form one prompt, and one extra token is
/// generated. The harness reads `[ctxlen:-1]` of each array.
#[tokio::test]
async fn evaluation_harness_scores_a_continuation() {
    // The second server's model generates an end-of-text token as the extra token.
    for server in [mock().await, Server::saying("").await] {
        for stream in [false, true] {
            score(&server, stream).await;
        }
    }
}

async fn score(server: &Server, stream: bool) {
    let (context, continuation) = ("The sky is", " blue and wide.");
    let prompt = [ids(server, context), ids(server, continuation)].concat();
    let from = ids(server, context).len();
    let body = json!({"model": "mock", "prompt": [prompt], "max_tokens": 1, "temperature": 0, "logprobs": 1,
                      "echo": true, "seed": 1234});
    let answers =
        if stream { server.stream(COMPLETIONS, &body).await } else { vec![server.ask(COMPLETIONS, &body).await] };
    let logprobs: Vec<_> = answers.iter().map(|answer| &answer["choices"][0]["logprobs"]).collect();
    let column = |name: &str| -> Vec<Value> {
        logprobs.iter().flat_map(|logprobs| logprobs[name].as_array().unwrap().clone()).collect()
    };
    let (tokens, top) = (column("token_logprobs"), column("top_logprobs"));
    assert_eq!(tokens.len(), prompt.len() + 1, "one entry per prompt token and one for the extra token");
    assert_eq!(top.len(), tokens.len());
    assert_eq!(column("tokens").len(), tokens.len());
    assert!(tokens[0].is_null() && top[0].is_null());
    for ((token, logprob), top) in column("tokens").iter().zip(&tokens).zip(&top).skip(1) {
        // The values must be equal to the last digit, because the harness compares them: a token whose value equals the
        // maximum is the greedy token.
        assert_eq!(top[token.as_str().unwrap()], *logprob);
        let best = top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(logprob.as_f64().unwrap() <= best);
    }
    let offsets: Vec<u64> = column("text_offset").iter().map(|offset| offset.as_u64().unwrap()).collect();
    assert_eq!(offsets[from], context.len() as u64);
}

#[tokio::test]
async fn stop_string_cuts_text_and_logprobs() {
    let server = mock().await;
    let body = json!({"prompt": TEXT, "max_tokens": 50, "logprobs": 0, "stop": [" is"]});
    let choice = server.ask(COMPLETIONS, &body).await["choices"][0].clone();
    assert_eq!(choice["text"], "The capital of France");
    assert_eq!(choice["finish_reason"], "stop");
    let tokens: String =
        choice["logprobs"]["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens, "The capital of France");
}

/// The bytes of a token in `logprobs`.
fn token_bytes(token: &Value) -> Vec<u8> {
    let token = token.as_str().unwrap();
    let byte = |digits: &str| u8::from_str_radix(digits, 16).unwrap();
    match token.strip_prefix("bytes:") {
        Some(bytes) => bytes.split("\\x").skip(1).map(byte).collect(),
        None => token.into(),
    }
}

/// With a stop string that begins anywhere in an answer with characters of several tokens, and without one.
#[tokio::test]
async fn logprobs_cover_exactly_the_text() {
    const SAYS: &str = "Tokyo is \u{6771}\u{4eac}, the\u{1f600} sky is blue \u{1f600}";
    let server = Server::saying(SAYS).await;
    let starts = SAYS
        .char_indices()
        .flat_map(|(start, _)| [1, 2, 5].map(|chars| SAYS[start..].chars().take(chars).collect::<String>()));
    for (stop, echo) in starts.map(Some).chain([None]).flat_map(|stop| [(stop.clone(), false), (stop, true)]) {
        let body = json!({"prompt": "\u{6771}", "max_tokens": 60, "logprobs": 0, "stop": stop, "echo": echo});
        let whole = server.ask(COMPLETIONS, &body).await["choices"][0].clone();
        let chunks = server.stream(COMPLETIONS, &with(body, json!({"stream": true}))).await;
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let streamed =
                chunks.iter().flat_map(|chunk| chunk["choices"][0]["logprobs"][field].as_array().unwrap().clone());
            assert_eq!(Value::from_iter(streamed), whole["logprobs"][field], "{stop:?} {field}");
        }
        let text = whole["text"].as_str().unwrap().as_bytes();
        let tokens: Vec<_> = whole["logprobs"]["tokens"].as_array().unwrap().iter().map(token_bytes).collect();
        let bytes = tokens.concat();
        assert!(bytes.starts_with(text), "{stop:?}: {tokens:?}");
        let last = tokens.last().map_or(0, Vec::len);
        assert!(bytes.is_empty() || bytes.len() - last < text.len(), "{stop:?}: {tokens:?} go beyond the text");
        assert!(stop.is_some() || text.ends_with(SAYS.as_bytes()));
    }
}

#[tokio::test]
async fn choices_of_a_prompt_are_adjacent() {
    let server = Server::saying(" and so on.").await;
    let body =
        |more: Value| with(json!({"prompt": ["One", "Two"], "max_tokens": 12, "seed": 7, "temperature": 2}), more);
    let one = server.ask(COMPLETIONS, &body(json!({}))).await;
    let answer = server.ask(COMPLETIONS, &body(json!({"n": 3, "best_of": 3}))).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(answer["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"], "a prompt counts once");
    for (index, prompt, seed) in [(0, "One", 7), (2, "One", 9), (3, "Two", 7), (5, "Two", 9)] {
        let alone = server.ask(COMPLETIONS, &body(json!({"prompt": prompt, "seed": seed}))).await;
        assert_eq!(choices[index]["text"], alone["choices"][0]["text"], "{index}");
    }
    let chunks = server.stream(COMPLETIONS, &body(json!({"n": 2}))).await;
    for index in 0..4 {
        let own = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let text: String = own.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, choices[index / 2 * 3 + index % 2]["text"].as_str().unwrap());
    }
}

#[tokio::test]
async fn stream_reports_progress_only_if_requested() {
    let server = Server::saying(" and so on.").await;
    let prompt = "one two three four five six seven eight nine ten ".repeat(6);
    let tokens = server.tokenizer.encode(&prompt).unwrap().len();
    let messages = json!([{"role": "user", "content": prompt}]);
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": prompt})),
        (CHAT, json!({"messages": messages})),
        (MESSAGES, json!({"messages": messages, "max_tokens": 200})),
        (RESPONSES, json!({"input": messages})),
    ] {
        let body = with(body, json!({"cache_prompt": false, "stream": true}));
        let ask = async |more: Value| {
            let text = server.post(path, &with(body.clone(), more)).await.text().await;
            events(text.trim_end_matches("data: [DONE]\n\n"))
        };
        let chunks = ask(json!({})).await;
        assert!(chunks.iter().all(|chunk| chunk.get("prompt_progress").is_none()), "progress was not requested");
        let chunks = ask(json!({"return_progress": true})).await;
        let reports: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk.get("prompt_progress")).collect();
        let done: Vec<_> = reports.iter().map(|report| report["processed"].as_u64().unwrap() as usize).collect();
        let total = reports[0]["total"].as_u64().unwrap() as usize;
        // The first report is sent before any token is evaluated.
        assert!(total >= tokens && done[0] == 0 && done.len() == 1 + total.div_ceil(32), "{done:?}");
        assert!(done.is_sorted() && done.last() == Some(&total), "{done:?}");
        assert_eq!(reports[0]["cache"], 0);
        // All reports are sent before the first token. Events before them have no text.
        let is_report = |chunk: &Value| chunk.get("prompt_progress").is_some();
        let begin = chunks.iter().position(is_report).unwrap();
        assert!(chunks[begin..][..reports.len()].iter().all(is_report), "{path}");
        let starts = ["message_start", "ping", "response.created", "response.in_progress"];
        let is_start = |chunk: &Value| starts.iter().any(|start| chunk["type"] == *start);
        assert!(chunks[..begin].iter().all(is_start), "{path}: {:?}", &chunks[..begin]);
    }
}

#[tokio::test]
async fn progress_time_is_in_milliseconds() {
    let server = Setup { delay: Duration::from_millis(1), ..Setup::default() }.start().await;
    let body = json!({"prompt": vec![7; 80], "max_tokens": 1, "return_progress": true});
    let start = Instant::now();
    let chunks = server.stream(COMPLETIONS, &body).await;
    let limit = start.elapsed().as_millis() as u64;
    let reports: Vec<_> = chunks.iter().filter_map(|chunk| chunk.get("prompt_progress")).collect();
    assert_eq!(reports.len(), 4, "{reports:?}");
    for report in reports {
        // The model takes at least a millisecond per token, and no step takes longer than the whole request.
        let [processed, time] = ["processed", "time_ms"].map(|name| report[name].as_u64().unwrap());
        assert!(processed <= time && time <= limit, "{report} within {limit} ms");
    }
}
