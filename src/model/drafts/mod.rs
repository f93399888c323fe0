//! Drafts that compute from the model's hidden rows: the checkpoint's MTP head and DFlash.

pub mod dflash;
pub mod hidden_taps;
pub mod mtp;
