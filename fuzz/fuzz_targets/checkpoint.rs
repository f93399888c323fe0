//! Fuzzes a configuration and a shard: two bytes give the length of the configuration, the rest is the shard.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_model::model::{LoadOptions, CheckpointInfo};

fuzz_target!(|data: &[u8]| {
    let Some((len, rest)) = data.split_first_chunk::<2>() else { return };
    let (config, shard) = rest.split_at(rest.len().min(u16::from_le_bytes(*len).into()));
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), shard).unwrap();
    let _ = CheckpointInfo::unpacked(dir.path(), &LoadOptions::default());
});
