//! Kernels of one decoded row in two variants with the same arguments, grid and bytes of the result. The staged variant
//! copies the row to threadgroup memory, and the direct variant reads it from the cache. The device and the shape
//! decide which one is faster, so a load measures both.

use crate::{
    device::{CommandQueue, DeviceError, Driver, Launch, Region},
    ops::{DecodedProduct, ExpertSet, ExpertSlots, Experts, Linear, MoeBuffers, MoeWeights, Norm, Weight},
};
use std::{collections::BTreeMap, time::Instant};

/// Size in bytes of the zeros that replace the weights of a measurement: more than most caches hold.
const WEIGHTS: usize = 64 << 20;
/// Size in bytes of all other buffers of a measurement.
const ROWS: usize = 8 << 20;
/// Alignment of buffers in bytes.
const ALIGN: usize = 256;
/// Number of times that each variant is measured. The shortest time counts.
const ROUNDS: usize = 4;
/// Minimum and maximum number of launches that are measured together.
const LAUNCHES: [usize; 2] = [4, 32];

/// The staged and the direct variant of a kernel, in this order.
pub const VARIANTS: [&str; 2] = ["staged", "direct"];

/// The kind of kernel, the columns, the threadgroups and the bits of a weight. They decide which variant is faster.
type ProductKey = [u32; 4];

/// Which variants a backend launches.
#[derive(Debug, Default)]
pub(super) enum VariantChoice {
    #[default]
    Staged,
    /// For checks.
    Direct,
    /// True for products whose direct variant is faster. Other products are staged.
    Measured(BTreeMap<ProductKey, bool>),
}

impl VariantChoice {
    /// Measures the variants of each product that was not measured yet. Later launches use the faster one. Products
    /// stay staged if a measurement fails, for example because the device has too little memory.
    pub fn measure(&mut self, gpu: &mut CommandQueue<impl Driver>, products: &[DecodedProduct<'_>]) {
        let mut found = match std::mem::take(self) {
            Self::Measured(found) => found,
            _ => BTreeMap::new(),
        };
        let begin = Instant::now();
        for product in products {
            let Some((key, _)) = variant(&product.launch()) else { continue };
            if found.contains_key(&key) {
                continue;
            }
            match time_variants(gpu, product) {
                Ok(Some([staged, direct])) => {
                    tracing::debug!(?key, staged, direct, "measured the variants of a product");
                    found.insert(key, direct < staged);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot measure the variants of a product; the other products are staged");
                    break;
                }
            }
        }
        let direct = found.values().filter(|is_direct| **is_direct).count();
        let seconds = begin.elapsed().as_secs_f64();
        tracing::debug!(direct, products = found.len(), seconds, "chose the kernels of decoded rows");
        *self = Self::Measured(found);
    }

    /// The kernel that replaces the launch's kernel.
    pub fn replacement(&self, launch: &Launch) -> Option<&'static str> {
        let is_direct = |key: &ProductKey| match self {
            Self::Staged => false,
            Self::Direct => true,
            Self::Measured(found) => found.get(key) == Some(&true),
        };
        match self {
            Self::Staged => None,
            _ => variant(launch).filter(|(key, _)| is_direct(key)).map(|(_, direct)| direct),
        }
    }
}

/// The direct variant of a launch's kernel, and the key of the product.
fn variant(launch: &Launch) -> Option<(ProductKey, &'static str)> {
    let [kind, direct] = match launch.kernel {
        "gemv_1" => ["plain", "gemv_direct_1"],
        "gemv_head_norm_1" => ["plain", "gemv_direct_head_norm_1"],
        "gemv_norm_1" => ["norm", "gemv_direct_norm_1"],
        "gemv_conv" => ["norm", "gemv_direct_conv"],
        "moe_gate_up" => ["experts", "moe_gate_up_direct"],
        _ => return None,
    };
    let Launch { args, grid, .. } = launch;
    // The words of ExpertsArgs or of LinearArgs.
    let key = match kind {
        "experts" => [2, args[1], grid[0], 4],
        kind => [u32::from(kind == "norm"), args[2], grid[1], args[10]],
    };
    Some((key, direct))
}

/// Launches to measure, and the words that they read.
struct TimedLaunches {
    launches: Vec<Launch>,
    words: Vec<(Region, Vec<u32>)>,
}

/// Parts of one buffer, in order.
struct BufferParts(Region);

impl BufferParts {
    fn take(&mut self, bytes: usize) -> Option<Region> {
        let whole = bytes.next_multiple_of(ALIGN);
        (whole <= self.0.len).then(|| {
            let part = self.0.first(bytes);
            self.0 = self.0.part(whole, self.0.len - whole);
            part
        })
    }
}

impl DecodedProduct<'_> {
    /// A launch of the product as a model makes it, over buffers that do not exist.
    fn launch(&self) -> Launch {
        let any = Region { len: 1 << 48, ..Region::default() };
        match self {
            Self::Matrices { matrices, has_norm } => linear(matrices, any, has_norm.then_some(any), any),
            Self::Experts { layer, stride } => {
                let slots = ExpertSlots { segments: vec![any], table: any, per_segment: 1, stride: *stride };
                gate_up(layer, &slots, any, any, MoeBuffers { act: any, scores: any, ..MoeBuffers::default() })
            }
        }
    }

    /// Launches of the product over `buffer`, each with other weights. `address` is the device's address of the buffer.
    /// `None` if the buffer is too small.
    fn launches(&self, buffer: Region, address: u64) -> Option<TimedLaunches> {
        let weights = buffer.first(WEIGHTS);
        let mut rows = BufferParts(buffer.part(WEIGHTS, buffer.len - WEIGHTS));
        match self {
            Self::Matrices { matrices, has_norm } => {
                let total: usize = matrices.iter().map(stored_bytes).sum();
                // A long product takes as long per row of W as its first rows.
                let scale =
                    |rows: usize| if total <= WEIGHTS { rows } else { (rows * WEIGHTS / total / 16).max(1) * 16 };
                let mut matrices = matrices.clone();
                matrices.iter_mut().for_each(|matrix| matrix.rows = scale(matrix.rows).min(matrix.rows));
                let cols = matrices.first()?.cols;
                let bytes: usize = matrices.iter().map(stored_bytes).sum();
                if bytes == 0 || bytes > WEIGHTS {
                    return None;
                }
                let [x, norm] = [rows.take(cols * 4)?, rows.take(cols * 4)?];
                let y = rows.take(matrices.iter().map(|matrix| matrix.rows).sum::<usize>() * 4)?;
                let one = |number: usize| {
                    let copies = (WEIGHTS / bytes).max(1);
                    let mut arena = BufferParts(weights.part(number % copies * bytes, bytes));
                    for matrix in &mut matrices {
                        for (part, len) in
                            matrix.parts.iter_mut().zip(matrix.codes.part_bytes(matrix.rows, matrix.cols))
                        {
                            *part = arena.take(len)?;
                        }
                    }
                    Some(linear(&matrices, x, has_norm.then_some(norm), y))
                };
                let launches = (0..count(bytes)).map(one).collect::<Option<_>>()?;
                Some(TimedLaunches { launches, words: Vec::new() })
            }
            Self::Experts { layer, stride } => {
                let slots = WEIGHTS / stride.max(&1);
                if slots < layer.k {
                    return None;
                }
                let table = rows.take(8)?;
                let per_segment = slots.next_power_of_two();
                let all = ExpertSlots { segments: vec![weights], table, per_segment, stride: *stride };
                let x = rows.take(layer.hidden() * 4)?;
                let act = rows.take((layer.k + 1) * layer.row() * 4)?;
                let scores = rows.take(layer.width() * 4)?;
                let buffers = MoeBuffers { act, scores, ..MoeBuffers::default() };
                let address = [address as u32, (address >> 32) as u32].to_vec();
                let mut words = vec![(table, address)];
                let mut launches = Vec::new();
                for number in 0..count(layer.k * stride * 2 / 3) {
                    let chosen = rows.take(layer.k * 4)?;
                    let ids = (0..layer.k).map(|rank| ((number * layer.k + rank) % slots) as u32);
                    words.push((chosen, ids.collect()));
                    launches.push(gate_up(layer, &all, x, chosen, buffers));
                }
                Some(TimedLaunches { launches, words })
            }
        }
    }
}

/// Number of launches that are measured together, if each reads this many bytes.
fn count(bytes: usize) -> usize {
    (WEIGHTS / bytes.max(1)).clamp(LAUNCHES[0], LAUNCHES[1])
}

/// Bytes of a matrix in an [`BufferParts`].
fn stored_bytes(matrix: &Weight) -> usize {
    matrix.codes.part_bytes(matrix.rows, matrix.cols).map(|bytes| bytes.next_multiple_of(ALIGN)).iter().sum()
}

fn linear(matrices: &[Weight], x: Region, norm: Option<Region>, y: Region) -> Launch {
    let norm = norm.map(|weight| Norm { weight, eps: 1e-6, keep: None });
    Linear { x, tokens: 1, norm, matrices, y, add: false }.launch()
}

fn gate_up(layer: &MoeWeights, slots: &ExpertSlots, x: Region, chosen: Region, buffers: MoeBuffers) -> Launch {
    let experts = ExpertSet::Table { ids: chosen, slots: chosen };
    Experts { layer, slots, tokens: 1, x, buffers, experts }.up(chosen, false)
}

/// Seconds of the product with each of the [`VARIANTS`]. `None` if the product has only one variant, or if the device
/// cannot compile the direct one.
pub(super) fn time_variants(
    gpu: &mut CommandQueue<impl Driver>,
    product: &DecodedProduct<'_>,
) -> Result<Option<[f64; 2]>, DeviceError> {
    let kernel = variant(&product.launch()).map(|(_, kernel)| kernel);
    if kernel.is_none_or(|kernel| gpu.driver.max_threads(kernel).is_err()) {
        return Ok(None);
    }
    let direct = |launch: &Launch| variant(launch).map(|(_, kernel)| Launch { kernel, ..launch.clone() });
    with_buffer(gpu, WEIGHTS + ROWS, |gpu, buffer| {
        let Some(launches) = prepare(gpu, product, buffer)? else { return Ok(None) };
        let other: Vec<_> = launches.iter().filter_map(direct).collect();
        time_launches(gpu, [&launches, &other]).map(Some)
    })
}

/// Seconds of each of two products. `None` if a product is too large.
pub(super) fn time_products(
    gpu: &mut CommandQueue<impl Driver>,
    [one, other]: [&DecodedProduct<'_>; 2],
) -> Result<Option<[f64; 2]>, DeviceError> {
    with_buffer(gpu, WEIGHTS + ROWS, |gpu, buffer| match (prepare(gpu, one, buffer)?, prepare(gpu, other, buffer)?) {
        (Some(one), Some(other)) => time_launches(gpu, [&one, &other]).map(Some),
        _ => Ok(None),
    })
}

/// Allocates a buffer of zeros for `work` and frees it.
pub(super) fn with_buffer<D: Driver, T>(
    gpu: &mut CommandQueue<D>,
    bytes: usize,
    work: impl FnOnce(&mut CommandQueue<D>, Region) -> Result<T, DeviceError>,
) -> Result<T, DeviceError> {
    let buffer = gpu.allocate(bytes)?;
    let done = work(gpu, buffer);
    gpu.release(buffer.buffer);
    done
}

/// The launches of a product over `buffer`, whose words are written. `None` if the buffer is too small.
fn prepare(
    gpu: &mut CommandQueue<impl Driver>,
    product: &DecodedProduct<'_>,
    buffer: Region,
) -> Result<Option<Vec<Launch>>, DeviceError> {
    let address = gpu.driver.address(buffer.buffer)?;
    let Some(TimedLaunches { launches, words }) = product.launches(buffer, address) else { return Ok(None) };
    words.iter().try_for_each(|(region, words)| gpu.write_words(*region, words))?;
    Ok(Some(launches))
}

/// Seconds per launch of two lists of launches.
pub(super) fn time_launches(
    gpu: &mut CommandQueue<impl Driver>,
    lists: [&[Launch]; 2],
) -> Result<[f64; 2], DeviceError> {
    let mut best = [f64::INFINITY; 2];
    // The first round creates pipelines and wakes the device.
    for round in 0..=ROUNDS {
        for (launches, best) in lists.iter().zip(&mut best) {
            let begin = Instant::now();
            launches.iter().try_for_each(|launch| gpu.launch(launch))?;
            gpu.wait()?;
            if round > 0 {
                *best = best.min(begin.elapsed().as_secs_f64() / launches.len() as f64);
            }
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Float, WeightFormat};

    #[test]
    fn first_rows_of_long_product_are_measured() {
        let codes = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
        let matrix = |rows| Weight { codes, rows, cols: 5120, global_scale: 1.0, parts: Default::default() };
        let buffer = Region { len: WEIGHTS + ROWS, ..Region::default() };
        for rows in [vec![248_320], vec![17_408, 17_408], vec![10_240, 6144, 48, 48], vec![5120]] {
            let matrices = rows.iter().map(|rows| matrix(*rows)).collect();
            let product = DecodedProduct::Matrices { matrices, has_norm: true };
            let TimedLaunches { launches, words } = product.launches(buffer, 0).unwrap();
            assert!(words.is_empty() && (4..=32).contains(&launches.len()));
            // Short products read other weights each time.
            let weights = |launch: &Launch| launch.bindings[4].region;
            assert_eq!(weights(&launches[0]).overlaps(weights(&launches[1])), rows[0] > 5120, "{rows:?}");
            // The whole product is the key.
            let blocks: usize = rows.iter().map(|rows| rows.div_ceil(16)).sum();
            let (key, kernel) = variant(&product.launch()).unwrap();
            assert_eq!((key, kernel), ([1, 5120, blocks as u32, 4], "gemv_direct_norm_1"));
        }
    }
}
