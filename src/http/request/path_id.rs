//! The id in a request's path.

use crate::http::ApiError;
use axum::{
    extract::{FromRequestParts, Path},
    http::request::Parts,
};

/// The id in the path, decoded. A path whose id is not UTF-8 is answered with 404.
pub struct PathId(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id = Path::<String>::from_request_parts(parts, state).await;
        id.map(|Path(id)| Self(id)).map_err(|_| ApiError::no_such_path(parts.method.as_str(), parts.uri.path(), ""))
    }
}
