//! The scheduler half beside an engine that hears of completions from its workers.
//!
//! The engine frees a sent request's blocks when its *workers* say so, but only the scheduler half knows whether the engine has left them
//! with it: a transfer may end before its request does. So the half decides, and the workers say it in the next step: `released` goes down
//! with that step's metadata, and each worker hands it to the engine once.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry::config::Role;
use kvferry::contract::{
    EngineFinish, Hold, Match, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler as _, StepResults,
    TransferParams,
};
use kvferry::pd::{PdScheduler, SchedulerOptions};
use kvferry_protocol::{BlockId, TransferId};
use kvferry_transport::PeerAddress;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::config::Config;
use crate::error::{self, BindingError};
use crate::params::{self, Parsed, Prompt};
use crate::samples::Samples;

/// The half of the connector that stands beside the engine's scheduler. Bookkeeping only: nothing here waits or talks to a peer.
#[pyclass(frozen, module = "kvferry._kvferry")]
#[derive(Debug)]
pub(crate) struct Scheduler {
    engine_id: String,
    role: Role,
    tp_size: u16,
    tokens_per_block: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    half: PdScheduler,
    /// Where this engine's workers listen, by rank.
    addresses: Vec<SocketAddr>,
    /// Requests with a part in a transfer, until the engine finishes them.
    requests: BTreeMap<RequestId, Known>,
    /// Requests whose blocks the engine left here, and for which transfer.
    held: BTreeMap<RequestId, Option<TransferId>>,
    /// Those of them that the workers must give back.
    released: Vec<RequestId>,
    /// The last transfers that a request of this engine had a part in.
    taken: VecDeque<TransferId>,
    /// Samples of one request: the first hands the prompt over for all.
    samples: Samples,
}

#[derive(Debug)]
struct Known {
    request: Request,
    prompt: Prompt,
    /// What the router calls the transfer.
    name: String,
    /// Whether this side drew that name, so that it may draw another.
    is_drawn: bool,
    /// Whether it was ever given blocks.
    is_admitted: bool,
}

#[pymethods]
impl Scheduler {
    /// `whole_blocks`: the engine's kernels pack a block's tokens in an order of their own, so blocks travel as they are.
    #[new]
    #[pyo3(signature = (config, *, tokens_per_block, whole_blocks))]
    fn new(config: &Config, tokens_per_block: u32, whole_blocks: bool) -> PyResult<Self> {
        let per_block = NonZeroU32::new(tokens_per_block);
        let per_block = per_block.ok_or_else(|| error::value("tokens_per_block is 0".to_owned()))?;
        let options = SchedulerOptions { tokens_per_block: per_block, reporters: config.tp_size(), layerwise: false };
        // The engine finds a block by its hash from the moment it is scheduled.
        let half = PdScheduler::new(options).with_early_sharing();
        let half = if whole_blocks { half.with_whole_blocks() } else { half };
        let (addresses, requests, held, released, taken, samples) = Default::default();
        Ok(Self {
            engine_id: config.engine_id().to_owned(),
            role: config.role(),
            tp_size: config.tp_size(),
            tokens_per_block,
            state: Mutex::new(State { half, addresses, requests, held, released, taken, samples }),
        })
    }

    /// Where this engine's workers listen, `IP:port` by rank.
    fn set_addresses(&self, addresses: Vec<String>) -> PyResult<()> {
        let parse = |text: &String| text.parse().map_err(|_| error::value(format!("{text:?} is no IP:port")));
        self.lock().addresses = addresses.iter().map(parse).collect::<PyResult<_>>()?;
        Ok(())
    }

    /// A request came: `params` are its `kv_transfer_params`, `more` what beside the tokens decides its KV, in one canonical text, and
    /// `max_tokens` how many tokens it may generate. Returns why it has no part in a transfer, or None if it has one or its params speak of none.
    ///
    /// Raises ValueError for params that make no sense here; the request is then computed without a transfer, and prefill need not keep what
    /// they name.
    fn add(
        &self,
        py: Python<'_>,
        request_id: &str,
        prompt: Vec<u32>,
        more: &str,
        max_tokens: u64,
        params: &Bound<'_, PyDict>,
    ) -> PyResult<Option<&'static str>> {
        let prompt = py.detach(|| Prompt::new(&prompt, more));
        let parsed = match params::parse(request_id, params, &prompt, self.tp_size) {
            Ok(parsed) => parsed,
            Err(error) => {
                // What a mixed-up leg names may be another request's, whose own leg is still to come: the lease bounds that.
                if !params::is_of_another(request_id, params, &prompt) {
                    self.let_go(request_id, &prompt, params);
                }
                return Err(error.into());
            }
        };
        // The same holds for a leg that came to the wrong engine.
        parsed.iter().try_for_each(|said| self.refuse_what_cannot_be(request_id, &said.params, max_tokens))?;
        let Some(Parsed { params, name, is_drawn }) = parsed else { return Ok(None) };
        let mut state = self.lock();
        let id = RequestId::new(request_id);
        if matches!(params, TransferParams::Keep { .. }) && !state.samples.is_first(&id, &prompt, &name) {
            return Ok(Some(ANOTHER_SAMPLE));
        }
        let (TransferParams::Fetch { transfer, .. } | TransferParams::Keep { transfer, .. }) = &params;
        let is_new = state.take(*transfer);
        if !is_new {
            state.samples.spent(&id);
        }
        if let TransferParams::Fetch { from, .. } = &params
            && state.is_here(*transfer, from)
        {
            return Ok(Some(COMPUTED_HERE));
        }
        if !is_new {
            return Ok(Some(AGAIN));
        }
        let request =
            Request { id: id.clone(), prompt_tokens: prompt.tokens, params: Some(params), hashes: Arc::default() };
        state.requests.insert(id, Known { request, prompt, name, is_drawn, is_admitted: false });
        Ok(None)
    }

    /// A decode leg will not run here: prefill need not keep what its params name. The arguments are those of `add`; the prompt may be made up,
    /// since prefill's is believed if the params tell it. Returns whether prefill is told.
    fn unwanted(
        &self,
        py: Python<'_>,
        request_id: &str,
        prompt: Vec<u32>,
        more: &str,
        params: &Bound<'_, PyDict>,
    ) -> bool {
        let prompt = py.detach(|| Prompt::new(&prompt, more));
        self.let_go(request_id, &prompt, params)
    }

    /// How many tokens beyond the block-aligned local hit a peer provides; always asynchronously.
    fn matched_tokens(&self, request_id: &str, local_tokens: u32) -> u32 {
        let state = self.lock();
        let Some(known) = state.requests.get(&RequestId::new(request_id)) else { return 0 };
        match state.half.matched_tokens(&known.request, local_tokens) {
            Match::Async(tokens) | Match::Sync(tokens) => tokens.get(),
            Match::None | Match::Later => 0,
        }
    }

    /// A request was given blocks; `external_tokens` of its prompt are to be loaded.
    fn allocated(&self, request_id: &str, blocks: Vec<u32>, external_tokens: u32) -> PyResult<()> {
        let mut state = self.lock();
        let State { half, requests, .. } = &mut *state;
        let Some(known) = requests.get_mut(&RequestId::new(request_id)) else { return Ok(()) };
        known.is_admitted = true;
        let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId::new).collect();
        // The engine does not say where its local hit ends, but a load always reaches the prompt's end.
        let local = if external_tokens > 0 { known.request.prompt_tokens.saturating_sub(external_tokens) } else { 0 };
        Ok(half.allocated(&known.request, &blocks, local, external_tokens).map_err(BindingError::from)?)
    }

    /// Requests of which `build_step` must hear when they are scheduled.
    fn unsaved(&self) -> Vec<String> {
        self.lock().half.unsaved().map(ToString::to_string).collect()
    }

    /// What the workers must do in this step: the metadata's bytes, or None if nothing, whether requests lost their blocks, and the requests
    /// that the workers give back to the engine. `scheduled`: id, first and last position + 1 that the step computes, all blocks.
    fn build_step<'py>(
        &self,
        py: Python<'py>,
        scheduled: Vec<(String, u32, u32, Vec<u32>)>,
        preempted: Vec<String>,
    ) -> PyResult<(Option<Bound<'py, PyBytes>>, bool, Vec<String>)> {
        let mut state = self.lock();
        state.preempted(&preempted)?;
        let request = |(id, start, end, blocks): (String, u32, u32, Vec<u32>)| ScheduledRequest {
            id: RequestId::new(&id),
            tokens: start..end,
            blocks: blocks.into_iter().map(BlockId::new).collect(),
        };
        let meta = state.half.build_step(&ScheduledStep { requests: scheduled.into_iter().map(request).collect() });
        let released = std::mem::take(&mut state.released).iter().map(ToString::to_string).collect();
        let has_preempted = !meta.preempted.is_empty();
        if meta.is_empty() && meta.settled.is_empty() {
            return Ok((None, false, released));
        }
        let bytes = meta.to_bytes().map_err(BindingError::from)?;
        Ok((Some(PyBytes::new(py, &bytes)), has_preempted, released))
    }

    /// The engine has finished a request: whether its blocks stay here, and what the router is told. `is_complete`: it ended by itself, not
    /// by an abort or an error.
    fn finished<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        blocks: Vec<u32>,
        is_complete: bool,
    ) -> PyResult<(bool, Option<Bound<'py, PyDict>>)> {
        let mut state = self.lock();
        let id = RequestId::new(request_id);
        let Some(known) = state.requests.remove(&id) else {
            // Whichever sample ends last tells the router, so each says what the first does.
            let other = state.samples.ended(&id).filter(|_| is_complete);
            let answer = |(name, prompt): (String, Prompt)| {
                params::answer(py, &self.engine_id, &name, &state.addresses, &prompt)
            };
            return Ok((false, other.map(answer).transpose()?));
        };
        if !known.is_admitted {
            state.half.unadmitted(&known.request);
            state.samples.spent(&id);
            return Ok((false, None));
        }
        let how = if is_complete { EngineFinish::Complete } else { EngineFinish::Aborted };
        let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId::new).collect();
        let hold = state.half.finished(&id, &blocks, how);
        if matches!(known.request.params, Some(TransferParams::Fetch { .. })) {
            // The engine itself holds the blocks of a load until its workers have reported its end.
            return Ok((false, None));
        }
        let transfer = match &hold {
            Hold::Until { transfer, .. } => *transfer,
            Hold::Free => None,
        };
        let is_offered = is_complete && transfer.is_some();
        if !is_offered {
            state.samples.spent(&id);
        }
        if hold == Hold::Free {
            return Ok((false, None));
        }
        state.held.insert(id, transfer);
        let answer = || params::answer(py, &self.engine_id, &known.name, &state.addresses, &known.prompt);
        Ok((true, is_offered.then(answer).transpose()?))
    }

    /// Takes what the workers reported, one entry a rank; returns requests whose KV nobody takes any more, though the engine still computes
    /// them.
    fn apply(&self, results: Vec<Bound<'_, PyBytes>>) -> PyResult<Vec<String>> {
        let results: Result<Vec<_>, _> =
            results.iter().map(|bytes| StepResults::from_bytes(bytes.as_bytes())).collect();
        let mut state = self.lock();
        let applied = state.half.apply(results.map_err(BindingError::from)?);
        for id in applied.released {
            if state.held.remove(&id).is_some() {
                state.released.push(id);
            }
        }
        Ok(applied.unwanted.iter().map(ToString::to_string).collect())
    }

    /// Whether the engine must go on stepping although it may have nothing to compute.
    fn has_pending(&self) -> bool {
        let state = self.lock();
        state.half.has_pending() || !state.released.is_empty()
    }

    /// Reports of workers about what nobody awaited: late or duplicate, counted and dropped.
    #[getter]
    fn unknown_results(&self) -> u64 {
        self.lock().half.unknown_results()
    }

    fn __repr__(&self) -> String {
        format!("Scheduler(engine {}, {} tokens a block)", self.engine_id, self.tokens_per_block)
    }
}

impl Scheduler {
    fn refuse_what_cannot_be(
        &self,
        request: &str,
        params: &TransferParams,
        max_tokens: u64,
    ) -> Result<(), BindingError> {
        let refuse = |problem: String| Err(BindingError::Params { request: request.to_owned(), problem });
        match params {
            TransferParams::Fetch { .. } if self.role == Role::Prefill => {
                refuse("do_remote_prefill on a kv_producer: write kv_role kv_consumer or kv_both".to_owned())
            }
            TransferParams::Keep { .. } if self.role == Role::Decode => {
                refuse("do_remote_decode on a kv_consumer: write kv_role kv_producer or kv_both".to_owned())
            }
            // What it generated would be written beside the prompt's end while that is being read.
            TransferParams::Keep { .. } if max_tokens > 1 => refuse(format!(
                "do_remote_decode with max_tokens = {max_tokens}: send the prefill leg with max_tokens = 1"
            )),
            _ => Ok(()),
        }
    }

    /// Has prefill told that nobody takes what a leg's params name, unless a request of this engine still loads it.
    fn let_go(&self, request: &str, prompt: &Prompt, said: &Bound<'_, PyDict>) -> bool {
        let Some(params) = params::unwanted(request, said, prompt) else { return false };
        let TransferParams::Fetch { transfer, from, .. } = &params else { return false };
        let mut state = self.lock();
        if state.is_own(from) || state.requests.values().any(|known| known.is_of(*transfer)) {
            return false;
        }
        // Who comes for it later finds nothing at prefill: it is computed.
        state.take(*transfer);
        // An id of its own: the engine may go on with the request.
        let id = RequestId::new(&format!("refused leg of {request}"));
        let refused = Request { id, prompt_tokens: prompt.tokens, params: Some(params), hashes: Arc::default() };
        state.half.unadmitted(&refused);
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn keeps(&self, transfer: TransferId) -> bool {
        matches!(self.request.params, Some(TransferParams::Keep { transfer: own, .. }) if own == transfer)
    }

    fn is_of(&self, transfer: TransferId) -> bool {
        let (Some(TransferParams::Fetch { transfer: own, .. }) | Some(TransferParams::Keep { transfer: own, .. })) =
            &self.request.params
        else {
            return false;
        };
        *own == transfer
    }
}

impl State {
    /// Whether a transfer was not taken part in before.
    fn take(&mut self, transfer: TransferId) -> bool {
        if self.taken.contains(&transfer) {
            return false;
        }
        if self.taken.len() >= REMEMBERED {
            self.taken.pop_front();
        }
        self.taken.push_back(transfer);
        true
    }

    /// Whether some of these addresses are this engine's.
    fn is_own(&self, addresses: &[PeerAddress]) -> bool {
        addresses.iter().any(|address| matches!(address, PeerAddress::Tcp(at) if self.addresses.contains(at)))
    }

    /// Whether a decode leg came to the engine that computes its prompt. What that keeps for the leg is then not kept any longer: the
    /// engine's own prefix cache has it.
    fn is_here(&mut self, transfer: TransferId, from: &[PeerAddress]) -> bool {
        let held = self.held.iter().find(|(_, of)| **of == Some(transfer)).map(|(id, _)| id);
        let held = held.cloned();
        let known = self.requests.values_mut().find(|known| known.keeps(transfer));
        let keeper = held.or_else(|| known.as_ref().map(|known| known.request.id.clone()));
        // One that has no blocks yet is computed like any other request.
        if let Some(waiting) = known.filter(|known| !known.is_admitted) {
            waiting.request.params = None;
        }
        if let Some(keeper) = &keeper {
            self.half.unread(keeper);
        }
        keeper.is_some() || self.is_own(from)
    }

    /// What was kept of them is over. Under an id of our own they are kept anew when they come back; an id that the router gave is spent.
    fn preempted(&mut self, requests: &[String]) -> Result<(), BindingError> {
        if requests.is_empty() {
            return Ok(());
        }
        let ids: Vec<RequestId> = requests.iter().map(|id| RequestId::new(id)).collect();
        for id in &ids {
            let Some(known) = self.requests.get_mut(id).filter(|known| known.is_drawn) else {
                self.samples.spent(id);
                continue;
            };
            if let Some(TransferParams::Keep { transfer, .. }) = &mut known.request.params {
                known.name = params::draw()?;
                *transfer = known.prompt.transfer(&known.name);
                self.samples.renamed(id, &known.name);
            }
        }
        self.half.preempted(&ids);
        Ok(())
    }
}

/// Why a request has no part in a transfer, for a log.
const ANOTHER_SAMPLE: &str = "another sample of its request hands the prompt over";
const AGAIN: &str = "an earlier leg had its part in the transfer";
const COMPUTED_HERE: &str = "its prompt was sent to this same engine for prefill, whose prefix cache has it";

/// Children of one request, which share its params, come together; a router's second try comes within seconds.
const REMEMBERED: usize = 1024;
