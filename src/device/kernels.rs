//! Source text of the kernels, embedded in the binary. Metal or NVRTC compiles this text at run time.

/// Name and text of each kernel file. Before compilation, the shim, `quant.metal` and usually `tiles.metal` (see
/// [`compile`]) are inserted at the start of the text.
pub const FILES: [(&str, &str); 12] = [
    ("attention", include_str!("../../kernels/attention.metal")),
    ("attention_prefill", include_str!("../../kernels/attention_prefill.metal")),
    ("block_attention", include_str!("../../kernels/block_attention.metal")),
    ("delta_net", include_str!("../../kernels/delta_net.metal")),
    ("embedding", include_str!("../../kernels/embedding.metal")),
    ("kv_quant", include_str!("../../kernels/kv_quant.metal")),
    ("linear", include_str!("../../kernels/linear.metal")),
    ("moe", include_str!("../../kernels/moe.metal")),
    ("norm", include_str!("../../kernels/norm.metal")),
    ("router", include_str!("../../kernels/router.metal")),
    ("sample", include_str!("../../kernels/sample.metal")),
    ("streams", include_str!("../../kernels/streams.metal")),
];

/// Code that reads quantized weights. Part of every file.
pub const QUANT: &str = include_str!("../../kernels/quant.metal");

/// Matrix products on matrix units. Part of every file if the compiler accepts this code.
pub const TILES: &str = include_str!("../../kernels/tiles.metal");

/// The macros of the kernel dialect for Metal.
pub const METAL_SHIM: &str = include_str!("../../kernels/shim/metal.h");

/// A kernel that writes to the second page of the address space, which no process maps. The argument is always zero. It
/// is added to the address, so that the compiler cannot know the address.
pub const METAL_FAULT: &str = "#include <metal_stdlib>
kernel void fault(constant uint& zero [[buffer(0)]]) {
    *(volatile device uint*)(16384ul + zero) = 1;
}
";

/// The macros of the kernel dialect for CUDA.
pub const CUDA_SHIM: &str = include_str!("../../kernels/shim/cuda.h");

/// Complete source of one file for CUDA.
pub fn cuda_source(text: &str) -> String {
    format!("{CUDA_SHIM}\n{QUANT}\n{TILES}\n{text}")
}

/// Complete source of one file for Metal. Without `tiles`, the kernels that need matrix units are left out.
pub fn metal_source(text: &str, tiles: bool) -> String {
    match tiles {
        true => format!("{METAL_SHIM}\n{QUANT}\n{TILES}\n{text}"),
        false => format!("#define NO_TILES\n{METAL_SHIM}\n{QUANT}\n{text}"),
    }
}

/// Result of compiling all files.
pub struct CompiledKernels<L> {
    pub libraries: Vec<L>,
    /// Files that did not compile, each with the compiler's log.
    pub refused: Vec<(String, String)>,
    /// True if the libraries contain the kernels that need matrix units.
    pub has_tiles: bool,
}

/// Name and complete source of every file for Metal, for `moestro doctor --print-kernels`.
pub fn metal_sources(tiles: bool) -> impl Iterator<Item = (&'static str, String)> {
    FILES.into_iter().map(move |(name, text)| (name, metal_source(text, tiles)))
}

/// Compiles all files with `compile_file(name, text, with_tiles)`.
///
/// If a file does not compile, compiles all files again without `tiles.metal`. A GPU whose compiler does not support
/// matrix units can then run all other kernels.
pub fn compile<L>(mut compile_file: impl FnMut(&str, &str, bool) -> Result<L, String>) -> CompiledKernels<L> {
    let mut compile_all = |has_tiles| {
        let mut compiled = CompiledKernels { libraries: Vec::new(), refused: Vec::new(), has_tiles };
        for (name, text) in FILES {
            match compile_file(name, text, has_tiles) {
                Ok(library) => compiled.libraries.push(library),
                Err(log) => compiled.refused.push((format!("kernels/{name}.metal"), log)),
            }
        }
        compiled
    };
    let first = compile_all(true);
    let Some((file, log)) = first.refused.first() else { return first };
    let second = compile_all(false);
    if second.refused.len() >= first.refused.len() {
        return first;
    }
    tracing::warn!(file, log, "matrix-unit kernels do not compile; prompts use the slower kernels");
    second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compile_retries_without_tiles() {
        let all = FILES.len();
        let compiled = |rejects: fn(&str, bool) -> bool| {
            let made = compile(|name, _, tiles| match rejects(name, tiles) {
                true => Err(format!("line 1 of {name}")),
                false => Ok((name.to_string(), tiles)),
            });
            assert!(made.libraries.iter().all(|(_, tiles)| *tiles == made.has_tiles));
            (made.libraries.len(), made.refused.len(), made.has_tiles)
        };
        assert_eq!(compiled(|_, _| false), (all, 0, true));
        assert_eq!(compiled(|_, tiles| tiles), (all, 0, false));
        // An error in another file does not remove the matrix-unit kernels.
        assert_eq!(compiled(|name, _| name == "router"), (all - 1, 1, true));
        assert_eq!(compiled(|name, tiles| tiles || name == "router"), (all - 1, 1, false));
    }
}
