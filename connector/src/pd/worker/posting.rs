//! Writes between their machine and the transport: planned, waiting for a slab, with a mover, waiting for room, posted.
//!
//! Each stage is bounded: slabs by their pool, movers by their queue, posts by the transport. What does not fit waits here in
//! the order in which the machines asked.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_kernels::copy::WindowDigests;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::CopyPlan;
use kvferry_protocol::message::{Verdict, Wrote};
use kvferry_protocol::transfer::{PostOutcome, Rect};
use kvferry_protocol::{BlockId, Generation, PeerId, TransferId, codec};
use kvferry_transport::{GrantKey, PostId, Source, TransportError, Write};

use super::device::Shipment;
use super::driver::{Driver, Side};
use super::held::HeldPosts;
use super::jobs::{Job, JobDone, TierJob, WriteKey};
use super::slabs::{PooledSlab, SlabPool};
use super::watching::LeavingDigest;
use crate::config::Limits;
use crate::metrics;
use crate::trace::{Kind, Span};

/// All writes that have not ended.
#[derive(Debug)]
pub(super) struct Posting {
    slabs: Arc<SlabPool>,
    packed_run_bytes: Option<u64>,
    writes: BTreeMap<WriteKey, Pending>,
    /// Jobs that wait for a slab or for room in the movers' queue.
    jobs: VecDeque<Waiting>,
    /// Those that wait until none of these is left: what goes back to a peer's tier.
    later: VecDeque<Waiting>,
    /// Writes that wait for room in the transport.
    ready: VecDeque<Ready>,
    posted: BTreeMap<PostId, Posted>,
    /// Those that peers read where they lie, until they ended.
    pub(super) held: HeldPosts,
    /// When each peer's link was last seen to have brought a write across.
    link_free: BTreeMap<PeerId, Instant>,
}

/// Where a write goes, from its plan to its end.
#[derive(Debug)]
struct Pending {
    peer: PeerId,
    key: GrantKey,
    rect: Rect,
    bytes: u64,
    /// The receiver reads it where it lies.
    in_place: bool,
    cancelled: bool,
    /// What a device gathered, while the transport reads it.
    slab: Option<PooledSlab>,
}

/// A write that the transport has.
#[derive(Debug)]
struct Posted {
    write: WriteKey,
    at: Instant,
}

/// A write that is ready to be posted; what is digested on its way out has a watch.
#[derive(Debug)]
struct Ready {
    write: WriteKey,
    request: Write,
    watch: Option<Arc<LeavingDigest>>,
}

/// What became of a write that was ready.
enum HandedOver {
    /// It is posted, or it ended.
    Ended,
    /// It waits until its peer lets go of something.
    PeerIsFull(Ready),
    /// It waits for room, as all others.
    Full(Ready),
}

#[derive(Debug)]
enum Waiting {
    /// Is digested on its way out, and goes straight to the transport.
    Direct {
        write: WriteKey,
        plan: CopyPlan,
        watch: Arc<LeavingDigest>,
    },
    Prepare {
        write: WriteKey,
        plan: CopyPlan,
        pack: bool,
        blocks: Vec<BlockId>,
    },
    /// Needs no slab.
    Ready(Job),
}

impl Posting {
    pub(super) fn new(limits: &Limits, slabs: Arc<SlabPool>) -> Self {
        Self {
            slabs,
            packed_run_bytes: limits.packed_run_bytes,
            writes: BTreeMap::new(),
            jobs: VecDeque::new(),
            later: VecDeque::new(),
            ready: VecDeque::new(),
            posted: BTreeMap::new(),
            held: HeldPosts::default(),
            link_free: BTreeMap::new(),
        }
    }

    /// A write that the transport has, and when it got it; it is not waited for any more.
    pub(super) fn take_posted(&mut self, post: PostId) -> Option<(WriteKey, Instant)> {
        self.posted.remove(&post).map(|Posted { write, at }| (write, at))
    }

    /// How long a write that was posted `at` and has ended occupied its peer's link: writes to a peer go one after another, so it
    /// had the link from its post, or from the end of the one before it.
    fn occupied(&mut self, peer: &PeerId, at: Instant) -> Duration {
        let now = Instant::now();
        let from = self.link_free.get(peer).map_or(at, |&free| free.max(at));
        match self.posted.is_empty() {
            // The next write begins after this moment, and peers that are gone are forgotten.
            true => self.link_free.clear(),
            false => drop(self.link_free.insert(peer.clone(), now)),
        }
        now.saturating_duration_since(from)
    }

    /// Whether transfers have work that a mover could do: what waits for a slab waits for the link, and keeps no mover busy.
    pub(super) fn has_jobs(&self) -> bool {
        match self.jobs.front() {
            Some(Waiting::Prepare { pack: true, .. }) => self.slabs.has_free(),
            Some(_) => true,
            None => false,
        }
    }

    /// A block is to be copied from the tier: a request waits for it, but others wait longer.
    pub(super) fn tier_job(&mut self, job: TierJob) {
        self.jobs.push_back(Waiting::Ready(Job::Tier(job)));
    }

    /// Memory of the slabs that are out, and of all, in bytes.
    pub(super) fn slab_bytes(&self) -> (u64, u64) {
        let (used, limit, each) = self.slabs.usage();
        ((used * each) as u64, (limit * each) as u64)
    }
}

impl Driver {
    /// A machine wants a rectangle written.
    pub(super) fn post(&mut self, transfer: TransferId, generation: Generation, sequence: u32, rect: Rect) {
        let write = WriteKey { transfer, generation, sequence };
        let Some(entry) = self.sending.get(&transfer) else { return };
        let planned = entry.plan(&self.caches, generation, rect);
        let (peer, (key, plan)) = match (entry.peer.clone(), planned) {
            (Some(peer), Ok((window, plan))) => (peer, (window.key, plan)),
            (_, Err(problem)) => {
                return self.lost(write, &format!("{rect} cannot be planned: {problem}"));
            }
            (None, _) => return self.posted(write, PostOutcome::Lost),
        };
        let (blocks, returns) = (entry.blocks.clone(), entry.returns);
        let direct = || self.transport.direct_run_bytes(&peer);
        let threshold = self.posting.packed_run_bytes.unwrap_or_else(direct);
        let in_place = self.transport.is_in_place(&peer, key);
        if in_place && (returns || self.caches.device().is_some()) {
            return self.lost(write, "the receiver wants to read in place what is not handed over so");
        }
        // What is packed would be held in a slab, of which there are few.
        let pack = self.caches.device().is_some() || (!in_place && plan.run_bytes_min() < threshold);
        let bytes = plan.bytes();
        let is_cheap =
            || plan.run_bytes_min() >= WindowDigests::MIN_STRETCH_BYTES || plan.runs() <= WindowDigests::FEW_STRETCHES;
        let is_watched = !pack && is_cheap() && self.transport.watches(&peer);
        let watch = is_watched.then(|| self.leaving(write, rect, &peer, &plan)).flatten();
        self.posting.writes.insert(write, Pending { peer, key, rect, bytes, in_place, cancelled: false, slab: None });
        let queue = if returns { &mut self.posting.later } else { &mut self.posting.jobs };
        queue.push_back(match watch {
            Some(watch) => Waiting::Direct { write, plan, watch: Arc::new(watch) },
            None => Waiting::Prepare { write, plan, pack, blocks },
        });
    }

    /// What digests a write on its way out; `None` if that cannot be.
    fn leaving(&self, write: WriteKey, rect: Rect, peer: &PeerId, plan: &CopyPlan) -> Option<LeavingDigest> {
        let WriteKey { transfer, generation, sequence } = write;
        let entry = self.sending.get(&transfer)?;
        let window = entry.window(generation, rect)?;
        let wrote = Wrote { transfer, generation, sequence, rect, digest: Digest::ZERO };
        let told = (wrote, self.peers.version(peer)?);
        LeavingDigest::new(&self.caches, &window.shape, &entry.blocks, plan, told, &self.board.tracer)
    }

    /// Something landed and wants its digest.
    pub(super) fn verify(&mut self, job: Job) {
        // Verification frees the sender's memory and makes layers visible: it goes before what is to be sent.
        self.posting.jobs.push_front(Waiting::Ready(job));
    }

    /// Moves writes on, as far as slabs, movers and transport have room.
    pub(super) fn push_posts(&mut self) {
        while let Some(waiting) = self.posting.jobs.pop_front() {
            if let Some(waiting) = self.submit(waiting) {
                self.posting.jobs.push_front(waiting);
                self.board.metrics.slab_waits_total.add(1);
                break;
            }
        }
        while self.posting.jobs.is_empty()
            && let Some(waiting) = self.posting.later.pop_front()
        {
            if let Some(waiting) = self.submit(waiting) {
                self.posting.later.push_front(waiting);
                break;
            }
        }
        let mut later = VecDeque::new();
        while let Some(ready) = self.posting.ready.pop_front() {
            match self.hand_over(ready) {
                HandedOver::Ended => {}
                // Nobody else waits for this peer.
                HandedOver::PeerIsFull(ready) => later.push_back(ready),
                HandedOver::Full(ready) => {
                    later.push_back(ready);
                    break;
                }
            }
        }
        later.append(&mut self.posting.ready);
        self.posting.ready = later;
    }

    /// Hands a job to the movers; gives back what must wait for a slab or for room.
    fn submit(&mut self, waiting: Waiting) -> Option<Waiting> {
        let (write, plan, pack, blocks) = match waiting {
            Waiting::Ready(job) => return self.movers.submit(job).map(Waiting::Ready),
            Waiting::Direct { write, plan, watch } => {
                self.direct(write, &plan, watch);
                return None;
            }
            Waiting::Prepare { write, plan, pack, blocks } => (write, plan, pack, blocks),
        };
        if self.posting.writes.get(&write).is_none_or(|pending| pending.cancelled) {
            self.posted(write, PostOutcome::Lost);
            return None;
        }
        let slab = if pack {
            let bytes = usize::try_from(plan.bytes()).unwrap_or(usize::MAX);
            match self.posting.slabs.take(bytes) {
                Some(slab) => Some(slab),
                None => return Some(Waiting::Prepare { write, plan, pack, blocks }),
            }
        } else {
            None
        };
        let job = match slab {
            Some(slab) if self.caches.device().is_some() => match self.shipment(write, plan, slab, blocks) {
                Some(shipment) => Job::Ship(shipment),
                None => {
                    self.posted(write, PostOutcome::Lost);
                    return None;
                }
            },
            slab => Job::Prepare { write, plan, slab, blocks },
        };
        self.movers.submit(job).map(|job| match job {
            Job::Prepare { write, plan, blocks, .. } | Job::Ship(Shipment { write, plan, blocks, .. }) => {
                Waiting::Prepare { write, plan, pack, blocks }
            }
            job => Waiting::Ready(job),
        })
    }

    /// A write out of a device's cache; `None` if its grant is gone.
    fn shipment(&self, write: WriteKey, plan: CopyPlan, slab: PooledSlab, blocks: Vec<BlockId>) -> Option<Shipment> {
        let entry = self.sending.get(&write.transfer)?;
        let rect = self.posting.writes.get(&write)?.rect;
        let window = entry.window(write.generation, rect)?.shape.clone();
        Some(Shipment { write, plan, slab, blocks, window, after: entry.after(rect) })
    }

    /// Posts a write that is digested on its way out.
    fn direct(&mut self, write: WriteKey, plan: &CopyPlan, watch: Arc<LeavingDigest>) {
        let Some(pending) = self.posting.writes.get(&write).filter(|pending| !pending.cancelled) else {
            return self.posted(write, PostOutcome::Lost);
        };
        match plan.window_extents() {
            Ok(extents) => {
                let (grant, sequence) = (pending.key, write.sequence);
                let (source, notification) = (Source::Pages(plan.source_pages()), bytes::Bytes::new());
                let request = Write { grant, sequence, extents, source, notification };
                self.posting.ready.push_back(Ready { write, request, watch: Some(watch) });
            }
            Err(problem) => self.lost(write, &format!("a write cannot be made: {problem}")),
        }
    }

    pub(super) fn job_done(&mut self, done: JobDone) {
        match done {
            JobDone::Prepared { write, plan, slab, digest } => self.prepared(write, &plan, slab, digest),
            JobDone::Looked { look, found } => self.looked(look, found),
            JobDone::Verified { write, digest } => self.digested(write, digest),
            JobDone::Uploading { write, rect, begun } => self.uploading(write, rect, begun),
            JobDone::Uploaded { write, ended } => self.uploaded(write, ended),
            JobDone::VerifiedTaken { write, digest } => self.taken_digested(write, digest),
            JobDone::Tier { job, digest } => self.tier_job_done(&job, digest),
        }
    }

    fn prepared(&mut self, write: WriteKey, plan: &CopyPlan, slab: Option<PooledSlab>, digest: Result<Digest, String>) {
        let on_device = self.caches.device().is_some();
        let Some(pending) = self.posting.writes.get_mut(&write) else { return };
        if pending.cancelled {
            return self.posted(write, PostOutcome::Lost);
        }
        let Some(version) = self.peers.version(&pending.peer) else {
            // The session's end is on its way.
            return self.posted(write, PostOutcome::Lost);
        };
        let slab = if on_device {
            // The plan is from the slab, as from pages, which must stay as it is until the post ended.
            pending.slab = slab;
            None
        } else {
            slab
        };
        match make_write(write, version, pending, plan, slab, digest) {
            Ok(request) => self.posting.ready.push_back(Ready { write, request, watch: None }),
            Err(problem) => self.lost(write, &format!("a write cannot be made: {problem}")),
        }
    }

    /// Posts one write.
    fn hand_over(&mut self, ready: Ready) -> HandedOver {
        let Ready { write, request, watch } = ready;
        let Some(pending) = self.posting.writes.get(&write) else { return HandedOver::Ended };
        if pending.cancelled {
            self.posted(write, PostOutcome::Lost);
            return HandedOver::Ended;
        }
        // Before the call: its end may be reported before it returns.
        let at = Instant::now();
        let (peer, in_place) = (pending.peer.clone(), pending.in_place);
        let posted = match &watch {
            Some(watch) => self.transport.post_watched(&pending.peer, request, Arc::clone(watch) as _),
            None => self.transport.post(&pending.peer, request),
        };
        match posted {
            Ok(post) => {
                if in_place {
                    self.hold(post, peer, write);
                }
                self.posting.posted.insert(post, Posted { write, at });
            }
            Err(error) => match error.reason {
                // Full: each post that ends makes room, and wakes the driver.
                TransportError::Limit { .. } if !self.posting.posted.is_empty() => {
                    return HandedOver::Full(Ready { write, request: error.write, watch });
                }
                // The same where peers hold so much: the end of a post is an event, too.
                TransportError::Limit { what, .. }
                    if in_place && self.recall_for(&peer, what == TransportError::HELD_BYTES) =>
                {
                    return HandedOver::PeerIsFull(Ready { write, request: error.write, watch });
                }
                // The session's end is on its way.
                TransportError::NotConnected { .. } => self.posted(write, PostOutcome::Lost),
                reason => self.lost(write, &format!("a write was not posted: {reason}")),
            },
        }
        HandedOver::Ended
    }

    /// The transport ended a post.
    pub(super) fn post_ended(&mut self, post: PostId, outcome: Result<(), TransportError>) {
        self.hold_ended(post);
        let Some((write, at)) = self.posting.take_posted(post) else { return };
        let outcome = match outcome {
            Ok(()) => {
                self.shipped(write, at);
                PostOutcome::Taken
            }
            // Nothing else will tell the receiver: the session goes on.
            Err(error @ TransportError::Refused { .. }) => return self.lost(write, &error.to_string()),
            Err(error) => {
                tracing::debug!(transfer = %write.transfer, %error, "write was lost");
                PostOutcome::Lost
            }
        };
        self.posted(write, outcome);
    }

    /// A write that was posted `at` is with the receiver.
    pub(super) fn shipped(&mut self, write: WriteKey, at: Instant) {
        let Some(pending) = self.posting.writes.get(&write) else { return };
        let (peer, rect, bytes) = (pending.peer.clone(), pending.rect, pending.bytes);
        let took = self.posting.occupied(&peer, at);
        self.board.link().observe(bytes, took);
        if let Some(entry) = self.sending.get_mut(&write.transfer) {
            entry.overlap.shipped(took, bytes);
        }
        self.board.metrics.transfer_bytes_total.at(metrics::Side::Send).add(bytes);
        self.board.metrics.chunks_total.at(metrics::Side::Send).add(1);
        let WriteKey { transfer, generation, sequence } = write;
        let span = || Span::since(at, Kind::Ship).transfer(transfer).chunk(generation, sequence);
        self.board.tracer.record(|| span().rect(rect).bytes(bytes));
    }

    /// A write that this side cannot make, or the receiver will not take: the transfer fails with the reason.
    fn lost(&mut self, write: WriteKey, problem: &str) {
        tracing::warn!(transfer = %write.transfer, problem, "write failed");
        self.posted(write, PostOutcome::Lost);
        self.with_sending(write.transfer, |entry, now| entry.machine.fail(now, problem));
    }

    /// A write ended: its machine hears of it once.
    pub(super) fn posted(&mut self, write: WriteKey, outcome: PostOutcome) {
        self.posting.writes.remove(&write);
        let now = self.now();
        if let Some(entry) = self.sending.get_mut(&write.transfer) {
            let taken = entry.machine.posted(now, write.generation, write.sequence, outcome);
            self.note(taken);
            self.turn(write.transfer, Side::Sending);
        }
    }

    /// Cancels what is under way of one generation. Each write still ends in `posted`: one that a mover has when the mover is done,
    /// and one that the transport has at once, since nothing reads its source any more. The receiver's answer may take until its
    /// session ends, and says nothing that matters: a receiver that goes on grants anew what it lacks.
    pub(super) fn cancel_posts(&mut self, transfer: TransferId, generation: Generation) {
        // The receiver's word that it has all comes by another lane than the ends of the last posts, and may be quicker.
        let done = self.sending.get(&transfer).is_some_and(|entry| entry.machine.verdict() == Some(&Verdict::Done));
        let mut keys = Vec::new();
        let is_meant = |write: &WriteKey| write.transfer == transfer && write.generation == generation;
        for (_, pending) in self.posting.writes.iter_mut().filter(|(write, _)| is_meant(write)) {
            pending.cancelled = true;
            // What is read in place goes on to be read when all is done; a cancel would ask it back.
            if !(done && pending.in_place) {
                keys.push((pending.peer.clone(), pending.key));
            }
        }
        keys.dedup();
        keys.iter().for_each(|(peer, key)| self.transport.cancel(peer, *key));
        let mut ended = Vec::new();
        self.posting.posted.retain(|_, posted| {
            let goes = is_meant(&posted.write);
            ended.extend(goes.then_some((posted.write, posted.at)));
            !goes
        });
        for (write, at) in ended {
            if done {
                self.shipped(write, at);
            }
            self.posted(write, if done { PostOutcome::Taken } else { PostOutcome::Lost });
        }
    }
}

fn make_write(
    write: WriteKey,
    version: u16,
    pending: &Pending,
    plan: &CopyPlan,
    slab: Option<PooledSlab>,
    digest: Result<Digest, String>,
) -> Result<Write, String> {
    let WriteKey { transfer, generation, sequence } = write;
    let wrote = Wrote { transfer, generation, sequence, rect: pending.rect, digest: digest? };
    let notification = codec::encode_wrote(version, &wrote).map_err(|error| error.to_string())?;
    let source = match slab {
        Some(slab) => Source::Packed(Arc::new(slab)),
        None => Source::Pages(plan.source_pages()),
    };
    let extents = plan.window_extents().map_err(|error| error.to_string())?;
    Ok(Write { grant: pending.key, sequence, extents, source, notification: notification.into() })
}
