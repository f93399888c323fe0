//! The engine: one thread owns the model and answers requests. Other threads send messages to the engine's thread.
//!
//! [`Handle::submit`] queues a [`Request`] and returns a receiver of [`Event`]s. If the receiver is dropped, the engine
//! cancels the request within one token or one chunk of a prompt. The module `scheduler` has the engine's loop: admit
//! requests, run one step, send its events.
//!
//! | file or folder | what it holds |
//! |---|---|
//! | `request`, `handle`, `abort`, `error` | requests and events; the handle; why a request ends early; errors |
//! | `queue`, `turns`, `fair_share` | the queue; which request is next; the places of each client |
//! | `scheduler`, `scheduler/time_share` | the loop; how prompts and answers share the time |
//! | `model_runner`, `live_request` | the steps; an admitted request |
//! | `preemption` | which requests keep their pages when pages are short |
//! | `sequence`, `sequence_cache` | tokens and state; where a prompt starts |
//! | `shared_prefix` | requests that wait until another request has computed their beginning |
//! | `answer`, `sampler`, `constraint` | an answer during its generation; logits to a token; grammar masks |
//! | `speculation` | drafts, when to use them, and their verification |
//! | `prompt_cache`, `cache_salt` | snapshots in memory and on disk; which prompts may share them |

mod abort;
mod answer;
mod cache_salt;
mod constraint;
pub mod error;
mod fair_share;
mod handle;
mod live_request;
mod model_runner;
mod preemption;
pub mod prompt_cache;
mod queue;
mod request;
mod sampler;
mod scheduler;
mod sequence;
mod sequence_cache;
mod shared_prefix;
mod speculation;
mod turns;

pub use cache_salt::CacheSalt;
pub use constraint::{Constraint, TokenMask};
pub use fair_share::{ClientId, QueueLimits, QueueShare, retry_seconds};
pub use handle::{DEFAULT_MAX_QUEUE, Handle, Options, Worker, spawn, spawn_with};
pub use moestro_compute::device::GPU_INTERACTIVITY_REMEDY;
/// Types for [`Request::images`].
pub use moestro_model::model::{Image, ImageProcessor, PlacedImage, place_images};
pub use prompt_cache::{DiskCacheOptions, PromptCacheStatus, clear_prompt_dir};
pub use request::{
    Boundary, BoundaryKind, Event, Events, Finish, Logprobs, MAX_DRAFT_POSITIONS, Request, Sampling, Timings, collect,
};
pub use sampler::Sampler;
pub use speculation::{
    DRAFT_CONTEXT, DflashDraft, Draft, DraftKind, DraftPolicy, DraftRequest, DraftSampler, LookupDraft, ModelDraft,
    MtpDraft, TokenHistory,
};
