//! Bodies that come compressed. They are inflated as they are read, so what `body` allows of bytes and memory it allows of
//! inflated ones: a small body that becomes a large one is refused like any other.

use super::api_error::ApiError;
use axum::{
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tower_http::decompression::RequestDecompressionLayer;

/// Inflates what [`check`] lets pass.
pub fn inflate() -> RequestDecompressionLayer {
    RequestDecompressionLayer::new()
}

/// Refuses encodings other than gzip, and leaves one spelling of its name.
pub async fn check(mut request: Request, next: Next) -> Response {
    let mut given = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let encoding = match (given.next(), given.next()) {
        (None, _) => return next.run(request).await,
        (Some(one), None) => one.as_bytes().trim_ascii().to_ascii_lowercase(),
        // One around the other.
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
