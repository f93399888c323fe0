use super::{valid, *};
use crate::chat::parser::{Delta, Parser};
use std::{path::Path, sync::LazyLock};

const EOS: u32 = 2040;

static GRAMMARS: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moestro-demo");
    GrammarCompiler::new(Arc::new(Tokenizer::load(&dir).unwrap()), &[EOS, 2038])
});

static SCHEMAS: LazyLock<Vec<Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../tests/fixtures/schemas.json")).unwrap());

fn text(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| GRAMMARS.tokenizer.token_bytes(id)).collect();
    String::from_utf8(bytes).unwrap()
}

fn allowed(next: &NextTokens) -> Vec<u32> {
    let NextTokens::Only(words) = next else { return (0..2038).collect() };
    (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// An answer of tokens drawn evenly from those allowed; after a while the ones that close something are preferred, so
/// that it ends.
fn wander(mut guide: TokenConstraint, seed: u64) -> Vec<u32> {
    let mut bits = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut ids = Vec::new();
    loop {
        let mut allowed = allowed(&guide.allowed().unwrap());
        // An exponent of a thousand is JSON, but no number to `f64`: none is drawn.
        let digit =
            ids.last().is_some_and(|&id| GRAMMARS.tokenizer.token_bytes(id).last().is_some_and(u8::is_ascii_digit));
        allowed.retain(|&id| !(digit && matches!(GRAMMARS.tokenizer.token_bytes(id).first(), Some(b'e' | b'E'))));
        assert!(!allowed.is_empty(), "no way on after {:?}", text(&ids));
        let closes = |id: &&u32| {
            let bytes = GRAMMARS.tokenizer.token_bytes(**id);
            **id == EOS || bytes.first().is_some_and(|byte| b"\"]}<n0/".contains(byte))
        };
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = (bits >> 33) as usize;
        let closing: Vec<u32> = allowed.iter().filter(closes).copied().collect();
        let tag = tag(&ids, &allowed).filter(|_| ids.len() > 60 && !draw.is_multiple_of(4));
        let from = if ids.len() > 60 && !draw.is_multiple_of(8) && !closing.is_empty() { &closing } else { &allowed };
        let drawn = tag.unwrap_or(from[draw / 8 % from.len()]);
        let id = if ids.len() > 90 && allowed.contains(&EOS) { EOS } else { drawn };
        if id == EOS || id == 2038 {
            return ids;
        }
        guide.accept(id).unwrap();
        ids.push(id);
        assert!(ids.len() < 20_000, "does not end: {:?}", &text(&ids)[..400]);
    }
}

/// The longest token that goes on with the tag that ends a string.
fn tag(ids: &[u32], allowed: &[u32]) -> Option<u32> {
    const TAG: &[u8] = b"</parameter>";
    let said: Vec<u8> = ids.iter().rev().take(12).rev().flat_map(|&id| GRAMMARS.tokenizer.token_bytes(id)).collect();
    let begun = (0..TAG.len()).rev().find(|&length| said.ends_with(&TAG[..length]))?;
    let goes_on = |id: &&u32| {
        let bytes = GRAMMARS.tokenizer.token_bytes(**id);
        !bytes.is_empty() && TAG[begun..].starts_with(&bytes)
    };
    allowed.iter().filter(goes_on).max_by_key(|id| GRAMMARS.tokenizer.token_bytes(**id).len()).copied()
}

fn json_form(schema: &Value, strict: bool) -> OutputFormat {
    OutputFormat { content: ContentFormat::Json { schema: schema.clone(), strict }, tools: None }
}

#[test]
fn whatever_is_drawn_has_the_schema() {
    assert!(SCHEMAS.len() >= 60);
    let mut answers = 0;
    for case in SCHEMAS.iter() {
        let (schema, name) = (&case["schema"], &case["name"]);
        let guide = GRAMMARS.compile(&json_form(schema, case["strict"] == true), false, None);
        let guide = guide.unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
        for seed in 0..17 {
            let answer = text(&wander(guide.clone(), seed));
            let value: Value = serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{name}: {e}: {answer}"));
            let wrong = valid::errors(schema, &value, schema);
            assert!(wrong.is_empty() || case["strict"] == false, "{name}: {wrong:?}: {answer}");
            answers += 1;
        }
    }
    assert!(answers >= 1000);
}

#[test]
fn an_integer_ends() {
    for schema in [
        json!({"type": "integer"}),
        json!({"type": ["integer", "null"]}),
        json!({"type": "integer", "minimum": 18}),
        json!({"type": "integer", "exclusiveMaximum": -3}),
        json!({"type": "integer", "multipleOf": 7}),
        json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}),
    ] {
        for sign in ["", "-"] {
            let mut guide = GRAMMARS.compile(&json_form(&schema, true), false, None).unwrap();
            let mut said = Vec::new();
            loop {
                let allowed = allowed(&guide.allowed().unwrap());
                // The sign, then nines: the largest there are.
                let bytes = |id: u32| GRAMMARS.tokenizer.token_bytes(id);
                let goes_on = |id: &u32| {
                    let (begins, bytes) = (said.is_empty() && bytes(*id) == sign.as_bytes(), bytes(*id));
                    begins || !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
                };
                let next = allowed.into_iter().filter(goes_on).max_by_key(|&id| (bytes(id) == b"-", bytes(id)));
                let Some(id) = next else { break };
                guide.accept(id).unwrap();
                said.push(id);
                assert!(said.len() <= 20, "{schema}: {}", text(&said));
            }
            assert!(text(&said).is_empty() || text(&said).parse::<i64>().is_ok(), "{schema}: {}", text(&said));
        }
    }
    let far = json!({"type": "integer", "minimum": 2e18, "maximum": 3e18});
    let answer = text(&wander(GRAMMARS.compile(&json_form(&far, true), false, None).unwrap(), 1));
    assert!((2_000_000_000_000_000_000..=3_000_000_000_000_000_000i64).contains(&answer.parse().unwrap()), "{answer}");
}

fn tool(name: &str, parameters: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[test]
fn whatever_is_drawn_is_a_call_with_valid_arguments() {
    let objects: Vec<_> = SCHEMAS.iter().filter(|case| case["schema"]["type"] == "object").collect();
    let mut calls = 0;
    for (at, case) in objects.iter().enumerate() {
        let (schema, name) = (&case["schema"], &case["name"]);
        let tools = [tool("f", schema), tool("other", &json!({"type": "object", "properties": {}}))];
        let choice = tools.iter().cloned().enumerate().collect();
        let form = OutputFormat {
            content: ContentFormat::Nothing,
            tools: Some(AllowedTools { tools: choice, parallel: at.is_multiple_of(2) }),
        };
        let guide = GRAMMARS.compile(&form, false, None).unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
        for seed in 0..10 {
            let answer = text(&wander(guide.clone(), seed));
            let mut parser = Parser::new(false, &tools);
            let mut said = Vec::<(String, String)>::new();
            for delta in parser.push(&answer).into_iter().chain(parser.finish(false)) {
                match delta {
                    Delta::ToolCall { name, .. } => said.push((name, String::new())),
                    Delta::Arguments { json, .. } => said.last_mut().unwrap().1 += &json,
                    other => panic!("{name}: {other:?} in {answer}"),
                }
            }
            assert!(!said.is_empty() && (at.is_multiple_of(2) || said.len() == 1), "{name}: {answer}");
            for (function, arguments) in said {
                let value: Value = serde_json::from_str(&arguments).unwrap();
                let wrong = valid::errors(schema, &value, schema);
                assert!(
                    function == "other" || wrong.is_empty() || case["strict"] == false,
                    "{name}: {wrong:?}: {answer}"
                );
                calls += 1;
            }
        }
    }
    assert!(calls > 400, "{calls}");
}
