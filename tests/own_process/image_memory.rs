//! Compares the announced memory of large images with the memory that they take. An announcement that is too high refuses
//! images that fit.

use crate::counting::peak_of;
use moestro_model::model::{ImageLimits, ImageProcessor};
use test_support::own_process::ran_in_own_process;

const WIDTH: u16 = 2016;
const HEIGHT: u16 = 1512;

/// How a JPEG file is made: the marker of its frame, the sampling factors of its components, the number of components in
/// its first scan, and the EXIF orientation.
type Kind = (u8, &'static [u8], usize, u8);

const PHOTO: Kind = (0xc0, &[0x22, 0x11, 0x11], 3, 1);
const TURNED_PHOTO: Kind = (0xc0, &[0x22, 0x11, 0x11], 3, 6);

fn processor() -> ImageProcessor {
    let limits = ImageLimits { min_pixels: 65_536, max_pixels: 1 << 20, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
    ImageProcessor::new(limits, 0)
}

/// A segment of a JPEG file.
fn segment(marker: u8, content: &[u8]) -> Vec<u8> {
    [&[0xff, marker], &(content.len() as u16 + 2).to_be_bytes()[..], content].concat()
}

/// A grey JPEG image of this size, after `head`. Each block takes one bit for each of its codes.
fn jpeg((marker, sampling, scanned, orientation): Kind, [width, height]: [u16; 2], head: &[u8]) -> Vec<u8> {
    let is_progressive = marker == 0xc2;
    // One entry in the byte order of Intel: tag 0x112, type 3, one value.
    let exif =
        [b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0", &[orientation, 0, 0, 0, 0, 0, 0, 0][..]].concat();
    let sides = [height.to_be_bytes(), width.to_be_bytes()].concat();
    let components = sampling.iter().zip(1..).flat_map(|(factors, id)| [id, *factors, 0]);
    let frame = [&[8], &sides[..], &[sampling.len() as u8], &components.collect::<Vec<_>>()].concat();
    // The code `0` for the symbol 0.
    let table = |class: u8| segment(0xc4, &[&[class, 1][..], &[0; 15], &[0]].concat());
    let mut file =
        [&[0xff, 0xd8], head, &segment(0xe1, &exif), &segment(0xdb, &[&[0][..], &[1; 64]].concat())].concat();
    file.extend([segment(marker, &frame), table(0x00), table(0x10)].concat());
    let mut rest = (1..=sampling.len() as u8).collect::<Vec<_>>();
    while !rest.is_empty() {
        let count = scanned.min(rest.len());
        let ids: Vec<u8> = rest.drain(..count).flat_map(|id| [id, 0]).collect();
        let last = if is_progressive { 0 } else { 63 };
        file.extend(segment(0xda, &[&[count as u8], &ids[..], &[0, last, 0]].concat()));
        // The first scan of a progressive image has one bit for each block. More bytes than necessary end the other images.
        let [across, down] =
            [sampling.iter().map(|s| s >> 4).max(), sampling.iter().map(|s| s & 15).max()].map(Option::unwrap);
        let groups_of = |side: u16, factor: u8| usize::from(side).div_ceil(8 * usize::from(factor));
        let groups = groups_of(width, across) * groups_of(height, down);
        let blocks = groups * sampling.iter().map(|s| usize::from((s >> 4) * (s & 15))).sum::<usize>();
        file.extend(vec![0; if is_progressive { blocks.div_ceil(8) } else { blocks }]);
    }
    [&file[..], &[0xff, 0xd9]].concat()
}

#[test]
fn jpeg_memory_is_announced_by_kind() {
    if ran_in_own_process(jpeg_memory_is_announced_by_kind) {
        return;
    }
    let processor = processor();
    let pixels = usize::from(WIDTH) * usize::from(HEIGHT);
    // The last number is the highest announcement in tenths of a byte per pixel, besides a few megabytes.
    for (kind, most) in [
        (PHOTO, 60),
        (TURNED_PHOTO, 62),
        ((0xc1, &[0x11, 0x11, 0x11], 3, 3), 62),
        ((0xc0, &[0x41, 0x11, 0x11], 3, 1), 62),
        ((0xc0, &[0x21, 0x11, 0x11], 3, 1), 62),
        ((0xc0, &[0x11], 1, 1), 62),
        ((0xc0, &[0x22], 1, 1), 62),
        ((0xc0, &[0x11; 4], 4, 1), 62),
        ((0xc0, &[0x22, 0x11, 0x11, 0x22], 4, 1), 62),
        ((0xc0, &[0x22, 0x11, 0x11], 1, 1), 64),
        ((0xc2, &[0x22, 0x11, 0x11], 3, 1), 64),
        ((0xc2, &[0x22, 0x11, 0x11], 3, 6), 64),
        ((0xc2, &[0x11, 0x11, 0x11], 3, 1), 94),
        ((0xc2, &[0x11; 4], 4, 1), 114),
        ((0xc2, &[0x11], 1, 1), 62),
    ] {
        let file = jpeg(kind, [WIDTH, HEIGHT], b"");
        let (announced, reading) = peak_of(|| processor.working_bytes(&file));
        let announced = announced.unwrap_or_else(|error| panic!("{kind:x?}: {error}"));
        assert!(reading <= ImageProcessor::header_bytes(&file), "{kind:x?}: {reading} bytes used for the header");
        let (image, used) = peak_of(|| processor.prepare(&file, None));
        assert!(used <= announced, "{kind:x?}: {used} bytes used, {announced} announced");
        assert!(announced <= pixels * most / 10 + (6 << 20), "{kind:x?}: {announced} bytes announced, {used} used");
        image.unwrap_or_else(|error| panic!("{kind:x?}: {error}"));
        processor.forget();
    }
}

#[test]
fn png_memory_is_announced_by_colour() {
    if ran_in_own_process(png_memory_is_announced_by_colour) {
        return;
    }
    use image::ExtendedColorType::{L8, L16, La8, La16, Rgb8, Rgb16, Rgba8, Rgba16};
    let processor = processor();
    for color in [L8, L16, La8, La16, Rgb8, Rgb16, Rgba8, Rgba16] {
        let [width, height] = [WIDTH, HEIGHT].map(u32::from);
        let mut file = Vec::new();
        let encoder = image::codecs::png::PngEncoder::new(&mut file);
        let pixels = vec![0; usize::from(WIDTH) * usize::from(HEIGHT) * usize::from(color.bits_per_pixel()) / 8];
        image::ImageEncoder::write_image(encoder, &pixels, width, height, color).unwrap();
        let announced = processor.working_bytes(&file).unwrap();
        let (image, used) = peak_of(|| processor.prepare(&file, None));
        assert!(used <= announced, "{color:?}: {used} bytes used, {announced} announced");
        image.unwrap();
        processor.forget();
    }
}

#[test]
fn photos_fit_the_default_memory() {
    if ran_in_own_process(photos_fit_the_default_memory) {
        return;
    }
    // A large request may take three quarters of 256 MiB, without the memory of two steps.
    let most = ((256 - 16) / 4 * 3) << 20;
    for (kind, sides) in [
        (TURNED_PHOTO, [4032, 3024]),
        (TURNED_PHOTO, [6000, 4000]),
        (PHOTO, [8064, 6048]),
        ((0xc2, &[0x22, 0x11, 0x11][..], 3, 6), [6000, 4000]),
    ] {
        let announced = processor().working_bytes(&jpeg(kind, sides, b"")).unwrap();
        assert!(announced + (10 << 20) < most, "{kind:x?} {sides:?}: {announced} bytes announced");
    }
}

#[test]
fn unusual_jpeg_headers_take_no_uncounted_memory() {
    if ran_in_own_process(unusual_jpeg_headers_take_no_uncounted_memory) {
        return;
    }
    let processor = processor();
    // Segments after which another reader could find another frame.
    let hidden = segment(0xe1, &segment(0xc2, &[0; 15]));
    for head in [&b"\xff"[..], b"\0\0", b"\xff\xe0\0\x06abcd", b"\xff\xd0\0\x04ab", b"\xff\x01\0\x04ab", &hidden] {
        for kind in [PHOTO, TURNED_PHOTO, (0xc2, &[0x11; 4], 4, 1)] {
            let file = jpeg(kind, [WIDTH, HEIGHT], head);
            let Ok(announced) = processor.working_bytes(&file) else { continue };
            let (_, used) = peak_of(|| processor.prepare(&file, None));
            assert!(used <= announced, "{head:x?}, {kind:x?}: {used} bytes used, {announced} announced");
            processor.forget();
        }
    }
    // Wide images have large rows.
    let mut checked = 0;
    for factors in [
        &[0x44, 0x11, 0x11][..],
        &[0x11, 0x44, 0x11],
        &[0x44; 4],
        &[0x22, 0x21, 0x21],
        &[0x24, 0x12, 0x14],
        &[0x12, 0x12, 0x12, 0x41],
        &[0x11, 0x11, 0x11, 0x41],
    ] {
        for marker in [0xc0, 0xc2] {
            let file = jpeg((marker, factors.to_vec().leak(), factors.len(), 1), [65_500, 330], b"");
            let Ok(announced) = processor.working_bytes(&file) else { continue };
            let (_, used) = peak_of(|| processor.prepare(&file, None));
            assert!(used <= announced, "{marker:x} {factors:x?}: {used} bytes used, {announced} announced");
            processor.forget();
            checked += 1;
        }
    }
    assert!(checked >= 7, "only {checked} of 14 wide images have a valid header");
}
