//! A footprint for the tests of this crate and of the program.

use super::ModelFootprint;

/// The footprint of Qwen3.5-35B-A3B with 4-bit weights.
pub fn model_35b() -> ModelFootprint {
    ModelFootprint {
        trunk: 1_390_000_000,
        gathered: 286_000_000,
        head: 286_000_000,
        expert: 1_769_472,
        slot: 1_785_856,
        layers: 40,
        experts: 256,
        experts_per_token: 8,
        kv_per_token: 40_960,
        state: 66_000_000,
        sequence: 70_000_000,
        sequence_per_row: 0,
        workspace_per_row: 300_000,
        workspace_fixed: 4_000_000,
        context: 262_144,
        draft: Default::default(),
        vision: 0,
    }
}
