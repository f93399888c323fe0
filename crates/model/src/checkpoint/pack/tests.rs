use super::{
    find::open,
    manifest::{MANIFEST, RECORD_ALIGN},
    *,
};
use moestro_base::error::StoreError;
use moestro_compute::experts::{ExpertMap, ExpertSource, Piece, ShardFiles};
use std::{fs, os::unix::fs::FileExt, path::PathBuf};

/// A checkpoint of two shards with 3 layers of 5 experts. The pieces are at odd offsets and out of order.
struct TestCheckpoint {
    root: tempfile::TempDir,
    map: ExpertMap,
    files: Vec<PathBuf>,
}

impl TestCheckpoint {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        fs::create_dir(&dir).unwrap();
        let files: Vec<PathBuf> = (0..2).map(|i| dir.join(format!("{i}.safetensors"))).collect();
        for (seed, file) in files.iter().enumerate() {
            let noise = (0..600_000u32).map(|i| (i.wrapping_mul(2654435761).rotate_left(seed as u32 * 7) >> 13) as u8);
            let bytes: Vec<u8> = 3u64.to_le_bytes().into_iter().chain(*b"{ }").chain(noise).collect();
            fs::write(file, bytes).unwrap();
        }
        // The last matrix has no biases, as in mxfp4.
        let lens = [7000, 700, 701, 7000, 700, 701, 6000, 600, 0];
        let piece = |layer: usize, expert: usize, part: usize| Piece {
            file: ((layer + part) % 2) as u32,
            offset: (11 + layer * 150_001 + expert * 7919 + part * 12_345) as u64,
            len: lens[part],
        };
        let experts = |layer| (0..5).map(|e| std::array::from_fn(|part| piece(layer, e, part))).collect();
        let map = ExpertMap { layers: (0..3).map(experts).collect() };
        Self { root, map, files }
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("model")
    }

    /// The directory in which `find` searches first.
    fn pack_dir(&self) -> PathBuf {
        self.root.path().join("model.pack")
    }

    fn write(&self) -> Result<PackSummary, StoreError> {
        write(&self.map, &self.files, &self.pack_dir(), &|_| ())
    }
}

fn bytes(map: &ExpertMap, files: &[PathBuf]) -> Vec<Vec<u8>> {
    let files = ShardFiles::open(files, moestro_base::platform::Access::Buffered).unwrap();
    let read = |piece: &Piece| {
        let mut into = vec![0; piece.len];
        assert_eq!(files.read(piece.file, piece.offset, &mut into).unwrap(), piece.len);
        into
    };
    map.layers.iter().flatten().flatten().map(read).collect()
}

#[test]
fn pack_holds_checkpoint_bytes_in_aligned_records() {
    let checkpoint = TestCheckpoint::new();
    let before: Vec<_> = checkpoint.files.iter().map(|file| fs::read(file).unwrap()).collect();
    let done = std::sync::atomic::AtomicU64::new(0);
    let summary = write(&checkpoint.map, &checkpoint.files, &checkpoint.pack_dir(), &|n| {
        done.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
    })
    .unwrap();
    assert_eq!(summary, PackSummary { bytes: 15 * 32768, experts: 15, written: true });
    assert_eq!(done.into_inner(), 2 * summary.bytes, "bytes written and verified");
    let pack = find(&checkpoint.dir(), &checkpoint.map, &checkpoint.files).unwrap();
    assert_eq!(pack.dir.file_name().unwrap(), "model.pack");
    assert_eq!(bytes(&pack.map, &pack.files), bytes(&checkpoint.map, &checkpoint.files));
    for pieces in pack.map.layers.iter().flatten() {
        assert_eq!(pieces[0].offset % RECORD_ALIGN, 0);
        let plan = moestro_compute::experts::read_plan::ReadPlan::new(pieces, 4096);
        assert_eq!(plan.reads().len(), 1, "a packed expert takes one read");
    }
    let after: Vec<_> = checkpoint.files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(before == after, "the checkpoint was modified");
    // A second run finds the pack.
    assert!(!checkpoint.write().unwrap().written);
}

#[test]
fn pack_of_slightly_changed_copy_is_rejected() {
    let checkpoint = TestCheckpoint::new();
    checkpoint.write().unwrap();
    let print = fingerprint(&checkpoint.files).unwrap();
    // Change a byte of an expert that is in none of the fingerprint's samples.
    let changed = checkpoint.map.layers[1][3][3];
    let file = fs::File::options().read(true).write(true).open(&checkpoint.files[changed.file as usize]).unwrap();
    let mut byte = [0];
    let at = changed.offset + changed.len as u64 / 2;
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 16], at).unwrap();
    assert_eq!(fingerprint(&checkpoint.files).unwrap(), print, "the fingerprint does not change");
    let why = open(&checkpoint.pack_dir(), &checkpoint.map, &checkpoint.files).unwrap_err().to_string();
    assert!(why.contains("made from another checkpoint: layer 1, expert 3 differs"), "{why}");
    let why = verify(&checkpoint.pack_dir(), &checkpoint.map, &checkpoint.files, &|_| ()).unwrap_err().to_string();
    assert!(why.contains("layer 1, expert 3: byte") && why.contains("layer-001.experts"), "{why}");
    let why = checkpoint.write().unwrap_err().to_string();
    assert!(why.contains("made from another checkpoint"), "{why}");
    assert!(find(&checkpoint.dir(), &checkpoint.map, &checkpoint.files).is_none());
    file.write_all_at(&byte, at).unwrap();
    assert!(find(&checkpoint.dir(), &checkpoint.map, &checkpoint.files).is_some());
}

#[test]
fn verify_compares_every_byte() {
    let checkpoint = TestCheckpoint::new();
    checkpoint.write().unwrap();
    let check =
        || verify(&checkpoint.pack_dir(), &checkpoint.map, &checkpoint.files, &|_| ()).map_err(|e| e.to_string());
    assert_eq!(check(), Ok(15));
    let layer =
        fs::File::options().write(true).read(true).open(checkpoint.pack_dir().join("layer-002.experts")).unwrap();
    // The last byte of the last record is padding, which is never read.
    for at in [0, 4 * 32768 + 5, 5 * 32768 - 1] {
        let mut byte = [0];
        layer.read_exact_at(&mut byte, at).unwrap();
        layer.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let why = check().unwrap_err();
        assert!(why.contains(&format!("byte {at} of layer-002.experts differs from the checkpoint")), "{why}");
        layer.write_all_at(&byte, at).unwrap();
    }
    let manifest = checkpoint.pack_dir().join(MANIFEST);
    let text = fs::read_to_string(&manifest).unwrap();
    let sum = text.split("\"crc32\":[").nth(2).unwrap().split(',').next().unwrap();
    fs::write(&manifest, text.replace(sum, "77")).unwrap();
    assert!(
        check().unwrap_err().contains("layer 1, expert 0: its bytes match the checkpoint, but its checksum does not")
    );
}

#[test]
fn damaged_pack_is_rejected() {
    let checkpoint = TestCheckpoint::new();
    checkpoint.write().unwrap();
    let why = || open(&checkpoint.pack_dir(), &checkpoint.map, &checkpoint.files).unwrap_err().to_string();
    let layer = checkpoint.pack_dir().join("layer-001.experts");
    let file = fs::OpenOptions::new().write(true).open(&layer).unwrap();
    file.set_len(1000).unwrap();
    assert!(why().contains("layer-001.experts has 1000 bytes"), "{}", why());
    fs::remove_file(&layer).unwrap();
    assert!(why().contains("layer-001.experts"), "{}", why());
    let manifest = checkpoint.pack_dir().join(MANIFEST);
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"version\":2", "\"version\":9")).unwrap();
    assert!(why().contains("version 9"), "{}", why());
    fs::write(&manifest, text.replace("\"version\":2", "\"version\":1")).unwrap();
    assert!(why().contains("version 1 has no checksums"), "{}", why());
    fs::write(&manifest, text.replace("layer-000.experts", "../model/0.safetensors")).unwrap();
    assert!(why().contains("is not a file name"), "{}", why());
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    assert!(why().contains("not this checkpoint's pack"), "{}", why());
    assert!(find(&checkpoint.dir(), &checkpoint.map, &checkpoint.files).is_none());
}

#[test]
fn failed_packing_leaves_nothing() {
    let mut checkpoint = TestCheckpoint::new();
    checkpoint.map.layers[2][4][3].offset = 1 << 40;
    let text = checkpoint.write().unwrap_err().to_string();
    assert!(text.contains("1.safetensors") && text.contains("ends inside an expert"), "{text}");
    let names: Vec<_> = fs::read_dir(checkpoint.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["model"]);
    // A directory that is not a pack is not changed.
    fs::create_dir(checkpoint.pack_dir()).unwrap();
    fs::write(checkpoint.pack_dir().join("mine"), "x").unwrap();
    let text = checkpoint.write().unwrap_err().to_string();
    assert!(text.contains("neither empty nor a pack"), "{text}");
    checkpoint.map.layers[1][0][0].len += 1;
    assert!(checkpoint.write().unwrap_err().to_string().contains("differ in size"));
}

#[test]
fn fingerprint_depends_on_contents_not_paths() {
    let checkpoint = TestCheckpoint::new();
    let id = fingerprint(&checkpoint.files).unwrap();
    assert_eq!(id.len(), 32);
    let moved = checkpoint.root.path().join("moved");
    fs::rename(checkpoint.dir(), &moved).unwrap();
    let files: Vec<_> = checkpoint.files.iter().map(|file| moved.join(file.file_name().unwrap())).collect();
    assert_eq!(fingerprint(&files).unwrap(), id);
    fs::OpenOptions::new().write(true).open(&files[0]).unwrap().write_all_at(b"!", 600_000).unwrap();
    assert_ne!(fingerprint(&files).unwrap(), id);
    fs::write(&files[0], b"no").unwrap();
    assert!(fingerprint(&files).is_err());
    fs::write(&files[0], [255; 64]).unwrap();
    assert!(fingerprint(&files).unwrap_err().to_string().contains("not a safetensors file"));
}
