//! Finds the chat templates of a model in its directory.
//!
//! As in transformers, `chat_template.jinja` takes the place of the templates in `tokenizer_config.json`, and files in
//! `additional_chat_templates` are templates for special conversations. `chat_template.json` and `processor_config.json`
//! are files of older processors of images. They count if there is no other template. If all templates are special, the
//! first by name is used for all other conversations.

use crate::error::ChatError;
use moestro_base::platform::{check_not_placeholder, read_json_file, read_small_file};
use serde_json::Value as Json;
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Name of the template that is used for all conversations, except those for which there is a special one.
pub(super) const DEFAULT: &str = "default";

/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 32 << 20;

/// The templates of a model by name, and the model's `tokenizer_config.json`. The file may be missing.
pub(super) struct TemplateFiles {
    pub sources: BTreeMap<String, String>,
    pub tokenizer_config: Json,
}

impl TemplateFiles {
    pub fn read(dir: &Path) -> Result<Self, ChatError> {
        let tokenizer_config = read_json(dir.join("tokenizer_config.json"))?;
        let mut sources = BTreeMap::new();
        add(&mut sources, DEFAULT, read_text(&dir.join("chat_template.jinja"))?.as_deref());
        if sources.is_empty() {
            add_all(&mut sources, &tokenizer_config["chat_template"]);
        }
        for name in ["chat_template.json", "processor_config.json"] {
            if sources.is_empty() {
                add_all(&mut sources, &read_json(dir.join(name))?["chat_template"]);
            }
        }
        for path in further_templates(dir) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            add(&mut sources, &name, read_text(&path)?.as_deref());
        }
        if let Some(source) = sources.values().next().filter(|_| !sources.contains_key(DEFAULT)).cloned() {
            sources.insert(DEFAULT.to_owned(), source);
        }
        Ok(Self { sources, tokenizer_config })
    }
}

/// Adds the value of a key `chat_template`: one text, a list of `{"name", "template"}`, or an object with a text for
/// each name.
fn add_all(sources: &mut BTreeMap<String, String>, chat_template: &Json) {
    match chat_template {
        Json::String(source) => add(sources, DEFAULT, Some(source)),
        Json::Array(list) => {
            for entry in list {
                add(sources, entry["name"].as_str().unwrap_or(DEFAULT), entry["template"].as_str());
            }
        }
        Json::Object(named) => named.iter().for_each(|(name, source)| add(sources, name, source.as_str())),
        _ => {}
    }
}

/// Adds a template. An empty text is no template. As in Python, a byte order mark is no text, and every line ends with
/// a line feed.
fn add(sources: &mut BTreeMap<String, String>, name: &str, source: Option<&str>) {
    if let Some(source) = source.filter(|source| !source.trim().is_empty()) {
        let source = source.trim_start_matches('\u{feff}').replace("\r\n", "\n").replace('\r', "\n");
        sources.insert(name.to_owned(), source);
    }
}

/// The files `additional_chat_templates/NAME.jinja`.
fn further_templates(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("additional_chat_templates")).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|ending| ending == "jinja")).collect()
}

/// The JSON value in a file. Null if the file does not exist.
fn read_json(path: PathBuf) -> Result<Json, ChatError> {
    let Some(text) = existing(&path, read_json_file(&path, MAX_BYTES))? else { return Ok(Json::Null) };
    serde_json::from_slice(&text)
        .map_err(|error| ChatError::File { path, why: format!("it is not valid JSON: {error}") })
}

/// The text of a file. `None` if the file does not exist.
fn read_text(path: &Path) -> Result<Option<String>, ChatError> {
    let read = read_small_file(path, MAX_BYTES).and_then(|text| check_not_placeholder(&text).map(|()| text));
    let text = existing(path, read)?.map(String::from_utf8).transpose();
    text.map_err(|error| ChatError::File { path: path.to_owned(), why: error.to_string() })
}

/// The bytes that were read from a file. `None` if the file does not exist.
fn existing(path: &Path, read: io::Result<Vec<u8>>) -> Result<Option<Vec<u8>>, ChatError> {
    match read {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ChatError::File { path: path.to_owned(), why: error.to_string() }),
    }
}
