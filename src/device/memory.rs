//! A slab is one page-aligned block of memory that the CPU, the SSD and (on a Mac) the GPU all see. Expert slots and the
//! trunk live in slabs, so a byte read from disk is used where it landed.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// From this size on a slab asks for huge pages.
#[cfg(target_os = "linux")]
const HUGE: usize = 8 << 20;

/// No system that we run on has larger pages, huge ones apart.
const LARGEST_PAGE: usize = 64 << 10;

/// Page-aligned, zeroed, fixed-size memory, written through shared references by whoever owns a range of it.
///
/// The caller decides who may write which range: the slot table hands a slot to one reader at a time, and a loader
/// fills a trunk before anyone looks. Hence the `unsafe` on [`Slab::bytes_mut`] and nowhere else.
pub struct Slab {
    map: memmap2::MmapRaw,
    held: AtomicBool,
}

impl Slab {
    /// Reserves `len` bytes of zeroed memory; pages are committed when first touched.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let map = memmap2::MmapOptions::new().len(len.max(1)).map_anon()?;
        // Weights are streamed at the speed of memory, where page-table walks show. Advice only: it may be ignored.
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self { map: map.into(), held: AtomicBool::new(false) })
    }

    /// Commits all pages now, with `threads` threads: the first read into a page otherwise waits for it to be cleared,
    /// which can take longer than the read. Does nothing where the system cannot be asked to (Linux before 5.14, macOS);
    /// pages are then committed when first touched.
    pub fn commit(&self, threads: usize) {
        #[cfg(target_os = "linux")]
        std::thread::scope(|scope| {
            let part = self.len().div_ceil(threads.max(1)).next_multiple_of(HUGE);
            for start in (0..self.len()).step_by(part) {
                let len = part.min(self.len() - start);
                let commit = move || self.map.advise_range(memmap2::Advice::PopulateWrite, start, len);
                let _ = std::thread::Builder::new().spawn_scoped(scope, commit);
            }
        });
        #[cfg(not(target_os = "linux"))]
        let _ = threads;
    }

    /// A device keeps to these very pages from now on: it would go on reading them after others have taken their place.
    pub fn hold(&self) {
        self.held.store(true, Ordering::Relaxed);
    }

    /// True if no page can be given back.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Gives the pages that lie wholly in `range` back to the system. Their bytes are lost.
    ///
    /// # Errors
    /// The system refuses, or the slab is [held](Slab::hold).
    ///
    /// # Safety
    /// Nobody may read or write this range until [`Slab::take_again`], or rely on its bytes after that.
    pub unsafe fn give_back(&self, range: Range<usize>) -> std::io::Result<()> {
        #[cfg(target_os = "macos")]
        const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::FreeReusable;
        #[cfg(not(target_os = "macos"))]
        const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::DontNeed;
        if self.is_held() {
            return Err(std::io::ErrorKind::ResourceBusy.into());
        }
        // SAFETY: the map is anonymous, so the pages read as zeroes afterwards or keep their bytes; nobody relies on those.
        self.on_pages(range, |at, len| unsafe { self.map.unchecked_advise_range(ADVICE, at, len) })
    }

    /// `range`, which was given back, is used again; its bytes may be any.
    pub fn take_again(&self, range: Range<usize>) -> std::io::Result<()> {
        #[cfg(target_os = "macos")]
        // SAFETY: it changes how the pages are counted, and nothing in them.
        return self.on_pages(range, |at, len| unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::FreeReuse, at, len)
        });
        #[cfg(not(target_os = "macos"))]
        self.on_pages(range, |_, _| Ok(()))
    }

    /// The start and length of the pages that lie wholly in `range`, if there are any.
    fn on_pages(
        &self,
        range: Range<usize>,
        advise: impl FnOnce(usize, usize) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let start = range.start.next_multiple_of(LARGEST_PAGE);
        let end = if range.end >= self.len() { self.len() } else { range.end / LARGEST_PAGE * LARGEST_PAGE };
        if start < end { advise(start, end - start) } else { Ok(()) }
    }

    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// All bytes, for the sole owner.
    pub fn all_mut(&mut self) -> &mut [u8] {
        let len = self.len();
        // SAFETY: in bounds, initialised (anonymous maps are zeroed), exclusive by the borrow.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), len) }
    }

    /// A read-only view of `range`. Panics if it is out of bounds.
    ///
    /// # Safety
    /// Nobody may write this range while the view lives.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "slab range {range:?} of {}", self.len());
        // SAFETY: in bounds (checked above), initialised (anonymous maps are zeroed), not written (caller).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) }
    }

    /// A writable view of `range`. Panics if it is out of bounds.
    ///
    /// # Safety
    /// Nobody else may read or write this range while the view lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "slab range {range:?} of {}", self.len());
        // SAFETY: in bounds (checked above), exclusive (caller).
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len()) }
    }
}

/// A slab that is filled once, from the start, range by range: a trunk being loaded.
pub struct Filling {
    slab: Arc<Slab>,
    /// Bytes handed out.
    taken: usize,
}

impl Filling {
    /// Room for `len` bytes.
    pub fn new(len: usize) -> std::io::Result<Self> {
        Ok(Self { slab: Arc::new(Slab::new(len)?), taken: 0 })
    }

    /// Lets `fill` write the next `len` bytes, starting at a multiple of `align`. Panics if the slab is too small.
    pub fn fill<E>(
        &mut self,
        len: usize,
        align: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Span, E> {
        let start = self.taken.next_multiple_of(align);
        self.taken = start + len;
        // SAFETY: ranges are handed out once each, in order; no span of this one exists yet.
        fill(unsafe { self.slab.bytes_mut(start..self.taken) })?;
        // SAFETY: this range has just been written and is never handed out again.
        Ok(unsafe { Span::new(self.slab.clone(), start..self.taken) })
    }

    /// The filled slab: nobody writes it any more.
    pub fn into_slab(self) -> Arc<Slab> {
        self.slab
    }

    /// Bytes handed out, and in all.
    pub fn progress(&self) -> (usize, usize) {
        (self.taken, self.slab.len())
    }
}

/// A read-only range of a slab that is never written again: one trunk tensor.
#[derive(Clone)]
pub struct Span {
    slab: Arc<Slab>,
    range: Range<usize>,
}

impl Span {
    /// # Safety
    /// Nobody may write this range as long as the span or a clone of it lives.
    pub unsafe fn new(slab: Arc<Slab>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= slab.len());
        Self { slab, range }
    }

    /// Copies `bytes` into a slab of their own: for small tensors and tests.
    pub fn from_bytes(bytes: &[u8]) -> std::io::Result<Self> {
        let slab = Slab::new(bytes.len())?;
        // SAFETY: the slab is not shared yet.
        unsafe { slab.bytes_mut(0..bytes.len()) }.copy_from_slice(bytes);
        Ok(Self { slab: Arc::new(slab), range: 0..bytes.len() })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the constructor's contract: nobody writes this range any more.
        unsafe { self.slab.bytes(self.range.clone()) }
    }

    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    pub fn offset(&self) -> usize {
        self.range.start
    }

    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn committed_pages_are_there_and_keep_their_bytes() {
        let slab = Slab::new(3 * HUGE + 5).unwrap();
        let pages = || {
            let mut resident = vec![0u8; slab.len().div_ceil(4096)];
            let start = slab.map.as_mut_ptr().cast();
            // SAFETY: the range is the slab's own, and there is room for one byte a page of at least 4096.
            assert_eq!(unsafe { libc::mincore(start, slab.len(), resident.as_mut_ptr()) }, 0);
            resident.iter().filter(|&&page| page & 1 == 1).count()
        };
        // SAFETY: nobody else knows of this slab.
        unsafe { slab.bytes_mut(7..8) }.fill(9);
        let before = pages();
        slab.commit(2);
        assert!(pages() > before && pages() >= slab.len() / 65536, "{before}, then {}", pages());
        // SAFETY: as above.
        assert_eq!(unsafe { slab.bytes(6..9) }, [0, 9, 0]);
        // Only pages that lie wholly in the part are given back.
        // SAFETY: as above.
        unsafe { slab.bytes_mut(HUGE - 1..HUGE + 1) }.fill(8);
        let before = pages();
        // SAFETY: as above; these bytes are not used any more.
        unsafe { slab.give_back(HUGE..slab.len()) }.unwrap();
        let left = pages();
        assert!(before - left >= HUGE / 4096 && left >= HUGE / 65536, "{before}, then {left}");
        slab.take_again(HUGE..slab.len()).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { (slab.bytes(6..9), slab.bytes(HUGE - 1..HUGE)) }, (&[0, 9, 0][..], &[8][..]));
        // SAFETY: as above. Less than a page: nothing is lost.
        unsafe { slab.give_back(5..LARGEST_PAGE + 5) }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { slab.bytes(6..9) }, [0, 9, 0]);
    }
}
