//! The fields of each kind of request.

use crate::http::request::fields::{
    Does::{Accepted, Notes, Obeyed, Refused},
    Field,
};

const fn field(name: &'static str, does: super::Does) -> Field {
    Field { name, does }
}

const MODEL: &str = "any word, or a hub id that ends in this model's name";
const NEVER_CUT: &str = "a prompt that is too long is refused, never cut.";
const CACHE_PROMPT: &str = "`false` neither uses the prompt cache nor leaves anything in it";
const NEVER_TOLD: &str = "special tokens are never told";
const WHAT_IS_LEFT: &str = "at most what the context leaves";
const OLDER: &str = "vLLM's, older";
const MODEL_ENDS: &str = "an answer ends where the model ends it.";
const IN_STOP: &str = "give strings in `stop`.";
const BY_BIAS: &str = "`logit_bias` makes tokens impossible.";
const REPETITION: &str = "another name of `repetition_penalty`";
const SAME_BUDGET: &str = "another name of it";
const STOPS: &str = "up to 16";
const NOT_KEPT: &str = "nothing is kept";
const NOBODY_BILLED: &str = "there is one user and one tier";
const CACHED_ANYWAY: &str = "prompts are reused whenever they can be";
const TEXT_ONLY: &str = "the model writes text only.";
const OTHER_SAMPLING: &str = "temperature, top_p, top_k, min_p and the penalties are the ways to sample here.";
const NO_CHOICE_OF_LENGTH: &str = "the model has no such setting; say in the prompt how long to answer.";
const PROGRESS: &str = "a stream says after every chunk of the prompt how far it is, in `prompt_progress`";
const IN_CHAT: &str = "/v1/chat/completions has it.";
const ONE_BY_ONE: &str = "a grammar in `response_format` says what may be written; `logit_bias` favours tokens.";
const BY_TEMPLATE: &str = "the model's own template renders the conversation.";

pub const CHAT: &[Field] = &[
    field("model", Obeyed(MODEL)),
    field(
        "messages",
        Obeyed("text, tool calls and results, `reasoning_content`; roles system, developer, user, assistant, tool"),
    ),
    field("stream", Obeyed("")),
    field("stream_options", Obeyed("`include_usage`; `include_obfuscation` changes nothing")),
    field("max_completion_tokens", Obeyed(WHAT_IS_LEFT)),
    field("max_tokens", Obeyed(WHAT_IS_LEFT)),
    field("n", Obeyed("one after the other, choice i drawn with seed + i")),
    field("stop", Obeyed("up to 16, in the content and not in the reasoning")),
    field("temperature", Obeyed("")),
    field("top_p", Obeyed("")),
    field("top_k", Obeyed("")),
    field("min_p", Obeyed("")),
    field("repetition_penalty", Obeyed("")),
    field("repeat_penalty", Obeyed(REPETITION)),
    field("presence_penalty", Obeyed("")),
    field("frequency_penalty", Obeyed("")),
    field("logit_bias", Obeyed("")),
    field("seed", Obeyed("")),
    field("logprobs", Obeyed("")),
    field("top_logprobs", Obeyed("up to 20")),
    field("tools", Obeyed("functions")),
    field("tool_choice", Obeyed("")),
    field("parallel_tool_calls", Obeyed("")),
    field("functions", Obeyed("the older name of `tools`; the answer then has `function_call`")),
    field("function_call", Obeyed("the older name of `tool_choice`")),
    field("response_format", Obeyed("")),
    field("structured_outputs", Obeyed("vLLM's `response_format`")),
    field("guided_json", Obeyed(OLDER)),
    field("guided_regex", Obeyed(OLDER)),
    field("guided_choice", Obeyed(OLDER)),
    field("guided_grammar", Obeyed(OLDER)),
    field("json_schema", Obeyed("llama-server's")),
    field("grammar", Obeyed("llama-server's")),
    field("reasoning_effort", Obeyed("`none` is off, the others are a budget")),
    field("reasoning", Obeyed("`effort`, `max_tokens`, `enabled`")),
    field("thinking", Obeyed("`type`, `budget_tokens`")),
    field("thinking_budget", Obeyed("tokens; at its end the reasoning is closed")),
    field("max_thinking_tokens", Obeyed(SAME_BUDGET)),
    field("thinking_token_budget", Obeyed(SAME_BUDGET)),
    field("enable_thinking", Obeyed("")),
    field("chat_template_kwargs", Obeyed("")),
    field("user", Accepted(NOBODY_BILLED)),
    field("safety_identifier", Accepted(NOBODY_BILLED)),
    field("service_tier", Accepted(NOBODY_BILLED)),
    field("priority", Accepted("requests are answered in the order of their arrival")),
    field("metadata", Notes("accepted: nothing is kept")),
    field("store", Accepted(NOT_KEPT)),
    field("prediction", Accepted("a hint for speed")),
    field("prompt_cache_key", Accepted(CACHED_ANYWAY)),
    field("prompt_cache_retention", Accepted(CACHED_ANYWAY)),
    field("prompt_cache_options", Accepted(CACHED_ANYWAY)),
    field("return_progress", Obeyed(PROGRESS)),
    field("cache_prompt", Obeyed(CACHE_PROMPT)),
    field("skip_special_tokens", Accepted(NEVER_TOLD)),
    field(
        "continue_final_message",
        Obeyed("the answer goes on from the last message, the assistant's, in its content or reasoning"),
    ),
    field("add_generation_prompt", Obeyed("`false` means the same")),
    field("modalities", Refused(&["[\"text\"]", "[]"], TEXT_ONLY)),
    field("audio", Refused(&[], TEXT_ONLY)),
    field("web_search_options", Refused(&[], "this server does not search the web.")),
    field("verbosity", Refused(&["\"medium\""], NO_CHOICE_OF_LENGTH)),
    field("min_tokens", Refused(&["0"], NO_CHOICE_OF_LENGTH)),
    field("ignore_eos", Refused(&["false"], MODEL_ENDS)),
    field("stop_token_ids", Refused(&["[]"], IN_STOP)),
    field("bad_words", Refused(&["[]"], BY_BIAS)),
    field("allowed_token_ids", Refused(&["[]"], ONE_BY_ONE)),
    field("include_stop_str_in_output", Refused(&["false"], "the content ends before the stop string.")),
    field("best_of", Refused(&["1"], "each choice is one that was drawn.")),
    field("use_beam_search", Refused(&["false"], OTHER_SAMPLING)),
    field("length_penalty", Refused(&["1"], OTHER_SAMPLING)),
    field("typical_p", Refused(&["1"], OTHER_SAMPLING)),
    field("mirostat", Refused(&["0"], OTHER_SAMPLING)),
    field("dry_multiplier", Refused(&["0"], OTHER_SAMPLING)),
    field("xtc_probability", Refused(&["0"], OTHER_SAMPLING)),
    field("chat_template", Refused(&[], BY_TEMPLATE)),
    field("documents", Refused(&["[]"], "put them into a message.")),
    field("echo", Refused(&["false"], "/v1/completions has it.")),
    field("prompt_logprobs", Refused(&["0", "false"], "/v1/completions has them, with `echo` and `logprobs`.")),
    field("truncate_prompt_tokens", Refused(&[], NEVER_CUT)),
];

pub const COMPLETIONS: &[Field] = &[
    field("model", Obeyed(MODEL)),
    field("prompt", Obeyed("a string, token ids, or several of either")),
    field("stream", Obeyed("")),
    field("stream_options", Obeyed("`include_usage`")),
    field("max_tokens", Obeyed("16 unless said")),
    field("n", Obeyed("the choices to a prompt follow each other, choice i drawn with seed + i")),
    field("best_of", Obeyed("the same as `n` only: each choice is one that was drawn")),
    field("stop", Obeyed(STOPS)),
    field("temperature", Obeyed("")),
    field("top_p", Obeyed("")),
    field("top_k", Obeyed("")),
    field("min_p", Obeyed("")),
    field("repetition_penalty", Obeyed("")),
    field("repeat_penalty", Obeyed(REPETITION)),
    field("presence_penalty", Obeyed("")),
    field("frequency_penalty", Obeyed("")),
    field("logit_bias", Obeyed("")),
    field("seed", Obeyed("")),
    field("echo", Obeyed("")),
    field("logprobs", Obeyed("up to 20; with `echo` the prompt's, too")),
    field("suffix", Obeyed("an empty one only")),
    field("user", Accepted(NOBODY_BILLED)),
    field("metadata", Notes("accepted: nothing is kept")),
    field("store", Accepted(NOT_KEPT)),
    field("return_progress", Obeyed(PROGRESS)),
    field("cache_prompt", Obeyed(CACHE_PROMPT)),
    field("skip_special_tokens", Accepted(NEVER_TOLD)),
    field("min_tokens", Refused(&["0"], NO_CHOICE_OF_LENGTH)),
    field("ignore_eos", Refused(&["false"], MODEL_ENDS)),
    field("stop_token_ids", Refused(&["[]"], IN_STOP)),
    field("bad_words", Refused(&["[]"], BY_BIAS)),
    field("allowed_token_ids", Refused(&["[]"], ONE_BY_ONE)),
    field("response_format", Refused(&["{\"type\": \"text\"}"], IN_CHAT)),
    field("structured_outputs", Refused(&[], IN_CHAT)),
    field("guided_json", Refused(&[], IN_CHAT)),
    field("guided_regex", Refused(&[], IN_CHAT)),
    field("guided_choice", Refused(&[], IN_CHAT)),
    field("guided_grammar", Refused(&[], IN_CHAT)),
    field("json_schema", Refused(&[], IN_CHAT)),
    field("grammar", Refused(&[], IN_CHAT)),
    field("use_beam_search", Refused(&["false"], OTHER_SAMPLING)),
    field("prompt_logprobs", Refused(&["0", "false"], "ask with `echo` and `logprobs`.")),
    field("truncate_prompt_tokens", Refused(&[], NEVER_CUT)),
];

pub const RESPONSES: &[Field] = &[
    field("model", Obeyed(MODEL)),
    field("input", Obeyed("a string, or items: messages, reasoning, function calls and their outputs, references")),
    field("instructions", Obeyed("")),
    field("previous_response_id", Obeyed("among the last thousand responses, or 64 MiB of them")),
    field("store", Obeyed("in memory only")),
    field("stream", Obeyed("")),
    field("max_output_tokens", Obeyed(WHAT_IS_LEFT)),
    field("temperature", Obeyed("")),
    field("top_p", Obeyed("")),
    field("tools", Obeyed("functions; those that OpenAI's servers run are never called")),
    field("tool_choice", Obeyed("")),
    field("parallel_tool_calls", Obeyed("")),
    field("text", Obeyed("`format`; `verbosity` must be `medium`")),
    field("reasoning", Obeyed("`effort`; with `summary` the reasoning is told as its own summary")),
    field("include", Obeyed("`reasoning.encrypted_content`, which is the reasoning itself")),
    field("metadata", Notes("obeyed: sent back")),
    field("user", Accepted(NOBODY_BILLED)),
    field("safety_identifier", Accepted(NOBODY_BILLED)),
    field("service_tier", Accepted(NOBODY_BILLED)),
    field("stream_options", Accepted("there is nothing to obfuscate")),
    field("max_tool_calls", Accepted("it bounds calls that OpenAI's servers make")),
    field("prompt_cache_key", Accepted(CACHED_ANYWAY)),
    field("prompt_cache_retention", Accepted(CACHED_ANYWAY)),
    field("prompt_cache_options", Accepted(CACHED_ANYWAY)),
    field("client_metadata", Accepted(NOT_KEPT)),
    field("return_progress", Obeyed("a stream says how far the prompt is, in events `response.prompt_progress`")),
    field("background", Refused(&["false"], "ask with `stream`, and stay until the answer is complete.")),
    field("conversation", Refused(&[], "go on from a response with `previous_response_id`.")),
    field("prompt", Refused(&[], "this server keeps no prompt templates.")),
    field("truncation", Refused(&["\"disabled\""], "a part of the conversation would be dropped.")),
    field("top_logprobs", Refused(&["0"], "/v1/chat/completions has log-probabilities.")),
];

pub const MESSAGES: &[Field] = &[
    field("model", Obeyed(MODEL)),
    field(
        "messages",
        Obeyed(
            "text, thinking, tool_use, tool_result; documents of plain text; the answer goes on from an assistant's last message",
        ),
    ),
    field("max_tokens", Obeyed(WHAT_IS_LEFT)),
    field("system", Obeyed("a first block that is a billing header is left out")),
    field("stream", Obeyed("")),
    field("stop_sequences", Obeyed(STOPS)),
    field("temperature", Obeyed("")),
    field("top_p", Obeyed("")),
    field("top_k", Obeyed("")),
    field("tools", Obeyed("tools with an `input_schema`")),
    field("tool_choice", Obeyed("with `disable_parallel_tool_use`")),
    field("thinking", Obeyed("`type`, `budget_tokens`; without it there is none")),
    field("output_config", Obeyed("`format`, `effort`")),
    field("output_format", Obeyed("the older place of `output_config.format`")),
    field("metadata", Accepted(NOT_KEPT)),
    field("service_tier", Accepted(NOBODY_BILLED)),
    field("inference_geo", Accepted("the answer is computed here")),
    field("speed", Accepted("there is one speed")),
    field("cache_control", Accepted(CACHED_ANYWAY)),
    field("return_progress", Obeyed("a stream says how far the prompt is, in `prompt_progress` of events `ping`")),
    field("context_management", Accepted("nothing is edited out of the conversation")),
    field("container", Refused(&[], "this server runs no code.")),
    field("mcp_servers", Refused(&["[]"], "connect to them in the client.")),
];
