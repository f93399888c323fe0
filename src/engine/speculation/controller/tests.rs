use super::*;

/// Noise of about 15 % and events, from a counter: the same at every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn noise(&mut self) -> f64 {
        0.75 + 0.5 * self.roll()
    }
}

/// Experts that `n` rows ask for, in units of one row's, when they choose 8 of 256 independently.
fn union(rows: usize) -> f64 {
    256.0 * (1.0 - (1.0 - 8.0f64 / 256.0).powi(rows as i32)) / 8.0
}

/// A machine and a draft, in plain steps' time.
struct World<P, R> {
    /// A pass of so many rows, drafting included.
    pass: P,
    /// The probability that the draft is right about a token, at a place in a cycle.
    right: R,
    /// Following the model for the draft, each step.
    follow: f64,
    /// The time to read each token that the draft missed, 512 of them at most.
    behind: f64,
    noisy: bool,
}

/// Of a run: the time, that of plain steps, and what its dearest cycles in a row lost.
struct Ran {
    time: f64,
    plain: f64,
    probe: f64,
}

impl<P: Fn(usize) -> f64, R: Fn(usize, usize) -> f64> World<P, R> {
    fn run(&self, controller: &mut Controller, dice: &mut Dice, most: usize) -> Ran {
        let (mut time, mut tokens, mut missed) = (0.0, 0, 0);
        let (mut probe, mut lost) = (0f64, 0.0);
        let one = (self.pass)(1);
        while tokens < most {
            let rows = controller.rows();
            let noise = if self.noisy { dice.noise() } else { 1.0 };
            let follow = if controller.follows() { self.follow } else { 0.0 };
            let mut seconds = (self.pass)(rows) * noise;
            let accepted = (0..rows - 1).take_while(|&place| dice.roll() < (self.right)(tokens + place, place)).count();
            if rows == 1 {
                controller.plain(seconds, follow);
                (missed, lost) = (missed + 1, 0.0);
            } else {
                seconds += self.behind * f64::from(missed.min(512));
                missed = 0;
                controller.cycle(rows - 1, accepted, seconds + follow);
                lost += seconds + follow - one * (accepted + 1) as f64;
                probe = probe.max(lost);
            }
            time += seconds + follow;
            tokens += accepted + 1;
        }
        Ran { time, plain: one * tokens as f64, probe }
    }
}

/// The time of 1,500 tokens, in that of plain steps. `pass` is of so many rows, drafting included.
fn run(
    controller: &mut Controller,
    dice: &mut Dice,
    pass: impl Fn(usize) -> f64,
    right: impl Fn(usize, usize) -> f64,
) -> f64 {
    let ran = World { pass, right, follow: 0.0, behind: 0.0, noisy: true }.run(controller, dice, 1500);
    ran.time / ran.plain
}

fn mean(cost: impl Fn(usize) -> f64 + Copy, right: impl Fn(usize, usize) -> f64 + Copy) -> (f64, f64) {
    let runs = (1..=20).map(|seed| run(&mut Controller::new(Speculate::Auto, 15), &mut Dice(seed), cost, right));
    let runs: Vec<f64> = runs.collect();
    (runs.iter().sum::<f64>() / 20.0, runs.iter().copied().fold(0.0, f64::max))
}

#[test]
fn what_pays_is_found() {
    let resident = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
    let (mean, _) = mean(resident, |_, _| 0.82);
    // The best fixed width takes 0.37 of the time.
    assert!(mean < 0.45, "{mean}");
}

#[test]
fn what_does_not_pay_costs_two_percent_at_most() {
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

/// Drafts that never pay, on machines where a pass of rows costs little or much: what is lost is 2 % of the time and a probe.
#[test]
fn an_adversary_costs_two_percent_and_a_probe() {
    let cheap = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
    let dear = |rows: usize| 0.1 + 0.9 * union(rows) + if rows > 1 { 0.5 } else { 0.0 };
    let never = |_: usize, _: usize| 0.0;
    let seldom = |token: usize, _: usize| f64::from(u8::from(token.is_multiple_of(300)));
    let first = |_: usize, place: usize| f64::from(u8::from(place == 0)) * 0.3;
    for (cost, pass) in [("cheap", &cheap as &dyn Fn(usize) -> f64), ("dear", &dear)] {
        for (how, right) in [("never", &never as &dyn Fn(usize, usize) -> f64), ("seldom", &seldom), ("first", &first)]
        {
            for (follow, behind, most) in
                [(0.0, 0.0, 1500), (0.01, 0.02, 1500), (0.01, 0.02, 20_000), (0.1, 0.2, 20_000)]
            {
                for noisy in [false, true] {
                    let world = World { pass, right, follow, behind, noisy };
                    let ran = world.run(&mut Controller::new(Speculate::Auto, 7), &mut Dice(7), most);
                    let over = (ran.time - ran.probe) / ran.plain;
                    // Noise alone is a part of a hundredth of the time of so few tokens.
                    assert!(
                        over < if noisy { 1.022 } else { 1.0201 },
                        "{cost}, {how} right, {follow} {behind} {most}: {over}"
                    );
                }
            }
        }
    }
}

/// Following costs something, and is not done while no probe is near.
#[test]
fn nothing_is_followed_while_no_probe_is_near() {
    let mut controller = Controller::new(Speculate::Auto, 7);
    let (mut followed, mut cycles) = (0, 0);
    for _ in 0..8000 {
        match controller.rows() {
            1 => controller.plain(1.0, 0.0),
            rows => {
                assert!(controller.follows(), "a draft that is asked has followed");
                controller.cycle(rows - 1, 0, rows as f64);
                cycles += 1;
            }
        }
        followed += u32::from(controller.follows());
    }
    assert!((4..40).contains(&cycles) && followed < 1600, "{cycles} cycles, {followed} followed");
}

#[test]
fn a_draft_that_turns_bad_is_left_and_one_that_turns_good_is_found() {
    let cost = |rows: usize| 0.6 + 0.05 * rows as f64 + 0.35 * union(rows) + if rows > 1 { 0.04 } else { 0.0 };
    let (mean, worst) = mean(cost, |token, _| if token / 300 % 2 == 1 { 0.93 } else { 0.25 });
    assert!(mean < 1.01 && worst < 1.03, "{mean}, at worst {worst}");
}

#[test]
fn off_is_off_and_force_is_the_full_width() {
    assert_eq!(Controller::new(Speculate::Off, 8).rows(), 1);
    assert_eq!(Controller::new(Speculate::Force, 4).rows(), 5);
    assert_eq!(Controller::new(Speculate::Force, 99).rows(), 16);
    assert_eq!(Controller::new(Speculate::Auto, 0).rows(), 1);
}
