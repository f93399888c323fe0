//! Fuzzes output formats: the bytes choose a schema, a regular expression, a Lark grammar or tools, whose tokens are followed
//! for a few steps.
#![no_main]

#[path = "../../tests/support/formats.rs"]
mod formats;

use formats::Source;
use libfuzzer_sys::fuzz_target;
use moestro::chat::{
    Tokenizer,
    grammar::{AllowedTools, ContentFormat, GrammarCompiler, NextTokens, OutputFormat},
};
use serde_json::Value;
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

/// `<|im_end|>` of the demo model.
const EOS: u32 = 2040;
const STEPS: usize = 12;

fn compiler() -> &'static GrammarCompiler {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/moestro-demo");
        GrammarCompiler::new(Arc::new(Tokenizer::load(&demo).expect("the demo's tokenizer")), &[EOS])
    })
}

/// The format that the fields of a chat request ask for.
fn format(fields: &Value) -> OutputFormat {
    let strict = |inner: &Value| inner["strict"] == true;
    if let Some(tools) = fields["tools"].as_array() {
        let tools = tools.iter().cloned().enumerate().collect();
        return OutputFormat { content: ContentFormat::Nothing, tools: Some(AllowedTools { tools, parallel: true }) };
    }
    let format = &fields["response_format"];
    let content = match format["type"].as_str() {
        Some("regex") => ContentFormat::Regex(format["regex"].as_str().unwrap_or_default().into()),
        Some("lark") => ContentFormat::Lark(format["lark"].as_str().unwrap_or_default().into()),
        Some(_) => {
            let inner = &format["json_schema"];
            ContentFormat::Json { schema: inner["schema"].clone(), strict: strict(inner) }
        }
        None => ContentFormat::Json { schema: fields["guided_json"].clone(), strict: true },
    };
    OutputFormat { content, tools: None }
}

fuzz_target!(|data: &[u8]| {
    let fields = formats::fields(&mut Source::new(data, 0));
    let Ok(mut constraint) = compiler().compile(&format(&fields), false, None) else { return };
    for step in 0..STEPS {
        let Ok(NextTokens::Only(words)) = constraint.allowed() else { return };
        let allowed: Vec<u32> =
            (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let Some(&id) = allowed.get(usize::from(data.get(step).copied().unwrap_or(0)) % allowed.len().max(1)) else {
            return;
        };
        if id == EOS || constraint.accept(id).is_err() {
            return;
        }
    }
});
