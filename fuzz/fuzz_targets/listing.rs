//! The hub's listing of a repository.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_model::checkpoint::hub::listing::RepoListing;

fuzz_target!(|data: &[u8]| {
    let Ok(listing) = serde_json::from_slice::<RepoListing>(data) else { return };
    if listing.check().is_err() {
        return;
    }
    let files = listing.small_files().into_iter().chain(listing.shards(std::path::Path::new("/nowhere")).unwrap_or_default());
    for file in files {
        assert!(!file.name.contains('/') && !file.name.starts_with('.'));
        assert!(file.hash().is_none_or(|hash| hash.bytes().all(|byte| byte.is_ascii_hexdigit())));
    }
});
