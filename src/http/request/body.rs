//! A request's body: bounded in size, memory and time, then JSON with errors that name the field.

use crate::http::{
    ServerState,
    errors::ApiError,
    layers::memory::{self, MemoryPermit},
    openai::types::Common,
    request::fields::{self, Field},
};
use axum::body::{Body, HttpBody};
use serde::de::{DeserializeOwned, Deserializer};
use serde_json::Value;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;

/// A body beyond the limit is still read, up to this many times the limit, and thrown away: closing the connection on a
/// client that is still sending would take the answer from it.
const PATIENCE: usize = 4;

/// Bytes a second that a body must have on average, after twice its longest silence.
const RATE: usize = 32 << 10;

/// Smaller bodies are parsed where they are read: it takes less than passing them on.
const SMALL: usize = 16 << 10;

/// Reads a body of at most `limit` bytes, and holds the memory for it.
async fn read(body: Body, limit: usize, silence: Duration, permit: &mut MemoryPermit) -> Result<Vec<u8>, ApiError> {
    let begun = Instant::now();
    let declared = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(limit);
    let mut chunks = body.into_data_stream();
    let (mut kept, mut seen, mut refused) = (Vec::new(), 0usize, None);
    loop {
        let slowest = begun + 2 * silence + Duration::from_secs((seen / RATE) as u64);
        let Ok(chunk) = timeout_at(slowest.min(Instant::now() + silence), chunks.next()).await else {
            return Err(ApiError::slow_body());
        };
        let Some(chunk) = chunk else { break };
        let chunk = chunk.map_err(|error| ApiError::json(None, format!("The body could not be read: {error}")))?;
        seen = seen.saturating_add(chunk.len());
        if refused.is_none() {
            refused = match seen > limit {
                true => Some(ApiError::too_large(limit)),
                false => grow(&mut kept, seen, declared.min(limit), permit).err(),
            };
        }
        match refused {
            None => kept.extend_from_slice(&chunk),
            Some(_) if seen > limit.saturating_mul(PATIENCE) => break,
            Some(_) => {
                kept = Vec::new();
                permit.resize(0)?;
            }
        }
    }
    refused.map_or(Ok(kept), Err)
}

/// Makes room for `len` bytes: half as much again as needed, but no more than was announced.
fn grow(kept: &mut Vec<u8>, len: usize, announced: usize, permit: &mut MemoryPermit) -> Result<(), ApiError> {
    if len > kept.capacity() {
        let capacity = (len + len / 2).min(announced).max(len);
        permit.resize(capacity)?;
        kept.reserve_exact(capacity - kept.len());
    }
    Ok(())
}

/// The parsed request, and the share of memory that it holds.
pub async fn json<T>(state: &ServerState, body: Body) -> Result<(T, MemoryPermit), ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    parsed(state, body, parse).await
}

/// The same where the fields that there are stand in a table, see [`fields::check`].
pub async fn known<T>(state: &ServerState, body: Body, known: &'static [Field]) -> Result<(T, MemoryPermit), ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    parsed(state, body, |bytes| typed(checked(bytes, known)?)).await
}

/// The fields that all kinds of generation share, those of one kind, and the share of memory that they hold. `known` are
/// all of them.
pub async fn request<T>(
    state: &ServerState,
    body: Body,
    known: &'static [Field],
) -> Result<(Common, T, MemoryPermit), ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    let both = |bytes: &[u8]| {
        let object = checked(bytes, known)?;
        Ok((typed(&object)?, typed(object)?))
    };
    let ((common, request), permit) = parsed(state, body, both).await?;
    Ok((common, request, permit))
}

async fn parsed<T, P>(state: &ServerState, body: Body, parse: P) -> Result<(T, MemoryPermit), ApiError>
where
    T: Send + 'static,
    P: FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
{
    let mut permit = state.memory.permit();
    let bytes = read(body, state.body_limit, state.timeouts.body, &mut permit).await?;
    let length = bytes.capacity();
    permit.grow(memory::parsed(&bytes))?;
    let read = if length < SMALL { parse(&bytes)? } else { permit.run(move || parse(&bytes)).await?? };
    permit.resize(permit.bytes() - length)?;
    Ok((read, permit))
}

/// An object whose fields have been looked through.
fn checked(bytes: &[u8], known: &[Field]) -> Result<Value, ApiError> {
    let object = object(bytes)?;
    if let Value::Object(fields) = &object {
        fields::check(fields, known)?;
    }
    Ok(object)
}

/// Reads `bytes` as `T`, whatever the content type says: `curl -d` names another one.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    typed(object(bytes)?)
}

/// Reads `bytes` as a JSON object.
pub fn object(bytes: &[u8]) -> Result<Value, ApiError> {
    let value = serde_json::from_slice(bytes);
    let value = value.map_err(|error| ApiError::json(None, format!("The body is not valid JSON: {error}")))?;
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

/// Reads a JSON value as `T`; an error names the field.
pub fn typed<'de, T: DeserializeOwned>(json: impl Deserializer<'de, Error = serde_json::Error>) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = error.path().to_string();
        let wrong = error.inner();
        match path == "." {
            true => ApiError::json(missing(wrong), wrong.to_string()),
            false => ApiError::json(Some(path.clone()), format!("{path}: {wrong}")),
        }
    })
}

/// The field that serde misses has no path; its name stands in the message.
fn missing(error: &serde_json::Error) -> Option<String> {
    let message = error.to_string();
    let name = message.strip_prefix("missing field `")?.split('`').next()?;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{
        layers::memory::RequestMemory,
        openai::types::{ChatRequest, Common, CompletionRequest},
    };
    use crate::metrics::Metrics;
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    fn error<T: DeserializeOwned>(text: &str) -> Value {
        let error = parse::<T>(text.as_bytes()).err().expect("an error");
        serde_json::to_value(error.body()).unwrap()["error"].clone()
    }

    #[test]
    fn an_error_names_the_field() {
        assert_eq!(error::<Common>(r#"{"temperature": "hot"}"#)["param"], "temperature");
        assert_eq!(
            error::<Common>(r#"{"stream_options": {"include_usage": 3}}"#)["param"],
            "stream_options.include_usage"
        );
        assert_eq!(error::<ChatRequest>("{}")["param"], "messages");
        assert_eq!(error::<CompletionRequest>(r#"{"prompt": [1, "a"]}"#)["param"], "prompt");
    }

    #[test]
    fn what_is_not_json_names_none() {
        for text in ["", "{", "nonsense", "{}{}", "{\"temperature\": 1e999}"] {
            assert_eq!(error::<Common>(text)["code"], "invalid_json", "{text}");
            assert_eq!(error::<Common>(text)["param"], Value::Null, "{text}");
        }
        assert_eq!(error::<Common>("[]")["code"], "invalid_json");
        assert_eq!(error::<Common>("[]")["message"], "The body must be a JSON object; it is an array.");
    }

    #[test]
    fn null_is_absent_and_unknown_fields_are_ignored() {
        let common: Common = parse(br#"{"temperature": null, "stop": null, "frobnicate": [1, 2]}"#).unwrap();
        assert!(common.temperature.is_none() && common.stop.is_none());
    }

    #[tokio::test]
    async fn a_body_is_bounded() {
        let mut permit = RequestMemory::new(&Metrics::new("0", "cpu")).permit();
        let second = Duration::from_secs(1);
        assert_eq!(read(Body::from("12345678"), 8, second, &mut permit).await.unwrap(), b"12345678");
        assert_eq!(permit.bytes(), 8);
        assert_eq!(read(Body::from("123456789"), 8, second, &mut permit).await.unwrap_err().status, 413);
        assert_eq!(read(Body::from("1".repeat(1000)), 8, second, &mut permit).await.unwrap_err().status, 413);
        // What is too long is read on for a while, so that its sender sees the answer, and not to its end.
        let sent = Arc::<AtomicUsize>::default();
        let count = sent.clone();
        let long = (0..1000).map(move |_| {
            count.fetch_add(1, Relaxed);
            Ok::<_, std::io::Error>(vec![b'1'])
        });
        let long = Body::from_stream(tokio_stream::iter(long));
        assert_eq!(read(long, 8, second, &mut permit).await.unwrap_err().status, 413);
        assert_eq!(sent.load(Relaxed), 8 * PATIENCE + 1);
    }

    #[tokio::test]
    async fn a_request_holds_what_it_was_parsed_to_and_no_bytes() {
        let state = ServerState::new(Metrics::new("0", "cpu"), None, None);
        for words in [3, 30_000] {
            let text = serde_json::json!({"prompt": "word ".repeat(words)}).to_string();
            let held = memory::parsed(text.as_bytes());
            let (_, permit) = json::<CompletionRequest>(&state, Body::from(text)).await.unwrap();
            assert_eq!(permit.bytes(), held);
        }
    }

    #[tokio::test]
    async fn a_body_must_come() {
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
