//! The worker half beside an engine's model runner.
//!
//! What the engine hears of loads passes a set of those that it awaits: a report about another is counted and dropped, since the engine
//! takes it for a fault of its own and ends.
//!
//! A load that failed is told in one of two ways. Where a prefix of the request is good, be it the engine's own or what landed, by its bad
//! blocks: the engine keeps the prefix in place and goes on behind it. Where nothing is good, by the request itself, in engines that hear of
//! that: vLLM then frees its blocks, just as it does when block 0 is bad, but needs no look at the blocks of all waiting requests. Not for
//! requests with a prefix, since vLLM sets a failed request back to token 0 and frees what it had in its own cache, too. Source: vLLM 0.32
//! `v1/core/sched/scheduler.py`, `_handle_failed_recving`, `_update_requests_with_invalid_blocks`, `_update_waiting_for_remote_kv`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry::contract::{Load, Ready, RequestId, StepMeta, StepResults, Worker as _};
use kvferry::metrics::{Metrics, Side};
use kvferry::open_transport;
use kvferry::pd::{PdWorker, PdWorkerParts, greeting};
use kvferry_kernels::KvDtype;
use kvferry_protocol::layout::{Shard, heads_of};
use kvferry_protocol::manifest::{self, Fingerprint, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::message::Text;
use kvferry_protocol::{BlockId, LayerId};
use kvferry_transport::PeerAddress;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::config::Config;
use crate::error::BindingError;
use crate::facts::{CacheFacts, ModelFacts};
use crate::memory::describe;

/// The half of the connector that stands beside one worker's model. Calls come from the model's thread; bytes move on threads of kvferry's
/// own, and no call but `preempted` and `shutdown` waits for them.
#[pyclass(frozen, module = "kvferry._kvferry")]
#[derive(Debug)]
pub(crate) struct Worker {
    address: SocketAddr,
    order: String,
    metrics: Arc<Metrics>,
    // Before the tensors: its threads end when it is dropped.
    state: Mutex<State>,
    /// Keeps the engine's tensors alive while their memory is registered.
    _tensors: Py<PyAny>,
}

#[derive(Debug)]
struct State {
    worker: PdWorker,
    /// Loads of this step that wait for the engine's word.
    loads: Vec<Load>,
    /// Whether this step computes something that a peer wants.
    saves: bool,
    /// Loads whose end the engine awaits.
    awaited: BTreeMap<RequestId, Awaited>,
    /// Whether the engine hears of failed requests, not of bad blocks only.
    request_failures: bool,
    /// Reports that the engine did not await.
    unknown: u64,
}

/// A load that goes on.
#[derive(Debug)]
struct Awaited {
    /// Where it lands.
    blocks: Vec<BlockId>,
    /// Whether it is all of the request: nothing before it came from the engine's own cache.
    is_whole: bool,
}

/// What one poll brought.
#[pyclass(frozen, get_all, module = "kvferry._kvferry")]
#[derive(Debug)]
pub(crate) struct PollResult {
    /// Requests whose loads ended, well or not; each once.
    received: Vec<String>,
    /// Those of them that miss something, and why.
    failed: Vec<(String, String)>,
    /// Blocks whose KV is missing, of failed requests with a good prefix.
    bad_blocks: BTreeSet<u32>,
    /// Failed requests of which nothing is good; none of their blocks is in `bad_blocks`. Empty where the engine hears of blocks only.
    failed_requests: BTreeSet<String>,
    /// For the scheduler half; None if there is nothing to tell.
    report: Option<Py<PyBytes>>,
}

#[pymethods]
impl Worker {
    /// Registers the engine's tensors in place, opens the transport and starts kvferry's threads. All ranks of one start of an engine have the
    /// same `incarnation`, drawn at random. `tensors` is kept alive until the worker is gone. `request_failures`: the engine hears of failed
    /// requests, not of bad blocks only.
    #[new]
    #[pyo3(signature = (config, *, incarnation, cache, model, tensors, request_failures))]
    fn new(
        py: Python<'_>,
        config: &Config,
        incarnation: u64,
        cache: CacheFacts,
        model: ModelFacts,
        tensors: Py<PyAny>,
        request_failures: bool,
    ) -> PyResult<Self> {
        let started = py.detach(|| start(config, incarnation, &cache, &model))?;
        let Started { worker, metrics, address, order } = started;
        let (loads, awaited) = Default::default();
        let state = Mutex::new(State { worker, loads, saves: false, awaited, request_failures, unknown: 0 });
        Ok(Self { address, order, metrics, state, _tensors: tensors })
    }

    /// Where peers reach it, `IP:port`.
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// The order of its cache's axes in memory.
    #[getter]
    fn layout(&self) -> &str {
        &self.order
    }

    /// Reports that the engine did not await, counted and dropped.
    #[getter]
    fn unknown_results(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().unknown)
    }

    /// Ends the transfers of requests that lost their blocks; returns when nothing reads or writes those any more. Before anything of the step
    /// is written to the cache.
    fn preempted(&self, py: Python<'_>, meta: &Bound<'_, PyBytes>) -> PyResult<()> {
        let meta = meta.as_bytes();
        py.detach(|| {
            let meta = StepMeta::from_bytes(meta).map_err(BindingError::from)?;
            if !meta.preempted.is_empty() {
                self.lock().worker.preempted(&meta.preempted);
            }
            Ok(())
        })
    }

    /// Takes a step's work; its loads wait for `start_loads`. Returns whether the step computes something that a peer wants: only then need
    /// `save_layer` and `wait_saved` be called.
    fn begin_step(&self, py: Python<'_>, meta: &Bound<'_, PyBytes>) -> PyResult<bool> {
        let meta = meta.as_bytes();
        py.detach(|| {
            let mut meta = StepMeta::from_bytes(meta).map_err(BindingError::from)?;
            let mut state = self.lock();
            state.saves = !meta.saves.is_empty();
            let loads = std::mem::take(&mut meta.loads);
            state.loads.extend(loads);
            state.worker.begin_step(meta).map_err(BindingError::from)?;
            Ok(state.saves)
        })
    }

    /// Starts the step's loads.
    fn start_loads(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut state = self.lock();
            let State { worker, loads, awaited, .. } = &mut *state;
            // A load of nothing only tells the peer that it may let go: no request waits for it.
            let waiting = loads.iter().filter(|load| !load.tokens.is_empty());
            awaited.extend(waiting.map(|load| {
                let is_whole = load.tokens.start == 0;
                (load.request.clone(), Awaited { blocks: load.blocks.clone(), is_whole })
            }));
            Ok(worker.begin_loads(std::mem::take(loads)).map_err(BindingError::from)?)
        })
    }

    /// A layer's keys and values of this step's tokens are in the cache; `layer` counts from 0 in the model's order.
    fn save_layer(&self, py: Python<'_>, layer: u16) {
        py.detach(|| self.lock().worker.save_layer(LayerId::new(layer), Ready::Now));
    }

    /// The step is complete: what no `save_layer` told is ready.
    fn wait_saved(&self, py: Python<'_>) {
        py.detach(|| {
            let mut state = self.lock();
            state.saves = false;
            state.worker.wait_saved();
        });
    }

    /// What happened since the last call.
    fn poll(&self, py: Python<'_>) -> PyResult<PollResult> {
        let (polled, report) = py.detach(|| {
            let mut state = self.lock();
            let results = state.worker.poll();
            let report = (!results.is_empty()).then(|| results.to_bytes()).transpose().map_err(BindingError::from)?;
            Ok::<_, PyErr>((state.awaited(results), report))
        })?;
        let report = report.map(|bytes| PyBytes::new(py, &bytes).unbind());
        let Polled { received, failed, bad_blocks, failed_requests } = polled;
        Ok(PollResult { received, failed, bad_blocks, failed_requests, report })
    }

    /// kvferry's counters that the engine's log and metrics show, since the worker's start.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let seen = self.metrics.snapshot();
        let counters = PyDict::new(py);
        for (side, name) in [(Side::Send, "sent"), (Side::Receive, "received")] {
            counters.set_item(format!("{name}_transfers"), *seen.transfers_done_total.get(side))?;
            counters.set_item(format!("{name}_bytes"), *seen.transfer_bytes_total.get(side))?;
            counters.set_item(format!("{name}_cancelled"), *seen.transfers_cancelled_total.get(side))?;
            let failed = seen.transfers_failed_total.iter().filter(|((of, _), _)| *of == side);
            counters.set_item(format!("{name}_failed"), failed.map(|(_, count)| count).sum::<u64>())?;
            counters.set_item(format!("{name}_seconds"), seen.transfer_seconds.get(side).sum_seconds)?;
        }
        counters.set_item("lent_bytes", seen.lent_bytes_total)?;
        counters.set_item("loaded_tokens", seen.loaded_tokens_total)?;
        counters.set_item("digest_mismatches", seen.digest_mismatches_total)?;
        counters.set_item("leases_expired", seen.leases_expired_total)?;
        counters.set_item("sessions_lost", seen.sessions_lost_total)?;
        counters.set_item("peers_refused", seen.peers_refused_total.total())?;
        counters.set_item("messages_dropped", seen.messages_dropped_total.total())?;
        Ok(counters)
    }

    /// All of kvferry's metrics as a Prometheus page.
    fn metrics(&self) -> String {
        self.metrics.prometheus(&[])
    }

    /// Ends all transfers, gives peers up to `grace_seconds` to hear of it, and returns when nothing touches the tensors.
    fn shutdown(&self, py: Python<'_>, grace_seconds: f64) {
        let grace = Duration::try_from_secs_f64(grace_seconds).unwrap_or_default();
        py.detach(|| self.lock().worker.shutdown(grace));
    }

    fn __repr__(&self) -> String {
        format!("Worker({}, {})", self.address, self.order)
    }
}

impl Worker {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the engine is told of loads.
#[derive(Debug, Default)]
struct Polled {
    received: Vec<String>,
    failed: Vec<(String, String)>,
    bad_blocks: BTreeSet<u32>,
    failed_requests: BTreeSet<String>,
}

impl State {
    /// Of what was reported, what the engine awaits.
    fn awaited(&mut self, results: StepResults) -> Polled {
        let mut polled = Polled::default();
        for id in results.loaded {
            match self.awaited.remove(&id) {
                Some(_) => polled.received.push(id.to_string()),
                None => self.unknown += 1,
            }
        }
        for failure in results.failed {
            let Some(Awaited { blocks, is_whole }) = self.awaited.remove(&failure.request) else {
                self.unknown += 1;
                continue;
            };
            // Some are bad: a load that misses nothing is reported as loaded.
            let good = failure.good_blocks.len().min(blocks.len().saturating_sub(1));
            if self.request_failures && is_whole && good == 0 {
                polled.failed_requests.insert(failure.request.to_string());
            } else {
                polled.bad_blocks.extend(blocks[good..].iter().map(|block| block.get()));
            }
            polled.received.push(failure.request.to_string());
            polled.failed.push((failure.request.to_string(), failure.reason));
        }
        polled
    }
}

struct Started {
    worker: PdWorker,
    metrics: Arc<Metrics>,
    address: SocketAddr,
    order: String,
}

fn start(config: &Config, incarnation: u64, cache: &CacheFacts, model: &ModelFacts) -> Result<Started, BindingError> {
    let says_listen = config.says_listen();
    let config = config.of_start(incarnation)?;
    let described = describe(cache)?;
    let order = described.layout.order().to_string();
    let manifest = manifest_of(cache, model, described.dtype)?;
    let heads = heads_of(config.peer().tp_rank, config.tp_size().get(), model.kv_heads);
    let heads = heads.map_err(|error| BindingError::Model { problem: error.to_string() })?;
    let shard = Shard { first_layer: LayerId::new(0), first_head: heads.start };
    let transport = open_transport(&config, greeting(&config, &manifest, shard, &described.layout)?)?;
    let metrics = Arc::new(Metrics::new());
    let peers = config.network().peers.clone();
    let cache = described.registered()?;
    let parts = PdWorkerParts { config, manifest, shard, cache: cache.into(), metrics: Arc::clone(&metrics) };
    let worker = PdWorker::start(parts, transport)?;
    let handle = worker.handle();
    for peer in peers {
        handle.connect(PeerAddress::Tcp(peer))?;
    }
    let address = match worker.local_address() {
        PeerAddress::Tcp(address) => address,
        PeerAddress::Loopback(_) => {
            let problem = "it listens inside this process only; write transport = \"tcp\"".to_owned();
            return Err(BindingError::Connector(kvferry::ConnectorError::Config { key: "transport", problem }));
        }
    };
    if !says_listen {
        tracing::warn!(
            %address,
            "no `listen` in kv_connector_extra_config, so that engines of other hosts cannot reach this one: write one of its IPs, \
             as in \"listen\": \"10.0.0.7:7400\""
        );
    }
    Ok(Started { worker, metrics, address, order })
}

/// What two engines' caches must have in common, in kvferry's words.
fn manifest_of(cache: &CacheFacts, model: &ModelFacts, dtype: KvDtype) -> Result<Manifest, BindingError> {
    let refuse = |problem: String| BindingError::Model { problem };
    let options = model.options.iter().map(|(name, value)| (Text::from(name.as_str()), Text::from(value.as_str())));
    Ok(Manifest {
        model: model.name.as_str().into(),
        model_fingerprint: fingerprint_of(&model.fingerprint)
            .ok_or_else(|| refuse("its fingerprint is not 64 hexadecimal digits".to_owned()))?,
        kv_dtype: match dtype {
            KvDtype::F32 => manifest::KvDtype::F32,
            KvDtype::F16 => manifest::KvDtype::F16,
            KvDtype::Bf16 => manifest::KvDtype::Bf16,
        },
        layers: u16::try_from(cache.layers.len()).map_err(|_| refuse(format!("{} layers", cache.layers.len())))?,
        kv_heads: model.kv_heads,
        head_size_k: cache.head_size_k,
        head_size_v: cache.head_size_v,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Half,
            theta_bits: model.rope_theta.to_bits(),
            rotary_elements: model.rope_elements,
            scaling: model.rope_scaling.as_str().into(),
        },
        scales: Scales { per: ScalePer::None, fingerprint: Fingerprint::default() },
        hash_scheme: "none".into(),
        digest_scheme: "kvferry-1".into(),
        options: Options::new(options.collect()).map_err(|error| refuse(error.to_string()))?,
    })
}

fn fingerprint_of(digits: &str) -> Option<Fingerprint> {
    let mut bytes = [0; 32];
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(Fingerprint(bytes))
}
