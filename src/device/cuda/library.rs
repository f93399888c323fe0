//! Compiles the kernels when the first one is needed, and keeps the machine code in the user's cache directory: NVIDIA's compiler
//! takes some ten seconds, the driver milliseconds. A file there begins with the hash of all that it was made from: the text, the
//! options, the driver's version. It is made anew when that changes, or when the driver refuses it.

use crate::{
    device::{DeviceError, kernels},
    platform::os,
};
use cudarc::{
    driver::{result, sys},
    nvrtc,
};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char},
    fs,
    path::{Path, PathBuf},
    thread,
};

/// A sum rounds after each step, as on the CPU and on Metal.
const OPTIONS: [&str; 2] = ["--fmad=false", "--std=c++14"];
/// Registers of a thread at most: few let many warps run at a time, which hides waits. Attention holds more that it waits for.
const REGISTERS: u32 = 80;
const ATTENTION_REGISTERS: u32 = 112;
const HASH: usize = 32;

/// A kernel of the card.
#[derive(Clone, Copy)]
pub struct Kernel {
    pub function: sys::CUfunction,
    pub most_threads: u32,
}

pub struct Library {
    /// As the compiler calls it: `sm_90`.
    architecture: String,
    modules: Vec<sys::CUmodule>,
    /// `None` before the sources are compiled.
    kernels: Option<BTreeMap<String, Result<Kernel, String>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, String)>,
}

impl Library {
    pub fn new(architecture: String) -> Self {
        Self { architecture, modules: Vec::new(), kernels: None, refused: Vec::new() }
    }

    /// Compiles all files, once. The context is current.
    fn kernels(&mut self) -> &BTreeMap<String, Result<Kernel, String>> {
        let Self { architecture, modules, kernels, refused } = self;
        kernels.get_or_insert_with(|| {
            let folder = os::cache_dir().map(|cache| cache.join("cuda"));
            let (mut all, mut driver) = (BTreeMap::new(), 0);
            // SAFETY: it writes one number.
            let _ = unsafe { sys::cuDriverGetVersion(&mut driver) };
            // The compiler is the slow part: files side by side.
            let images: Vec<_> = thread::scope(|scope| {
                let make = |(name, text)| {
                    let source = Source::new(name, text, architecture, driver, folder.as_deref());
                    (name, scope.spawn(move || Image::make(source)))
                };
                let threads: Vec<_> = kernels::FILES.into_iter().map(make).collect();
                threads.into_iter().map(|(name, thread)| (name, thread.join())).collect()
            });
            for (name, image) in images {
                let loaded = match image {
                    Ok(image) => image.and_then(|image| image.load()),
                    Err(_) => Err("its compilation ended in a panic".into()),
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

    /// Loads every kernel: kernels, and files that did not compile, each with what is wrong with it.
    pub fn all(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let each = |(name, kernel): (&String, &Result<Kernel, String>)| {
            (name.clone(), kernel.as_ref().err().cloned().map(DeviceError))
        };
        let mut all: Vec<_> = self.kernels().iter().map(each).collect();
        all.extend(self.refused.iter().map(|(file, log)| (file.clone(), Some(DeviceError(log.clone())))));
        all
    }

    pub fn kernel(&mut self, name: &str) -> Result<Kernel, DeviceError> {
        match self.kernels().get(name) {
            Some(Ok(kernel)) => Ok(*kernel),
            Some(Err(error)) => Err(DeviceError(error.clone())),
            None => {
                let files: Vec<&str> = self.refused.iter().map(|(file, _)| file.as_str()).collect();
                Err(DeviceError(format!("there is no kernel {name}; refused files: [{}]", files.join(", "))))
            }
        }
    }

    /// Gives the card's memory back. The context is current.
    pub fn unload(&mut self) {
        self.kernels = None;
        for module in self.modules.drain(..) {
            // SAFETY: nothing runs any more, and no function of it is left.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

fn kernel(module: sys::CUmodule, name: &str) -> Result<Kernel, String> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the module is loaded, and so is its function.
    let found = unsafe {
        result::module::get_function(module, name).and_then(|function| {
            let most = result::function::get_function_attribute(function, attribute)?;
            Ok(Kernel { function, most_threads: most.max(0) as u32 })
        })
    };
    found.map_err(|error| error.to_string())
}

/// Machine code of one file.
struct Image {
    code: Vec<u8>,
    /// It was kept; the driver may refuse it, and then it is made of this.
    kept: Option<Source>,
}

/// All that machine code is made from.
struct Source {
    text: String,
    options: Vec<String>,
    hash: [u8; HASH],
    /// The place to keep it.
    file: Option<PathBuf>,
}

impl Source {
    fn new(name: &str, text: &str, architecture: &str, driver: i32, folder: Option<&Path>) -> Self {
        let text = kernels::cuda(text);
        let registers = if matches!(name, "attend" | "few") { ATTENTION_REGISTERS } else { REGISTERS };
        let ours = [format!("--maxrregcount={registers}"), format!("--gpu-architecture={architecture}")];
        let options: Vec<String> = OPTIONS.iter().map(ToString::to_string).chain(ours).collect();
        let made_from = format!("{driver}\n{}\n{text}", options.join(" "));
        let file = folder.map(|folder| folder.join(format!("{name}-{architecture}.cubin")));
        Self { text, options, hash: Sha256::digest(made_from).into(), file }
    }

    /// The code that was kept, if it was made from the same text.
    fn kept(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(self.file.as_ref()?).ok()?;
        Some(bytes.strip_prefix(&self.hash)?.to_vec())
    }

    /// Keeps code for the next start; if that cannot be done, the next start compiles.
    fn keep(&self, code: &[u8]) {
        let Some((file, folder)) = self.file.as_ref().and_then(|file| Some((file, file.parent()?))) else { return };
        // Another process may do the same: what is renamed is whole.
        let temporary = file.with_extension(format!("{}.tmp", std::process::id()));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&temporary, [&self.hash, code].concat()))
            .and_then(|()| fs::rename(&temporary, file));
        if let Err(error) = written {
            tracing::debug!("{}: {error}", file.display());
            let _ = fs::remove_file(temporary);
        }
    }

    fn compile(&self) -> Result<Vec<u8>, String> {
        let (code, _) = self.build()?;
        self.keep(&code);
        Ok(code)
    }

    /// Machine code, and what the compiler said.
    fn build(&self) -> Result<(Vec<u8>, String), String> {
        // SAFETY: NVIDIA's library may be loaded; it is asked for nothing but to be there.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err("libnvrtc, the compiler of CUDA 12 or later, is not among the system's libraries".into());
        }
        let text = CString::new(self.text.as_str()).map_err(|error| error.to_string())?;
        let program = nvrtc::result::create_program(&text, None).map_err(|error| error.to_string())?;
        // SAFETY: the program is destroyed once, below, and used before.
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
/// The program is compiled.
unsafe fn cubin(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, String> {
    let mut len = 0;
    // SAFETY: it writes one number.
    unsafe { nvrtc::sys::nvrtcGetCUBINSize(program, &mut len) }.result().map_err(|error| error.to_string())?;
    let mut code = vec![0u8; len];
    // SAFETY: there is room for all of it.
    let done = unsafe { nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast::<c_char>()) };
    done.result().map_err(|error| error.to_string())?;
    Ok(code)
}

/// # Safety
/// The program exists.
unsafe fn log(program: nvrtc::sys::nvrtcProgram) -> Option<String> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { nvrtc::result::get_program_log(program) }.ok()?;
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned();
    Some(text).filter(|text| !text.is_empty())
}

impl Image {
    fn make(source: Source) -> Result<Self, String> {
        match source.kept() {
            Some(code) => Ok(Self { code, kept: Some(source) }),
            None => Ok(Self { code: source.compile()?, kept: None }),
        }
    }

    /// A module of the current context, and the names of its kernels.
    fn load(mut self) -> Result<(sys::CUmodule, Vec<String>), String> {
        loop {
            // SAFETY: an ELF file knows its length; the driver copies it.
            let loaded = unsafe { result::module::load_data(self.code.as_ptr().cast()) };
            match (loaded, self.kept.take()) {
                (Ok(module), _) => return Ok((module, names(&self.code))),
                (Err(_), Some(source)) => self.code = source.compile()?,
                (Err(error), None) => return Err(error.to_string()),
            }
        }
    }
}

/// The kernels in machine code: each has a section `.text.NAME`.
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
    fn kernels_are_named_by_their_sections() {
        let code = b"\x7fELF\0.strtab\0.text.linear_1\0.nv.info.linear_1\0.text.conv\0.text.conv\0.text.cut";
        assert_eq!(names(code), ["conv", "linear_1"]);
    }

    #[test]
    fn code_is_kept_for_what_it_was_made_from() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cuda");
        let source = |text, architecture| Source::new("norm", text, architecture, 13000, Some(&folder));
        let first = source("a", "sm_90");
        assert_eq!(first.kept(), None);
        first.keep(b"code");
        assert_eq!(first.kept().as_deref(), Some(&b"code"[..]));
        // Another text makes it stale, another card has a file of its own.
        assert_eq!((source("b", "sm_90").kept(), source("a", "sm_80").kept()), (None, None));
        source("b", "sm_90").keep(b"more");
        assert_eq!((source("a", "sm_90").kept(), fs::read_dir(&folder).unwrap().count()), (None, 1));
        // Without a place, nothing is kept and nothing fails.
        let nowhere = Source::new("norm", "a", "sm_90", 13000, None);
        nowhere.keep(b"code");
        assert_eq!(nowhere.kept(), None);
    }

    /// Kernels of answers and drafts over weights of 4 and 8 bits.
    const QUICK: [&str; 11] = [
        "linear_1",
        "linear_2",
        "linear_norm_1",
        "linear_norm_2",
        "linear_heads_1",
        "linear_heads_2",
        "linear_conv",
        "experts_up",
        "experts_down",
        "experts_up_rows",
        "experts_down_rows",
    ];

    /// The bytes of each kernel's stack, from the compiler's log.
    fn on_stack(log: &str, found: &mut BTreeMap<String, usize>) {
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

    /// Runs if NVIDIA's compiler is installed; it needs no card.
    #[test]
    fn the_compiler_takes_every_file() {
        // SAFETY: as in `Source::compile`.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return println!("libnvrtc is not here");
        }
        let (mut all, mut stack) = (Vec::new(), BTreeMap::new());
        for (name, text) in kernels::FILES {
            let mut source = Source::new(name, text, "sm_90", 0, None);
            source.options.push("--ptxas-options=-v".into());
            let (code, log) = source.build().unwrap_or_else(|log| panic!("{name}: {log}"));
            all.extend(names(&code));
            on_stack(&log, &mut stack);
        }
        // What registers have no room for goes through memory: with 400 bytes of it a product of two rows took 4.6 times as long as of
        // one (an H200).
        for kernel in QUICK {
            assert!(stack[kernel] <= 32, "{kernel} has {} bytes on its stack", stack[kernel]);
        }
        for kernel in ["linear_1", "experts_up", "route", "attend_256", "delta_128", "rms_norm", "embed"] {
            assert!(all.iter().any(|name| name == kernel), "{kernel} is not among {all:?}");
        }
        let wrong = Source::new("norm", "KERNEL(broken", "sm_90", 0, None);
        assert!(wrong.compile().unwrap_err().contains("error"));
    }
}
