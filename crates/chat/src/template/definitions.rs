//! The text with which a template defines a tool. Tools that are defined in the middle of a conversation get this text
//! there, in the format of the tools at the start of the prompt.

use super::{Conversation, Template};
use serde_json::{Map, Value, json};

/// Maximum number of tools of a conversation whose text comes from the template. More tools get their JSON.
const MAX_RENDERED: usize = 512;

/// Maximum number of bytes by which the start of an insertion is moved.
const MAX_SHIFT: usize = 256;

impl Template {
    /// The text of each tool, in OpenAI's format: what the prompt of a short conversation gains by the tool. A tool gets
    /// its JSON if the template does not insert it in one place.
    ///
    /// `explains_calls` is true if the prompt has other tools, so that it already explains how tools are called. If not,
    /// the text of the first tool explains calls.
    pub fn definitions(&self, tools: &[Value], explains_calls: bool, kwargs: &Map<String, Value>) -> Vec<String> {
        let messages =
            [("system", "Be brief."), ("user", "Hi")].map(|(role, content)| json!({"role": role, "content": content}));
        let render = |tools: &[Value]| {
            let tools = (!tools.is_empty()).then_some(tools);
            let conversation = Conversation { messages: &messages, tools, kwargs, add_generation_prompt: false };
            self.render(&conversation).ok()
        };
        let other = [other_tool()];
        let with_other = if tools.is_empty() { None } else { render(&other) };
        let definition = |(index, tool): (usize, &Value)| {
            let after_other = || inserted(with_other.as_deref()?, &render(&[other[0].clone(), tool.clone()])?);
            let alone = || inserted(&render(&[])?, &render(std::slice::from_ref(tool))?);
            let explained = if index == 0 && !explains_calls { alone() } else { None };
            let text = explained.or_else(|| if index < MAX_RENDERED { after_other() } else { None });
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            text.filter(|text| text.contains(name)).unwrap_or_else(|| tool.to_string())
        };
        tools.iter().enumerate().map(definition).collect()
    }
}

/// The tool before the tool whose text is searched. Its JSON ends with a name that no other tool has.
fn other_tool() -> Value {
    let parameter = "parameter_of_the_tool_before";
    let parameters = json!({
        "type": "object",
        "properties": {parameter: {"type": "string", "description": "Any text."}},
        "required": [parameter],
    });
    let function = json!({"name": "tool_before", "description": "Does nothing.", "parameters": parameters});
    json!({"type": "function", "function": function})
}

/// The text that `with` has in addition to `without`, without white space and commas around it. `None` if the texts
/// differ in more than one place.
///
/// If the text after the insertion begins like the inserted text, the insertion may begin at several places. It begins
/// at the start of a line or after a closing bracket if it can.
fn inserted(without: &str, with: &str) -> Option<String> {
    let added = with.len().checked_sub(without.len())?;
    let before = without.as_bytes();
    let after = with.as_bytes();
    let last = before.iter().zip(after).take_while(|(a, b)| a == b).count();
    if before[last..] != after[last + added..] {
        return None;
    }
    let is_boundary = |&start: &usize| start == 0 || b"\n>}])".contains(&before[start - 1]);
    let starts = (0..=last).rev().take_while(|&start| before[start..last] == after[start + added..last + added]);
    let start = starts.take(MAX_SHIFT).find(is_boundary).unwrap_or(last);
    let text = with.get(start..start + added)?.trim_matches(|c: char| c == ',' || c.is_whitespace());
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn template(source: &str) -> Template {
        Template::new(BTreeMap::from([("default".to_owned(), source.to_owned())]), &Value::Null).unwrap()
    }

    fn tool(name: &str) -> Value {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]});
        json!({"type": "function", "function": {"name": name, "description": "d, é", "parameters": parameters}})
    }

    const END: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";

    #[test]
    fn definition_equals_text_of_tool_in_head() {
        let render = |source: &str, tools: &[Value]| {
            let kwargs = Map::new();
            let messages = [json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "u"})];
            let tools = Some(tools);
            let conversation =
                Conversation { messages: &messages, tools, kwargs: &kwargs, add_generation_prompt: false };
            template(source).render(&conversation).unwrap()
        };
        let xml = "<function>\n<name>{{ t.function.name }}</name>\n<a>{{ t.function.description }}</a>\n</function>";
        for list in [
            // One line of JSON for each tool.
            "# Tools\n<tools>{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}\n</tools>\n",
            // A tool begins like the end of the list.
            &format!("<tools>\n{{% for t in tools %}}{xml}{{{{ '\n' }}}}{{% endfor %}}</tools>\n"),
            &format!("<tools>{{% for t in tools %}}{xml}{{% endfor %}}</tools>\n"),
            "{% for t in tools %}<tool>{{ t.function | tojson }}</tool>{% endfor %}</tools>",
            // JSON of the list.
            "{{ tools | tojson }}",
            "{{ tools | tojson(indent=4) }}",
            "{% for t in tools %}- {{ t.function.name }}: {{ t.function.description }}\n{% endfor %}- end\n",
        ] {
            let source = format!("{list}{END}");
            for name in ["f", "tool_after", "tools", "other_name_of_a_tool"] {
                let found = template(&source).definitions(&[tool("x"), tool(name)], true, &Map::new());
                let head = render(&source, &[tool("first"), tool("x"), tool(name)]);
                let [x, text] = &*found else { panic!("two texts") };
                assert!(head.contains(x) && head.contains(text), "{list}: {text} in {head}");
                let brackets = |open: char, close: char| text.matches(open).count() == text.matches(close).count();
                assert!(brackets('{', '}') && brackets('<', '>') && text.contains(name), "{list}: {text}");
                assert!(text.contains("d, ") && text.starts_with(['{', '<', '-']), "{list}: {text}");
                let rest = head.replacen(text, "", 1);
                let fewer = render(&source, &[tool("first"), tool("x")]);
                let bare = |text: &str| text.replace([' ', ',', '\n'], "");
                assert_eq!(bare(&rest), bare(&fewer), "{list}");
            }
        }
    }

    #[test]
    fn first_definition_explains_calls_without_head_tools() {
        let list =
            "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}Call them so.\n\n{% endif %}";
        let template = template(&format!("{list}{END}"));
        let texts = template.definitions(&[tool("f"), tool("g")], false, &Map::new());
        assert!(texts[0].starts_with("# Tools\n{") && texts[0].ends_with("}\nCall them so."), "{}", texts[0]);
        assert!(texts[1].starts_with('{') && texts[1].ends_with('}'), "{}", texts[1]);
        assert_eq!(template.definitions(&[tool("f"), tool("g")], true, &Map::new())[1], texts[1]);
    }

    #[test]
    fn unclear_place_of_tool_gives_json() {
        for list in [
            "There are {{ tools | length }} tools.{% for t in tools %}{{ t | tojson }}{% endfor %}",
            "{% for t in tools %}{{ t.function.name }}{% endfor %};{% for t in tools %}{{ t | tojson }}{% endfor %}",
            "No tools.",
            "{{ raise_exception('no') }}",
        ] {
            let source = format!("{{% if tools %}}{list}{{% endif %}}{END}");
            for explains_calls in [true, false] {
                let texts = template(&source).definitions(&[tool("f")], explains_calls, &Map::new());
                assert!(texts[0].contains(r#""required""#), "{list}: {}", texts[0]);
                assert!(!explains_calls || texts[0].starts_with('{'), "{list}: {}", texts[0]);
            }
        }
    }
}
