//! Computes the memory of the Huffman tables of lossless WebP files before they are decoded. A file may define 65,536 groups
//! of five tables, in a few bytes per table, and the decoder has no limit for them.
//!
//! The module walks over the bits of a VP8L stream up to the pixels. It needs no pixels: how many bits a symbol takes
//! depends only on the tables, and the number of groups only on the literals of the entropy image.
//!
//! A file is refused if the walk finds damage. The decoder would refuse it too, except for a few codes that its 16-bit sums
//! take for complete. The time of a walk is limited by the bits of the stream and by [`MAX_GROUPS`]: every step
//! except the reading of codes takes bits, each transform may occur once, and an image whose codes take no bits is skipped at once.

use std::ops::RangeInclusive;

/// Maximum number of groups. The encoder of libwebp writes at most 2,600. Each takes up to 40 microseconds to read, although
/// it may have few bits.
const MAX_GROUPS: usize = 8192;
/// Bytes of memory per group of tables, including the growth of the list of groups.
const GROUP_BYTES: usize = 3 * 320;
/// Maximum number of bits of the index of a table. Longer codes are in a tree.
const TABLE_BITS: usize = 10;
/// Bytes of memory per code that is longer than [`TABLE_BITS`].
const LONG_CODE_BYTES: usize = 6 * 16;
/// Size of the alphabets of a group without colour cache: green and lengths, red, blue, alpha, distances.
const ALPHABETS: [usize; 5] = [LENGTHS_END, 256, 256, 256, 40];
/// Number of green symbols that are literals.
const LITERALS: usize = 256;
/// Number of green symbols that are literals or lengths. Indices of the colour cache follow.
const LENGTHS_END: usize = 256 + 24;
/// Size of the colour cache in bits.
const CACHE_BITS: RangeInclusive<usize> = 1..=11;
/// Order in which the lengths of the codes for code lengths are written.
const CODE_LENGTH_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Reads bits, lowest first.
struct Bits<'a> {
    data: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    /// The next bits, at least 57. Bits after the end are 0.
    fn peek(&self) -> u64 {
        let rest = self.data.get(self.at / 8..).unwrap_or_default();
        let bytes = rest.first_chunk().copied().unwrap_or_else(|| {
            let mut bytes = [0; 8];
            bytes[..rest.len()].copy_from_slice(rest);
            bytes
        });
        u64::from_le_bytes(bytes) >> (self.at % 8)
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        self.at += count;
        (self.at <= 8 * self.data.len()).then_some(())
    }

    fn read(&mut self, count: usize) -> Option<usize> {
        let value = self.peek() & ((1 << count) - 1);
        self.skip(count)?;
        Some(value as usize)
    }

    fn flag(&mut self) -> Option<bool> {
        self.read(1).map(|bit| bit == 1)
    }
}

/// A Huffman code.
struct Code {
    /// For each length, the number of codes.
    counts: [usize; 16],
    /// The symbols, in order of their codes. The decoder keeps the order and the repetition of two symbols that a file lists.
    symbols: Vec<u16>,
}

impl Code {
    /// The canonical code with these lengths. `None` if it has no symbols or is not complete.
    fn new(lengths: &[u8]) -> Option<Self> {
        let mut counts = [0; 16];
        lengths.iter().filter(|len| **len > 0).for_each(|len| counts[usize::from(*len)] += 1);
        let mut next = [0; 16];
        (1..16).for_each(|len| next[len] = next[len - 1] + counts[len - 1]);
        let mut symbols = vec![0; counts.iter().sum()];
        for (symbol, len) in lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
            let at = &mut next[usize::from(*len)];
            symbols[*at] = symbol as u16;
            *at += 1;
        }
        let used: usize = (1..16).map(|len| counts[len] << (15 - len)).sum();
        (symbols.len() == 1 || used == 1 << 15).then_some(Self { counts, symbols })
    }

    /// Reads a code of this alphabet.
    fn read(bits: &mut Bits, alphabet: usize) -> Option<Self> {
        if bits.flag()? {
            let has_two = bits.flag()?;
            let is_long = bits.flag()?;
            let mut symbols = vec![bits.read(if is_long { 8 } else { 1 })? as u16];
            if has_two {
                symbols.push(bits.read(8)? as u16);
            }
            let mut counts = [0; 16];
            counts[1] = symbols.len();
            return symbols.iter().all(|symbol| usize::from(*symbol) < alphabet).then_some(Self { counts, symbols });
        }
        let mut code_lengths = [0; 19];
        for index in 0..4 + bits.read(4)? {
            code_lengths[*CODE_LENGTH_ORDER.get(index)?] = bits.read(3)? as u8;
        }
        let code = Self::new(&code_lengths)?;
        let mut left = alphabet;
        if bits.flag()? {
            let width = 2 + 2 * bits.read(3)?;
            left = 2 + bits.read(width)?;
        }
        if left > alphabet {
            return None;
        }
        let mut lengths = vec![0; alphabet];
        let mut at = 0;
        let mut previous = 8;
        while at < alphabet && left > 0 {
            left -= 1;
            let (repeat, length) = match code.symbol(bits)? {
                16 => (3 + bits.read(2)?, previous),
                17 => (3 + bits.read(3)?, 0),
                18 => (11 + bits.read(7)?, 0),
                length => (1, length as u8),
            };
            if length > 0 {
                previous = length;
            }
            lengths.get_mut(at..at + repeat)?.fill(length);
            at += repeat;
        }
        Self::new(&lengths)
    }

    /// True if the code has a single symbol, which takes no bits.
    fn is_free(&self) -> bool {
        self.symbols.len() == 1
    }

    /// Reads one symbol.
    fn symbol(&self, bits: &mut Bits) -> Option<usize> {
        if let [only] = self.symbols[..] {
            return Some(only.into());
        }
        let next = bits.peek();
        let mut code = 0;
        let mut first = 0;
        let mut index = 0;
        for (len, count) in self.counts.iter().enumerate().skip(1) {
            code |= (next >> (len - 1) & 1) as usize;
            if code < first + count {
                bits.skip(len)?;
                return self.symbols.get(index + code - first).map(|symbol| usize::from(*symbol));
            }
            index += count;
            first = (first + count) << 1;
            code <<= 1;
        }
        None
    }

    /// Memory of the decoder's tables.
    fn bytes(&self) -> usize {
        let longest = self.counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        let long: usize = self.counts[TABLE_BITS + 1..].iter().sum();
        if self.symbols.len() < 2 { 0 } else { (4 << longest.min(TABLE_BITS)) + long * LONG_CODE_BYTES + 64 }
    }
}

/// Reads the five codes of a group.
fn read_group(bits: &mut Bits, cache: usize) -> Option<[Code; 5]> {
    let [a, b, c, d, e] = ALPHABETS;
    Some([
        Code::read(bits, a + cache)?,
        Code::read(bits, b)?,
        Code::read(bits, c)?,
        Code::read(bits, d)?,
        Code::read(bits, e)?,
    ])
}

/// Number of colours in the colour cache.
fn read_cache(bits: &mut Bits) -> Option<usize> {
    if !bits.flag()? {
        return Some(0);
    }
    let cache_bits = bits.read(4)?;
    CACHE_BITS.contains(&cache_bits).then_some(1 << cache_bits)
}

/// Reads the extra bits of a length or distance.
fn read_prefixed(bits: &mut Bits, symbol: usize) -> Option<usize> {
    if symbol < 4 {
        return Some(symbol + 1);
    }
    let extra = (symbol - 2) >> 1;
    Some(((2 + (symbol & 1)) << extra) + bits.read(extra)? + 1)
}

/// Skips an image that belongs to a transform or to the groups. Returns the largest number in red and green.
fn skip_image(bits: &mut Bits, pixels: usize) -> Option<usize> {
    let cache = read_cache(bits)?;
    let [green, red, blue, alpha, distance] = read_group(bits, cache)?;
    let literals_are_free = [&green, &red, &blue, &alpha].iter().all(|code| code.is_free());
    let mut at = 0;
    let mut largest = 0;
    while at < pixels {
        let symbol = green.symbol(bits)?;
        if symbol < LITERALS {
            let red = red.symbol(bits)?;
            blue.symbol(bits)?;
            alpha.symbol(bits)?;
            largest = largest.max(red << 8 | symbol);
            at = if literals_are_free { pixels } else { at + 1 };
        } else if symbol < LENGTHS_END {
            let length = read_prefixed(bits, symbol - LITERALS)?;
            let symbol = distance.symbol(bits)?;
            read_prefixed(bits, symbol)?;
            // The first pixel has no earlier one to copy.
            if at == 0 || length > pixels - at {
                return None;
            }
            at += length;
        } else {
            at = if green.is_free() { pixels } else { at + 1 };
        }
    }
    Some(largest)
}

/// Memory of the Huffman tables of a VP8L stream of this width and height. The stream of transparency has no header.
fn stream_bytes(stream: &[u8], [mut width, height]: [usize; 2], has_header: bool) -> Option<usize> {
    let bits = &mut Bits { data: stream, at: 0 };
    if has_header {
        let is_signed = bits.read(8)? == 0x2f;
        let size = [bits.read(14)? + 1, bits.read(14)? + 1];
        bits.flag()?;
        let version = bits.read(3)?;
        if !is_signed || size != [width, height] || version != 0 {
            return None;
        }
    }
    let blocks = |width: usize, bits: usize| width.div_ceil(1 << bits) * height.div_ceil(1 << bits);
    let mut seen = [false; 4];
    while bits.flag()? {
        let transform = bits.read(2)?;
        if std::mem::replace(&mut seen[transform], true) {
            return None;
        }
        match transform {
            0 | 1 => {
                let block_bits = bits.read(3)? + 2;
                skip_image(bits, blocks(width, block_bits))?;
            }
            2 => {}
            _ => {
                let colours = bits.read(8)? + 1;
                skip_image(bits, colours)?;
                let packed = match colours {
                    1..=2 => 3,
                    3..=4 => 2,
                    5..=16 => 1,
                    _ => 0,
                };
                width = width.div_ceil(1 << packed);
            }
        }
    }
    let cache = read_cache(bits)?;
    let mut groups = 1;
    if bits.flag()? {
        let block_bits = bits.read(3)? + 2;
        groups += skip_image(bits, blocks(width, block_bits))?;
    }
    if groups > MAX_GROUPS {
        return None;
    }
    let mut bytes = 0;
    for _ in 0..groups {
        bytes += GROUP_BYTES + read_group(bits, cache)?.iter().map(Code::bytes).sum::<usize>();
    }
    Some(bytes)
}

/// Memory of the tables of a lossy stream of this width and height, and of its transparency. The decoder compares the size
/// only after it has allocated and decoded the stream.
fn lossy_bytes(stream: &[u8], size: [usize; 2], transparency: Option<&[u8]>) -> Option<usize> {
    let [tag, _, _, 0x9d, 0x01, 0x2a, sides @ ..] = stream.first_chunk::<10>()? else { return None };
    let side = |at: usize| usize::from(u16::from_le_bytes([sides[at], sides[at + 1]]) & 0x3fff);
    if tag & 1 != 0 || [side(0), side(2)] != size {
        return None;
    }
    match transparency {
        None => Some(0),
        // The two low bits of the first byte are 1 if transparency is compressed.
        Some(content) => match content.split_first()? {
            (flags, stream) if flags & 3 == 1 => stream_bytes(stream, size, false),
            _ => Some(0),
        },
    }
}

/// Memory of the tables of the first frame of an animation. The decoder demands that its pixels come first.
fn frame_bytes(frame: &[u8], canvas: [usize; 2]) -> Option<usize> {
    let (head, rest) = frame.split_first_chunk::<16>()?;
    let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], 0]) as usize;
    let size = [number(6) + 1, number(9) + 1];
    if 2 * number(0) + size[0] > canvas[0] || 2 * number(3) + size[1] > canvas[1] {
        return None;
    }
    let mut chunks = chunks(rest);
    let (kind, content) = chunks.next()?;
    // The decoder reads the header of a second chunk at this place, and allocates the size that metadata would have.
    if content.starts_with(b"EXIF") {
        return None;
    }
    match kind {
        b"VP8L" => stream_bytes(content, size, true),
        b"VP8 " => lossy_bytes(content, size, None),
        b"ALPH" => lossy_bytes(chunks.next()?.1, size, Some(content)),
        _ => None,
    }
}

/// The chunks of a file or frame: type and content.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let (head, after) = rest.split_first_chunk::<8>()?;
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let kind = &rest[..4];
        let content = &after[..len.min(after.len())];
        rest = after.get(len.saturating_add(len % 2)..).unwrap_or_default();
        Some((kind, content))
    })
}

/// Memory that the decoder needs for the Huffman tables of a WebP file, beyond those of ordinary files. `size` is the width
/// and height of the image. `None` if the file is damaged before its pixels, or has streams of another size.
pub fn table_bytes(file: &[u8], size: [usize; 2]) -> Option<usize> {
    let body = file.get(12..)?;
    // The decoder reads the first chunk of each type.
    let find = |kind: &[u8]| chunks(body).find(|chunk| chunk.0 == kind).map(|chunk| chunk.1);
    let flags = match chunks(body).next()? {
        (b"VP8L", stream) => return stream_bytes(stream, size, true),
        (b"VP8 ", stream) => return lossy_bytes(stream, size, None),
        (b"VP8X", header) => header.first_chunk::<10>()?[0],
        _ => return None,
    };
    let is_animated = flags & 2 != 0;
    let is_transparent = flags & 0x10 != 0;
    match (is_animated, find(b"ANMF"), find(b"VP8L"), find(b"VP8 ")) {
        (true, Some(frame), _, _) => frame_bytes(frame, size),
        (false, None, Some(stream), None) => stream_bytes(stream, size, true),
        (false, None, None, Some(stream)) if is_transparent => lossy_bytes(stream, size, Some(find(b"ALPH")?)),
        (false, None, None, Some(stream)) => lossy_bytes(stream, size, None),
        // The decoder would take chunks of a frame for those of the image.
        _ => None,
    }
}

#[cfg(test)]
mod tests;
