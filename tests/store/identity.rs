//! Tests of the identity of checkpoint files.

use moestro_model::checkpoint::identity::{file_identity, settled_identity};
use std::{
    fs,
    path::PathBuf,
    time::{Duration, SystemTime},
};

#[test]
fn any_change_to_a_file_changes_identity() {
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = ["a", "b"].map(|name| dir.path().join(name)).into();
    files.iter().for_each(|file| fs::write(file, [7; 100]).unwrap());
    let first = file_identity(&files).unwrap();
    assert_eq!((first.len(), file_identity(&files).unwrap()), (32, first.clone()), "computing it changes nothing");
    assert_ne!(file_identity(&[files[1].clone(), files[0].clone()]).unwrap(), first, "the order counts");

    // Replace the file with a copy that has the same bytes and the same modification time.
    let written = fs::metadata(&files[1]).unwrap().modified().unwrap();
    let copy = dir.path().join("copy");
    fs::copy(&files[1], &copy).unwrap();
    fs::File::options().write(true).open(&copy).unwrap().set_modified(written).unwrap();
    fs::rename(&copy, &files[1]).unwrap();
    let second = file_identity(&files).unwrap();
    assert_ne!(second, first);

    // Modify the file and reset its modification time.
    std::thread::sleep(Duration::from_millis(20));
    fs::write(&files[1], [8; 100]).unwrap();
    fs::File::options().write(true).open(&files[1]).unwrap().set_modified(written).unwrap();
    assert_ne!(file_identity(&files).unwrap(), second);

    fs::remove_file(&files[0]).unwrap();
    assert!(file_identity(&files).unwrap_err().to_string().contains("/a: "));
}

#[test]
fn recently_changed_file_is_not_settled() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let files = [file.path().to_owned()];
    // A file with a modification time in the future is not settled.
    file.as_file().set_modified(SystemTime::now() + Duration::from_secs(900)).unwrap();
    assert_eq!(settled_identity(&files).unwrap(), None);
}
