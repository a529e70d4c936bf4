//! Work on payload bytes, off the driver's thread: gather with digest, and digest of what landed.
//!
//! A job owns what it needs (a plan, a slab, blocks) and comes back as an input of the driver. The queue is bounded by what the
//! driver has out: it counts its jobs and asks for no more than [`Movers::LIMIT`].

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, select};
use kvferry_kernels::device::{Event, Lane};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CopyPlan, Selection};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{BlockId, Generation, TransferId};

use super::Input;
use super::device::{Shipment, Staged, Upload, in_full};
use super::inlet::Inlet;
use super::reading::{Found, Look};
use super::slabs::PooledSlab;
use crate::pd::caches::Caches;
use crate::trace::{Kind, Span, Tracer};

/// What to do.
#[derive(Debug)]
pub(super) enum Job {
    /// Digest what a write will carry, packing it on the way if a slab is given.
    Prepare {
        /// Whose.
        write: WriteKey,
        /// From the leased pages to the window.
        plan: CopyPlan,
        /// Where to pack; `None` sends the pages themselves.
        slab: Option<PooledSlab>,
        /// The request's blocks, from token 0.
        blocks: Vec<BlockId>,
    },
    /// Digest what a write will carry and pack it, on a device and from there into the slab.
    Ship(Shipment),
    /// Bring what landed and was verified to a device's pages.
    Upload(Upload),
    /// Digest what a write left in this worker's pages, or in staging on its way there.
    Verify {
        /// Whose.
        write: WriteKey,
        /// The frames in which it landed, if it did not in the pages.
        staged: Option<Arc<Staged>>,
        /// The request's blocks.
        blocks: Vec<BlockId>,
        /// The place in the sequence of the first block's first token.
        first_token: u32,
        /// Which tokens and layers.
        rect: Rect,
        /// Which heads of the model.
        heads: Range<u16>,
    },
    /// Look at what a peer lends, where it lies.
    Look(Look),
    /// Digest what a peer's write left in the tier's memory.
    VerifyTaken {
        /// Whose.
        write: WriteKey,
        /// The berths.
        blocks: Vec<BlockId>,
        /// The place in the sequence of the first block's first token.
        first_token: u32,
        /// Which tokens and layers.
        rect: Rect,
    },
    /// Copy from or to the tier.
    Tier(TierJob),
}

/// One copy between a block of the engine's cache and one of the tier's memory.
#[derive(Debug)]
pub(super) struct TierJob {
    /// The scheduler's number of it.
    pub(super) order: u64,
    /// Which block of the order.
    pub(super) block: usize,
    pub(super) plan: CopyPlan,
    pub(super) direction: Direction,
}

/// Which way a tier's job copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Store,
    Bring,
    /// Nowhere: a digest of what is in the tier.
    Stay,
}

/// One write of one grant of one transfer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct WriteKey {
    pub(super) transfer: TransferId,
    pub(super) generation: Generation,
    pub(super) sequence: u32,
}

/// What came of it.
#[derive(Debug)]
pub(super) enum JobDone {
    /// Ready to be posted.
    Prepared { write: WriteKey, plan: CopyPlan, slab: Option<PooledSlab>, digest: Result<Digest, String> },
    /// What landed is on its way to a device's pages, or it is known that it will not be.
    Uploading { write: WriteKey, rect: Rect, begun: Result<Arc<dyn Event>, String> },
    /// It is there, or nothing brings it there any more.
    Uploaded { write: WriteKey, ended: Result<(), String> },
    /// The digest of what landed.
    Verified { write: WriteKey, digest: Result<Digest, String> },
    /// What was found of what is lent.
    Looked { look: Look, found: Result<Found, String> },
    /// The digest of what landed in the tier's memory.
    VerifiedTaken { write: WriteKey, digest: Result<Digest, String> },
    /// A copy from or to the tier, and the digest of what arrived.
    Tier { job: TierJob, digest: Result<Digest, String> },
}

/// The mover threads.
#[derive(Debug)]
pub(super) struct Movers {
    jobs: Option<Sender<Job>>,
    /// What is done when no job waits.
    small: Option<Sender<TierJob>>,
    threads: Vec<JoinHandle<()>>,
}

impl Movers {
    /// The most jobs that are out at once: more would only wait here instead of with the driver.
    pub(super) const LIMIT: usize = 1024;

    /// Starts `count` threads; where the cache is on a device each has a lane.
    pub(super) fn start(
        count: usize,
        memory: (&Caches, Option<&Caches>, Vec<Lane>),
        done: &Inlet,
        tracer: &Tracer,
    ) -> Self {
        let (caches, tier, lanes) = memory;
        let mut lanes = lanes.into_iter();
        let (jobs, queue) = bounded(Self::LIMIT);
        let (small, small_queue) = bounded(count);
        let thread = |index: usize| {
            let mut memory = Memory { caches: caches.clone(), tier: tier.cloned(), lane: lanes.next() };
            let (queue, small, done, tracer) = (queue.clone(), small_queue.clone(), done.clone(), tracer.clone());
            std::thread::Builder::new()
                .name(format!("kvferry-move-{index}"))
                .spawn(move || run(&mut memory, &queue, &small, &done, &tracer))
                .expect("the system has a thread to spare")
        };
        Self { jobs: Some(jobs), small: Some(small), threads: (0..count).map(thread).collect() }
    }

    /// Takes a job for when no other waits; gives it back if one for each mover waits already.
    pub(super) fn submit_small(&self, job: TierJob) -> Option<TierJob> {
        let small = self.small.as_ref().expect("open until drop");
        small.try_send(job).err().map(crossbeam_channel::TrySendError::into_inner)
    }

    /// Takes a job; gives it back if [`Movers::LIMIT`] are out.
    pub(super) fn submit(&self, job: Job) -> Option<Job> {
        let jobs = self.jobs.as_ref().expect("open until drop");
        jobs.try_send(job).err().map(crossbeam_channel::TrySendError::into_inner)
    }
}

impl Drop for Movers {
    fn drop(&mut self) {
        (self.jobs, self.small) = (None, None); // The threads drain what is queued and end.
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a mover thread panicked");
            }
        }
    }
}

/// What movers read and write.
struct Memory {
    caches: Caches,
    tier: Option<Caches>,
    /// The way to the caches, if they are on a device.
    lane: Option<Lane>,
}

impl Memory {
    fn tier(&self) -> Result<&Caches, String> {
        self.tier.as_ref().ok_or_else(|| "this worker has no tier".to_owned())
    }

    /// The lane, and the caches to which it leads.
    fn lane(&mut self) -> Result<(&mut Lane, &Caches), String> {
        let lane = self.lane.as_mut().ok_or_else(|| "this worker's cache is on no device".to_owned())?;
        Ok((lane, &self.caches))
    }
}

fn run(memory: &mut Memory, queue: &Receiver<Job>, small: &Receiver<TierJob>, done: &Inlet, tracer: &Tracer) {
    loop {
        let job = match queue.try_recv() {
            Ok(job) => job,
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => select! {
                recv(queue) -> job => match job {
                    Ok(job) => job,
                    Err(_) => return,
                },
                recv(small) -> job => match job {
                    Ok(job) => Job::Tier(job),
                    Err(_) => return,
                },
            },
        };
        let (began, span) = (tracer.start(), tracer.is_on().then(|| job.span(&memory.caches)));
        let result = match job {
            Job::Upload(upload) => upload_all(memory, upload, done),
            job => perform(memory, job),
        };
        if let (Some(began), Some(span)) = (began, span) {
            tracer.record(|| span(began));
        }
        if done.send(Input::Job(result)).is_err() {
            return; // The driver is gone; what it wanted to know no longer matters.
        }
    }
}

impl Job {
    /// What a timeline says of it, once it is done.
    fn span(&self, caches: &Caches) -> impl FnOnce(std::time::Instant) -> Span + use<> {
        let of_plan = |plan: &CopyPlan| {
            let Selection { layers, tokens, .. } = plan.selection();
            Rect::new(tokens.clone(), layers.clone()).ok()
        };
        let (kind, write, rect, bytes) = match self {
            Self::Prepare { write, plan, .. } => (Kind::Pack, Some(*write), of_plan(plan), plan.bytes()),
            Self::Ship(Shipment { write, plan, .. }) => (Kind::Pack, Some(*write), of_plan(plan), plan.bytes()),
            Self::Upload(Upload { write, rect, staged, .. }) => {
                let bytes = rect.cells() * staged.caches.bytes_per_cell(&staged.caches.heads());
                (Kind::Upload, Some(*write), Some(*rect), bytes)
            }
            Self::Verify { write, rect, heads, .. } => {
                (Kind::Verify, Some(*write), Some(*rect), rect.cells() * caches.bytes_per_cell(heads))
            }
            Self::Look(Look { write, rect, .. }) => {
                (Kind::Verify, Some(*write), Some(*rect), rect.cells() * caches.bytes_per_cell(&caches.heads()))
            }
            Self::VerifyTaken { write, rect, .. } => {
                (Kind::Verify, Some(*write), Some(*rect), rect.cells() * caches.bytes_per_cell(&caches.heads()))
            }
            Self::Tier(job) => {
                let kind = if job.direction == Direction::Store { Kind::WriteBack } else { Kind::Bring };
                (kind, None, of_plan(&job.plan), job.plan.bytes())
            }
        };
        let (transfer, chunk) =
            (write.map(|write| write.transfer), write.map(|write| (write.generation, write.sequence)));
        move |began| Span { rect, transfer, chunk, bytes, ..Span::since(began, kind) }
    }
}

/// Brings what landed to a device's pages: says so when that has begun, for who waits for a layer, and waits until it is done.
fn upload_all(memory: &mut Memory, upload: Upload, done: &Inlet) -> JobDone {
    let Upload { write, rect, .. } = upload;
    let begun = memory.lane().and_then(|(lane, caches)| upload.begin(lane, caches));
    let event = begun.as_ref().ok().map(Arc::clone);
    // If the driver is gone nobody waits for the layer, but the frames must stay until they are read.
    let _ = done.send(Input::Job(JobDone::Uploading { write, rect, begun }));
    let ended = event.map_or(Ok(()), |event| event.wait().map_err(|error| in_full(&error)));
    // The frames are free before the driver hears of it, which looks for free ones then.
    drop(upload);
    JobDone::Uploaded { write, ended }
}

fn perform(memory: &mut Memory, job: Job) -> JobDone {
    let job = match job {
        Job::Ship(mut shipment) => {
            let gathered = memory.lane().and_then(|(lane, caches)| shipment.gather(lane, caches));
            let Shipment { write, plan, slab, .. } = shipment;
            let (plan, digest) = match gathered {
                Ok((plan, digest)) => (plan, Ok(digest)),
                Err(problem) => (plan, Err(problem)),
            };
            return JobDone::Prepared { write, plan, slab: Some(slab), digest };
        }
        job => job,
    };
    let caches = &memory.caches;
    match job {
        Job::Ship(_) | Job::Upload(_) => unreachable!("they are done by a lane"),
        Job::Look(look) => {
            let found = look.run(caches);
            JobDone::Looked { look, found }
        }
        Job::Tier(job) => {
            let digest = memory.tier().and_then(|tier| match job.direction {
                Direction::Store => caches.copy_to(tier, &job.plan),
                Direction::Bring => tier.copy_to(caches, &job.plan),
                Direction::Stay => tier.digest_of(&job.plan),
            });
            JobDone::Tier { job, digest }
        }
        Job::VerifyTaken { write, blocks, first_token, rect } => {
            let digest = memory.tier().and_then(|tier| {
                let selection = Selection { layers: rect.layers(), heads: tier.heads(), tokens: rect.tokens() };
                tier.digest(&blocks, first_token, &selection)
            });
            JobDone::VerifiedTaken { write, digest }
        }
        Job::Prepare { write, plan, slab: Some(mut slab), .. } => {
            let digest = caches.gather(&plan, slab.bytes_mut());
            JobDone::Prepared { write, plan, slab: Some(slab), digest }
        }
        Job::Prepare { write, plan, slab: None, blocks } => {
            let digest = caches.digest(&blocks, 0, plan.selection());
            JobDone::Prepared { write, plan, slab: None, digest }
        }
        Job::Verify { write, staged, blocks, first_token, rect, heads } => {
            let selection = Selection { layers: rect.layers(), heads, tokens: rect.tokens() };
            let digest = match staged {
                Some(staged) => staged.caches.digest(&staged.frames, staged.first_token, &selection),
                None => caches.digest(&blocks, first_token, &selection),
            };
            JobDone::Verified { write, digest }
        }
    }
}
