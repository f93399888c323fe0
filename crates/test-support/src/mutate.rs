//! Makes random changes to bytes and JSON, to simulate accidents and attacks. The same seed gives the same changes.

use crate::split_mix64;
use serde_json::Value;

/// A seeded random number generator.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        split_mix64::next(&mut self.0)
    }

    /// A number below `sides`, which must not be 0.
    pub fn below(&mut self, sides: usize) -> usize {
        (self.roll() % sides as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A number from 0 to 1.
    pub fn fraction(&mut self) -> f64 {
        (self.roll() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number from -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (2.0 * self.fraction() - 1.0) as f32
    }

    /// A random number with approximately normal distribution, mean 0 and standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.fraction() - 0.5).sum();
        (sum * 3f64.sqrt()) as f32
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Makes one to four changes: flips bits, or truncates, removes, repeats or overwrites bytes.
pub fn bytes(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..1 + dice.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = dice.below(bytes.len());
        let len = 1 + dice.below(64.min(bytes.len() - at));
        match dice.below(6) {
            0 => bytes[at] ^= 1 << dice.below(8),
            1 => bytes[at] = dice.roll() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..at + len)),
            4 => {
                let again = bytes[at..at + len].to_vec();
                bytes.splice(at..at, again);
            }
            _ => bytes[at..at + len].fill(*dice.pick(&[0, 255, b'9', b'[', b'"'])),
        }
    }
}

const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "255",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "0.5",
];

/// Changes one to three values of a document.
pub fn json(dice: &mut Dice, document: &mut Value) {
    for _ in 0..1 + dice.below(3) {
        let here = somewhere(dice, document);
        match (dice.below(8), &mut *here) {
            (0, Value::Object(map)) if !map.is_empty() => {
                let name = map.keys().nth(dice.below(map.len())).unwrap().clone();
                map.shift_remove(&name);
            }
            (1, Value::Array(list)) if !list.is_empty() => drop(list.remove(dice.below(list.len()))),
            (2, Value::Array(list)) if !list.is_empty() => {
                let again = list[dice.below(list.len())].clone();
                list.push(again);
            }
            (3, Value::Object(map)) if map.len() > 1 => {
                let one = map.values().nth(dice.below(map.len())).unwrap().clone();
                let nth = dice.below(map.len());
                *map.values_mut().nth(nth).unwrap() = one;
            }
            (0..=5, _) => *here = serde_json::from_str(dice.pick::<&str>(NUMBERS)).unwrap(),
            (6, _) => *here = dice.pick(&[Value::Null, true.into(), "".into(), "../../x".into(), "\0".into()]).clone(),
            _ => *here = dice.pick(&[Value::Array(vec![]), Value::Object(Default::default())]).clone(),
        }
    }
}

/// Returns `value` itself, or a random value nested in it.
fn somewhere<'a>(dice: &mut Dice, value: &'a mut Value) -> &'a mut Value {
    let len = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if len == 0 || dice.below(5) == 0 {
        return value;
    }
    let nth = dice.below(len);
    match value {
        Value::Object(map) => somewhere(dice, map.values_mut().nth(nth).unwrap()),
        Value::Array(list) => somewhere(dice, &mut list[nth]),
        other => other,
    }
}
