//! Stop strings, looked for across pushes.

/// Cuts streamed text at the first stop string.
///
/// The first is the one that is complete first; of several complete at the same byte, the longest. Text that may still
/// become a stop string is held back, and no more than that. Each byte costs one step for each string (Knuth, Morris and
/// Pratt), however long the strings are.
pub struct Stop {
    patterns: Vec<Pattern>,
    held: String,
    /// The stop string that was met.
    met: Option<String>,
}

/// Text that may be sent on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub text: String,
    /// A stop string was met: `text` ends before it, and nothing follows.
    pub hit: bool,
}

struct Pattern {
    bytes: Vec<u8>,
    /// `borders[i]`: length of the longest proper prefix of `bytes[..=i]` that is also its suffix.
    borders: Vec<usize>,
    /// The number of the pattern's bytes that the text so far ends with.
    matched: usize,
}

impl Stop {
    /// Empty strings stop nothing.
    pub fn new(strings: Vec<String>) -> Self {
        let patterns = strings.into_iter().filter(|s| !s.is_empty()).map(Pattern::new).collect();
        Self { patterns, held: String::new(), met: None }
    }

    /// Takes the next piece of text and gives what is certain to stand before any stop string.
    pub fn push(&mut self, text: &str) -> Held {
        if self.met.is_some() {
            return Held { text: String::new(), hit: true };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let longest = self.patterns.iter_mut().filter_map(|p| p.step(byte).then_some(p.bytes.len())).max();
            if let Some(length) = longest {
                let mut text = std::mem::take(&mut self.held);
                let end = before + i + 1;
                self.met = text.get(end - length..end).map(str::to_owned);
                text.truncate(end - length);
                return Held { text, hit: true };
            }
        }
        // A partial match begins with the first byte of a stop string, so the cut is between characters.
        let keep = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Held { text: std::mem::replace(&mut self.held, rest), hit: false }
    }

    /// The stop string that ended the text, if one did.
    pub fn met(&self) -> Option<&str> {
        self.met.as_deref()
    }

    /// Text held back because it could have become a stop string.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(string: String) -> Self {
        let bytes = string.into_bytes();
        let mut pattern = Self { borders: vec![0; bytes.len()], bytes, matched: 0 };
        for i in 1..pattern.bytes.len() {
            pattern.step(pattern.bytes[i]);
            pattern.borders[i] = pattern.matched;
        }
        pattern.matched = 0;
        pattern
    }

    /// Takes one byte of the text; whether the pattern is complete with it.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stop = Stop::new(stops.iter().map(|s| s.to_string()).collect());
        let (mut out, mut hit) = (Vec::new(), false);
        for piece in pieces {
            let held = stop.push(piece);
            out.push(held.text);
            hit = held.hit;
        }
        out.push(stop.finish());
        (out, hit)
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop_string() {
        assert_eq!(run(&["END"], &["a E", "N", "x"]), (vec!["a ".into(), "".into(), "ENx".into(), "".into()], false));
        assert_eq!(run(&["END"], &["a E", "ND b", "c"]), (vec!["a ".into(), "".into(), "".into(), "".into()], true));
        assert_eq!(run(&["END"], &["a EN"]), (vec!["a ".into(), "EN".into()], false));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0.concat(), "a");
        assert_eq!(run(&["→"], &["é", "→"]), (vec!["é".into(), "".into(), "".into()], true));
    }

    #[test]
    fn the_string_that_was_met_is_named() {
        let mut stop = Stop::new(vec!["x→".into(), "→".into(), "b".into()]);
        stop.push("a x");
        assert_eq!(stop.met(), None);
        stop.push("→ b");
        assert_eq!(stop.met(), Some("x→"));
    }

    #[test]
    fn the_first_complete_string_wins() {
        assert_eq!(run(&["abcd", "bc"], &["abcd"]).0.concat(), "a");
        assert_eq!(run(&["bc", "abc"], &["xabc"]).0.concat(), "x");
        assert_eq!(run(&["", "b"], &["ab"]).0.concat(), "a");
        assert_eq!(run(&[], &["ab"]).0.concat(), "ab");
    }

    /// The definition, read directly.
    fn plain(stops: &[String], text: &str) -> (String, bool) {
        let ends = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at)));
        match ends.min() {
            Some((_, start)) => (text[..start].into(), true),
            None => (text.into(), false),
        }
    }

    proptest! {
        #[test]
        fn any_cut_stops_at_the_same_place(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..8),
        ) {
            let mut stop = Stop::new(stops.clone());
            let (mut text, mut hit) = (String::new(), false);
            for piece in &pieces {
                let held = stop.push(piece);
                text += &held.text;
                hit = held.hit;
            }
            text += &stop.finish();
            prop_assert_eq!((text, hit), plain(&stops, &pieces.concat()));
        }
    }
}
