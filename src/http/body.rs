//! A request's body: bounded, then JSON with errors that name the field.

use super::{reject::Reject, types::Common};
use axum::body::{Body, Bytes};
use serde::de::DeserializeOwned;
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
    let bytes = read(body, limit).await?;
    Ok((parse(&bytes)?, parse(&bytes)?))
}

/// Reads `bytes` as JSON, whatever the content type says: `curl -d` names another one.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Reject> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let wrong = error.inner();
        let named = wrong.is_data() && path != ".";
        match named {
            true => Reject::json(Some(path.clone()), format!("{path}: {wrong}")),
            false if wrong.is_data() => Reject::json(missing(wrong), wrong.to_string()),
            false => Reject::json(None, format!("The body is not valid JSON: {wrong}")),
        }
    })?;
    json.end().map_err(|error| Reject::json(None, format!("The body is not valid JSON: {error}")))?;
    Ok(value)
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
    use serde_json::Value;

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
