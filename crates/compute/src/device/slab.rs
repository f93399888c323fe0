//! Slabs: page-aligned blocks of memory that CPU, SSD and (on a Mac) GPU share.
//!
//! Expert slots and the trunk (all weights except the experts) are in slabs, so bytes read from disk are used in place.

use std::{
    hint::black_box,
    io,
    ops::Range,
    sync::atomic::{AtomicU8, Ordering},
};

/// Minimum size of a slab that requests huge pages, in bytes.
const HUGE: usize = 8 << 20;

/// Smallest page size of the supported systems, in bytes.
const SMALLEST_PAGE: usize = if cfg!(target_os = "macos") { 16 << 10 } else { 4 << 10 };
/// Largest normal page size of the supported systems, in bytes.
const LARGEST_PAGE: usize = 64 << 10;

/// Page-aligned, zeroed memory of fixed size. Several threads may write different ranges through a shared reference.
///
/// [`Slab::bytes_mut`] is `unsafe` because the slab does not check which thread writes which range. The slot table
/// ensures that one reader thread fills a slot at a time, and the loader fills a trunk before it is shared.
pub struct Slab {
    map: memmap2::MmapRaw,
}

impl Slab {
    /// Reserves `len` bytes of zeroed memory. The system commits a page when it is first used.
    pub fn new(len: usize) -> io::Result<Self> {
        let map = memmap2::MmapOptions::new().len(len.max(1)).map_anon()?;
        // Huge pages reduce TLB misses when weights are read. The system may ignore the advice.
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self { map: map.into() })
    }

    /// Commits all pages now, with `threads` threads. Without this call, the system clears each page at the first read
    /// into the page, which can take longer than the read. On a Mac, a GPU that adopts the memory would clear it on one
    /// thread. No other code may use the slab during the call.
    pub fn commit_pages(&self, threads: usize) {
        std::thread::scope(|scope| {
            let part = self.len().div_ceil(threads.max(1)).next_multiple_of(HUGE);
            for start in (0..self.len()).step_by(part) {
                let range = start..(start + part).min(self.len());
                let _ = std::thread::Builder::new().spawn_scoped(scope, move || self.commit_range(range));
            }
        });
    }

    fn commit_range(&self, range: Range<usize>) {
        // Linux before 5.14 does not support the advice.
        #[cfg(target_os = "linux")]
        if self.map.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len()).is_ok() {
            return;
        }
        self.touch(range);
    }

    /// Writes to each page without changing it.
    fn touch(&self, range: Range<usize>) {
        for at in range.step_by(SMALLEST_PAGE) {
            // SAFETY: in bounds. The pages are mapped writable, and other threads access the byte only atomically or not at
            // all during the call.
            let byte = unsafe { AtomicU8::from_ptr(self.map.as_mut_ptr().add(at)) };
            // The compiler would turn the addition of a known zero into a load, which commits nothing.
            byte.fetch_add(black_box(0), Ordering::Relaxed);
        }
    }

    /// Releases the pages that are completely inside `range` to the system. The contents of these pages are lost.
    ///
    /// A device that has adopted the range must [release](super::CommandQueue::release) its buffer first. Otherwise the buffer
    /// keeps the pages in use.
    ///
    /// # Errors
    /// The system refuses to release the pages.
    ///
    /// # Safety
    /// The range must not be read or written before [`Slab::reuse_pages`], and its contents are undefined after that.
    pub unsafe fn release_pages(&self, range: Range<usize>) -> io::Result<()> {
        #[cfg(target_os = "macos")]
        const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::FreeReusable;
        #[cfg(not(target_os = "macos"))]
        const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is anonymous, so the pages read as zeros or keep their bytes. The caller does not read the
        // pages.
        self.on_pages(range, |at, len| unsafe { self.map.unchecked_advise_range(ADVICE, at, len) })
    }

    /// Makes released pages usable again. The contents of the pages are undefined.
    pub fn reuse_pages(&self, range: Range<usize>) -> io::Result<()> {
        #[cfg(target_os = "macos")]
        // SAFETY: the advice changes how the system accounts for the pages, but not the contents of the pages.
        return self.on_pages(range, |at, len| unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::FreeReuse, at, len)
        });
        #[cfg(not(target_os = "macos"))]
        self.on_pages(range, |_, _| Ok(()))
    }

    /// Calls `advise` with start and length of the pages that are completely inside `range`. Does nothing if no page is
    /// completely inside `range`.
    fn on_pages(&self, range: Range<usize>, advise: impl FnOnce(usize, usize) -> io::Result<()>) -> io::Result<()> {
        let start = range.start.next_multiple_of(LARGEST_PAGE);
        let end = if range.end >= self.len() { self.len() } else { range.end / LARGEST_PAGE * LARGEST_PAGE };
        if start < end { advise(start, end - start) } else { Ok(()) }
    }

    #[allow(clippy::len_without_is_empty)] // No code asks whether a slab is empty.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// All bytes of the slab. Needs exclusive access.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.len();
        // SAFETY: in bounds, initialised (anonymous maps are zeroed), exclusive by the borrow.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), len) }
    }

    /// A read-only view of `range`. Panics if `range` is out of bounds.
    ///
    /// # Safety
    /// The range must not be written while the view lives.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "slab range {range:?} of {}", self.len());
        // SAFETY: in bounds (checked above), initialised (anonymous maps are zeroed), not written (caller).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) }
    }

    /// A writable view of `range`. Panics if `range` is out of bounds.
    ///
    /// # Safety
    /// No other code may access the range while the view lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len(), "slab range {range:?} of {}", self.len());
        // SAFETY: in bounds (checked above), exclusive (caller).
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len()) }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_resident_and_unchanged() {
        let slab = Slab::new(1 << 20).unwrap();
        // SAFETY: no other code uses this slab.
        unsafe { slab.bytes_mut(4096..4097) }.fill(9);
        slab.touch(0..slab.len());
        let mut resident = vec![0u8; slab.len() / 4096];
        // SAFETY: the range is the slab's, and `resident` has one byte for each page of at least 4096 bytes.
        assert_eq!(unsafe { libc::mincore(slab.map.as_mut_ptr().cast(), slab.len(), resident.as_mut_ptr()) }, 0);
        let pages = slab.len() / LARGEST_PAGE;
        assert!(resident.iter().filter(|&&page| page & 1 == 1).count() >= pages);
        // SAFETY: no other code uses this slab.
        assert_eq!(unsafe { slab.bytes(4095..4098) }, [0, 9, 0]);
    }

    #[test]
    fn committed_and_released_pages_keep_other_bytes() {
        let slab = Slab::new(3 * HUGE + 5).unwrap();
        let pages = || {
            let mut resident = vec![0u8; slab.len().div_ceil(4096)];
            let start = slab.map.as_mut_ptr().cast();
            // SAFETY: the range is the slab's, and `resident` has one byte for each page of at least 4096 bytes.
            assert_eq!(unsafe { libc::mincore(start, slab.len(), resident.as_mut_ptr()) }, 0);
            resident.iter().filter(|&&page| page & 1 == 1).count()
        };
        // SAFETY: no other code uses this slab.
        unsafe { slab.bytes_mut(7..8) }.fill(9);
        let before = pages();
        slab.commit_pages(2);
        assert!(pages() > before && pages() >= slab.len() / 65536, "{before}, then {}", pages());
        // SAFETY: no other code uses this slab.
        assert_eq!(unsafe { slab.bytes(6..9) }, [0, 9, 0]);
        // Only pages that are completely inside the range are released.
        // SAFETY: no other code uses this slab.
        unsafe { slab.bytes_mut(HUGE - 1..HUGE + 1) }.fill(8);
        let before = pages();
        // SAFETY: no other code uses this slab, and the test does not use these bytes any more.
        unsafe { slab.release_pages(HUGE..slab.len()) }.unwrap();
        let left = pages();
        assert!(before - left >= HUGE / 4096 && left >= HUGE / 65536, "{before}, then {left}");
        slab.reuse_pages(HUGE..slab.len()).unwrap();
        // SAFETY: no other code uses this slab.
        assert_eq!(unsafe { (slab.bytes(6..9), slab.bytes(HUGE - 1..HUGE)) }, (&[0, 9, 0][..], &[8][..]));
        // SAFETY: no other code uses this slab. The range contains no whole page, so no byte is lost.
        unsafe { slab.release_pages(5..LARGEST_PAGE + 5) }.unwrap();
        // SAFETY: no other code uses this slab.
        assert_eq!(unsafe { slab.bytes(6..9) }, [0, 9, 0]);
    }
}
