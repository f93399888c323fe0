//! Field table: every request field that clients are known to send, and whether it is supported, ignored or rejected.
//!
//! `docs/fields.md` and `/openapi.json` are generated from this table. See [`field_check`](super::field_check) for fields
//! that are not in it.

use Handling::{Ignored, Metadata, Rejected, Supported};

/// OpenAI's limits for `metadata`: number of pairs, characters of a key, characters of a value.
pub const METADATA_LIMITS: (usize, usize, usize) = (16, 64, 512);

pub struct Field {
    pub name: &'static str,
    /// JSON type of a supported field. `None` if the field accepts several types.
    pub json_type: Option<&'static str>,
    pub handling: Handling,
}

pub enum Handling {
    /// The field is supported. The text says how, if that is not obvious.
    Supported(&'static str),
    /// The field cannot change the answer, for this reason.
    Ignored(&'static str),
    /// The field has the client's own key-value pairs. The text says what happens to the pairs.
    Metadata(&'static str),
    /// The field would change the answer and is not implemented, for the reason in the second value. The first value
    /// lists the JSON values of the field that are accepted, because they have no effect.
    Rejected(&'static [&'static str], &'static str),
}

/// The fields of one endpoint, in groups that endpoints share.
pub type FieldTable = &'static [&'static [Field]];

pub static CHAT: FieldTable = &[CHAT_FIELDS, GENERATION_FIELDS];
pub static COMPLETIONS: FieldTable = &[COMPLETION_FIELDS, GENERATION_FIELDS];
pub static RESPONSES: FieldTable = &[RESPONSE_FIELDS];
pub static MESSAGES: FieldTable = &[MESSAGE_FIELDS];
pub static OLLAMA_CHAT: FieldTable = &[OLLAMA_CHAT_FIELDS, OLLAMA_FIELDS];
pub static OLLAMA_GENERATE: FieldTable = &[OLLAMA_GENERATE_FIELDS, OLLAMA_FIELDS];
pub static OLLAMA_OPTIONS: FieldTable = &[OLLAMA_OPTION_FIELDS];

const fn field(name: &'static str, json_type: Option<&'static str>, handling: Handling) -> Field {
    Field { name, json_type, handling }
}

const fn any(name: &'static str, note: &'static str) -> Field {
    field(name, None, Supported(note))
}

const fn string(name: &'static str, note: &'static str) -> Field {
    field(name, Some("string"), Supported(note))
}

const fn boolean(name: &'static str, note: &'static str) -> Field {
    field(name, Some("boolean"), Supported(note))
}

const fn integer(name: &'static str, note: &'static str) -> Field {
    field(name, Some("integer"), Supported(note))
}

const fn number(name: &'static str, note: &'static str) -> Field {
    field(name, Some("number"), Supported(note))
}

const fn array(name: &'static str, note: &'static str) -> Field {
    field(name, Some("array"), Supported(note))
}

const fn object(name: &'static str, note: &'static str) -> Field {
    field(name, Some("object"), Supported(note))
}

const fn ignored(name: &'static str, why: &'static str) -> Field {
    field(name, None, Ignored(why))
}

const fn rejected(name: &'static str, values: &'static [&'static str], why: &'static str) -> Field {
    field(name, None, Rejected(values, why))
}

const MODEL: &str = "any name, or a hub id that ends in this model's name";
const REMAINING_CONTEXT: &str = "at most the rest of the context";
const NO_BILLING: &str = "there is one user and one service tier";
const TURNS: &str = "it only orders the queue: users take turns";
const NOT_STORED: &str = "nothing is stored";
const ALWAYS_CACHED: &str = "prompts are always cached";
const NO_CACHE: &str = "`false` neither reads nor writes the prompt cache";
const CACHE_SALT: &str = "from vLLM: requests with different salts share no cached state of prompts";
const GUIDED: &str = "vLLM's older name";
const SAME_BUDGET: &str = "the same as `thinking_budget`";
const TEXT_ONLY: &str = "the model writes text only.";
const LENGTH: &str = "the model has no such setting; say in the prompt how long the answer should be.";
const SAMPLING: &str = "use temperature, top_p, top_k, min_p and the penalties.";
pub const LARK_ONLY: &str = "send the grammar in Lark, as `response_format` with {\"type\": \"lark\", \"lark\": TEXT}.";
const CHAT_ONLY: &str = "use /v1/chat/completions.";
const CHOICES: &str = "every choice is sampled once; none is selected from several.";
const NOT_MODERATED: &str = "this server has no moderation.";
const NOT_EDITED: &str = "the conversation is never edited";

/// Fields of chat completions and completions.
const GENERATION_FIELDS: &[Field] = &[
    string("model", MODEL),
    boolean("stream", ""),
    number("temperature", ""),
    number("top_p", ""),
    integer("top_k", ""),
    number("min_p", ""),
    number("repetition_penalty", ""),
    number("repeat_penalty", "the same as `repetition_penalty`"),
    number("presence_penalty", ""),
    number("frequency_penalty", ""),
    object("logit_bias", ""),
    integer("seed", ""),
    boolean(
        "return_progress",
        "a stream reports in `prompt_progress` how many prompt tokens are done, after every chunk",
    ),
    any("cache_prompt", NO_CACHE),
    string("cache_salt", CACHE_SALT),
    ignored("user", TURNS),
    field("metadata", None, Metadata("ignored: nothing is stored")),
    ignored("store", NOT_STORED),
    ignored("skip_special_tokens", "special tokens are never sent"),
    rejected("min_tokens", &["0"], LENGTH),
    rejected("ignore_eos", &["false"], "an answer ends where the model ends it."),
    rejected("stop_token_ids", &["[]"], "give strings in `stop`."),
    rejected("bad_words", &["[]"], "use `logit_bias` to exclude tokens."),
    rejected("allowed_token_ids", &["[]"], "use a grammar in `response_format`, or `logit_bias`."),
    rejected("use_beam_search", &["false"], SAMPLING),
    rejected("truncate_prompt_tokens", &[], "a prompt that is too long is refused, never truncated."),
];

const CHAT_FIELDS: &[Field] = &[
    array(
        "messages",
        "text, images, tool calls and results, `reasoning_content`, `refusal`; roles system, developer, user, assistant, tool; \
         `name` is ignored: templates have no names",
    ),
    object("stream_options", "`include_usage`; `include_obfuscation` is ignored"),
    integer("max_completion_tokens", REMAINING_CONTEXT),
    integer("max_tokens", REMAINING_CONTEXT),
    integer("n", "at the same time, up to `--parallel` of them; choice i is sampled with seed + i"),
    any("stop", "up to 16 strings; they end the content, not the reasoning"),
    boolean("logprobs", ""),
    integer("top_logprobs", "up to 20"),
    array("tools", "functions"),
    any("tool_choice", ""),
    boolean("parallel_tool_calls", ""),
    array("functions", "the older name of `tools`; the answer then has `function_call`"),
    any("function_call", "the older name of `tool_choice`"),
    object("response_format", ""),
    any("structured_outputs", "vLLM's name for `response_format`"),
    any("guided_json", GUIDED),
    any("guided_regex", GUIDED),
    any("guided_choice", GUIDED),
    rejected("guided_grammar", &[], LARK_ONLY),
    any("regex", "SGLang's name"),
    rejected("ebnf", &[], LARK_ONLY),
    any("json_schema", "llama-server's name"),
    rejected("grammar", &[], LARK_ONLY),
    string("reasoning_effort", "`none` turns reasoning off, other values set a budget"),
    object("reasoning", "`effort`, `max_tokens`, `enabled`"),
    object("thinking", "`type`, `budget_tokens`"),
    integer("thinking_budget", "tokens; reasoning ends when they are used"),
    integer("max_thinking_tokens", SAME_BUDGET),
    integer("thinking_token_budget", SAME_BUDGET),
    boolean("enable_thinking", ""),
    object("chat_template_kwargs", ""),
    boolean(
        "continue_final_message",
        "continues the content or the reasoning of the last message, which must be the assistant's",
    ),
    boolean("add_generation_prompt", "`false` has the same meaning as `continue_final_message`"),
    ignored("safety_identifier", NO_BILLING),
    ignored("service_tier", NO_BILLING),
    ignored("priority", "clients take turns, and one client's requests are answered in order of arrival"),
    ignored("prediction", "it is a hint for speed"),
    ignored("prompt_cache_key", ALWAYS_CACHED),
    ignored("prompt_cache_retention", ALWAYS_CACHED),
    ignored("prompt_cache_options", ALWAYS_CACHED),
    rejected("modalities", &["[\"text\"]", "[]"], TEXT_ONLY),
    rejected("audio", &[], TEXT_ONLY),
    rejected("moderation", &[], NOT_MODERATED),
    rejected("web_search_options", &[], "this server does not search the web."),
    ignored("verbosity", "it is a hint for the length"),
    rejected("include_stop_str_in_output", &["false"], "the content ends before the stop string."),
    rejected("best_of", &["1"], CHOICES),
    rejected("length_penalty", &["1"], SAMPLING),
    rejected("typical_p", &["1"], SAMPLING),
    rejected("mirostat", &["0"], SAMPLING),
    rejected("dry_multiplier", &["0"], SAMPLING),
    rejected("xtc_probability", &["0"], SAMPLING),
    rejected("chat_template", &[], "the model's own template renders the conversation."),
    rejected("documents", &["[]"], "put them into a message."),
    rejected("echo", &["false"], "use /v1/completions."),
    rejected("prompt_logprobs", &["0", "false"], "use /v1/completions with `echo` and `logprobs`."),
];

const COMPLETION_FIELDS: &[Field] = &[
    any("prompt", "a string or token ids, or an array of both"),
    object("stream_options", "`include_usage`"),
    integer("max_tokens", "16 by default"),
    integer("n", "the choices for a prompt are adjacent; choice i is sampled with seed + i"),
    integer("best_of", "only the same value as `n`, because every choice is sampled once"),
    any("stop", "up to 16 strings"),
    boolean("echo", ""),
    integer("logprobs", "up to 20; with `echo` also for the prompt"),
    string("suffix", "only an empty string"),
    rejected("response_format", &["{\"type\": \"text\"}"], CHAT_ONLY),
    rejected("structured_outputs", &[], CHAT_ONLY),
    rejected("guided_json", &[], CHAT_ONLY),
    rejected("guided_regex", &[], CHAT_ONLY),
    rejected("guided_choice", &[], CHAT_ONLY),
    rejected("guided_grammar", &[], CHAT_ONLY),
    rejected("regex", &[], CHAT_ONLY),
    rejected("ebnf", &[], CHAT_ONLY),
    rejected("json_schema", &[], CHAT_ONLY),
    rejected("grammar", &[], CHAT_ONLY),
    rejected("prompt_logprobs", &["0", "false"], "use `echo` and `logprobs`."),
];

const RESPONSE_FIELDS: &[Field] = &[
    string("model", MODEL),
    any("input", "a string, or items: messages, reasoning, function calls and their outputs, references"),
    string("instructions", ""),
    string("previous_response_id", "one of the last 1,000 responses, or of 64 MiB of them"),
    boolean("store", "in memory only"),
    boolean("stream", ""),
    integer("max_output_tokens", REMAINING_CONTEXT),
    integer("top_logprobs", "up to 20, with `include`"),
    number("temperature", ""),
    number("top_p", ""),
    array(
        "tools",
        "functions, also in namespaces and in items, and a `tool_search` that the client runs; other types, and \
         `output_schema`, `allowed_callers` and `async` of functions, are ignored",
    ),
    any("tool_choice", ""),
    boolean("parallel_tool_calls", ""),
    object("text", "`format`; `verbosity` is a hint and has no effect"),
    object("reasoning", "`effort`; with `summary` the reasoning is sent as its own summary"),
    array("include", "`message.output_text.logprobs`; `reasoning.encrypted_content` as plain text"),
    boolean("return_progress", "a stream reports the progress of the prompt in `response.prompt_progress` events"),
    any("cache_prompt", NO_CACHE),
    string("cache_salt", CACHE_SALT),
    field("metadata", None, Metadata("supported: sent back")),
    ignored("user", TURNS),
    ignored("safety_identifier", NO_BILLING),
    ignored("service_tier", NO_BILLING),
    ignored("stream_options", "streams are not obfuscated"),
    ignored("max_tool_calls", "it limits calls that OpenAI's servers make"),
    ignored("prompt_cache_key", ALWAYS_CACHED),
    ignored("prompt_cache_retention", ALWAYS_CACHED),
    ignored("prompt_cache_options", ALWAYS_CACHED),
    ignored("client_metadata", NOT_STORED),
    ignored("access_programs", NO_BILLING),
    ignored("background_options", "responses are never in the background"),
    ignored("context_management", NOT_EDITED),
    ignored("image", "it controls how OpenAI's servers compress images"),
    rejected("background", &["false"], "use `stream` and keep the connection open."),
    rejected("moderation", &[], NOT_MODERATED),
    rejected("conversation", &[], "use `previous_response_id`."),
    rejected("prompt", &[], "this server has no prompt templates."),
    ignored("truncation", "a prompt that is too long is refused, never truncated"),
];

const MESSAGE_FIELDS: &[Field] = &[
    string("model", MODEL),
    array(
        "messages",
        "text, thinking, tool_use, tool_result, plain text documents; the answer continues a last message of the assistant; \
         `citations` and `is_error` are ignored: an answer has no citations, and the content of a result says what failed",
    ),
    integer("max_tokens", REMAINING_CONTEXT),
    any("system", "a first block with a billing header is removed"),
    boolean("stream", ""),
    array("stop_sequences", "up to 16"),
    number("temperature", ""),
    number("top_p", ""),
    integer("top_k", ""),
    array(
        "tools",
        "tools with an `input_schema`, and `bash`, `text_editor`, `memory` and `computer` with a date; `input_examples` are \
         examples in the schema; `allowed_callers` and `eager_input_streaming` are ignored",
    ),
    any("tool_choice", "including `disable_parallel_tool_use`"),
    object("thinking", "`type`, `budget_tokens`, `display`; off by default"),
    any("output_config", "`format`, `effort`"),
    any("output_format", "the older name of `output_config.format`"),
    boolean("return_progress", "a stream reports the progress of the prompt in `prompt_progress` of `ping` events"),
    any("cache_prompt", NO_CACHE),
    string("cache_salt", CACHE_SALT),
    ignored("metadata", "`user_id` only orders the queue: users take turns"),
    ignored("service_tier", NO_BILLING),
    ignored("inference_geo", "the answer is computed here"),
    ignored("speed", "there is one speed"),
    ignored("cache_control", ALWAYS_CACHED),
    ignored("context_management", NOT_EDITED),
    ignored("billing_policy", NO_BILLING),
    ignored("fallback_credit_token", NO_BILLING),
    ignored("fallbacks", "no request is declined"),
    ignored("diagnostics", "`usage` has the number of cached tokens"),
    rejected("compaction", &[], "use /v1/responses/compact."),
    rejected("thread", &[], "conversations are not stored; send all messages."),
    rejected("container", &[], "this server runs no code."),
    rejected("mcp_servers", &["[]"], "connect to them in the client."),
];

/// Fields of both `/api/chat` and `/api/generate` of Ollama's API.
const OLLAMA_FIELDS: &[Field] = &[
    string("model", "with or without `:latest`"),
    boolean("stream", "true by default"),
    any("format", "`json`, or a JSON schema"),
    object("options", "see below"),
    any("think", "a boolean, or an effort as in `reasoning_effort`"),
    any("keep_alive", "0 unloads the model after the answer; otherwise `--keep-alive` of the server decides"),
    rejected("logprobs", &["false"], "use /v1/chat/completions."),
    rejected("top_logprobs", &["0"], "use /v1/chat/completions."),
    rejected("cache_salt", &[], "use /v1/chat/completions."),
];

const OLLAMA_CHAT_FIELDS: &[Field] =
    &[array("messages", "`content`, `images`, `thinking`, `tool_calls`"), array("tools", "functions")];

const OLLAMA_GENERATE_FIELDS: &[Field] = &[
    string("prompt", "without it, the model is only loaded"),
    string("system", ""),
    array("images", "in base64"),
    boolean("raw", "true: without the chat template"),
    rejected("suffix", &["\"\""], "the model does not fill gaps."),
    rejected("template", &["\"\""], "the model's own template renders the prompt."),
    rejected("context", &["[]"], "use /api/chat with all messages."),
];

const OLLAMA_OPTION_FIELDS: &[Field] = &[
    number("temperature", ""),
    number("top_p", ""),
    integer("top_k", ""),
    number("min_p", ""),
    number("repeat_penalty", ""),
    number("presence_penalty", ""),
    number("frequency_penalty", ""),
    integer("seed", ""),
    integer("num_predict", "a negative number means no limit"),
    any("stop", "up to 16 strings"),
    ignored("num_ctx", "the context is set by `--ctx-size`"),
    ignored("num_keep", "a prompt is never truncated"),
    ignored("num_batch", "it does not change answers"),
    ignored("num_gpu", "it does not change answers"),
    ignored("main_gpu", "it does not change answers"),
    ignored("low_vram", "it does not change answers"),
    ignored("use_mmap", "it does not change answers"),
    ignored("use_mlock", "it does not change answers"),
    ignored("numa", "it does not change answers"),
    ignored("num_thread", "it does not change answers"),
    ignored("repeat_last_n", "penalties cover the whole answer and prompt"),
    ignored("penalize_newline", "line feeds are tokens like any other"),
    rejected("typical_p", &["1"], SAMPLING),
    rejected("tfs_z", &["1"], SAMPLING),
    rejected("mirostat", &["0"], SAMPLING),
    ignored("mirostat_tau", "mirostat is off"),
    ignored("mirostat_eta", "mirostat is off"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    const HEAD: &str = "\
# Fields of requests

This page lists every field that clients are known to send, and what the server does with it.

* A field that is `null` counts as absent.
* A rejected field is a 400 with the reason. A value that changes nothing, such as an empty list, is accepted.
* A field that is in none of these tables is ignored and logged, with two exceptions. A name that is one or two letters
  away from a field that changes the answer (`max_tokes`) is a 400. So is such a field of another API (`response_format`
  in Responses) or of another server (`num_predict`). The message names the right field.

A test generates this page from the table in `src/http/request/fields.rs`, which the server itself uses.
";

    /// `MOESTRO_WRITE_DOCS=1 cargo test` writes `docs/fields.md`.
    #[test]
    fn docs_page_matches_table() {
        let mut page = HEAD.to_owned();
        for (path, known) in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETIONS),
            ("/v1/responses", RESPONSES),
            ("/v1/messages", MESSAGES),
            ("/api/chat", OLLAMA_CHAT),
            ("/api/generate", OLLAMA_GENERATE),
            ("options", OLLAMA_OPTIONS),
        ] {
            let path =
                if path == "options" { "`options` of Ollama's API".to_owned() } else { format!("`POST {path}`") };
            write!(page, "\n## {path}\n\n| field | |\n|---|---|\n").unwrap();
            for Field { name, handling, .. } in known.iter().copied().flatten() {
                let text = match handling {
                    Supported("") => "supported".to_owned(),
                    Supported(note) => format!("supported: {note}"),
                    Ignored(why) => format!("ignored: {why}"),
                    Metadata(note) => {
                        let (pairs, key, text) = METADATA_LIMITS;
                        format!("{note}; at most {pairs} pairs, keys of {key} characters and strings of {text}")
                    }
                    Rejected([], why) => format!("**rejected**: {why}"),
                    Rejected(values, why) => {
                        let values: Vec<_> = values.iter().map(|json| format!("`{json}`")).collect();
                        format!("**rejected** unless {}: {why}", values.join(" or "))
                    }
                };
                writeln!(page, "| `{name}` | {text} |").unwrap();
            }
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fields.md");
        if std::env::var_os("MOESTRO_WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), page, "docs/fields.md is out of date");
    }
}
