//! The worker half of the prefill/decode connector: stands beside the model, moves the bytes on threads of its own.
//!
//! | thread | does | waits for |
//! |---|---|---|
//! | the engine's model thread | calls [`Worker`]; never touches the network | `wait_layer`: the driver |
//! | the transport's | digests what it carries, where it can | the sockets |
//! | driver | owns every transfer's machine | the transport's events; what is sent to it ends that wait |
//! | movers | gather, digest; copy to the tier when nothing else waits | their job queues; a device, if the cache is on one |
//! | keep, bring | calls the tier, which may wait | their queues |
//!
//! Lock order: the board's locks are leaves; no other lock is taken under one.

mod card;
#[cfg(feature = "testing")]
pub mod decoders;
mod device;
mod driver;
mod ended;
mod events;
mod groups;
mod handle;
mod held;
mod in_place;
mod inlet;
mod jobs;
mod keeping;
mod leases;
mod loading;
mod orders;
mod overlap;
mod peers;
mod posting;
mod progress;
mod reading;
mod receiving;
mod returning;
mod sending;
mod slabs;
mod step;
mod tier_threads;
mod unheard;
mod uploading;
mod watching;
mod window;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use kvferry_kernels::HostKvCache;
use kvferry_kernels::device::Stream;
use kvferry_protocol::layout::{KvShape, Shard};
use kvferry_protocol::manifest::Manifest;
use kvferry_protocol::{LayerId, PeerId, TpRank, TransferId};
use kvferry_transport::{PeerAddress, Transport};

use card::card;
pub use card::{Refusal, greeting};
use device::{After, Staging, in_full, lanes};
use driver::{Driver, Memories, Outlets};
use groups::LinkRate;
pub use handle::PdHandle;
use in_place::InPlace;
use inlet::Inlet;
use jobs::JobDone;
use keeping::Keeping;
use orders::Orders;
use progress::Progress;
use slabs::SlabPool;
use step::{Handed, StepProgress};
use tier_threads::{TierAnswer, TierThreads};

use super::caches::{Caches, KvCache};
use crate::config::{ConnectorConfig, Role, SameHost};
use crate::contract::{
    BadStep, Cancel, Load, LoadFailure, Ready, Refuse, RequestId, Restore, Return, Save, StepMeta, StepResults, Store,
    Take, TierResults, Worker,
};
use crate::error::ConnectorError;
use crate::metrics::Metrics;
use crate::tier::{HostTier, Tier};
use crate::trace::{Kind, Span, Tracer};

/// What a worker is made of.
#[derive(Debug)]
pub struct PdWorkerParts {
    /// Limits, deadlines, who speaks first.
    pub config: ConnectorConfig,
    /// What the KV cache is; compared with each peer's, field by field.
    pub manifest: Manifest,
    /// Which layers and heads of the model this worker holds: the heads of its `tp_rank` in `tp_size`.
    pub shard: Shard,
    /// The KV cache: kvferry's own, or the engine's memory.
    pub cache: KvCache,
    /// Counters, shared with whoever exports them.
    pub metrics: Arc<Metrics>,
}

/// The worker half of the prefill/decode connector.
pub struct PdWorker {
    tp_rank: TpRank,
    inputs: Inlet,
    board: Arc<Board>,
    messages: Receiver<(PeerId, Bytes)>,
    step: StepProgress,
    /// What the driver has not answered.
    orders: Orders,
    /// Blocks to keep when the step is complete.
    stores: Vec<Store>,
    returns: Vec<Return>,
    wakes: Receiver<()>,
    transport: Arc<dyn Transport>,
    /// The cache, if peers' blocks may be read in place of its own.
    aliasing: Option<HostKvCache>,
    /// What was read in place and is not what it was, until the engine hears of it.
    withdrawn: Vec<LoadFailure>,
    /// Where the engine computes, if its cache is on a device.
    stream: Option<Arc<dyn Stream>>,
    /// Until it was shut down.
    driver: Option<JoinHandle<()>>,
}

/// What the driver tells the engine's threads.
#[derive(Debug)]
struct Board {
    progress: Progress,
    results: Mutex<StepResults>,
    /// The dialled addresses with a session.
    reached: Mutex<BTreeSet<PeerAddress>>,
    metrics: Arc<Metrics>,
    /// What is read in place.
    in_place: InPlace,
    /// What writes take on the link.
    link: Mutex<LinkRate>,
    tracer: Tracer,
}

impl Board {
    /// What the model thread will be told at its next poll.
    fn results(&self) -> MutexGuard<'_, StepResults> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self) -> MutexGuard<'_, LinkRate> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reached(&self) -> MutexGuard<'_, BTreeSet<PeerAddress>> {
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the driver is told.
#[derive(Debug)]
enum Input {
    Command(Command),
    Job(JobDone),
    Tier(TierAnswer),
}

/// What the model thread asks for.
#[derive(Debug)]
enum Command {
    /// Start a load.
    Load(Load, Result<After, String>),
    /// A request whose KV a peer wants is being computed: hold its blocks for the transfer.
    Lease(Save),
    /// Part of its KV is in the cache, or will be.
    Computed(Handed, Result<After, String>),
    /// End a transfer.
    Cancel(Cancel),
    /// Copy complete blocks to the tier, when there is time.
    Keep(Vec<Store>),
    /// Bring blocks from the tier.
    Restore(Restore),
    /// Requests are over: their blocks are kept soon, or not.
    Hurry(Vec<RequestId>),
    /// Send complete blocks of answers back.
    Return(Vec<Return>, Result<After, String>),
    /// Take a peer's blocks into the tier.
    Take(Take),
    /// Say that they are not wanted.
    Refuse(Refuse),
    /// End the transfers of some requests and say when nothing touches their pages.
    Preempt(Vec<RequestId>, Sender<()>),
    /// Ask back what peers hold in place.
    Recall,
    /// Reach a peer ahead of requests.
    Connect(PeerAddress),
    /// Carry bytes to a peer's engine.
    Message(PeerId, Bytes),
    /// Refuse what a peer asked this engine for.
    Decline(PeerId, TransferId, String),
    /// End everything; say when nothing touches the caches, or when the time is up.
    Shutdown(Duration, Sender<()>),
}

impl PdWorker {
    /// Registers the cache with the transport and starts the worker's threads. The transport's greeting must be
    /// [`greeting`] of the same manifest, shard and layout.
    ///
    /// # Errors
    /// [`ConnectorError::Caches`] if the cache does not fit the manifest, [`ConnectorError::Transport`] if its memory cannot be
    /// registered.
    pub fn start(parts: PdWorkerParts, transport: Arc<dyn Transport>) -> Result<Self, ConnectorError> {
        Self::start_traced(parts, transport, Tracer::off())
    }

    /// The same as [`PdWorker::start`], and records what happens into a timeline.
    ///
    /// # Errors
    /// Those of [`PdWorker::start`].
    pub fn start_traced(
        parts: PdWorkerParts,
        transport: Arc<dyn Transport>,
        tracer: Tracer,
    ) -> Result<Self, ConnectorError> {
        let tier: Option<Arc<dyn Tier>> = match parts.config.limits().tier_bytes {
            0 => None,
            bytes => Some(Arc::new(HostTier::new(parts.cache.layout(), bytes).map_err(|error| {
                let problem = format!("tier_bytes = {bytes} cannot be had: {error}");
                ConnectorError::Caches { problem }
            })?)),
        };
        Self::launch(parts, transport, tier, tracer)
    }

    /// The same with another tier than `tier_bytes` asks for, or none.
    ///
    /// # Errors
    /// As [`PdWorker::start`], and [`ConnectorError::Caches`] if the tier's memory has another shape than the cache.
    pub fn start_with_tier(
        parts: PdWorkerParts,
        transport: Arc<dyn Transport>,
        tier: Option<Arc<dyn Tier>>,
    ) -> Result<Self, ConnectorError> {
        Self::launch(parts, transport, tier, Tracer::off())
    }

    fn launch(
        parts: PdWorkerParts,
        transport: Arc<dyn Transport>,
        tier: Option<Arc<dyn Tier>>,
        tracer: Tracer,
    ) -> Result<Self, ConnectorError> {
        let card = card(&parts.config, &parts.manifest, parts.shard, parts.cache.layout())?;
        let limits = parts.config.limits();
        if parts.cache.device().is_some() && tier.is_some() {
            let problem = "a tier cannot be filled from a device's memory yet; write tier_bytes = 0".to_owned();
            return Err(ConnectorError::Caches { problem });
        }
        let caches = Caches::new(parts.cache.clone(), parts.shard);
        check_in_place(&parts.config, &caches)?;
        let staging = Staging::new(&parts.cache, parts.shard, limits, &*transport)?;
        let regions = crate::raw::register(&*transport, &parts.cache, 0)?;
        if let Some(tier) = &tier {
            // A peer's blocks land in it directly.
            crate::raw::register(&*transport, &tier.memory().clone().into(), regions)?;
        }
        let slabs = SlabPool::of(limits, &parts.cache, &*transport)?;
        let lanes = parts.cache.device().map_or_else(|| Ok(Vec::new()), |cache| lanes(cache, limits))?;
        let stream = parts.cache.device().map(|cache| Arc::clone(cache.stream()));
        let tp_rank = parts.config.peer().tp_rank;
        let aliasing = match &parts.cache {
            KvCache::Host(cache) if parts.config.network().same_host == SameHost::InPlace => Some(cache.clone()),
            _ => None,
        };
        let board = Arc::new(Board {
            progress: Progress::default(),
            results: Mutex::new(StepResults::empty(tp_rank)),
            reached: Mutex::default(),
            metrics: parts.metrics,
            in_place: InPlace::default(),
            link: Mutex::new(LinkRate::new(parts.config.network().link_gbps)),
            tracer,
        });
        let (inputs, inbox) = Inlet::new(INPUTS, &transport);
        let (messages_out, messages) = bounded(MESSAGES);
        let (wake, wakes) = bounded(1);
        let step = StepProgress::new(&caches, parts.config.layer_group().map(std::num::NonZero::get));
        let keeping = tier.map(|tier| keeping(tier, &caches, &inputs)).transpose()?;
        let driver = Driver::new(
            parts.config,
            Memories { caches, keeping, slabs, staging, lanes },
            card,
            Arc::clone(&transport),
            Arc::clone(&board),
            Outlets { inputs: &inputs, wake, messages: messages_out },
        );
        let end = CloseAtEnd(Arc::clone(&board));
        let body = move || {
            let _end = end;
            driver.run(inbox);
        };
        let thread = std::thread::Builder::new().name("kvferry-driver".into()).spawn(body);
        let driver = thread.map_err(|source| ConnectorError::Thread { source })?;
        Ok(Self {
            tp_rank,
            inputs,
            board,
            messages,
            step,
            orders: Orders::default(),
            stores: Vec::new(),
            returns: Vec::new(),
            wakes,
            transport,
            aliasing,
            withdrawn: Vec::new(),
            stream,
            driver: Some(driver),
        })
    }

    /// A handle for the engine's other threads.
    #[must_use]
    pub fn handle(&self) -> PdHandle {
        PdHandle { inputs: self.inputs.clone(), board: Arc::clone(&self.board) }
    }

    /// What peers' engines said to this one, in order. What nobody takes waits, within a limit for each peer; a peer that goes on
    /// all the same is cut, which ends or repeats its loads, and what it said is dropped and counted.
    #[must_use]
    pub const fn messages(&self) -> &Receiver<(PeerId, Bytes)> {
        &self.messages
    }

    /// Says that a peer waits for what only a step can give, also an empty one: an engine that sleeps while it has nothing to do
    /// takes one when it hears this.
    #[must_use]
    pub const fn wakes(&self) -> &Receiver<()> {
        &self.wakes
    }

    /// Where peers reach this worker.
    #[must_use]
    pub fn local_address(&self) -> PeerAddress {
        self.transport.local_address()
    }

    fn command(&self, command: Command) -> Result<(), ConnectorError> {
        self.inputs.send(Input::Command(command)).map_err(|_| ConnectorError::Ended)
    }

    /// What the last step completed goes to the tier, or back; after what a peer waits for.
    fn hand_over_blocks(&mut self) {
        let (stores, mut returns) = (std::mem::take(&mut self.stores), std::mem::take(&mut self.returns));
        if !returns.is_empty() {
            // What was computed with memory that its owner gave up goes nowhere.
            self.settle_in_place(&[]);
            let is_void = |one: &mut Return| self.withdrawn.iter().any(|failure| failure.request == one.request);
            let void = returns.extract_if(.., is_void).map(|one| one.transfer);
            self.board.results().tier.returned.extend(void);
        }
        // Fails only when the driver has ended, and then nothing reads the blocks.
        if !stores.is_empty() {
            let _ = self.command(Command::Keep(stores));
        }
        if !returns.is_empty() {
            let _ = self.command(Command::Return(returns, self.mark()));
        }
    }

    /// Marks what the engine has queued on its device so far; nothing, if there is no device.
    fn mark(&self) -> Result<After, String> {
        let event = self.stream.as_ref().map(|stream| stream.record()).transpose();
        event.map_err(|error| in_full(&error))
    }

    /// Hands over parts of KV that are in the cache when the engine's queue is where it is now, or already.
    fn hand_over(&self, ready: Vec<Handed>, queued: bool) -> Result<(), ConnectorError> {
        if ready.is_empty() {
            return Ok(());
        }
        let after = if queued { self.mark() } else { Ok(None) };
        ready.into_iter().try_for_each(|handed| self.command(Command::Computed(handed, after.clone())))
    }

    /// Has the engine's device wait for what is on its way to a layer; `false` if it cannot.
    fn queue_behind(&self, request: &RequestId, layer: usize) -> bool {
        let Some(stream) = &self.stream else { return true };
        let events = self.board.progress.events(request, layer);
        let queued = events.iter().try_for_each(|event| stream.wait(&**event));
        if let Err(error) = &queued {
            tracing::error!(%request, error = in_full(error), "the device does not wait for a layer");
        }
        queued.is_ok()
    }

    fn ask(&self, command: impl FnOnce(Sender<()>) -> Command) {
        let (done, wait) = bounded(1);
        if self.command(command(done)).is_ok() {
            // The driver answers, or drops the sender because it ended: both mean that nothing touches the pages.
            let _ = wait.recv();
        }
    }
}

impl Worker for PdWorker {
    fn begin_step(&mut self, meta: StepMeta) -> Result<(), ConnectorError> {
        if meta.version != StepMeta::VERSION {
            return Err(BadStep { found: meta.version }.into());
        }
        // Before anybody writes into these blocks, or reads them.
        self.settle_in_place(&meta.finished);
        if meta.recall {
            self.command(Command::Recall)?;
        }
        // Of a step whose end was not told.
        self.hand_over_blocks();
        self.step.begin(&meta);
        self.orders.given(&meta);
        meta.settled.iter().for_each(|request| self.board.progress.forget(request));
        self.begin_loads(meta.loads)?;
        let ready = self.step.ready_before(&meta.saves);
        for save in meta.saves {
            self.command(Command::Lease(save))?;
        }
        self.hand_over(ready, true)?;
        for restore in meta.tier.restores {
            self.command(Command::Restore(restore))?;
        }
        if !meta.tier.hurried.is_empty() {
            self.command(Command::Hurry(meta.tier.hurried))?;
        }
        for take in meta.tier.takes {
            self.command(Command::Take(take))?;
        }
        for refuse in meta.tier.refusals {
            self.command(Command::Refuse(refuse))?;
        }
        self.stores.extend(meta.tier.stores);
        self.returns.extend(meta.tier.returns);
        for cancel in meta.cancels {
            self.command(Command::Cancel(cancel))?;
        }
        Ok(())
    }

    fn begin_loads(&mut self, loads: Vec<Load>) -> Result<(), ConnectorError> {
        // Known to `wait_layer` from here on, whenever the driver gets to it, and to `poll` if it never does.
        loads.iter().for_each(|load| self.board.progress.begin(&load.request, self.step.layers()));
        if self.board.progress.is_closed() {
            return Err(ConnectorError::Ended);
        }
        if loads.is_empty() {
            return Ok(());
        }
        // The pages may be somebody's whose last kernel has not run.
        let after = self.mark();
        loads.into_iter().try_for_each(|load| self.command(Command::Load(load, after.clone())))
    }

    fn wait_layer(&mut self, layer: LayerId) -> Vec<RequestId> {
        let Some(local) = self.step.local_layer(layer) else { return Vec::new() };
        let mut failed = Vec::new();
        let mut exposed = Duration::ZERO;
        for request in self.step.reading() {
            let began = self.board.tracer.start();
            let (ready, waited) = self.board.progress.wait(request, local);
            exposed += waited;
            if let Some(began) = began.filter(|_| waited >= LEAST_WAIT) {
                self.board.tracer.record(|| Span::since(began, Kind::Wait).request(request));
            }
            if !ready || !self.queue_behind(request, local) {
                failed.push(request.clone());
            }
        }
        self.step.waited(exposed);
        failed
    }

    fn save_layer(&mut self, layer: LayerId, ready: Ready) {
        let queued = ready == Ready::Queued;
        let ready = self.step.layer_saved(layer, || *self.board.link());
        self.step.draw_layers(&self.board.tracer, &ready);
        // Fails only when the driver has ended, and then nobody waits for the bytes.
        let _ = self.hand_over(ready, queued);
    }

    fn wait_saved(&mut self) {
        let ready = self.step.all_saved();
        if let Some(exposed) = self.step.take_waited() {
            self.board.metrics.exposed_wait_seconds.observe(exposed);
        }
        self.step.draw_layers(&self.board.tracer, &ready);
        self.step.draw_step(&self.board.tracer);
        let _ = self.hand_over(ready, true);
        self.hand_over_blocks();
    }

    fn poll(&mut self) -> StepResults {
        // Asked first: what a driver said before it went is among the results then.
        let is_closed = self.board.progress.is_closed();
        let mut results = self.board.results();
        let mut taken = std::mem::replace(&mut *results, StepResults::empty(self.tp_rank));
        drop(results);
        // After the results were taken: what a failed load read in place ends before the engine hears of the failure.
        self.settle_in_place(&[]);
        taken.withdrawn.append(&mut self.withdrawn);
        self.step.ended(&taken.sent);
        self.orders.answered(&taken);
        if is_closed {
            // The transport is shut, so nothing touches the pages of what the driver left behind.
            let reason = ConnectorError::Ended.to_string();
            taken.failed.extend(self.board.progress.abandoned().into_iter().map(|request| LoadFailure {
                request,
                good_tokens: 0,
                good_blocks: Vec::new(),
                reason: reason.clone(),
            }));
            let mut sent = self.orders.abandoned_keeps();
            sent.extend(self.step.abandoned());
            taken.sent.extend(sent);
            let TierResults { kept, restored, returned, .. } = self.orders.abandoned(&reason);
            taken.tier.kept.extend(kept);
            taken.tier.restored.extend(restored);
            taken.tier.returned.extend(returned);
        }
        taken
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        let requests = requests.to_vec();
        let (done, wait) = bounded(1);
        if self.command(Command::Preempt(requests.clone(), done)).is_ok() {
            // Peers that wait in the same way may wait for what this side reads in place of theirs.
            while wait.recv_timeout(SETTLE_EVERY) == Err(RecvTimeoutError::Timeout) {
                self.settle_in_place(&[]);
            }
        }
        if let Some(cache) = &self.aliasing {
            self.board.in_place.finished(cache, &requests);
        }
    }

    fn shutdown(&mut self, grace: Duration) {
        let Some(driver) = self.driver.take() else { return };
        if let Some(cache) = &self.aliasing {
            self.board.in_place.end_all(cache);
        }
        self.ask(|done| Command::Shutdown(grace, done));
        self.transport.shutdown();
        if driver.join().is_err() {
            tracing::error!("a thread of the connector panicked");
        }
        // What was verified meanwhile.
        if let Some(cache) = &self.aliasing {
            self.board.in_place.end_all(cache);
        }
    }
}

/// Who lends its blocks in place has them where peers can map them.
fn check_in_place(config: &ConnectorConfig, caches: &Caches) -> Result<(), ConnectorError> {
    let lends = config.network().same_host == SameHost::InPlace && config.role() != Role::Decode;
    if lends && !caches.is_mappable() {
        let problem = "same_host = \"in-place\", but peers cannot map it; allocate it as memory files \
                       (HostKvCache::shareable), or write copy"
            .to_owned();
        return Err(ConnectorError::Caches { problem });
    }
    Ok(())
}

/// A tier beside a cache, and its threads.
fn keeping(tier: Arc<dyn Tier>, caches: &Caches, inputs: &Inlet) -> Result<Keeping, ConnectorError> {
    let memory = Caches::new(tier.memory().clone().into(), caches.shard());
    let (ours, theirs) = (caches.layout().shape(), memory.layout().shape());
    let alike = KvShape { blocks: theirs.blocks, ..ours.clone() };
    if *theirs != alike {
        let problem = format!("the tier's memory is {theirs:?}, but the cache is {ours:?}; only the blocks may differ");
        return Err(ConnectorError::Caches { problem });
    }
    let threads = TierThreads::start(&tier, inputs)?;
    Ok(Keeping::new(tier, threads, memory))
}

/// Tells the model thread that nothing will land any more, however the driver's thread ends.
struct CloseAtEnd(Arc<Board>);

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        self.0.progress.close();
    }
}

impl fmt::Debug for PdWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PdWorker(tp_rank {}, {})", self.tp_rank, self.transport.name())
    }
}

impl Drop for PdWorker {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

/// Inputs that wait for the driver; a full channel makes the model thread wait for it.
const INPUTS: usize = 1024;
/// Messages of peers' engines that wait for this engine, of at most 1 MiB each.
const MESSAGES: usize = 256;
/// How often who waits for peers to let go of blocks lets go of theirs.
const SETTLE_EVERY: Duration = Duration::from_millis(5);
/// A shorter wait for a layer is a look-up: it is not drawn in a timeline.
const LEAST_WAIT: Duration = Duration::from_micros(20);
