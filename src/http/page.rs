//! `GET /`: the page, a chat and gauges in one HTML document. The compiler joins it from the files in `page/`.
//!
//! The page's content security policy allows requests to this server only. The policy names the hashes of the script
//! and the style in the document, so that no other script or style is used.

use axum::{
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

/// The scripts share one scope. Each uses only names that it or a script before it declares.
const PAGE: &str = concat!(
    include_str!("page/head.html"),
    "<style>\n",
    include_str!("page/style.css"),
    "</style>\n</head>\n<body>\n",
    include_str!("page/body.html"),
    "<script>\n\"use strict\";\n",
    include_str!("page/elements.js"),
    include_str!("page/feedback.js"),
    include_str!("page/panels.js"),
    include_str!("page/settings.js"),
    include_str!("page/requests.js"),
    include_str!("page/lines.js"),
    include_str!("page/gauges.js"),
    include_str!("page/messages.js"),
    include_str!("page/database.js"),
    include_str!("page/conversation.js"),
    include_str!("page/conversations.js"),
    include_str!("page/transfer.js"),
    include_str!("page/list.js"),
    include_str!("page/models.js"),
    include_str!("page/answers.js"),
    include_str!("page/tex_symbols.js"),
    include_str!("page/tex.js"),
    include_str!("page/markdown_blocks.js"),
    include_str!("page/markdown_inline.js"),
    include_str!("page/code_view.js"),
    include_str!("page/markdown_view.js"),
    include_str!("page/turns.js"),
    include_str!("page/attachments.js"),
    include_str!("page/composer.js"),
    include_str!("page/shortcuts.js"),
    include_str!("page/start.js"),
    "</script>\n</body>\n</html>\n",
);

static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; form-action \
         'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    )
});

pub async fn page() -> Response {
    let policy = HeaderValue::from_str(&POLICY).unwrap_or(HeaderValue::from_static("default-src 'none'"));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, PAGE).into_response()
}

/// Hash of an element of the page, as a content security policy writes it.
fn hash(element: &str) -> String {
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text(element))))
}

/// Text inside the only element of this name.
fn text(element: &str) -> &'static str {
    let inside = PAGE.split_once(&format!("<{element}>")).map_or("", |(_, rest)| rest);
    inside.split_once(&format!("</{element}>")).map_or("", |(text, _)| text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo;

    #[test]
    fn page_and_program_name_same_first_model() {
        let first = demo::ABOUT.rsplit(' ').next().unwrap();
        assert!(first.contains('/') && PAGE.contains(&format!("\"{first}\"")), "{first}");
        assert!(PAGE.contains(&format!("\"{}\"", demo::NAME)));
    }

    #[test]
    fn page_loads_nothing_from_elsewhere() {
        for element in ["script", "style"] {
            assert!(text(element).len() > 1000);
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "the policy has one hash for each");
        }
        for outside in ["http://", "https://", "//cdn", "@import", "url(", " src=", "innerHTML", " style=", " onclick="]
        {
            assert!(!PAGE.contains(outside), "{outside}");
        }
        assert!(hash("script").len() == 53 && hash("script") != hash("style"));
    }
}
