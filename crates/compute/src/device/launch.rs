//! [`Launch`]: a kernel launch as a plain value.
//!
//! `ops/*/gpu.rs` builds launches from operations. Metal and CUDA encode launches. Tests execute the same launches with
//! kernels compiled for the host.

/// A byte range of a buffer. The buffer number belongs to the device that created the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Region {
    pub buffer: u32,
    /// Offset of the first byte in the buffer.
    pub offset: usize,
    /// Length in bytes. A kernel must not access bytes outside the region. Tests on the host check this.
    pub len: usize,
}

impl Region {
    /// The `len` bytes at `offset` bytes from the start of this region. Panics if these bytes are not inside the
    /// region.
    pub fn part(self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of a region of {}", self.len);
        Self { buffer: self.buffer, offset: self.offset + offset, len }
    }

    /// The first `len` bytes.
    pub fn first(self, len: usize) -> Self {
        self.part(0, len)
    }

    /// The first `count` floats, or other 4-byte words.
    pub fn floats(self, count: usize) -> Self {
        self.first(count * 4)
    }

    /// Rows `first..first + count` of `width` floats each.
    pub fn rows(self, first: usize, count: usize, width: usize) -> Self {
        self.part(first * width * 4, count * width * 4)
    }

    /// The smallest region that contains both regions, which must be in the same buffer.
    pub fn union(self, other: Self) -> Self {
        let offset = self.offset.min(other.offset);
        Self { offset, len: (self.offset + self.len).max(other.offset + other.len) - offset, ..self }
    }

    /// True if the regions have a byte in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.buffer == other.buffer && self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// The access of a kernel to a buffer. The queue uses this to detect hazards between launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferAccess {
    Read,
    /// The kernel writes every byte of the region and reads no byte.
    Write,
    ReadWrite,
}

/// A buffer argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    pub region: Region,
    pub access: BufferAccess,
    /// True if the region contains addresses of adopted buffers, from which the kernel also reads.
    pub is_table: bool,
    /// True if the kernel uses the numbers in the region as indices without a check.
    pub is_index: bool,
}

impl Binding {
    pub fn read(region: Region) -> Self {
        Self { region, access: BufferAccess::Read, is_table: false, is_index: false }
    }

    pub fn write(region: Region) -> Self {
        Self { region, access: BufferAccess::Write, is_table: false, is_index: false }
    }

    pub fn read_write(region: Region) -> Self {
        Self { region, access: BufferAccess::ReadWrite, is_table: false, is_index: false }
    }

    /// The last binding of a kernel with a skip flag until the launch [gets one](Launch::set_skip_flag): an empty region
    /// of a buffer that the launch reads anyway.
    pub fn no_skip_flag(region: Region) -> Self {
        Self::read(region.first(0))
    }

    /// A table of [addresses](super::Driver::address) of adopted buffers. No launch writes to these buffers.
    pub fn table(region: Region) -> Self {
        Self { is_table: true, ..Self::read(region) }
    }

    /// Numbers that the kernel uses as indices without a check. Only the CPU may write them: after a failed command
    /// buffer, the launches of later ones still run, and read any bytes where the failed launches should have written.
    pub fn indices(region: Region) -> Self {
        Self { is_index: true, ..Self::read(region) }
    }
}

/// The use of the skip flag by a launch, for the layers of a span; see `is_skipped` in `kernels/quant.metal`.
/// Kernels that change data which outlives a layer have a flag, and so have slow kernels. The first argument word of such
/// a kernel says whether the launch has a flag, and the last binding is the flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipUse {
    /// The kernel has no flag and always runs.
    None,
    /// Does nothing while the flag is set.
    Reads,
    /// Sets the flag.
    Sets,
}

/// A single launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel's function name in `kernels/`.
    pub kernel: &'static str,
    /// The argument struct (kernel parameter 0). All of its fields are 32-bit words.
    pub args: Vec<u32>,
    /// The buffers, as kernel parameters 1, 2, ...
    pub bindings: Vec<Binding>,
    /// Number of threadgroups in each dimension.
    pub grid: [u32; 3],
    /// Number of threads in a threadgroup: a multiple of 32, at most 1024.
    pub threads: u32,
    pub skip: SkipUse,
}

impl Launch {
    /// Gives the launch this skip flag, if its kernel has one.
    pub fn set_skip_flag(&mut self, flag: Region) {
        let access = match self.skip {
            SkipUse::None => return,
            SkipUse::Reads => BufferAccess::Read,
            SkipUse::Sets => BufferAccess::ReadWrite,
        };
        // The outputs of a skipped launch keep their bytes.
        for output in self.bindings.iter_mut().filter(|binding| binding.access == BufferAccess::Write) {
            output.access = BufferAccess::ReadWrite;
        }
        if let (Some(can_skip), Some(binding)) = (self.args.first_mut(), self.bindings.last_mut()) {
            *can_skip = 1;
            *binding = Binding { access, ..Binding::read(flag) };
        }
    }

    /// True if this launch must wait for `earlier`: one of the two writes bytes that the other accesses.
    pub fn conflicts_with(&self, earlier: &Launch) -> bool {
        self.bindings.iter().any(|mine| {
            earlier.bindings.iter().any(|theirs| {
                (mine.access != BufferAccess::Read || theirs.access != BufferAccess::Read)
                    && mine.region.overlaps(theirs.region)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_conflict_where_one_writes() {
        let region = |offset| Region { buffer: 1, offset, len: 8 };
        let launch = |binding| {
            let bindings = vec![binding];
            Launch { kernel: "k", args: vec![], bindings, grid: [1; 3], threads: 32, skip: SkipUse::None }
        };
        let read = launch(Binding::read(region(0)));
        let write = launch(Binding::write(region(4)));
        assert!(write.conflicts_with(&read) && read.conflicts_with(&write));
        assert!(!read.conflicts_with(&read));
        assert!(!launch(Binding::read_write(region(8))).conflicts_with(&read));
    }

    #[test]
    fn skip_flag_depends_on_launch_alone() {
        let own = Region { buffer: 1, offset: 0, len: 8 };
        let flag = Region { buffer: 2, offset: 0, len: 4 };
        // The name is one that never decides.
        let with_flag = |skip| {
            let bindings = vec![Binding::write(own), Binding::no_skip_flag(own)];
            let mut launch = Launch { kernel: "new", args: vec![0, 7], bindings, grid: [1; 3], threads: 32, skip };
            launch.set_skip_flag(flag);
            (launch.args, launch.bindings)
        };
        let unchanged = (vec![0, 7], vec![Binding::write(own), Binding::no_skip_flag(own)]);
        assert_eq!(with_flag(SkipUse::None), unchanged);
        // A skipped launch keeps its output, so the output is read, too.
        let changed = |access| (vec![1, 7], vec![Binding::read_write(own), access]);
        assert_eq!(with_flag(SkipUse::Reads), changed(Binding::read(flag)));
        assert_eq!(with_flag(SkipUse::Sets), changed(Binding::read_write(flag)));
    }
}
