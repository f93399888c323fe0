//! What Apple's compiler would refuse and C++ would not: pointers without an address space, `double`, library calls. Clang
//! knows address spaces; where there is none the test says so and passes.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

const COMMON: [&str; 7] =
    ["-std=c++14", "-fsyntax-only", "-nostdinc", "-Wall", "-Werror", "-Wno-unused-function", "-xc++"];

/// Clang's complaints about `text` behind the lint shim.
fn lint(text: &str) -> Result<(), String> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut command = Command::new("clang++");
    command.args(COMMON).arg("-I").arg(kernels).arg("-").stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut clang = command.spawn().map_err(|error| error.to_string())?;
    let source = format!("#include \"shim/lint.h\"\n#include \"codes.metal\"\n{text}\n");
    clang.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let done = clang.wait_with_output().unwrap();
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned()) }
}

fn absent() -> bool {
    let absent = Command::new("clang++").arg("--version").output().is_err();
    if absent {
        println!("there is no clang++ here: the kernels' address spaces are not checked");
    }
    absent
}

#[test]
fn every_kernel_keeps_to_the_dialect() {
    if absent() {
        return;
    }
    for file in crate::host::FILES {
        lint(&format!("#include \"{file}.metal\"")).unwrap_or_else(|complaints| panic!("{complaints}"));
    }
}

#[test]
fn slips_are_noticed() {
    if absent() {
        return;
    }
    let kernel = |body: &str| {
        format!("struct A {{ uint n; }};\nKERNEL(k, ARGS(A, a), IN(float, x, 1), OUT(float, y, 2)) {{ {body} }}")
    };
    lint(&kernel("y[tid] = x[tid] + float(a.n);")).unwrap();
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
}
