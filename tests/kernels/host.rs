//! The kernels as a program of their own: compiled by the system's C++ compiler under AddressSanitizer and
//! UndefinedBehaviorSanitizer, fed with dispatches through a pipe (`kernels/host/main.cpp` has the protocol).

use crate::record;
use moestro::device::{BufferAccess, Launch, Region};
use sha2::Digest;
use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::OnceLock,
};

pub const FILES: [&str; 9] =
    ["linear", "moe", "router", "norm", "delta_net", "attention", "kv_quant", "attention_prefill", "embedding"];

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// The files of `kernels/`.
fn all() -> [PathBuf; 9] {
    FILES.map(|file| kernels().join(file).with_extension("metal"))
}

/// A program of `files` (of kernels, each in a namespace).
fn program(files: &[PathBuf], tiles: bool) -> String {
    let mut source = String::from("#include \"shim/host.h\"\n#include \"quant.metal\"\n");
    source += if tiles { "#include \"tiles.metal\"\n" } else { "#define NO_TILES\n" };
    for (i, file) in files.iter().enumerate() {
        source += &format!("namespace file{i} {{\n#include \"{}\"\n}}\n", file.display());
    }
    source + "#include \"host/main.cpp\"\n"
}

/// The program of all kernels, as the tests build it.
pub fn source() -> String {
    program(&all(), true)
}

/// Compiles `files` into a program; keeps it for the next run of unchanged sources.
fn build(files: &[PathBuf], name: &str, sanitise: bool) -> PathBuf {
    let source = program(files, name != "plain");
    let mut hash = sha2::Sha256::new();
    hash.update(format!("{} {sanitise} {source}", compiler()));
    for file in ["shim/host.h", "shim/fiber.h", "quant.metal", "tiles.metal", "host/main.cpp"]
        .map(|f| kernels().join(f))
        .iter()
        .chain(files)
    {
        hash.update(fs::read(file).unwrap());
    }
    let key: String = hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = dir.join(format!("{name}-{key}"));
    if program.exists() {
        return program;
    }
    let input = dir.join(format!("{name}-{key}.cpp"));
    let output = dir.join(format!("{name}-{key}.{}", std::process::id()));
    fs::write(&input, source).unwrap();
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas"]);
    if sanitise {
        command.args(["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    } else {
        command.arg("-O2");
    }
    let done = command.arg("-I").arg(kernels()).arg(&input).arg("-o").arg(&output).output();
    let done = done.unwrap_or_else(|e| panic!("the kernels' host tests need a C++ compiler ({}): {e}", compiler()));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    fs::rename(output, &program).unwrap();
    program
}

/// A running program and its memory.
pub struct Host {
    child: Child,
    to: ChildStdin,
    from: ChildStdout,
    buffers: u32,
    /// Run every dispatch forwards and backwards, and compare.
    pub twice: bool,
}

impl Host {
    /// The kernels of `kernels/`.
    pub fn start() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        Self::run_program(PROGRAM.get_or_init(|| build(&all(), "kernels", true)))
    }

    /// The same without sanitizers, several times as fast: for whole forward passes.
    pub fn fast() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        Self::run_program(PROGRAM.get_or_init(|| build(&all(), "fast", false)))
    }

    /// Without the text of tiles, and the kernels that need it.
    pub fn plain() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        Self::run_program(PROGRAM.get_or_init(|| build(&all(), "plain", false)))
    }

    /// The planted faults.
    pub fn faulty() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let file = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/faults.metal");
        Self::run_program(PROGRAM.get_or_init(|| build(&[file()], "faults", true)))
    }

    fn run_program(program: &Path) -> Self {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
            .env("UBSAN_OPTIONS", "print_stacktrace=1")
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, to, from, buffers: 0, twice: true }
    }

    /// A buffer of `len` bytes, filled with 0xff (which is NaN as a float).
    pub fn empty(&mut self, len: usize) -> Region {
        let buffer = self.buffers;
        self.buffers += 1;
        self.send(b"B", &[buffer, len as u32], &[]);
        Region { buffer, offset: 0, len }
    }

    /// Gives a buffer's memory back.
    pub fn drop_buffer(&mut self, buffer: u32) {
        self.send(b"B", &[buffer, 0], &[]);
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> Region {
        let region = self.empty(bytes.len());
        self.write(region, bytes);
        region
    }

    pub fn floats(&mut self, values: &[f32]) -> Region {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn words(&mut self, values: &[u32]) -> Region {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn write(&mut self, region: Region, bytes: &[u8]) {
        assert_eq!(bytes.len(), region.len);
        self.send(b"W", &[region.buffer, region.offset as u32, region.len as u32], bytes);
    }

    pub fn read(&mut self, region: Region) -> Vec<u8> {
        self.send(b"R", &[region.buffer, region.offset as u32, region.len as u32], &[]);
        let mut bytes = vec![0; region.len];
        self.from.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn read_floats(&mut self, region: Region) -> Vec<f32> {
        self.read(region).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn read_words(&mut self, region: Region) -> Vec<u32> {
        self.read(region).chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// The kernels there are.
    pub fn names(&mut self) -> Vec<String> {
        self.send(b"N", &[], &[]);
        let mut len = [0; 4];
        self.from.read_exact(&mut len).unwrap();
        let mut names = vec![0; u32::from_le_bytes(len) as usize];
        self.from.read_exact(&mut names).unwrap();
        String::from_utf8(names).unwrap().split_whitespace().map(Into::into).collect()
    }

    /// Executes one dispatch. The error is what a sanitizer, the lock-step or the order check found; the program is then gone.
    pub fn try_run(&mut self, dispatch: &Launch) -> Result<(), String> {
        let Some(dir) = record::wanted(dispatch) else { return self.execute(dispatch) };
        let before: Vec<_> = dispatch.bindings.iter().map(|binding| self.read(binding.region)).collect();
        self.execute(dispatch)?;
        let outputs = dispatch.bindings.iter().filter(|binding| binding.access != BufferAccess::Read);
        let after: Vec<_> = outputs.map(|binding| self.read(binding.region)).collect();
        record::write(&dir, dispatch, &before, &after);
        Ok(())
    }

    fn execute(&mut self, dispatch: &Launch) -> Result<(), String> {
        let mut words = vec![dispatch.args.len() as u32];
        words.extend(&dispatch.args);
        words.push(dispatch.bindings.len() as u32);
        for binding in &dispatch.bindings {
            let effect = match binding.access {
                BufferAccess::Read => 0,
                BufferAccess::Write => 1,
                BufferAccess::ReadWrite => 2,
            };
            words.extend([binding.region.buffer, binding.region.offset as u32, binding.region.len as u32, effect]);
        }
        words.extend(dispatch.grid);
        words.extend([dispatch.threads, self.twice.into()]);
        let tail: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let name = [dispatch.kernel.as_bytes(), &tail].concat();
        self.send(b"D", &[dispatch.kernel.len() as u32], &name);
        let mut status = [0];
        if self.from.read_exact(&mut status).is_err() {
            let mut report = String::new();
            self.child.stderr.take().unwrap().read_to_string(&mut report).unwrap();
            return Err(format!("{}: {report}", dispatch.kernel));
        }
        if status[0] == 0 {
            return Ok(());
        }
        let mut len = [0; 4];
        self.from.read_exact(&mut len).unwrap();
        let mut message = vec![0; u32::from_le_bytes(len) as usize];
        self.from.read_exact(&mut message).unwrap();
        Err(String::from_utf8_lossy(&message).into_owned())
    }

    pub fn run(&mut self, dispatch: &Launch) {
        if let Err(fault) = self.try_run(dispatch) {
            panic!("{fault}");
        }
    }

    fn send(&mut self, what: &[u8], words: &[u32], data: &[u8]) {
        let words: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let _ = self.to.write_all(&[what, &words, data].concat()).and_then(|()| self.to.flush());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
