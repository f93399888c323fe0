//! Tests of valid, damaged and hostile safetensors headers.

use moestro_model::checkpoint::index::Index;
use std::path::Path;

fn write_shard(dir: &Path, name: &str, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(dir.join(name), bytes).unwrap();
}

#[test]
fn unaligned_headers_and_several_shards_open() {
    let dir = tempfile::tempdir().unwrap();
    write_shard(dir.path(), "model-1.safetensors", r#"{"a":{"dtype":"U32","shape":[3],"data_offsets":[0,12]}}"#, 12);
    write_shard(dir.path(), "model-2.safetensors", r#"{"b":{"dtype":"BF16","shape":[],"data_offsets":[0,2]} }"#, 2);
    let index = Index::open(dir.path()).unwrap();
    assert_eq!((index.tensors["a"].offset, index.tensors["a"].len), (8 + 55, 12));
    assert_eq!((index.tensors["b"].file, index.tensors["b"].len), (1, 2));
}

#[test]
fn damaged_shard_error_names_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Index::open(dir.path()).unwrap_err().to_string();
    let shard = |header: &str, data| write_shard(dir.path(), "model.safetensors", header, data);
    assert!(error().contains("no model*.safetensors"));
    shard(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, 11);
    assert!(error().contains("truncated: tensor a"), "{}", error());
    shard(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}}"#, 12);
    assert!(error().contains("does not match bytes"));
    shard(r#"{"a":{"dtype":"U8","shape":[9223372036854775809,2],"data_offsets":[8,6]}}"#, 12);
    assert!(error().contains("does not match bytes"));
    shard(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, 12);
    std::fs::write(dir.path().join("model.safetensors"), [255; 9]).unwrap();
    assert!(error().contains("its header would have"));
}

#[test]
fn ambiguous_headers_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let open = |header: &str| {
        write_shard(dir.path(), "model.safetensors", header, 16);
        Index::open(dir.path()).map(|index| index.tensors.len()).map_err(|error| error.to_string())
    };
    let at = |start: usize, end: usize| {
        format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
    };
    let two = |a: String, b: String| open(&format!(r#"{{"a":{a},"b":{b},"__metadata__":{{"a":"x"}}}}"#));
    assert_eq!(two(at(0, 8), at(8, 16)), Ok(2));
    assert_eq!(two(at(8, 16), at(0, 8)), Ok(2));
    assert_eq!(two(at(0, 16), at(4, 4)), Ok(2));
    for (a, b) in [(at(0, 9), at(8, 16)), (at(0, 16), at(4, 5)), (at(2, 4), at(2, 4))] {
        assert!(two(a, b).unwrap_err().contains("tensors a and b overlap"));
    }
    let twice = open(&format!(r#"{{"a":{},"a":{}}}"#, at(0, 4), at(4, 8)));
    assert!(twice.unwrap_err().contains("duplicate name a"));
    let key = open(r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#);
    assert!(key.unwrap_err().contains("duplicate field"));
    let deep = open(r#"{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#);
    assert!(deep.unwrap_err().contains("at most 8 dimensions"));
    for name in ["../model.safetensors", "/dev/zero", "/tmp/model.safetensors"] {
        let index = format!(r#"{{"weight_map":{{"a":"{name}"}}}}"#);
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(Index::open(dir.path()).unwrap_err().to_string().contains("not a safetensors file in its directory"));
    }
}

#[test]
fn fifo_as_shard_does_not_block() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        test_support::fifo::make_fifo(&dir.path().join(name));
        assert!(Index::open(dir.path()).unwrap_err().to_string().contains("not a regular file"), "{name}");
    }
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("model.safetensors")).unwrap();
    assert!(Index::open(dir.path()).unwrap_err().to_string().contains("not a regular file"));
}
