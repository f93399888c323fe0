//! A request's body: bounded, then JSON with errors that name the field.

use super::{reject::Reject, types::Common};
use axum::body::{Body, Bytes};
use serde::de::{DeserializeOwned, Deserializer};
use serde_json::Value;
use tokio_stream::StreamExt;

/// A body beyond the limit is still read, up to this many times the limit, and thrown away: closing the connection on a
/// client that is still sending would take the answer from it.
const PATIENCE: usize = 4;

/// Reads a body of at most `limit` bytes.
pub async fn read(body: Body, limit: usize) -> Result<Bytes, Reject> {
    let mut chunks = body.into_data_stream();
    let (mut kept, mut seen) = (Vec::new(), 0usize);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| Reject::json(None, format!("The body could not be read: {error}")))?;
        seen = seen.saturating_add(chunk.len());
        if seen <= limit {
            kept.extend_from_slice(&chunk);
        } else if seen > limit.saturating_mul(PATIENCE) {
            break;
        } else {
            kept = Vec::new();
        }
    }
    if seen > limit { Err(Reject::too_large(limit)) } else { Ok(kept.into()) }
}

/// What is asked for: the fields that all kinds of generation share, and those of one kind.
pub async fn request<T: DeserializeOwned>(body: Body, limit: usize) -> Result<(Common, T), Reject> {
    let object = object(&read(body, limit).await?)?;
    Ok((typed(&object)?, typed(object)?))
}

/// Reads `bytes` as `T`, whatever the content type says: `curl -d` names another one.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Reject> {
    typed(object(bytes)?)
}

/// Reads `bytes` as a JSON object.
pub fn object(bytes: &[u8]) -> Result<Value, Reject> {
    let value = serde_json::from_slice(bytes);
    let value = value.map_err(|error| Reject::json(None, format!("The body is not valid JSON: {error}")))?;
    let what = match value {
        Value::Object(_) => return Ok(value),
        Value::Array(_) => "an array",
        Value::String(_) => "a string",
        Value::Number(_) => "a number",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
    };
    Err(Reject::json(None, format!("The body must be a JSON object; it is {what}.")))
}

/// Reads a JSON value as `T`; an error names the field.
pub fn typed<'de, T: DeserializeOwned>(json: impl Deserializer<'de, Error = serde_json::Error>) -> Result<T, Reject> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = error.path().to_string();
        let wrong = error.inner();
        match path == "." {
            true => Reject::json(missing(wrong), wrong.to_string()),
            false => Reject::json(Some(path.clone()), format!("{path}: {wrong}")),
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
    use super::super::types::{ChatRequest, Common, CompletionRequest};
    use super::*;

    fn error<T: DeserializeOwned>(text: &str) -> Value {
        let reject = parse::<T>(text.as_bytes()).err().expect("an error");
        serde_json::to_value(reject.body()).unwrap()["error"].clone()
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
        assert_eq!(read(Body::from("12345678"), 8).await.unwrap(), "12345678");
        assert_eq!(read(Body::from("123456789"), 8).await.unwrap_err().status, 413);
        assert_eq!(read(Body::from("1".repeat(1000)), 8).await.unwrap_err().status, 413);
    }
}
