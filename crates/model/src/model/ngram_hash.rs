//! Computes the rows of an n-gram table that belong to a token: hashes of the token and of the tokens before it.
//!
//! ```text
//! mix_s = t_0 m_0 ^ t_1 m_1 ^ ... ^ t_(s-1) m_(s-1)          t_0: the token, t_1: the token before it
//! row of head j of the s-grams = mix_s mod V_h + sum of the V before h,  h = (s - 2) heads + j
//! ```
//! An n-gram does not reach over an end-of-text token: all tokens before such a token also count as end-of-text.
//! Positions before the start count as end-of-text as well. Multipliers come from SplitMix64, the moduli V are primes.
//! All numbers are integers below 2^63.

use moestro_base::platform::split_mix64::{INCREMENT, SplitMix64};

/// An n-gram table and how its rows are added to the residual streams.
#[derive(Debug, Clone, PartialEq)]
pub struct NgramShape {
    /// The layer before which the rows are added.
    pub layer: usize,
    /// Index of the table among all tables of the model.
    pub index: usize,
    /// Number of tokens of the longest n-gram.
    pub size: usize,
    /// Number of rows per token for each n-gram length.
    pub heads: usize,
    /// Total number of values in all rows of a token.
    pub width: usize,
    /// Lower bound of the moduli, which are primes.
    pub base: u64,
    /// The number of rows of the table is a multiple of this.
    pub divisor: u64,
    pub seed: u64,
    /// The token that separates texts.
    pub eos: u32,
    pub vocab: u64,
    /// Number of weights of the convolution, which are `size` tokens apart.
    pub conv_width: usize,
    /// The file of the table, if it is not in the shards.
    pub file: String,
}

impl NgramShape {
    /// Number of rows per token.
    pub fn table_heads(&self) -> usize {
        (self.size - 1) * self.heads
    }

    /// Number of earlier rows that one output of the convolution depends on.
    pub fn history(&self) -> usize {
        (self.conv_width - 1) * self.size
    }
}

/// The constants of a table's hash.
#[derive(Debug, Clone, PartialEq)]
pub struct NgramHash {
    pub multipliers: Vec<u64>,
    /// The modulus of each head.
    pub sizes: Vec<u64>,
    /// The first row of each head.
    pub offsets: Vec<u64>,
    /// Number of rows of the table.
    pub rows: u64,
    eos: u32,
    heads: usize,
}

impl NgramHash {
    pub fn new(shape: &NgramShape) -> Self {
        let half = (i64::MAX as u64 / shape.vocab / 2).max(1);
        let start = shape.seed.wrapping_add(10007 * shape.index as u64);
        let multiplier = |at: u64| {
            let mut random = SplitMix64(start.wrapping_add(INCREMENT.wrapping_mul(at + 1)));
            2 * (random.bits() % half) + 1
        };
        let heads = shape.table_heads();
        let sizes: Vec<u64> = primes(shape.base).skip(shape.index * heads).take(heads).collect();
        let mut rows = 0;
        let mut offsets = Vec::with_capacity(sizes.len());
        for size in &sizes {
            offsets.push(rows);
            rows += size;
        }
        Self {
            multipliers: (0..shape.size as u64).map(multiplier).collect(),
            sizes,
            offsets,
            rows: rows.next_multiple_of(shape.divisor),
            eos: shape.eos,
            heads: shape.heads,
        }
    }

    /// The row numbers of each of `ids`, head by head. `before` has the last `size - 1` tokens before `ids`, or fewer
    /// at the start of a sequence.
    pub fn rows_of(&self, before: &[u32], ids: &[u32]) -> Vec<u64> {
        let mut rows = Vec::with_capacity(ids.len() * self.sizes.len());
        for (at, id) in ids.iter().enumerate() {
            let mut earlier = ids[..at].iter().rev().chain(before.iter().rev()).copied();
            let mut mix = u64::from(*id).wrapping_mul(self.multipliers[0]);
            let mut cut = false;
            for (length, multiplier) in self.multipliers[1..].iter().enumerate() {
                let token = earlier.next().unwrap_or(self.eos);
                cut |= token == self.eos;
                mix ^= u64::from(if cut { self.eos } else { token }).wrapping_mul(*multiplier);
                let heads = length * self.heads..(length + 1) * self.heads;
                rows.extend(heads.map(|head| mix % self.sizes[head] + self.offsets[head]));
            }
        }
        rows
    }
}

/// Number of rows of the first table in a model like the released one, but whose primes start at `base`.
pub fn ngram_rows(base: u64) -> u64 {
    primes(base).take(16).sum::<u64>().next_multiple_of(128)
}

/// The primes from `base` on.
fn primes(base: u64) -> impl Iterator<Item = u64> {
    let is_prime = |n: &u64| *n >= 2 && (2..).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    (base..).filter(is_prime)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Test vectors from transformers' implementation: the released constants, a second table, and small tables.
    fn vectors() -> Vec<Value> {
        let text = include_str!("../../../../tests/fixtures/qwen4_exp/hash_vectors.json");
        let json: Value = serde_json::from_str(text).unwrap();
        json["cases"].as_array().unwrap().clone()
    }

    fn shape(case: &Value) -> NgramShape {
        let number = |key: &str| case["config"][key].as_u64().unwrap();
        let eos = &case["config"]["eos_token_id"];
        NgramShape {
            layer: 1,
            index: case["ple_index"].as_u64().unwrap() as usize,
            size: number("ngram_size") as usize,
            heads: number("heads_per_ngram") as usize,
            width: 2560,
            base: number("ngram_vocab_size_base"),
            divisor: number("make_ngram_vocab_size_divisible_by"),
            seed: case["config"].get("seed").and_then(Value::as_u64).unwrap_or(1234),
            eos: eos.get(0).unwrap_or(eos).as_u64().unwrap() as u32,
            vocab: number("vocab_size"),
            conv_width: 4,
            file: String::new(),
        }
    }

    fn numbers(list: &Value) -> Vec<u64> {
        list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
    }

    #[test]
    fn constants_match_transformers() {
        for case in vectors() {
            let hash = NgramHash::new(&shape(&case));
            assert_eq!(hash.multipliers, numbers(&case["multipliers"]), "{}", case["name"]);
            assert_eq!(hash.sizes, numbers(&case["vocab_sizes"]), "{}", case["name"]);
            assert_eq!(hash.offsets, numbers(&case["offsets"]), "{}", case["name"]);
            assert_eq!(hash.rows, case["padded_rows"].as_u64().unwrap(), "{}", case["name"]);
        }
    }

    #[test]
    fn rows_match_transformers_for_any_split() {
        let mut positions = 0;
        for case in vectors() {
            let hash = NgramHash::new(&shape(&case));
            for sequence in case["sequences"].as_array().unwrap() {
                let ids: Vec<u32> = numbers(&sequence["tokens"]).into_iter().map(|id| id as u32).collect();
                let expected: Vec<u64> = sequence["rows"].as_array().unwrap().iter().flat_map(numbers).collect();
                for cut in 0..=ids.len() {
                    let (first, rest) = ids.split_at(cut);
                    let rows = [hash.rows_of(&[], first), hash.rows_of(first, rest)].concat();
                    assert_eq!(rows, expected, "{}: {ids:?} cut at {cut}", case["name"]);
                }
                positions += ids.len();
            }
        }
        assert!(positions > 79, "{positions}");
    }

    #[test]
    fn other_seed_changes_every_multiplier() {
        let case = &vectors()[0];
        let real = shape(case);
        let other = NgramShape { seed: 0, ..shape(case) };
        assert!(NgramHash::new(&real).multipliers.iter().zip(&NgramHash::new(&other).multipliers).all(|(a, b)| a != b));
    }
}
