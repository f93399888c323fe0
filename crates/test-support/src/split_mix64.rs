//! The random number generator SplitMix64 (Steele, Lea and Flood 2014), independent of the implementation in
//! `crates/base`.

/// Advances `state` and returns the next 64 random bits.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
