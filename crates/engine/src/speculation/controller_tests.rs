use super::*;
use test_support::mutate::Dice;

/// Expected number of distinct experts that `rows` rows use, divided by the number that one row uses. Each row selects
/// 8 of 256 experts independently.
fn union(rows: usize) -> f64 {
    256.0 * (1.0 - (1.0 - 8.0f64 / 256.0).powi(rows as i32)) / 8.0
}

fn auto(most: usize) -> SpeculationController {
    SpeculationController::new(DraftPolicy::Auto, most)
}

/// A simulated machine and draft. The unit of time is a plain step.
struct World<P, R> {
    /// Time of a pass with the given number of rows, without the draft's time to catch up.
    pass: P,
    /// Probability that a drafted token is accepted, by its position in the answer and in the cycle.
    right: R,
    /// Time to copy hidden rows, per step.
    observe: f64,
    /// Time that the draft takes to catch up, for each token it has not evaluated yet. At most 512 tokens count.
    catch_up: f64,
    /// Total time that each rejected row adds to the next 12 steps, because the row has evicted experts.
    evicts: f64,
    /// If true, passes have noise of about 15 %.
    noisy: bool,
}

/// The result of a simulated run.
struct SimulatedRun {
    time: f64,
    /// Time of the same number of tokens with plain steps.
    plain: f64,
    /// The largest loss of a run of consecutive cycles.
    worst_probe: f64,
}

impl<P: Fn(usize) -> f64, R: Fn(usize, usize) -> f64> World<P, R> {
    fn run(&self, controller: &mut SpeculationController, dice: &mut Dice, most: usize) -> SimulatedRun {
        let mut time = 0.0;
        let mut tokens = 0;
        let mut missed = 0;
        let mut worst_probe = 0f64;
        let mut lost = 0.0;
        let mut owed = [0.0; 12];
        let one = (self.pass)(1);
        while tokens < most {
            let rows = controller.next_rows();
            let noise = if self.noisy { 0.75 + 0.5 * dice.fraction() } else { 1.0 };
            let observe = if controller.wants_hidden_rows() { self.observe } else { 0.0 };
            let mut seconds = (self.pass)(rows) * noise;
            let accepted = (0..rows - 1).take_while(|&at| dice.fraction() < (self.right)(tokens + at, at)).count();
            seconds += owed[0];
            owed.rotate_left(1);
            owed[11] = 0.0;
            if rows == 1 {
                let [is_plain, is_bare] =
                    [false, true].map(|uses_hidden_rows| controller.next_is_plain(uses_hidden_rows));
                controller.record_plain(seconds, observe);
                missed += 1;
                lost = 0.0;
                assert!(!is_plain || controller.clone().next_rows() == 1);
                assert!(!is_bare || controller.clone().next_rows() == 1 && !controller.wants_hidden_rows());
            } else {
                let drafting = self.catch_up * f64::from(missed.min(512));
                seconds += drafting;
                missed = 0;
                controller.record_cycle(rows - 1, accepted, seconds + observe, drafting);
                let late = self.evicts * (rows - 1 - accepted) as f64;
                owed.iter_mut().for_each(|owed| *owed += late / 12.0);
                lost += seconds + observe + late - one * (accepted + 1) as f64;
                worst_probe = worst_probe.max(lost);
            }
            time += seconds + observe;
            tokens += accepted + 1;
        }
        SimulatedRun { time, plain: one * tokens as f64, worst_probe }
    }
}

/// Time of 1,500 tokens relative to plain steps. `pass` returns the time of a pass with the given number of rows,
/// including the draft.
fn run(
    controller: &mut SpeculationController,
    dice: &mut Dice,
    pass: impl Fn(usize) -> f64,
    right: impl Fn(usize, usize) -> f64,
) -> f64 {
    let ran = World { pass, right, observe: 0.0, catch_up: 0.0, evicts: 0.0, noisy: true }.run(controller, dice, 1500);
    ran.time / ran.plain
}

fn mean(cost: impl Fn(usize) -> f64 + Copy, right: impl Fn(usize, usize) -> f64 + Copy) -> (f64, f64) {
    let runs: Vec<f64> = (1..=20).map(|seed| run(&mut auto(15), &mut Dice(seed), cost, right)).collect();
    (runs.iter().sum::<f64>() / 20.0, runs.iter().copied().fold(0.0, f64::max))
}

#[test]
fn profitable_width_is_found() {
    let resident = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
    let (mean, _) = mean(resident, |_, _| 0.82);
    // With the best fixed width, the answer takes 0.37 of the time of plain steps.
    assert!(mean < 0.45, "{mean}");
}

#[test]
fn useless_drafts_cost_at_most_two_percent() {
    let resident = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
    let disk = |rows: usize| 0.1 + 0.9 * union(rows) + if rows > 1 { 0.03 } else { 0.0 };
    for (what, (mean, worst)) in [
        ("bad draft", mean(resident, |_, _| 0.15)),
        ("never right", mean(resident, |_, _| 0.0)),
        ("good draft, cold disk", mean(disk, |_, _| 0.82)),
        ("broken draft, cold disk", mean(disk, |_, _| 0.02)),
        ("right every 300 tokens", mean(resident, |token, _| f64::from(u8::from(token % 300 == 0)))),
    ] {
        assert!(mean < 1.02 && worst < 1.04, "{what}: {mean}, at worst {worst}");
    }
}

/// Drafts that never save time cost 1 % of the time plus the most expensive probe, whether verifies are cheap or
/// expensive. The bound is higher if steps after a cycle stay slow for more than [`AFTERMATH_STEPS`] steps.
#[test]
fn adversarial_draft_costs_one_percent_plus_probe() {
    let cheap = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
    let expensive = |rows: usize| 0.1 + 0.9 * union(rows) + if rows > 1 { 0.5 } else { 0.0 };
    let never = |_: usize, _: usize| 0.0;
    let seldom = |token: usize, _: usize| f64::from(u8::from(token.is_multiple_of(300)));
    let first = |_: usize, place: usize| f64::from(u8::from(place == 0)) * 0.3;
    for (cost, pass) in [("cheap", &cheap as &dyn Fn(usize) -> f64), ("expensive", &expensive)] {
        for (how, right) in [("never", &never as &dyn Fn(usize, usize) -> f64), ("seldom", &seldom), ("first", &first)]
        {
            for (observe, catch_up, most) in
                [(0.0, 0.0, 1500), (0.01, 0.02, 1500), (0.01, 0.02, 20_000), (0.1, 0.2, 20_000)]
            {
                for (evicts, noisy) in [(0.0, false), (0.5, false), (0.5, true)] {
                    let world = World { pass, right, observe, catch_up, evicts, noisy };
                    let ran = world.run(&mut auto(7), &mut Dice(7), most);
                    let over = (ran.time - ran.worst_probe) / ran.plain;
                    // The bound allows for noise, which is a fraction of 1 % with this number of tokens.
                    let bound = 1.0101 + if evicts > 0.0 { 0.005 } else { 0.0 } + if noisy { 0.005 } else { 0.0 };
                    assert!(over < bound, "{cost}, {how} right, {observe} {catch_up} {evicts} {most}: {over}");
                }
            }
        }
    }
}

#[test]
fn changing_draft_quality_is_tracked() {
    let cost = |rows: usize| 0.6 + 0.05 * rows as f64 + 0.35 * union(rows) + if rows > 1 { 0.04 } else { 0.0 };
    let (mean, worst) = mean(cost, |token, _| if token / 300 % 2 == 1 { 0.93 } else { 0.25 });
    assert!(mean < 1.01 && worst < 1.03, "{mean}, at worst {worst}");
}

/// At first, verifies are expensive because no expert is cached. The controller probes again later.
#[test]
fn speculation_starts_once_the_cache_is_warm() {
    let expensive = |rows: usize| 0.1 + 0.9 * union(rows);
    let cheap = |rows: usize| 1.0 + 0.1 * (rows - 1) as f64;
    let mut controller = auto(7);
    let mut dice = Dice(3);
    let cold = run(&mut controller, &mut dice, expensive, |_, _| 0.8);
    assert!(cold < 1.02 && controller.state_name() != "speculate", "{cold}");
    let mean = (0..4).map(|_| run(&mut controller, &mut dice, cheap, |_, _| 0.8)).sum::<f64>() / 4.0;
    assert!(mean < 0.75, "{mean}");
}

#[test]
fn off_and_force_ignore_measurements() {
    assert_eq!(SpeculationController::new(DraftPolicy::Off, 8).next_rows(), 1);
    assert_eq!(SpeculationController::new(DraftPolicy::Force, 4).next_rows(), 5);
    assert_eq!(SpeculationController::new(DraftPolicy::Force, 99).next_rows(), 16);
    assert_eq!(auto(0).next_rows(), 1);
}

fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-9 * expected.abs().max(1.0)
}

#[test]
fn balance_counts_every_second() {
    let mut controller = auto(7);
    controller.record_prompt(100.0, 1.5);
    assert_eq!(controller.saved, 0.0, "2 % of a prompt is free");
    controller.record_prompt(100.0, 2.5);
    assert_eq!(controller.saved, -0.5);
    controller.saved = 0.0;

    controller.record_plain(5.0, 0.0);
    controller.record_plain(4.0, 0.0);
    assert_eq!((controller.plain_seconds, controller.saved), (None, 0.0), "the first two steps do not count");
    controller.record_plain(1.0, 0.25);
    assert_eq!((controller.plain_seconds, controller.total, controller.saved), (Some(1.0), 10.25, -0.25));
    controller.record_plain(2.0, 0.0);
    assert!(near(controller.plain_seconds.unwrap(), 1.1));
    controller.record_plain(100.0, 0.0);
    assert!(near(controller.plain_seconds.unwrap(), 1.1 + 0.1 * 2.2), "outliers are limited to three times the mean");
    assert_eq!(controller.state, ControllerState::Calibrate { left: 3, speculating: false });

    controller.plain_seconds = Some(1.5);
    controller.saved = 0.0;
    controller.total = 10.0;
    controller.tokens = 5;
    assert!(near(controller.record_cycle(4, 2, 2.0, 0.5), 3.0 * 1.5 - 2.0));
    assert!(near(controller.saved, 2.5) && near(controller.total, 12.0));
    assert_eq!((controller.tokens, controller.steps_since_cycle, controller.verify_seconds), (8, 0, 1.5));
    let cycles = |controller: &SpeculationController| controller.cycle_seconds;
    assert_eq!(cycles(&controller), [None, None, None, Some(2.0), None, None, None, None], "five rows");
    let right = [1.4 * 0.95 + 1.0, 2.0 * 0.95 + 1.0];
    let wrong = [1.4 * 0.95, 2.0 * 0.95 + 1.0];
    assert_eq!(controller.acceptance[..4], [right, right, wrong, PRIOR]);
    assert!(near(controller.record_cycle(4, 4, 3.0, 0.0), 5.0 * 1.5 - 3.0));
    assert!(near(controller.cycle_seconds[3].unwrap(), 2.2));
    assert!(controller.acceptance[3][0] == PRIOR[0] * 0.95 + 1.0 && controller.acceptance[4] == PRIOR);
    // The extra time of each of the eight plain steps after a cycle counts as a cost of the cycle, limited to three
    // times the mean. The first two of these steps do not change the mean.
    let before = controller.saved;
    controller.record_plain(2.0, 0.0);
    assert!(near(before - controller.saved, 0.5));
    controller.record_plain(50.0, 0.0);
    assert!(near(before - controller.saved, 0.5 + 3.0));
    assert_eq!(controller.plain_seconds, Some(1.5));
    (0..6).for_each(|_| controller.record_plain(2.5, 0.0));
    // Relative to the mean before the cycle.
    assert!(near(before - controller.saved, 0.5 + 3.0 + 6.0) && controller.plain_seconds > Some(1.9));
    controller.record_plain(2.5, 0.0);
    assert!(near(before - controller.saved, 0.5 + 3.0 + 6.0), "the ninth step does not count");
    assert!(near(controller.budget(0.02), controller.saved + 0.02 * (controller.total + controller.saved)));
    assert!(near(auto(7).record_cycle(3, 1, 2.0, 0.0), 0.0), "no plain step to compare with");
}

#[test]
fn width_choice_uses_tokens_and_time() {
    let mut controller = auto(15);
    assert_eq!(controller.best_width(false), None, "no plain step was measured");
    controller.plain_seconds = Some(2.0);
    assert!(near(controller.expected_tokens(1), 1.0) && near(controller.expected_tokens(3), 1.0 + 0.7 + 0.49));
    let estimate = |controller: &SpeculationController, width| controller.estimate_seconds(width).unwrap();
    assert!(near(estimate(&controller, 0), 2.0 + 0.15 * 2.0), "one row more");
    controller.cycle_seconds[3] = Some(3.0);
    assert_eq!(controller.estimate_seconds(3), Some(3.0));
    assert!(near(estimate(&controller, 5), 3.0 + 0.15 * 2.0 * 3.0), "eight rows are three more than five");
    assert!(near(estimate(&controller, 1), 2.0 + 2.0 * (3.0 - 2.0) / 4.0), "three rows are half way to five");
    controller.cycle_seconds[0] = Some(2.7);
    assert!(near(estimate(&controller, 2), 2.7 + 2.0 * (3.0 - 2.7) / 3.0), "four rows lie between two and five");
    controller.cycle_seconds[0] = None;
    let gain = controller.expected_tokens(5) * 2.0 / 3.0;
    assert!(controller.best_width(true).is_some_and(|(found, rows)| near(found, gain) && rows == 5));
    controller.max_rows = 4;
    assert_eq!(controller.best_width(true), None);
    assert_eq!(controller.best_width(false).map(|(_, rows)| rows), Some(4));

    controller.max_rows = 6;
    let widths = [5, 5, 5, 5, 6, 6, 2, 2].map(|width| controller.neighbour_width(width));
    assert_eq!(widths, [6, 4, 6, 4, 6, 5, 3, 2], "there is no width below 2");
}

/// Expects eight calibration steps, plain steps until token 16, then a probe of three cycles. After that, every 16th
/// cycle tries a neighbouring width, and eight calibration steps follow the 64th cycle.
#[test]
fn controller_states_have_fixed_lengths() {
    let mut controller = auto(3);
    let mut steps = Vec::new();
    for _ in 0..200 {
        let rows = controller.next_rows();
        steps.push((rows, controller.state_name()));
        match rows {
            1 => controller.record_plain(1.0, 0.0),
            rows => drop(controller.record_cycle(rows - 1, rows - 1, 1.0 + 0.01 * rows as f64, 0.0)),
        }
    }
    let plain = steps.iter().take_while(|(rows, _)| *rows == 1).count();
    assert!(steps[..8].iter().all(|step| *step == (1, "calibrate")), "{steps:?}");
    assert!(steps[8..plain].iter().all(|step| step.1 == "plain"), "{steps:?}");
    assert!(plain >= 16 && steps[plain..plain + 3].iter().all(|step| *step == (4, "probe")), "{steps:?}");
    let from = plain + 3;
    let cycle = |nth: usize| steps[from + nth];
    for nth in 0..64 {
        let is_neighbour = nth > 0 && nth % 16 == 0;
        assert_eq!(cycle(nth).1, "speculate", "{nth}: {steps:?}");
        assert!(is_neighbour || cycle(nth).0 == 4, "{nth}: {steps:?}");
    }
    assert_eq!([cycle(16).0, cycle(32).0], [4, 3], "four rows are the most, so the next is narrower");
    assert!((64..72).all(|nth| cycle(nth) == (1, "calibrate")), "{steps:?}");
    assert_eq!(cycle(72), (4, "speculate"));
    let page = include_str!("../../../../docs/metrics.md");
    let row = page.lines().find(|line| line.contains("moestro_draft_states_total")).unwrap();
    assert!(steps.iter().all(|(_, state)| row.contains(&format!("`{state}`"))), "{row}");
}

/// A controller in a probe of two rows, of which `left` cycles are left.
fn probing(left: u32) -> SpeculationController {
    let state = ControllerState::Probe { left, rows: 2 };
    SpeculationController { state, plain_seconds: Some(1.0), ..auto(1) }
}

#[test]
fn hopeless_probe_ends_early() {
    // With two rows, a cycle has 1.7 tokens on average, so these cycles have gains of 0.74 and 0.76.
    for (gain, left, rows) in [(0.74, 1, 1), (0.76, 1, 2), (0.76, 0, 1)] {
        let mut controller = probing(left);
        controller.cycle_seconds[0] = Some(1.7 / gain);
        assert_eq!(controller.next_rows(), rows, "gain {gain}, {left} cycles left");
    }
    // The probe ends after one cycle if the verify alone took too long. Its time is stored as an estimate.
    for (verify, rows) in [(1.7 / 0.74, 1), (1.7 / 0.76, 2)] {
        let mut controller = probing(2);
        controller.verify_seconds = verify;
        assert_eq!((controller.next_rows(), controller.cycle_seconds[0].is_some()), (rows, rows == 1), "{verify}");
    }
    let mut controller = probing(1);
    controller.acceptance[0] = [1.0, 2.0];
    controller.cycle_seconds[0] = Some(2.0);
    let choice = (controller.best_width(true), controller.next_rows());
    assert_eq!(choice, (Some((HOPELESS_GAIN, 2)), 2), "not below the threshold");
    controller.state = ControllerState::Probe { left: 0, rows: 2 };
    controller.acceptance[0] = [1.0, 20.0];
    controller.cycle_seconds[0] = Some(1.0);
    let choice = (controller.best_width(true), controller.next_rows());
    assert_eq!(choice, (Some((MIN_START_GAIN, 2)), 1), "not above the threshold");
}

#[test]
fn hidden_rows_are_wanted_before_probes() {
    let mut controller = auto(7);
    assert!(controller.wants_hidden_rows(), "the first probe is near");
    controller.state = ControllerState::Plain;
    controller.total = 100.0;
    controller.tokens = 100;
    controller.next_probe = 164;
    assert!(controller.wants_hidden_rows());
    controller.next_probe = 165;
    assert!(!controller.wants_hidden_rows(), "the probe is 65 tokens away");
    controller.next_probe = 164;
    controller.saved = -0.995;
    assert!(!controller.wants_hidden_rows(), "the loss budget is used up");
    controller.state = ControllerState::Speculating { cycles: 3 };
    assert!(controller.wants_hidden_rows());
    let wants = |policy| SpeculationController::new(policy, 7).wants_hidden_rows();
    assert!(wants(DraftPolicy::Force) && !wants(DraftPolicy::Off));
}

/// A controller after 500 plain tokens in 100 s that wants to probe.
fn due(saved: f64) -> SpeculationController {
    SpeculationController {
        state: ControllerState::Plain,
        plain_seconds: Some(1.0),
        total: 100.0,
        tokens: 500,
        next_probe: 500,
        saved,
        ..auto(1)
    }
}

#[test]
fn probe_waits_for_its_budget() {
    for (saved, wait) in [(-1.4, Some(71)), (-0.9, Some(32)), (0.0, None)] {
        let mut controller = due(saved);
        // A cycle of two rows is estimated at 1.15 s, so two cycles lose 0.3 s. The budget is
        // `0.01 * (100 + saved) + saved`, and each plain step adds 0.01.
        let rows = controller.next_rows();
        if let Some(wait) = wait {
            assert_eq!((rows, controller.next_probe), (1, 500 + wait));
            assert_eq!(controller.state, ControllerState::Plain);
        } else {
            assert_eq!((rows, controller.state), (2, ControllerState::Probe { left: PROBE_CYCLES, rows: 2 }));
        }
    }
    let mut controller = due(0.0);
    controller.acceptance[0] = [0.1, 2.0];
    assert_eq!((controller.next_rows(), controller.next_probe), (1, 564), "no expected gain doubles the wait");
    assert!(near(controller.acceptance[0][0], 0.75 * 0.1 + 0.25 * 1.4) && near(controller.acceptance[0][1], 2.0));
}
