//! `GET /openapi.json`: what is served, in OpenAPI 3.1. Fields and what becomes of them come from the tables that the server
//! goes by.

use crate::http::request::fields::{self, Field, FieldRule, METADATA_LIMITS};
use axum::Json;
use serde_json::{Map, Value, json};

/// A path that takes a body: its fields, those that must be there, and whether the answer may be a stream.
type Posted = (&'static str, &'static str, &'static [Field], &'static [&'static str], bool);

const POSTED: [Posted; 5] = [
    ("/v1/chat/completions", "The next turn of a conversation", fields::CHAT, &["messages"], true),
    ("/v1/completions", "The text that goes on from a prompt", fields::COMPLETIONS, &["prompt"], true),
    ("/v1/responses", "The next items of a conversation", fields::RESPONSES, &["input"], true),
    ("/v1/messages", "The next message of a conversation", fields::MESSAGES, &["messages", "max_tokens"], true),
    ("/v1/messages/count_tokens", "The tokens that a message's prompt has", fields::MESSAGES, &["messages"], false),
];

/// Paths without a table: method, path, and what they do.
const OTHERS: [(&str, &str, &str); 14] = [
    ("get", "/v1/responses/{id}", "A response that is kept"),
    ("delete", "/v1/responses/{id}", "Forget a response"),
    ("get", "/", "A page for browsers: a chat and gauges"),
    ("get", "/v1/models", "The models on this machine, the loaded one first"),
    ("get", "/v1/models/{id}", "One of them, by its id"),
    ("post", "/models/unload", "Give a model's memory back until it is asked again"),
    ("post", "/tokenize", "The tokens of a prompt or of messages"),
    ("post", "/detokenize", "The text of tokens"),
    ("get", "/health", "Whether requests are answered, and how many wait"),
    ("get", "/metrics", "Counters, for Prometheus or as OpenMetrics"),
    ("get", "/experts", "Which experts are in memory"),
    ("get", "/openapi.json", "This page"),
    ("delete", "/prompt_cache", "Empty the prompt cache"),
    ("get", "/tokenizer_info", "The tokenizer's special tokens and the chat template"),
];

pub async fn openapi() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let mut paths = Map::new();
    for (path, summary, known, required, streams) in POSTED {
        let mut answers = json!({"application/json": {"schema": {"type": "object"}}});
        if streams {
            answers["text/event-stream"] = json!({"schema": {"type": "string"}});
        }
        let properties: Map<_, _> = known.iter().map(|field| (field.name.to_owned(), property(path, field))).collect();
        let schema = json!({"type": "object", "required": required, "properties": properties});
        let operation = json!({
            "summary": summary,
            "requestBody": {"required": true, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "The answer", "content": answers}, "default": error(path)},
        });
        paths.insert(path.into(), json!({"post": operation}));
    }
    for (method, path, summary) in OTHERS {
        let mut operation = json!({
            "summary": summary,
            "responses": {"2XX": {"description": "The answer"}, "default": error(path)},
        });
        if path.ends_with("{id}") {
            let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}});
            operation["parameters"] = json!([id]);
        }
        if method == "post" {
            let schema = match path {
                "/tokenize" => tokenized(),
                "/detokenize" => detokenized(),
                _ => json!({"type": "object"}),
            };
            operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation;
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

fn tokenized() -> Value {
    let prompt = json!({"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}});
    let messages = json!({"type": "object", "required": ["messages"],
                          "properties": {"messages": {"type": "array", "minItems": 1, "items": {"type": "object"}}}});
    json!({"oneOf": [prompt, messages]})
}

fn detokenized() -> Value {
    let token = json!({"type": "integer", "minimum": 0});
    json!({"type": "object", "required": ["tokens"], "properties": {"tokens": {"type": "array", "items": token}}})
}

fn error(path: &str) -> Value {
    let name = if path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
    let schema = json!({"$ref": format!("#/components/schemas/{name}")});
    json!({"description": "What is wrong, in a sentence", "content": {"application/json": {"schema": schema}}})
}

fn property(path: &str, field: &Field) -> Value {
    let description = match field.rule {
        FieldRule::Supported(how) => how.to_owned(),
        FieldRule::Ignored(why) => format!("Changes no answer: {why}."),
        FieldRule::Metadata(what) => what.to_owned(),
        FieldRule::Refused(_, why) => format!("Not supported: {why}"),
    };
    let mut property = match (&field.rule, kind(path, field.name)) {
        (FieldRule::Refused(words, _), _) => {
            let accepted = words.iter().filter_map(|word| serde_json::from_str::<Value>(word).ok());
            json!({"enum": accepted.chain([Value::Null]).collect::<Vec<_>>()})
        }
        (FieldRule::Metadata(_), _) => {
            let (pairs, key, text) = METADATA_LIMITS;
            json!({"type": ["object", "null"], "maxProperties": pairs, "propertyNames": {"maxLength": key},
                   "additionalProperties": {"type": "string", "maxLength": text}})
        }
        (_, Some(kind)) => json!({"type": [kind, "null"]}),
        (_, None) => json!({}),
    };
    if !description.is_empty() {
        property["description"] = description.into();
    }
    property
}

/// The JSON type of a field that has one.
fn kind(path: &str, name: &str) -> Option<&'static str> {
    Some(match name {
        "logprobs" if path == "/v1/completions" => "integer",
        "model" | "instructions" | "previous_response_id" | "reasoning_effort" | "suffix" => "string",
        "messages" | "tools" | "functions" | "include" | "stop_sequences" => "array",
        "stream"
        | "logprobs"
        | "parallel_tool_calls"
        | "enable_thinking"
        | "continue_final_message"
        | "add_generation_prompt"
        | "echo"
        | "return_progress" => "boolean",
        "store" if path == "/v1/responses" => "boolean",
        "max_tokens"
        | "max_completion_tokens"
        | "max_output_tokens"
        | "n"
        | "best_of"
        | "top_k"
        | "seed"
        | "top_logprobs" => "integer",
        "thinking_budget" | "max_thinking_tokens" | "thinking_token_budget" => "integer",
        "temperature" | "top_p" | "min_p" | "repetition_penalty" | "repeat_penalty" | "presence_penalty" => "number",
        "frequency_penalty" => "number",
        "response_format" | "chat_template_kwargs" | "logit_bias" | "stream_options" | "text" | "thinking" => "object",
        "reasoning" => "object",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_says_what_it_does_and_how_it_fails() {
        let document = document();
        let paths = document["paths"].as_object().unwrap();
        assert_eq!(paths.len(), 18);
        for (path, operations) in paths {
            for (method, operation) in operations.as_object().unwrap() {
                assert!(operation["summary"].is_string(), "{method} {path}");
                let error = &operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"];
                let pointer = error.as_str().unwrap().strip_prefix('#').unwrap();
                assert!(document.pointer(pointer).is_some(), "{method} {path}");
            }
        }
        let chat = &paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(chat["properties"]["temperature"], json!({"type": ["number", "null"]}));
        assert_eq!(chat["properties"]["modalities"]["enum"], json!([["text"], [], null]));
        assert_eq!(chat["properties"].as_object().unwrap().len(), fields::CHAT.len());
    }
}
