//! Chooses the weight files of a checkpoint among the files of a directory or of a repository on the hub.
//!
//! The index file names the shards, but converters often copy the index of the model that they converted. Such an index
//! names files that are not there. If other files are complete, they are used, as in transformers and mlx-lm.

use moestro_base::{error::StoreError, platform::read_json_file};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// Name of the index file.
pub const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of an index file in bytes. The index of the largest model has ten million bytes.
pub const MAX_INDEX_BYTES: u64 = 100 << 20;
/// Name of the file of a checkpoint that is not divided into shards.
const SINGLE: &str = "model.safetensors";
/// Files with the vision tower beside the shards of the text model, as OptiQ writes them.
pub const TOWER_FILES: [&str; 2] = ["optiq/optiq_vision.safetensors", "optiq_vision.safetensors"];

/// Names of the weight files of a checkpoint.
#[derive(Debug, Default, PartialEq)]
pub struct WeightFiles {
    pub chosen: BTreeSet<String>,
    /// Shards that the chosen files need and that do not exist.
    pub missing: BTreeSet<String>,
    /// Other files with a usual name, and [`TOWER_FILES`]. They may hold tensors that the chosen files lack.
    pub others: BTreeSet<String>,
    /// True if the index names files that do not exist, but other files are complete.
    pub ignores_index: bool,
}

impl WeightFiles {
    /// Chooses among the files in `dir`. Also returns the file of each tensor, as [`read_index`] does.
    ///
    /// # Errors
    /// There are no weight files, or those of several models. The index names a file outside of `dir`.
    pub fn in_dir(dir: &Path) -> Result<(Self, BTreeMap<String, String>), StoreError> {
        let mut all = BTreeSet::new();
        for entry in std::fs::read_dir(dir).map_err(StoreError::at(dir))? {
            all.extend(entry.map_err(StoreError::at(dir))?.file_name().into_string());
        }
        // `exists` is false for a link to a file that was deleted.
        let mut names: BTreeSet<String> =
            all.iter().filter(|name| is_inside(name) && dir.join(name).exists()).cloned().collect();
        let listed = read_index(dir)?;
        let in_folders = listed.values().map(String::as_str).chain(TOWER_FILES);
        names.extend(in_folders.filter(|name| dir.join(name).exists()).map(str::to_owned));
        let not_a_checkpoint = |why| StoreError::NotACheckpoint { path: dir.to_path_buf(), why };
        let files = Self::choose(&names, &listed.values().cloned().collect()).map_err(not_a_checkpoint)?;
        if files.chosen.is_empty() {
            let why = match files.describe_missing() {
                Some(why) => format!("{why}; `moestro pull ORG/NAME` downloads them"),
                None => match all.iter().find(|name| is_inside(name) && !names.contains(*name)) {
                    Some(link) => format!("{link} is a link to a missing file; download it again"),
                    None => describe_others(&all),
                },
            };
            return Err(not_a_checkpoint(why));
        }
        Ok((files, listed))
    }

    /// Chooses among files with the names `available`. `listed` are the files that the index names.
    ///
    /// The first of these that is complete is chosen: the listed files with the other shards of their series,
    /// `model.safetensors`, a series of which a shard is listed, any series.
    ///
    /// # Errors
    /// Several series are complete, and the index does not choose one of them. The error names two of them.
    pub fn choose(available: &BTreeSet<String>, listed: &BTreeSet<String>) -> Result<Self, String> {
        let is_usual = |name: &&String| name.starts_with("model") && !name.contains('/');
        let usual: BTreeSet<String> = available.iter().filter(is_usual).cloned().collect();
        let mut numbers: BTreeMap<Series<'_>, BTreeSet<usize>> = BTreeMap::new();
        for (series, number) in usual.iter().filter_map(|name| Series::parse(name)).filter(|(s, _)| s.is_whole_model())
        {
            numbers.entry(series).or_default().insert(number);
        }
        let listed_series: BTreeSet<Series<'_>> = listed.iter().filter_map(|name| Series::of(name)).collect();
        let is_listed = |name: &&String| {
            listed.contains(*name) || Series::of(name).is_some_and(|series| listed_series.contains(&series))
        };
        let mut chosen: BTreeSet<String> = if !listed.is_empty() && listed.is_subset(available) {
            available.iter().filter(is_listed).cloned().collect()
        } else if available.contains(SINGLE) {
            BTreeSet::from([SINGLE.into()])
        } else {
            let is_complete = |(series, found): &(&Series<'_>, &BTreeSet<usize>)| found.len() >= series.count;
            let complete = numbers.iter().filter(is_complete);
            let mut series: Vec<Series<'_>> = complete.map(|(series, _)| *series).collect();
            if series.iter().any(|series| listed_series.contains(series)) {
                series.retain(|series| listed_series.contains(series));
            }
            if let [one, other, ..] = &series[..] {
                let names = [one.shard(1), other.shard(1)].join(" and of ");
                return Err(format!("the series of {names} are both complete; remove one of them"));
            }
            usual.iter().filter(|name| Series::of(name).is_some_and(|of| series.contains(&of))).cloned().collect()
        };
        let mut missing = BTreeSet::new();
        if chosen.is_empty() {
            chosen = listed.intersection(available).chain(&usual).cloned().collect();
            missing = listed.difference(available).cloned().collect();
            if listed.is_empty() {
                missing = numbers.iter().flat_map(|(series, found)| series.absent(found)).collect();
            }
        }
        let towers = available.iter().filter(|name| TOWER_FILES.contains(&name.as_str()));
        let others = usual.iter().chain(towers).filter(|name| !chosen.contains(*name)).cloned().collect();
        let ignores_index = missing.is_empty() && !listed.is_subset(available);
        Ok(Self { chosen, missing, others, ignores_index })
    }

    /// Says how many files are missing. `None` if no file is missing.
    pub fn describe_missing(&self) -> Option<String> {
        let first = self.missing.first()?;
        let count = self.missing.len();
        let all = count + self.chosen.len();
        Some(format!("{count} of {all} weight files missing, such as {first}"))
    }
}

/// Says what a directory without a usable weight file has instead, and what to do.
fn describe_others(names: &BTreeSet<String>) -> String {
    let others = [
        (&["adapter_model.safetensors", "adapters.safetensors"][..], "which is an adapter; merge it into its model"),
        (&[".gguf"], "which Moestro does not read; pull an MLX version of the model, such as one of mlx-community"),
        (&[".bin", ".pt", ".pth", ".ckpt", ".npz"], "which Moestro does not read; convert it to safetensors files"),
        (&[".incomplete", ".part", ".partial", ".crdownload", ".download"], "an unfinished download; finish it"),
        (&[ENDING], "but no index that names it; if it is the whole model, rename it to model.safetensors"),
    ];
    let other = others.iter().find_map(|(endings, what)| {
        let name = names.iter().find(|name| endings.iter().any(|ending| name.ends_with(ending)))?;
        Some(format!("; it has {name}, {what}"))
    });
    format!("it has no model*.safetensors{}", other.unwrap_or_default())
}

const ENDING: &str = ".safetensors";

/// The part of a shard's name that all shards of a checkpoint share: `model-00002-of-00004.safetensors` is number 2 of the
/// series `model` with 4 shards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Series<'a> {
    stem: &'a str,
    count: usize,
}

impl<'a> Series<'a> {
    /// Maximum number of shards in a series.
    const MAX_COUNT: usize = 10_000;

    /// The series and the number of a shard.
    fn parse(name: &'a str) -> Option<(Self, usize)> {
        let (rest, count) = name.strip_suffix(ENDING)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let count = count.parse().ok().filter(|count| (1..=Self::MAX_COUNT).contains(count))?;
        Some((Self { stem, count }, number.parse().ok()?))
    }

    fn of(name: &'a str) -> Option<Self> {
        Self::parse(name).map(|(series, _)| series)
    }

    fn shard(&self, number: usize) -> String {
        let Self { stem, count } = self;
        format!("{stem}-{number:05}-of-{count:05}{ENDING}")
    }

    /// False for a part or a variant of a model, such as `model-vision-00001-of-00001` and `model.fp16-00001-of-00002`.
    fn is_whole_model(&self) -> bool {
        ["model", "model.safetensors"].contains(&self.stem)
    }

    /// Names of the shards that are not among the numbers `found`, which is not the whole series.
    fn absent(&self, found: &BTreeSet<usize>) -> Vec<String> {
        // Some series start at 0. Their last number is then not absent.
        let absent = (1..=self.count).filter(|number| !found.contains(number));
        absent.take(self.count.saturating_sub(found.len())).map(|number| self.shard(number)).collect()
    }
}

/// True if a name refers to a safetensors file in the checkpoint directory or in a folder of it.
fn is_inside(name: &str) -> bool {
    name.ends_with(ENDING) && !name.contains('\0') && name.split('/').all(|part| !["", ".", ".."].contains(&part))
}

/// The file of each tensor, as the index file in `dir` says. Empty without an index file. An index file that cannot be
/// read, or is not an index, is logged, and the files decide.
///
/// # Errors
/// The index file names a file outside of `dir`.
pub fn read_index(dir: &Path) -> Result<BTreeMap<String, String>, StoreError> {
    #[derive(Deserialize)]
    struct ShardIndex {
        weight_map: BTreeMap<String, String>,
    }
    let path = dir.join(INDEX);
    let read = read_json_file(&path, MAX_INDEX_BYTES).and_then(|text| Ok(serde_json::from_slice::<ShardIndex>(&text)?));
    let mut listed = match read {
        Ok(index) => index.weight_map,
        Err(error) => {
            if error.kind() != std::io::ErrorKind::NotFound {
                tracing::warn!(file = %path.display(), %error, "cannot read the index; using the existing weight files");
            }
            return Ok(BTreeMap::new());
        }
    };
    for name in listed.values_mut() {
        *name = name.trim_start_matches("./").to_owned();
        if !is_inside(name) {
            let why = format!("its index names {name:?}, which is not a safetensors file in its directory");
            return Err(StoreError::NotACheckpoint { path: dir.to_path_buf(), why });
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(available: &[&str], listed: &[&str]) -> (Vec<String>, Vec<String>) {
        let [available, listed] =
            [available, listed].map(|names| names.iter().map(|name| format!("{name}.safetensors")).collect());
        let files = WeightFiles::choose(&available, &listed).unwrap();
        let short = |names: BTreeSet<String>| {
            names.iter().map(|name| name.trim_end_matches(".safetensors").to_owned()).collect()
        };
        (short(files.chosen), short(files.missing))
    }

    #[test]
    fn complete_files_win_over_stale_index() {
        let one = "model-00001-of-00002";
        let two = "model-00002-of-00002";
        let stale = ["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"];
        for (available, listed, chosen) in [
            // An index that is right, and no index.
            (&[one, two, "model"][..], &[one, two][..], &[one, two][..]),
            (&[one, two], &[], &[one, two]),
            (&["model"], &[], &["model"]),
            // The index names nothing that exists, or only a part of its files exists.
            (&["model"], &stale, &["model"]),
            (&["model", one], &[one, two], &["model"]),
            (&[one, two], &stale, &[one, two]),
            (&[one, two, stale[0]], &stale, &[one, two]),
            (&[one, two], &["weights", "model"], &[one, two]),
            // The index names a part of its series, and files with unusual names.
            (&[one, two], &[one], &[one, two]),
            (&[one, two, "model.fp16-00001-of-00001"], &[], &[one, two]),
            (&["weights.00", "model-x"], &["weights.00"], &["weights.00"]),
            // Of two complete series, the index has one, or a shard of one beside a file that does not exist.
            (&[one, two, "model-00001-of-00001"], &[one, two], &[one, two]),
            (&[one, two, "model-00001-of-00001"], &[two, "model-mtp"], &[one, two]),
        ] {
            let expected = (chosen.iter().map(|name| name.to_string()).collect(), Vec::new());
            assert_eq!(choose(available, listed), expected, "{available:?}, index {listed:?}");
        }
    }

    #[test]
    fn two_complete_series_are_refused() {
        let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        for other in ["model-00001-of-00001.safetensors", "model.safetensors-00001-of-00001.safetensors"] {
            let available = [one, two, other].map(str::to_owned).into();
            for listed in [&[][..], &["model-00001-of-00003.safetensors"], &[one, other, "model-x.safetensors"]] {
                let listed = listed.iter().map(|name| (*name).to_owned()).collect();
                let why = WeightFiles::choose(&available, &listed).unwrap_err();
                assert!(why.contains(one) && why.contains(other), "{why}");
            }
        }
    }

    #[test]
    fn absent_shards_are_missing() {
        let [one, two, three] = ["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"];
        for (available, listed, missing) in [
            (&[one, three][..], &[one, two, three][..], &[two][..]),
            (&[one, three], &[], &[two]),
            (&[one, three, "model-vision-00001-of-00001"], &[one, two, three], &[two]),
            (&[], &[one, two], &[one, two]),
            (&["model-a"], &["model-a", "model-b"], &["model-b"]),
        ] {
            assert_eq!(choose(available, listed).1, missing, "{available:?}, index {listed:?}");
        }
        assert_eq!(choose(&[], &[]), Default::default());
    }
}
