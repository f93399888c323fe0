//! The kernels' text, embedded: what Metal, or NVIDIA's compiler, compiles at start.

/// Files of `kernels/`, each compiled with the shim, `codes.metal` and `tiles.metal` in front.
pub const FILES: [(&str, &str); 7] = [
    ("attend", include_str!("../../kernels/attend.metal")),
    ("delta", include_str!("../../kernels/delta.metal")),
    ("experts", include_str!("../../kernels/experts.metal")),
    ("linear", include_str!("../../kernels/linear.metal")),
    ("norm", include_str!("../../kernels/norm.metal")),
    ("route", include_str!("../../kernels/route.metal")),
    ("weights", include_str!("../../kernels/weights.metal")),
];

/// Reading packed weights: part of every file.
pub const CODES: &str = include_str!("../../kernels/codes.metal");

/// Products on matrix units: part of every file.
pub const TILES: &str = include_str!("../../kernels/tiles.metal");

/// The dialect's words in Metal.
pub const METAL: &str = include_str!("../../kernels/shim/metal.h");

/// The dialect's words in CUDA.
pub const CUDA: &str = include_str!("../../kernels/shim/cuda.h");

/// One file as CUDA compiles it.
pub fn cuda(text: &str) -> String {
    format!("{CUDA}\n{CODES}\n{TILES}\n{text}")
}

/// One file as Metal compiles it.
pub fn metal(text: &str) -> String {
    format!("{METAL}\n{CODES}\n{TILES}\n{text}")
}
