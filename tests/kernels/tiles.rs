//! Tests a compiler without matrix units: all other kernels must compile without `tiles.metal`, and the model must
//! work.

use crate::{
    forward::{DEMO, answer, cases, common::load_with, options},
    gpu::HostGpu,
    host::Host,
};
use moestro_compute::{device::kernels, ops::check};
use moestro_model::model::LoadOptions;
use std::{
    collections::BTreeSet,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

/// Checks one file with the system's compiler and the host shim.
fn compiles(text: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
    command.args(["-std=c++17", "-fsyntax-only", "-w", "-xc++", "-I"]).arg(folder).arg("-");
    let mut compiler = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    compiler.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let done = compiler.wait_with_output().unwrap();
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned()) }
}

/// Joins a kernel file with the other parts of its source like `kernels::metal_source`, but with the host shim.
fn joined(text: &str, tiles: Option<&str>) -> String {
    let (mark, tiles) = tiles.map_or(("#define NO_TILES", ""), |tiles| ("", tiles));
    format!("{mark}\n#include \"shim/host.h\"\n{}\n{tiles}\n{text}\n", kernels::QUANT)
}

#[test]
#[ignore = "exhaustive: compiles every kernel twice"]
fn other_kernels_compile_without_tiles() {
    let file = |name: &str| vec![(name.to_string(), Ok(()))];
    let sound = kernels::compile(false, |name, text, tiles| {
        compiles(&joined(text, tiles.then_some(kernels::TILES))).map(|()| file(name))
    });
    assert!(sound.has_tiles && sound.refused.is_empty(), "{:?}", sound.refused);
    let broken = kernels::TILES.replace("SUM_TILE", "nobody_knows_this");
    let refused = kernels::compile(false, |name, text, tiles| {
        compiles(&joined(text, tiles.then_some(&broken))).map(|()| file(name))
    });
    assert!(!refused.has_tiles && refused.refused.is_empty(), "{:?}", refused.refused);
    assert_eq!(refused.pipelines.len(), kernels::FILES.len());
}

#[test]
fn metal_source_omits_tiles() {
    for kernels::KernelFile { name, text, .. } in kernels::FILES {
        let (with, without) = (kernels::metal_source(text, true), kernels::metal_source(text, false));
        assert!(with.contains(kernels::TILES) && !with.contains("#define NO_TILES"), "{name}");
        assert!(!without.contains(kernels::TILES) && without.starts_with("#define NO_TILES\n"), "{name}");
    }
}

#[test]
fn other_kernels_agree_without_tiles() {
    let (found, _) = check::kernels(HostGpu::new(Host::plain()).queue());
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.agrees()).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let compared: BTreeSet<String> = found.into_iter().map(|finding| finding.name).collect();
    let (all, plain): (BTreeSet<_>, BTreeSet<_>) = (names(Host::start()), names(Host::plain()));
    assert!(plain.is_subset(&compared), "{compared:?}");
    let missing: Vec<_> = all.difference(&plain).map(String::as_str).collect();
    let expected = [
        "attention_decode_tiles",
        "attention_prefill",
        "attention_prefill_i16",
        "block_attention_prefill",
        "block_attention_prefill_i16",
        "gemm",
        "gemm_any",
        "gemm_short_16",
        "gemm_short_32",
        "gemm_short_64",
        "gemv_tiles_16",
        "gemv_tiles_4",
        "gemv_tiles_8",
        "gemv_tiles_conv",
        "gemv_tiles_pair_4",
        "gemv_tiles_pair_8",
        "gemv_tiles_pair_conv",
        "gemv_tiles_wide_16",
        "moe_down_gemm",
        "moe_down_gemm_any",
        "moe_down_tiles",
        "moe_down_tiles_1",
        "moe_gate_up_gemm",
        "moe_gate_up_gemm_any",
        "moe_gate_up_tiles",
        "rows_to_half",
        "split_rows",
    ];
    assert_eq!(missing, expected);
}

fn names(mut host: Host) -> BTreeSet<String> {
    host.names().into_iter().collect()
}

#[test]
#[ignore = "long: whole answers"]
fn demo_answers_without_tiles() {
    let on = |host| {
        let options = LoadOptions { gpu: Some(u64::MAX), ..options(false) };
        let gpu = HostGpu::new(host).queue();
        load_with(Path::new(DEMO), options).move_to(gpu).unwrap_or_else(|refused| panic!("{}", refused.error))
    };
    let (mut without, mut with) = (on(Host::plain()), on(Host::fast()));
    let case = cases().swap_remove(0);
    let expected = answer(&mut with, &case.prompt_ids, &[], 8);
    assert_eq!(expected.0, case.greedy_ids[..8]);
    assert!(answer(&mut without, &case.prompt_ids, &[], 8) == expected);
}
