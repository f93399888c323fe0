//! Compiles all CUDA kernels when the first kernel is needed, and caches the machine code.
//!
//! Compilation takes about ten seconds. Loading cached code takes milliseconds. Cache files are in the user's cache
//! directory and begin with a hash of the compiler's inputs: source text, compiler options and driver version. A kernel
//! file is compiled again if the hash differs or the driver refuses the cached code.

#[cfg(test)]
mod registers;

use crate::device::{DeviceError, kernels};
use cudarc::{
    driver::{result, sys},
    nvrtc,
};
use moestro_base::platform::{atomic_file, os};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char},
    fs,
    path::{Path, PathBuf},
    thread,
};

/// `--fmad=false`: the compiler must not fuse multiply and add, so that rounding is the same as on the CPU and on
/// Metal.
const OPTIONS: [&str; 2] = ["--fmad=false", "--std=c++14"];
const HASH: usize = 32;

/// A loaded kernel.
#[derive(Clone, Copy)]
pub struct CudaKernel {
    pub function: sys::CUfunction,
    pub max_threads: u32,
}

/// All kernels, compiled for one GPU.
pub struct CudaLibrary {
    /// The compiler's name of the GPU's architecture, such as `sm_90`.
    architecture: String,
    modules: Vec<sys::CUmodule>,
    /// `None` until the sources are compiled.
    kernels: Option<BTreeMap<String, Result<CudaKernel, String>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, String)>,
}

impl CudaLibrary {
    pub fn new(architecture: String) -> Self {
        Self { architecture, modules: Vec::new(), kernels: None, refused: Vec::new() }
    }

    /// Compiles all files on the first call. The context must be current.
    fn kernels(&mut self) -> &BTreeMap<String, Result<CudaKernel, String>> {
        let Self { architecture, modules, kernels, refused } = self;
        kernels.get_or_insert_with(|| {
            let folder = os::cache_dir().map(|cache| cache.join("cuda"));
            let mut all = BTreeMap::new();
            let mut driver = 0;
            // SAFETY: the call writes one integer.
            let _ = unsafe { sys::cuDriverGetVersion(&mut driver) };
            // Compile the files in parallel, since the compiler is slow.
            let images: Vec<_> = thread::scope(|scope| {
                let compile = |file: kernels::KernelFile| {
                    let source = KernelSource::new(file, architecture, driver, folder.as_deref());
                    (file.name, scope.spawn(move || ModuleImage::new(source)))
                };
                let threads: Vec<_> = kernels::FILES.into_iter().map(compile).collect();
                threads.into_iter().map(|(name, thread)| (name, thread.join())).collect()
            });
            for (name, image) in images {
                let loaded = match image {
                    Ok(image) => image.and_then(|image| image.load()),
                    Err(_) => Err("the compilation panicked".into()),
                };
                match loaded {
                    Ok((module, names)) => {
                        modules.push(module);
                        all.extend(names.into_iter().map(|name| (name.clone(), kernel(module, &name))));
                    }
                    Err(log) => refused.push((format!("kernels/{name}.metal"), log)),
                }
            }
            all
        })
    }

    /// Loads every kernel. Returns the name of each kernel, and of each file that did not compile, with the error if
    /// there is one.
    pub fn all(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let each = |(name, kernel): (&String, &Result<CudaKernel, String>)| {
            (name.clone(), kernel.as_ref().err().cloned().map(DeviceError::Failed))
        };
        let mut all: Vec<_> = self.kernels().iter().map(each).collect();
        all.extend(self.refused.iter().map(|(file, log)| (file.clone(), Some(DeviceError::Failed(log.clone())))));
        all
    }

    pub fn kernel(&mut self, name: &str) -> Result<CudaKernel, DeviceError> {
        match self.kernels().get(name) {
            Some(Ok(kernel)) => Ok(*kernel),
            Some(Err(error)) => Err(DeviceError::Failed(error.clone())),
            None => {
                let files: Vec<&str> = self.refused.iter().map(|(file, _)| file.as_str()).collect();
                let files = files.join(", ");
                Err(DeviceError::Failed(format!("there is no kernel {name}; files that did not compile: [{files}]")))
            }
        }
    }

    /// Unloads the code from the GPU. The context must be current.
    pub fn unload(&mut self) {
        self.kernels = None;
        for module in self.modules.drain(..) {
            // SAFETY: no kernel is running, and `kernels` no longer has functions of the module.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

fn kernel(module: sys::CUmodule, name: &str) -> Result<CudaKernel, String> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the module is loaded.
    let found = unsafe {
        result::module::get_function(module, name).and_then(|function| {
            let max = result::function::get_function_attribute(function, attribute)?;
            Ok(CudaKernel { function, max_threads: max.max(0) as u32 })
        })
    };
    found.map_err(|error| error.to_string())
}

/// Machine code of one kernel file.
struct ModuleImage {
    code: Vec<u8>,
    /// The source of cached code, which is compiled if the driver refuses the cached code. `None` for code that was
    /// just compiled.
    cached_from: Option<KernelSource>,
}

/// The inputs of a compilation.
struct KernelSource {
    text: String,
    options: Vec<String>,
    hash: [u8; HASH],
    /// Path of the cache file. `None` if there is no cache directory.
    file: Option<PathBuf>,
}

impl KernelSource {
    fn new(file: kernels::KernelFile, architecture: &str, driver: i32, folder: Option<&Path>) -> Self {
        let kernels::KernelFile { name, text, registers } = file;
        let text = kernels::cuda_source(text);
        let variable = [format!("--maxrregcount={registers}"), format!("--gpu-architecture={architecture}")];
        let options: Vec<String> = OPTIONS.iter().map(ToString::to_string).chain(variable).collect();
        let inputs = format!("{driver}\n{}\n{text}", options.join(" "));
        let file = folder.map(|folder| folder.join(format!("{name}-{architecture}.cubin")));
        Self { text, options, hash: Sha256::digest(inputs).into(), file }
    }

    /// Reads the cached code. Returns `None` if there is no cached code, or if it was compiled from other inputs.
    fn read_cache(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(self.file.as_ref()?).ok()?;
        Some(bytes.strip_prefix(&self.hash)?.to_vec())
    }

    /// Writes the code to the cache. A failure is only logged.
    fn write_cache(&self, code: &[u8]) {
        let Some(file) = &self.file else { return };
        if let Err(error) = atomic_file::replace_file(file, &[&self.hash, code].concat()) {
            tracing::debug!("cannot cache CUDA code in {}: {error}", file.display());
        }
    }

    fn compile(&self) -> Result<Vec<u8>, String> {
        let (code, _) = self.build()?;
        self.write_cache(&code);
        Ok(code)
    }

    /// Runs the compiler. Returns the machine code and the compiler's log.
    fn build(&self) -> Result<(Vec<u8>, String), String> {
        // SAFETY: the call only tries to load NVIDIA's library.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err("cannot load libnvrtc, the CUDA compiler: install CUDA 12 or later".into());
        }
        let text = CString::new(self.text.as_str()).map_err(|error| error.to_string())?;
        let program = nvrtc::result::create_program(&text, None).map_err(|error| error.to_string())?;
        // SAFETY: the program is destroyed once, below, and is not used after that.
        let done = unsafe {
            match nvrtc::result::compile_program(program, &self.options) {
                Ok(()) => cubin(program).map(|code| (code, log(program).unwrap_or_default())),
                Err(error) => Err(log(program).unwrap_or_else(|| error.to_string())),
            }
        };
        // SAFETY: as above.
        let _ = unsafe { nvrtc::result::destroy_program(program) };
        done
    }
}

/// # Safety
/// The program must be compiled.
unsafe fn cubin(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, String> {
    let mut len = 0;
    // SAFETY: the call writes one integer.
    unsafe { nvrtc::sys::nvrtcGetCUBINSize(program, &mut len) }.result().map_err(|error| error.to_string())?;
    let mut code = vec![0u8; len];
    // SAFETY: `code` has the length that the compiler reported.
    let done = unsafe { nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast::<c_char>()) };
    done.result().map_err(|error| error.to_string())?;
    Ok(code)
}

/// # Safety
/// The program must exist.
unsafe fn log(program: nvrtc::sys::nvrtcProgram) -> Option<String> {
    // SAFETY: the caller guarantees that the program exists.
    let bytes = unsafe { nvrtc::result::get_program_log(program) }.ok()?;
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned();
    Some(text).filter(|text| !text.is_empty())
}

impl ModuleImage {
    fn new(source: KernelSource) -> Result<Self, String> {
        match source.read_cache() {
            Some(code) => Ok(Self { code, cached_from: Some(source) }),
            None => Ok(Self { code: source.compile()?, cached_from: None }),
        }
    }

    /// Loads the code into the current context. Returns the module and the names of its kernels.
    fn load(mut self) -> Result<(sys::CUmodule, Vec<String>), String> {
        loop {
            // SAFETY: the driver reads the length from the ELF header and copies the code.
            let loaded = unsafe { result::module::load_data(self.code.as_ptr().cast()) };
            match (loaded, self.cached_from.take()) {
                (Ok(module), _) => return Ok((module, names(&self.code))),
                (Err(_), Some(source)) => self.code = source.compile()?,
                (Err(error), None) => return Err(error.to_string()),
            }
        }
    }
}

/// The names of the kernels in an ELF file. Each kernel has a section `.text.NAME`.
fn names(code: &[u8]) -> Vec<String> {
    const PREFIX: &[u8] = b"\0.text.";
    let mut names: Vec<String> = code
        .windows(PREFIX.len())
        .enumerate()
        .filter(|(_, window)| *window == PREFIX)
        .filter_map(|(at, _)| {
            let name = CStr::from_bytes_until_nul(&code[at + PREFIX.len()..]).ok()?;
            Some(name.to_str().ok()?.to_string())
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_names_come_from_elf_sections() {
        let code = b"\x7fELF\0.strtab\0.text.gemv_1\0.nv.info.gemv_1\0.text.conv\0.text.conv\0.text.cut";
        assert_eq!(names(code), ["conv", "gemv_1"]);
    }

    #[test]
    fn cache_is_valid_for_same_inputs_only() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cuda");
        let file = |text| kernels::KernelFile { name: "norm", text, registers: 80 };
        let source = |text, architecture| KernelSource::new(file(text), architecture, 13000, Some(&folder));
        let first = source("a", "sm_90");
        assert_eq!(first.read_cache(), None);
        first.write_cache(b"code");
        assert_eq!(first.read_cache().as_deref(), Some(&b"code"[..]));
        // A different text invalidates the cache file. A different architecture uses a different cache file.
        assert_eq!((source("b", "sm_90").read_cache(), source("a", "sm_80").read_cache()), (None, None));
        source("b", "sm_90").write_cache(b"more");
        assert_eq!((source("a", "sm_90").read_cache(), fs::read_dir(&folder).unwrap().count()), (None, 1));
        // Without a cache directory, no file is cached and no call fails.
        let uncached = KernelSource::new(file("a"), "sm_90", 13000, None);
        uncached.write_cache(b"code");
        assert_eq!(uncached.read_cache(), None);
    }

    /// Kernels of `linear` and `moe` that decoding, drafts and short prompts use with 4-bit and 8-bit weights, and those of
    /// FP8, mxfp4 and bf16 on matrix units.
    const DECODE_KERNELS: [&str; 33] = [
        "gemm_short_16",
        "gemm_short_32",
        "gemm_short_64",
        "gemv_1",
        "gemv_2",
        "gemv_norm_1",
        "gemv_norm_2",
        "gemv_head_norm_1",
        "gemv_head_norm_2",
        "gemv_conv",
        "split_rows",
        "gemv_tiles_4",
        "gemv_tiles_8",
        "gemv_tiles_16",
        "gemv_tiles_pair_4",
        "gemv_tiles_pair_8",
        "gemv_tiles_trio_8",
        "gemv_tiles_pair_conv",
        "gemv_tiles_wide_16",
        "gemv_tiles_conv",
        "gemv_tiles_floats_16",
        "gemv_tiles_floats_4",
        "gemv_tiles_floats_8",
        "gemv_tiles_floats_conv",
        "moe_gate_up",
        "moe_down",
        "moe_gate_up_grouped",
        "moe_down_grouped",
        "moe_gate_up_tiles_1",
        "moe_gate_up_tiles_2",
        "moe_gate_up_tiles_4",
        "moe_down_tiles",
        "moe_down_tiles_1",
    ];

    /// Reads the stack size of each kernel from the compiler's log, in bytes.
    fn read_stack_sizes(log: &str, found: &mut BTreeMap<String, usize>) {
        let mut kernel = "";
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once("entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default();
            }
            if let Some((bytes, _)) = line.split_once(" bytes stack frame") {
                found.insert(kernel.into(), bytes.rsplit(' ').next().unwrap_or_default().parse().unwrap());
            }
        }
    }

    /// Runs only if NVRTC is installed. Needs no GPU. [`registers`] compiles every file, but with another limit.
    #[test]
    fn decode_kernels_spill_little() {
        // SAFETY: as in `KernelSource::build`.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return println!("skipped: libnvrtc is not installed");
        }
        if registers::ran_without_nvrtc_cache(decode_kernels_spill_little) {
            return;
        }
        let mut stack = BTreeMap::new();
        for file in kernels::FILES.into_iter().filter(|file| ["linear", "moe"].contains(&file.name)) {
            let mut source = KernelSource::new(file, "sm_90", 0, None);
            source.options.push("--ptxas-options=-v".into());
            let (_, log) = source.build().unwrap_or_else(|log| panic!("{}: {log}", file.name));
            read_stack_sizes(&log, &mut stack);
        }
        // Registers that do not fit spill to the stack. On an H200, with 400 bytes of spills, a product of two rows
        // took 4.6 times as long as a product of one row.
        for kernel in DECODE_KERNELS {
            assert!(stack[kernel] <= 32, "{kernel} has {} bytes on its stack", stack[kernel]);
        }
        let wrong = kernels::KernelFile { name: "norm", text: "KERNEL(broken", registers: 80 };
        let wrong = KernelSource::new(wrong, "sm_90", 0, None);
        assert!(wrong.compile().unwrap_err().contains("error"));
    }
}
