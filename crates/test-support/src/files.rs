//! Copies files of checkpoints.

use std::{fs, path::Path};

/// Copies the files `names` from one directory to another. Creates the other directory if it does not exist.
pub fn copy_files(from: impl AsRef<Path>, to: impl AsRef<Path>, names: &[&str]) {
    fs::create_dir_all(&to).unwrap();
    for name in names {
        fs::copy(from.as_ref().join(name), to.as_ref().join(name)).unwrap();
    }
}

/// Copies all files of a directory.
pub fn copy_dir(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let names = fs::read_dir(&from).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    copy_files(from, to, &names.collect::<Vec<_>>().iter().map(String::as_str).collect::<Vec<_>>());
}
