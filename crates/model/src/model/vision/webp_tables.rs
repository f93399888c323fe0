//! Computes the memory of the Huffman tables of lossless WebP files before they are decoded. A file may define 65,536 groups
//! of five tables, in a few bytes per table, and the decoder has no limit for them.
//!
//! The module walks over the bits of a VP8L stream up to the pixels. It needs no pixels: how many bits a symbol takes
//! depends only on the tables, and the number of groups only on the literals of the entropy image.

/// Bytes of memory per group of tables, including the growth of the list of groups.
const GROUP_BYTES: usize = 3 * 320;
/// Maximum number of bits of the index of a table. Longer codes are in a tree.
const TABLE_BITS: usize = 10;
/// Bytes of memory per code that is longer than [`TABLE_BITS`].
const LONG_CODE_BYTES: usize = 6 * 16;
/// Size of the alphabets of a group without colour cache: green and lengths, red, blue, alpha, distances.
const ALPHABETS: [usize; 5] = [256 + 24, 256, 256, 256, 40];
/// Order in which the lengths of the codes for code lengths are written.
const CODE_LENGTH_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Reads bits, lowest first.
struct Bits<'a> {
    data: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    fn read(&mut self, count: usize) -> Option<usize> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.data.get(self.at / 8)?;
            value |= usize::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }

    fn flag(&mut self) -> Option<bool> {
        self.read(1).map(|bit| bit == 1)
    }
}

/// A canonical Huffman code.
struct Code {
    /// For each length, the number of codes.
    counts: [usize; 16],
    /// The symbols, by length of their codes.
    symbols: Vec<usize>,
}

impl Code {
    fn new(lengths: &[usize]) -> Self {
        let mut counts = [0; 16];
        lengths.iter().filter(|len| **len > 0).for_each(|len| counts[*len] += 1);
        let mut symbols: Vec<usize> = (0..lengths.len()).filter(|symbol| lengths[*symbol] > 0).collect();
        symbols.sort_by_key(|symbol| lengths[*symbol]);
        Self { counts, symbols }
    }

    /// Reads a code of this alphabet.
    fn read(bits: &mut Bits, alphabet: usize) -> Option<Self> {
        let mut lengths = vec![0; alphabet];
        if bits.flag()? {
            let has_two = bits.flag()?;
            let is_long = bits.flag()?;
            *lengths.get_mut(bits.read(if is_long { 8 } else { 1 })?)? = 1;
            if has_two {
                *lengths.get_mut(bits.read(8)?)? = 1;
            }
            return Some(Self::new(&lengths));
        }
        let mut code_lengths = [0; 19];
        for index in 0..4 + bits.read(4)? {
            code_lengths[*CODE_LENGTH_ORDER.get(index)?] = bits.read(3)?;
        }
        let code = Self::new(&code_lengths);
        let mut left = alphabet;
        if bits.flag()? {
            let width = 2 + 2 * bits.read(3)?;
            left = 2 + bits.read(width)?;
        }
        let mut at = 0;
        let mut previous = 8;
        while at < alphabet && left > 0 {
            left -= 1;
            let (repeat, length) = match code.symbol(bits)? {
                16 => (3 + bits.read(2)?, previous),
                17 => (3 + bits.read(3)?, 0),
                18 => (11 + bits.read(7)?, 0),
                length => (1, length),
            };
            if length > 0 {
                previous = length;
            }
            lengths.get_mut(at..at + repeat)?.fill(length);
            at += repeat;
        }
        Some(Self::new(&lengths))
    }

    /// Reads one symbol. The only symbol of an alphabet takes no bits.
    fn symbol(&self, bits: &mut Bits) -> Option<usize> {
        if let [only] = self.symbols[..] {
            return Some(only);
        }
        let mut code = 0;
        let mut first = 0;
        let mut index = 0;
        for count in &self.counts[1..] {
            code |= bits.read(1)?;
            if code < first + count {
                return self.symbols.get(index + code - first).copied();
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

/// Size of the colour cache.
fn read_cache(bits: &mut Bits) -> Option<usize> {
    if bits.flag()? { Some(1 << bits.read(4)?) } else { Some(0) }
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
    let mut at = 0;
    let mut largest = 0;
    while at < pixels {
        let symbol = green.symbol(bits)?;
        if symbol < 256 {
            let red = red.symbol(bits)?;
            blue.symbol(bits)?;
            alpha.symbol(bits)?;
            largest = largest.max(red << 8 | symbol);
            at += 1;
        } else if symbol < 280 {
            at += read_prefixed(bits, symbol - 256)?;
            let symbol = distance.symbol(bits)?;
            read_prefixed(bits, symbol)?;
        } else {
            at += 1;
        }
    }
    Some(largest)
}

/// Adds the memory of the Huffman tables of a VP8L stream to `bytes`, up to the end of the stream or the first damage.
/// `size` is width and height if the stream has no header.
fn add_tables(stream: &[u8], size: Option<[usize; 2]>, bytes: &mut usize) -> Option<()> {
    let bits = &mut Bits { data: stream, at: 0 };
    let [mut width, height] = match size {
        Some(size) => size,
        None => {
            bits.read(8)?;
            let size = [bits.read(14)? + 1, bits.read(14)? + 1];
            bits.read(4)?;
            size
        }
    };
    let blocks = |width: usize, bits: usize| width.div_ceil(1 << bits) * height.div_ceil(1 << bits);
    while bits.flag()? {
        match bits.read(2)? {
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
    for _ in 0..groups {
        *bytes += GROUP_BYTES;
        for code in read_group(bits, cache)? {
            *bytes += code.bytes();
        }
    }
    Some(())
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
/// and height of the image. The decoder reads the first chunk of each type, or the first frame of an animation.
pub fn table_bytes(file: &[u8], size: [usize; 2]) -> usize {
    let first = |file: &[u8], size: [usize; 2]| {
        let find = |kind: &[u8]| chunks(file).find(|chunk| chunk.0 == kind).map(|chunk| chunk.1);
        let mut pixels = 0;
        let mut alpha = 0;
        find(b"VP8L").and_then(|stream| add_tables(stream, None, &mut pixels));
        // The two low bits of the first byte of transparency are 1 if it is compressed.
        let transparency =
            find(b"ALPH").and_then(|content| content.split_first()).filter(|(flags, _)| **flags & 3 == 1);
        transparency.and_then(|(_, stream)| add_tables(stream, Some(size), &mut alpha));
        pixels.max(alpha)
    };
    let body = file.get(12..).unwrap_or_default();
    let frame = chunks(body).find(|chunk| chunk.0 == b"ANMF").and_then(|(_, frame)| frame.split_first_chunk::<16>());
    let frame = frame.map_or(0, |(head, chunks)| {
        let side = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], 0]) as usize + 1;
        first(chunks, [side(6), side(9)])
    });
    first(body, size).max(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_files_have_small_tables() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
        for name in ["lossless.webp", "animated.webp"] {
            let bytes = table_bytes(&std::fs::read(format!("{dir}/{name}")).unwrap(), [64, 64]);
            assert!((GROUP_BYTES..100_000).contains(&bytes), "{name}: {bytes}");
        }
        assert_eq!(table_bytes(b"RIFF", [1, 1]), 0);
    }

    #[test]
    fn canonical_codes_are_read() {
        // Symbols 1, 2 and 3 with the codes 0, 10 and 11. The first bit of a code is its highest bit.
        let code = Code::new(&[0, 1, 2, 2]);
        let bits = &mut Bits { data: &[0b_11010], at: 0 };
        let symbols: Vec<_> = (0..3).map(|_| code.symbol(bits)).collect();
        assert_eq!(symbols, [Some(1), Some(2), Some(3)]);
    }
}
