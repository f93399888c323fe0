//! Source text of the kernels, embedded in the binary. Metal or NVRTC compiles this text at run time.

/// A kernel file. Before compilation, the shim, `quant.metal` and usually `tiles.metal` (see [`compile`]) are inserted at
/// the start of the text.
#[derive(Clone, Copy)]
pub struct KernelFile {
    pub name: &'static str,
    pub text: &'static str,
    /// Maximum number of registers per thread on CUDA, which limits them per file. With fewer registers, more warps run
    /// at the same time, which hides memory latency.
    pub registers: u32,
}

macro_rules! kernel_file {
    ($name:literal, $registers:expr) => {
        KernelFile {
            name: $name,
            text: include_str!(concat!("../../../../kernels/", $name, ".metal")),
            registers: $registers,
        }
    };
}

/// The register limit of most files.
const REGISTERS: u32 = 80;
/// The register limit of files whose threads have more loads in flight.
const MANY_REGISTERS: u32 = 112;

pub const FILES: [KernelFile; 12] = [
    kernel_file!("attention", MANY_REGISTERS),
    kernel_file!("attention_prefill", REGISTERS),
    kernel_file!("block_attention", REGISTERS),
    kernel_file!("delta_net", REGISTERS),
    kernel_file!("embedding", REGISTERS),
    kernel_file!("kv_quant", MANY_REGISTERS),
    kernel_file!("linear", REGISTERS),
    kernel_file!("moe", REGISTERS),
    kernel_file!("norm", REGISTERS),
    kernel_file!("router", REGISTERS),
    kernel_file!("sample", REGISTERS),
    kernel_file!("streams", REGISTERS),
];

/// Code that reads quantized weights. Part of every file.
pub const QUANT: &str = include_str!("../../../../kernels/quant.metal");

/// Matrix products on matrix units. Part of every file if the compiler accepts this code.
pub const TILES: &str = include_str!("../../../../kernels/tiles.metal");

/// The macros of the kernel dialect for Metal.
pub const METAL_SHIM: &str = include_str!("../../../../kernels/shim/metal.h");

/// A kernel that writes to the second page of the address space, which no process maps. The argument is always zero. It
/// is added to the address, so that the compiler cannot know the address.
pub const METAL_FAULT: &str = "#include <metal_stdlib>
kernel void fault(constant uint& zero [[buffer(0)]]) {
    *(volatile device uint*)(16384ul + zero) = 1;
}
";

/// The macros of the kernel dialect for CUDA.
pub const CUDA_SHIM: &str = include_str!("../../../../kernels/shim/cuda.h");

/// Complete source of one file for CUDA.
pub fn cuda_source(text: &str) -> String {
    format!("{CUDA_SHIM}\n{QUANT}\n{TILES}\n{text}")
}

/// Complete source of one file for Metal. Without `tiles`, the kernels that need matrix units are left out.
pub fn metal_source(text: &str, tiles: bool) -> String {
    if tiles {
        format!("{METAL_SHIM}\n{QUANT}\n{TILES}\n{text}")
    } else {
        format!("#define NO_TILES\n{METAL_SHIM}\n{QUANT}\n{text}")
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
    FILES.into_iter().map(move |file| (file.name, metal_source(file.text, tiles)))
}

/// Compiles all files with `compile_file(name, text, with_tiles)`.
///
/// If a file does not compile, compiles all files again without `tiles.metal`. A GPU whose compiler does not support
/// matrix units can then run all other kernels.
pub fn compile<L>(mut compile_file: impl FnMut(&str, &str, bool) -> Result<L, String>) -> CompiledKernels<L> {
    let mut compile_all = |has_tiles| {
        let mut compiled = CompiledKernels { libraries: Vec::new(), refused: Vec::new(), has_tiles };
        for KernelFile { name, text, .. } in FILES {
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
            let made = compile(|name, _, tiles| {
                if rejects(name, tiles) { Err(format!("line 1 of {name}")) } else { Ok((name.to_string(), tiles)) }
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
