//! `GET /v1/responses/{id}/input_items`: the items that a stored response answers, page by page.

use crate::http::{ApiError, ServerState, layers::body_guard, output, request::PathId};
use axum::{
    extract::{Query, State},
    http::Uri,
    response::Response,
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};

/// Items of a page: the default, and the maximum.
const PAGE: [usize; 2] = [20, 100];

pub async fn input_items(
    State(state): State<Arc<ServerState>>,
    PathId(id): PathId,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::<BTreeMap<String, String>>::try_from_uri(&uri).unwrap_or_default().0;
    let limit =
        match query.get("limit") {
            None => PAGE[0],
            Some(text) => text.parse().ok().filter(|limit| (1..=PAGE[1]).contains(limit)).ok_or_else(|| {
                ApiError::wrong_value("limit", format!("must be a whole number from 1 to {}.", PAGE[1]))
            })?,
        };
    let mut permit = state.memory.permit();
    let items = state.responses.input_items(&id, |bytes| permit.grow(bytes))?;
    let items = items.ok_or_else(|| ApiError::no_such_response(&id, "response_id"))?;
    let mut items: Vec<Value> = items.into_iter().map(|(name, item)| listed(item, name)).collect();
    match query.get("order").map(String::as_str) {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(ApiError::not_allowed("order", other, "`asc` or `desc`")),
    }
    if let Some(after) = query.get("after") {
        let last = items.iter().position(|item| item["id"] == **after);
        let last = last.ok_or_else(|| ApiError::wrong_value("after", "is not the id of an input item."))?;
        items.drain(..=last);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let [first, last] = [items.first(), items.last()].map(|item| item.map(|item| item["id"].clone()));
    let page = json!({"object": "list", "first_id": first, "last_id": last, "has_more": has_more, "data": items});
    Ok(body_guard::hold(output::json(&page), permit))
}

/// An input item as OpenAI's API lists it: with an id, and with the content of a message as an array. `id` is the id of
/// an item that has none.
fn listed(mut item: Value, id: String) -> Value {
    let Value::Object(fields) = &mut item else { return item };
    if fields.get("id").is_none_or(Value::is_null) {
        fields.insert("id".into(), id.into());
    }
    if fields.contains_key("role") {
        fields.insert("type".into(), "message".into());
        if let Some(text) = fields.get("content").and_then(Value::as_str) {
            let content = if fields["role"] == "assistant" {
                json!([{"type": "output_text", "text": text, "annotations": []}])
            } else {
                json!([{"type": "input_text", "text": text}])
            };
            fields.insert("content".into(), content);
        }
    }
    item
}
