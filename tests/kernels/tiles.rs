//! Tests a compiler without matrix units: all other kernels must compile without `tiles.metal`, and the model must
//! work.

use crate::{
    forward::{answer, cases, options, planned},
    gpu::HostGpu,
    host::Host,
    lint::QUAD_FMA_KERNELS,
};
use moestro_compute::{device::kernels, ops::check};
use std::collections::BTreeSet;

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
    let missing: BTreeSet<_> = all.difference(&plain).map(String::as_str).collect();
    let others = [
        "attention_decode_tiles",
        "attention_prefill",
        "attention_prefill_i16",
        "block_attention_prefill",
        "block_attention_prefill_i16",
        "gemm",
        "gemm_any",
        "moe_down_gemm",
        "moe_down_gemm_any",
        "moe_gate_up_gemm",
        "moe_gate_up_gemm_any",
        "rows_to_half",
    ];
    assert_eq!(missing, QUAD_FMA_KERNELS.into_iter().chain(others).collect());
}

fn names(mut host: Host) -> BTreeSet<String> {
    host.names().into_iter().collect()
}

#[test]
#[ignore = "long: whole answers"]
fn demo_answers_without_tiles() {
    let [mut without, mut with] = [Host::plain(), Host::fast()].map(|host| planned(options(false), HostGpu::new(host)));
    let case = cases().swap_remove(0);
    let expected = answer(&mut with, &case.prompt_ids, &[], 8);
    assert_eq!(expected.0, case.greedy_ids[..8]);
    assert!(answer(&mut without, &case.prompt_ids, &[], 8) == expected);
}
