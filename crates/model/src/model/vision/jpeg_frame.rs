//! Reads the frame of a JPEG file: how its samples are stored, and how much memory the decoder needs besides its output.
//!
//! The decoder keeps all coefficients of an image whose components come in several scans. Other images need only a row
//! of blocks.

/// Width and height of a block of samples in pixels.
const BLOCK: usize = 8;
/// Size of a coefficient in bytes.
const COEFFICIENT_BYTES: usize = 2;
/// Bytes of memory per component, pixel of the width, and vertical sampling factor: the samples of a row of blocks, and
/// the same row enlarged. The decoder enlarges the first components most, which takes up to 83 bytes.
const ROW_BYTES: usize = 96;
/// The highest number of components, and the highest sampling factor, that the decoder accepts.
const MAX_COUNT: usize = 4;

/// How the samples of a JPEG file are stored.
#[derive(Debug, PartialEq, Eq)]
pub struct JpegFrame {
    /// The horizontal and the vertical sampling factor of each component.
    sampling: Vec<[usize; 2]>,
    /// True if the decoder keeps the coefficients of the whole image.
    keeps_coefficients: bool,
}

impl JpegFrame {
    /// The frame of a file. A file whose header the decoder could read in another way gets the frame that takes most
    /// memory.
    pub fn of(jpeg: &[u8]) -> Self {
        let largest = || Self { sampling: vec![[MAX_COUNT; 2]; MAX_COUNT], keeps_coefficients: true };
        Self::read(jpeg).unwrap_or_else(largest)
    }

    /// Reads the segments up to the first scan. `None` if one of them is unusual.
    fn read(jpeg: &[u8]) -> Option<Self> {
        let mut rest = jpeg.strip_prefix(&[0xff, 0xd8])?;
        let mut frame: Option<Self> = None;
        loop {
            let [0xff, marker, high, low, ..] = *rest else { return None };
            let len = usize::from(u16::from_be_bytes([high, low]));
            let content = rest.get(4..2 + len)?;
            match marker {
                0xc0..=0xc2 if frame.is_none() => {
                    let sampling = content.get(6..)?.chunks_exact(3).map(|component| {
                        let factors = [component[1] >> 4, component[1] & 15].map(usize::from);
                        factors.iter().all(|factor| (1..=MAX_COUNT).contains(factor)).then_some(factors)
                    });
                    let sampling: Vec<_> = sampling.collect::<Option<_>>()?;
                    if sampling.is_empty() {
                        return None;
                    }
                    frame = Some(Self { sampling, keeps_coefficients: marker == 0xc2 });
                }
                // The scan. Its first byte is the number of its components.
                0xda => {
                    let frame = frame?;
                    let is_whole = usize::from(*content.first()?) == frame.sampling.len();
                    return Some(Self { keeps_coefficients: frame.keeps_coefficients || !is_whole, ..frame });
                }
                // The decoder reads five bytes of this segment, even if it has fewer.
                0xe0 if content.len() < 5 => return None,
                // Tables, metadata and comments.
                0xc4 | 0xdb | 0xdd | 0xe0..=0xef | 0xfe => {}
                _ => return None,
            }
            rest = &rest[2 + len..];
        }
    }

    /// Maximum number of bytes that the decoder needs for an image of this size besides its output.
    pub fn decoder_bytes(&self, width: usize, height: usize) -> usize {
        let most = |side: usize| self.sampling.iter().map(|factors| factors[side]).max().unwrap_or(MAX_COUNT);
        let across = most(0);
        let down = most(1);
        let groups = [width.div_ceil(BLOCK * across), height.div_ceil(BLOCK * down)];
        let blocks: usize = self.sampling.iter().map(|[across, down]| across * down).sum();
        let coefficients =
            if self.keeps_coefficients { blocks * groups[0] * groups[1] * BLOCK.pow(2) * COEFFICIENT_BYTES } else { 0 };
        coefficients + self.sampling.len() * groups[0] * BLOCK * across * down * ROW_BYTES
    }
}
