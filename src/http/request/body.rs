//! Reads a request body with limits on size, memory and time, and parses it as JSON. Errors name the field.

use crate::http::{
    ApiError, ServerState,
    layers::{MemoryPermit, memory},
    quote,
    request::{FieldTable, field_check},
};
use axum::body::{Body, HttpBody};
use moestro_chat::json_repair;
use serde::de::{DeserializeOwned, Deserializer};
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;

/// Slowest average rate of a body, in bytes per second. The rate is enforced after twice the timeout of a single chunk.
const MIN_RATE: usize = 32 << 10;

/// Memory of a body and its values in bytes below which they are translated on the async thread, because this takes less
/// time than a thread switch.
const SMALL_REQUEST: usize = 48 << 10;

/// Largest magnitude below which every integer is a float of 64 bits: 2^53.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

/// Reads a body of at most `limit` bytes and reserves its memory. Fails if no chunk arrives for `silence`.
async fn read(body: Body, limit: usize, silence: Duration, permit: &mut MemoryPermit) -> Result<Vec<u8>, ApiError> {
    let start = Instant::now();
    let declared = body.size_hint().exact().map_or(limit, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    if declared > limit {
        return Err(ApiError::too_large(limit));
    }
    let mut chunks = body.into_data_stream();
    let mut kept = Vec::new();
    let mut seen = 0usize;
    loop {
        let deadline = start + 2 * silence + Duration::from_secs((seen / MIN_RATE) as u64);
        let Ok(chunk) = timeout_at(deadline.min(Instant::now() + silence), chunks.next()).await else {
            return Err(ApiError::slow_body());
        };
        let Some(chunk) = chunk else { return Ok(kept) };
        let chunk = chunk.map_err(|error| ApiError::json(None, format!("cannot read the body: {error}")))?;
        seen = seen.saturating_add(chunk.len());
        if seen > limit {
            return Err(ApiError::too_large(limit));
        }
        grow(&mut kept, seen, declared, permit)?;
        kept.extend_from_slice(&chunk);
    }
}

/// Reserves memory for 1.5 times `len` bytes, but not for more than the content length.
fn grow(kept: &mut Vec<u8>, len: usize, content_length: usize, permit: &mut MemoryPermit) -> Result<(), ApiError> {
    if len > kept.capacity() {
        let capacity = (len + len / 2).min(content_length).max(len);
        permit.resize(capacity)?;
        kept.reserve_exact(capacity - kept.len());
    }
    Ok(())
}

/// Reads and parses a request. The permit holds the memory of the values and of the text of the body. The latter is
/// needed again for translated texts, decoded images and the rendered prompt.
pub async fn json<T>(state: &ServerState, body: Body) -> Result<(T, MemoryPermit), ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    parsed(state, body, ParsedValues::Kept, parse).await
}

/// The use of the parsed values of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ParsedValues {
    /// They are used as they are.
    Kept,
    /// They are translated to other values, for which the permit holds memory, too.
    Translated,
}

/// Reads a generation request in two parts: the fields `C` that several requests share, and the fields of `T`. `known`
/// lists the fields of both. (An error within serde's `flatten` would not name its field.)
pub async fn request<C, T>(
    state: &ServerState,
    body: Body,
    known: FieldTable,
    values: ParsedValues,
) -> Result<(C, T, MemoryPermit), ApiError>
where
    C: DeserializeOwned + Send + 'static,
    T: DeserializeOwned + Send + 'static,
{
    let both = |bytes: &[u8]| {
        let object = checked(bytes, known)?;
        Ok((typed(&object)?, typed(object)?))
    };
    let ((common, request), permit) = parsed(state, body, values, both).await?;
    Ok((common, request, permit))
}

async fn parsed<T, P>(
    state: &ServerState,
    body: Body,
    values: ParsedValues,
    parse: P,
) -> Result<(T, MemoryPermit), ApiError>
where
    T: Send + 'static,
    P: FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
{
    let mut permit = state.memory.permit();
    let mut bytes = read(body, state.body_limit, state.timeouts.body, &mut permit).await?;
    let parsed = memory::parsed_bytes(&bytes);
    let needed = match values {
        ParsedValues::Kept => parsed,
        ParsedValues::Translated => 2 * parsed - bytes.len(),
    };
    permit.enter(needed).await?;
    let read = move || {
        json_repair::replace_lone_surrogates(&mut bytes);
        parse(&bytes)
    };
    Ok((translate(&permit, read).await?, permit))
}

/// Runs `step`, whose time grows with the body. The async threads only run the steps of small bodies.
pub async fn translate<T: Send + 'static>(
    permit: &MemoryPermit,
    step: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if permit.bytes() < SMALL_REQUEST { step() } else { permit.run(0, step).await? }
}

/// Parses an object, checks its field names, and drops the fields that are not in `known`.
fn checked(bytes: &[u8], known: FieldTable) -> Result<Value, ApiError> {
    let mut object = object(bytes)?;
    if let Value::Object(fields) = &mut object {
        field_check::keep_known(fields, known, "")?;
        make_integers(fields);
    }
    Ok(object)
}

/// Parses `bytes` as `T`.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    typed(object(bytes)?)
}

/// Parses `bytes` as a JSON object.
pub fn object(bytes: &[u8]) -> Result<Value, ApiError> {
    let value = serde_json::from_slice(bytes);
    let value = value.map_err(|error| {
        let is_deep = error.to_string().starts_with("recursion limit exceeded");
        let problem = if is_deep { "nested too deeply" } else { "not valid JSON" };
        ApiError::json(None, format!("The body is {problem}: {error}"))
    })?;
    let what = match value {
        Value::Object(_) => return Ok(value),
        Value::Array(_) => "an array",
        Value::String(_) => "a string",
        Value::Number(_) => "a number",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
    };
    Err(ApiError::json(None, format!("The body must be a JSON object; it is {what}.")))
}

/// Converts a JSON value to `T`. An error names the field.
pub fn typed<'de, T: DeserializeOwned>(json: impl Deserializer<'de, Error = serde_json::Error>) -> Result<T, ApiError> {
    typed_at("", json)
}

/// Converts a JSON value to `T`. An error names the field, whose path starts with `parent`.
pub fn typed_at<'de, T: DeserializeOwned>(
    parent: &str,
    json: impl Deserializer<'de, Error = serde_json::Error>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = error.path().to_string();
        let wrong = error.inner();
        match missing_field(wrong).filter(|_| path == ".") {
            Some(name) => ApiError::json(Some(format!("{parent}{name}")), format!("missing field `{parent}{name}`")),
            None if path == "." => ApiError::json(None, in_json_words(&wrong.to_string())),
            None => {
                let path = format!("{parent}{path}");
                let message = format!("{}: {}", quote(&path), in_json_words(&wrong.to_string()));
                ApiError::json(Some(path), message)
            }
        }
    })
}

/// serde's message about a wrong type, with JSON's names of types instead of Rust's.
fn in_json_words(message: &str) -> String {
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let found = found.replace("invalid type: map", "invalid type: object");
    let found = found.replace("invalid type: sequence", "invalid type: array");
    let expected = match expected {
        "i64" => "an integer",
        "f64" => "a number",
        "a sequence" => "an array",
        other if other == "a map" || other.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{}, expected {expected}", quote(&found))
}

/// Replaces whole numbers such as `100.0` by integers. Clients in Python send them for fields that are integers, and
/// the fields that are not integers accept both.
pub fn make_integers(fields: &mut Map<String, Value>) {
    for value in fields.values_mut() {
        let float = value.as_f64().filter(|_| value.is_f64());
        if let Some(whole) = float.filter(|number| number.fract() == 0.0 && number.abs() <= MAX_WHOLE) {
            *value = (whole as i64).into();
        }
    }
}

/// The name of a missing field. serde reports the name only in the message, not in the path.
fn missing_field(error: &serde_json::Error) -> Option<String> {
    let message = error.to_string();
    let name = message.strip_prefix("missing field `")?.split('`').next()?;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{
        layers::memory::RequestMemory,
        openai::types::{ChatRequest, CommonFields, CompletionRequest},
        request::fields,
    };
    use moestro_base::metrics::Metrics;

    fn error<T: DeserializeOwned>(text: &str) -> Value {
        let error = parse::<T>(text.as_bytes()).err().expect("an error");
        error.body()["error"].clone()
    }

    #[test]
    fn type_error_has_the_words_of_json() {
        for (body, words) in [
            (r#"{"max_tokens": "5"}"#, r#"max_tokens: invalid type: string "5", expected an integer"#),
            (r#"{"temperature": []}"#, "temperature: invalid type: array, expected a number"),
            (
                r#"{"logit_bias": "x, expected i64"}"#,
                r#"logit_bias: invalid type: string "x, expected i64", expected an object"#,
            ),
            (r#"{"stream_options": true}"#, "stream_options: invalid type: boolean `true`, expected an object"),
        ] {
            assert_eq!(error::<CommonFields>(body)["message"], words);
        }
        let wrong = error::<ChatRequest>(r#"{"messages": {"role": "user"}}"#);
        assert_eq!(wrong["message"], "messages: invalid type: object, expected an array");
        assert_eq!(error::<ChatRequest>("[]")["message"], "The body must be a JSON object; it is an array.");
    }

    #[test]
    fn whole_numbers_are_integers() {
        let body = br#"{"max_tokens": 5.0, "seed": -2.0, "n": 1.5, "temperature": 1.0, "top_p": 0.5, "top_k": 1e300}"#;
        let fields = checked(body, fields::CHAT).unwrap();
        let expected = serde_json::json!(
            {"max_tokens": 5, "seed": -2, "n": 1.5, "temperature": 1, "top_p": 0.5, "top_k": 1e300}
        );
        assert_eq!(fields, expected);
        let common = r#"{"seed": 9007199254740993}"#;
        let huge = 9_007_199_254_740_993_i64;
        assert_eq!(typed::<CommonFields>(checked(common.as_bytes(), fields::CHAT).unwrap()).unwrap().seed, Some(huge));
    }

    #[tokio::test]
    async fn body_over_the_limit_is_refused() {
        let mut permit = RequestMemory::new(&Metrics::new("0", "cpu")).permit();
        let second = Duration::from_secs(1);
        assert_eq!(read(Body::from("12345678"), 8, second, &mut permit).await.unwrap(), b"12345678");
        assert_eq!(permit.bytes(), 8);
        assert_eq!(read(Body::from("123456789"), 8, second, &mut permit).await.unwrap_err().status, 413);
        assert_eq!(read(Body::from("1".repeat(1000)), 8, second, &mut permit).await.unwrap_err().status, 413);
    }

    #[tokio::test]
    async fn permit_holds_text_and_values() {
        let state = ServerState::new(Metrics::new("0", "cpu"), None, None);
        for words in [3, 30_000] {
            let text = serde_json::json!({"prompt": "word ".repeat(words)}).to_string();
            let held = text.len() + memory::parsed_bytes(text.as_bytes());
            let (_, permit) = json::<CompletionRequest>(&state, Body::from(text)).await.unwrap();
            assert_eq!(permit.bytes(), held);
        }
    }

    #[tokio::test]
    async fn slow_body_times_out() {
        let mut permit = RequestMemory::new(&Metrics::new("0", "cpu")).permit();
        let silence = Duration::from_millis(20);
        let never = Body::from_stream(tokio_stream::pending::<Result<Vec<u8>, std::io::Error>>());
        assert_eq!(read(never, 8, silence, &mut permit).await.unwrap_err().status, 408);
        let drops = tokio_stream::iter(0..1000).then(|_| async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            Ok::<_, std::io::Error>(vec![b'1'])
        });
        assert_eq!(read(Body::from_stream(drops), 1 << 20, silence, &mut permit).await.unwrap_err().status, 408);
    }
}
