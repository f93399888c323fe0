/// Stop strings, looked for across pushes.
pub struct Stop {}

/// What may be sent on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub text: String,
    /// A stop string was met: `text` ends before it, and nothing follows.
    pub hit: bool,
}

impl Stop {
    pub fn new(_strings: Vec<String>) -> Self {
        todo!()
    }

    pub fn push(&mut self, _text: &str) -> Held {
        todo!()
    }

    /// What was held back because it could have become a stop string.
    pub fn finish(&mut self) -> String {
        todo!()
    }
}
