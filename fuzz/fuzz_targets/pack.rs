//! The manifest of a pack, for a checkpoint of one layer with two experts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro::{
    checkpoint::pack,
    experts::{ExpertMap, PIECES, Piece},
};
use std::{fs, path::PathBuf, sync::OnceLock};

struct Place {
    dir: tempfile::TempDir,
    map: ExpertMap,
    files: [PathBuf; 1],
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
        let place = Place { map: ExpertMap { layers: vec![vec![expert(0), expert(1)]] }, files: [file], dir };
        pack::write(&place.map, &place.files, &place.dir.path().join("model.pack"), &|_| ()).unwrap();
        place
    })
}

fuzz_target!(|data: &[u8]| {
    let Place { dir, map, files } = place();
    fs::write(dir.path().join("model.pack/manifest.json"), data).unwrap();
    if let Some(pack) = pack::find(&dir.path().join("model"), map, files) {
        assert_eq!(pack.map.experts(), 2);
    }
});
