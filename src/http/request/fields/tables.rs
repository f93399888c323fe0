//! The field table of each kind of request.

use super::{
    Field, FieldRule,
    FieldRule::{Ignored, Metadata, Refused, Supported},
};

const fn field(name: &'static str, rule: FieldRule) -> Field {
    Field { name, rule }
}

const MODEL: &str = "any name without a slash, or a hub id that ends with this model's name";
const NEVER_TRUNCATED: &str = "a prompt that is too long is refused, never truncated.";
const CACHE_PROMPT: &str = "`false` neither uses nor fills the prompt cache";
const NO_SPECIAL_TOKENS: &str = "answers never contain special tokens";
const REST_OF_CONTEXT: &str = "limited to the rest of the context";
const OLD_VLLM: &str = "an older field of vLLM for the same purpose";
const MODEL_ENDS: &str = "the answer ends where the model ends it.";
const USE_STOP: &str = "send strings in `stop`.";
const USE_BIAS: &str = "exclude tokens with `logit_bias`.";
const REPETITION: &str = "another name of `repetition_penalty`";
const SAME_BUDGET: &str = "another name of `thinking_budget`";
const STOPS: &str = "up to 16";
const NOT_STORED: &str = "nothing is stored";
const NO_BILLING: &str = "there are no accounts and no service tiers";
const ALWAYS_CACHED: &str = "prompts are cached automatically";
const TEXT_ONLY: &str = "the model writes text only.";
const OTHER_SAMPLING: &str = "sampling has temperature, top_p, top_k, min_p and the penalties.";
const NO_LENGTH_SETTING: &str = "the model has no such setting; describe the length in the prompt.";
const PROGRESS: &str = "a stream reports progress in `prompt_progress` after every chunk of the prompt";
const USE_CHAT: &str = "use /v1/chat/completions.";
const USE_GRAMMAR: &str = "restrict the text with a grammar in `response_format`, or favour tokens with `logit_bias`.";
const MODEL_TEMPLATE: &str = "conversations are rendered with the model's own template.";

pub const CHAT: &[Field] = &[
    field("model", Supported(MODEL)),
    field(
        "messages",
        Supported("text, tool calls and results, `reasoning_content`; roles system, developer, user, assistant, tool"),
    ),
    field("stream", Supported("")),
    field("stream_options", Supported("`include_usage`; `include_obfuscation` has no effect")),
    field("max_completion_tokens", Supported(REST_OF_CONTEXT)),
    field("max_tokens", Supported(REST_OF_CONTEXT)),
    field("n", Supported("choices are generated one after another; choice i uses seed + i")),
    field("stop", Supported("up to 16; they apply to the content, not to the reasoning")),
    field("temperature", Supported("")),
    field("top_p", Supported("")),
    field("top_k", Supported("")),
    field("min_p", Supported("")),
    field("repetition_penalty", Supported("")),
    field("repeat_penalty", Supported(REPETITION)),
    field("presence_penalty", Supported("")),
    field("frequency_penalty", Supported("")),
    field("logit_bias", Supported("")),
    field("seed", Supported("")),
    field("logprobs", Supported("")),
    field("top_logprobs", Supported("up to 20")),
    field("tools", Supported("functions")),
    field("tool_choice", Supported("")),
    field("parallel_tool_calls", Supported("")),
    field("functions", Supported("deprecated name of `tools`; the answer then uses `function_call`")),
    field("function_call", Supported("deprecated name of `tool_choice`")),
    field("response_format", Supported("")),
    field("structured_outputs", Supported("vLLM's field for the same purpose as `response_format`")),
    field("guided_json", Supported(OLD_VLLM)),
    field("guided_regex", Supported(OLD_VLLM)),
    field("guided_choice", Supported(OLD_VLLM)),
    field("guided_grammar", Supported(OLD_VLLM)),
    field("json_schema", Supported("llama-server's")),
    field("grammar", Supported("llama-server's; GBNF grammars are refused")),
    field("reasoning_effort", Supported("`none` disables reasoning; other values set a token budget")),
    field("reasoning", Supported("`effort`, `max_tokens`, `enabled`")),
    field("thinking", Supported("`type`, `budget_tokens`")),
    field("thinking_budget", Supported("most tokens of reasoning; the reasoning is closed after them")),
    field("max_thinking_tokens", Supported(SAME_BUDGET)),
    field("thinking_token_budget", Supported(SAME_BUDGET)),
    field("enable_thinking", Supported("")),
    field("chat_template_kwargs", Supported("")),
    field("user", Ignored(NO_BILLING)),
    field("safety_identifier", Ignored(NO_BILLING)),
    field("service_tier", Ignored(NO_BILLING)),
    field("priority", Ignored("requests are answered in order of arrival")),
    field("metadata", Metadata("ignored: nothing is stored")),
    field("store", Ignored(NOT_STORED)),
    field("prediction", Ignored("a hint for speed")),
    field("prompt_cache_key", Ignored(ALWAYS_CACHED)),
    field("prompt_cache_retention", Ignored(ALWAYS_CACHED)),
    field("prompt_cache_options", Ignored(ALWAYS_CACHED)),
    field("return_progress", Supported(PROGRESS)),
    field("cache_prompt", Supported(CACHE_PROMPT)),
    field("skip_special_tokens", Ignored(NO_SPECIAL_TOKENS)),
    field(
        "continue_final_message",
        Supported("the answer continues the last message, which must be the assistant's, in its content or reasoning"),
    ),
    field("add_generation_prompt", Supported("`false` has the same effect as `continue_final_message`")),
    field("modalities", Refused(&["[\"text\"]", "[]"], TEXT_ONLY)),
    field("audio", Refused(&[], TEXT_ONLY)),
    field("web_search_options", Refused(&[], "this server does not search the web.")),
    field("verbosity", Refused(&["\"medium\""], NO_LENGTH_SETTING)),
    field("min_tokens", Refused(&["0"], NO_LENGTH_SETTING)),
    field("ignore_eos", Refused(&["false"], MODEL_ENDS)),
    field("stop_token_ids", Refused(&["[]"], USE_STOP)),
    field("bad_words", Refused(&["[]"], USE_BIAS)),
    field("allowed_token_ids", Refused(&["[]"], USE_GRAMMAR)),
    field("include_stop_str_in_output", Refused(&["false"], "the content ends before the stop string.")),
    field("best_of", Refused(&["1"], "every generated choice is returned.")),
    field("use_beam_search", Refused(&["false"], OTHER_SAMPLING)),
    field("length_penalty", Refused(&["1"], OTHER_SAMPLING)),
    field("typical_p", Refused(&["1"], OTHER_SAMPLING)),
    field("mirostat", Refused(&["0"], OTHER_SAMPLING)),
    field("dry_multiplier", Refused(&["0"], OTHER_SAMPLING)),
    field("xtc_probability", Refused(&["0"], OTHER_SAMPLING)),
    field("chat_template", Refused(&[], MODEL_TEMPLATE)),
    field("documents", Refused(&["[]"], "include them in a message.")),
    field("echo", Refused(&["false"], "use /v1/completions.")),
    field("prompt_logprobs", Refused(&["0", "false"], "use /v1/completions with `echo` and `logprobs`.")),
    field("truncate_prompt_tokens", Refused(&[], NEVER_TRUNCATED)),
];

pub const COMPLETIONS: &[Field] = &[
    field("model", Supported(MODEL)),
    field("prompt", Supported("a string or token ids, or an array of either")),
    field("stream", Supported("")),
    field("stream_options", Supported("`include_usage`")),
    field("max_tokens", Supported("default 16")),
    field("n", Supported("the choices of a prompt are next to each other; choice i uses seed + i")),
    field("best_of", Supported("must equal `n`: every generated choice is returned")),
    field("stop", Supported(STOPS)),
    field("temperature", Supported("")),
    field("top_p", Supported("")),
    field("top_k", Supported("")),
    field("min_p", Supported("")),
    field("repetition_penalty", Supported("")),
    field("repeat_penalty", Supported(REPETITION)),
    field("presence_penalty", Supported("")),
    field("frequency_penalty", Supported("")),
    field("logit_bias", Supported("")),
    field("seed", Supported("")),
    field("echo", Supported("")),
    field("logprobs", Supported("up to 20; with `echo` also for the prompt")),
    field("suffix", Supported("must be empty")),
    field("user", Ignored(NO_BILLING)),
    field("metadata", Metadata("ignored: nothing is stored")),
    field("store", Ignored(NOT_STORED)),
    field("return_progress", Supported(PROGRESS)),
    field("cache_prompt", Supported(CACHE_PROMPT)),
    field("skip_special_tokens", Ignored(NO_SPECIAL_TOKENS)),
    field("min_tokens", Refused(&["0"], NO_LENGTH_SETTING)),
    field("ignore_eos", Refused(&["false"], MODEL_ENDS)),
    field("stop_token_ids", Refused(&["[]"], USE_STOP)),
    field("bad_words", Refused(&["[]"], USE_BIAS)),
    field("allowed_token_ids", Refused(&["[]"], USE_GRAMMAR)),
    field("response_format", Refused(&["{\"type\": \"text\"}"], USE_CHAT)),
    field("structured_outputs", Refused(&[], USE_CHAT)),
    field("guided_json", Refused(&[], USE_CHAT)),
    field("guided_regex", Refused(&[], USE_CHAT)),
    field("guided_choice", Refused(&[], USE_CHAT)),
    field("guided_grammar", Refused(&[], USE_CHAT)),
    field("json_schema", Refused(&[], USE_CHAT)),
    field("grammar", Refused(&[], USE_CHAT)),
    field("use_beam_search", Refused(&["false"], OTHER_SAMPLING)),
    field("prompt_logprobs", Refused(&["0", "false"], "use `echo` and `logprobs`.")),
    field("truncate_prompt_tokens", Refused(&[], NEVER_TRUNCATED)),
];

pub const RESPONSES: &[Field] = &[
    field("model", Supported(MODEL)),
    field("input", Supported("a string, or items: messages, reasoning, function calls and their outputs, references")),
    field("instructions", Supported("")),
    field("previous_response_id", Supported("one of the last 1,000 stored responses, or of the last 64 MiB")),
    field("store", Supported("in memory only")),
    field("stream", Supported("")),
    field("max_output_tokens", Supported(REST_OF_CONTEXT)),
    field("temperature", Supported("")),
    field("top_p", Supported("")),
    field("tools", Supported("functions; tools that OpenAI's servers run are never called")),
    field("tool_choice", Supported("")),
    field("parallel_tool_calls", Supported("")),
    field("text", Supported("`format`; `verbosity` must be `medium`")),
    field("reasoning", Supported("`effort`; with `summary` the reasoning is sent as the summary")),
    field("include", Supported("`reasoning.encrypted_content`, which contains the plain reasoning")),
    field("metadata", Metadata("supported: returned in the response")),
    field("user", Ignored(NO_BILLING)),
    field("safety_identifier", Ignored(NO_BILLING)),
    field("service_tier", Ignored(NO_BILLING)),
    field("stream_options", Ignored("streams have no obfuscation")),
    field("max_tool_calls", Ignored("it limits calls that OpenAI's servers make")),
    field("prompt_cache_key", Ignored(ALWAYS_CACHED)),
    field("prompt_cache_retention", Ignored(ALWAYS_CACHED)),
    field("prompt_cache_options", Ignored(ALWAYS_CACHED)),
    field("client_metadata", Ignored(NOT_STORED)),
    field("return_progress", Supported("a stream reports progress in `response.prompt_progress` events")),
    field("background", Refused(&["false"], "use `stream` and stay connected until the answer is complete.")),
    field("conversation", Refused(&[], "continue a response with `previous_response_id`.")),
    field("prompt", Refused(&[], "this server stores no prompt templates.")),
    field("truncation", Refused(&["\"disabled\""], "part of the conversation would be dropped.")),
    field("top_logprobs", Refused(&["0"], "use /v1/chat/completions for log-probabilities.")),
];

pub const MESSAGES: &[Field] = &[
    field("model", Supported(MODEL)),
    field(
        "messages",
        Supported(
            "text, thinking, tool_use, tool_result, and documents of plain text; a final assistant message is continued",
        ),
    ),
    field("max_tokens", Supported(REST_OF_CONTEXT)),
    field("system", Supported("a billing header in the first block is dropped")),
    field("stream", Supported("")),
    field("stop_sequences", Supported(STOPS)),
    field("temperature", Supported("")),
    field("top_p", Supported("")),
    field("top_k", Supported("")),
    field("tools", Supported("tools with an `input_schema`")),
    field("tool_choice", Supported("with `disable_parallel_tool_use`")),
    field("thinking", Supported("`type`, `budget_tokens`; without it the model does not think")),
    field("output_config", Supported("`format`, `effort`")),
    field("output_format", Supported("older name of `output_config.format`")),
    field("metadata", Ignored(NOT_STORED)),
    field("service_tier", Ignored(NO_BILLING)),
    field("inference_geo", Ignored("the answer is computed on this machine")),
    field("speed", Ignored("there is only one speed")),
    field("cache_control", Ignored(ALWAYS_CACHED)),
    field("return_progress", Supported("a stream reports progress in `prompt_progress` of `ping` events")),
    field("context_management", Ignored("the conversation is never shortened")),
    field("container", Refused(&[], "this server runs no code.")),
    field("mcp_servers", Refused(&["[]"], "connect to MCP servers in the client.")),
];
