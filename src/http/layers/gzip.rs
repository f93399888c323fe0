//! Compressed request bodies: a gzip body is decompressed while it is read, and any other encoding gets 415.
//!
//! Limits on size and memory apply to the decompressed bytes, so a small body that expands to a large body is refused.

use crate::http::ApiError;
use axum::{
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

/// Refuses every encoding except gzip, and normalises the name of the encoding in the header. The next layer
/// decompresses the body.
pub async fn check_encoding(mut request: Request, next: Next) -> Response {
    let mut given = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let encoding = match (given.next(), given.next()) {
        (None, _) => return next.run(request).await,
        (Some(one), None) => one.as_bytes().trim_ascii().to_ascii_lowercase(),
        // The body was encoded several times.
        (Some(_), Some(_)) => return ApiError::unknown_encoding().into_response(),
    };
    match &*encoding {
        b"gzip" | b"x-gzip" => {
            request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        b"" | b"identity" => {
            request.headers_mut().remove(header::CONTENT_ENCODING);
        }
        _ => return ApiError::unknown_encoding().into_response(),
    }
    next.run(request).await
}
