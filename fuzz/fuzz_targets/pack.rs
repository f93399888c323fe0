//! Fuzzes the manifest of a pack, for a checkpoint of one layer with two experts. `@` stands for the checkpoint's
//! fingerprint, which random bytes cannot match.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_model::checkpoint::pack;
use moestro_compute::experts::{ExpertMap, PIECES, Piece};
use std::{fs, path::PathBuf, sync::OnceLock};

struct Place {
    dir: tempfile::TempDir,
    map: ExpertMap,
    files: [PathBuf; 1],
    source: String,
}

fn place() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(|| {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::create_dir(dir.path().join("model")).unwrap();
        let file = dir.path().join("model/model.safetensors");
        fs::write(&file, [&2u64.to_le_bytes()[..], b"{}", &[7; 4096]].concat()).unwrap();
        let piece = |expert, part| Piece { file: 0, offset: 10 + ((expert * PIECES + part) * 100) as u64, len: 100 };
        let expert = |expert| std::array::from_fn(|part| piece(expert, part));
        let (map, files) = (ExpertMap { layers: vec![vec![expert(0), expert(1)]] }, [file]);
        let out = dir.path().join("model.pack");
        pack::write(&map, &files, &out, &|_| ()).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap();
        Place { map, files, source: manifest["source"].as_str().unwrap().to_owned(), dir }
    })
}

fuzz_target!(|text: &str| {
    let Place { dir, map, files, source } = place();
    fs::write(dir.path().join("model.pack/manifest.json"), text.replace('@', source)).unwrap();
    if let Some(pack) = pack::find(&dir.path().join("model"), map, files) {
        assert_eq!(pack.map.experts(), 2);
    }
});
