//! One kernel launch as a plain value. `ops/*/gpu.rs` builds it from an operation; Metal encodes it; the tests execute the very same
//! value on the kernel compiled for the host. A GPU then adds an encoder and a compiler.

/// A range of some buffer. Which buffer a number means is known to whoever executes the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Region {
    pub buffer: u32,
    /// Bytes.
    pub offset: usize,
    /// Bytes. The kernel touches nothing outside; the host run checks it.
    pub len: usize,
}

impl Region {
    /// `len` bytes from `offset` bytes into this range. Panics if they are not inside it.
    pub fn part(self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of a region of {}", self.len);
        Self { buffer: self.buffer, offset: self.offset + offset, len }
    }

    /// The first `len` bytes.
    pub fn first(self, len: usize) -> Self {
        self.part(0, len)
    }

    /// The first `count` floats (or other words).
    pub fn floats(self, count: usize) -> Self {
        self.first(count * 4)
    }

    /// Rows `first..first + count` of `width` floats each.
    pub fn rows(self, first: usize, count: usize, width: usize) -> Self {
        self.part(first * width * 4, count * width * 4)
    }

    /// The least region that has all bytes of both, of one buffer.
    pub fn hull(self, other: Self) -> Self {
        let offset = self.offset.min(other.offset);
        Self { offset, len: (self.offset + self.len).max(other.offset + other.len) - offset, ..self }
    }

    /// True if the two have a byte in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.buffer == other.buffer && self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// A kernel's access to a buffer; hazards between launches follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Read,
    /// Every byte is written, none is read.
    Write,
    Update,
}

/// A buffer argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    pub region: Region,
    pub effect: Effect,
}

impl Binding {
    pub fn read(region: Region) -> Self {
        Self { region, effect: Effect::Read }
    }

    pub fn write(region: Region) -> Self {
        Self { region, effect: Effect::Write }
    }

    pub fn update(region: Region) -> Self {
        Self { region, effect: Effect::Update }
    }
}

/// One launch of one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatch {
    /// The function in `kernels/`.
    pub kernel: &'static str,
    /// The argument struct (buffer 0): all its fields are 32-bit.
    pub args: Vec<u32>,
    /// Buffers 1, 2, ...
    pub bindings: Vec<Binding>,
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup: a multiple of 32, at most 1024.
    pub threads: u32,
}

impl Dispatch {
    /// True if this launch must wait until `earlier` has finished: one of them writes what the other touches.
    pub fn follows(&self, earlier: &Dispatch) -> bool {
        self.bindings.iter().any(|mine| {
            earlier.bindings.iter().any(|theirs| {
                (mine.effect != Effect::Read || theirs.effect != Effect::Read) && mine.region.overlaps(theirs.region)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_follows_what_it_conflicts_with() {
        let region = |offset| Region { buffer: 1, offset, len: 8 };
        let launch =
            |binding| Dispatch { kernel: "k", args: vec![], bindings: vec![binding], grid: [1; 3], threads: 32 };
        let (read, write) = (launch(Binding::read(region(0))), launch(Binding::write(region(4))));
        assert!(write.follows(&read) && read.follows(&write));
        assert!(!read.follows(&read));
        assert!(!launch(Binding::update(region(8))).follows(&read));
    }
}
