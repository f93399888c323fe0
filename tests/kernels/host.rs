//! The kernels as a separate program, built by the system's C++ compiler. The program receives launches through a pipe.
//! `kernels/host/main.cpp` defines the protocol. With `MOESTRO_SANITIZE` set, as in CI, the tests of single kernels run
//! with AddressSanitizer and UndefinedBehaviorSanitizer. The sanitizers quadruple the time of compiling and of running.

use crate::record;
use moestro_compute::device::{BufferAccess, Launch, Region};
use sha2::Digest;
use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::OnceLock,
};

pub const FILES: [&str; 12] = [
    "linear",
    "moe",
    "router",
    "norm",
    "delta_net",
    "attention",
    "kv_quant",
    "attention_prefill",
    "block_attention",
    "embedding",
    "streams",
    "sample",
];

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// The paths of the kernel files.
fn all() -> [PathBuf; 12] {
    FILES.map(|file| kernels().join(file).with_extension("metal"))
}

/// The lines that include a kernel file, with the file that is compiled with it.
pub fn include(file: &Path) -> String {
    let mut files = vec![file.to_owned()];
    match file.file_stem().and_then(|name| name.to_str()) {
        Some("linear") => {
            files.extend(["row_tiles", "short_prompt"].map(|part| file.with_file_name(format!("{part}.metal"))))
        }
        Some("moe") => files.push(file.with_file_name("expert_tiles.metal")),
        _ => {}
    }
    files.iter().map(|file| format!("#include \"{}\"\n", file.display())).collect()
}

/// Source of a program with these kernel files, each in its own namespace.
fn program(files: &[PathBuf], tiles: bool) -> String {
    let mut source = String::from("#include \"shim/host.h\"\n#include \"quant.metal\"\n");
    source += if tiles { "#include \"tiles.metal\"\n" } else { "#define NO_TILES\n" };
    for (i, file) in files.iter().enumerate() {
        source += &format!("namespace file{i} {{\n{}}}\n", include(file));
    }
    source + "#include \"host/main.cpp\"\n"
}

/// Source of the program with all kernels.
pub fn source() -> String {
    program(&all(), true)
}

/// Compiles `files` to a program. A program that was already compiled from the same sources is reused. Test processes
/// that need the same program at the same time wait until one of them has compiled it.
fn build(files: &[PathBuf], name: &str, sanitise: bool) -> PathBuf {
    let source = program(files, name != "plain");
    let options: &[&str] = match sanitise {
        true => &["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        // With the processor's own fused multiply-add. Not contracting products keeps the bytes.
        false if cfg!(target_arch = "x86_64") => &["-O3", "-march=native"],
        false => &["-O3"],
    };
    let mut hash = sha2::Sha256::new();
    hash.update(format!("{} {options:?} {source}", compiler()));
    let compiled_with = ["row_tiles.metal", "short_prompt.metal", "expert_tiles.metal"];
    let always = ["shim/host.h", "shim/fiber.h", "quant.metal", "tiles.metal", "host/main.cpp"];
    for file in always.iter().chain(&compiled_with).map(|f| kernels().join(f)).collect::<Vec<_>>().iter().chain(files) {
        hash.update(fs::read(file).unwrap());
    }
    let key: String = hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = dir.join(format!("{name}-{key}"));
    let lock = fs::File::create(dir.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if program.exists() {
        return program;
    }
    let input = dir.join(format!("{name}-{key}.cpp"));
    let output = dir.join(format!("{name}-{key}.{}", std::process::id()));
    fs::write(&input, source).unwrap();
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas"]);
    command.args(options);
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
    /// True if every launch runs twice, with the threads in forward and in reverse order, and the results are compared.
    pub twice: bool,
}

impl Host {
    /// Starts the program with all kernels, with sanitizers if the environment requests them.
    pub fn start() -> Self {
        if std::env::var_os("MOESTRO_SANITIZE").is_none() { Self::fast() } else { Self::sanitized() }
    }

    /// Starts the program with all kernels and with sanitizers.
    pub fn sanitized() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        Self::run_program(PROGRAM.get_or_init(|| build(&all(), "kernels", true)))
    }

    /// Starts the program with all kernels and without sanitizers. This program is several times as fast, and is used
    /// for whole forward passes.
    pub fn fast() -> Self {
        Self::run_program(Self::fast_program())
    }

    fn fast_program() -> &'static Path {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        PROGRAM.get_or_init(|| build(&all(), "fast", false))
    }

    /// Starts the fast program. The exponentials of attention err as much as Metal's specification allows.
    pub fn with_exp_errors() -> Self {
        Self::run_with(Self::fast_program(), &[("MOESTRO_FAST_EXP_ERRORS", "1")])
    }

    /// Starts the program without `tiles.metal` and the kernels that need this file.
    pub fn plain() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        Self::run_program(PROGRAM.get_or_init(|| build(&all(), "plain", false)))
    }

    /// Starts the program with planted faults in the kernels.
    pub fn faulty() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let file = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/faults.metal");
        Self::run_program(PROGRAM.get_or_init(|| build(&[file()], "faults", true)))
    }

    fn run_program(program: &Path) -> Self {
        Self::run_with(program, &[])
    }

    fn run_with(program: &Path, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
            .env("UBSAN_OPTIONS", "print_stacktrace=1")
            .envs(environment.iter().copied())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, to, from, buffers: 0, twice: true }
    }

    /// A buffer of `len` bytes filled with 0xff. Read as floats, these bytes are NaN.
    pub fn empty(&mut self, len: usize) -> Region {
        let buffer = self.buffers;
        self.buffers += 1;
        self.send(b"B", &[buffer, len as u32], &[]);
        Region { buffer, offset: 0, len }
    }

    /// Frees a buffer's memory.
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

    /// The address of a buffer in the program, for tables of buffers.
    pub fn address(&mut self, buffer: u32) -> u64 {
        self.send(b"A", &[buffer], &[]);
        let mut address = [0; 8];
        self.from.read_exact(&mut address).unwrap();
        u64::from_le_bytes(address)
    }

    /// Number of multiplications on matrix units in the last launch.
    pub fn products(&mut self) -> u64 {
        self.count(b"P")
    }

    /// Number of loads from keys and values in the last launch. All lanes of a simdgroup load at once.
    pub fn loads(&mut self) -> u64 {
        self.count(b"L")
    }

    fn count(&mut self, what: &[u8]) -> u64 {
        self.send(what, &[], &[]);
        let mut count = [0; 8];
        self.from.read_exact(&mut count).unwrap();
        u64::from_le_bytes(count)
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

    /// The names of all kernels.
    pub fn names(&mut self) -> Vec<String> {
        self.send(b"N", &[], &[]);
        let mut len = [0; 4];
        self.from.read_exact(&mut len).unwrap();
        let mut names = vec![0; u32::from_le_bytes(len) as usize];
        self.from.read_exact(&mut names).unwrap();
        String::from_utf8(names).unwrap().split_whitespace().map(Into::into).collect()
    }

    /// Executes one launch. The error is the report of a sanitizer, of the barrier check or of the order check. After
    /// an error the program has exited.
    pub fn try_run(&mut self, launch: &Launch) -> Result<(), String> {
        let Some(dir) = record::wanted(launch) else { return self.execute(launch) };
        let before: Vec<_> = launch.bindings.iter().map(|binding| self.read(binding.region)).collect();
        self.execute(launch)?;
        let outputs = launch.bindings.iter().filter(|binding| binding.access != BufferAccess::Read);
        let after: Vec<_> = outputs.map(|binding| self.read(binding.region)).collect();
        record::write(&dir, launch, &before, &after);
        Ok(())
    }

    fn execute(&mut self, launch: &Launch) -> Result<(), String> {
        let mut words = vec![launch.args.len() as u32];
        words.extend(&launch.args);
        words.push(launch.bindings.len() as u32);
        for binding in &launch.bindings {
            let effect = match binding.access {
                BufferAccess::Read => 0,
                BufferAccess::Write => 1,
                BufferAccess::ReadWrite => 2,
            };
            words.extend([binding.region.buffer, binding.region.offset as u32, binding.region.len as u32, effect]);
        }
        words.extend(launch.grid);
        words.extend([launch.threads, self.twice.into()]);
        let tail: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let name = [launch.kernel.as_bytes(), &tail].concat();
        self.send(b"D", &[launch.kernel.len() as u32], &name);
        let mut status = [0];
        if self.from.read_exact(&mut status).is_err() {
            let mut report = String::new();
            match self.child.stderr.take() {
                Some(mut stderr) => _ = stderr.read_to_string(&mut report).unwrap(),
                None => report.push_str("the program has exited"),
            }
            return Err(format!("{}: {report}", launch.kernel));
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

    pub fn run(&mut self, launch: &Launch) {
        if let Err(fault) = self.try_run(launch) {
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
