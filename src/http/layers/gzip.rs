//! Compressed request bodies: gzip is decompressed while it is read, other encodings get 415.
//!
//! Limits on size and memory apply to the decompressed bytes, so a small body that expands to a large one is refused.

use crate::http::errors::ApiError;
use axum::{
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tower_http::decompression::RequestDecompressionLayer;

/// Decompresses the bodies that [`check_encoding`] accepts.
pub fn decompress() -> RequestDecompressionLayer {
    RequestDecompressionLayer::new()
}

/// Accepts gzip only, and normalises how its name is written.
pub async fn check_encoding(mut request: Request, next: Next) -> Response {
    let mut given = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let encoding = match (given.next(), given.next()) {
        (None, _) => return next.run(request).await,
        (Some(one), None) => one.as_bytes().trim_ascii().to_ascii_lowercase(),
        // Several encodings, one inside the other.
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
