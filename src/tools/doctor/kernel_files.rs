//! `moestro doctor --print-kernels DIR`: writes the Metal kernels to files, so that CI compiles the same text as a Mac.

use crate::error::CommandError;
use moestro_compute::device::kernels;
use std::{fs, path::Path};

/// Writes `NAME.metal` for every kernel file, and `NAME.no-tiles.metal` for the variant without matrix units. Also
/// writes `fault.metal`, the kernel that must fail. Creates the directory.
///
/// # Errors
/// A file cannot be written.
pub fn write(dir: &Path) -> Result<(), CommandError> {
    let failed = |path: &Path| CommandError::io(format!("writing {}", path.display()));
    fs::create_dir_all(dir).map_err(failed(dir))?;
    let with_tiles = kernels::metal_sources(true).map(|(name, text)| (name.to_string(), text));
    let without = kernels::metal_sources(false).map(|(name, text)| (format!("{name}.no-tiles"), text));
    let fault = ("fault".to_string(), kernels::METAL_FAULT.to_string());
    for (name, text) in with_tiles.chain(without).chain([fault]) {
        let path = dir.join(format!("{name}.metal"));
        fs::write(&path, text).map_err(failed(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn printed_kernels_match_the_compiled_text() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("kernels");
        write(&out).unwrap();
        let printed = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        // `compile` also compiles the variant without tiles if the compiler rejects the variant with tiles. This
        // compiler rejects all variants.
        let compiled = Mutex::new(Vec::new());
        let result = kernels::compile::<()>(false, |name, text, tiles| {
            let file = if tiles { format!("{name}.metal") } else { format!("{name}.no-tiles.metal") };
            assert!(printed(&file) == kernels::metal_source(text, tiles), "{file}");
            compiled.lock().unwrap().push(file);
            if tiles { Err(String::new()) } else { Ok(Vec::new()) }
        });
        let compiled = compiled.into_inner().unwrap();
        assert!(!result.has_tiles);
        assert_eq!(compiled.len(), 2 * kernels::FILES.len());
        assert_eq!(fs::read_dir(&out).unwrap().count(), compiled.len() + 1, "and fault.metal");
        assert_eq!(printed("fault.metal"), kernels::METAL_FAULT);
    }
}
