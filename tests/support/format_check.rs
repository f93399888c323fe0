//! Compiles a random output format and follows it for a few tokens, as an answer would.

use moestro_chat::{
    Tokenizer,
    grammar::{AllowedTools, CancelFlag, ContentFormat, FormatError, GrammarCompiler, NextTokens, OutputFormat},
};
use serde_json::Value;
use std::sync::Arc;
use test_support::{demo, formats::Source};

/// `<|im_end|>` of the demo model.
const EOS: u32 = 2040;
const STEPS: usize = 12;

/// The compiler for the demo model.
pub fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(Arc::new(Tokenizer::load(&demo()).expect("the demo's tokenizer")), &[EOS])
}

/// The output format that the fields of a chat request select.
pub fn format(fields: &Value) -> OutputFormat {
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
            ContentFormat::Json { schema: inner["schema"].clone(), strict: inner["strict"] == true }
        }
        None => ContentFormat::Json { schema: fields["guided_json"].clone(), strict: true },
    };
    OutputFormat { content, tools: None }
}

/// Compiles the format of `fields` and follows a few tokens that `source` chooses. Calls `measured` with the name of
/// each step.
pub fn follow(
    compiler: &GrammarCompiler,
    fields: &Value,
    source: &mut Source,
    mut measured: impl FnMut(&'static str),
) -> Result<(), FormatError> {
    let compiled = compiler.compile(&CancelFlag::default(), &format(fields), false, None);
    measured("compile");
    let mut constraint = compiled?;
    for _ in 0..STEPS {
        let allowed = constraint.allowed();
        measured("mask");
        // The server answers a request whose format causes this error with status 400.
        let Ok(NextTokens::Only(words)) = allowed else { break };
        let bits = words.iter().zip((0u32..).step_by(32));
        let allowed: Vec<u32> = bits
            .flat_map(|(word, from)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| from + bit))
            .collect();
        if allowed.is_empty() {
            break;
        }
        let id = allowed[source.below(allowed.len())];
        if id == EOS || constraint.accept(id).is_err() {
            break;
        }
        measured("token");
    }
    Ok(())
}
