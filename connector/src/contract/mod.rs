//! The contract between an engine and its connector: two objects, one in the scheduler and one in each worker.
//!
//! They meet once per step through serialisable values, [`StepMeta`] down and [`StepResults`] up, so they may live in
//! different processes and never share memory. The method names and rules follow vLLM v1's connector interface; the table in
//! ARCHITECTURE.md says which is which.
//!
//! One step of an engine, in order:
//!
//! ```text
//! scheduler   matched_tokens, allocated        for each request that is admitted
//!             build_step            ──▶ StepMeta
//! worker      begin_step                       starts loads; never blocks
//!             wait_layer(i) attention(i) save_layer(i)      for each layer, or none of them
//!             wait_saved                       the step is complete: its bytes may be read
//!             poll                  ──▶ StepResults
//! scheduler   apply                            which requests loaded, failed, or may be freed
//!             finished                         once per request; says whether its blocks are still held
//! ```

mod request;
mod step;
mod tier;

use std::time::Duration;

pub use request::{EngineFinish, Hold, Match, Request, RequestId, TransferParams};
pub use step::{
    Applied, BadStep, Cancel, Load, LoadFailure, Readers, Save, ScheduledRequest, ScheduledStep, Side, StepMeta,
    StepResults,
};
pub(crate) use tier::Spoken;
pub use tier::{Kept, Offered, Refuse, Restore, Restored, Return, Store, StoreStage, Take, TierMeta, TierResults};

use kvferry_protocol::{BlockId, LayerId};

use crate::error::ConnectorError;
use crate::pool::BlockHash;

/// The half that lives in the engine's scheduler. Nothing in it blocks or talks to a peer.
pub trait Scheduler: Send {
    /// How many tokens beyond `local_tokens` (the block-aligned local prefix hit) a peer can provide. Pure: it may be called many
    /// times for one request. Engine counterpart: `get_num_new_matched_tokens`.
    fn matched_tokens(&self, request: &Request, local_tokens: u32) -> Match;

    /// Tells which blocks a request was given, all of them, and how many tokens beyond its local prefix will be loaded into them
    /// (0 if none, and again 0 when the request is admitted after its load). Engine counterpart: `update_state_after_alloc`.
    ///
    /// # Errors
    /// [`ConnectorError::Request`] if the blocks cannot hold the tokens, or the request is being loaded already.
    fn allocated(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError>;

    /// Requests lost their blocks and wait again; called before [`Scheduler::build_step`] of the step that may give the blocks to
    /// others. What was kept of them is over; when one is admitted again under another transfer, it is kept anew. Engine
    /// counterpart: the step's preempted request ids.
    fn preempted(&mut self, requests: &[RequestId]) {
        let _ = requests;
    }

    /// A request ended before it was ever given blocks, so [`Scheduler::finished`] does not know it: whoever waits for its transfer,
    /// or keeps blocks for it, must hear. Engine counterpart: `request_finished` of a request that was aborted in the queue.
    fn unadmitted(&mut self, request: &Request) {
        let _ = request;
    }

    /// More of an admitted request's blocks have a hash, because its text grew: those of the complete blocks after the ones that
    /// are known already. An engine that does not call it has only its prompts kept. Engine counterpart: the request's
    /// `block_hashes`.
    fn hashed(&mut self, request: &RequestId, more: &[BlockHash]) {
        let _ = (request, more);
    }

    /// A request could not be given blocks. Called before [`Scheduler::build_step`], as often as that is so: what peers hold of this engine's
    /// blocks beyond their transfers is asked back.
    fn short_of_blocks(&mut self) {}

    /// What the workers must do in this step. Called for every step, also an empty one. Engine counterpart:
    /// `build_connector_meta`.
    fn build_step(&mut self, step: &ScheduledStep) -> StepMeta;

    /// A request ended; called exactly once for each, before its blocks are freed. Engine counterpart: `request_finished`.
    fn finished(&mut self, request: &RequestId, blocks: &[BlockId], how: EngineFinish) -> Hold;

    /// Takes what the workers reported, one entry a rank that ran the step. A request surfaces once, when every expected rank has
    /// spoken; late, duplicate or unknown ids are counted and dropped. Engine counterpart: `update_connector_output`.
    fn apply(&mut self, results: Vec<StepResults>) -> Applied;

    /// Whether transfers are pending, so that the engine must go on stepping although no request is scheduled. Engine
    /// counterpart: `has_pending_push_work`.
    fn has_pending(&self) -> bool;
}

/// The half that lives in each worker, beside the model. All calls come from the worker's one model thread.
pub trait Worker: Send {
    /// Takes the step's work and starts its loads; returns at once. Engine counterpart: `bind_connector_metadata`.
    ///
    /// # Errors
    /// [`ConnectorError::Request`] for work that does not fit this worker's cache: the rest of the step goes on.
    fn begin_step(&mut self, meta: StepMeta) -> Result<(), ConnectorError>;

    /// Starts loads in the middle of a step, for an engine that wants them after its forward was launched: it takes them out of the
    /// metadata that it begins the step with. Engine counterpart: `start_load_kv`, since vLLM 0.29.
    ///
    /// # Errors
    /// [`ConnectorError::Ended`]; the loads are then reported as failed.
    fn begin_loads(&mut self, loads: Vec<Load>) -> Result<(), ConnectorError>;

    /// Waits until the layer's pages of every request that this step reads while it loads are verified, or their load failed.
    /// Returns the requests whose load failed: their output of this step is void. Engine counterpart: `wait_for_layer_load`.
    ///
    /// On a device the pages are on their way when this returns: the registered stream is made to wait for them, the caller is not.
    fn wait_layer(&mut self, layer: LayerId) -> Vec<RequestId>;

    /// The layer's keys and values of this step's tokens are in the cache once `ready` says so. Engine counterpart:
    /// `save_kv_layer`.
    fn save_layer(&mut self, layer: LayerId, ready: Ready);

    /// The step is complete: all layers that were not saved one by one are ready, or, on a device, queued on the registered stream.
    /// Sources stay leased until their request is
    /// released, so this does not wait for the wire. Engine counterpart: `wait_for_save`.
    fn wait_saved(&mut self);

    /// What happened since the last call. Engine counterpart: `get_transfer_results`, `get_block_ids_with_load_errors`.
    fn poll(&mut self) -> StepResults;

    /// Requests whose blocks the engine wants back now: their transfers end, and this returns when nothing reads or writes their
    /// pages any more. Engine counterpart: `handle_preemptions`.
    fn preempted(&mut self, requests: &[RequestId]);

    /// Ends all transfers, waits up to `grace` for peers to hear of it, and returns when nothing touches the caches.
    fn shutdown(&mut self, grace: Duration);
}

/// When bytes that a kernel writes may be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ready {
    /// They are in memory already (a CPU engine).
    Now,
    /// They are once the stream that was registered with the cache ([`DeviceKvCache`](kvferry_kernels::device::DeviceKvCache)) is past
    /// what is queued on it at this moment.
    Queued,
}
