//! Source text of the kernels, embedded in the binary. Metal or NVRTC compiles this text at run time.

use super::DeviceError;
use moestro_base::platform::run_jobs;
use std::{collections::BTreeMap, convert::Infallible};

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
    ($name:literal $(+ $more:literal)*, $registers:expr) => {
        KernelFile {
            name: $name,
            text: concat!(
                include_str!(concat!("../../../../kernels/", $name, ".metal"))
                $(, include_str!(concat!("../../../../kernels/", $more, ".metal")))*
            ),
            registers: $registers,
        }
    };
}

/// The register limit of most files.
const REGISTERS: u32 = 80;
/// The register limit of files whose threads have more loads in flight.
const MANY_REGISTERS: u32 = 128;

pub const FILES: [KernelFile; 12] = [
    kernel_file!("attention", MANY_REGISTERS),
    kernel_file!("attention_prefill", REGISTERS),
    kernel_file!("block_attention" + "block_selection", REGISTERS),
    kernel_file!("delta_net", REGISTERS),
    kernel_file!("embedding", REGISTERS),
    kernel_file!("kv_quant", MANY_REGISTERS),
    kernel_file!("linear" + "code_tiles" + "row_tiles" + "short_prompt", REGISTERS),
    kernel_file!("moe" + "code_tiles" + "expert_tiles", REGISTERS),
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

/// The source of a file for Metal with the precise `exp` instead of the fast one.
pub fn with_precise_exp(source: &str) -> String {
    source.replace("fast::exp(", "exp(")
}

/// True if models launch this kernel on a GPU. An error in another kernel does not make the GPU unusable.
pub fn is_used(kernel: &str, has_own_memory: bool) -> bool {
    match kernel {
        // Only tests and `moestro doctor` launch it.
        "dequantize" => false,
        "attention_decode_tiles" => has_own_memory,
        // A load chooses a direct variant only if it has compiled.
        _ => !kernel.contains("_direct"),
    }
}

/// The kernels of a file, each with its pipeline or the compiler's message.
pub type FileKernels<P> = Vec<(String, Result<P, String>)>;

/// Result of compiling all files.
pub struct CompiledKernels<P> {
    pub pipelines: BTreeMap<String, P>,
    /// Files and kernels that did not compile, each with the compiler's message.
    pub refused: Vec<(String, String)>,
    /// True if the kernels that need matrix units have compiled.
    pub has_tiles: bool,
}

impl<P> CompiledKernels<P> {
    /// Number of errors that concern a model.
    fn errors(&self, has_own_memory: bool) -> usize {
        self.refused.iter().filter(|(what, _)| is_used(what, has_own_memory)).count()
    }

    /// The pipeline of a kernel. A command buffer in flight may use it, so it must not be dropped before the device.
    ///
    /// # Errors
    /// The kernel does not exist or did not compile.
    pub fn pipeline(&self, kernel: &str) -> Result<&P, DeviceError> {
        self.pipelines.get(kernel).ok_or_else(|| match self.refused.iter().find(|(what, _)| what == kernel) {
            Some((_, why)) => DeviceError::Failed(format!("kernel {kernel}: {why}")),
            None => {
                let refused: Vec<&str> = self.refused.iter().map(|(what, _)| what.as_str()).collect();
                DeviceError::Failed(format!("there is no kernel {kernel}; did not compile: [{}]", refused.join(", ")))
            }
        })
    }

    /// The name of each kernel, and of each file that did not compile, with the error if there is one.
    pub fn outcomes(&self) -> Vec<(String, Option<DeviceError>)> {
        let refused = self.refused.iter().map(|(what, log)| (what.clone(), Some(DeviceError::Failed(log.clone()))));
        refused.chain(self.pipelines.keys().map(|kernel| (kernel.clone(), None))).collect()
    }
}

/// Name and complete source of every file for Metal, for `moestro doctor --print-kernels`.
pub fn metal_sources(tiles: bool) -> impl Iterator<Item = (&'static str, String)> {
    FILES.into_iter().map(move |file| (file.name, metal_source(file.text, tiles)))
}

/// Compiles all files at the same time with `compile_file(name, text, with_tiles)`, which also creates the pipelines.
///
/// If a file or a pipeline fails that models use, compiles all files again without `tiles.metal`. A GPU whose compiler
/// does not support matrix units can then run all other kernels.
pub fn compile<P: Send>(
    has_own_memory: bool,
    compile_file: impl Fn(&str, &str, bool) -> Result<FileKernels<P>, String> + Sync,
) -> CompiledKernels<P> {
    let compile_all = |has_tiles| {
        let mut compiled = CompiledKernels { pipelines: BTreeMap::new(), refused: Vec::new(), has_tiles };
        let compile_one = |file: KernelFile| (file.name, compile_file(file.name, file.text, has_tiles));
        let done = run_jobs(
            "kernels",
            FILES.len(),
            FILES.to_vec(),
            || Ok::<_, Infallible>(()),
            |file, ()| Ok(compile_one(file)),
        );
        let Ok(done) = done;
        for (name, kernels) in done {
            let kernels = kernels.unwrap_or_else(|log| {
                compiled.refused.push((format!("kernels/{name}.metal"), log));
                Vec::new()
            });
            for (kernel, pipeline) in kernels {
                match pipeline {
                    Ok(pipeline) => drop(compiled.pipelines.insert(kernel, pipeline)),
                    Err(log) => compiled.refused.push((kernel, log)),
                }
            }
        }
        compiled
    };
    let first = compile_all(true);
    let Some((what, log)) = first.refused.iter().find(|(what, _)| is_used(what, has_own_memory)) else { return first };
    let second = compile_all(false);
    if second.errors(has_own_memory) >= first.errors(has_own_memory) {
        return first;
    }
    tracing::warn!(what, log, "matrix-unit kernels do not compile; prompts use the slower kernels");
    second
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{Condvar, Mutex},
        time::Duration,
    };

    #[test]
    fn files_compile_at_the_same_time() {
        let (running, both) = (Mutex::new(0), Condvar::new());
        let made = compile(false, |name, _, _| {
            let mut count = running.lock().unwrap();
            *count += 1;
            both.notify_all();
            // Threads that compile one file after another never have two files at once.
            let _ = both.wait_timeout_while(count, Duration::from_secs(20), |count| *count < 2).unwrap();
            let at_once = *running.lock().unwrap() >= 2;
            Ok(vec![(name.into(), Ok(at_once))])
        });
        assert!(made.pipelines.len() == FILES.len() && made.pipelines.values().all(|at_once| *at_once));
        // The order of the messages does not depend on the threads.
        let refused = compile::<()>(false, |name, _, _| {
            std::thread::sleep(Duration::from_millis(20 - name.len() as u64));
            Err(name.into())
        });
        let logs = refused.refused.iter().map(|(_, log)| log.as_str());
        assert!(logs.eq(FILES.iter().map(|file| file.name)));
    }

    #[test]
    fn precise_source_has_no_fast_exp() {
        let source = metal_source("float f(float x) { return FAST_EXP(x); }", true);
        assert_eq!(source.matches("fast::exp(").count(), 1);
        assert!(with_precise_exp(&source).contains("#define FAST_EXP(x) exp(x)"));
    }

    #[test]
    fn compile_retries_without_tiles() {
        let all = FILES.len();
        // Each file has a kernel of its name, and with tiles a second kernel.
        let compiled = |rejects_file: fn(&str, bool) -> bool, rejects_kernel: fn(&str) -> bool| {
            let made = compile(false, |name, _, tiles| {
                if rejects_file(name, tiles) {
                    return Err(format!("line 1 of {name}"));
                }
                let kernels = [Some(name.to_string()), tiles.then(|| format!("{name}_tiles"))];
                let pipeline = |kernel: String| match rejects_kernel(&kernel) {
                    true => (kernel, Err("no registers".to_string())),
                    false => (kernel, Ok(tiles)),
                };
                Ok(kernels.into_iter().flatten().map(pipeline).collect())
            });
            assert!(made.pipelines.values().all(|tiles| *tiles == made.has_tiles));
            assert_eq!(made.outcomes().len(), made.pipelines.len() + made.refused.len());
            (made.pipelines.len(), made.refused.len(), made.has_tiles)
        };
        let none = |_: &str| false;
        assert_eq!(compiled(|_, _| false, none), (2 * all, 0, true));
        assert_eq!(compiled(|_, tiles| tiles, none), (all, 0, false));
        // An error in another file does not remove the matrix-unit kernels.
        assert_eq!(compiled(|name, _| name == "router", none), (2 * all - 2, 1, true));
        assert_eq!(compiled(|name, tiles| tiles || name == "router", none), (all - 1, 1, false));
        // The compiler's back end may fail, too. It creates the pipelines.
        assert_eq!(compiled(|_, _| false, |kernel| kernel == "linear_tiles"), (all, 0, false));
        assert_eq!(compiled(|_, _| false, |kernel| kernel == "router"), (2 * all - 1, 1, true));
        // A kernel that models do not use on this device does not count.
        let unused = |own: bool| {
            compile(own, |_, _, tiles| {
                let refused = tiles.then(|| ("attention_decode_tiles".to_string(), Err("no registers".to_string())));
                Ok(refused.into_iter().chain([("router".to_string(), Ok(()))]).collect())
            })
        };
        assert!(unused(false).has_tiles && !unused(true).has_tiles);
        assert!(unused(false).pipeline("attention_decode_tiles").unwrap_err().to_string().contains("no registers"));
        assert!(unused(false).pipeline("router").is_ok() && unused(false).pipeline("none").is_err());
    }
}
