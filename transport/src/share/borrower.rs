//! The receiver's side: the peer's memory, and copies out of it.
//!
//! Lock order: `state` is a leaf.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError, RwLock};

use kvferry_protocol::wire::{BOARD, Loan, Reach, Share, TETHER};

use super::board::PROOF_WORDS;
use super::foreign::{self, Foreign, ForeignRun};
use super::process::Process;
use super::raw::{Mapping, RemoteRun};
use crate::raw::RawRun;

/// The most regions of one peer.
const MAX_REGIONS: usize = 4096;
/// The most bytes of a board; there is a word for each post.
const MAX_BOARD_BYTES: u64 = 16 << 20;

pub(crate) struct Borrower {
    by_descriptor: bool,
    by_address: bool,
    in_place: bool,
    process: Result<Arc<Process>, String>,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    board: Option<Arc<Mapping>>,
    /// The peer's process was read and showed its board.
    is_process_proved: bool,
    regions: HashMap<u32, Arc<Foreign>>,
    /// What of it was of no use here, the first of it.
    problem: Option<String>,
    /// Kept open while the session lasts, and by what is held in place beyond that.
    tether: Option<Arc<OwnedFd>>,
}

/// Lent runs on their way into granted memory.
pub(crate) struct Borrowed {
    board: Arc<Mapping>,
    slot: usize,
    token: u64,
    runs: Vec<ForeignRun>,
    next: usize,
}

impl Borrower {
    pub(super) fn new(by_descriptor: bool, by_address: bool, in_place: bool, socket: BorrowedFd<'_>) -> Self {
        let process = Process::behind(socket).map(Arc::new);
        let process = process.map_err(|error| format!("the peer's process cannot be named from here: {error}"));
        Self { by_descriptor, by_address, in_place, process, state: RwLock::default() }
    }

    /// Takes what the peer shares, or says why it is of no use here.
    pub(crate) fn accept(&self, share: &Share, file: Option<OwnedFd>) -> Result<(), String> {
        let accepted = match share.region {
            BOARD => self.accept_board(share, file),
            TETHER => self.accept_tether(file),
            _ => self.accept_region(share, file),
        };
        accepted.inspect_err(|problem| self.note_problem(share.region, problem))
    }

    /// Something came that is of no use, unless the like of it came before.
    fn note_problem(&self, region: u32, problem: &str) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let is_here = match region {
            BOARD => state.board.is_some() || state.is_process_proved,
            TETHER => state.tether.is_some(),
            _ => state.regions.contains_key(&region),
        };
        if !is_here {
            state.problem.get_or_insert_with(|| problem.to_owned());
        }
    }

    /// Why something that the peer shared cannot be read, if that is so.
    pub(crate) fn problem(&self) -> Option<String> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).problem.clone()
    }

    fn accept_tether(&self, file: Option<OwnedFd>) -> Result<(), String> {
        let file = file.filter(|_| self.in_place).ok_or("a tether without a descriptor, or that was not agreed on")?;
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.tether.is_some() {
            return Err("there is a tether already".to_owned());
        }
        state.tether = Some(Arc::new(file));
        Ok(())
    }

    /// What tells the peer that its memory is read here, while anybody keeps it.
    pub(crate) fn tether(&self) -> Option<Arc<OwnedFd>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).tether.clone()
    }

    /// The session is over: only what is held in place keeps the tether.
    pub(crate) fn let_go(&self) {
        self.state.write().unwrap_or_else(PoisonError::into_inner).tether = None;
    }

    fn accept_board(&self, share: &Share, file: Option<OwnedFd>) -> Result<(), String> {
        let want: [u8; 16] = share.proof.to_le_bytes();
        match share.reach {
            Reach::Descriptor { offset } => {
                if share.bytes > MAX_BOARD_BYTES {
                    return Err(format!("a board of {} bytes is over the limit of {MAX_BOARD_BYTES}", share.bytes));
                }
                let mapping = map(file, offset, share.bytes)?;
                let mut found = [0; 16];
                if !mapping.copy(0, RawRun::of_mut(&mut found)) || found != want {
                    return Err("the board does not show its proof".to_owned());
                }
                let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
                if state.board.is_some() {
                    return Err("there is a board already".to_owned());
                }
                state.board = Some(Arc::new(mapping));
                Ok(())
            }
            Reach::Address { address } => {
                let process = self.process()?;
                let mut found = [0; 16];
                let run = RemoteRun { address, bytes: found.len() };
                let read = process.read(&[RawRun::of_mut(&mut found)], &[run]);
                let problem = read.map_err(|error| {
                    format!(
                        "the peer's process cannot be read ({error}): another user, or Yama's ptrace_scope forbids it"
                    )
                });
                if problem? != found.len() || found != want {
                    return Err(
                        "the peer's process does not show its board: another namespace of processes?".to_owned()
                    );
                }
                self.state.write().unwrap_or_else(PoisonError::into_inner).is_process_proved = true;
                Ok(())
            }
        }
    }

    fn accept_region(&self, share: &Share, file: Option<OwnedFd>) -> Result<(), String> {
        let foreign = match share.reach {
            Reach::Descriptor { .. } if !self.by_descriptor => return Err("shared memory is not agreed on".to_owned()),
            Reach::Descriptor { offset } => Foreign::Mapped(map(file, offset, share.bytes)?),
            Reach::Address { address } => {
                if !self.state.read().unwrap_or_else(PoisonError::into_inner).is_process_proved {
                    return Err("the peer's process was not proved to be readable".to_owned());
                }
                Foreign::Remote { process: self.process()?, address, bytes: share.bytes }
            }
        };
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.regions.len() >= MAX_REGIONS || state.regions.contains_key(&share.region) {
            return Err(format!("region {} was shared before, or is one too many", share.region));
        }
        state.regions.insert(share.region, Arc::new(foreign));
        Ok(())
    }

    fn process(&self) -> Result<Arc<Process>, String> {
        if self.by_address { self.process.clone() } else { Err("reading processes is not agreed on".to_owned()) }
    }

    /// Finds what a frame lends. `None` if that was never shared: the peer breaks the protocol.
    pub(crate) fn borrow(&self, loan: &Loan) -> Option<Borrowed> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let board = Arc::clone(state.board.as_ref()?);
        let slot = PROOF_WORDS + loan.slot as usize;
        board.word(slot)?;
        let find = |run: &kvferry_protocol::wire::LentRun| {
            let memory = state.regions.get(&run.region)?;
            let end = run.offset.checked_add(run.bytes.into())?;
            let (memory, offset, bytes) = (Arc::clone(memory), run.offset, run.bytes as usize);
            (end <= memory.bytes()).then_some(ForeignRun { memory, offset, bytes })
        };
        let runs = loan.runs.iter().map(find).collect::<Option<Vec<_>>>()?;
        Some(Borrowed { board, slot, token: loan.token, runs, next: 0 })
    }
}

impl Borrowed {
    /// The board, the post's word on it and what stands there, and the runs.
    pub(super) fn into_parts(self) -> (Arc<Mapping>, usize, u64, Vec<ForeignRun>) {
        (self.board, self.slot, self.token, self.runs)
    }

    /// Copies the next bytes into the front of `to`, at most `most`; returns how many.
    pub(crate) fn copy(&mut self, to: &[RawRun], most: usize) -> io::Result<usize> {
        let copied = foreign::copy(&self.runs[self.next..], to, most)?;
        let mut left = copied;
        while left > 0 {
            let run = &mut self.runs[self.next];
            let some = left.min(run.bytes);
            run.offset += some as u64;
            run.bytes -= some;
            left -= some;
            self.next += usize::from(run.bytes == 0);
        }
        Ok(copied)
    }

    /// Whether all that was copied so far is what was posted: the post had not ended, so its source was as it was.
    pub(crate) fn is_live(&self) -> bool {
        // The copies are before the look.
        fence(Ordering::SeqCst);
        let stands = self.board.word(self.slot).is_some_and(|word| word.load(Ordering::SeqCst) == self.token);
        // All processes are the peer's. One that ended may have been followed by another with its number.
        stands && self.runs.iter().find_map(|run| run.memory.process()).is_none_or(Process::is_alive)
    }
}

fn map(file: Option<OwnedFd>, offset: u64, bytes: u64) -> Result<Mapping, String> {
    let file = file.ok_or("no descriptor came with it")?;
    Mapping::new(file.as_fd(), offset, bytes, false).map_err(|error| error.to_string())
}
