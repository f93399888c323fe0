//! Decodes PNG, JPEG, WebP and GIF files to 8-bit RGB. All sizes in a file are checked against limits before memory is
//! allocated.

use super::{
    config::CHANNELS,
    jpeg_frame::JpegFrame,
    pixel_blocks::PixelBlocks,
    resize::{MAX_RATIO, RgbImage},
    webp_tables,
};
use crate::error::ImageError;
use image::{
    ColorType, DynamicImage, ImageDecoder, ImageFormat, Limits,
    codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder},
    metadata::Orientation,
};
use std::io::Cursor;

/// Maximum size of an encoded image in bytes.
pub const MAX_ENCODED_BYTES: usize = 20 << 20;
/// Maximum number of pixels of a decoded image.
const MAX_PIXELS: u64 = 64 << 20;
/// Number of bytes that a decoder may use in addition to its output: row buffers, palettes, tables and metadata.
const DECODER_BYTES: u64 = 4 << 20;
/// Maximum size of a partition of a lossy WebP file in bytes. The decoder allocates this size before it reads the
/// partition.
const WEBP_PARTITION_BYTES: u64 = 1 << 24;

/// Maximum number of segments with metadata in a JPEG file. A colour profile has up to 255 segments, and a camera's
/// metadata up to a few hundred. The decoder stores up to 256 bytes for a segment besides its content.
const MAX_JPEG_SEGMENTS: usize = 4096;
/// Maximum size of a segment of a JPEG file in bytes.
const JPEG_SEGMENT_BYTES: usize = 1 << 16;

/// The header of an encoded image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHeader {
    /// Height after the orientation was applied.
    pub height: u32,
    /// Width after the orientation was applied.
    pub width: u32,
    /// Maximum number of bytes of memory that decoding needs.
    pub decoding_bytes: usize,
}

impl ImageHeader {
    /// Reads the header of a file. The format is detected from the content. A declared type is ignored.
    pub fn read(encoded: &[u8]) -> Result<Self, ImageError> {
        let (mut decoder, format) = open(encoded)?;
        Self::of(&mut decoder, format, encoded)
    }

    /// Maximum number of bytes of memory that [`ImageHeader::read`] needs.
    pub fn reading_bytes(encoded: &[u8]) -> usize {
        let copies = match image::guess_format(encoded) {
            // The file, its metadata, and parts of the metadata joined.
            Ok(ImageFormat::Jpeg) => 3 * encoded.len(),
            // The metadata.
            Ok(ImageFormat::WebP) => encoded.len(),
            _ => 0,
        };
        copies + DECODER_BYTES as usize
    }

    fn of(decoder: &mut impl ImageDecoder, format: ImageFormat, encoded: &[u8]) -> Result<Self, ImageError> {
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        if pixels == 0 || pixels > MAX_PIXELS {
            return Err(ImageError::Pixels { width, height, max: MAX_PIXELS });
        }
        if width.max(height) > width.min(height).saturating_mul(MAX_RATIO) {
            return Err(ImageError::Ratio { width, height, max: MAX_RATIO });
        }
        // These decoders copy the whole file. After that, they also copy its metadata or its partitions. The decoder of
        // JPEG joins parts of the metadata in a further copy.
        let len = encoded.len() as u64;
        let copies = match format {
            ImageFormat::Jpeg => len + 2 * len.min((jpeg_segments(encoded) * JPEG_SEGMENT_BYTES) as u64),
            ImageFormat::WebP => {
                let tables = webp_tables::table_bytes(riff_content(encoded), [width as usize, height as usize]);
                let Some(tables) = tables else {
                    return refuse("its WebP headers do not fit or its tables are invalid");
                };
                2 * len + WEBP_PARTITION_BYTES + tables as u64
            }
            _ => 0,
        };
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let output = decoder.total_bytes();
        let rgb = pixels * CHANNELS as u64;
        let frames = match format {
            ImageFormat::Png | ImageFormat::Jpeg => {
                let beside = match format {
                    ImageFormat::Jpeg => JpegFrame::of(encoded).decoder_bytes(width as usize, height as usize) as u64,
                    _ => 0,
                };
                let rotated = if swaps_sides(orientation) { output } else { 0 };
                // Colours with alpha are converted to RGBA, which is then blended.
                let converted = match decoder.color_type() {
                    ColorType::Rgb8 => 0,
                    color if color.has_alpha() => (output + 4 * pixels).max(4 * pixels + rgb),
                    _ => output + rgb,
                };
                // The steps follow each other: decode, rotate, convert.
                (output + beside).max(output + rotated).max(converted)
            }
            // The decoders of WebP and GIF store a second frame.
            _ => output + 4 * pixels + 2 * rgb,
        };
        let bytes = frames + copies + DECODER_BYTES;
        let (width, height) = if swaps_sides(orientation) { (height, width) } else { (width, height) };
        Ok(Self { width, height, decoding_bytes: bytes as usize })
    }
}

/// Decodes the first frame, applies its orientation, and blends it with a white background.
pub fn decode(encoded: &[u8]) -> Result<RgbImage, ImageError> {
    let (mut decoder, format) = open(encoded)?;
    let header = ImageHeader::of(&mut decoder, format, encoded)?;
    // Some cameras write damaged metadata around valid pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    // The decoder of GIF compares this limit with the memory that it needs besides its output.
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some((header.decoding_bytes as u64).saturating_sub(decoder.total_bytes()));
    decoder.set_limits(limits).map_err(damaged)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(damaged)?;
    image.apply_orientation(orientation);
    keep_high_bytes(&mut image);
    let width = image.width() as usize;
    let height = image.height() as usize;
    let data = if image.color().has_alpha() { on_white(&image.into_rgba8()) } else { image.into_rgb8().into_raw() };
    Ok(RgbImage { width, height, data })
}

/// Clears the low byte of 16-bit colours, so that the conversion to 8 bits takes the high byte, as Pillow does. Grey
/// without alpha is rounded instead, because Pillow clips it.
fn keep_high_bytes(image: &mut DynamicImage) {
    let channels: &mut [u16] = match image {
        DynamicImage::ImageLumaA16(image) => image,
        DynamicImage::ImageRgb16(image) => image,
        DynamicImage::ImageRgba16(image) => image,
        _ => return,
    };
    // The conversion divides by 257 and rounds.
    channels.iter_mut().for_each(|channel| *channel = (*channel >> 8) * 257);
}

/// A decoder for the file's format, before any large allocation.
fn open(encoded: &[u8]) -> Result<(Box<dyn ImageDecoder + '_>, ImageFormat), ImageError> {
    if encoded.len() > MAX_ENCODED_BYTES {
        return Err(ImageError::Bytes { bytes: encoded.len(), max: MAX_ENCODED_BYTES });
    }
    let format = image::guess_format(encoded).map_err(|_| ImageError::Format)?;
    let decoder: Box<dyn ImageDecoder> = match format {
        ImageFormat::Png => {
            let mut limits = Limits::no_limits();
            limits.max_alloc = Some(DECODER_BYTES);
            Box::new(PngDecoder::with_limits(PixelBlocks::of_png(encoded), limits).map_err(damaged)?)
        }
        ImageFormat::Gif => Box::new(GifDecoder::new(PixelBlocks::of_gif(encoded)).map_err(damaged)?),
        ImageFormat::Jpeg if jpeg_segments(encoded) > MAX_JPEG_SEGMENTS => return refuse("it has too much metadata"),
        ImageFormat::Jpeg if !has_jpeg_end(encoded) => return refuse("the file ends before the image"),
        ImageFormat::Jpeg => Box::new(JpegDecoder::new(Cursor::new(encoded)).map_err(damaged)?),
        ImageFormat::WebP if !has_whole_chunks(riff_content(encoded)) => return refuse("a chunk ends after the file"),
        ImageFormat::WebP => Box::new(WebPDecoder::new(Cursor::new(riff_content(encoded))).map_err(damaged)?),
        _ => return Err(ImageError::Format),
    };
    Ok((decoder, format))
}

/// Upper bound for the number of segments with metadata that the decoder of JPEG keeps, wherever it finds them. Other data
/// has these two bytes by chance, about 700 times in a file of the maximum size.
fn jpeg_segments(encoded: &[u8]) -> usize {
    encoded.windows(2).filter(|pair| pair[0] == 0xff && matches!(pair[1], 0xe1 | 0xe2)).count()
}

/// True if a JPEG file has its end marker. The decoder fills the rest of a file that was cut with grey.
fn has_jpeg_end(jpeg: &[u8]) -> bool {
    let mut rest = jpeg;
    // A zero follows a byte of compressed data that looks like the start of a marker.
    while let Some(start) = rest.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff)) {
        let marker = rest[start + 1];
        rest = &rest[start + 2..];
        match marker {
            0xd9 => return true,
            // These markers have no content: start, restart, and a marker of arithmetic coding.
            0x01 | 0xd0..=0xd8 => {}
            _ => match rest.split_first_chunk() {
                Some((length, _)) => rest = rest.get(usize::from(u16::from_be_bytes(*length))..).unwrap_or_default(),
                None => return false,
            },
        }
    }
    false
}

/// A WebP file without the bytes after the end that its header declares.
fn riff_content(encoded: &[u8]) -> &[u8] {
    let end = le_u32(encoded, 4).unwrap_or_default().saturating_add(8);
    &encoded[..end.min(encoded.len())]
}

/// True if every chunk of a WebP file ends within the file. The decoder allocates the size that a metadata chunk
/// declares.
fn has_whole_chunks(riff: &[u8]) -> bool {
    let mut at = 12;
    while let Some(len) = le_u32(riff, at + 4) {
        if at + 8 + len > riff.len() {
            return false;
        }
        at += 8 + len + len % 2;
    }
    true
}

fn le_u32(bytes: &[u8], at: usize) -> Option<usize> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) as usize)
}

fn refuse<T>(why: &str) -> Result<T, ImageError> {
    Err(ImageError::Damaged(why.into()))
}

fn damaged(error: image::ImageError) -> ImageError {
    ImageError::Damaged(error.to_string())
}

fn swaps_sides(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// Blends RGBA pixels with a white background. Rounds as Pillow does.
fn on_white(rgba: &[u8]) -> Vec<u8> {
    let blend = |colour: u8, alpha: u8| {
        let sum = u32::from(colour) * u32::from(alpha) + 255 * (255 - u32::from(alpha)) + 128;
        ((sum + (sum >> 8)) >> 8) as u8
    };
    rgba.as_chunks::<4>().0.iter().flat_map(|[r, g, b, alpha]| [r, g, b].map(|colour| blend(*colour, *alpha))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::codecs::png::PngEncoder;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision");

    fn file(name: &str) -> Vec<u8> {
        std::fs::read(format!("{FIXTURE}/images/{name}")).unwrap()
    }

    fn png(width: u32, height: u32, color: ColorType, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        image::ImageEncoder::write_image(PngEncoder::new(&mut out), data, width, height, color.into()).unwrap();
        out
    }

    #[test]
    fn decoded_pixels_match_pillow() {
        let stages = std::fs::read(format!("{FIXTURE}/images.safetensors")).unwrap();
        let stages = safetensors::SafeTensors::deserialize(&stages).unwrap();
        // JPEG decoders differ in rounding and in how they enlarge chroma.
        for (name, file_name, max) in
            [("gradient", "gradient.png", 0), ("shapes", "shapes.png", 0), ("noise", "noise.jpg", 8)]
        {
            let expected = stages.tensor(&format!("{name}.rgb")).unwrap();
            let encoded = file(file_name);
            let found = decode(&encoded).unwrap();
            let header = ImageHeader::read(&encoded).unwrap();
            assert_eq!([found.height, found.width, 3], expected.shape(), "{name}");
            assert_eq!((header.height as usize, header.width as usize), (found.height, found.width), "{name}");
            let worst = found.data.iter().zip(expected.data()).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(worst <= max, "{name}: {worst}");
        }
    }

    #[test]
    fn every_kind_of_file_is_read() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
        let mut count = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let Ok(expected) = std::fs::read(path.with_file_name(format!("{name}.rgb"))) else { continue };
            let found = decode(&std::fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{name} {error}"));
            let side = |at: usize| u32::from_le_bytes(expected[at..at + 4].try_into().unwrap()) as usize;
            assert_eq!((found.height, found.width), (side(0), side(4)), "{name}");
            // PNG, GIF and lossless WebP are exact. The other formats differ in rounding, in chroma upsampling, and in
            // the conversion of CMYK.
            let max = match name.split('.').next_back().unwrap() {
                _ if name.starts_with("cmyk") => 64,
                "jpg" if name.starts_with("subsampled") => 40,
                "jpg" => 8,
                "webp" if name.starts_with("lossy") => 24,
                _ => 0,
            };
            let worst = found.data.iter().zip(&expected[8..]).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(worst <= max, "{name}: {worst}");
            count += 1;
        }
        assert_eq!(count, 26);
    }

    #[test]
    fn transparent_pixels_become_white() {
        let data = [255, 0, 0, 0, 255, 0, 0, 255, 0, 0, 0, 128];
        let image = decode(&png(3, 1, ColorType::Rgba8, &data)).unwrap();
        assert_eq!(image.data, [255, 255, 255, 255, 0, 0, 127, 127, 127]);
        assert_eq!(decode(&png(1, 1, ColorType::La8, &[7, 255])).unwrap().data, [7, 7, 7]);
        assert_eq!(decode(&png(1, 1, ColorType::L16, &0x80_80u16.to_be_bytes())).unwrap().data, [128; 3]);
    }

    #[test]
    fn sixteen_bit_colours_keep_their_high_byte() {
        // PNG encoders take 16-bit values in the byte order of the machine.
        let values = |values: &[u16]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let decoded = |color, data: &[u16]| decode(&png(1, 1, color, &values(data))).unwrap().data;
        assert_eq!(decoded(ColorType::Rgb16, &[0x01ff, 0x80ff, 0xffff]), [0x01, 0x80, 0xff]);
        assert_eq!(decoded(ColorType::Rgba16, &[0x01ff, 0x80ff, 0xff00, 0xffff]), [0x01, 0x80, 0xff]);
        assert_eq!(decoded(ColorType::La16, &[0x01ff, 0xff00]), [0x01; 3]);
    }

    #[test]
    fn other_files_are_refused() {
        for (bytes, word) in [
            (b"".to_vec(), "PNG"),
            (b"not an image".to_vec(), "PNG"),
            (b"BM\x1e\0\0\0\0\0\0\0\x1a\0\0\0\x0c\0\0\0\x01\0\x01\0\x01\0\x18\0\0\0\xff\0".to_vec(), "PNG"),
            (file("gradient.png")[..100].to_vec(), "damaged"),
            (vec![0; MAX_ENCODED_BYTES + 1], "bytes"),
        ] {
            let error = decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn cut_files_are_refused() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
        let mut formats = std::collections::BTreeSet::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let is_animated = path.file_name().unwrap().to_str().unwrap().starts_with("animated");
            if is_animated || !path.with_added_extension("rgb").exists() {
                continue;
            }
            let whole = std::fs::read(&path).unwrap();
            // The last bytes of other formats have no pixels.
            let most = if path.extension().is_some_and(|extension| extension == "jpg") { 98 } else { 80 };
            for percent in [most, 70, 30, 5] {
                let cut = &whole[..whole.len() * percent / 100];
                assert!(decode(cut).is_err(), "{path:?} cut to {percent} %");
            }
            formats.insert(path.extension().unwrap().to_owned());
        }
        assert!(formats.len() > 3, "{formats:?}");
        let jpeg = file("noise.jpg");
        assert!(decode(&jpeg[..jpeg.len() - 2]).is_err(), "without the end marker");
        decode(&[&jpeg, &b"trailing bytes"[..]].concat()).unwrap();
    }

    #[test]
    fn bytes_after_an_image_are_ignored() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
        for name in [
            "lossless.webp",
            "lossy.webp",
            "lossy-alpha.webp",
            "animated.webp",
            "rgb.png",
            "baseline.jpg",
            "animated.gif",
        ] {
            let whole = std::fs::read(format!("{dir}/{name}")).unwrap();
            let expected = decode(&whole).unwrap();
            for tail in [&b"\n"[..], b"trailing bytes here", &[0xff; 1000]] {
                let found = decode(&[&whole, tail].concat()).unwrap_or_else(|error| panic!("{name} {error}"));
                assert_eq!(found.data, expected.data, "{name} with {} bytes", tail.len());
            }
        }
    }

    #[test]
    fn webp_streams_have_the_canvas_size() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/pictures");
        for (name, at) in [("lossless.webp", 21), ("lossy.webp", 26)] {
            let simple = std::fs::read(format!("{dir}/{name}")).unwrap();
            let header =
                |width: u8, height: u8| [&b"VP8X\x0a\0\0\0\0\0\0\0"[..], &[width - 1, 0, 0, height - 1, 0, 0]].concat();
            let extended = |header: &[u8]| [b"RIFF\xff\xff\xff\0WEBP", header, &simple[12..]].concat();
            decode(&extended(&header(40, 28))).unwrap();
            assert!(ImageHeader::read(&extended(&header(28, 40))).is_err(), "{name}");
            let mut large = extended(&header(16, 16));
            large[at + 18..at + 22].fill(0x3f);
            assert!(ImageHeader::read(&large).is_err(), "{name}");
        }
    }

    #[test]
    fn huge_dimensions_are_refused_before_decoding() {
        // The dimensions of a PNG are at bytes 16 to 24. A checksum follows, so it is computed again.
        let sized = |width: u32, height: u32| {
            let mut bytes = png(1, 1, ColorType::L8, &[0]);
            bytes[16..20].copy_from_slice(&width.to_be_bytes());
            bytes[20..24].copy_from_slice(&height.to_be_bytes());
            let checksum = crc32fast::hash(&bytes[12..29]);
            bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
            bytes
        };
        for (width, height, word) in [(65_535, 65_535, "pixels"), (u32::MAX >> 1, 1, ""), (4000, 10, "200")] {
            for error in
                [decode(&sized(width, height)).unwrap_err(), ImageHeader::read(&sized(width, height)).unwrap_err()]
            {
                assert!(error.to_string().contains(word), "{width} x {height}: {error}");
            }
        }
        assert!(matches!(decode(&sized(1000, 1000)), Err(ImageError::Damaged(_))));
    }
}
