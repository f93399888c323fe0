//! Tests damaged and hostile pictures. Each picture must be decoded or refused, without a panic, a hang, or more memory
//! than announced.
//!
//! A run takes a few seconds. An ignored test tries 5,000 pictures. `fuzz/fuzz_targets/image.rs` runs without end.

use crate::counting::{cpu_time, peak_of};
use moestro_model::model::{ImageLimits, ImageProcessor};
use std::{collections::HashSet, io::Write, ops::Range, time::Duration};
use test_support::mutate::Dice;
use test_support::own_process::ran_in_own_process;

/// Maximum number of additional bytes for reading a header. The largest part is the colour profile of a PNG.
const HEADER_BYTES: usize = 4 << 20;

fn processor() -> ImageProcessor {
    let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
    ImageProcessor::new(limits, 0)
}

/// Prepares a picture. Returns true if the picture could be decoded. Checks size, time and memory.
fn prepare(processor: &ImageProcessor, encoded: &[u8], what: &str) -> bool {
    let begun = cpu_time();
    let ((announced, prepared), used) =
        peak_of(|| (processor.working_bytes(encoded), processor.prepare(encoded, None)));
    // Not the elapsed time, which other processes lengthen.
    let taken = cpu_time() - begun;
    assert!(taken < Duration::from_secs(60), "{what}: {taken:?}");
    let most = announced.unwrap_or(0) + HEADER_BYTES;
    assert!(used <= most, "{what}: {used} bytes used, {most} announced");
    if let Ok(image) = &prepared {
        assert!(image.tokens() <= 64, "{what}");
        assert_eq!(image.pixels.data.len(), image.tokens() * 32 * 32 * 3, "{what}");
    }
    prepared.is_ok()
}

#[test]
fn mutated_pictures_never_break_the_decoder() {
    if ran_in_own_process(mutated_pictures_never_break_the_decoder) {
        return;
    }
    mutate(0..500);
}

#[test]
#[ignore = "long: 5,000 pictures"]
fn many_mutated_pictures_never_break_the_decoder() {
    if ran_in_own_process(many_mutated_pictures_never_break_the_decoder) {
        return;
    }
    mutate(500..5500);
}

/// Decodes a mutated picture for each seed.
fn mutate(seeds: Range<u64>) {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pictures");
    let mut pictures: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    pictures
        .retain(|path| ["png", "jpg", "webp", "gif"].iter().any(|kind| path.extension().is_some_and(|e| e == *kind)));
    pictures.sort();
    let pictures: Vec<Vec<u8>> = pictures.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let processor = processor();
    let (mut decoded, mut formats, count) = (0, HashSet::new(), seeds.end - seeds.start);
    for seed in seeds {
        let mut dice = Dice(seed);
        let mut picture = dice.pick(&pictures).clone();
        formats.insert(image::guess_format(&picture).unwrap());
        test_support::mutate::bytes(&mut dice, &mut picture);
        decoded += u64::from(prepare(&processor, &picture, &format!("seed {seed}")));
    }
    // After most changes to pixels, the file is still a picture. After most changes to headers, it is not.
    assert!(decoded > 0 && decoded < count, "{decoded} of {count}");
    assert_eq!(formats.len(), 4, "PNG, JPEG, WebP and GIF");
}

#[test]
fn large_claims_take_no_memory() {
    if ran_in_own_process(large_claims_take_no_memory) {
        return;
    }
    let processor = processor();
    for side in [u16::MAX.into(), 1 << 20, u32::MAX >> 1] {
        for (width, height) in [(side, side), (side, 1), (side, side / 100)] {
            prepare(&processor, &png_of(width, height), &format!("PNG {width} x {height}"));
            let sides = [width as u16, height as u16];
            prepare(&processor, &gif_of(sides, sides), &format!("GIF {width} x {height}"));
        }
    }
    // A file of less than a megabyte with a colour profile of 900 MB.
    let profile = with_profile(900 << 20);
    assert!(profile.len() < 1 << 20, "{}", profile.len());
    assert!(prepare(&processor, &profile, "profile"), "the picture without its profile");
    // A file with metadata that claims to have 4 GB.
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pictures");
    let webp = std::fs::read(format!("{dir}/lossless.webp")).unwrap();
    let extended = [&b"VP8X\x0a\0\0\0\x08\0\0\0\x3f\0\0\x3f\0\0"[..], &webp[12..], b"EXIF\xf0\xff\xff\xff"].concat();
    let claims = [b"RIFF\xff\xff\xff\xffWEBP", &extended[..]].concat();
    assert!(!prepare(&processor, &claims, "EXIF"));
    // A frame that begins with such metadata, also as the content of transparency.
    for frame in [&b"EXIF\xf0\xff\xff\xff\0\0\0\0\0\0\0\0"[..], b"ALPH\x08\0\0\0EXIF\xf0\xff\xff\xffVP8 \0\0\0\0"] {
        assert!(!prepare(&processor, &webp_animation(frame), "EXIF in a frame"));
    }
    // A frame that is larger than its screen, by less than the memory of the screen's copies.
    prepare(&processor, &gif_of([4096, 4096], [59_000, 1000]), "large frame of a GIF");
    // A bomb: a file of a quarter of a megabyte with 49 million pixels.
    let bomb = compressed_png(7000);
    assert!(bomb.len() < 300_000, "{}", bomb.len());
    prepare(&processor, &bomb, "bomb");
}

#[test]
fn hostile_metadata_takes_no_uncounted_memory() {
    if ran_in_own_process(hostile_metadata_takes_no_uncounted_memory) {
        return;
    }
    let processor = processor();
    let check = |file: &[u8], is_shown: bool, what: &str| {
        let (header, used) = peak_of(|| processor.working_bytes(file));
        let most = ImageProcessor::header_bytes(file);
        assert!(used <= most, "{what}: {used} bytes used for the header, {most} announced");
        assert_eq!(header.is_ok(), is_shown, "{what}: {header:?}");
        assert_eq!(prepare(&processor, file, what), is_shown, "{what}");
    };
    let plain = compressed_png(64);
    let with_chunks = |chunk: Vec<u8>, count: usize| {
        let mut png = plain[..33].to_vec();
        (0..count).for_each(|_| png.extend(&chunk));
        [&png, &plain[33..]].concat()
    };
    for (kind, data, count) in [
        ("iTXt", &b"a\0\0\0\0\0"[..], 200_000),
        ("tEXt", b"a\0", 200_000),
        ("zTXt", b"a\0\0x\x9c\x03\0\0\0\0\x01", 100_000),
        ("eXIf", &[0; 3 << 20], 1),
        ("eXIf", &[0; 500 << 10], 3),
        ("iCCP", b"a\0\0", 100_000),
        ("acTL", &[0; 8], 100_000),
        ("fcTL", &[0; 26], 100_000),
        ("IDAT", b"", 200_000),
        ("prVt", b"", 200_000),
    ] {
        check(&with_chunks(png_chunk(kind, data), count), true, kind);
    }
    let jpeg = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision/images/noise.jpg")).unwrap();
    let with_segments = |marker: u8, head: &[u8], len: usize, count: usize| {
        let data = [head, &vec![0; len]].concat();
        let segment = [&[0xff, marker][..], &((data.len() + 2) as u16).to_be_bytes(), &data].concat();
        [&jpeg[..2], &segment.repeat(count), &jpeg[2..]].concat()
    };
    let (icc, gain) = (b"ICC_PROFILE\0\x01\x01", b"urn:iso:std:iso:ts:21496:-1\0");
    // The total length and the offset follow an identifier of 32 bytes.
    let extended =
        [&b"http://ns.adobe.com/xmp/extension/\0"[..], &[b'0'; 32], &[0, 0x0e, 0xa6, 0, 0, 0, 0, 0]].concat();
    for (marker, head, len, count, is_shown, what) in [
        (0xe2, &icc[..], 1, 4000, true, "colour profiles"),
        (0xe2, &icc[..], 1, 200_000, false, "many colour profiles"),
        (0xe2, &icc[..], 65_000, 200, true, "large colour profiles"),
        (0xe2, &gain[..], 5, 4000, true, "gain maps"),
        (0xe2, &gain[..], 4, 200_000, false, "many gain maps"),
        (0xe1, &extended, 1, 4000, true, "metadata in parts"),
        (0xe1, &extended, 60_000, 16, true, "large metadata in parts"),
        (0xe1, b"Exif\0\0", 65_000, 100, true, "EXIF"),
        (0xfe, b"", 1, 200_000, true, "comments"),
    ] {
        check(&with_segments(marker, head, len, count), is_shown, what);
    }
    let gif = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pictures/animated.gif")).unwrap();
    let extension = |name: &[u8], sub_block: &[u8]| {
        let blocks = [&[sub_block.len() as u8], sub_block].concat().repeat((10 << 20) / (1 + sub_block.len()));
        // The extensions follow the header, the screen and the palette.
        let (head, rest) = gif.split_at(13 + (3 << ((gif[10] & 7) + 1)));
        [head, &[0x21, 0xff, 11], name, &blocks, &[0], rest].concat()
    };
    for name in [b"XMP DataXMP", b"ICCRGBG1012", b"NETSCAPE2.0"] {
        check(&extension(name, &[1; 255]), true, "GIF");
        check(&extension(name, &[1]), true, "GIF in small blocks");
    }
}

#[test]
fn huffman_tables_of_webp_are_announced() {
    if ran_in_own_process(huffman_tables_of_webp_are_announced) {
        return;
    }
    let processor = processor();
    for (groups, has_pairs) in [(1, false), (4096, false), (1, true), (4096, true)] {
        let stream = vp8l_with_tables(groups, has_pairs);
        let vp8l = webp_chunk(b"VP8L", &stream);
        assert!(prepare(&processor, &webp_of(&vp8l), "VP8L"));
        assert!(prepare(&processor, &webp_animation(&vp8l), "animation"));
        // The transparency of a lossy file, without the header of 40 bits.
        let lossy = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pictures/lossy.webp")).unwrap();
        let at = lossy.windows(4).position(|bytes| bytes == b"VP8 ").unwrap();
        let sides = [lossy[at + 14] - 1, 0, 0, lossy[at + 16] - 1, 0, 0];
        let header = webp_chunk(b"VP8X", &[&[0x10, 0, 0, 0][..], &sides].concat());
        let alpha = webp_chunk(b"ALPH", &[&[1], &stream[5..]].concat());
        assert!(prepare(&processor, &webp_of(&[&header, &alpha, &lossy[at..]].concat()), "ALPH"));
    }
}

#[test]
fn repeated_transforms_of_webp_are_refused() {
    if ran_in_own_process(repeated_transforms_of_webp_are_refused) {
        return;
    }
    let processor = processor();
    for (transforms, is_read) in [(1, true), (2, false), (3000, false)] {
        let file = webp_of(&webp_chunk(b"VP8L", &vp8l_with_transforms(transforms)));
        let begun = cpu_time();
        let header = processor.working_bytes(&file);
        assert_eq!(header.is_ok(), is_read, "{transforms} transforms: {header:?}");
        // Four million blocks without bits in each transform.
        let taken = cpu_time() - begun;
        assert!(taken < Duration::from_secs(1), "{transforms} transforms: {taken:?}");
    }
}

fn webp_of(chunks: &[u8]) -> Vec<u8> {
    [b"RIFF", &(chunks.len() as u32 + 4).to_le_bytes()[..], b"WEBP", chunks].concat()
}

/// A chunk of a WebP file.
fn webp_chunk(kind: &[u8], content: &[u8]) -> Vec<u8> {
    [kind, &(content.len() as u32).to_le_bytes(), content, &[0][..content.len() % 2]].concat()
}

/// An animation of one frame of 4 x 4 pixels, which has these chunks.
fn webp_animation(chunks: &[u8]) -> Vec<u8> {
    let header = webp_chunk(b"VP8X", &[2, 0, 0, 0, 3, 0, 0, 3, 0, 0]);
    let frame = [&[0, 0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 0, 0, 0, 0, 0][..], chunks].concat();
    webp_of(&[header, webp_chunk(b"ANIM", &[0; 6]), webp_chunk(b"ANMF", &frame)].concat())
}

/// Adds a number to a stream, lowest bit first.
fn put(bits: &mut Vec<bool>, value: usize, count: usize) {
    bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
}

fn bytes_of(bits: &[bool]) -> Vec<u8> {
    bits.chunks(8).map(|byte| byte.iter().rev().fold(0, |value, bit| value << 1 | u8::from(*bit))).collect()
}

/// A lossless WebP stream of 8192 x 8192 pixels of one colour, with this number of predictor transforms. Their blocks of
/// 4 x 4 pixels take no bits.
fn vp8l_with_transforms(transforms: usize) -> Vec<u8> {
    let mut bits: Vec<bool> = Vec::new();
    [(0x2f, 8), (8191, 14), (8191, 14), (0, 4)].iter().for_each(|(value, count)| put(&mut bits, *value, *count));
    // No colour cache. Each of five codes has the single symbol 0.
    let mut put_codes = |head: &[(usize, usize)]| {
        head.iter().for_each(|(value, count)| put(&mut bits, *value, *count));
        (0..5).for_each(|_| put(&mut bits, 1, 4));
    };
    (0..transforms).for_each(|_| put_codes(&[(1, 1), (0, 2), (0, 3), (0, 1)]));
    put_codes(&[(0, 1), (0, 1), (0, 1)]);
    bytes_of(&bits)
}

/// A lossless WebP stream of 4 x 4 pixels with this number of groups of five Huffman tables, which have codes of 10 bits.
/// With `has_pairs`, the image of the groups has codes of two symbols, the second of which is 0.
fn vp8l_with_tables(groups: usize, has_pairs: bool) -> Vec<u8> {
    let mut bits: Vec<bool> = Vec::new();
    // Signature, width, height, no transparency, version, no transform, no colour cache, groups, in blocks of 512 pixels.
    let head = [(0x2f, 8), (3, 14), (3, 14), (0, 1), (0, 3), (0, 1), (0, 1), (1, 1), (7, 3)];
    head.iter().for_each(|(value, count)| put(&mut bits, *value, *count));
    // An image of one pixel, whose green and red are the number of the last group. Each code has this symbol first.
    put(&mut bits, 0, 1);
    for symbol in [(groups - 1) & 255, (groups - 1) >> 8, 0, 0, 0] {
        [(1, 1), (has_pairs.into(), 1), (1, 1), (symbol, 8)]
            .iter()
            .for_each(|(value, count)| put(&mut bits, *value, *count));
        put(&mut bits, 0, if has_pairs { 8 } else { 0 });
    }
    // The pixel takes the first symbol of four codes.
    put(&mut bits, 0, if has_pairs { 4 } else { 0 });
    // Lengths 1 to 6 have codes of 3 bits, lengths 7 to 10 have codes of 4 bits.
    let code = |length: usize| if length < 7 { (length - 1, 3) } else { (12 + length - 7, 4) };
    for _ in 0..groups * 5 {
        put(&mut bits, 0, 1);
        put(&mut bits, 10, 4);
        for length in [0, 0, 0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10] {
            put(&mut bits, if length == 0 { 0 } else { code(length).1 }, 3);
        }
        // 11 lengths follow.
        [(1, 1), (1, 3), (9, 4)].iter().for_each(|(value, count)| put(&mut bits, *value, *count));
        for length in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10] {
            let (code, count) = code(length);
            (0..count).rev().for_each(|bit| put(&mut bits, code >> bit & 1, 1));
        }
    }
    // The code 0 for all pixels.
    bits.extend([false; 8192]);
    bytes_of(&bits)
}

/// A chunk of a PNG file.
fn png_chunk(kind: &str, data: &[u8]) -> Vec<u8> {
    let chunk = [kind.as_bytes(), data].concat();
    let (length, checksum) = ((data.len() as u32).to_be_bytes(), crc32fast::hash(&chunk).to_be_bytes());
    [&length[..], &chunk, &checksum].concat()
}

/// A small PNG with a compressed colour profile of `len` bytes.
fn with_profile(len: usize) -> Vec<u8> {
    let mut profile = flate2::write::ZlibEncoder::new(b"zeros\0\0".to_vec(), flate2::Compression::best());
    let zeros = vec![0; 1 << 20];
    (0..len >> 20).for_each(|_| profile.write_all(&zeros).unwrap());
    let mut png = compressed_png(64);
    // The chunk is inserted after the header: signature, length, type, 13 bytes, checksum.
    png.splice(33..33, png_chunk("iCCP", &profile.finish().unwrap()));
    png
}

/// A PNG header with this width and height. No data follows the header.
fn png_of(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    bytes.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    bytes.extend([8, 2, 0, 0, 0]);
    let checksum = crc32fast::hash(&bytes[12..]);
    bytes.extend(checksum.to_be_bytes());
    bytes
}

/// A GIF whose frame has little data.
fn gif_of(screen: [u16; 2], frame: [u16; 2]) -> Vec<u8> {
    let [screen, frame] = [screen, frame].map(|sides| sides.map(u16::to_le_bytes).concat());
    let frame = [&[0x2c, 0, 0, 0, 0][..], &frame, &[0, 2, 2, 0x4c, 1, 0, 0x3b]].concat();
    [b"GIF89a", &screen[..], &[0x80, 0, 0, 0, 0, 0, 255, 255, 255], &frame].concat()
}

/// A square of black pixels.
fn compressed_png(side: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    let pixels = vec![0; (side * side) as usize];
    image::ImageEncoder::write_image(encoder, &pixels, side, side, image::ExtendedColorType::L8).unwrap();
    out
}
