use super::*;
use model_35b::model_35b;
use proptest::{
    prelude::{Just, any, prop_assert, prop_assert_eq, prop_oneof, proptest},
    strategy::Strategy as _,
};

#[path = "model_35b.rs"]
mod model_35b;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn limits() -> MachineLimits {
    MachineLimits { ram: Some(64 * GIB), gpu: None, cgroup: None, process: 100 << 20 }
}

fn limited(limit: u64) -> PlanOptions {
    PlanOptions { limit: Some(limit), ..PlanOptions::default() }
}

fn plan_of(footprint: &ModelFootprint, options: PlanOptions) -> Plan {
    Plan::new(footprint, &limits(), &options).unwrap()
}

fn plan(limit: u64) -> Plan {
    plan_of(&model_35b(), limited(limit))
}

#[test]
fn smallest_limit_applies() {
    let mut limits = limits();
    assert_eq!(limits.choose(None), (48 * GIB, LimitSource::Ram));
    assert_eq!(limits.choose(Some(GIB)), (GIB, LimitSource::Asked));
    assert_eq!(limits.choose(Some(60 * GIB)), (60 * GIB, LimitSource::Asked));
    assert_eq!(limits.choose(Some(99 * GIB)), (64 * GIB, LimitSource::Ram));
    limits.gpu = Some(40 * GIB);
    assert_eq!(limits.choose(None), (38 * GIB, LimitSource::Gpu));
    assert_eq!(limits.choose(Some(60 * GIB)), (38 * GIB, LimitSource::Gpu));
    assert_eq!(limits.choose(Some(30 * GIB)), (30 * GIB, LimitSource::Asked));
    limits.cgroup = Some(11 * GIB);
    assert_eq!(limits.choose(None).1, LimitSource::Cgroup);
    assert!(limits.choose(Some(11 * GIB)).0.abs_diff(10 * GIB) < 16);
    assert_eq!(MachineLimits::default().choose(None), (FALLBACK_LIMIT, LimitSource::Fallback));
}

#[test]
fn process_memory_leaves_room_to_grow() {
    assert_eq!([0, 80 * MIB].map(process_memory), [16 * MIB, 106 * MIB]);
}

#[test]
fn model_that_fits_is_resident() {
    let plan = plan(40 * GIB);
    assert_eq!(plan.strategy, Strategy::Resident);
    assert_eq!(plan.slots, 40 * 256);
    assert_eq!((plan.context, plan.chunk), (262_144, 2048));
    assert!(plan.overcommit < 1.0 && plan.residency == 1.0);
}

#[test]
fn model_that_does_not_fit_streams() {
    let plan = plan(8 * GIB);
    assert_eq!(plan.strategy, Strategy::Streaming);
    assert!(plan.slots > 2700 && plan.slots < 3900, "{}", plan.slots);
    assert!(plan.context >= 4096 && plan.context <= 32768);
    assert!(plan.overcommit > 2.0, "{}", plan.overcommit);
    // The slots get all memory that other parts do not need. The loss by rounding is less than one slot plus two steps.
    let footprint = model_35b();
    let rounding = footprint.slot + 256 * footprint.kv_per_token + 64 * footprint.workspace_per_row;
    assert!(plan.limit - plan.total() <= rounding);
}

#[test]
fn refusal_states_sum_and_sufficient_limit() {
    for (serving, asked) in [(false, 2 * GIB), (true, 2 * GIB), (true, MIB)] {
        let options = |limit| PlanOptions { serving, ..limited(limit) };
        let text = Plan::new(&model_35b(), &limits(), &options(asked)).unwrap_err().to_string();
        assert!(text.contains(&format!("{} (--memory-limit)", Size(asked))), "{text}");
        assert!(text.contains("320 expert slots (40 layers x 8 experts a token)"), "{text}");
        let advice = text.split("--memory-limit ").nth(1).and_then(|t| t.split('M').next()).unwrap();
        let advice: u64 = advice.parse::<u64>().unwrap() << 20;
        let fits =
            |limit, process| Plan::new(&model_35b(), &MachineLimits { process, ..limits() }, &options(limit)).is_ok();
        // The process may take a little more memory at the next start.
        assert!(fits(advice, limits().process + 6 * MIB), "{text}");
        assert!(!fits(advice - 8 * MIB, limits().process), "{text}");
    }
}

/// A footprint with round numbers, so that plans can be computed by hand.
fn small() -> ModelFootprint {
    ModelFootprint {
        trunk: 100 * MIB,
        gathered: 0,
        head: 0,
        expert: MIB,
        slot: 2 * MIB,
        layers: 4,
        experts: 32,
        experts_per_token: 2,
        kv_per_token: 1024,
        state: 3 * MIB,
        sequence: 4 * MIB,
        sequence_per_row: 1024,
        workspace_per_row: 4096,
        workspace_fixed: 5 * MIB,
        context: 100_000,
        draft: DraftFootprint { fixed: 7 * MIB, per_token: 1024, per_row: 4096 },
        vision: 0,
    }
}

#[test]
fn parts_match_hand_computed_plan() {
    let limits = MachineLimits { ram: Some(GIB), gpu: None, cgroup: None, process: 10 * MIB };
    let options = PlanOptions { serving: true, ..limited(320 * MIB) };
    let plan = Plan::new(&small(), &limits, &options).unwrap();
    // The smallest plan has 171 MiB: process 10, trunk 100, state 3, workspace 5, draft 7, requests 20, 8 slots of 2
    // MiB, 4096 tokens of 2 KiB (keys, values and draft), and 256 rows of 8 KiB (workspace and draft). Of the other 149
    // MiB, context and prompt cache get 1/16 each, and the chunk gets its maximum of 14 MiB. The slots get the
    // remaining 116.4 MiB, which is enough for 58 more slots.
    let context = 4096 + 4608;
    let chunk = 256 + 1792;
    let expected = Plan {
        strategy: Strategy::Streaming,
        limit: 320 * MIB,
        limit_from: LimitSource::Asked,
        process: 10 * MIB,
        trunk: 100 * MIB,
        kv: context * 1024,
        state: 3 * MIB,
        workspace: 5 * MIB + chunk * 4096,
        draft: 7 * MIB + context * 1024 + chunk * 4096,
        vision: 0,
        requests: 20 * MIB,
        prompt_cache: 149 * MIB / 16,
        experts: 132 * MIB,
        page_cache: 0,
        slots: 66,
        residency: 66.0 / 128.0,
        overcommit: (319.3125 - 132.0 + 256.0) / 320.0,
        context: context as usize,
        chunk: chunk as usize,
        parallel: 1,
    };
    assert_eq!(plan, expected);
    assert_eq!(plan.total(), 3_193_125 * MIB / 10_000);

    // With half as many experts, every expert has a slot. The context gets the remaining 4.4 MiB.
    let plan = Plan::new(&ModelFootprint { experts: 16, ..small() }, &limits, &options).unwrap();
    assert_eq!((plan.strategy, plan.slots, plan.residency), (Strategy::Resident, 64, 1.0));
    assert_eq!((plan.context, plan.chunk), (4096 + 6912, 2048));

    let plan = Plan::new(&small(), &limits, &PlanOptions { prompt_cache: Some(6 * MIB), ..options }).unwrap();
    assert_eq!((plan.prompt_cache, plan.slots), (6 * MIB, 8 + (129 * MIB - 143 * MIB / 16) as usize / (2 << 20)));

    // Without memory for requests, the smallest plan has 151 MiB. 1/8 of the other 64 MiB is enough for 1024 rows.
    let plan = Plan::new(&small(), &limits, &limited(215 * MIB)).unwrap();
    assert_eq!(plan.chunk, 256 + 1024);
}

#[test]
fn pages_cover_context_and_quarter_of_cache() {
    let options = PlanOptions { context: Some(4096), prompt_cache: Some(6 * MIB), ..limited(320 * MIB) };
    let plan = plan_of(&small(), options);
    // A page has 256 positions of 1024 bytes. There are 16 pages for the context, and 6 pages in 1.5 MiB of the prompt
    // cache.
    assert_eq!((plan.kv, plan.pages(256 * 1024), plan.states(MIB)), (4 * MIB, 16 + 6, 4));
    assert_eq!(Plan { prompt_cache: 0, ..plan }.pages(256 * 1024), 16);
}

#[test]
fn streaming_plan_bounds_context_and_chunk() {
    let plan = plan_of(&ModelFootprint { experts: 4096, ..small() }, limited(4 * GIB));
    assert_eq!((plan.strategy, plan.context, plan.chunk), (Strategy::Streaming, 32768, 2048));
}

#[test]
fn refusal_names_only_parts_that_exist() {
    let options = limited(100 * MIB);
    let why = |footprint: &ModelFootprint, options: &PlanOptions| {
        Plan::new(footprint, &limits(), options).unwrap_err().to_string()
    };
    let parts = ["the draft model 7.0 MiB", "requests 16.0 MiB", "prompt cache 6.0 MiB"];
    let all = why(&small(), &PlanOptions { serving: true, prompt_cache: Some(6 * MIB), ..options });
    assert!(parts.iter().all(|part| all.contains(&format!(" + {part}"))), "{all}");
    assert!(all.contains("workspace for chunks of 256 tokens 7.0 MiB"), "{all}");
    let none = why(&ModelFootprint { draft: DraftFootprint::default(), ..small() }, &options);
    assert!(["draft", "requests", "cache "].iter().all(|part| !none.replace("KV cache", "").contains(part)), "{none}");
}

#[test]
fn stream_experts_switch_forces_strategy() {
    let on = plan_of(&model_35b(), PlanOptions { stream: Some(true), ..limited(40 * GIB) });
    assert_eq!((on.strategy, on.slots), (Strategy::Streaming, 40 * 256));
    let options = PlanOptions { stream: Some(false), ..limited(8 * GIB) };
    let text = Plan::new(&model_35b(), &limits(), &options).unwrap_err().to_string();
    assert!(text.contains("all of them") && text.ends_with("or --stream-experts auto"), "{text}");
}

#[test]
fn buffered_reads_leave_memory_to_page_cache() {
    let plan = plan_of(&model_35b(), PlanOptions { buffered: true, ..limited(8 * GIB) });
    assert_eq!(plan.slots, 2 * 320);
    assert!(plan.page_cache > 4 * GIB);
    assert_eq!(plan.total() + plan.page_cache, plan.limit);
}

#[test]
fn page_cache_holds_experts_outside_limit() {
    // All experts together have 16.9 GiB.
    let holds = |limit: u64, machine: MachineLimits| {
        let plan = Plan::new(&model_35b(), &machine, &limited(limit)).unwrap();
        plan.page_cache_holds_experts(&model_35b(), &machine)
    };
    for (ram, limit, expected) in [(64, 8, true), (32, 8, true), (30, 8, false), (24, 8, false)] {
        let machine = MachineLimits { ram: Some(ram * GIB), ..limits() };
        assert_eq!(holds(limit * GIB, machine), expected, "{limit} of {ram} GiB");
    }
    assert!(!holds(8 * GIB, MachineLimits { cgroup: Some(12 * GIB), ..limits() }));
    assert!(!holds(40 * GIB, MachineLimits { ram: Some(128 * GIB), ..limits() }), "the model is resident");
}

#[test]
fn sequences_multiply_kv_and_state() {
    let options = PlanOptions { context: Some(8192), ..limited(8 * GIB) };
    let at = |sequences| plan_of(&model_35b(), PlanOptions { sequences, ..options });
    let (one, three) = (plan_of(&model_35b(), options), at(3));
    assert_eq!((three.kv, three.state), (3 * one.kv, 3 * one.state));
    assert!(three.slots < one.slots && three.total() <= three.limit);
    assert_eq!(at(1), one);
}

#[test]
fn each_parallel_request_takes_a_state() {
    let options = PlanOptions { chunk: Some(256), ..limited(8 * GIB) };
    let at = |count| plan_of(&small(), PlanOptions { parallel: Parallel::Count(count), ..options });
    let (one, three) = (at(1), at(3));
    assert_eq!((one.parallel, three.parallel), (1, 3));
    assert_eq!(three.state, one.state + 2 * 4 * MIB);
    assert_eq!(three.workspace, one.workspace + 2 * 256 * 1024);
    // The three requests share the pages of one context.
    assert_eq!(three.kv, one.kv);
}

#[test]
fn auto_parallel_follows_free_memory() {
    let at = |limit| plan_of(&model_35b(), PlanOptions { parallel: Parallel::Auto, ..limited(limit) });
    // The four cases: resident with at least an eighth of the limit free, resident with less memory free, streaming,
    // and a small limit.
    let limits_in_mib = [48 << 10, 23 << 10, 8 << 10, 2300];
    assert_eq!(limits_in_mib.map(|mib| at(mib * MIB).parallel), [4, 2, 2, 1]);
    assert_eq!(at(23 * GIB).slots, plan(23 * GIB).slots);
}

#[test]
fn dense_model_has_no_slots() {
    let footprint = ModelFootprint { expert: 0, slot: 0, layers: 0, experts: 0, experts_per_token: 0, ..model_35b() };
    let plan = plan_of(&footprint, PlanOptions::default());
    assert_eq!((plan.strategy, plan.slots, plan.experts), (Strategy::Resident, 0, 0));
}

#[test]
fn sizes_are_formatted() {
    let words = [0, 1023, 1536, 5 << 20, 3 << 29].map(|bytes| Size(bytes).to_string());
    assert_eq!(words, ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "1.50 GiB"]);
}

fn footprints() -> impl proptest::strategy::Strategy<Value = ModelFootprint> {
    let bytes = (1u64..4 << 30, 1u64..30 << 20, 1u64..1 << 17, 0u64..1 << 28, 1u64..1 << 20);
    let counts = (0usize..64, 1usize..512, 1usize..16, 1usize..300_000);
    (bytes, counts).prop_map(|((trunk, expert, kv, state, row), (layers, experts, k, context))| ModelFootprint {
        trunk,
        gathered: trunk / 5,
        head: trunk / 5,
        expert,
        slot: expert.next_multiple_of(4096),
        layers,
        experts,
        experts_per_token: k.min(experts),
        kv_per_token: kv,
        state,
        sequence: state + row,
        sequence_per_row: row / 3,
        workspace_per_row: row,
        workspace_fixed: 1 << 20,
        context,
        draft: DraftFootprint { fixed: state, per_token: kv / 2, per_row: row / 3 },
        vision: 0,
    })
}

fn options() -> impl proptest::strategy::Strategy<Value = PlanOptions> {
    let stream = prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
    let context = proptest::option::of(1usize..300_000);
    let chunk = proptest::option::of(1usize..8192);
    let cache = proptest::option::of(0u64..2 << 30);
    let switches = (any::<bool>(), any::<bool>());
    let parallel = (1usize..5).prop_map(Parallel::Count);
    (stream, context, chunk, cache, parallel, switches).prop_map(|all| {
        let (stream, context, chunk, prompt_cache, parallel, (buffered, serving)) = all;
        PlanOptions { limit: None, stream, context, chunk, prompt_cache, parallel, sequences: 1, serving, buffered }
    })
}

#[test]
fn requests_are_reserved_only_when_serving() {
    let options = |limit| PlanOptions { serving: true, ..limited(limit) };
    let at = |limit| plan_of(&model_35b(), options(limit));
    assert_eq!([3 * GIB, 40 * GIB].map(|limit| at(limit).requests), [128 << 20; 2]);
    let small = ModelFootprint { trunk: 1 << 20, layers: 0, experts: 0, state: 0, kv_per_token: 64, ..model_35b() };
    let at = |limit| Plan::new(&small, &MachineLimits { process: 1 << 20, ..limits() }, &options(limit)).unwrap();
    assert_eq!([512 << 20, 1 << 30].map(|limit| at(limit).requests), [32 << 20, 64 << 20]);
    assert_eq!(plan(40 * GIB).requests, 0);
}

#[test]
fn overflowing_sizes_are_refused() {
    let base = limited(8 * GIB);
    for options in [
        PlanOptions { context: Some(1 << 62), ..base },
        PlanOptions { chunk: Some(usize::MAX), ..base },
        PlanOptions { prompt_cache: Some(u64::MAX), ..base },
    ] {
        let refused = Plan::new(&model_35b(), &limits(), &options).unwrap_err().to_string();
        assert!(refused.contains("does not fit in 8.00 GiB"), "{refused}");
    }
    let vast = ModelFootprint { slot: u64::MAX / 2, ..model_35b() };
    assert!(Plan::new(&vast, &limits(), &base).is_err());
}

proptest! {
    #[test]
    fn sum_never_exceeds_limit(footprint in footprints(), options in options(), limit in 0u64..200 << 30) {
        let limits = MachineLimits { process: 50 << 20, ..MachineLimits::default() };
        let Ok(plan) = Plan::new(&footprint, &limits, &PlanOptions { limit: Some(limit), ..options }) else { return Ok(()) };
        prop_assert_eq!(plan.limit, limit);
        prop_assert!(plan.total() + plan.page_cache <= limit, "{plan:?}");
        prop_assert!(plan.slots as u64 >= footprint.working_set());
        prop_assert!(plan.slots as u64 <= footprint.total_experts());
        prop_assert_eq!(plan.experts, plan.slots as u64 * footprint.slot);
        prop_assert_eq!(plan.kv, plan.context as u64 * footprint.kv_per_token);
        prop_assert!(plan.chunk >= 1);
        prop_assert_eq!(plan.context, options.context.unwrap_or(plan.context.min(footprint.context)));
    }

    #[test]
    fn more_memory_never_shrinks_any_part(
        footprint in footprints(), options in options(), limit in 0u64..100 << 30, more in 0u64..20 << 30,
    ) {
        let limits = MachineLimits { process: 50 << 20, ..MachineLimits::default() };
        let at = |limit| Plan::new(&footprint, &limits, &PlanOptions { limit: Some(limit), ..options });
        let Ok(small) = at(limit) else { return Ok(()) };
        let large = at(limit + more).expect("a plan that fits in less memory fits in more");
        prop_assert!(large.slots >= small.slots);
        prop_assert!(large.context >= small.context);
        prop_assert!(large.chunk >= small.chunk);
        prop_assert!(large.prompt_cache >= small.prompt_cache);
        prop_assert!(large.strategy == small.strategy || large.strategy == super::Strategy::Resident);
    }
}
