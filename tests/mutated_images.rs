//! Damaged and hostile pictures: each is decoded or refused. Nothing panics, hangs, or takes more memory than announced.
//!
//! A run takes seconds. `MOESTRO_MUTATE_IMAGES=5000` tries that many, `fuzz/fuzz_targets/image.rs` runs without end.

#[path = "support/mutate.rs"]
mod mutate;

use moestro::model::{ImageLimits, ImageProcessor};
use mutate::Dice;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// One test at a time, because memory is measured.
static ALONE: Mutex<()> = Mutex::new(());

/// The system's allocator, which records how much is in use, and the most since the last reset.
struct Measuring;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: forwarded unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: forwarded unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: forwarded unchanged.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

fn processor() -> ImageProcessor {
    let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
    ImageProcessor::new(limits, 0)
}

/// Prepares a picture and returns whether it could be decoded. Checks its size, its time and its memory.
fn prepare(processor: &ImageProcessor, encoded: &[u8], what: &str) -> bool {
    let begun = Instant::now();
    let announced = processor.working_bytes(encoded);
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let prepared = processor.prepare(encoded, None);
    let used = PEAK.load(Relaxed).saturating_sub(before);
    assert!(begun.elapsed() < Duration::from_secs(10), "{what}: {:?}", begun.elapsed());
    // A picture whose header is refused takes next to nothing.
    let most = announced.unwrap_or(0) + (1 << 20);
    assert!(used <= most, "{what}: {used} bytes used, {most} announced");
    if let Ok(image) = &prepared {
        assert!(image.tokens() <= 64, "{what}");
        assert_eq!(image.pixels.data.len(), image.tokens() * 32 * 32 * 3, "{what}");
    }
    prepared.is_ok()
}

#[test]
fn mutated_pictures_never_break_the_decoder() {
    let _alone = ALONE.lock();
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pictures");
    let mut pictures: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    pictures
        .retain(|path| ["png", "jpg", "webp", "gif"].iter().any(|kind| path.extension().is_some_and(|e| e == *kind)));
    pictures.sort();
    let pictures: Vec<Vec<u8>> = pictures.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let cases = std::env::var("MOESTRO_MUTATE_IMAGES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(500);
    let processor = processor();
    let mut decoded = 0;
    for seed in 0..cases {
        let mut dice = Dice(seed);
        let mut picture = dice.pick(&pictures).clone();
        mutate::bytes(&mut dice, &mut picture);
        decoded += usize::from(prepare(&processor, &picture, &format!("seed {seed}")));
    }
    // Most changes to pixels are still pictures, most changes to headers are not.
    assert!(decoded > 0 && decoded < cases as usize, "{decoded} of {cases}");
}

#[test]
fn large_claims_take_no_memory() {
    let _alone = ALONE.lock();
    let processor = processor();
    for side in [u16::MAX.into(), 1 << 20, u32::MAX >> 1] {
        for (width, height) in [(side, side), (side, 1), (side, side / 100)] {
            prepare(&processor, &png_of(width, height), &format!("PNG {width} x {height}"));
            prepare(&processor, &gif_of(width as u16, height as u16), &format!("GIF {width} x {height}"));
        }
    }
    // A bomb: 49 million pixels in a quarter of a megabyte.
    let bomb = compressed_png(7000);
    assert!(bomb.len() < 300_000, "{}", bomb.len());
    prepare(&processor, &bomb, "bomb");
}

/// A PNG header with these sides, followed by nothing.
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
