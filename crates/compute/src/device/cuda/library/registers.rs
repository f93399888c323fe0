//! Registers and spills of every kernel, compared with a table. NVIDIA's compiler counts the registers without a GPU. A
//! kernel that needs many registers there probably also needs many on Apple's GPUs, whose compiler prints no counts. So
//! the count has Apple's limit instead of the limit of the kernel's file.

use super::{KernelSource, nvrtc};
use crate::device::kernels::{FILES, KernelFile};
use moestro_base::platform::run_jobs;
use std::{collections::BTreeMap, fmt::Write};
use test_support::own_process::ran_in_own_process_with;

/// The version of NVRTC with which the table was made. Other versions count other numbers.
const VERSION: (i32, i32) = (13, 5);
/// A GPU allocates registers in units of this many per thread.
const UNIT: u32 = 8;
/// The most registers that a thread of Apple's GPUs can have.
const MOST: u32 = 128;

/// The registers and the spills of a kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct KernelRegisters {
    /// Registers per thread.
    wanted: u32,
    /// Bytes that each thread writes to memory and reads from it, because the registers do not suffice.
    spilled: u32,
}

impl KernelRegisters {
    /// The most registers that the kernel may want without a new table.
    fn limit(self) -> u32 {
        self.wanted.next_multiple_of(UNIT)
    }
}

/// Reads the registers and spilled bytes of each kernel from the compiler's log.
fn read_log(log: &str) -> BTreeMap<String, KernelRegisters> {
    let mut found: BTreeMap<String, KernelRegisters> = BTreeMap::new();
    let (mut kernel, mut spilled) = (String::new(), 0);
    let before = |line: &str, what: &str| -> Option<u32> {
        line.split_once(what)?.0.trim_end().rsplit([' ', ',']).next()?.parse().ok()
    };
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().into();
        }
        if let Some(stores) = before(line, "bytes spill stores") {
            spilled = stores + before(line, "bytes spill loads").unwrap_or(0);
        }
        if let Some(wanted) = before(line, "registers") {
            found.insert(kernel.clone(), KernelRegisters { wanted, spilled });
        }
    }
    found
}

/// Compiles every file.
fn count_all() -> BTreeMap<String, KernelRegisters> {
    let compile = |file: KernelFile| {
        let mut source = KernelSource::new(KernelFile { registers: MOST, ..file }, "sm_90", 0, None);
        source.options.push("--ptxas-options=-v".into());
        let (_, log) = source.build().map_err(|log| format!("{}: {log}", file.name))?;
        Ok(read_log(&log))
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let files = run_jobs("nvrtc", threads, FILES.to_vec(), || Ok::<_, String>(()), |file, ()| compile(file));
    files.unwrap_or_else(|log| panic!("{log}")).into_iter().flatten().collect()
}

fn write_table(counts: &BTreeMap<String, KernelRegisters>) -> String {
    let mut table = String::from("kernel,registers,limit,spilled_bytes\n");
    for (kernel, counts) in counts {
        let _ = writeln!(table, "{kernel},{},{},{}", counts.wanted, counts.limit(), counts.spilled);
    }
    table
}

/// The differences from the table: a kernel above its limit or with more spills, or missing on one side.
fn complaints(counts: &BTreeMap<String, KernelRegisters>, table: &str) -> Vec<String> {
    let row = |line: &str| {
        let (kernel, rest) = line.split_once(',').unwrap();
        let numbers: Vec<u32> = rest.split(',').map(|number| number.parse().unwrap()).collect();
        (kernel.to_string(), (numbers[1], numbers[2]))
    };
    let table: BTreeMap<String, (u32, u32)> = table.lines().skip(1).map(row).collect();
    let gone = table.keys().filter(|kernel| !counts.contains_key(*kernel)).map(|kernel| format!("{kernel} is gone"));
    let above = counts.iter().filter_map(|(kernel, counts)| match table.get(kernel) {
        None => Some(format!("{kernel} is new")),
        Some((limit, _)) if counts.wanted > *limit => {
            Some(format!("{kernel}: {} registers, limit {limit}", counts.wanted))
        }
        Some((_, spilled)) if counts.spilled > *spilled => Some(format!("{kernel} spills {} bytes", counts.spilled)),
        Some(_) => None,
    });
    gone.chain(above).collect()
}

/// Does the same as [`ran_in_own_process_with`]. The child process has no cache of NVRTC. Since CUDA 12.9, NVRTC has
/// one in the user's home directory, and cached code comes without a log.
pub(super) fn ran_without_nvrtc_cache<T: Copy>(test: T) -> bool {
    let home = tempfile::tempdir().unwrap();
    ran_in_own_process_with(test, |child| {
        child.env("CUDA_CACHE_DISABLE", "1").env("CUDA_CACHE_PATH", home.path()).env("HOME", home.path());
    })
}

/// Runs only with the NVRTC of the table. Needs no GPU. With `MOESTRO_REQUIRE_NVRTC` set, as in CI, it must run.
#[test]
fn registers_and_spills_are_within_their_limits() {
    let required = std::env::var_os("MOESTRO_REQUIRE_NVRTC").is_some();
    // SAFETY: as in `KernelSource::build`. The second call writes two integers.
    let version = unsafe {
        nvrtc::sys::is_culib_present().then(|| {
            let (mut major, mut minor) = (0, 0);
            nvrtc::sys::nvrtcVersion(&mut major, &mut minor).result().map(|()| (major, minor))
        })
    };
    if version != Some(Ok(VERSION)) {
        assert!(!required, "this test needs NVRTC {VERSION:?}, not {version:?}");
        return println!("skipped: the table is for NVRTC {VERSION:?}, not {version:?}");
    }
    if ran_without_nvrtc_cache(registers_and_spills_are_within_their_limits) {
        return;
    }
    let counts = count_all();
    println!("{}", write_table(&counts));
    let complaints = complaints(&counts, include_str!("../../../../../../benches/results/registers.csv"));
    let what = "benches/results/registers.csv: either mend the kernel, or replace the table by the one printed above";
    assert!(complaints.is_empty(), "{what}:\n{}", complaints.join("\n"));
}

#[test]
fn planted_rises_exceed_the_limits() {
    let log = "ptxas info    : Compiling entry function 'gemv_1' for 'sm_90'\n\
        ptxas info    : Function properties for gemv_1\n\
        ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
        ptxas info    : Used 77 registers, used 1 barriers, 16 bytes cumulative stack size\n\
        ptxas info    : Compiling entry function 'embed' for 'sm_90'\n\
        ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 32 registers, used 0 barriers\n";
    let counts = read_log(log);
    let [gemv, embed] = ["gemv_1", "embed"].map(|kernel| counts[kernel]);
    assert_eq!(
        (gemv, embed),
        (KernelRegisters { wanted: 77, spilled: 20 }, KernelRegisters { wanted: 32, spilled: 0 })
    );
    let table = write_table(&counts);
    assert_eq!(table, "kernel,registers,limit,spilled_bytes\nembed,32,32,0\ngemv_1,77,80,20\n");
    let with = |kernel: &str, counts: KernelRegisters| {
        let mut all = read_log(log);
        all.insert(kernel.into(), counts);
        complaints(&all, &table)
    };
    // Fewer registers, or more within the same unit, are no rise.
    assert!(with("gemv_1", KernelRegisters { wanted: 80, spilled: 0 }).is_empty());
    assert_eq!(with("gemv_1", KernelRegisters { wanted: 81, ..gemv }), ["gemv_1: 81 registers, limit 80"]);
    assert_eq!(with("embed", KernelRegisters { spilled: 4, ..embed }), ["embed spills 4 bytes"]);
    assert_eq!(with("swiglu", embed), ["swiglu is new"]);
    assert_eq!(complaints(&BTreeMap::from([("embed".into(), embed)]), &table), ["gemv_1 is gone"]);
}
