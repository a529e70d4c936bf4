//! One transfer of blocks in one direction, and the threads that digest for it.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, bounded};
use kvferry_kernels::copy::{self, RegionTable, WindowDigests};
use kvferry_protocol::layout::{CacheView, KvLayout, RawWindow, Selection, Shard, WindowShape};
use kvferry_protocol::pages::Extent;
use kvferry_protocol::{BlockId, PeerId};
use kvferry_transport::{Adopted, GrantKey, Landing, Leaving, Source, Transport, Write};

use super::arena::{ForeignBlocks, Lent};
use super::case::{Case, Span};
use super::content;
use crate::args::Spoil;
use crate::error::CliError;

/// A case, with what follows from it.
pub(crate) struct Ground {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) case: Case,
    pub(crate) layout: KvLayout,
    pub(crate) source_order: Vec<u32>,
    pub(crate) target_order: Vec<u32>,
}

/// Blocks on their way out.
pub(crate) struct Outgoing {
    pub(crate) ground: Arc<Ground>,
    pub(crate) source: Arc<Lent>,
    pub(crate) to: PeerId,
    pub(crate) grant: GrantKey,
    pub(crate) span: Span,
    /// Digests of what leaves, where the transport's threads take them.
    pub(crate) watch: Option<Arc<Watch>>,
}

/// Blocks that a peer sends here.
pub(crate) struct Incoming {
    pub(crate) ground: Arc<Ground>,
    pub(crate) target: Arc<Lent>,
    pub(crate) grant: GrantKey,
    pub(crate) span: Span,
    /// Digests of what lands, where the transport's threads take them.
    pub(crate) watch: Option<Arc<Watch>>,
}

/// A write that is read where it lies.
#[derive(Clone, Debug)]
pub(crate) struct InPlace {
    pub(crate) write: u32,
    pub(crate) adopted: Arc<Adopted>,
}

/// Digests of the blocks of a span, taken while they pass.
#[derive(Debug)]
pub(crate) struct Watch {
    digests: WindowDigests,
    memory: Arc<Lent>,
    /// Where a byte is to be spoilt when it landed.
    spoil: Option<u64>,
}

/// The same for one write on its way out.
#[derive(Debug)]
struct WatchedWrite {
    watch: Arc<Watch>,
    write: u32,
    extent: Extent,
}

impl Ground {
    pub(crate) fn new(transport: Arc<dyn Transport>, case: Case) -> Self {
        let (layout, source_order, target_order) = (case.layout(), case.source_order(), case.target_order());
        Self { transport, case, layout, source_order, target_order }
    }

    /// Digests for the transport's threads to take, if the case has such: `order` are the span's blocks.
    pub(crate) fn watch(&self, memory: &Arc<Lent>, order: &[u32], span: Span, is_target: bool) -> Option<Arc<Watch>> {
        if !self.case.digest || self.case.movers {
            return None;
        }
        let blocks: Vec<BlockId> = order.iter().map(|block| BlockId::new(*block)).collect();
        let shape = self.layout.shape();
        let first_token = span.first * shape.tokens_per_block;
        let window = WindowShape::try_from(RawWindow {
            order: self.layout.order(),
            tokens_per_block: shape.tokens_per_block,
            blocks: span.count,
            run_bytes: shape.run_bytes.clone(),
            layers: 0..shape.layers,
            heads: 0..shape.heads,
            first_token,
        });
        let view = CacheView { layout: &self.layout, shard: Shard::default(), blocks: &blocks, first_token };
        let digests = WindowDigests::new(&window.ok()?, &view)?;
        let spoil = (is_target && self.case.spoil == Some(Spoil::Target)).then(|| u64::from(order[0]));
        Some(Arc::new(Watch {
            digests,
            memory: Arc::clone(memory),
            spoil: spoil.map(|block| block * self.case.block_bytes),
        }))
    }

    /// The digest of a write's blocks where they lie, keyed by their places in the order.
    fn digest(&self, lent: &Lent, order: &[u32], first: u32) -> Result<u64, CliError> {
        let blocks: Vec<BlockId> = order.iter().map(|block| BlockId::new(*block)).collect();
        digest_of(&self.layout, &lent.table(), &blocks, first)
    }
}

fn digest_of(layout: &KvLayout, table: &RegionTable, blocks: &[BlockId], first: u32) -> Result<u64, CliError> {
    let shape = layout.shape();
    let first_token = first * shape.tokens_per_block;
    let view = CacheView { layout, shard: Shard::default(), blocks, first_token };
    let selection = Selection {
        layers: 0..shape.layers,
        heads: 0..shape.heads,
        tokens: first_token..first_token + blocks.len() as u32 * shape.tokens_per_block,
    };
    let digest = copy::digest(&view, &selection, table);
    digest.map(kvferry_protocol::digest::Digest::get).map_err(|error| CliError::Word { found: error.to_string() })
}

impl Outgoing {
    /// Digests a write's blocks, and posts them as they lie.
    fn ship(&self, write: u32) -> Result<(), CliError> {
        let Ground { case, source_order, transport, .. } = &*self.ground;
        let part = self.span.write(write, case.batch);
        let blocks = part.of(self.span.of(source_order));
        let watch = self.watch.as_ref().filter(|_| transport.watches(&self.to));
        let digest = match case.digest && watch.is_none() {
            true => self.ground.digest(&self.source, blocks, self.span.first + part.first)?,
            false => 0,
        };
        let extent = part.extent(case.block_bytes);
        let watch = watch.map(|watch| WatchedWrite { watch: Arc::clone(watch), write, extent: extent.clone() });
        let write = Write {
            grant: self.grant,
            sequence: write,
            extents: vec![extent],
            source: Source::Pages(vec![case.pages(self.source.id(), blocks)]),
            notification: Bytes::copy_from_slice(&digest.to_le_bytes()),
        };
        let posted = match watch {
            Some(watch) => transport.post_watched(&self.to, write, Arc::new(watch)),
            None => transport.post(&self.to, write),
        };
        match posted {
            Ok(_) => Ok(()),
            Err(error) => Err(CliError::Transport { what: "a write was not taken".to_owned(), source: error.reason }),
        }
    }
}

impl Incoming {
    /// Closes a write's part of the window and compares its digest with the sender's, if it was taken when the write landed.
    pub(crate) fn check_taken(&self, write: u32, digest: u64) -> Option<bool> {
        let watch = self.watch.as_ref()?;
        let case = &self.ground.case;
        let extents = [self.span.write(write, case.batch).extent(case.block_bytes)];
        self.ground.transport.seal(self.grant, &extents);
        Some(watch.digests.take(write, &extents)?.get() == digest)
    }

    /// Closes a write's part of the window, so that it can be read, and compares its digest with the sender's.
    fn check(&self, write: u32, digest: u64) -> Result<bool, CliError> {
        let Ground { case, target_order, transport, .. } = &*self.ground;
        let part = self.span.write(write, case.batch);
        transport.seal(self.grant, &[part.extent(case.block_bytes)]);
        let blocks = part.of(self.span.of(target_order));
        if case.spoil == Some(Spoil::Target) && write == 0 && self.watch.is_none() {
            self.target.spoil(u64::from(blocks[0]) * case.block_bytes);
        }
        Ok(self.ground.digest(&self.target, blocks, self.span.first + part.first)? == digest)
    }
}

impl InPlace {
    /// Compares the digest of a write's blocks, in the sender's memory, with the sender's.
    fn check(&self, flow: &Incoming, digest: u64) -> Result<bool, CliError> {
        let case = &flow.ground.case;
        let part = flow.span.write(self.write, case.batch);
        let foreign = ForeignBlocks::new(&self.adopted, part.extent(case.block_bytes), case.block_bytes)?;
        let layout = flow.ground.case.layout();
        let found = digest_of(&layout, &foreign.table(), &foreign.blocks, flow.span.first + part.first)?;
        Ok(found == digest && self.adopted.is_intact())
    }

    /// How many of a write's blocks do not hold what the sender's blocks do.
    pub(crate) fn wrong_blocks(&self, flow: &Incoming) -> u64 {
        let Ground { case, source_order, .. } = &*flow.ground;
        let part = flow.span.write(self.write, case.batch);
        let mut bytes = vec![0; case.block_bytes as usize];
        let blocks = (part.first..).zip(part.of(flow.span.of(source_order)));
        let is_wrong = |(at, source): &(u32, &u32)| {
            let is_here = self.adopted.copy(u64::from(*at) * case.block_bytes, &mut bytes);
            !is_here || content::wrong_blocks(&bytes, case.block_bytes, &[**source], &[0]) > 0
        };
        blocks.filter(is_wrong).count() as u64
    }
}

impl Landing for Watch {
    fn landed(&self, sequence: u32, stretch: Range<u64>) {
        if let Some(at) = self.spoil.filter(|_| stretch.start == 0) {
            self.memory.spoil(at);
        }
        self.digests.passed(sequence, stretch, || self.memory.table());
    }
}

impl Leaving for WatchedWrite {
    fn leaves(&self, stretch: Range<u64>) {
        self.watch.digests.passed(self.write, stretch, || self.watch.memory.table());
    }

    fn notification(&self) -> Result<Bytes, String> {
        let digest = self.watch.digests.take(self.write, std::slice::from_ref(&self.extent));
        let digest = digest.ok_or("what left is not what was to be sent")?;
        Ok(Bytes::copy_from_slice(&digest.get().to_le_bytes()))
    }
}

/// Work on payload bytes.
pub(crate) enum Job {
    /// Digest, and post.
    Ship(Arc<Outgoing>, u32),
    /// Seal, and compare.
    Check { flow: Arc<Incoming>, write: u32, digest: u64 },
    /// Compare where it lies.
    CheckInPlace { flow: Arc<Incoming>, lent: InPlace, digest: u64 },
}

impl Job {
    /// Does it; `false` only for a digest that is not the sender's.
    pub(crate) fn run(self) -> Result<bool, CliError> {
        match self {
            Self::Ship(flow, write) => flow.ship(write).map(|()| true),
            Self::Check { flow, write, digest } => flow.check(write, digest),
            Self::CheckInPlace { flow, lent, digest } => lent.check(&flow, digest),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Ship(..) => Kind::Ship,
            Self::Check { .. } | Self::CheckInPlace { .. } => Kind::Check,
        }
    }
}

/// Which of the two jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Ship,
    Check,
}

/// Threads that digest, as many as the connector has (`movers`).
pub(crate) struct Movers {
    jobs: Option<Sender<Job>>,
    done: Receiver<(Kind, Result<bool, CliError>)>,
    threads: Vec<JoinHandle<()>>,
    /// Jobs that were submitted and are not yet taken from `done`.
    out: usize,
}

const THREADS: usize = 2;
/// More than writes are ever under way: a queue that cannot fill.
const JOBS: usize = 1 << 20;

impl Movers {
    pub(crate) fn start() -> Result<Self, CliError> {
        let (jobs, queue) = bounded::<Job>(JOBS);
        let (finished, done) = bounded(JOBS);
        let start = |index: usize| {
            let (queue, finished) = (queue.clone(), finished.clone());
            std::thread::Builder::new().name(format!("bench-move-{index}")).spawn(move || {
                for job in queue {
                    let kind = job.kind();
                    if finished.send((kind, job.run())).is_err() {
                        return;
                    }
                }
            })
        };
        let threads = (0..THREADS).map(start).collect::<Result<_, _>>().map_err(CliError::io("a thread"))?;
        Ok(Self { jobs: Some(jobs), done, threads, out: 0 })
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.out += 1;
        let jobs = self.jobs.as_ref().expect("open until drop");
        jobs.send(job).expect("the movers live until drop");
    }

    /// What is done; waits for one if `wait`.
    pub(crate) fn take(&mut self, wait: bool) -> Option<(Kind, Result<bool, CliError>)> {
        if self.out == 0 {
            return None;
        }
        let done = if wait { self.done.recv().ok() } else { self.done.try_recv().ok() };
        self.out -= usize::from(done.is_some());
        done
    }

    /// Waits for all that is out, whatever comes of it.
    pub(crate) fn settle(&mut self) {
        while self.take(true).is_some() {}
    }
}

impl Drop for Movers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}
