//! Whether this machine computes what it should: each kernel of a GPU against the CPU's op on small random inputs, and
//! each instruction set of the processor against plain Rust. `moestro doctor` prints the findings, and `--device auto`
//! takes the GPU only if there is nothing to object to.

mod experts;
mod linear;
mod mixers;
mod order;
pub(super) mod processor;

pub use processor::processor;

use super::{
    plan::Matrix,
    weight::{Codes, Float, Weight},
};
use crate::device::{Compute, Dispatch, Gpu, GpuError, Math, Region, Span};
use candle_core::Tensor;
use std::collections::BTreeMap;

/// How far results in f32 may be apart, in parts of the largest value.
const CLOSE: f64 = 1e-5;

/// What was found of one kernel or instruction set.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    pub name: String,
    /// The largest difference in parts of the largest value, and how much is allowed; or what the device said.
    pub outcome: Result<(f64, f64), String>,
}

impl Finding {
    pub fn agrees(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|(difference, allowed)| difference <= allowed)
    }
}

/// Why a comparison could not be made.
enum Trouble {
    Gpu(GpuError),
    Cpu(candle_core::Error),
}

impl From<GpuError> for Trouble {
    fn from(error: GpuError) -> Self {
        Trouble::Gpu(error)
    }
}

impl From<candle_core::Error> for Trouble {
    fn from(error: candle_core::Error) -> Self {
        Trouble::Cpu(error)
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Gpu(error) => error.fmt(f),
            Trouble::Cpu(error) => write!(f, "the CPU's op: {error}"),
        }
    }
}

/// Runs every kernel on `gpu` and compares. A kernel that the device refuses does not keep the others from being tried.
pub fn kernels<G: Gpu + ?Sized>(gpu: &mut G) -> Vec<Finding> {
    let mut found: BTreeMap<String, Result<(f64, f64), String>> = BTreeMap::new();
    for (name, error) in gpu.compile() {
        if let Some(error) = error {
            found.insert(name, Err(error.0));
        }
    }
    let mut bench = Bench { gpu, compute: Compute::cpu(1, Math::F32), random: Random(1), buffers: Vec::new(), found };
    type Part<G> = fn(&mut Bench<'_, G>) -> Result<(), Trouble>;
    let parts: [(&str, Part<G>); 5] = [
        ("products and norms", linear::all),
        ("delta net", mixers::delta_net),
        ("attention", mixers::attention),
        ("experts", experts::all),
        ("order and memory", order::all),
    ];
    for (what, part) in parts {
        if let Err(trouble) = part(&mut bench) {
            bench.found.insert(format!("({what})"), Err(trouble.to_string()));
        }
        for buffer in std::mem::take(&mut bench.buffers) {
            bench.gpu.release(buffer);
        }
    }
    bench.found.into_iter().map(|(name, outcome)| Finding { name, outcome }).collect()
}

/// Where kernels are tried.
struct Bench<'a, G: ?Sized> {
    gpu: &'a mut G,
    compute: Compute,
    random: Random,
    buffers: Vec<u32>,
    found: BTreeMap<String, Result<(f64, f64), String>>,
}

impl<G: Gpu + ?Sized> Bench<'_, G> {
    /// Memory that is given back when this part of the comparison is over.
    fn allocate(&mut self, len: usize) -> Result<Region, GpuError> {
        let region = self.gpu.allocate(len)?;
        self.buffers.push(region.buffer);
        Ok(region)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<Region, GpuError> {
        let region = self.allocate(bytes.len())?;
        self.gpu.write(region, bytes)?;
        Ok(region)
    }

    fn words(&mut self, words: &[u32]) -> Result<Region, GpuError> {
        let region = self.allocate(words.len() * 4)?;
        self.gpu.write_words(region, words)?;
        Ok(region)
    }

    fn floats(&mut self, values: &[f32]) -> Result<Region, GpuError> {
        self.words(&values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
    }

    /// Room for `count` floats, NaN until written.
    fn room(&mut self, count: usize) -> Result<Region, GpuError> {
        self.bytes(&vec![0xff; count * 4])
    }

    fn read(&mut self, region: Region) -> Result<Vec<u8>, GpuError> {
        let mut bytes = vec![0; region.len];
        self.gpu.read(region, &mut bytes)?;
        Ok(bytes)
    }

    /// A random matrix: as the CPU sees it, and as the GPU does.
    fn matrix(&mut self, codes: Codes, rows: usize, cols: usize) -> Result<(Weight, Matrix), Trouble> {
        let parts = self.random.parts(codes, rows, cols);
        let mut regions = [Region { buffer: 0, offset: 0, len: 0 }; 3];
        for (region, part) in regions.iter_mut().zip(&parts).filter(|(_, part)| !part.is_empty()) {
            *region = self.bytes(part)?;
        }
        let [a, b, c] = parts.map(|part| Span::from_bytes(&part));
        let parts = [a, b, c].map(|span| span.map_err(candle_core::Error::wrap));
        let [a, b, c] = parts;
        let weight = Weight { codes, rows, cols, gain: 1.0, parts: [a?, b?, c?] };
        Ok((weight, Matrix { codes, rows, cols, gain: 1.0, parts: regions }))
    }

    /// Runs a launch to its end. `false`, and a finding, if the device cannot.
    fn run(&mut self, dispatch: &Dispatch) -> bool {
        match self.gpu.launch(dispatch).and_then(|()| self.gpu.wait()) {
            Ok(()) => true,
            Err(error) => {
                self.found.insert(dispatch.kernel.into(), Err(error.0));
                false
            }
        }
    }

    /// Runs a launch and compares what it left in each region with what it should have.
    fn check(&mut self, dispatch: &Dispatch, results: &[(Region, &[f32])]) -> Result<(), Trouble> {
        if self.run(dispatch) {
            for (region, expected) in results {
                let found = self.gpu.read_floats(region.first(expected.len() * 4))?;
                self.enter(dispatch.kernel, difference(&found, expected), CLOSE);
            }
        }
        Ok(())
    }

    /// Keeps the worst of what was found of a kernel.
    fn enter(&mut self, kernel: &str, difference: f64, allowed: f64) {
        let outcome = self.found.entry(kernel.into()).or_insert(Ok((0.0, allowed)));
        if let Ok((worst, limit)) = outcome {
            // Not a number is worse than any.
            if difference.is_nan() || difference / allowed > *worst / *limit {
                (*worst, *limit) = (difference, allowed);
            }
        }
    }
}

/// The largest difference over the largest value.
fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(0f64, |most, value| most.max(f64::from(*value).abs()));
    let each = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - f64::from(*e)).abs());
    let worst = each.fold(0f64, |worst, d| if d.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(d) });
    if found.len() == expected.len() { worst / largest.max(f64::MIN_POSITIVE) } else { f64::NAN }
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, candle_core::Error> {
    tensor.flatten_all()?.to_vec1()
}

/// `[rows, width]` of f32 on the CPU.
fn rows(data: &[f32], width: usize) -> Result<Tensor, candle_core::Error> {
    Tensor::from_slice(data, (data.len() / width, width), &candle_core::Device::Cpu)
}

/// SplitMix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    fn float(&mut self) -> f32 {
        ((self.bits() >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Codes, scales and biases of a random matrix whose values are of moderate size.
    fn parts(&mut self, format: Codes, rows: usize, cols: usize) -> [Vec<u8>; 3] {
        let [code_bytes, scale_bytes, bias_bytes] = format.row_bytes(cols).map(|bytes| bytes * rows);
        let store = |float: Float, v: f32| match float {
            Float::F32 => v.to_le_bytes().to_vec(),
            Float::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
            Float::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
        };
        match format {
            Codes::Dense(float) => {
                [(0..rows * cols).flat_map(|_| store(float, self.float())).collect(), vec![], vec![]]
            }
            Codes::Affine { bits, scale, .. } => {
                let codes = (0..code_bytes).map(|_| self.bits() as u8).collect();
                let step = 1.0 / f32::from(1u16 << bits);
                let scales = (0..scale_bytes / scale.bytes()).flat_map(|_| store(scale, self.float() * step)).collect();
                [codes, scales, (0..bias_bytes / scale.bytes()).flat_map(|_| store(scale, self.float())).collect()]
            }
            // 0x7f is not a number, as a code of 8 bits and as a scale of nvfp4.
            Codes::Mxfp4 | Codes::Mxfp8 | Codes::Nvfp4 => {
                let codes = (0..code_bytes).map(|_| (self.bits() as u8) & 0xee).collect();
                // About 1/4 to 1: as E4M3, or as powers of two.
                let least = if matches!(format, Codes::Nvfp4) { 40 } else { 125 };
                [codes, (0..scale_bytes).map(|_| least + (self.bits() % 3) as u8).collect(), vec![]]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_processor_computes_what_plain_rust_computes() {
        let found = processor();
        assert_eq!(found[0].name, "scalar");
        assert!(found.iter().all(Finding::agrees), "{found:?}");
    }

    #[test]
    fn what_is_off_or_no_number_does_not_agree() {
        let finding = |found: &[f32]| {
            let outcome = Ok((difference(found, &[1.0, -4.0]), CLOSE));
            Finding { name: "k".into(), outcome }.agrees()
        };
        assert!(finding(&[1.0, -4.0]) && finding(&[1.00001, -4.0]));
        assert!(!finding(&[1.0001, -4.0]) && !finding(&[f32::NAN, -4.0]) && !finding(&[f32::INFINITY, -4.0]));
        assert!(!finding(&[1.0]));
        assert!(!Finding { name: "k".into(), outcome: Err("no".into()) }.agrees());
    }
}
