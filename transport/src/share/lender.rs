//! The sender's side: what was shared, what the peer can read of it, and which runs can be lent.
//!
//! Lock order: `told`, then `tether`; `ready`, then `told`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kvferry_protocol::RegionId;
use kvferry_protocol::wire::{BOARD, LentRun, MAX_LENT_RUNS, Reach, Share, TETHER};

use rustix::pipe::{PipeFlags, pipe_with};

use super::board::{Board, OpenLoan};
use crate::core::{Entry, RegionTable};
use crate::raw::RawRun;

pub(crate) struct Lender {
    board: Arc<Board>,
    by_descriptor: bool,
    by_address: bool,
    /// Whether the peer may hold memory in place.
    in_place: bool,
    tether: Mutex<Tether>,
    told: Mutex<Told>,
    /// How many shares the peer answered.
    answers: AtomicU32,
    ready: RwLock<Ready>,
}

/// A pipe that is closed when the peer reads nothing any more; made for the first write that it may hold.
#[derive(Default)]
struct Tether {
    ours: Option<OwnedFd>,
    /// Until it was told: then only the peer has it.
    theirs: Option<Arc<OwnedFd>>,
}

/// What was told to the peer so far.
#[derive(Default)]
struct Told {
    board: bool,
    board_by_address: bool,
    tether: bool,
    regions: u32,
    /// How many shares that makes.
    shares: u32,
}

/// What the peer said that it can read.
#[derive(Default)]
struct Ready {
    board: bool,
    tether: bool,
    /// Sorted by address.
    regions: Vec<Lendable>,
}

#[derive(Clone, Copy)]
struct Lendable {
    start: usize,
    bytes: u64,
    region: u32,
    /// The peer maps it; else it reads this process.
    is_mapped: bool,
}

impl Lender {
    pub(super) fn new(by_descriptor: bool, by_address: bool, in_place: bool, max_posts: usize) -> io::Result<Self> {
        let board = Arc::new(Board::new(max_posts)?);
        let (tether, told, answers, ready) = Default::default();
        Ok(Self { board, by_descriptor, by_address, in_place, tether, told, answers, ready })
    }

    /// Something is to be handed over in place: the peer has to be told the tether, if it was not.
    pub(crate) fn want_tether(&self) -> io::Result<()> {
        let mut tether = self.tether.lock().unwrap_or_else(PoisonError::into_inner);
        if tether.ours.is_none() {
            let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            *tether = Tether { ours: Some(ours), theirs: Some(Arc::new(theirs)) };
        }
        Ok(())
    }

    /// The end of the tether that hangs up when the peer has let go, once.
    pub(crate) fn take_tether(&self) -> Option<OwnedFd> {
        let mut tether = self.tether.lock().unwrap_or_else(PoisonError::into_inner);
        tether.theirs = None; // also if it was never told
        tether.ours.take()
    }

    /// Whether the peer answered all that it was told, and that is all there is: what cannot be lent then never can.
    pub(crate) fn is_settled(&self, regions: &RegionTable) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let is_told = told.board && told.tether && told.regions as usize >= regions.count();
        is_told && self.answers.load(Ordering::SeqCst) >= told.shares
    }

    /// What to tell the peer next, with the descriptor that goes with it. The order matters: one lane asks.
    pub(crate) fn next_share(&self, regions: &RegionTable) -> Option<(Share, Option<Arc<OwnedFd>>)> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let share = self.share_more(&mut told, regions);
        told.shares += u32::from(share.is_some());
        share
    }

    fn share_more(&self, told: &mut Told, regions: &RegionTable) -> Option<(Share, Option<Arc<OwnedFd>>)> {
        if !std::mem::replace(&mut told.board, true) {
            let (share, file) = self.board.share();
            return Some((share, Some(file)));
        }
        if self.by_address && !std::mem::replace(&mut told.board_by_address, true) {
            return Some((self.board.share_by_address(), None));
        }
        let theirs = self.tether.lock().unwrap_or_else(PoisonError::into_inner).theirs.take();
        if let Some(theirs) = theirs {
            told.tether = true;
            let share = Share { region: TETHER, bytes: 1, reach: Reach::Descriptor { offset: 0 }, proof: 0 };
            return Some((share, Some(theirs)));
        }
        loop {
            let id = told.regions;
            let entry = regions.entry(RegionId::new(id))?;
            told.regions += 1;
            // Memory of a device is nothing that a processor of the peer could read.
            let Entry::Host { region, file } = entry else { continue };
            let share = |reach| Share { region: id, bytes: region.bytes(), reach, proof: 0 };
            match file {
                Some(file) if self.by_descriptor => {
                    return Some((share(Reach::Descriptor { offset: file.offset }), Some(file.file)));
                }
                _ if self.by_address => {
                    let address = region.start() as u64;
                    return Some((share(Reach::Address { address }), None));
                }
                _ => {
                    let why =
                        "it has no descriptor that the peer could map, and reading the process (cma) is not agreed on";
                    tracing::warn!(region = id, why, "memory is not shared with the peer; its bytes go over the lanes");
                }
            }
        }
    }

    /// The peer can read a region that was shared, or the board.
    pub(crate) fn mapped(&self, id: u32, regions: &RegionTable) {
        let mut ready = self.ready.write().unwrap_or_else(PoisonError::into_inner);
        match id {
            BOARD => return ready.board = true,
            TETHER => return ready.tether = self.in_place,
            _ => {}
        }
        if id >= self.told.lock().unwrap_or_else(PoisonError::into_inner).regions {
            return; // it answers what was not said
        }
        let Some(Entry::Host { region, file }) = regions.entry(RegionId::new(id)) else { return };
        let at = ready.regions.partition_point(|known| known.start < region.start());
        if ready.regions.iter().all(|known| known.region != id) {
            let is_mapped = self.by_descriptor && file.is_some();
            ready.regions.insert(at, Lendable { start: region.start(), bytes: region.bytes(), region: id, is_mapped });
        }
    }

    /// The peer answered a share, one way or the other; after [`mapped`](Self::mapped), if that is the answer.
    pub(crate) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::SeqCst);
    }

    /// The same runs as places in regions that the peer can read; `None` if it cannot read one of them, or has not mapped it although it is
    /// to be read `in_place`.
    pub(crate) fn locate(&self, runs: &[RawRun], in_place: bool) -> Option<Vec<LentRun>> {
        let ready = self.ready.read().unwrap_or_else(PoisonError::into_inner);
        if !ready.board || runs.len() > MAX_LENT_RUNS || (in_place && !ready.tether) {
            return None;
        }
        let locate = |run: &RawRun| {
            let start = run.start().addr();
            let at = ready.regions.partition_point(|known| known.start <= start).checked_sub(1)?;
            let known = Some(ready.regions[at]).filter(|known| known.is_mapped || !in_place)?;
            let (offset, bytes) = ((start - known.start) as u64, u32::try_from(run.bytes()).ok()?);
            (offset + u64::from(bytes) <= known.bytes).then_some(LentRun { region: known.region, offset, bytes })
        };
        runs.iter().map(locate).collect()
    }

    /// Marks a post as readable by the peer.
    pub(crate) fn open(&self, token: u64) -> Option<OpenLoan> {
        self.board.open(token)
    }
}
