//! The intersection or complement of regular expressions as one regular expression.
//!
//! llguidance takes a pattern of a schema as a text, and that syntax has neither intersections nor complements. The
//! expression is read off its minimal automaton, whose states are removed one by one.

use llguidance::derivre::{
    ExprRef, RegexAst, RegexBuilder,
    raw::{DerivCache, ExprSet},
};
use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write,
    rc::Rc,
};

/// Maximum number of states of an automaton.
const MAX_STATES: usize = 200;
/// Maximum number of steps to find the states of an automaton.
const MAX_FUEL: u64 = 400_000;
/// Maximum number of bytes of an expression.
pub const MAX_BYTES: usize = 16 << 10;
/// Maximum number of bytes of all expressions on the way to one.
const MAX_ALL_BYTES: usize = 1 << 20;

/// The first and the last character of a range, and the state that it leads to.
type Range<S> = (u32, u32, S);

/// A regular expression of the texts that `ast` matches. `None` if it is too complex.
pub fn expression(ast: &RegexAst) -> Option<String> {
    // derivre panics on some expressions.
    let states = minimal(&std::panic::catch_unwind(|| states(ast)).ok()??);
    let start = states.len();
    let end = start + 1;
    let mut edges: BTreeMap<(usize, usize), String> = BTreeMap::new();
    for (at, (accepts, row)) in states.iter().enumerate() {
        let mut classes: HashMap<usize, String> = HashMap::new();
        for &(first, last, target) in row {
            let class = classes.entry(target).or_default();
            let _ = write!(class, "{}-{}", character(first), character(last));
        }
        edges.extend(classes.into_iter().map(|(target, class)| ((at, target), format!("[{class}]"))));
        edges.extend(accepts.then(|| ((at, end), String::new())));
    }
    edges.insert((start, 0), String::new());
    let mut bytes_left = MAX_ALL_BYTES;
    let mut left: Vec<usize> = (0..states.len()).collect();
    while !left.is_empty() {
        // The state whose removal adds the fewest edges comes first.
        let ways = |state: usize| {
            let into = edges.keys().filter(|(from, to)| *to == state && *from != state).count();
            let out = edges.keys().filter(|(from, to)| *from == state && *to != state).count();
            (into * out, state)
        };
        let state = left.iter().map(|state| ways(*state)).min()?.1;
        left.retain(|other| *other != state);
        let again = edges.remove(&(state, state)).map_or_else(String::new, |text| format!("(?:{text})*"));
        let (touching, others): (Vec<_>, Vec<_>) =
            edges.into_iter().partition(|((from, to), _)| *from == state || *to == state);
        edges = others.into_iter().collect();
        let (into, out): (Vec<_>, Vec<_>) = touching.into_iter().partition(|((_, to), _)| *to == state);
        for ((from, _), before) in &into {
            for ((_, to), after) in &out {
                let path = format!("{before}{again}{after}");
                let both = match edges.remove(&(*from, *to)) {
                    None => path,
                    Some(other) if other == path => path,
                    Some(other) if other.is_empty() => format!("(?:{path})?"),
                    Some(other) if path.is_empty() => format!("(?:{other})?"),
                    Some(other) => format!("(?:{other}|{path})"),
                };
                bytes_left = bytes_left.checked_sub(both.len()).filter(|_| both.len() <= MAX_BYTES)?;
                edges.insert((*from, *to), both);
            }
        }
    }
    // A class without characters matches nothing.
    Some(edges.remove(&(start, end)).unwrap_or_else(|| r"[^\x{0}-\x{10FFFF}]".into()))
}

fn character(code: u32) -> String {
    match char::from_u32(code) {
        Some(c) if c.is_ascii_alphanumeric() => c.into(),
        _ => format!("\\x{{{code:X}}}"),
    }
}

/// True if a state accepts, and its next states.
type State = (bool, Vec<Range<usize>>);

/// The states of an automaton, with the start first.
fn states(ast: &RegexAst) -> Option<Vec<State>> {
    let mut builder = RegexBuilder::new();
    let start = builder.mk(ast).ok()?;
    let mut reader =
        StateReader { exprs: builder.into_exprset(), derivatives: DerivCache::new(), known: HashMap::new() };
    let mut found = vec![start];
    let mut numbers = HashMap::from([(start, 0)]);
    let mut states = Vec::new();
    while let Some(&state) = found.get(states.len()) {
        let mut row = Vec::new();
        for (first, last, target) in reader.row(state) {
            let number = *numbers.entry(target).or_insert(found.len());
            found.extend((number == found.len()).then_some(target));
            push(&mut row, first, last, number);
        }
        states.push((reader.exprs.is_nullable(state), row));
        if found.len() > MAX_STATES || reader.exprs.cost() > MAX_FUEL {
            return None;
        }
    }
    Some(states)
}

struct StateReader {
    exprs: ExprSet,
    derivatives: DerivCache,
    /// Results of [`StateReader::tails`].
    known: HashMap<(ExprRef, u32), Rc<Vec<Range<ExprRef>>>>,
}

impl StateReader {
    /// The next states for each character.
    fn row(&mut self, state: ExprRef) -> Vec<Range<ExprRef>> {
        let mut row = Vec::new();
        // The first bytes of characters with 1 to 4 bytes, the bits that they do not have, and the first character.
        for (bytes, rest, mask, min) in [
            (0..=0x7F, 0, 0x7F, 0),
            (0xC2..=0xDF, 1, 0x1F, 0),
            (0xE0..=0xEF, 2, 0xF, 0x800),
            (0xF0..=0xF4, 3, 7, 0x10000),
        ] {
            for byte in bytes {
                let next = self.derivatives.derivative(&mut self.exprs, state, byte);
                let base = u32::from(byte & mask) << (6 * rest);
                for &(first, last, target) in self.tails(next, rest).iter() {
                    let first = (base + first).max(min);
                    let last = (base + last).min(char::MAX.into());
                    // Surrogates are no characters.
                    let first = if (0xD800..0xE000).contains(&first) { 0xE000 } else { first };
                    let last = if (0xD800..0xE000).contains(&last) { 0xD7FF } else { last };
                    push(&mut row, first, last, target);
                }
            }
        }
        row
    }

    /// The next states for each sequence of `count` bytes inside of a character.
    fn tails(&mut self, state: ExprRef, count: u32) -> Rc<Vec<Range<ExprRef>>> {
        if let Some(known) = self.known.get(&(state, count)) {
            return known.clone();
        }
        let mut ranges = Vec::new();
        if count == 0 || state == ExprRef::NO_MATCH {
            ranges.push((0, (1 << (6 * count)) - 1, state));
        } else {
            for bits in 0..64 {
                let next = self.derivatives.derivative(&mut self.exprs, state, 0x80 + bits);
                let base = u32::from(bits) << (6 * (count - 1));
                for &(first, last, target) in self.tails(next, count - 1).iter() {
                    push(&mut ranges, base + first, base + last, target);
                }
            }
        }
        let ranges = Rc::new(ranges);
        self.known.insert((state, count), ranges.clone());
        ranges
    }
}

/// Adds a range. Neighbours that lead to the same state become one range.
fn push<S: PartialEq>(ranges: &mut Vec<Range<S>>, first: u32, last: u32, target: S) {
    match ranges.last_mut() {
        _ if first > last => {}
        Some((_, end, known)) if *known == target && (*end + 1 == first || (*end, first) == (0xD7FF, 0xE000)) => {
            *end = last;
        }
        _ => ranges.push((first, last, target)),
    }
}

/// Merges the states that accept the same texts.
fn minimal(states: &[State]) -> Vec<State> {
    let mut classes = vec![0; states.len()];
    loop {
        let mut kinds: Vec<State> = Vec::new();
        let class = |(accepts, row): &State| {
            let mut merged = Vec::new();
            row.iter().for_each(|&(first, last, target)| push(&mut merged, first, last, classes[target]));
            let kind = (*accepts, merged);
            kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            })
        };
        let next: Vec<usize> = states.iter().map(class).collect();
        if next == classes {
            return kinds;
        }
        classes = next;
    }
}
