//! `GET /openapi.json`: OpenAPI 3.1 document, generated from the route table and the field table.

use crate::http::{
    request::fields::{Field, Handling, METADATA_LIMITS},
    routes::{ROUTES, Route, RouteBody},
};
use axum::Json;
use serde_json::{Map, Value, json};

pub async fn openapi() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let entry = paths.entry(route.path).or_insert_with(|| json!({}));
        entry[route.method] = operation(route);
    }
    let message = json!({"type": "string"});
    let text = json!({"type": ["string", "null"]});
    let inner = json!({"type": "object", "required": ["message", "type"],
                       "properties": {"message": message, "type": message, "param": text, "code": text}});
    let openai = json!({"type": "object", "required": ["error"], "properties": {"error": inner}});
    let inner =
        json!({"type": "object", "required": ["message", "type"], "properties": {"message": message, "type": message}});
    let anthropic = json!({"type": "object", "required": ["type", "error"],
                           "properties": {"type": {"const": "error"}, "error": inner}});
    json!({
        "openapi": "3.1.0",
        "info": {"title": "Moestro", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": {"Error": openai, "AnthropicError": anthropic},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn operation(route: &Route) -> Value {
    let mut content = json!({"application/json": {"schema": {"type": "object"}}});
    let schema = match &route.body {
        RouteBody::None => Value::Null,
        RouteBody::Object => json!({"type": "object"}),
        RouteBody::Tokenize => tokenize_schema(),
        RouteBody::Detokenize => detokenize_schema(),
        RouteBody::Generation(fields, required, streams) => {
            if *streams {
                content["text/event-stream"] = json!({"schema": {"type": "string"}});
            }
            let fields = fields.iter().copied().flatten();
            let properties: Map<_, _> = fields.map(|field| (field.name.to_owned(), property(field))).collect();
            json!({"type": "object", "required": required, "properties": properties})
        }
    };
    let success = match route.body {
        RouteBody::Generation(..) => ("200", json!({"description": "The answer", "content": content})),
        _ => ("2XX", json!({"description": "The answer"})),
    };
    let mut operation = json!({"summary": route.summary});
    if !schema.is_null() {
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if route.path.contains("{id}") {
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    operation["responses"] = json!({success.0: success.1, "default": error(route.path)});
    operation
}

fn tokenize_schema() -> Value {
    let prompt = json!({"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}});
    let messages = json!({"type": "object", "required": ["messages"],
                          "properties": {"messages": {"type": "array", "minItems": 1, "items": {"type": "object"}}}});
    json!({"oneOf": [prompt, messages]})
}

fn detokenize_schema() -> Value {
    let token = json!({"type": "integer", "minimum": 0});
    json!({"type": "object", "required": ["tokens"], "properties": {"tokens": {"type": "array", "items": token}}})
}

fn error(path: &str) -> Value {
    let name = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
    let schema = json!({"$ref": format!("#/components/schemas/{name}")});
    json!({"description": "The error", "content": {"application/json": {"schema": schema}}})
}

fn property(field: &Field) -> Value {
    let description = match field.handling {
        Handling::Supported(note) | Handling::Metadata(note) => note.to_owned(),
        Handling::Ignored(why) => format!("Ignored: {why}."),
        Handling::Rejected(_, why) => format!("Not supported: {why}"),
    };
    let mut property = match (&field.handling, field.json_type) {
        (Handling::Rejected(values, _), _) => {
            let accepted = values.iter().filter_map(|json| serde_json::from_str::<Value>(json).ok());
            json!({"enum": accepted.chain([Value::Null]).collect::<Vec<_>>()})
        }
        (Handling::Metadata(_), _) => {
            let (pairs, key, text) = METADATA_LIMITS;
            json!({"type": ["object", "null"], "maxProperties": pairs, "propertyNames": {"maxLength": key},
                   "additionalProperties": {"type": "string", "maxLength": text}})
        }
        (_, Some(json_type)) => json!({"type": [json_type, "null"]}),
        (_, None) => json!({}),
    };
    if !description.is_empty() {
        property["description"] = description.into();
    }
    property
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::fields;

    #[test]
    fn every_operation_has_summary_and_error() {
        let document = document();
        let paths = document["paths"].as_object().unwrap();
        assert_eq!(paths.len(), 22);
        for (path, operations) in paths {
            for (method, operation) in operations.as_object().unwrap() {
                assert!(operation["summary"].is_string(), "{method} {path}");
                assert_eq!(operation["parameters"].is_array(), path.contains('{'), "{method} {path}");
                let error = &operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"];
                let pointer = error.as_str().unwrap().strip_prefix('#').unwrap();
                assert!(document.pointer(pointer).is_some(), "{method} {path}");
            }
        }
        let chat = &paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(chat["properties"]["temperature"], json!({"type": ["number", "null"]}));
        assert_eq!(chat["properties"]["modalities"]["enum"], json!([["text"], [], null]));
        assert_eq!(chat["properties"].as_object().unwrap().len(), fields::CHAT.iter().copied().flatten().count());
    }
}
