//! Checks for errors that only Apple's compiler or C++ library would report: pointers without an address space,
//! `double`, and library calls. The checks use clang's address spaces, C++ for OpenCL, and libc++. Without clang or
//! libc++, a test prints a message and passes.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

/// C++ with the address spaces of the lint shim.
const LINT: &[&str] =
    &["-std=c++14", "-fsyntax-only", "-nostdinc", "-Wall", "-Werror", "-Wno-unused-function", "-xc++"];
/// C++ for OpenCL, up to code generation.
#[rustfmt::skip]
const OPENCL: &[&str] = &[
    "-xcl", "-cl-std=clc++2021", "-target", "spir64", "-Wall", "-Werror", "-Wno-unused-function", "-S", "-emit-llvm", "-o", "/dev/null",
];
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

/// Compiles `source` with clang. The error is clang's output.
fn clang(arguments: &[&str], source: &str) -> Result<(), String> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut command = Command::new("clang++");
    command.args(arguments).arg("-I").arg(kernels).arg("-").stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut clang = command.spawn().map_err(|error| error.to_string())?;
    clang.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let done = clang.wait_with_output().unwrap();
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned()) }
}

fn lint(text: &str) -> Result<(), String> {
    clang(LINT, &format!("#include \"shim/lint.h\"\n#include \"quant.metal\"\n#include \"tiles.metal\"\n{text}\n"))
}

fn opencl(text: &str) -> Result<(), String> {
    clang(OPENCL, &format!("#include \"shim/opencl.h\"\n#include \"quant.metal\"\n#include \"tiles.metal\"\n{text}\n"))
}

fn absent() -> bool {
    let absent = Command::new("clang++").arg("--version").output().is_err();
    if absent {
        println!("skipped: clang++ is not installed");
    }
    absent
}

#[test]
fn kernels_compile_with_metal_address_spaces() {
    if absent() {
        return;
    }
    for file in crate::host::FILES {
        let text = format!("#include \"{file}.metal\"");
        lint(&text).and_then(|()| opencl(&text)).unwrap_or_else(|complaints| panic!("{complaints}"));
    }
}

#[test]
fn host_program_compiles_with_libcxx() {
    if absent() || clang(LIBCXX, "#include <version>\n").is_err() {
        println!("skipped: libc++ is not installed");
        return;
    }
    clang(LIBCXX, &crate::host::source()).unwrap_or_else(|complaints| panic!("{complaints}"));
}

#[test]
fn lint_finds_planted_errors() {
    if absent() {
        return;
    }
    let kernel = |body: &str| {
        format!("struct A {{ uint n; }};\nKERNEL(k, ARGS(A, a), IN(float, x, 1), OUT(float, y, 2)) {{ {body} }}")
    };
    let sound = kernel("y[tid] = x[tid] + float(a.n);");
    lint(&sound).and_then(|()| opencl(&sound)).unwrap();
    for (slip, complaint) in [
        ("const float* p = x; y[tid] = p[0];", "address"),
        ("double d = x[0]; y[tid] = float(d);", "poisoned"),
        ("x[tid] = y[tid];", "not assignable"),
        ("SHARED(float, part, 8); DEVICE float* p = part; p[0] = y[0];", "address"),
        ("y[tid] = sinf(x[tid]);", "undeclared"),
    ] {
        let complaints = lint(&kernel(slip)).expect_err(slip);
        assert!(complaints.contains(complaint), "{slip}: {complaints}");
    }
    let outside = "struct A { uint n; };\nFN uint where() { return tid; }";
    assert!(lint(outside).expect_err(outside).contains("undeclared"));
    for (slip, complaint) in [
        ("float (*f)(float) = simd_sum; y[tid] = f(x[tid]);", "pointers to functions"),
        ("DEVICE float* p = x; p[0] = 1;", "cannot initialize"),
    ] {
        let complaints = opencl(&kernel(slip)).expect_err(slip);
        assert!(complaints.contains(complaint), "{slip}: {complaints}");
    }
}
