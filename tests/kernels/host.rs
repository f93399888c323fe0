//! The kernels as a separate program, built by the system's C++ compiler. The program receives launches through a pipe.
//! `kernels/host/main.cpp` defines the protocol. With `MOESTRO_SANITIZE` set, the tests of single kernels run with
//! AddressSanitizer and UndefinedBehaviorSanitizer. The sanitizers quadruple the time of compiling and of running.

use crate::record;
use moestro_compute::device::{BufferAccess, Launch, Region};
use sha2::Digest;
use std::{
    collections::{BTreeSet, HashSet},
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        LazyLock, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

const FILES: [&str; 12] = [
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

/// Words that Metal or CUDA rejects, or that cost speed.
const POISON: &str = "#pragma GCC poison double goto throw try catch new delete dynamic_cast std printf";

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// The paths of the kernel files.
pub fn all() -> [PathBuf; 12] {
    FILES.map(|file| kernels().join(file).with_extension("metal"))
}

/// A kernel file and the files that are compiled with it.
fn with_companions(file: &Path) -> Vec<PathBuf> {
    let more: &[&str] = match file.file_stem().and_then(|name| name.to_str()) {
        Some("linear") => &["code_tiles", "row_tiles", "short_prompt"],
        Some("moe") => &["code_tiles", "expert_tiles"],
        Some("block_attention") => &["block_selection"],
        _ => &[],
    };
    let mut files = vec![file.to_owned()];
    files.extend(more.iter().map(|part| file.with_file_name(format!("{part}.metal"))));
    files
}

/// The lines that include a kernel file, with the files that are compiled with it.
fn include(file: &Path) -> String {
    with_companions(file).iter().map(|file| format!("#include \"{}\"\n", file.display())).collect()
}

/// A source text that is compiled to one object.
struct Unit {
    source: String,
    /// The files that `source` includes.
    files: Vec<PathBuf>,
}

/// The kernels of some files. The namespace of a file has the file's name, because kernels of two files may have arguments
/// of the same name.
pub fn kernel_source(files: &[PathBuf], has_tiles: bool) -> String {
    let tiles = if has_tiles { "#include \"tiles.metal\"" } else { "#define NO_TILES" };
    let mut source = format!("#include \"shim/host.h\"\n{POISON}\n#include \"quant.metal\"\n{tiles}\n");
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap();
        source += &format!("namespace {name} {{\n{}}}\n", include(file));
    }
    source
}

/// The program without kernels.
pub const MAIN_SOURCE: &str = "#include \"shim/host.h\"\n#include \"host/main.cpp\"\n";

/// The units of a program with these kernel files. A unit has three files, because the compiler takes as long for the C++
/// library as for a small file.
fn units(files: &[PathBuf]) -> Vec<Unit> {
    let unit = |files: &[PathBuf]| Unit { source: kernel_source(files, true), files: included(files) };
    let parts = ["shim/host.h", "shim/fiber.h", "host/main.cpp"].map(|part| kernels().join(part));
    let main = Unit { source: MAIN_SOURCE.into(), files: parts.into() };
    files.chunks(3).map(unit).chain([main]).collect()
}

/// All files that the source of these kernel files includes.
fn included(files: &[PathBuf]) -> Vec<PathBuf> {
    let parts = ["shim/host.h", "shim/fiber.h", "quant.metal", "tiles.metal"].map(|part| kernels().join(part));
    files.iter().flat_map(|file| with_companions(file)).chain(parts).collect()
}

/// The names of the kernels that need `tiles.metal`. Also checks that the others compile without this file.
fn names_with_tiles() -> BTreeSet<String> {
    let names = |has_tiles| {
        let source = kernel_source(&all(), has_tiles);
        let mut parts = vec![format!("{} {source}", compiler()).into_bytes()];
        parts.extend(included(&all()).iter().map(|file| fs::read(file).unwrap()));
        let text = made_once(&format!("{}.i", hex_hash(&parts)), |output| {
            let input = output.with_extension("cpp");
            fs::write(&input, &source).unwrap();
            compile(&["-std=c++17", "-E"], &[&input, Path::new("-o"), output]);
            if !has_tiles {
                compile(&["-std=c++17", "-fsyntax-only"], &[&input]);
            }
            fs::remove_file(input).unwrap();
        });
        let text = fs::read_to_string(text).unwrap();
        let names = text.split("host::add(\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
        names.collect::<BTreeSet<_>>()
    };
    &names(true) - &names(false)
}

/// Runs the compiler.
fn compile(arguments: &[&str], paths: &[&Path]) {
    let done = Command::new(compiler()).args(arguments).arg("-I").arg(kernels()).args(paths).output();
    let done = done.unwrap_or_else(|e| panic!("the kernels' host tests need a C++ compiler ({}): {e}", compiler()));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Returns the file `name` in the folder of temporary files. If it does not exist, `make` writes it. Test processes and
/// threads that need the same file at the same time wait until one of them has written it.
fn made_once(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(name);
    let lock = fs::File::create(dir.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if !path.exists() {
        let unfinished = dir.join(format!("{name}.{}", std::process::id()));
        make(&unfinished);
        fs::rename(unfinished, &path).unwrap();
    }
    path
}

fn hex_hash(parts: &[impl AsRef<[u8]>]) -> String {
    let mut hash = sha2::Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compiles one unit.
fn object(unit: &Unit, options: &[&str]) -> PathBuf {
    let mut parts = vec![format!("{} {options:?} {}", compiler(), unit.source).into_bytes()];
    parts.extend(unit.files.iter().map(|file| fs::read(file).unwrap()));
    made_once(&format!("{}.o", hex_hash(&parts)), |output| {
        let input = output.with_extension("cpp");
        fs::write(&input, &unit.source).unwrap();
        let strict = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas"];
        compile(&[&strict, options, &["-c"]].concat(), &[&input, Path::new("-o"), output]);
        fs::remove_file(input).unwrap();
    })
}

/// Builds a program from `files`. Objects and programs that were already compiled from the same sources are reused. One
/// thread for each core compiles, because most tests wait for the program.
fn build(files: &[PathBuf], name: &str, sanitise: bool) -> PathBuf {
    let options: &[&str] = match sanitise {
        true => &["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        // With the processor's own fused multiply-add. Not contracting products keeps the bytes.
        false if cfg!(target_arch = "x86_64") => &["-O3", "-march=native"],
        false => &["-O3"],
    };
    let units = units(files);
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(units.len());
    let work = || -> Vec<PathBuf> {
        let mine = std::iter::from_fn(|| units.get(next.fetch_add(1, Relaxed)));
        mine.map(|unit| object(unit, options)).collect()
    };
    let mut objects: Vec<PathBuf> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    objects.sort();
    let paths: Vec<&Path> = objects.iter().map(PathBuf::as_path).collect();
    let key = hex_hash(&paths.iter().map(|path| path.as_os_str().as_encoded_bytes()).collect::<Vec<_>>());
    made_once(&format!("{name}-{key}"), |output| {
        compile(options, &[&paths[..], &[Path::new("-o"), output]].concat());
    })
}

/// A running program.
struct Running {
    child: Child,
    to: ChildStdin,
    from: ChildStdout,
    program: &'static Path,
}

/// Programs of earlier tests. They know the results of their launches, and the next test may get the same launches.
static IDLE: Mutex<Vec<Running>> = Mutex::new(Vec::new());

/// A running program and its memory.
pub struct Host {
    /// `None` only while the value is dropped.
    running: Option<Running>,
    /// True if a later test may use the program.
    is_shared: bool,
    buffers: u32,
    /// True if every launch runs twice, with the threads in forward and in reverse order, and the results are compared.
    pub twice: bool,
    /// True if a launch that gets the same bytes as an earlier one is not computed again. A kernel depends only on these
    /// bytes, unless it has a table of addresses.
    pub reuses_results: bool,
    /// Regions that launches have written.
    written: HashSet<Region>,
    /// Kernels that the program does not have.
    missing: &'static BTreeSet<String>,
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
        Self::run_shared(Self::fast_program())
    }

    fn fast_program() -> &'static Path {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        PROGRAM.get_or_init(|| build(&all(), "fast", false))
    }

    /// Starts the fast program. The exponentials of attention err as much as Metal's specification allows.
    pub fn with_exp_errors() -> Self {
        Self::run_with(Self::fast_program(), &[("MOESTRO_FAST_EXP_ERRORS", "1")])
    }

    /// Starts the fast program without the kernels that need `tiles.metal`.
    pub fn plain() -> Self {
        static WITH_TILES: LazyLock<BTreeSet<String>> = LazyLock::new(names_with_tiles);
        let mut host = Self::fast();
        host.missing = &WITH_TILES;
        host
    }

    /// Starts the program with planted faults in the kernels.
    pub fn faulty() -> Self {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let file = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/faults.metal");
        Self::run_program(PROGRAM.get_or_init(|| build(&[file()], "faults", true)))
    }

    fn run_program(program: &'static Path) -> Self {
        Self::run_with(program, &[])
    }

    /// The program of an earlier test, or a new one.
    fn run_shared(program: &'static Path) -> Self {
        let mut idle = IDLE.lock().unwrap();
        let found = idle.iter().rposition(|running| running.program == program).map(|index| idle.remove(index));
        drop(idle);
        let mut host = found.map_or_else(|| Self::run_program(program), Self::on);
        host.is_shared = true;
        host
    }

    fn on(running: Running) -> Self {
        static NONE: BTreeSet<String> = BTreeSet::new();
        Self {
            running: Some(running),
            is_shared: false,
            buffers: 0,
            twice: true,
            reuses_results: false,
            written: HashSet::new(),
            missing: &NONE,
        }
    }

    fn run_with(program: &'static Path, environment: &[(&str, &str)]) -> Self {
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
        Self::on(Running { child, to, from, program })
    }

    /// A buffer of `len` bytes filled with 0xff. Read as floats, these bytes are NaN.
    pub fn empty(&mut self, len: usize) -> Region {
        self.filled(len, 0xff)
    }

    pub fn zeros(&mut self, len: usize) -> Region {
        self.filled(len, 0)
    }

    fn filled(&mut self, len: usize, fill: u8) -> Region {
        let buffer = self.buffers;
        self.buffers += 1;
        self.send(b"B", &[buffer, len as u32, fill.into()], &[]);
        Region { buffer, offset: 0, len }
    }

    /// Frees a buffer's memory.
    pub fn drop_buffer(&mut self, buffer: u32) {
        self.send(b"B", &[buffer, 0, 0], &[]);
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
        self.receive(&mut address);
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
        self.receive(&mut count);
        u64::from_le_bytes(count)
    }

    pub fn write(&mut self, region: Region, bytes: &[u8]) {
        assert_eq!(bytes.len(), region.len);
        self.send(b"W", &[region.buffer, region.offset as u32, region.len as u32], bytes);
    }

    pub fn read(&mut self, region: Region) -> Vec<u8> {
        self.send(b"R", &[region.buffer, region.offset as u32, region.len as u32], &[]);
        let mut bytes = vec![0; region.len];
        self.receive(&mut bytes);
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
        self.receive(&mut len);
        let mut names = vec![0; u32::from_le_bytes(len) as usize];
        self.receive(&mut names);
        let names = String::from_utf8(names).unwrap();
        let names = names.split_whitespace().map(String::from);
        names.filter(|name| !self.missing.contains(name)).collect()
    }

    /// Executes one launch. The error is the report of a sanitizer, of the barrier check or of the order check. After
    /// an error the program has exited.
    pub fn try_run(&mut self, launch: &Launch) -> Result<(), String> {
        for binding in &launch.bindings {
            if binding.access != BufferAccess::Read {
                self.written.insert(binding.region);
            } else if binding.is_index {
                let writer = self.written.iter().find(|written| written.overlaps(binding.region));
                assert_eq!(writer, None, "{} does not check numbers that a kernel writes", launch.kernel);
            }
        }
        let Some(dir) = record::wanted(launch) else { return self.execute(launch) };
        let before: Vec<_> = launch.bindings.iter().map(|binding| self.read(binding.region)).collect();
        self.execute(launch)?;
        let outputs = launch.bindings.iter().filter(|binding| binding.access != BufferAccess::Read);
        let after: Vec<_> = outputs.map(|binding| self.read(binding.region)).collect();
        record::write(&dir, launch, &before, &after);
        Ok(())
    }

    fn execute(&mut self, launch: &Launch) -> Result<(), String> {
        if self.missing.contains(launch.kernel) {
            return Err(format!("there is no kernel {}", launch.kernel));
        }
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
        let reuses_results = self.reuses_results && !launch.bindings.iter().any(|binding| binding.is_table);
        words.extend([launch.threads, self.twice.into(), reuses_results.into()]);
        let tail: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let name = [launch.kernel.as_bytes(), &tail].concat();
        self.send(b"D", &[launch.kernel.len() as u32], &name);
        let mut status = [0];
        if self.running().from.read_exact(&mut status).is_err() {
            self.is_shared = false;
            let mut report = String::new();
            match self.running().child.stderr.take() {
                Some(mut stderr) => _ = stderr.read_to_string(&mut report).unwrap(),
                None => report.push_str("the program has exited"),
            }
            return Err(format!("{}: {report}", launch.kernel));
        }
        if status[0] == 0 {
            return Ok(());
        }
        let mut len = [0; 4];
        self.receive(&mut len);
        let mut message = vec![0; u32::from_le_bytes(len) as usize];
        self.receive(&mut message);
        Err(String::from_utf8_lossy(&message).into_owned())
    }

    pub fn run(&mut self, launch: &Launch) {
        if let Err(fault) = self.try_run(launch) {
            panic!("{fault}");
        }
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("the program")
    }

    fn send(&mut self, what: &[u8], words: &[u32], data: &[u8]) {
        let words: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let to = &mut self.running().to;
        let _ = to.write_all(&[what, &words, data].concat()).and_then(|()| to.flush());
    }

    fn receive(&mut self, bytes: &mut [u8]) {
        self.running().from.read_exact(bytes).unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.is_shared && !std::thread::panicking() {
            self.send(b"X", &[], &[]);
            IDLE.lock().unwrap().extend(self.running.take());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
