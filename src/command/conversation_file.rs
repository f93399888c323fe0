//! Conversations in files: `{"system": ..., "messages": [...]}`, with messages in OpenAI's format.

use crate::error::CommandError;
use moestro_base::platform::read_small_file;
use serde_json::{Value, json};
use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// Maximum size of a conversation in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Writes a conversation. Only the owner can read the file. An existing file is replaced only if `may_replace` is true.
///
/// # Errors
/// The file exists or cannot be written.
pub fn save(path: &Path, may_replace: bool, system: Option<&str>, messages: &[Value]) -> Result<(), CommandError> {
    let text = format!("{:#}\n", json!({"system": system, "messages": messages}));
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let options = if may_replace { options.create(true).truncate(true) } else { options.create_new(true) };
    let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => failed(path, "the file exists; name another one"),
        _ => failed(path, &error.to_string()),
    })
}

/// Reads a conversation: the system prompt and the messages.
///
/// # Errors
/// The file cannot be read, or is not a saved conversation.
pub fn load(path: &Path) -> Result<(Option<String>, Vec<Value>), CommandError> {
    let text = read_small_file(path, MAX_BYTES).map_err(|error| failed(path, &error.to_string()))?;
    let saved: Value = serde_json::from_slice(&text).map_err(|error| failed(path, &error.to_string()))?;
    let is_message = |message: &Value| {
        let role = message["role"].as_str();
        message["content"].is_string() && role.is_some_and(|role| ["user", "assistant", "system"].contains(&role))
    };
    match saved["messages"].as_array() {
        Some(messages) if messages.iter().all(is_message) => {
            Ok((saved["system"].as_str().map(str::to_owned), messages.clone()))
        }
        _ => Err(failed(path, "not a saved conversation: it needs `messages` with `role` and `content`")),
    }
}

fn failed(path: &Path, why: &str) -> CommandError {
    CommandError::Usage(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_conversation_is_loaded_and_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        let messages = vec![json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "Hello"})];
        save(&path, false, Some("Be brief."), &messages).unwrap();
        assert_eq!(load(&path).unwrap(), (Some("Be brief.".into()), messages.clone()));
        assert!(save(&path, false, None, &messages).unwrap_err().to_string().contains("exists"));
        save(&path, true, None, &messages[..1]).unwrap();
        assert_eq!(load(&path).unwrap(), (None, messages[..1].to_vec()));
        std::fs::write(&path, "{\"messages\": [{}]}").unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("not a saved conversation"));
    }
}
