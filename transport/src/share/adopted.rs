//! Bytes of a peer's write that this side reads where they lie.
//!
//! Three things keep them as they are. The sender holds its source until it hears that the receiver let go. When the session is over, it holds
//! it until the *tether* is closed: a pipe whose other end only the receiver has, so the kernel closes it when the last of these is dropped
//! or the process is gone, and not before; a process that is stopped keeps it. And should the sender give up all the same (its engine
//! shuts down), it clears the post's word on the board first, so the reader can tell.

use std::fmt;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::borrower::Borrowed;
use super::foreign::Foreign;
use super::raw::{Mapping, Place};
use crate::core::RunList;
use crate::raw::RawRun;

/// The most pieces of one frame: more are cheaper to copy than to keep.
const MAX_FRAME_RUNS: usize = 4096;

/// A piece of a window that lies in the peer's memory, mapped here for reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdoptedRun {
    /// Its first byte's place in the window.
    pub offset: u64,
    /// How many bytes.
    pub bytes: usize,
    /// Where this process reads them, while the [`Adopted`] lives.
    pub address: NonNull<u8>,
}

/// A frame's bytes, or those of all frames of a write so far.
#[derive(Debug)]
pub(crate) struct Adoption {
    word: Word,
    runs: Vec<Piece>,
    memory: Vec<Arc<Foreign>>,
}

/// The post's word on the sender's board.
#[derive(Debug)]
struct Word {
    board: Arc<Mapping>,
    slot: usize,
    token: u64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: u64,
    bytes: usize,
    place: Place,
}

/// Hears that nothing of a write is read any more.
pub(crate) trait LetGo: Send + Sync {
    fn let_go(&self, grant: u128, sequence: u32);
}

/// A write that stays in the sender's memory for this side to read.
///
/// The sender keeps the bytes as they are until this is dropped. Drop it soon after [`Event::Recalled`](crate::Event::Recalled), or when
/// the session is over, with a copy of what is still needed: the sender waits for it and for nothing else. It cannot be kept from ending
/// early if the sender shuts down, so who computed with the bytes asks [`is_intact`](Self::is_intact) afterwards.
///
/// A peer that holds the cluster's key and means harm could change bytes while they are read; copies are the way for peers that are
/// not trusted so far.
pub struct Adopted {
    word: Word,
    pieces: Vec<Piece>,
    grant: u128,
    sequence: u32,
    owner: Arc<dyn LetGo>,
    /// Mapped until the end.
    _memory: Vec<Arc<Foreign>>,
    /// Closed last of all, with the last of its session.
    _tether: Arc<OwnedFd>,
}

impl Word {
    fn stands(&self) -> bool {
        // What was read is before the look.
        fence(Ordering::SeqCst);
        self.board.word(self.slot).is_some_and(|word| word.load(Ordering::SeqCst) == self.token)
    }
}

impl Adoption {
    /// What a frame lends, as pieces of the window that `extents` name. `None` if some of it is not mapped, or the pieces are too many.
    pub(crate) fn new(borrowed: Borrowed, extents: &RunList) -> Option<Self> {
        let (board, slot, token, lent) = borrowed.into_parts();
        let mut adoption = Self { word: Word { board, slot, token }, runs: Vec::new(), memory: Vec::new() };
        for run in &lent {
            if !adoption.memory.iter().any(|known| Arc::ptr_eq(known, &run.memory)) {
                adoption.memory.push(Arc::clone(&run.memory));
            }
        }
        let mut lent = lent.iter();
        let (mut current, mut skip) = (lent.next(), 0);
        let mut is_mapped = true;
        extents.walk(0, extents.bytes(), |_, mut offset, mut bytes| {
            while bytes > 0 {
                let piece = current.and_then(|run| {
                    let some = (run.bytes - skip).min(usize::try_from(bytes).unwrap_or(usize::MAX));
                    Some((run, some, run.memory.place(run.offset + skip as u64, some)?))
                });
                let Some((run, some, place)) = piece.filter(|_| adoption.runs.len() < MAX_FRAME_RUNS) else {
                    is_mapped = false;
                    return ControlFlow::Break(());
                };
                adoption.push(Piece { offset, bytes: some, place });
                (offset, bytes, skip) = (offset + some as u64, bytes - some as u64, skip + some);
                if skip == run.bytes {
                    (current, skip) = (lent.next(), 0);
                }
            }
            ControlFlow::Continue(())
        });
        is_mapped.then_some(adoption)
    }

    fn push(&mut self, piece: Piece) {
        if let Some(last) = self.runs.last_mut()
            && last.offset + last.bytes as u64 == piece.offset
            && last.place.ends_at(last.bytes, piece.place)
        {
            last.bytes += piece.bytes;
        } else {
            self.runs.push(piece);
        }
    }

    /// How many pieces it has.
    pub(crate) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Adds another frame of the same write; `false` if it is lent by another post.
    pub(crate) fn join(&mut self, more: Self) -> bool {
        let (ours, theirs) = (&self.word, &more.word);
        let is_same = Arc::ptr_eq(&ours.board, &theirs.board) && (ours.slot, ours.token) == (theirs.slot, theirs.token);
        if is_same {
            more.runs.into_iter().for_each(|piece| self.push(piece));
            for memory in more.memory {
                if !self.memory.iter().any(|known| Arc::ptr_eq(known, &memory)) {
                    self.memory.push(memory);
                }
            }
        }
        is_same
    }

    /// Proves for a test that all pieces lie in one region of so many bytes, and hold so many.
    #[cfg(feature = "testing")]
    pub(crate) fn assert_inside(&self, region_bytes: usize, bytes: usize) {
        assert_eq!(self.runs.iter().map(|piece| piece.bytes).sum::<usize>(), bytes);
        let memory = self.memory.first().and_then(|memory| memory.place(0, region_bytes)).expect("one region");
        let start = memory.address().addr().get();
        for piece in &self.runs {
            let from = piece.place.address().addr().get();
            assert!(start <= from && from + piece.bytes <= start + region_bytes, "{piece:?} is outside");
        }
    }

    /// Whether the post had not ended.
    pub(crate) fn is_live(&self) -> bool {
        self.word.stands()
    }

    /// All of a write: `owner` hears of its end.
    pub(crate) fn whole(mut self, grant: u128, sequence: u32, tether: Arc<OwnedFd>, owner: Arc<dyn LetGo>) -> Adopted {
        self.runs.sort_unstable_by_key(|piece| piece.offset);
        let Self { word, runs: pieces, memory } = self;
        Adopted { word, pieces, grant, sequence, owner, _memory: memory, _tether: tether }
    }
}

impl Adopted {
    /// Where the bytes lie, in the window's order.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = AdoptedRun> + '_ {
        self.pieces.iter().map(|piece| AdoptedRun {
            offset: piece.offset,
            bytes: piece.bytes,
            address: piece.place.address(),
        })
    }

    /// Whether all that was read so far is what was posted. If not, the sender gave up, and what was computed from the bytes is void.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        self.word.stands()
    }

    /// Copies bytes of the window from `offset` on; `false` if not all of them are here, or they are not intact.
    #[must_use]
    pub fn copy(&self, mut offset: u64, to: &mut [u8]) -> bool {
        let mut done = 0;
        while done < to.len() {
            let at = self.pieces.partition_point(|piece| piece.offset <= offset);
            let Some(piece) = at.checked_sub(1).map(|at| self.pieces[at]) else { return false };
            let skip = usize::try_from(offset - piece.offset).unwrap_or(usize::MAX);
            let some = piece.bytes.saturating_sub(skip).min(to.len() - done);
            if some == 0 {
                return false;
            }
            piece.place.copy(skip, RawRun::of_mut(&mut to[done..done + some]));
            (done, offset) = (done + some, offset + some as u64);
        }
        self.is_intact()
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted")
            .field("sequence", &self.sequence)
            .field("runs", &self.pieces.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        self.owner.let_go(self.grant, self.sequence);
    }
}
