//! Speculative decoding: a draft proposes several tokens, one forward pass verifies them, and the sampler accepts a
//! prefix.
//!
//! The sampler treats each verified row exactly like the row of a plain decode step. The sampler's random number
//! depends only on the seed and the token's position. The answer therefore has the same bytes with and without drafts,
//! at any temperature. When the sampled token differs from the drafted token, the sampled token becomes part of the
//! answer, and the cycle of draft and verify ends.
//!
//! | file | what it holds |
//! |---|---|
//! | `speculator` | a decode step: one token alone, or a draft and its verification |
//! | `controller`, `acceptance_monitor` | when to draft and how many tokens; drafts that do not fit the model |
//! | `draft`, `draft_sampler`, `hidden_history` | the interface of a draft, and what drafts read |
//! | `lookup`, `mtp`, `dflash`, `model_draft` | the drafts: prompt lookup, MTP head, DFlash, a smaller model |

mod acceptance_monitor;
mod controller;
mod dflash;
mod draft;
mod draft_sampler;
mod hidden_history;
mod lookup;
mod model_draft;
mod mtp;
mod speculator;

pub use controller::DraftPolicy;
pub use dflash::DflashDraft;
pub use draft::{Draft, DraftKind, DraftRequest, TokenHistory};
pub use draft_sampler::DraftSampler;
pub use lookup::LookupDraft;
pub use model_draft::{CONTEXT as DRAFT_CONTEXT, ModelDraft};
pub use mtp::MtpDraft;
pub(super) use speculator::{PendingRows, SampledToken, Speculator};
