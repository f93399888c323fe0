//! Added tokens, such as `<|im_start|>`. Their ids are those of the files: the crate `tokenizers` numbers the added tokens
//! of `tokenizer.json` in their order, whatever ids they have there.
//!
//! Some tools for fine-tuning write added tokens to `tokenizer_config.json` or `added_tokens.json` only, and transformers
//! adds them when it loads the files.

use crate::error::ChatError;
use moestro_base::platform::read_json_file;
use serde::Deserialize;
use serde_json::Value;
use std::{collections::BTreeMap, io, path::Path};
use tokenizers::AddedToken;

/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 32 << 20;

/// An added token of `tokenizer.json`.
#[derive(Deserialize)]
struct ListedToken {
    id: u32,
    content: String,
}

/// The encoder in a `tokenizer.json`. Its added tokens have the ids of the file.
pub fn encoder(file: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    #[derive(Deserialize)]
    struct ListedTokens {
        #[serde(default)]
        added_tokens: Vec<ListedToken>,
    }
    let parsed = |file: &[u8]| tokenizers::Tokenizer::from_bytes(file).map_err(|error| error.to_string());
    let encoder = parsed(file)?;
    let listed: ListedTokens = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    let differs = |encoder: &tokenizers::Tokenizer| {
        listed.added_tokens.iter().find(|token| encoder.token_to_id(&token.content) != Some(token.id))
    };
    if differs(&encoder).is_none() {
        return Ok(encoder);
    }
    // A token of the vocabulary keeps its id.
    let mut json: Value = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    let vocabulary = json["model"]["vocab"].as_object_mut().ok_or("it has no vocabulary")?;
    vocabulary.extend(listed.added_tokens.iter().map(|token| (token.content.clone(), token.id.into())));
    let encoder = parsed(json.to_string().as_bytes())?;
    match differs(&encoder) {
        Some(ListedToken { id, content }) => Err(format!("the added token {content} cannot have the id {id}")),
        None => Ok(encoder),
    }
}

/// Adds the tokens of a model's other files that `encoder` lacks. Logs a token whose id differs from that of its file,
/// and adds none in that case.
///
/// # Errors
/// A file cannot be read or is not JSON.
pub fn add_missing(dir: &Path, encoder: &mut tokenizers::Tokenizer) -> Result<(), ChatError> {
    let has = |token: &AddedToken| {
        encoder.token_to_id(&token.content).is_some_and(|id| encoder.get_added_tokens_decoder().contains_key(&id))
    };
    let mut missing = listed_tokens(dir)?;
    missing.retain(|_, token| !has(token));
    if missing.is_empty() {
        return Ok(());
    }
    let mut extended = encoder.clone();
    extended.add_tokens(missing.values().cloned()).map_err(|error| ChatError::Tokenizer(error.to_string()))?;
    match missing.iter().find(|(id, token)| extended.token_to_id(&token.content) != Some(**id)) {
        None => *encoder = extended,
        Some((id, AddedToken { content, .. })) => {
            tracing::warn!(id, content, "tokenizer.json lacks this token, and its id is taken; adding no token");
        }
    }
    Ok(())
}

/// The added tokens that `tokenizer_config.json` and `added_tokens.json` list, by id.
fn listed_tokens(dir: &Path) -> Result<BTreeMap<u32, AddedToken>, ChatError> {
    let ids = read(dir, "added_tokens.json")?;
    let ids = ids.as_object().into_iter().flatten().filter_map(|(content, id)| {
        Some((u32::try_from(id.as_u64()?).ok()?, AddedToken::from(content.clone(), false)))
    });
    let mut tokens: BTreeMap<u32, AddedToken> = ids.collect();
    let config = read(dir, "tokenizer_config.json")?;
    let described = config["added_tokens_decoder"].as_object().into_iter().flatten().filter_map(|(id, token)| {
        let flag = |name: &str, default: bool| token[name].as_bool().unwrap_or(default);
        let special = flag("special", false);
        let token = AddedToken::from(token["content"].as_str()?, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special));
        Some((id.parse().ok()?, token))
    });
    tokens.extend(described);
    Ok(tokens)
}

/// The JSON value in a file. Null if the file does not exist.
fn read(dir: &Path, name: &str) -> Result<Value, ChatError> {
    let path = dir.join(name);
    match read_json_file(&path, MAX_BYTES) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| ChatError::File { path, why: format!("it is not valid JSON: {error}") }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(ChatError::File { path, why: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use crate::Tokenizer;
    use serde_json::{Value, json};
    use std::fs;

    /// A tokenizer whose added tokens are in another file than `tokenizer.json`, with ids that are `shift` too high.
    fn moved(name: &str, shift: u64) -> Tokenizer {
        let text = fs::read(test_support::demo().join("tokenizer.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&text).unwrap();
        let tokens = file["added_tokens"].take();
        file["added_tokens"] = json!([]);
        let id = |token: &Value| token["id"].as_u64().unwrap() + shift;
        let list = tokens.as_array().unwrap().iter().map(|token| match name {
            "added_tokens.json" => (token["content"].as_str().unwrap().to_owned(), id(token).into()),
            _ => (id(token).to_string(), token.clone()),
        });
        let list: serde_json::Map<_, _> = list.collect();
        let other = if name == "added_tokens.json" { list.into() } else { json!({"added_tokens_decoder": list}) };
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        fs::write(dir.path().join(name), other.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap()
    }

    /// The demo's tokenizer with other added tokens.
    fn changed(change: impl FnOnce(&mut Vec<Value>)) -> Tokenizer {
        let text = fs::read(test_support::demo().join("tokenizer.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&text).unwrap();
        change(file["added_tokens"].as_array_mut().unwrap());
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap()
    }

    #[test]
    fn added_tokens_have_ids_of_file() {
        let demo = Tokenizer::load(&test_support::demo()).unwrap();
        let text = "<|im_start|>user\nWhat is 12+7?<|im_end|>\n<think>\n</think><tool_call>";
        let ids = demo.encode(text).unwrap();
        let found = changed(|tokens| tokens.reverse());
        assert_eq!((found.encode(text).unwrap(), found.first_difference(&demo)), (ids.clone(), None));
        let found = changed(|tokens| tokens.swap(1, 3));
        assert_eq!((found.encode(text).unwrap(), found.first_difference(&demo)), (ids.clone(), None));
        // A gap before the last tokens, and a gap before all.
        let count = changed(|_| ()).added.len();
        for kept in [0, 2, count - 1] {
            let found = changed(|tokens| {
                tokens.iter_mut().skip(kept).for_each(|token| {
                    token["id"] = (token["id"].as_u64().unwrap() + 5).into();
                })
            });
            let shifted = |id: &u32| if *id >= demo.added[kept] { *id + 5 } else { *id };
            assert_eq!(found.encode(text).unwrap(), ids.iter().map(shifted).collect::<Vec<_>>(), "{kept}");
            assert_eq!(found.decode(&found.encode(text).unwrap()), demo.decode(&ids), "{kept}");
            assert_eq!(found.vocab_size(), demo.vocab_size() + 5);
        }
    }

    #[test]
    fn tokens_of_other_files_are_added() {
        let demo = Tokenizer::load(&test_support::demo()).unwrap();
        let text = "<|im_start|>user\nWhat is 12+7?<|im_end|>\n<think>\n</think><tool_call>";
        let ids = demo.encode(text).unwrap();
        for name in ["tokenizer_config.json", "added_tokens.json"] {
            let found = moved(name, 0);
            assert_eq!(found.encode(text).unwrap(), ids, "{name}");
            assert_eq!(found.first_difference(&demo), None, "{name}");
            assert!(moved(name, 1).id("<|im_start|>").is_none(), "{name}");
        }
    }
}
