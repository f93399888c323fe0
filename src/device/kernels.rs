//! The kernels' text, embedded: what Metal, or NVIDIA's compiler, compiles at start.

/// Files of `kernels/`, each compiled with the shim, `codes.metal` and (see [`compile`]) `tiles.metal` in front.
pub const FILES: [(&str, &str); 9] = [
    ("attend", include_str!("../../kernels/attend.metal")),
    ("delta", include_str!("../../kernels/delta.metal")),
    ("experts", include_str!("../../kernels/experts.metal")),
    ("few", include_str!("../../kernels/few.metal")),
    ("linear", include_str!("../../kernels/linear.metal")),
    ("norm", include_str!("../../kernels/norm.metal")),
    ("prompt", include_str!("../../kernels/prompt.metal")),
    ("route", include_str!("../../kernels/route.metal")),
    ("weights", include_str!("../../kernels/weights.metal")),
];

/// Reading packed weights: part of every file.
pub const CODES: &str = include_str!("../../kernels/codes.metal");

/// Products on matrix units: part of every file.
pub const TILES: &str = include_str!("../../kernels/tiles.metal");

/// The dialect's words in Metal.
pub const METAL: &str = include_str!("../../kernels/shim/metal.h");

/// The dialect's words in CUDA.
pub const CUDA: &str = include_str!("../../kernels/shim/cuda.h");

/// One file as CUDA compiles it.
pub fn cuda(text: &str) -> String {
    format!("{CUDA}\n{CODES}\n{TILES}\n{text}")
}

/// One file as Metal compiles it. Without `tiles`, kernels that need matrix units are left out, and the words for them.
pub fn metal(text: &str, tiles: bool) -> String {
    match tiles {
        true => format!("{METAL}\n{CODES}\n{TILES}\n{text}"),
        false => format!("#define NO_TILES\n{METAL}\n{CODES}\n{text}"),
    }
}

/// What a compiler made of the files.
pub struct Compiled<L> {
    pub libraries: Vec<L>,
    /// Files that did not compile, each with the compiler's log.
    pub refused: Vec<(String, String)>,
    /// The kernels that need matrix units are among them.
    pub tiles: bool,
}

/// Compiles all files by `one`, which is given a file's name and text, and whether the text of tiles is to stand in front. That text
/// is part of every file: if a file is refused, all are compiled a second time without it, so that answers are still computed
/// where only products on matrix units are not understood.
pub fn compile<L>(mut one: impl FnMut(&str, &str, bool) -> Result<L, String>) -> Compiled<L> {
    let mut all = |tiles| {
        let mut compiled = Compiled { libraries: Vec::new(), refused: Vec::new(), tiles };
        for (name, text) in FILES {
            match one(name, text, tiles) {
                Ok(library) => compiled.libraries.push(library),
                Err(log) => compiled.refused.push((format!("kernels/{name}.metal"), log)),
            }
        }
        compiled
    };
    let first = all(true);
    let Some((file, log)) = first.refused.first() else { return first };
    let second = all(false);
    if second.refused.len() >= first.refused.len() {
        return first;
    }
    tracing::warn!(file, log, "products on matrix units do not compile: prompts are computed without");
    second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tiles_what_compiles_is_kept() {
        let all = FILES.len();
        let compiled = |refuses: fn(&str, bool) -> bool| {
            let made = compile(|name, _, tiles| match refuses(name, tiles) {
                true => Err(format!("line 1 of {name}")),
                false => Ok((name.to_string(), tiles)),
            });
            assert!(made.libraries.iter().all(|(_, tiles)| *tiles == made.tiles));
            (made.libraries.len(), made.refused.len(), made.tiles)
        };
        assert_eq!(compiled(|_, _| false), (all, 0, true));
        assert_eq!(compiled(|_, tiles| tiles), (all, 0, false));
        // A fault elsewhere does not cost the matrix units.
        assert_eq!(compiled(|name, _| name == "route"), (all - 1, 1, true));
        assert_eq!(compiled(|name, tiles| tiles || name == "route"), (all - 1, 1, false));
    }
}
