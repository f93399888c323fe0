//! Tools that Anthropic defines and the client runs, such as `bash_20250124`. A request has only their types, because
//! Anthropic's models know them. Other models read the parameters that Anthropic documents.

use serde_json::{Map, Value, json};

/// Version of the text editor from which `insert` has its text in `insert_text`, as in `memory`. Before, it is `new_str`.
const INSERT_TEXT: &str = "20250728";

/// Version of the text editor from which `undo_edit` is gone.
const NO_UNDO: &str = "20250429";

/// Versions of the computer that add actions.
const MORE_ACTIONS: &str = "20250124";
const ZOOM: &str = "20251124";

/// The description and the schema of a tool, for its type: the name of a family and a date. `None` for tools that the
/// client does not run. A later date than those known here means the newest known version.
pub fn definition(tool: &Value) -> Option<(String, Value)> {
    let (family, date) = tool["type"].as_str()?.rsplit_once('_')?;
    let date = Some(date).filter(|date| date.len() == 8 && date.bytes().all(|byte| byte.is_ascii_digit()))?;
    match family {
        "bash" => Some(bash()),
        "text_editor" => Some(text_editor(date)),
        "memory" => Some(memory()),
        "computer" => Some(computer(tool, date)),
        _ => None,
    }
}

fn schema(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn string(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

fn word(words: &[&str], description: &str) -> Value {
    json!({"type": "string", "enum": words, "description": description})
}

/// A list of exactly `count` integers.
fn integers(count: usize, description: &str) -> Value {
    let items = json!({"type": "integer"});
    json!({"type": "array", "items": items, "minItems": count, "maxItems": count, "description": description})
}

fn bash() -> (String, Value) {
    let restart = json!({"type": "boolean", "description": "True starts a new shell instead of running a command."});
    let command = string("The command to run. Required unless `restart` is true.");
    let description = "Runs a command in a bash shell. The shell keeps its state from one call to the next.";
    (description.to_owned(), schema(json!({"command": command, "restart": restart}), &[]))
}

/// The parameters of the commands that view and change files. `insert` names the parameter with the inserted text.
fn file_parameters(commands: &[&str], insert: &str) -> Map<String, Value> {
    let line =
        "Command `insert`: the number of the line after which the text is inserted, 0 for the start of the file.";
    let range =
        "Command `view`: the first and the last line to show, counted from 1. The last line may be -1: the end.";
    let mut parameters = Map::from_iter([
        ("command".into(), word(commands, "What to do.")),
        ("path".into(), string("Path of the file or directory.")),
        ("file_text".into(), string("Command `create`: the text of the new file.")),
        (
            "old_str".into(),
            string("Command `str_replace`: the text to replace. It must occur exactly once in the file."),
        ),
        ("new_str".into(), string("Command `str_replace`: the new text.")),
        ("insert_line".into(), json!({"type": "integer", "description": line})),
        ("view_range".into(), integers(2, range)),
    ]);
    let text = if insert == "new_str" {
        "Commands `str_replace` and `insert`: the new text."
    } else {
        "Command `insert`: the new text."
    };
    parameters.insert(insert.into(), string(text));
    parameters
}

fn text_editor(date: &str) -> (String, Value) {
    let commands = ["view", "create", "str_replace", "insert", "undo_edit"];
    let commands = if date < NO_UNDO { &commands[..] } else { &commands[..4] };
    let insert = if date < INSERT_TEXT { "new_str" } else { "insert_text" };
    let parameters = file_parameters(commands, insert);
    ("Views, creates and edits text files.".to_owned(), schema(parameters.into(), &["command", "path"]))
}

fn memory() -> (String, Value) {
    let commands = ["view", "create", "str_replace", "insert", "delete", "rename"];
    let mut parameters = file_parameters(&commands, "insert_text");
    parameters.insert("old_path".into(), string("Command `rename`: the path of the file or directory."));
    parameters.insert("new_path".into(), string("Command `rename`: its new path."));
    let description = "Reads and changes files in the directory /memories, which later conversations see too. View the \
                       directory before a task, because it may have notes about the task.";
    (description.to_owned(), schema(parameters.into(), &["command"]))
}

fn computer(tool: &Value, date: &str) -> (String, Value) {
    let has_zoom = date >= ZOOM && tool["enable_zoom"] == true;
    let mut actions = vec![
        "key",
        "type",
        "mouse_move",
        "left_click",
        "left_click_drag",
        "right_click",
        "middle_click",
        "double_click",
        "screenshot",
        "cursor_position",
    ];
    if date >= MORE_ACTIONS {
        actions.extend(["hold_key", "left_mouse_down", "left_mouse_up", "triple_click", "scroll", "wait"]);
    }
    actions.extend(has_zoom.then_some("zoom"));
    let mut parameters = Map::new();
    let mut add = |name: &str, schema: Value| parameters.insert(name.to_owned(), schema);
    add("action", word(&actions, "What to do."));
    add("coordinate", integers(2, "Where: pixels from the left and from the top. A drag ends there."));
    add("text", string("Action `type`: the text. Actions `key` and `hold_key`: the keys, such as `ctrl+s`."));
    if date >= MORE_ACTIONS {
        add("start_coordinate", integers(2, "Action `left_click_drag`: where the drag starts."));
        add("scroll_direction", word(&["up", "down", "left", "right"], "Action `scroll`: the direction."));
        add("scroll_amount", json!({"type": "integer", "description": "Action `scroll`: the number of steps."}));
        add("duration", json!({"type": "number", "description": "Actions `hold_key` and `wait`: the seconds."}));
    }
    if has_zoom {
        add("region", integers(4, "Action `zoom`: left, top, right and bottom of the part to show."));
    }
    let mut description = "Controls the mouse and the keyboard of a computer, and takes screenshots.".to_owned();
    if let (Some(width), Some(height)) = (tool["display_width_px"].as_u64(), tool["display_height_px"].as_u64()) {
        description += &format!(" The screen has {width} x {height} pixels.");
    }
    (description, schema(parameters.into(), &["action"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(kind: &str) -> Value {
        definition(&json!({"type": kind, "name": "t", "enable_zoom": true})).unwrap().1["properties"].take()
    }

    #[test]
    fn versions_have_their_own_parameters() {
        let has = |kind: &str, names: &[&str]| names.iter().map(|name| parameters(kind).get(name).is_some()).collect();
        let editor = |date: &str| -> Vec<bool> { has(&format!("text_editor_{date}"), &["insert_text", "new_str"]) };
        assert_eq!(["20241022", "20250429", "20250728"].map(editor), [[false, true], [false, true], [true, true]]);
        let undoes = |date: &str| {
            let commands = parameters(&format!("text_editor_{date}"))["command"]["enum"].take();
            commands.as_array().unwrap().contains(&"undo_edit".into())
        };
        assert_eq!(["20241022", "20250124", "20250429", "20250728"].map(undoes), [true, true, false, false]);
        let computer = |date: &str| -> Vec<bool> { has(&format!("computer_{date}"), &["scroll_amount", "region"]) };
        assert_eq!(["20241022", "20250124", "20251124"].map(computer), [[false, false], [true, false], [true, true]]);
    }

    #[test]
    fn other_types_have_no_definition() {
        for kind in
            ["bash", "bash_1", "computer_toolset_20260801", "web_search_20250305", "memory_2025081x", "_20250124"]
        {
            assert_eq!(definition(&json!({"type": kind, "name": "t"})), None, "{kind}");
        }
    }
}
