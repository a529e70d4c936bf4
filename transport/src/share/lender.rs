//! The sender's side: what was shared, what the peer can read of it, and which runs can be lent.
//!
//! Lock order: `told` and `ready` are leaves.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kvferry_protocol::RegionId;
use kvferry_protocol::wire::{BOARD, LentRun, MAX_LENT_RUNS, Reach, Share};

use super::board::{Board, OpenLoan};
use crate::core::RegionTable;
use crate::raw::RawRun;

pub(crate) struct Lender {
    board: Arc<Board>,
    by_descriptor: bool,
    by_address: bool,
    told: Mutex<Told>,
    ready: RwLock<Ready>,
}

/// What was told to the peer so far.
#[derive(Default)]
struct Told {
    board: bool,
    board_by_address: bool,
    regions: u32,
}

/// What the peer said that it can read.
#[derive(Default)]
struct Ready {
    board: bool,
    /// Sorted by address.
    regions: Vec<Lendable>,
}

#[derive(Clone, Copy)]
struct Lendable {
    start: usize,
    bytes: u64,
    region: u32,
}

impl Lender {
    pub(super) fn new(by_descriptor: bool, by_address: bool, max_posts: usize) -> io::Result<Self> {
        let board = Arc::new(Board::new(max_posts)?);
        Ok(Self { board, by_descriptor, by_address, told: Mutex::default(), ready: RwLock::default() })
    }

    /// What to tell the peer next, with the descriptor that goes with it. The order matters: one lane asks.
    pub(crate) fn next_share(&self, regions: &RegionTable) -> Option<(Share, Option<Arc<OwnedFd>>)> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut told.board, true) {
            let (share, file) = self.board.share();
            return Some((share, Some(file)));
        }
        if self.by_address && !std::mem::replace(&mut told.board_by_address, true) {
            return Some((self.board.share_by_address(), None));
        }
        loop {
            let id = told.regions;
            let (region, file) = regions.entry(RegionId::new(id))?;
            told.regions += 1;
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
        if id == BOARD {
            ready.board = true;
            return;
        }
        if id >= self.told.lock().unwrap_or_else(PoisonError::into_inner).regions {
            return; // it answers what was not said
        }
        let Some((region, _)) = regions.entry(RegionId::new(id)) else { return };
        let at = ready.regions.partition_point(|known| known.start < region.start());
        if ready.regions.iter().all(|known| known.region != id) {
            ready.regions.insert(at, Lendable { start: region.start(), bytes: region.bytes(), region: id });
        }
    }

    /// The same runs as places in regions that the peer can read; `None` if it cannot read one of them.
    pub(crate) fn locate(&self, runs: &[RawRun]) -> Option<Vec<LentRun>> {
        let ready = self.ready.read().unwrap_or_else(PoisonError::into_inner);
        if !ready.board || runs.len() > MAX_LENT_RUNS {
            return None;
        }
        let locate = |run: &RawRun| {
            let start = run.start().addr();
            let at = ready.regions.partition_point(|known| known.start <= start).checked_sub(1)?;
            let known = ready.regions[at];
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
