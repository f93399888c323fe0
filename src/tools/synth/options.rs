//! Dimensions and options of a synthetic checkpoint.

use crate::error::StoreError;

/// Weights that share a scale and a bias.
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
}

impl Dimensions {
    /// Qwen3.5-35B-A3B and Qwen3.6-35B-A3B.
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
        }
    }

    /// Qwen3.5-122B-A10B.
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

    /// Qwen3.5-397B-A17B.
    pub fn of_397b() -> Self {
        Self { hidden: 4096, layers: 60, experts: 512, experts_per_token: 10, ..Self::of_122b() }
    }

    /// Dimensions of the model that `--like` names.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "35b" => Some(Self::of_35b()),
            "122b" => Some(Self::of_122b()),
            "397b" => Some(Self::of_397b()),
            _ => None,
        }
    }

    pub fn check(&self) -> Result<(), StoreError> {
        let refuse = |why: String| Err(StoreError::Other(why));
        if self.layers == 0 || self.vocab == 0 {
            return refuse("a model needs at least one layer and one token".into());
        }
        if self.experts < self.experts_per_token {
            let (e, k) = (self.experts, self.experts_per_token);
            return refuse(format!("{e} experts are too few: each token is routed to {k} of them"));
        }
        let inputs = [self.hidden, self.heads * self.head_dim, self.linear_value_heads * self.linear_head_dim];
        if inputs.iter().chain([&self.expert_hidden, &self.shared_hidden]).any(|&n| n == 0 || !n.is_multiple_of(GROUP))
        {
            return refuse(format!("every matrix needs a multiple of {} columns", GROUP));
        }
        Ok(())
    }
}

/// The checkpoint to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    pub dimensions: Dimensions,
    /// The same seed and dimensions give the same bytes.
    pub seed: u64,
    /// Standard deviation of the logarithm of the routers' row gains. With 0 all experts are about equally likely; larger values
    /// concentrate lookups on few experts.
    pub router_skew: f32,
    pub eos_token_ids: Vec<u32>,
    /// Maximum size of a shard in bytes.
    pub shard: u64,
    /// Threads that make and write blocks.
    pub threads: usize,
    /// Name and content of other files to write: tokenizer and template.
    pub extras: Vec<(String, Vec<u8>)>,
}
