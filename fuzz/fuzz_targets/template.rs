//! Fuzzes chat templates, rendered with one conversation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_chat::{Conversation, Template};
use serde_json::{Map, json};
use std::{fs, sync::OnceLock};

fuzz_target!(|data: &[u8]| {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| tempfile::tempdir().expect("a directory")).path();
    fs::write(dir.join("chat_template.jinja"), data).expect("a file");
    let Ok(template) = Template::load(dir) else { return };
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}),
        json!({"role": "tool", "content": "2"}),
    ];
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})];
    let kwargs = Map::new();
    let all = Conversation { messages: &messages, tools: Some(&tools), kwargs: &kwargs, add_generation_prompt: true };
    let _ = template.render(&all);
});
