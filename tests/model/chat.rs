//! Compares chat templates and tokenizers with transformers. `MOESTRO_VECTORS=DIR cargo test --test model chat::` also
//! checks the vectors of a real model. DIR contains `tokenizer.json`, `templates/NAME.jinja` and `chat_vectors.json`
//! (`{NAME: {case: {..}}}`).

use moestro_chat::{Conversation, Decoder, Template, Tokenizer, error::ChatError};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
};
use test_support::{demo, thread_cpu::cpu_time_of};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Loads a template from its source, as if it came from a model's directory.
fn template(source: &str) -> Result<Template, ChatError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    Template::load(dir.path())
}

fn render(template: &Template, case: &Value) -> Result<String, ChatError> {
    let mut kwargs = case["kwargs"].as_object().cloned().unwrap_or_default();
    let given = kwargs.remove("add_generation_prompt").unwrap_or(case["add_generation_prompt"].clone());
    template.render(&Conversation {
        messages: case["messages"].as_array().unwrap(),
        tools: case["tools"].as_array().map(Vec::as_slice),
        kwargs: &kwargs,
        add_generation_prompt: given.as_bool().unwrap_or(true),
    })
}

fn one(source: &str) -> Result<String, ChatError> {
    render(&template(source)?, &json!({"messages": [{"role": "user", "content": "hi"}]}))
}

/// Asserts that two texts are equal. The failure message contains only the lines that differ.
fn assert_same(found: &str, expected: &str, case: &str) {
    let lines = found.lines().zip(expected.lines()).filter(|(found, expected)| found != expected);
    let lines: String = lines.map(|(found, expected)| format!("found    {found}\nexpected {expected}\n")).collect();
    assert!(found == expected, "{case}: {} bytes, {} expected\n{lines}", found.len(), expected.len());
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let template = Template::load(&fixture("features")).unwrap();
    let cases = read(&fixture("features/vectors.json"));
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        match (render(&template, case), case["text"].as_str()) {
            (Ok(text), Some(expected)) => assert_same(&text, expected, name),
            (Err(ChatError::Refused(why)), None) => assert_eq!(why, case["refused"], "{name}"),
            (other, _) => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn real_model_matches_its_vectors() {
    let Some(dir) = std::env::var_os("MOESTRO_VECTORS").map(PathBuf::from) else { return };
    let tokenizer = Tokenizer::load(&dir).unwrap();
    let vectors = read(&dir.join("chat_vectors.json"));
    for (name, cases) in vectors.as_object().unwrap() {
        let source = fs::read_to_string(dir.join(format!("templates/{name}.jinja")));
        let template = template(&source.unwrap()).unwrap();
        for (case_name, case) in cases.as_object().unwrap() {
            let case_name = format!("{name}: {case_name}");
            if let Some(refused) = case.get("refused") {
                let error = render(&template, case).unwrap_err();
                assert!(
                    matches!(&error, ChatError::Refused(why) if why == refused.as_str().unwrap()),
                    "{case_name}: {error}"
                );
                continue;
            }
            let text = render(&template, case).unwrap();
            assert_same(&text, case["text"].as_str().unwrap(), &case_name);
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{case_name}");
            eprintln!("{case_name}: {} ids", ids.len());
        }
    }
}

#[test]
fn template_is_found_in_all_files() {
    let dir = tempfile::tempdir().unwrap();
    let load = || Template::load(dir.path());
    assert!(load().err().unwrap().to_string().contains("chat_template.jinja"));
    let config = |value: Value| fs::write(dir.path().join("tokenizer_config.json"), value.to_string()).unwrap();
    let case = json!({"messages": []});
    config(json!({"chat_template": "one {{ eos_token }}", "eos_token": {"content": "<e>"}}));
    assert_eq!(render(&load().unwrap(), &case).unwrap(), "one <e>");
    config(
        json!({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]}),
    );
    assert_eq!(render(&load().unwrap(), &case).unwrap(), "two");
    assert_eq!(render(&load().unwrap(), &json!({"messages": [], "tools": [{}]})).unwrap(), "tools");
    config(json!({"chat_template": [{"name": "tool_use", "template": "only"}]}));
    assert_eq!(render(&load().unwrap(), &case).unwrap(), "only");
    fs::write(dir.path().join("chat_template.jinja"), "three").unwrap();
    assert_eq!(render(&load().unwrap(), &case).unwrap(), "three");
    // Further templates are in a folder, or in the file of an older processor.
    let tools = json!({"messages": [], "tools": [{}]});
    fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), "four").unwrap();
    assert_eq!(render(&load().unwrap(), &case).unwrap(), "three");
    assert_eq!(render(&load().unwrap(), &tools).unwrap(), "four");
    fs::write(dir.path().join("chat_template.jinja"), " \n").unwrap();
    for (value, expected) in
        [(json!("five"), "five"), (json!({"default": "six"}), "six"), (json!([{"template": "seven"}]), "seven")]
    {
        config(json!({"chat_template": null}));
        fs::write(dir.path().join("chat_template.json"), json!({"chat_template": value}).to_string()).unwrap();
        assert_eq!(render(&load().unwrap(), &case).unwrap(), expected);
        assert_eq!(render(&load().unwrap(), &tools).unwrap(), "four");
        config(json!({"chat_template": "eight"}));
        assert_eq!(render(&load().unwrap(), &case).unwrap(), "eight");
    }
    // As in Python, every line ends with a line feed.
    let lines = "{% set x = 1 %}\n\n a{{ x }}\n{%- if x %}\n  b\n{% endif %}\n";
    for (source, config_source) in [(format!("\u{feff}{lines}"), ""), (String::new(), lines)] {
        let rendered = ["\n", "\r\n", "\r"].map(|end| {
            fs::write(dir.path().join("chat_template.jinja"), source.replace('\n', end)).unwrap();
            config(json!({"chat_template": config_source.replace('\n', end)}));
            render(&load().unwrap(), &case).unwrap()
        });
        assert_eq!(rendered, ["\n a1  b\n"; 3]);
    }
    fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    assert!(matches!(load(), Err(ChatError::Template(_))));
}

#[test]
fn text_after_answer_ends_turn() {
    let demo = Template::load(&demo()).unwrap();
    assert_eq!(demo.after_answer().as_deref(), Some("<|im_end|>\n"));
    let other = template("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}").unwrap();
    assert_eq!(other.after_answer().as_deref(), Some("</s>"));
    assert_eq!(template("{{ raise_exception('no') }}").unwrap().after_answer(), None);
}

#[test]
fn hostile_templates_end_with_an_error() {
    for source in [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(1000000000) | list }}",
        "{{ 'x' * 100000000000 }}",
        "{{ nothing.at_all }}",
        "{{ messages | tojson(indent=nothing.x) }}",
        "{{ strftime_now('%!') }}",
        "{{ 'a'.split('') }}",
    ] {
        let refused = matches!(one(source), Err(ChatError::Template(_) | ChatError::Conversation(_)));
        assert!(refused, "{source}");
    }
}

#[test]
fn deeply_nested_values_do_not_overflow() {
    let nest = |then: &str| {
        let deep = "[".repeat(20) + "ns.x" + &"]".repeat(20);
        let nest = format!("{{% for i in range(10000) %}}{{% set ns.x = {deep} %}}{{% endfor %}}");
        one(&format!("{{% set ns = namespace(x=[]) %}}{nest}{then}"))
    };
    assert_eq!(nest("").unwrap(), "");
    assert_eq!(nest("{{ ns.x == [ns.x] }}").unwrap(), "False");
    assert_eq!(nest("{{ ns.x }}").unwrap().len(), 400_002);
    assert!(matches!(nest("{{ ns.x | tojson }}"), Err(ChatError::Conversation(_))));
}

#[test]
fn date_has_the_right_format() {
    let date = one("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    assert_eq!((date.len(), &date[4..5]), (10, "-"));
}

#[test]
fn prompt_that_opens_reasoning_is_detected() {
    for (prompt, open) in [
        ("a<think>\n", true),
        ("a<think>", true),
        ("<think>\n\n</think>\n\n", false),
        ("<think>\n\n", false),
        ("", false),
    ] {
        assert_eq!(Template::opens_in_reasoning(prompt), open, "{prompt:?}");
    }
}

static DEMO: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Tokenizer::load(&demo()).unwrap()));

#[test]
fn demo_model_matches_its_vectors() {
    let template = Template::load(&demo()).unwrap();
    let golden = read(&fixture("demo.json"));
    for case in golden.as_array().unwrap() {
        let text = render(&template, case).unwrap();
        assert_eq!(text, case["text"]);
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(DEMO.encode(&text).unwrap(), ids);
        assert_eq!(DEMO.decode(&ids), case["decoded"]);
    }
}

#[test]
fn tokens_have_bytes() {
    let think = DEMO.id("<think>").unwrap();
    let end = DEMO.id("<|im_end|>").unwrap();
    let space = DEMO.encode(" the").unwrap();
    assert_eq!(DEMO.decode(&[think, end]), "<think>", "special tokens are dropped, others stay");
    assert_eq!(DEMO.token(end).unwrap(), "<|im_end|>");
    assert_eq!(DEMO.token_bytes(end), b"<|im_end|>");
    assert_eq!(space.iter().flat_map(|id| DEMO.token_bytes(*id)).collect::<Vec<_>>(), b" the");
    assert!(DEMO.token(space[0]).unwrap().starts_with('Ġ'));
    let size = u32::try_from(DEMO.vocab_size()).unwrap();
    assert_eq!(
        (DEMO.token(size), DEMO.token_bytes(size), DEMO.decode(&[size, u32::MAX])),
        (None, vec![], String::new())
    );
    assert_eq!(DEMO.encode("").unwrap(), [] as [u32; 0]);
    assert!(Tokenizer::load(&fixture("features")).err().unwrap().to_string().contains("tokenizer.json"));
}

#[test]
fn long_runs_encode() {
    for text in [" ".repeat(300_000), " ".repeat(300_000) + "x", "\n".repeat(100_000), "a".repeat(100_000)] {
        assert_eq!(DEMO.decode(&DEMO.encode(&text).unwrap()), text);
    }
}

proptest! {
    #[test]
    fn text_survives_encoding(text in "[ -~\\n\\r\\té世😀\u{0}]{0,60}") {
        prop_assert_eq!(DEMO.decode(&DEMO.encode(&text).unwrap()), text);
    }

    #[test]
    fn streamed_ids_decode_as_the_whole(ids in prop::collection::vec(0u32..2100, 0..60)) {
        let mut decoder = Decoder::new(DEMO.clone());
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text += &decoder.finish();
        prop_assert_eq!(&text, &DEMO.decode(&ids));
        let bytes: Vec<u8> = ids.iter().filter(|id| !(2038..2042).contains(*id)).flat_map(|id| DEMO.token_bytes(*id)).collect();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn template_source_over_a_limit_is_refused() {
    for (source, reason) in [
        (format!("{{{{ {}x }}}}", "not ".repeat(5000)), "words"),
        (format!("{{{{ {}x }}}}", "- ".repeat(5000)), "words"),
        (format!("{{{{ x{} }}}}", "|trim".repeat(5000)), "words"),
        (format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(1000)), "elif"),
        ("x".repeat(2 << 20), "bytes"),
    ] {
        let error = template(&source).err().unwrap();
        assert!(matches!(&error, ChatError::Template(why) if why.contains(reason)), "{error}");
    }
}

#[test]
fn hostile_source_never_aborts_loading() {
    // These sources have the deepest nesting that the limits allow, or truncated or unbalanced tags.
    for source in [
        format!("{{{{ {}x{} }}}}", "(".repeat(990), ")".repeat(990)),
        format!("{{{{ {}x{} }}}}", "[".repeat(990), "]".repeat(990)),
        format!("{{{{ {}x }}}}", "not ".repeat(1990)),
        format!("{{{{ {}x }}}}", "-".repeat(1990)),
        format!("{{{{ x{} }}}}", "|trim".repeat(990)),
        format!("{{{{ x{} }}}}", "[0]".repeat(600)),
        format!("{{{{ {}1{} }}}}", "{1:".repeat(600), "}".repeat(600)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(500)),
        "{% if a %}".repeat(100_000),
        "{% for i in x %}".repeat(60_000),
        "{% macro m() %}".repeat(60_000),
        "{{ (".into(),
        "{{ ) not x }}".into(),
        "{% raw %}".into(),
        "{{ '".into(),
    ] {
        if let Ok(template) = template(&source) {
            let _ = render(&template, &json!({"messages": []}));
        }
    }
}

#[test]
fn prompt_over_its_limit_is_an_error() {
    let nested = format!("{{% set a = ['x'] %}}{}{{{{ a }}}}", "{% set a = [a, a] %}".repeat(40));
    for source in [
        nested,
        "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}".into(),
        format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "x".repeat(10000)),
    ] {
        let mut error = String::new();
        let taken = cpu_time_of(|| error = one(&source).unwrap_err().to_string());
        assert!(error.contains("the prompt is longer than"), "{error}");
        assert!(taken < std::time::Duration::from_secs(10), "{error}: {taken:?}");
    }
}

#[test]
fn expressions_and_filters_give_expected_text() {
    let joined =
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content + '!' * 3 %}{% endfor %}";
    let joined =
        format!("{joined}{{{{ ns.t|replace('!', '?') ~ ['a', 'b']|join('-') + '%3d'|format(7) + 1|string }}}}");
    assert_eq!(one(&joined).unwrap(), "hi???a-b  71");
    let named = "{{ 'a\nb'|indent(width=1) }}{{ [1, 2]|join(d='-') }}{{ [3, 1]|sort(reverse=true) }}{{ dict(a=1) }}";
    assert_eq!(one(named).unwrap(), "a\n b1-2[3, 1]{'a': 1}");
    assert_eq!(one("{{ 7 * 2 ** 3 }} {{ 9 // 2 * -2 }} {{ -1 * [1][0] }} {{ 'x'[::2] }}").unwrap(), "56 -8 -1 x");
}
