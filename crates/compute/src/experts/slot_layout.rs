//! [`SlotLayout`]: the byte ranges of slots and segments in the slab.
//!
//! A GPU has one buffer per *segment* of the slab. The GPU can therefore start to use a segment when the segment is
//! first filled, and release segments when memory is short. Kernels find a slot through a table of segment addresses.

use std::ops::Range;

/// Maximum size of a segment in bytes. Smaller segments need more GPU buffers. Larger segments release memory in larger
/// steps.
pub const SEGMENT_BYTES: usize = 1 << 30;

/// Alignment of segments in bytes: the largest page size of the supported systems.
const PAGE: usize = 64 << 10;

/// The layout of a slab of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotLayout {
    pub slots: usize,
    /// Number of bytes from the start of one slot to the start of the next.
    pub slot_bytes: usize,
    /// Number of slots per segment: a power of two, so that kernels compute a slot's segment without a division. The
    /// last segment may have fewer slots.
    pub per_segment: usize,
    /// Number of bytes from the start of one segment to the start of the next.
    segment_bytes: usize,
}

impl SlotLayout {
    /// A layout with segments of at most `segment_bytes`. A segment has at least one slot, even if the slot is larger.
    /// Returns `None` if the slab would be larger than the address space.
    pub fn new(slots: usize, slot_bytes: usize, segment_bytes: usize) -> Option<Self> {
        let most = (segment_bytes / slot_bytes.max(1)).max(1);
        let per_segment = 1 << most.ilog2();
        let segment_bytes = slot_bytes.checked_mul(per_segment)?.checked_next_multiple_of(PAGE)?;
        slots.div_ceil(per_segment).checked_mul(segment_bytes)?;
        Some(Self { slots, slot_bytes, per_segment, segment_bytes })
    }

    /// Size of the slab in bytes.
    #[allow(clippy::len_without_is_empty)] // No code asks whether a slab is empty.
    pub fn len(&self) -> usize {
        self.end(self.slots)
    }

    /// Offset of the first byte of a slot.
    pub fn start(&self, slot: usize) -> usize {
        slot / self.per_segment * self.segment_bytes + slot % self.per_segment * self.slot_bytes
    }

    /// Offset of the end of slot `slots - 1`. 0 if `slots` is 0.
    fn end(&self, slots: usize) -> usize {
        slots.checked_sub(1).map_or(0, |last| self.start(last) + self.slot_bytes)
    }

    /// The byte range of these slots, including gaps between segments.
    pub fn range(&self, slots: Range<usize>) -> Range<usize> {
        self.start(slots.start)..self.end(slots.end).max(self.start(slots.start))
    }

    /// The byte range of each segment.
    pub fn segments(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let layout = *self;
        let first = (0..layout.slots).step_by(layout.per_segment);
        first.map(move |first| layout.range(first..layout.slots.min(first + layout.per_segment)))
    }

    /// The segments that contain at least one of these slots.
    pub fn segments_of(&self, slots: Range<usize>) -> Range<usize> {
        slots.start / self.per_segment..slots.end.div_ceil(self.per_segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fill_segments_without_overlap() {
        for (slots, slot_bytes, most) in [(10, 1000, 4500), (4, 64, 1 << 20), (5, 70_000, 1), (8, 1 << 16, 1 << 18)] {
            let layout = SlotLayout::new(slots, slot_bytes, most).unwrap();
            let segments: Vec<_> = layout.segments().collect();
            assert_eq!(segments.len(), slots.div_ceil(layout.per_segment));
            for slot in 0..slots {
                let bytes = layout.range(slot..slot + 1);
                assert_eq!(bytes.len(), slot_bytes);
                let segment = &segments[slot / layout.per_segment];
                assert!(segment.start <= bytes.start && bytes.end <= segment.end);
                assert!(slot == 0 || layout.start(slot - 1) + slot_bytes <= bytes.start);
            }
            assert!(segments.iter().all(|segment| segment.start % PAGE == 0 && segment.len() <= most.max(slot_bytes)));
            assert_eq!(segments.last().unwrap().end, layout.len());
        }
    }

    #[test]
    fn segments_are_at_least_half_full() {
        for slot_bytes in [1_769_472, 5_308_416, 7_077_888] {
            let layout = SlotLayout::new(4000, slot_bytes, SEGMENT_BYTES).unwrap();
            let first = layout.segments().next().unwrap().len();
            assert!(first > SEGMENT_BYTES / 2 && first <= SEGMENT_BYTES, "{first}");
        }
        assert_eq!(SlotLayout::new(usize::MAX / 2, 1000, SEGMENT_BYTES), None);
    }

    #[test]
    fn segments_of_slots_include_partial_ones() {
        let layout = SlotLayout::new(10, 1000, 4500).unwrap();
        assert_eq!(layout.per_segment, 4);
        assert_eq!(layout.segments_of(4..10), 1..3);
        assert_eq!(layout.segments_of(8..10), 2..3);
        assert_eq!(layout.range(3..3), 3000..3000);
    }
}
