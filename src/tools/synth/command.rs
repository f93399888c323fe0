//! `moestro synth`: writes a checkpoint with a real model's dimensions and random weights.

use crate::command::{progress, text::print_line};
use crate::{
    cli, demo,
    error::CommandError,
    tools::synth::{self, Dimensions, StreamDimensions, SynthOptions, SynthSummary},
};
use moestro_base::{error::StoreError, platform::os};
use moestro_model::plan::Size;
use std::time::Instant;

/// Files of the demo model that are copied, so that `serve` and `bench` accept the checkpoint.
const DEMO_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Size of a shard in bytes. The same as in MLX's checkpoints.
const SHARD: u64 = 5 << 30;

pub fn run(args: &cli::tool_args::SynthArgs) -> Result<(), CommandError> {
    let options = options(args)?;
    let bar = progress::bytes(synth::size(&options), "writing");
    let begin = Instant::now();
    let written = synth::write(&args.out, &options, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let SynthSummary { bytes, tensors, shards } = written?;
    let seconds = begin.elapsed().as_secs_f64();
    let out = args.out.display();
    let size = Size(bytes);
    let rate = bytes as f64 / seconds / 1e6;
    let files = if shards == 1 { "shard" } else { "shards" };
    print_line(format_args!("{out}: {size} in {tensors} tensors and {shards} {files}, {seconds:.1} s, {rate:.0} MB/s"));
    Ok(())
}

fn options(args: &cli::tool_args::SynthArgs) -> Result<SynthOptions, CommandError> {
    let model = dimensions(&args.like)?;
    let dimensions = Dimensions {
        layers: args.layers.unwrap_or(model.layers),
        experts: args.experts.unwrap_or(model.experts),
        vocab: args.vocab.unwrap_or(model.vocab),
        streams: model
            .streams
            .map(|streams| StreamDimensions { ngram_rows: args.ngram_rows.unwrap_or(streams.ngram_rows), ..streams }),
        ..model
    };
    let borrowed = |name: &str| demo::file(name).unwrap_or_default();
    let broken =
        |error: serde_json::Error| StoreError::Other(format!("cannot parse the JSON of the demo model: {error}"));
    let tokenizer: serde_json::Value = serde_json::from_slice(borrowed("tokenizer.json")).map_err(broken)?;
    let tokens = tokens(&tokenizer);
    if dimensions.vocab < tokens {
        let why = format!("--vocab {} is too small: the tokenizer has {tokens} tokens", dimensions.vocab);
        return Err(CommandError::Usage(why));
    }
    let generation: serde_json::Value = serde_json::from_slice(borrowed("generation_config.json")).map_err(broken)?;
    let ends = generation["eos_token_id"].as_array().into_iter().flatten();
    Ok(SynthOptions {
        dimensions,
        seed: args.seed,
        router_skew: args.router_skew,
        eos_token_ids: ends.filter_map(|id| id.as_u64()?.try_into().ok()).collect(),
        shard: SHARD,
        // With more threads, the threads would only wait for the disk.
        threads: os::physical_cores().min(4),
        extras: DEMO_FILES.map(|name| (name.to_owned(), borrowed(name).to_vec())).into(),
    })
}

/// Dimensions of the model that `--like` names.
pub fn dimensions(like: &str) -> Result<Dimensions, CommandError> {
    Dimensions::of(like)
        .ok_or_else(|| CommandError::Usage(format!("unknown model {like} for --like; see moestro synth --help")))
}

/// Highest token id plus one.
fn tokens(tokenizer: &serde_json::Value) -> usize {
    let words = tokenizer["model"]["vocab"].as_object().into_iter().flat_map(|vocab| vocab.values());
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten().map(|token| &token["id"]);
    let last = words.chain(added).filter_map(serde_json::Value::as_u64).max();
    last.map_or(0, |id| id as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(like: &str, vocab: usize) -> cli::tool_args::SynthArgs {
        cli::tool_args::SynthArgs {
            out: "unused".into(),
            like: like.into(),
            layers: Some(4),
            experts: None,
            vocab: Some(vocab),
            seed: 1,
            router_skew: 0.5,
            ngram_rows: None,
        }
    }

    #[test]
    fn demo_tokenizer_is_copied() {
        let options = options(&args("122b", 2048)).unwrap();
        assert_eq!((options.dimensions.hidden, options.dimensions.layers), (3072, 4));
        assert_eq!(options.eos_token_ids, [2040, 2038]);
        assert!(options.extras.iter().all(|(_, content)| !content.is_empty()));
    }

    #[test]
    fn vocabulary_smaller_than_tokenizer_is_refused() {
        let text = super::options(&args("35b", 2047)).unwrap_err().to_string();
        assert!(text.contains("2048 tokens"), "{text}");
    }
}
