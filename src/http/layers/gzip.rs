//! Compressed request bodies: a gzip body is decompressed while it is read, and any other encoding gets 415.
//!
//! Limits on size and memory apply to the decompressed bytes, so a small body that expands to a large body is refused. The
//! compressed bytes have a limit, too, because members may be empty.

use crate::http::{ApiError, ServerState};
use async_compression::tokio::bufread::GzipDecoder;
use axum::{
    body::Body,
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{io, sync::Arc};
use tokio_stream::StreamExt;
use tokio_util::io::{ReaderStream, StreamReader};

/// Size of the decompressed chunks.
const CHUNK: usize = 32 << 10;

/// Layer that decompresses gzip bodies and refuses every other encoding.
pub async fn decompress(State(state): State<Arc<ServerState>>, mut request: Request, next: Next) -> Response {
    let mut given = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let encoding = match (given.next(), given.next()) {
        (None, _) => return next.run(request).await,
        (Some(one), None) => one.as_bytes().trim_ascii().to_ascii_lowercase(),
        // The body was encoded several times.
        (Some(_), Some(_)) => return ApiError::unknown_encoding().into_response(),
    };
    match &*encoding {
        b"gzip" | b"x-gzip" => {
            request.headers_mut().remove(header::CONTENT_LENGTH);
            request = request.map(|body| decompressed(body, state.body_limit));
        }
        b"" | b"identity" => {}
        _ => return ApiError::unknown_encoding().into_response(),
    }
    request.headers_mut().remove(header::CONTENT_ENCODING);
    next.run(request).await
}

/// Decompresses all gzip members of a body that has at most `limit` bytes. Bytes after the last member are an error.
fn decompressed(body: Body, limit: usize) -> Body {
    let mut left = limit;
    let chunks = body.into_data_stream().map(move |chunk| {
        let chunk = chunk.map_err(io::Error::other)?;
        left = left.checked_sub(chunk.len()).ok_or_else(|| io::Error::other("too many compressed bytes"))?;
        Ok::<_, io::Error>(chunk)
    });
    let mut decoder = GzipDecoder::new(StreamReader::new(chunks));
    decoder.multiple_members(true);
    Body::from_stream(ReaderStream::with_capacity(decoder, CHUNK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body;
    use flate2::{Compression, write::GzEncoder};
    use std::{fmt::Write as _, io::Write};
    use test_support::{random_cases::seeds, split_mix64};

    fn below(random: &mut u64, count: usize) -> usize {
        (split_mix64::next(random) % count as u64) as usize
    }

    fn member(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    /// Decompresses `bytes`, which arrive in random chunks.
    async fn text(random: &mut u64, mut bytes: &[u8]) -> Option<String> {
        let mut chunks = Vec::new();
        let largest = [1, 7, 40, 1000][below(random, 4)];
        while !bytes.is_empty() {
            let (chunk, rest) = bytes.split_at(bytes.len().min(1 + below(random, largest)));
            chunks.push(io::Result::Ok(chunk.to_vec()));
            bytes = rest;
        }
        let body = decompressed(Body::from_stream(tokio_stream::iter(chunks)), usize::MAX);
        let bytes = body::to_bytes(body, usize::MAX).await.ok()?;
        Some(String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn all_members_are_read() {
        for seed in seeds(300) {
            let random = &mut seed.clone();
            let (mut whole, mut compressed) = (String::new(), Vec::new());
            for _ in 0..1 + below(random, 4) {
                let mut part = String::new();
                for _ in 0..below(random, 3) * below(random, 2000) {
                    write!(part, "{} ", below(random, 1000)).unwrap();
                }
                compressed.extend(member(&part));
                whole += &part;
            }
            assert_eq!(text(random, &compressed).await.as_ref(), Some(&whole), "seed {seed}");
            // Neither a part of the last member nor more bytes are accepted.
            let cut = compressed.len() - 1 - below(random, 19);
            assert_eq!(text(random, &compressed[..cut]).await, None, "seed {seed}: {cut} of {}", compressed.len());
            let first = [0, 0x1f, b' ', b'{'][below(random, 4)];
            compressed
                .extend((0..1 + below(random, 30)).map(|n| if n == 0 { first } else { below(random, 256) as u8 }));
            assert_eq!(text(random, &compressed).await, None, "seed {seed}: {first} follows");
        }
    }

    #[tokio::test]
    async fn endless_empty_members_are_refused() {
        let empty = tokio_stream::iter(std::iter::repeat_with(|| io::Result::Ok(member(""))));
        assert!(body::to_bytes(decompressed(Body::from_stream(empty), 10_000), usize::MAX).await.is_err());
    }
}
