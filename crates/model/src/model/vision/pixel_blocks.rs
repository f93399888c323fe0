//! Reads a PNG or GIF file without the metadata that its decoder would keep in memory. The metadata may be as large as
//! the file, and a decoder may need many times that for its structures.

use std::io::{BufRead, Error, ErrorKind, Read, Result, Seek, SeekFrom};

/// Maximum size of the EXIF data of a PNG file in bytes. Larger data is left out.
const EXIF_BYTES: usize = 512 << 10;

/// Finds the length of the first block of the argument, and whether the decoder gets the block.
type NextBlock = fn(&[u8]) -> (usize, bool);

/// The blocks of a file that have an effect on pixels or orientation.
pub struct PixelBlocks<'a> {
    /// The unread bytes of the current block.
    block: &'a [u8],
    /// The file after the current block.
    rest: &'a [u8],
    next: NextBlock,
}

impl<'a> PixelBlocks<'a> {
    /// The critical chunks of a PNG file, transparency, and EXIF data.
    pub fn of_png(encoded: &'a [u8]) -> Self {
        Self::new(encoded, 8, png_chunk)
    }

    /// A GIF file without application extensions.
    pub fn of_gif(encoded: &'a [u8]) -> Self {
        // The global palette follows the screen descriptor, which ends after 13 bytes.
        let flags = encoded.get(10).copied().unwrap_or_default();
        let palette = if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
        Self::new(encoded, 13 + palette, gif_block)
    }

    fn new(encoded: &'a [u8], head: usize, next: NextBlock) -> Self {
        let (block, rest) = encoded.split_at(head.min(encoded.len()));
        Self { block, rest, next }
    }
}

/// The next chunk: length, type, data, checksum. The first letter of an ancillary type is in lower case.
fn png_chunk(rest: &[u8]) -> (usize, bool) {
    let Some((len, kind)) = rest.first_chunk::<8>().map(|head| head.split_at(4)) else { return (rest.len(), true) };
    let len = len.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
    let is_needed = kind[0] & 0x20 == 0 || kind == b"tRNS" || (kind == b"eXIf" && len <= EXIF_BYTES);
    (len.saturating_add(12), is_needed)
}

/// The next extension: introducer, label, sub-blocks up to an empty sub-block. The first image and all after it are one
/// block.
fn gif_block(rest: &[u8]) -> (usize, bool) {
    let [0x21, label, ..] = rest else { return (rest.len(), true) };
    let mut len = 2;
    while let Some(sub_block) = rest.get(len).copied() {
        len += 1 + usize::from(sub_block);
        if sub_block == 0 {
            break;
        }
    }
    (len, *label != 0xff)
}

impl BufRead for PixelBlocks<'_> {
    fn fill_buf(&mut self) -> Result<&[u8]> {
        while self.block.is_empty() && !self.rest.is_empty() {
            let (len, is_needed) = (self.next)(self.rest);
            let (block, rest) = self.rest.split_at(len.min(self.rest.len()));
            self.rest = rest;
            if is_needed {
                self.block = block;
            }
        }
        Ok(self.block)
    }

    fn consume(&mut self, amount: usize) {
        self.block = self.block.get(amount..).unwrap_or_default();
    }
}

impl Read for PixelBlocks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let len = self.fill_buf()?.read(buffer)?;
        self.consume(len);
        Ok(len)
    }
}

/// The decoders demand this trait. They do not seek.
impl Seek for PixelBlocks<'_> {
    fn seek(&mut self, _: SeekFrom) -> Result<u64> {
        Err(Error::from(ErrorKind::Unsupported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut blocks: PixelBlocks) -> Vec<u8> {
        let mut kept = Vec::new();
        blocks.read_to_end(&mut kept).unwrap();
        kept
    }

    #[test]
    fn png_keeps_pixels_transparency_and_exif() {
        let chunk = |kind: &str, len: usize| {
            [&(len as u32).to_be_bytes()[..], kind.as_bytes(), &vec![7; len], b"CRC!"].concat()
        };
        let large = EXIF_BYTES + 1;
        let kinds = [("IHDR", 13), ("tEXt", 0), ("iTXt", 5), ("tRNS", 2), ("iCCP", 9), ("eXIf", 3), ("eXIf", large)];
        let ends = [("acTL", 8), ("IDAT", 0), ("IDAT", 4), ("zTXt", 1), ("IEND", 0)];
        let file = |kinds: &[(&str, usize)]| {
            let chunks: Vec<u8> = kinds.iter().flat_map(|(kind, len)| chunk(kind, *len)).collect();
            [b"\x89PNG\r\n\x1a\n", &chunks[..]].concat()
        };
        let expected = file(&[("IHDR", 13), ("tRNS", 2), ("eXIf", 3), ("IDAT", 0), ("IDAT", 4), ("IEND", 0)]);
        let all = file(&[&kinds[..], &ends].concat());
        assert_eq!(read(PixelBlocks::of_png(&all)), expected);
        // A file that is cut off never panics.
        (0..all.len()).step_by(1 + large / 1000).for_each(|len| drop(read(PixelBlocks::of_png(&all[..len]))));
        assert_eq!(read(PixelBlocks::of_png(&expected)), expected);
    }

    #[test]
    fn gif_loses_only_application_extensions() {
        let head = [&b"GIF89a"[..], &[1, 0, 1, 0, 0x80, 0, 0], &[9; 6]].concat();
        let application = [&[0x21, 0xff, 3][..], b"XMP", &[2, 0x21, 0x2c, 0]].concat();
        let control = [0x21, 0xf9, 4, 1, 2, 3, 4, 0];
        let image = [0x2c, 0x21, 0xff, 1, 1, 0, 0x3b];
        let file = [&head[..], &application, &control, &application, &image].concat();
        assert_eq!(read(PixelBlocks::of_gif(&file)), [&head[..], &control, &image].concat());
        (0..file.len()).for_each(|len| drop(read(PixelBlocks::of_gif(&file[..len]))));
    }
}
