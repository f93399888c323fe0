//! Checks for errors that only Apple's compiler or C++ library would report: pointers without an address space,
//! `double`, library calls, and more memory or buffers than Metal allows. The checks use clang's C++ for OpenCL, whose
//! address spaces are Metal's, and libc++. Without clang or libc++, a test prints a message and passes. With
//! `MOESTRO_REQUIRE_CLANG` set, as in CI, it fails.

use crate::host::{self, Host, kernel_source};
use moestro_compute::device::kernels;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

/// C++ for OpenCL with the stand-in for Metal's standard library, for exactly the text that Metal compiles.
#[rustfmt::skip]
const PRINTED: &[&str] = &[
    "-xcl", "-cl-std=clc++2021", "-target", "spir64", "-nostdinc", "-cl-no-stdinc", "-Wall", "-Werror", "-Wno-unused-function",
    "-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-Wno-ignored-attributes",
    "-I", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernels/stand_in"),
];
/// Prints the syntax tree.
const TREE: &[&str] = &["-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics"];
/// Prints the unoptimised code, in which all threadgroup memory is left.
const CODE: &[&str] = &["-O0", "-S", "-emit-llvm", "-o", "-"];

/// Maximum number of buffers of a kernel on Metal, with the arguments.
const MAX_BUFFERS: usize = 31;
/// Maximum number of bytes of threadgroup memory of a kernel on Apple's GPUs.
const MAX_THREADGROUP_BYTES: usize = 32 << 10;
/// Maximum number of bytes of inline arguments (the limit of `setBytes`).
const MAX_ARGUMENT_BYTES: usize = 4096;

/// The host program with Apple's C++ library.
const LIBCXX: &[&str] = &[
    "-std=c++17",
    "-stdlib=libc++",
    "-fsyntax-only",
    "-Wall",
    "-Werror",
    "-Wno-unused",
    "-Wno-unknown-pragmas",
    "-xc++",
];

/// Compiles `source` with clang and returns what clang prints. The error is clang's output.
fn clang(arguments: &[&str], source: &str) -> Result<String, String> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut command = Command::new("clang++");
    command.args(arguments).arg("-I").arg(kernels).arg("-");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut clang = command.spawn().map_err(|error| error.to_string())?;
    clang.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let done = clang.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

/// True if clang or a part of it is missing. Prints which part.
fn is_missing(what: &str, arguments: &[&str]) -> bool {
    let Err(error) = clang(arguments, "int unused();\n") else { return false };
    assert!(std::env::var_os("MOESTRO_REQUIRE_CLANG").is_none(), "{what} is not installed: {error}");
    println!("skipped: {what} is not installed: {error}");
    true
}

/// The text of all kernel files in one, each in a namespace of its name.
fn text_of_all_files() -> String {
    let file = |file: kernels::KernelFile| {
        let kernels::KernelFile { name, text, .. } = file;
        format!("namespace {name} {{\n#line 1 \"{name}.metal\"\n{text}\n}}\n")
    };
    kernels::FILES.map(file).concat()
}

fn absent() -> bool {
    is_missing("clang++ with C++ for OpenCL 2021", &[PRINTED, &["-fsyntax-only"]].concat())
}

/// Kernels that need QUAD_FMA, which Metal does not have.
pub const QUAD_FMA_KERNELS: [&str; 22] = [
    "gemm_short_16",
    "gemm_short_32",
    "gemm_short_64",
    "gemv_tiles_16",
    "gemv_tiles_4",
    "gemv_tiles_8",
    "gemv_tiles_conv",
    "gemv_tiles_floats_16",
    "gemv_tiles_floats_4",
    "gemv_tiles_floats_8",
    "gemv_tiles_floats_conv",
    "gemv_tiles_pair_4",
    "gemv_tiles_pair_8",
    "gemv_tiles_pair_conv",
    "gemv_tiles_trio_8",
    "gemv_tiles_wide_16",
    "moe_down_tiles",
    "moe_down_tiles_1",
    "moe_gate_up_tiles_1",
    "moe_gate_up_tiles_2",
    "moe_gate_up_tiles_4",
    "split_rows",
];

/// The features of Metal that a kernel needs.
#[derive(Debug, Default, PartialEq)]
struct KernelNeeds {
    buffers: usize,
    argument_bytes: usize,
    threadgroup_bytes: usize,
}

/// Checks the text that Metal gets. Returns the needs of each kernel. The error is the first rule that the text breaks.
fn printed(text: &str) -> Result<BTreeMap<String, KernelNeeds>, String> {
    let tree = clang(&[PRINTED, TREE].concat(), text)?;
    if let Some(pointer) = tree.lines().find(|line| lacks_address_space(line)) {
        return Err(format!("no address space: {pointer}"));
    }
    let found = kernel_needs(&clang(&[PRINTED, CODE].concat(), text)?);
    for (name, needs) in &found {
        let is_small = needs.threadgroup_bytes <= MAX_THREADGROUP_BYTES;
        if needs.buffers > MAX_BUFFERS || needs.argument_bytes > MAX_ARGUMENT_BYTES || !is_small {
            return Err(format!("{name} exceeds a limit of Metal: {needs:?}"));
        }
    }
    Ok(found)
}

/// True if a line of the syntax tree declares a pointer or a reference without an address space, which clang calls
/// generic and Apple's compiler rejects. Members that the compiler generates have unnamed references.
fn lacks_address_space(line: &str) -> bool {
    let Some((before, declared)) = line.split_once(" '") else { return false };
    let is_declaration = ["VarDecl", "FieldDecl", "FunctionDecl"].iter().any(|kind| before.contains(kind));
    let is_named = before.rsplit(' ').next().is_some_and(|word| !word.contains([':', '>']) && word != "used");
    let declared = declared.split('\'').next().unwrap();
    let is_pointer = declared.split("__generic").skip(1).any(|rest| rest.contains('*'));
    is_declaration && declared.contains("__generic") && (is_named || is_pointer)
}

/// Reads the needs of each kernel from clang's code. Address space 1 is a device buffer, 2 the arguments, 3 threadgroup
/// memory.
fn kernel_needs(code: &str) -> BTreeMap<String, KernelNeeds> {
    let mut found: BTreeMap<String, KernelNeeds> = BTreeMap::new();
    for line in code.lines() {
        if let Some((_, kernel)) = line.split_once("spir_kernel void @").filter(|_| line.starts_with("define")) {
            let (name, parameters) = kernel.split_once('(').unwrap();
            let needs = found.entry(name.into()).or_default();
            needs.buffers = parameters.matches("addrspace(1)").count() + parameters.matches("addrspace(2)").count();
            let sizes = parameters.split("dereferenceable(").skip(1);
            needs.argument_bytes = sizes.map(|rest| rest.split(')').next().unwrap().parse::<usize>().unwrap()).sum();
        } else if let Some((name, declared)) = line.split_once("addrspace(3) global ") {
            let declared = declared.rsplit_once(" undef").unwrap().0;
            found.entry(kernel_of(name)).or_default().threadgroup_bytes += bytes_of(declared);
        }
    }
    found
}

/// The kernel to which a variable in threadgroup memory belongs: `k` of `@_ZZ1kE4name`, of `@_ZZN4file1kE4name`, or of
/// `@k.name`.
fn kernel_of(variable: &str) -> String {
    let name = variable.trim_start_matches('@');
    let Some(mut mangled) = name.strip_prefix("_ZZ") else { return name.split('.').next().unwrap().into() };
    mangled = mangled.trim_start_matches('N');
    let mut last = "";
    while mangled.starts_with(|first: char| first.is_ascii_digit()) {
        let digits = mangled.chars().take_while(char::is_ascii_digit).count();
        (last, mangled) = mangled[digits..].split_at(mangled[..digits].parse().unwrap());
    }
    last.into()
}

/// Size of a type in clang's code: a number, or `[count x type]` or `<count x type>`.
fn bytes_of(kind: &str) -> usize {
    if let Some(inner) = kind.strip_prefix(['[', '<']) {
        let (count, each) = inner[..inner.len() - 1].split_once(" x ").unwrap();
        return count.parse::<usize>().unwrap() * bytes_of(each);
    }
    match kind {
        "i8" => 1,
        "i16" | "half" => 2,
        "i32" | "float" => 4,
        "i64" => 8,
        _ => panic!("the size of {kind} in threadgroup memory is unknown"),
    }
}

#[test]
fn printed_kernels_obey_metals_rules() {
    if absent() {
        return;
    }
    // Otherwise one text would not prove all language versions.
    let whole = |has_tiles| kernels::metal_source(&text_of_all_files(), has_tiles);
    assert!(!whole(true).contains("__METAL_VERSION__"), "the kernels depend on the language version");
    clang(&[PRINTED, &["-fsyntax-only"]].concat(), &whole(false)).unwrap_or_else(|broken| panic!("no tiles: {broken}"));
    let found = printed(&whole(true)).unwrap_or_else(|broken| panic!("{broken}"));
    assert_eq!(printed(kernels::METAL_FAULT).unwrap()["fault"].argument_bytes, 4);
    let mut names = BTreeSet::from_iter(Host::start().names());
    for name in QUAD_FMA_KERNELS {
        assert!(names.remove(name), "{name}");
    }
    assert_eq!(Vec::from_iter(found.keys()), Vec::from_iter(&names));
    // The reader of clang's code sees the buffers and the memory.
    let most = |of: fn(&KernelNeeds) -> usize| found.values().map(of).max().unwrap();
    println!("at most {} buffers", most(|needs| needs.buffers));
    println!("at most {} bytes of threadgroup memory", most(|needs| needs.threadgroup_bytes));
    println!("at most {} bytes of arguments", most(|needs| needs.argument_bytes));
    assert!(found.values().all(|needs| needs.buffers >= 2 && needs.argument_bytes >= 4), "{found:?}");
    assert!(most(|needs| needs.threadgroup_bytes) > 16 << 10, "{found:?}");
}

#[test]
fn printed_kernels_with_planted_errors_fail() {
    if absent() {
        return;
    }
    let kernel = |parameters: &str, body: &str| {
        let text = format!("KERNEL(k, ARGS(A, a), IN(float, x, 1), OUT(float, y, 2){parameters}) {{ {body} }}");
        format!("struct A {{ uint n; }};\n{text}")
    };
    let check = |text: &str| printed(&format!("{}\n{text}", kernels::METAL_SHIM));
    let inputs = |to: usize| (3..=to).map(|slot| format!(", IN(float, x{slot}, {slot})")).collect::<String>();
    let shared =
        |floats: usize| kernel("", &format!("SHARED(float, part, {floats}); part[tid] = x[tid]; y[tid] = part[0];"));
    let matrix = |kind: &str| {
        let load = format!("{kind} m; simdgroup_load(m, (THREADGROUP const half*)part, 8);");
        kernel("", &format!("SHARED(uint, part, 64); part[tid] = a.n; {load} y[tid] = x[tid];"))
    };
    let arguments =
        |words: usize| kernel("", "y[tid] = x[a.n];").replace("uint n;", &format!("uint n; uint w[{}];", words - 1));
    let function = |parameter: &str| format!("FN float first({parameter}) {{ return p[0]; }}\n");
    let sound = kernel("", "THREAD float v = x[tid]; THREAD float* p = &v; y[tid] = p[0];");
    assert_eq!(check(&sound).unwrap()["k"], KernelNeeds { buffers: 3, argument_bytes: 4, threadgroup_bytes: 0 });
    // The largest sizes that Metal allows.
    assert_eq!(check(&kernel(&inputs(30), "y[tid] = x30[tid];")).unwrap()["k"].buffers, 31);
    assert_eq!(check(&shared(8 << 10)).unwrap()["k"].threadgroup_bytes, 32 << 10);
    assert_eq!(check(&arguments(1024)).unwrap()["k"].argument_bytes, 4096);
    check(&matrix("simdgroup_half8x8")).unwrap();
    check(&(function("THREAD float* p") + &sound)).unwrap();
    for (slip, complaint) in [
        (kernel("", "THREAD float v = x[tid]; float* p = &v; y[tid] = p[0];"), "no address space"),
        (kernel("", "THREAD float v = x[tid]; float& r = v; y[tid] = r;"), "no address space"),
        (kernel("", "DEVICE float* p = y; float* q = p; q[tid] = x[tid];"), "no address space"),
        (function("float* p") + &sound, "no address space"),
        (format!("FN float first(float*);\n{sound}"), "no address space"),
        (format!("struct B {{ float* p; }};\n{sound}"), "no address space"),
        (kernel("", "DEVICE float* p = x; y[tid] = p[0];"), "cannot initialize"),
        (kernel(&inputs(31), "y[tid] = x31[tid];"), "buffers: 32"),
        (shared(33 << 8), "threadgroup_bytes: 33792"),
        (arguments(1025), "argument_bytes: 4100"),
        (matrix("simdgroup_float8x8"), "no matching function"),
        (kernel("", "y[tid] = sinf(x[tid]);"), "undeclared"),
        (kernel("", "BARRIERS(); y[tid] = x[tid];"), "undeclared"),
        (format!("FN uint where() {{ return tid; }}\n{sound}"), "undeclared"),
        (kernel("", "double d = x[0]; y[tid] = float(d);"), "poisoned"),
        (kernel("", "x[tid] = y[tid];"), "not assignable"),
        (kernel("", "SHARED(float, part, 8); DEVICE float* p = part; p[0] = y[0];"), "cannot initialize"),
        (kernel("", "float (*f)(float) = simd_sum; y[tid] = f(x[tid]);"), "pointers to functions"),
    ] {
        let complaints = check(&slip).expect_err(&slip);
        assert!(complaints.contains(complaint), "{slip}: {complaints}");
    }
}

#[test]
fn host_program_compiles_with_libcxx() {
    if absent() || is_missing("libc++", &[LIBCXX, &["-include", "version"]].concat()) {
        return;
    }
    // Most of the time is for the C++ library's templates, which add a kernel to the program. One kernel is enough for them.
    let plain = "#undef KERNEL\n#define KERNEL(name, ...) static void name(__VA_ARGS__)\n#include \"quant.metal\"";
    let kernels = kernel_source(&host::all(), true).replace("#include \"quant.metal\"", plain);
    let one = "\nKERNEL(one, ARGS(uint, n), OUT(uint, y, 1)) { y[tid] = n; }\n";
    for source in [kernels, host::MAIN_SOURCE.replacen('\n', one, 1)] {
        clang(LIBCXX, &source).unwrap_or_else(|complaints| panic!("{complaints}"));
    }
}
