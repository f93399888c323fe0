//! Tests damaged and hostile pictures. Each picture must be decoded or refused, without a panic, a hang, or more memory
//! than announced.
//!
//! A run takes a few seconds. An ignored test tries 5,000 pictures. `fuzz/fuzz_targets/image.rs` runs without end.

#[path = "support/mutate.rs"]
mod mutate;
#[path = "support/own_process.rs"]
mod own_process;

use moestro::model::{ImageLimits, ImageProcessor};
use mutate::Dice;
use own_process::ran_in_own_process;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::HashSet,
    io::Write,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The system's allocator with counters: the number of bytes in use, and their maximum since the last reset.
struct Measuring;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the call is forwarded unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the call is forwarded unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the call is forwarded unchanged.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// Maximum number of additional bytes for reading a header. The largest part is the colour profile of a PNG.
const HEADER_BYTES: usize = 4 << 20;

fn processor() -> ImageProcessor {
    let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
    ImageProcessor::new(limits, 0)
}

/// Prepares a picture. Returns true if the picture could be decoded. Checks size, time and memory.
fn prepare(processor: &ImageProcessor, encoded: &[u8], what: &str) -> bool {
    let begun = Instant::now();
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let announced = processor.working_bytes(encoded);
    let prepared = processor.prepare(encoded, None);
    let used = PEAK.load(Relaxed).saturating_sub(before);
    assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {:?}", begun.elapsed());
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
        mutate::bytes(&mut dice, &mut picture);
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
            prepare(&processor, &gif_of(width as u16, height as u16), &format!("GIF {width} x {height}"));
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
    // A bomb: a file of a quarter of a megabyte with 49 million pixels.
    let bomb = compressed_png(7000);
    assert!(bomb.len() < 300_000, "{}", bomb.len());
    prepare(&processor, &bomb, "bomb");
}

/// A small PNG with a compressed colour profile of `len` bytes.
fn with_profile(len: usize) -> Vec<u8> {
    let mut profile = flate2::write::ZlibEncoder::new(b"zeros\0\0".to_vec(), flate2::Compression::best());
    let zeros = vec![0; 1 << 20];
    (0..len >> 20).for_each(|_| profile.write_all(&zeros).unwrap());
    let chunk = [&b"iCCP"[..], &profile.finish().unwrap()].concat();
    let (length, checksum) = ((chunk.len() - 4) as u32, crc32fast::hash(&chunk));
    let mut png = compressed_png(64);
    // The chunk is inserted after the header: signature, length, type, 13 bytes, checksum.
    png.splice(33..33, [&length.to_be_bytes()[..], &chunk, &checksum.to_be_bytes()].concat());
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

fn gif_of(width: u16, height: u16) -> Vec<u8> {
    let sides = [width.to_le_bytes(), height.to_le_bytes()].concat();
    let frame = [&[0x2c, 0, 0, 0, 0][..], &sides, &[0, 2, 2, 0x4c, 1, 0, 0x3b]].concat();
    [b"GIF89a", &sides[..], &[0x80, 0, 0, 0, 0, 0, 255, 255, 255], &frame].concat()
}

/// A square of black pixels.
fn compressed_png(side: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    let pixels = vec![0; (side * side) as usize];
    image::ImageEncoder::write_image(encoder, &pixels, side, side, image::ExtendedColorType::L8).unwrap();
    out
}
