//! Fuzzes output formats: the bytes choose a schema, a regular expression, a Lark grammar or tools, whose tokens are
//! followed for a few steps. Run it with `-timeout=10 -rss_limit_mb=1024`.
#![no_main]

#[path = "../../tests/support/format_check.rs"]
mod format_check;

use test_support::formats::Source;
use libfuzzer_sys::fuzz_target;
use moestro_chat::grammar::GrammarCompiler;
use std::sync::OnceLock;

fuzz_target!(|data: &[u8]| {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    let compiler = COMPILER.get_or_init(format_check::compiler);
    let mut source = Source::new(data, 0);
    let fields = test_support::formats::fields(&mut source);
    // A refused format is as good as one that compiles.
    let _ = format_check::follow(compiler, &fields, &mut source, |_| ());
});
