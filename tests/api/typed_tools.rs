//! Tests of tools that have a type instead of a schema, as the providers define them.

use super::server::{MESSAGES, RESPONSES, Server, Setup, chat, with};
use serde_json::{Value, json};

/// Tools that Anthropic defines and the client runs: type without date, dates, name and a call. The second name is that of
/// the text editor in its first two versions.
const CLIENT_TOOLS: [(&str, &[u32], &str, &str); 5] = [
    ("bash", &[20241022, 20250124, 20990101], "bash", r#"{"command":"ls -l","restart":true}"#),
    ("text_editor", &[20241022, 20250124], "str_replace_editor", r#"{"command":"undo_edit","path":"a.txt"}"#),
    (
        "text_editor",
        &[20250429, 20250728, 20990101],
        "str_replace_based_edit_tool",
        r#"{"command":"view","path":"a.txt","view_range":[1,-1]}"#,
    ),
    ("memory", &[20250818, 20990101], "memory", r#"{"command":"insert","path":"/memories/a","insert_line":3}"#),
    (
        "computer",
        &[20241022, 20250124, 20251124, 20990101],
        "computer",
        r#"{"action":"left_click","coordinate":[640,480]}"#,
    ),
];

/// Types of tools that Anthropic's servers run, and of sets of tools.
const SERVER_TOOLS: &str = "web_search_20250305 web_search_20260209 web_search_20260318 web_fetch_20250910 \
    web_fetch_20260209 web_fetch_20260309 web_fetch_20260318 code_execution_20250522 code_execution_20250825 \
    code_execution_20260120 code_execution_20260521 advisor_20260301 computer_toolset_20260801 \
    browser_toolset_20260801 mcp_toolset unknown";

/// Types of tools of Responses other than functions, namespaces and a search by the client.
const RESPONSES_TOOLS: &str = "file_search computer computer_use_preview web_search web_search_2025_08_26 \
    web_search_preview web_search_preview_2025_03_11 mcp code_interpreter programmatic_tool_calling image_generation \
    local_shell shell custom tool_search apply_patch unknown";

fn messages(tool: &Value, more: Value) -> Value {
    with(with(chat("Go on."), json!({"max_tokens": 400, "tools": [tool]})), more)
}

/// A call as the demo's template writes it, without reasoning.
fn call(name: &str, input: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let parameter = |(name, value): (&String, &Value)| format!("<parameter={name}>\n{}\n</parameter>\n", text(value));
    let parameters: String = input.as_object().unwrap().iter().map(parameter).collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

#[tokio::test]
async fn client_tools_without_schema_are_called() {
    for (family, dates, name, input) in CLIENT_TOOLS {
        let input: Value = serde_json::from_str(input).unwrap();
        let says: &'static str = call(name, &input).leak();
        let server = Setup { says: Some(says), context: 8192, ..Setup::default() }.start().await;
        for (date, strict) in dates.iter().flat_map(|date| [(date, false), (date, true)]) {
            let kind = format!("{family}_{date}");
            let tool = json!({"type": kind, "name": name, "strict": strict, "enable_zoom": true,
                              "display_width_px": 1024, "display_height_px": 768});
            for choice in [json!({"type": "auto"}), json!({"type": "any"}), json!({"type": "tool", "name": name})] {
                let answer = server.ask(MESSAGES, &messages(&tool, json!({"tool_choice": choice}))).await;
                let block = &answer["content"][0];
                let found = (&block["name"], &block["input"]);
                assert_eq!(found, (&json!(name), &input), "{kind} {strict} {choice} {answer}");
                assert_eq!(answer["stop_reason"], "tool_use");
            }
        }
    }
}

#[tokio::test]
async fn server_tools_of_anthropic_are_refused() {
    let server = Server::saying("Hello.").await;
    for kind in SERVER_TOOLS.split(' ') {
        let tool = json!({"type": kind, "name": "f"});
        let error = server.refused(MESSAGES, &messages(&tool, json!({})), 400).await;
        let expected = format!("tools[0] has type `{kind}`, but this server runs no tools.");
        assert!(error["message"].as_str().unwrap().starts_with(&expected), "{error}");
        // The client runs a tool that has a schema, whatever its type is.
        let tool = with(tool, json!({"input_schema": {"type": "object"}}));
        server.ask(MESSAGES, &messages(&tool, json!({}))).await;
    }
}

#[tokio::test]
async fn other_tools_of_responses_are_ignored() {
    let server = Server::saying("Hello.").await;
    let function = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let body = |tools: Value, choice: Value| json!({"input": "Hi", "tools": tools, "tool_choice": choice});
    let count = async |tools: Value| {
        let answer = server.ask("/v1/responses/input_tokens", &body(tools, Value::Null)).await;
        answer["input_tokens"].as_u64().unwrap()
    };
    let alone = count(json!([function])).await;
    for kind in RESPONSES_TOOLS.split(' ') {
        let tool = json!({"type": kind, "name": "g", "server_label": "s", "container": {"type": "auto"}});
        assert_eq!(count(json!([tool, function])).await, alone, "{kind}");
        server.ask(RESPONSES, &body(json!([function, tool]), json!("auto"))).await;
        let forced = body(json!([function, tool]), json!({"type": kind, "name": "g"}));
        let error = server.refused(RESPONSES, &forced, 400).await;
        let expected = format!("tool_choice.type is {kind}; ");
        assert!(error["message"].as_str().unwrap().starts_with(&expected), "{error}");
    }
}
