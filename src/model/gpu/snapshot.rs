//! A sequence on the GPU as bytes, and back.

use super::{GpuState, OnGpu};
use crate::{
    device::{Gpu, Region},
    error::ModelError,
    model::Snapshot,
    ops::plan::Memory,
};
use std::{ops::Range, sync::PoisonError};

impl<G: Gpu> OnGpu<G> {
    pub(super) fn take(&self, state: &mut GpuState) -> Result<Snapshot, ModelError> {
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        gpu.wait()?;
        let mut fixed = Vec::new();
        for region in fixed_regions(&state.layers) {
            read(&mut *gpu, region, &mut fixed)?;
        }
        let GpuState { len, layers, frozen, .. } = state;
        frozen.snapshot(*len, fixed, |positions| {
            let mut out = Vec::new();
            for part in self.parts(layers, &positions) {
                read(&mut *gpu, part, &mut out)?;
            }
            Ok(out)
        })
    }

    pub(super) fn put(&self, snapshot: &Snapshot, state: &mut GpuState) -> Result<(), ModelError> {
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        gpu.wait()?;
        let GpuState { layers, frozen, .. } = state;
        frozen.restore(snapshot, |positions, mut page| {
            self.parts(layers, &positions).try_for_each(|part| write(&mut *gpu, part, &mut page))
        })?;
        let mut fixed = &snapshot.state[..];
        fixed_regions(layers).try_for_each(|region| write(&mut *gpu, region, &mut fixed))?;
        state.len = snapshot.len;
        Ok(())
    }

    /// Where the keys and values of some positions lie: caches are `[kv_heads, context, dim]`.
    fn parts(&self, layers: &[Memory], positions: &Range<usize>) -> impl Iterator<Item = Region> {
        let (heads, room) = (self.qwen.config().attention.kv_heads, self.qwen.plan().context);
        let caches = layers.iter().filter_map(|layer| match layer {
            Memory::Attend(cache) => Some([cache.keys, cache.values]),
            Memory::Delta { .. } => None,
        });
        let (first, count) = (positions.start, positions.len());
        caches.flatten().flat_map(move |cache| {
            let row = cache.len / (heads * room);
            (0..heads).map(move |head| cache.part((head * room + first) * row, count * row))
        })
    }
}

fn fixed_regions(layers: &[Memory]) -> impl Iterator<Item = Region> {
    let both = |layer: &Memory| match layer {
        Memory::Delta { conv, heads } => Some([*conv, *heads]),
        Memory::Attend(_) => None,
    };
    layers.iter().filter_map(both).flatten()
}

fn read<G: Gpu>(gpu: &mut G, region: Region, out: &mut Vec<u8>) -> Result<(), ModelError> {
    let start = out.len();
    out.resize(start + region.len, 0);
    Ok(gpu.read(region, &mut out[start..])?)
}

fn write<G: Gpu>(gpu: &mut G, region: Region, from: &mut &[u8]) -> Result<(), ModelError> {
    let foreign = || ModelError::Config("the snapshot belongs to another model".into());
    let bytes = from.split_off(..region.len).ok_or_else(foreign)?;
    Ok(gpu.write(region, bytes)?)
}
