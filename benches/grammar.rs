//! Time to compile a schema and an agent's 40 tools, and to compute the mask of allowed tokens along random answers. A
//! model's answers reach fewer new states of the grammar. The server computes masks on a separate thread during the
//! forward pass, so it rarely waits for one.
//!
//! The demo's vocabulary is small. `MOESTRO_TOKENIZER=DIR cargo bench --bench grammar` uses another one.

use moestro_chat::{
    Tokenizer,
    grammar::{AllowedTools, CancelFlag, ContentFormat, GrammarCompiler, NextTokens, OutputFormat},
};
use serde_json::{Value, json};
use std::{path::PathBuf, sync::Arc, time::Instant};

fn main() {
    let dir = std::env::var_os("MOESTRO_TOKENIZER").map_or_else(test_support::demo, PathBuf::from);
    let tokenizer = Arc::new(Tokenizer::load(&dir).expect("a tokenizer"));
    let eos = tokenizer.id("<|im_end|>").expect("<|im_end|>");
    let start = Instant::now();
    let grammars = GrammarCompiler::new(tokenizer.clone(), &[eos]);
    let text = OutputFormat { content: ContentFormat::Text, tools: None };
    grammars.compile(&CancelFlag::default(), &text, false, None).expect("any text");
    println!("{} tokens, sorted in {:.0} ms", tokenizer.vocab_size(), start.elapsed().as_secs_f64() * 1e3);
    let cases: Vec<Value> =
        serde_json::from_str(include_str!("../tests/fixtures/schemas.json")).expect("the schemas of the tests");
    let schema = |case: &Value| {
        let content = ContentFormat::Json { schema: case["schema"].clone(), strict: false };
        (case["name"].as_str().expect("a name").to_owned(), OutputFormat { content, tools: None })
    };
    let objects = cases.iter().map(|case| &case["schema"]).filter(|schema| schema["type"] == "object");
    let tool = |(at, schema)| (at, json!({"function": {"name": format!("tool_{at}"), "parameters": schema}}));
    let tools = AllowedTools { tools: objects.cycle().take(40).enumerate().map(tool).collect(), parallel: true };
    let calls = OutputFormat { content: ContentFormat::Nothing, tools: Some(tools) };
    println!("schema,compile_us,tokens,median_us,p99_us,mean_us");
    for (name, form) in cases.iter().map(schema).chain([("40 tools".to_owned(), calls)]) {
        let start = Instant::now();
        let guide = grammars.compile(&CancelFlag::default(), &form, false, None).expect("a schema that compiles");
        let compile = start.elapsed().as_secs_f64() * 1e6;
        let mut times = Vec::new();
        for seed in 0..8u64 {
            let (mut guide, mut bits) = (guide.clone(), seed * 2 + 1);
            for _ in 0..64 {
                let start = Instant::now();
                let next = guide.allowed().expect("a mask");
                times.push(start.elapsed().as_secs_f64() * 1e6);
                let NextTokens::Only(words) = next else { break };
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let drawn = (0..words.len() as u32 * 32)
                    .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
                    .nth((bits >> 33) as usize % count.max(1) as usize);
                match drawn {
                    Some(id) if id != eos => guide.accept(id).expect("an allowed token"),
                    _ => break,
                }
            }
        }
        times.sort_by(f64::total_cmp);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        println!("{name:?},{compile:.0},{},{median:.1},{late:.1},{mean:.1}", times.len());
    }
}
