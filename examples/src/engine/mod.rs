//! An engine with continuous batching and chunked prefill over a paged KV cache.
//!
//! It has two halves, as serving engines do: a [`Scheduler`] that knows requests and blocks, and a [`Runner`] that knows the
//! model and the cache's bytes. They exchange a [`StepPlan`] and a [`StepOutput`], both serialisable. kvferry puts one object
//! beside each, after [`kvferry::contract`]; [`NoConnector`] is both for an engine that stands alone. A runner may spread its KV
//! heads over several tensor-parallel [`Rank`]s, each with a cache and a connector of its own. An [`EngineService`] runs everything
//! on a thread.

mod devices;
mod kv;
mod no_connector;
mod ranks;
mod runner;
mod sampling;
mod scheduler;
mod service;
mod step;

pub use devices::{DeviceKind, DeviceOpenError};
pub use kv::KvError;
pub use no_connector::NoConnector;
pub use ranks::Rank;
pub use runner::{CacheConfig, Runner, RunnerError};
pub use sampling::choose;
pub use scheduler::{Event, FinishReason, Scheduler, SchedulerConfig, Snapshot, Submission, SubmitError};
pub use service::{EngineHandle, EngineService, PromptCompute, Publish, ServiceError, Ticket, Update};
pub use step::{Sampled, Sampling, SequenceStep, StepOutput, StepPlan};
