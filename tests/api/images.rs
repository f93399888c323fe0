//! Tests of images in every API, with small vision-language checkpoints and with a model that accepts only text.

use super::server::{CHAT, MESSAGES, RESPONSES, Server, Setup, serve_checkpoint, serve_checkpoint_with, wait_until};
use base64::{Engine, engine::general_purpose::STANDARD};
use moestro::http::ImageUrls;
use moestro_engine::{DiskCacheOptions, Options};
use moestro_model::model::LoadOptions;
use serde_json::{Value, json};
use std::{
    io::{self, Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
};
use test_support::{files::copy_files, own_process::ran_in_own_process};

pub const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision");
const NOT_SHOWN: &str = "x-moestro-images-not-shown";

pub fn options() -> (LoadOptions, Options) {
    let mut load = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    load.plan.context = Some(1024);
    load.plan.prompt_cache = Some(64 << 20);
    (load, Options { eos: vec![991, 993], prompt_cache: 64 << 20, ..Options::default() })
}

fn qwen3_5() -> PathBuf {
    Path::new(FIXTURE).join("mlx_4bit")
}

/// A checkpoint of qwen4_exp, with the tokenizer and the template of the other checkpoint.
fn qwen4_exp() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let images = Path::new(FIXTURE).join("../qwen4_exp_images");
    copy_files(images, dir.path(), &["config.json", "preprocessor_config.json", "model.safetensors"]);
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
    copy_files(qwen3_5(), dir.path(), &names);
    dir
}

async fn serve(checkpoint: &Path) -> Server {
    let (load, options) = options();
    serve_checkpoint(checkpoint, &load, options).await
}

async fn vision() -> Server {
    serve(&qwen3_5()).await
}

async fn serve_with_cache(checkpoint: &Path, dir: &Path) -> Server {
    let (load, options) = options();
    let disk_cache = Some(DiskCacheOptions { dir: dir.into(), limit: 64 << 20, key: "vision".into() });
    serve_checkpoint(checkpoint, &load, Options { disk_cache, ..options }).await
}

pub fn file(name: &str) -> String {
    STANDARD.encode(std::fs::read(format!("{FIXTURE}/images/{name}")).unwrap())
}

/// A picture with a single colour.
fn picture(colour: [u8; 3]) -> String {
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    let pixels = colour.repeat(64 * 64);
    image::ImageEncoder::write_image(encoder, &pixels, 64, 64, image::ExtendedColorType::Rgb8).unwrap();
    STANDARD.encode(out)
}

pub fn url(data: &str) -> String {
    format!("data:image/png;base64,{data}")
}

pub fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn chat(messages: Value) -> Value {
    json!({"messages": messages, "max_tokens": 6, "temperature": 0})
}

pub fn user(parts: Value) -> Value {
    json!({"role": "user", "content": parts})
}

pub fn image_url(data: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url(data)}})
}

#[tokio::test]
async fn answers_depend_on_the_picture() {
    for checkpoint in [&*qwen3_5(), qwen4_exp().path()] {
        let server = serve(checkpoint).await;
        let (red, blue) = (picture([255, 0, 0]), picture([0, 0, 255]));
        let mut answers = Vec::new();
        for data in [&red, &blue, &red] {
            let body = chat(json!([user(json!([text("Which colour? "), image_url(data)]))]));
            let answer = server.ask(CHAT, &body).await;
            let count = server.ask("/tokenize", &body).await["count"].clone();
            assert_eq!(answer["usage"]["prompt_tokens"], count);
            answers.push(answer["choices"][0]["message"].to_string());
        }
        assert_ne!(answers[0], answers[1]);
        assert_eq!(answers[0], answers[2]);
    }
}

#[tokio::test]
async fn all_apis_render_the_same_prompt() {
    let tokens = check_all_apis_render_the_same_prompt(&qwen3_5()).await;
    let refs: Value = serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/refs.json")).unwrap()).unwrap();
    assert_eq!(tokens, refs["chats"]["one"]["ids"], "transformers' ids");
    let tokens = check_all_apis_render_the_same_prompt(qwen4_exp().path()).await;
    // 48 x 144 pixels are 3 x 9 tokens.
    assert_eq!(tokens.as_array().unwrap().iter().filter(|id| **id == 1003).count(), 27);
}

/// Returns the ids of the prompt.
async fn check_all_apis_render_the_same_prompt(checkpoint: &Path) -> Value {
    let server = serve(checkpoint).await;
    let data = file("shapes.png");
    let body = chat(json!([user(json!([text("Look at this: "), image_url(&data), text(" What is in it?")]))]));
    let tokens = server.ask("/tokenize", &body).await["tokens"].clone();
    let expected = tokens.as_array().unwrap().len();
    let chat = server.ask(CHAT, &body).await;
    assert_eq!(chat["usage"]["prompt_tokens"], expected);

    let input = |kind: &str| json!({"type": "input_image", "image_url": kind});
    let say = |text: &str| json!({"type": "input_text", "text": text});
    let parts = json!([say("Look at this: "), input(&url(&data)), say(" What is in it?")]);
    let body = json!({"input": [user(parts)], "max_output_tokens": 6, "temperature": 0});
    let response = server.ask(RESPONSES, &body).await;
    assert_eq!(response["usage"]["input_tokens"], expected);

    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let parts = json!([text("Look at this: "), {"type": "image", "source": source}, text(" What is in it?")]);
    let body = json!({"messages": [user(parts)], "thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 6});
    let count = server.ask("/v1/messages/count_tokens", &body).await;
    assert_eq!(count["input_tokens"], expected);
    let message = server.ask(MESSAGES, &body).await;
    let cached = message["usage"]["cache_read_input_tokens"].as_u64().unwrap_or(0);
    assert_eq!(message["usage"]["input_tokens"].as_u64().unwrap() + cached, expected as u64);
    tokens
}

#[tokio::test]
async fn tool_results_have_images() {
    let server = vision().await;
    let data = file("gradient.png");
    let count = async |content: Value| {
        let call = json!({"type": "tool_use", "id": "t", "name": "Read", "input": {}});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": content});
        let messages = json!([user(json!("Look")), {"role": "assistant", "content": [call]}, user(json!([result]))]);
        server.ask("/v1/messages/count_tokens", &json!({"messages": messages})).await["input_tokens"].as_u64().unwrap()
    };
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    // The picture has 6 tokens. Two more tokens mark its start and its end.
    assert_eq!(count(json!([image])).await, count(json!("")).await + 8);
}

#[tokio::test]
async fn second_turn_reuses_the_picture() {
    for checkpoint in [&*qwen3_5(), qwen4_exp().path()] {
        let server = serve(checkpoint).await;
        let first = user(json!([image_url(&file("noise.jpg")), text("What is this?")]));
        let answer = server.ask(CHAT, &chat(json!([first]))).await;
        let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let reply = json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]});
        let more = chat(json!([first, reply, user(json!("And now?"))]));
        let second = server.ask(CHAT, &more).await;
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(cached + 8 > prompt, "{cached} of {prompt}");
        let fresh = serve(checkpoint).await.ask(CHAT, &more).await;
        assert_eq!(second["choices"], fresh["choices"]);
        // Another picture of the same size has the same token ids. Only the prompt before the picture may be shared.
        let other = user(json!([image_url(&file("gradient.png")), text("What is this?")]));
        let other = server.ask(CHAT, &chat(json!([other]))).await;
        assert!(other["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() < 5, "{}", other["usage"]);
    }
}

#[tokio::test]
async fn picture_is_cached_across_restarts() {
    for checkpoint in [&*qwen3_5(), qwen4_exp().path()] {
        let dir = tempfile::tempdir().unwrap();
        let ask =
            |data: &str| chat(json!([user(json!([image_url(data), text("What is this, and where was it taken?")]))]));
        let (gradient, red) = (picture([9, 200, 30]), picture([255, 0, 0]));
        let mut server = serve_with_cache(checkpoint, dir.path()).await;
        let first = server.ask(CHAT, &ask(&gradient)).await;
        server.shut_down();
        server.wait_for_end().await;
        let server = serve_with_cache(checkpoint, dir.path()).await;
        // The first server's thread may still hold the lock of the cache directory.
        wait_until(|| !server.engine.prompt_cache().disk_locked, || "the directory is still locked".into()).await;
        let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let other = server.ask(CHAT, &ask(&red)).await;
        assert!(cached(&other) < 5, "{}", other["usage"]);
        let again = server.ask(CHAT, &ask(&gradient)).await;
        assert!(cached(&again) > 10, "{}", again["usage"]);
        assert_eq!(again["choices"], first["choices"]);
    }
}

#[tokio::test]
async fn low_detail_takes_fewer_tokens() {
    let (mut load, options) = options();
    load.vision.max_tokens = Some(16);
    let server = serve_checkpoint(&qwen3_5(), &load, options).await;
    let data = file("noise.jpg");
    let count = async |server: &Server| {
        let body = json!({"messages": [user(json!([image_url(&data)]))]});
        server.ask("/tokenize", &body).await["count"].as_u64().unwrap()
    };
    assert!(count(&server).await <= count(&vision().await).await);
    let models = server.get("/v1/models").await.json().await;
    assert_eq!(models["data"][0]["input_modalities"], json!(["text", "image"]));
    assert_eq!(models["data"][0]["capabilities"]["vision"], true);
}

#[tokio::test]
async fn broken_pictures_are_refused_only_when_new() {
    let server = vision().await;
    for (part, word) in [
        (image_url("AAAA"), "PNG"),
        (image_url("!"), "base64"),
        (image_url(&file("gradient.png")[..60]), "damaged"),
        (json!({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}), "--image-urls"),
        (json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "data:"),
        (json!({"type": "image_url", "image_url": {}}), "URL"),
    ] {
        let error = server.refused(CHAT, &chat(json!([user(json!([part]))])), 400).await;
        assert_eq!(error["param"], "messages[0].content[0]", "{error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
        let history = json!([user(json!([part])), {"role": "assistant", "content": "Hm"}, user(json!("Go on"))]);
        let old = server.post(CHAT, &chat(history)).await;
        assert_eq!((old.status, old.header(NOT_SHOWN)), (200, Some("1")));
    }
}

#[tokio::test]
async fn broken_pictures_after_tools_become_sentences() {
    let server = vision().await;
    let (broken, say) = (image_url("bm90IGFuIGltYWdl"), json!("go on"));
    let function = json!({"name": "read", "arguments": "{}"});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": function}]});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "ok"});
    let picture = user(json!([text("Attached image(s) from tool result:"), broken]));
    for messages in [
        json!([user(json!("read it")), call, result, picture]),
        json!([user(json!("read it")), call, result, picture, user(say.clone())]),
        json!([user(json!("read it")), call, result, picture, picture]),
        json!([picture, user(say.clone())]),
    ] {
        let answer = server.post(CHAT, &chat(messages.clone())).await;
        assert_eq!(answer.status, 200, "{messages}");
        assert!(answer.header(NOT_SHOWN).is_some(), "{messages}");
    }
    let source = json!({"type": "base64", "media_type": "image/png", "data": "bm90IGFuIGltYWdl"});
    let blocks =
        json!([{"type": "tool_result", "tool_use_id": "t", "content": "ok"}, {"type": "image", "source": source}]);
    let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]});
    let body = json!({"messages": [user(json!("Look")), call, user(blocks)], "max_tokens": 6});
    assert_eq!(server.post(MESSAGES, &body).await.header(NOT_SHOWN), Some("1"));
    let parts = json!([{"type": "input_image", "image_url": url("bm90IGFuIGltYWdl")}]);
    let call = json!({"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "ok"});
    let body = json!({"input": [user(json!("Look")), call, output, user(parts)], "max_output_tokens": 6});
    assert_eq!(server.post(RESPONSES, &body).await.header(NOT_SHOWN), Some("1"));
    // A later turn of the user is new again.
    let later = json!([user(json!("x")), {"role": "assistant", "content": "ok"}, picture]);
    assert_eq!(server.post(CHAT, &chat(later)).await.status, 400);
}

/// A host that does not answer requests for `/slow` until `/good` was requested. Returns `HOST:PORT`.
fn host_with_slow_image() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let image = STANDARD.decode(picture([1, 2, 3])).unwrap();
    let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", image.len());
    std::thread::spawn(move || {
        let mut waiting = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            if request[..length].starts_with(b"GET /slow") {
                waiting.push(stream);
            } else {
                stream.write_all(&[head.as_bytes(), &image].concat()).unwrap();
                waiting.clear();
                break;
            }
        }
    });
    host
}

#[tokio::test]
async fn new_image_is_read_before_old_ones() {
    let (load, options) = options();
    let host = host_with_slow_image();
    let urls = Arc::new(ImageUrls::new(std::slice::from_ref(&host)));
    let server = serve_checkpoint_with(&qwen3_5(), &load, options, |state| state.image_urls = urls).await;
    let image = |path: &str| json!({"type": "image_url", "image_url": {"url": format!("http://{host}/{path}")}});
    let messages = json!([
        user(json!([text("old "), image("slow")])),
        {"role": "assistant", "content": "Hm"},
        user(json!([text("new "), image("good")])),
    ]);
    let answer = server.post(CHAT, &chat(messages)).await;
    assert_eq!((answer.status, answer.header(NOT_SHOWN)), (200, Some("1")));
}

#[tokio::test]
async fn document_in_new_message_has_images() {
    let server = vision().await;
    let count = async |parts: Value| {
        let source = json!({"type": "content", "content": parts});
        let messages = json!([user(json!([{"type": "document", "source": source}]))]);
        server.ask("/v1/messages/count_tokens", &json!({"messages": messages})).await["input_tokens"].as_u64().unwrap()
    };
    let source = json!({"type": "base64", "media_type": "image/png", "data": file("gradient.png")});
    let image = json!({"type": "image", "source": source});
    assert_eq!(count(json!([text("a"), image])).await, count(json!([text("a")])).await + 8);
}

#[tokio::test]
async fn placeholder_in_text_is_no_image() {
    let server = vision().await;
    let (placeholder, image) = (text("a <|image_pad|> b"), image_url(&picture([1, 2, 3])));
    let tokens = async |parts: Value| {
        let tokens = server.ask("/tokenize", &json!({"messages": [user(parts)]})).await["tokens"].clone();
        tokens.as_array().unwrap().iter().filter(|id| **id == 1003).count()
    };
    assert_eq!(tokens(json!([placeholder, image, placeholder])).await, 4);
    // Without images, the placeholder in the text is kept, and its token does not stand for an image.
    assert_eq!(tokens(json!([placeholder])).await, 1);
    server.ask(CHAT, &chat(json!([user(json!([placeholder]))]))).await;
}

#[tokio::test]
async fn text_only_model_replaces_old_pictures() {
    let server = Setup { says: Some("ok"), context: 2048, ..Setup::default() }.start().await;
    let image = image_url(&picture([1, 2, 3]));
    let error = server.refused(CHAT, &chat(json!([user(json!([text("see"), image]))])), 400).await;
    assert!(error["message"].as_str().unwrap().contains("cannot see images"), "{error}");
    let models = server.get("/v1/models").await.json().await;
    assert_eq!(models["data"][0]["input_modalities"], json!(["text"]));
    let tool = json!({"role": "tool", "tool_call_id": "t", "content": [image]});
    let history = json!([user(json!("Look")), {"role": "assistant", "content": "Hm"}, tool]);
    let answer = server.post(CHAT, &chat(history.clone())).await;
    assert_eq!((answer.status, answer.header(NOT_SHOWN)), (200, Some("1")));
    let prompt = server.prompt(&json!({"messages": history})).await;
    assert!(prompt.contains("[image not shown: this model cannot see images]"), "{prompt}");
}

#[tokio::test]
async fn replaced_picture_is_logged_once() {
    // Other tests can disable log lines for all threads of their process.
    if ran_in_own_process(replaced_picture_is_logged_once) {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let writer = file.reopen().unwrap();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.try_clone().unwrap());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let server = Setup { says: Some("ok"), context: 2048, ..Setup::default() }.start().await;
    let image = image_url(&picture([1, 2, 3]));
    let mut messages = vec![user(json!("Look"))];
    for turn in 1..4 {
        let call = json!([{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": call}));
        messages.push(json!({"role": "tool", "tool_call_id": "t", "content": [image]}));
        let answer = server.post(CHAT, &chat(messages.clone().into())).await;
        assert_eq!(answer.header(NOT_SHOWN), Some(&*turn.to_string()));
        answer.text().await;
        let log = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(log.matches("image replaced by a sentence").count(), turn, "{log}");
    }
}

#[test]
fn image_urls_reach_no_private_address() {
    let private = TcpListener::bind("127.0.0.1:0").unwrap();
    private.set_nonblocking(true).unwrap();
    let port = private.local_addr().unwrap().port();
    // These hosts are in the list of allowed hosts, but resolve to this machine: numbers and short forms that mean an
    // address, and a name that resolves to a loopback address.
    for host in ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "images.localhost"] {
        let listed = format!("{host}:{port}");
        let found = ImageUrls::new(std::slice::from_ref(&listed)).fetch(&format!("http://{listed}/a.png"));
        assert!(found.is_err(), "{host}");
    }
    // The hosts in these URLs are not in the list of allowed hosts.
    let urls = ImageUrls::new(&["images.example.com".into()]);
    for url in [
        format!("http://127.0.0.1:{port}/"),
        format!("http://[::1]:{port}/"),
        format!("http://[::ffff:127.0.0.1]:{port}/"),
        format!("http://[::ffff:7f00:1]:{port}/"),
        format!("http://2130706433:{port}/"),
        format!("http://images.example.com@127.0.0.1:{port}/"),
        format!("http://images.example.com:80@127.0.0.1:{port}/"),
        format!("http://127.0.0.1:{port}\\@images.example.com/"),
        format!("http://127.0.0.1:{port}/?images.example.com"),
        format!("http://127.0.0.1:{port}#images.example.com"),
        format!("//127.0.0.1:{port}/"),
        format!("ftp://127.0.0.1:{port}/"),
        "file:///etc/passwd".into(),
        "http://169.254.169.254/latest/meta-data".into(),
        String::new(),
    ] {
        assert!(urls.fetch(&url).is_err(), "{url}");
    }
    let nothing = private.accept().map(|(_, from)| from).unwrap_err();
    assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock, "a request reached a private address");
}
