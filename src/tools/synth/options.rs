//! Dimensions and options of a synthetic checkpoint.

use moestro_base::error::StoreError;

/// Number of weights that share a scale and a bias.
pub const GROUP: usize = 64;

/// Dimensions of a model, as in `config.json`. Every fourth layer has full attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimensions {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub linear_key_heads: usize,
    pub linear_value_heads: usize,
    pub linear_head_dim: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub expert_hidden: usize,
    pub shared_hidden: usize,
    pub vocab: usize,
    /// Width of a dense feed-forward layer. If this is set, the model has no experts.
    pub dense: Option<usize>,
    /// True if the output head uses the matrix of the embedding.
    pub tied: bool,
    /// Dimensions of the parts that only qwen4_exp has.
    pub streams: Option<StreamDimensions>,
}

/// Dimensions of qwen4_exp's residual streams, indexer and n-gram table.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamDimensions {
    pub count: usize,
    pub rank: usize,
    pub indexer_heads: usize,
    pub indexer_dim: usize,
    pub indexer_budget: usize,
    pub indexer_ratio: usize,
    /// Number of values in all rows that one token reads.
    pub ngram_width: usize,
    /// Approximate number of rows of the n-gram table.
    pub ngram_rows: u64,
}

/// Number of rows that a token reads from an n-gram table: 8 rows for the bigram and 8 rows for the trigram.
pub const NGRAM_HEADS: u64 = 16;

impl Dimensions {
    /// Dimensions of Qwen3.5-35B-A3B and Qwen3.6-35B-A3B.
    pub fn of_35b() -> Self {
        Self {
            hidden: 2048,
            layers: 40,
            heads: 16,
            kv_heads: 2,
            head_dim: 256,
            linear_key_heads: 16,
            linear_value_heads: 32,
            linear_head_dim: 128,
            experts: 256,
            experts_per_token: 8,
            expert_hidden: 512,
            shared_hidden: 512,
            vocab: 248_320,
            dense: None,
            tied: false,
            streams: None,
        }
    }

    /// Dimensions of Qwen3.5-122B-A10B.
    pub fn of_122b() -> Self {
        Self {
            hidden: 3072,
            layers: 48,
            heads: 32,
            linear_value_heads: 64,
            expert_hidden: 1024,
            shared_hidden: 1024,
            ..Self::of_35b()
        }
    }

    /// Dimensions of Qwen3.5-397B-A17B.
    pub fn of_397b() -> Self {
        Self { hidden: 4096, layers: 60, experts: 512, experts_per_token: 10, ..Self::of_122b() }
    }

    /// Dimensions of Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B.
    pub fn of_27b() -> Self {
        Self {
            hidden: 5120,
            layers: 64,
            heads: 24,
            kv_heads: 4,
            linear_value_heads: 48,
            experts: 0,
            experts_per_token: 0,
            dense: Some(17408),
            ..Self::of_35b()
        }
    }

    /// Dimensions of Qwen3.5-9B.
    pub fn of_9b() -> Self {
        Self { hidden: 4096, layers: 32, heads: 16, linear_value_heads: 32, dense: Some(12288), ..Self::of_27b() }
    }

    /// Dimensions of Qwen3.5-4B.
    pub fn of_4b() -> Self {
        Self { hidden: 2560, dense: Some(9216), tied: true, ..Self::of_9b() }
    }

    /// Dimensions of Qwen3.8-Flash-Next. The real n-gram table has 320 million rows. The default for a synthetic table
    /// is smaller.
    pub fn of_flash_next() -> Self {
        Self {
            hidden: 2560,
            layers: 48,
            heads: 24,
            linear_value_heads: 48,
            experts: 512,
            experts_per_token: 10,
            expert_hidden: 640,
            shared_hidden: 640,
            streams: Some(StreamDimensions {
                count: 4,
                rank: 320,
                indexer_heads: 4,
                indexer_dim: 128,
                indexer_budget: 2048,
                indexer_ratio: 4,
                ngram_width: 2560,
                ngram_rows: 8_000_000,
            }),
            ..Self::of_35b()
        }
    }

    /// Dimensions of the model that `--like` names.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "35b" => Some(Self::of_35b()),
            "122b" => Some(Self::of_122b()),
            "397b" => Some(Self::of_397b()),
            "27b" => Some(Self::of_27b()),
            "9b" => Some(Self::of_9b()),
            "4b" => Some(Self::of_4b()),
            "flash-next" => Some(Self::of_flash_next()),
            _ => None,
        }
    }

    pub fn check(&self) -> Result<(), StoreError> {
        let refuse = |why: String| Err(StoreError::Other(why));
        if self.layers == 0 || self.vocab == 0 {
            return refuse("a model needs at least one layer and one token".into());
        }
        if self.dense.is_none() && (self.experts < self.experts_per_token || self.experts == 0) {
            let e = self.experts;
            let k = self.experts_per_token;
            return refuse(format!("{e} experts are too few: each token is routed to {k} of them"));
        }
        let inputs = [self.hidden, self.heads * self.head_dim, self.linear_value_heads * self.linear_head_dim];
        let inner = match &self.dense {
            Some(dense) => vec![dense],
            None => vec![&self.expert_hidden, &self.shared_hidden],
        };
        if inputs.iter().chain(inner).any(|&n| n == 0 || !n.is_multiple_of(GROUP)) {
            return refuse(format!("every matrix needs a multiple of {} columns", GROUP));
        }
        Ok(())
    }
}

#[cfg(test)]
impl Dimensions {
    /// Small dimensions, a sixteenth of the width of the 35B. The checkpoint has all kinds of tensors that the 35B has.
    pub fn narrow(layers: usize, experts: usize) -> Self {
        Self {
            hidden: 128,
            layers,
            heads: 2,
            kv_heads: 1,
            head_dim: 64,
            linear_key_heads: 2,
            linear_value_heads: 4,
            linear_head_dim: 32,
            experts,
            experts_per_token: 4,
            expert_hidden: 64,
            shared_hidden: 64,
            vocab: 300,
            ..Self::of_35b()
        }
    }
}

/// Options of the checkpoint to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    pub dimensions: Dimensions,
    /// Seed of the random weights. The same seed and dimensions give the same bytes.
    pub seed: u64,
    /// Standard deviation of the logarithm of the routers' row gains. With 0, all experts are about equally likely.
    /// Larger values concentrate lookups on few experts.
    pub router_skew: f32,
    pub eos_token_ids: Vec<u32>,
    /// Maximum size of a shard in bytes.
    pub shard: u64,
    /// Number of threads that compute and write blocks.
    pub threads: usize,
    /// Name and content of other files to write, such as tokenizer and template.
    pub extras: Vec<(String, Vec<u8>)>,
}
