//! Lines of a TOML text, for errors: where the text is wrong, and where it has a setting.

use toml::de::DeTable;

/// The message and position of a TOML error. The error's own text quotes the line, which may contain the API key.
pub fn toml_error(text: &str, error: &toml::de::Error) -> String {
    let at = error.span().map_or(0, |span| span.start);
    let before = text.get(..at).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    let message = error.message();
    let is_too_large = message.contains("i128") || message.contains("too large");
    let message = if is_too_large { "the number is too large; write it in quotes" } else { message };
    format!("line {line}, column {}: {message}", before[start..].chars().count() + 1)
}

/// The line of a setting in the text of a file: at the top, or in the table of `model`.
pub fn line_of(text: &str, model: Option<&str>, name: &str) -> Option<usize> {
    let file = DeTable::parse(text).ok()?;
    let mut table = file.get_ref();
    if let Some(model) = model {
        table = table.get("models")?.get_ref().as_table()?.get(model)?.get_ref().as_table()?;
    }
    let (key, _) = table.get_key_value(name)?;
    Some(text.get(..key.span().start)?.matches('\n').count() + 1)
}
