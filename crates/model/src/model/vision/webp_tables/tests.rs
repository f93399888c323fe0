//! Walks over random streams, which a writer makes from its own codes, and compares with the decoder.

use super::*;
use image::{DynamicImage, ImageDecoder, codecs::webp::WebPDecoder};
use std::io::Cursor;
use test_support::mutate::Dice;

#[test]
fn ordinary_files_have_small_tables() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
    for name in ["lossless.webp", "animated.webp"] {
        let bytes = table_bytes(&std::fs::read(format!("{dir}/{name}")).unwrap(), [40, 28]).unwrap();
        assert!((GROUP_BYTES..100_000).contains(&bytes), "{name}: {bytes}");
    }
    assert_eq!(table_bytes(b"RIFF", [1, 1]), None);
}

#[test]
fn canonical_codes_are_read() {
    // Symbols 1, 2 and 3 with the codes 0, 10 and 11. The first bit of a code is its highest bit.
    let code = Code::new(&[0, 1, 2, 2]).unwrap();
    let bits = &mut Bits { data: &[0b_11010], at: 0 };
    let symbols: Vec<_> = (0..3).map(|_| code.symbol(bits)).collect();
    assert_eq!(symbols, [Some(1), Some(2), Some(3)]);
    for lengths in [&[0, 0][..], &[1, 2], &[1, 1, 1]] {
        assert!(Code::new(lengths).is_none(), "{lengths:?}");
    }
}

/// Writes random VP8L streams.
struct Writer {
    dice: Dice,
    bits: Vec<bool>,
}

/// The symbols of a written code, with their bits.
type Written = Vec<(usize, Vec<bool>)>;

impl Writer {
    fn put(&mut self, value: usize, count: usize) {
        self.bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
    }

    fn put_symbol(&mut self, code: &Written, symbol: usize) {
        let found = code.iter().find(|written| written.0 == symbol).unwrap();
        self.bits.extend(&found.1);
    }

    /// A random complete code: for each symbol, the length of its code and its bits.
    fn random_code(&mut self, mut symbols: Vec<usize>, longest: usize) -> (Vec<(usize, usize)>, Written) {
        let mut lengths = vec![0];
        while lengths.len() < symbols.len() {
            let at = self.dice.below(lengths.len());
            if lengths[at] < longest {
                lengths[at] += 1;
                lengths.push(lengths[at]);
            }
        }
        if let [only] = symbols[..] {
            return (vec![(only, 1 + self.dice.below(longest))], vec![(only, vec![])]);
        }
        (1..symbols.len()).for_each(|at| symbols.swap(at, self.dice.below(at + 1)));
        let mut order: Vec<_> = symbols.into_iter().zip(lengths).collect();
        order.sort_by_key(|(symbol, len)| (*len, *symbol));
        let mut code = 0;
        let mut last = 0;
        let mut written = Vec::new();
        for (symbol, len) in &order {
            code <<= len - last;
            last = *len;
            written.push((*symbol, (0..*len).rev().map(|bit| code >> bit & 1 == 1).collect()));
            code += 1;
        }
        (order, written)
    }

    /// Writes a random code that has at least the `needed` symbols.
    fn write_code(&mut self, alphabet: usize, needed: &[usize]) -> Written {
        let mut symbols = needed.to_vec();
        symbols.sort_unstable();
        symbols.dedup();
        if symbols.len() < 3 && symbols.iter().all(|symbol| *symbol < 256) && self.dice.below(3) > 0 {
            return self.write_simple_code(alphabet.min(256), symbols);
        }
        for _ in 0..self.dice.below(12) {
            let other = self.dice.below(alphabet);
            if !symbols.contains(&other) {
                symbols.push(other);
            }
        }
        let (lengths, written) = self.random_code(symbols, 15);
        let mut all = vec![0; alphabet];
        lengths.iter().for_each(|(symbol, len)| all[*symbol] = *len);
        // The lengths as symbols, with their extra bits.
        let mut list: Vec<(usize, usize, usize)> = Vec::new();
        let mut at = 0;
        let mut previous = 8;
        while at < alphabet {
            let run = all[at..].iter().take_while(|len| **len == all[at]).count();
            let (item, count) = match all[at] {
                0 if run > 10 => ((18, run.min(138) - 11, 7), run.min(138)),
                0 if run > 2 => ((17, run.min(10) - 3, 3), run.min(10)),
                len if run > 2 && len == previous => ((16, run.min(6) - 3, 2), run.min(6)),
                len => ((len, 0, 0), 1),
            };
            list.push(item);
            previous = if all[at] > 0 { all[at] } else { previous };
            at += count;
        }
        // The zeros at the end may be left out if the number of symbols is written.
        let is_short = self.dice.below(2) > 0;
        if is_short {
            let end = list.iter().rposition(|item| (1..17).contains(&item.0)).unwrap() + 1;
            list.truncate(end.max(2));
        }
        let mut used: Vec<_> = list.iter().map(|item| item.0).collect();
        used.sort_unstable();
        used.dedup();
        let (lengths, code) = self.random_code(used, 7);
        self.put(0, 1);
        self.put(15, 4);
        for symbol in CODE_LENGTH_ORDER {
            let len = lengths.iter().find(|length| length.0 == symbol).map_or(0, |length| length.1);
            self.put(len, 3);
        }
        self.put(is_short.into(), 1);
        if is_short {
            self.put(5, 3);
            self.put(list.len() - 2, 12);
        }
        for (symbol, extra, count) in list {
            self.put_symbol(&code, symbol);
            self.put(extra, count);
        }
        written
    }

    /// Writes one or two symbols, in any order. They may be equal.
    fn write_simple_code(&mut self, alphabet: usize, needed: Vec<usize>) -> Written {
        let mut symbols = needed;
        if symbols.len() == 1 && self.dice.below(2) > 0 {
            let other = if self.dice.below(3) > 0 { self.dice.below(alphabet) } else { symbols[0] };
            symbols.push(other);
        }
        if self.dice.below(2) > 0 {
            symbols.reverse();
        }
        let is_long = symbols[0] > 1 || self.dice.below(2) > 0;
        [1, symbols.len() - 1, is_long.into()].iter().for_each(|bit| self.put(*bit, 1));
        self.put(symbols[0], if is_long { 8 } else { 1 });
        symbols.iter().skip(1).for_each(|symbol| self.put(*symbol, 8));
        let is_pair = symbols.len() == 2;
        symbols.into_iter().enumerate().map(|(at, symbol)| (symbol, vec![at == 1; is_pair.into()])).collect()
    }

    fn write_cache(&mut self) -> usize {
        let cache_bits = if self.dice.below(3) > 0 { 0 } else { 1 + self.dice.below(11) };
        self.put((cache_bits > 0).into(), 1);
        self.put(cache_bits, if cache_bits > 0 { 4 } else { 0 });
        if cache_bits > 0 { 1 << cache_bits } else { 0 }
    }

    /// Writes an image with these numbers in green and red.
    fn write_image(&mut self, numbers: &[usize]) {
        let cache = self.write_cache();
        // Up to four pixels that repeat the last one are a copy. Its length is a symbol after the literals.
        let mut symbols: Vec<(usize, usize)> = Vec::new();
        let mut at = 0;
        while at < numbers.len() {
            let run = numbers[at..].iter().take(4).take_while(|number| at > 0 && **number == numbers[at - 1]).count();
            let is_copy = run > 0 && self.dice.below(2) > 0;
            symbols.push(if is_copy { (255 + run, 0) } else { (numbers[at] & 255, numbers[at] >> 8) });
            at += if is_copy { run } else { 1 };
        }
        let (greens, reds): (Vec<_>, Vec<_>) = symbols.iter().copied().unzip();
        let green = self.write_code(LENGTHS_END + cache, &greens);
        let red = self.write_code(256, &reds);
        let [blue, alpha] = [0, 1].map(|symbol| self.write_code(256, &[symbol]));
        let distance = self.write_code(40, &[1]);
        for (first, second) in symbols {
            self.put_symbol(&green, first);
            if first < 256 {
                self.put_symbol(&red, second);
                self.put_symbol(&blue, 0);
                self.put_symbol(&alpha, 1);
            } else {
                self.put_symbol(&distance, 1);
            }
        }
    }

    /// Writes an image of `count` numbers below `end`, and returns the largest one.
    fn write_numbers(&mut self, count: usize, end: usize) -> usize {
        let choices: Vec<_> = (0..1 + self.dice.below(4)).map(|_| self.dice.below(end)).collect();
        let numbers: Vec<_> = (0..count).map(|_| *self.dice.pick(&choices)).collect();
        self.write_image(&numbers);
        numbers.into_iter().max().unwrap()
    }

    /// Writes a file. Returns its width, its height and the number of groups.
    fn write_file(&mut self) -> ([usize; 2], usize) {
        let size = [1 + self.dice.below(40), 1 + self.dice.below(40)];
        let [mut width, height] = size;
        [(0x2f, 8), (width - 1, 14), (height - 1, 14), (1, 1), (0, 3)]
            .iter()
            .for_each(|(value, count)| self.put(*value, *count));
        let mut transforms = vec![0, 1, 2, 3];
        while self.dice.below(3) > 0 && !transforms.is_empty() {
            let transform = transforms.swap_remove(self.dice.below(transforms.len()));
            self.put(1 | transform << 1, 3);
            if transform < 2 {
                let block_bits = self.dice.below(8);
                self.put(block_bits, 3);
                let side = 4 << block_bits;
                self.write_numbers(width.div_ceil(side) * height.div_ceil(side), 14);
            } else if transform == 3 {
                let colours = 1 + self.dice.below(256) / (1 + self.dice.below(128));
                self.put(colours - 1, 8);
                self.write_numbers(colours, 1 << 16);
                let packed = [2, 4, 16].iter().filter(|most| colours <= **most).count();
                width = width.div_ceil(1 << packed);
            }
        }
        self.put(0, 1);
        let cache = self.write_cache();
        let has_groups = self.dice.below(4) > 0;
        self.put(has_groups.into(), 1);
        let mut groups = 1;
        if has_groups {
            let block_bits = self.dice.below(3);
            self.put(block_bits, 3);
            let side = 4 << block_bits;
            groups += self.write_numbers(width.div_ceil(side) * height.div_ceil(side), 200);
        }
        for _ in 0..groups {
            for alphabet in [LENGTHS_END + cache, 256, 256, 256, 40] {
                self.write_code(alphabet, &[0]);
            }
        }
        (size, groups)
    }

    fn file(&self) -> Vec<u8> {
        let bytes = self.bits.chunks(8).map(|byte| byte.iter().rev().fold(0, |sum, bit| sum << 1 | u8::from(*bit)));
        // Pixels of zeros follow.
        let stream: Vec<u8> = bytes.chain([0; 8000]).collect();
        let len = |len: usize| (len as u32).to_le_bytes();
        [b"RIFF", &len(12 + stream.len())[..], b"WEBPVP8L", &len(stream.len()), &stream, &[0][..stream.len() % 2]]
            .concat()
    }
}

#[test]
fn random_streams_are_walked_as_decoded() {
    let mut decoded = 0;
    for seed in 0..80 {
        let mut writer = Writer { dice: Dice(seed), bits: Vec::new() };
        let (size, groups) = writer.write_file();
        let file = writer.file();
        let bytes = table_bytes(&file, size).unwrap_or_else(|| panic!("seed {seed}: refused"));
        let most = groups * (GROUP_BYTES + 5 * (4096 + 64 + 15 * LONG_CODE_BYTES));
        assert!((groups * GROUP_BYTES..=most).contains(&bytes), "seed {seed}: {bytes} for {groups} groups");
        let decoder = WebPDecoder::new(Cursor::new(&file)).unwrap();
        assert_eq!(decoder.dimensions(), (size[0] as u32, size[1] as u32), "seed {seed}");
        // The decoder refuses most pixels of zeros that are copies.
        decoded += usize::from(DynamicImage::from_decoder(decoder).is_ok());
        // A stream that ends within the tables is refused.
        let cut = &writer.bits[..41 + writer.dice.below(writer.bits.len() - 41)];
        let stream = Writer { dice: Dice(0), bits: cut.to_vec() }.file();
        let cut_bytes = table_bytes(&stream[..20 + cut.len() / 8], size);
        assert_eq!(cut_bytes, None, "seed {seed}: {} of {} bits", cut.len(), writer.bits.len());
    }
    assert!(decoded > 15, "{decoded} of 80");
}
