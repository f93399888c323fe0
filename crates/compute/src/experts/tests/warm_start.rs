//! Tests that the list of hot experts is saved while serving.

use super::{checkpoint, take};
use crate::experts::{Options, PassSize, WarmStart, warm_start::SAVE_INTERVAL};
use std::time::Instant;

#[test]
fn hot_list_is_saved_once_a_minute() {
    let checkpoint = checkpoint();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hot.json");
    let warm_start = Some(WarmStart { file: file.clone(), identity: "a".into() });
    let (store, _) = checkpoint.open(Options { warm_start, ..Options::new(6) });
    for expert in 0..3 {
        take(&store, &checkpoint.map, 0, &[expert], PassSize::Small);
    }
    assert!(!file.exists(), "the interval has not passed");
    store.state.borrow_mut().saved = Instant::now().checked_sub(SAVE_INTERVAL).unwrap();
    take(&store, &checkpoint.map, 0, &[0], PassSize::Small);
    assert!(file.exists());
    std::fs::remove_file(&file).unwrap();
    take(&store, &checkpoint.map, 0, &[0], PassSize::Small);
    assert!(!file.exists(), "not saved again before the interval has passed");
}
