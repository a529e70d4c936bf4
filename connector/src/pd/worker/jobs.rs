//! Work on payload bytes, off the driver's thread: gather with digest, and digest of what landed.
//!
//! A job owns what it needs (a plan, a slab, blocks) and comes back as an input of the driver. The queue is bounded by what the
//! driver has out: it counts its jobs and asks for no more than [`Movers::LIMIT`].

use std::ops::Range;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CopyPlan, Selection};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{BlockId, Generation, TransferId};

use super::Input;
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
    /// Digest what a write left in this worker's pages.
    Verify {
        /// Whose.
        write: WriteKey,
        /// The request's blocks.
        blocks: Vec<BlockId>,
        /// The place in the sequence of the first block's first token.
        first_token: u32,
        /// Which tokens and layers.
        rect: Rect,
        /// Which heads of the model.
        heads: Range<u16>,
    },
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
    /// The digest of what landed.
    Verified { write: WriteKey, digest: Result<Digest, String> },
}

/// The mover threads.
#[derive(Debug)]
pub(super) struct Movers {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Movers {
    /// The most jobs that are out at once: more would only wait here instead of with the driver.
    pub(super) const LIMIT: usize = 1024;

    pub(super) fn start(count: usize, caches: &Caches, done: &Sender<Input>, tracer: &Tracer) -> Self {
        let (jobs, queue) = bounded(Self::LIMIT);
        let thread = |index: usize| {
            let (caches, queue, done, tracer) = (caches.clone(), queue.clone(), done.clone(), tracer.clone());
            std::thread::Builder::new()
                .name(format!("kvferry-move-{index}"))
                .spawn(move || run(&caches, &queue, &done, &tracer))
                .expect("the system has a thread to spare")
        };
        Self { jobs: Some(jobs), threads: (0..count).map(thread).collect() }
    }

    /// Takes a job; gives it back if [`Movers::LIMIT`] are out.
    pub(super) fn submit(&self, job: Job) -> Option<Job> {
        let jobs = self.jobs.as_ref().expect("open until drop");
        jobs.try_send(job).err().map(crossbeam_channel::TrySendError::into_inner)
    }
}

impl Drop for Movers {
    fn drop(&mut self) {
        self.jobs = None; // The threads drain what is queued and end.
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a mover thread panicked");
            }
        }
    }
}

fn run(caches: &Caches, queue: &Receiver<Job>, done: &Sender<Input>, tracer: &Tracer) {
    for job in queue {
        let (began, span) = (tracer.start(), tracer.is_on().then(|| job.span(caches)));
        let result = perform(caches, job);
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
        let (kind, write, rect, bytes) = match self {
            Self::Prepare { write, plan, .. } => {
                let Selection { layers, tokens, .. } = plan.selection();
                (Kind::Pack, *write, Rect::new(tokens.clone(), layers.clone()).ok(), plan.bytes())
            }
            Self::Verify { write, rect, heads, .. } => {
                (Kind::Verify, *write, Some(*rect), rect.cells() * caches.bytes_per_cell(heads))
            }
        };
        let WriteKey { transfer, generation, sequence } = write;
        move |began| {
            let span = Span::since(began, kind).transfer(transfer).chunk(generation, sequence).bytes(bytes);
            Span { rect, ..span }
        }
    }
}

fn perform(caches: &Caches, job: Job) -> JobDone {
    match job {
        Job::Prepare { write, plan, slab: Some(mut slab), .. } => {
            let digest = caches.gather(&plan, slab.bytes_mut());
            JobDone::Prepared { write, plan, slab: Some(slab), digest }
        }
        Job::Prepare { write, plan, slab: None, blocks } => {
            let digest = caches.digest(&blocks, 0, plan.selection());
            JobDone::Prepared { write, plan, slab: None, digest }
        }
        Job::Verify { write, blocks, first_token, rect, heads } => {
            let selection = Selection { layers: rect.layers(), heads, tokens: rect.tokens() };
            JobDone::Verified { write, digest: caches.digest(&blocks, first_token, &selection) }
        }
    }
}
