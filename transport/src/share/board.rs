//! The board: which of a sender's posts may be read.
//!
//! Word 0 and 1 are the proof, then one word a slot. A slot's word is the post's token from the first frame that lends its source until
//! the post ends, and 0 otherwise.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_protocol::wire::{BOARD, Reach, Share};

use super::raw::{Mapping, memory_file};
use crate::core::random;

/// Words before the slots.
pub(super) const PROOF_WORDS: usize = 2;

/// A sender's board.
#[derive(Debug)]
pub(super) struct Board {
    file: Arc<OwnedFd>,
    words: Mapping,
    proof: u128,
    free: Mutex<Slots>,
}

/// Slots that no post has. Most sessions never have more than a few posts at once, so what was never used has no entry.
#[derive(Debug)]
struct Slots {
    given_back: Vec<u32>,
    /// All from this one on were never used.
    unused: u32,
    all: u32,
}

/// A post whose source a receiver may read. Ends when the post does.
#[derive(Debug)]
pub(crate) struct OpenLoan {
    board: Arc<Board>,
    pub(crate) slot: u32,
    pub(crate) token: u64,
    is_over: AtomicBool,
}

impl Board {
    pub(super) fn new(slots: usize) -> io::Result<Self> {
        let bytes = 8 * (PROOF_WORDS + slots) as u64;
        let file = memory_file("kvferry-board", bytes)?;
        let words = Mapping::new(file.as_fd(), 0, bytes, true)?;
        let proof = u128::from_le_bytes(random()) | 1;
        for (index, half) in [proof as u64, (proof >> 64) as u64].into_iter().enumerate() {
            if let Some(word) = words.word(index) {
                word.store(half, Ordering::Release);
            }
        }
        let free = Mutex::new(Slots { given_back: Vec::new(), unused: 0, all: slots as u32 });
        Ok(Self { file: Arc::new(file), words, proof, free })
    }

    /// How a peer gets at it: by its descriptor.
    pub(super) fn share(&self) -> (Share, Arc<OwnedFd>) {
        let (bytes, reach) = (self.words.bytes() as u64, Reach::Descriptor { offset: 0 });
        (Share { region: BOARD, bytes, reach, proof: self.proof }, Arc::clone(&self.file))
    }

    /// The same by its address, which proves that the peer can read this process.
    pub(super) fn share_by_address(&self) -> Share {
        let (bytes, reach) = (self.words.bytes() as u64, Reach::Address { address: self.words.address() });
        Share { region: BOARD, bytes, reach, proof: self.proof }
    }

    /// Marks a post as readable; `None` if there are more posts than slots. `token` is not 0, and no other post has it.
    pub(super) fn open(self: &Arc<Self>, token: u64) -> Option<OpenLoan> {
        let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        self.words.word(PROOF_WORDS + slot as usize)?.store(token, Ordering::SeqCst);
        Some(OpenLoan { board: Arc::clone(self), slot, token, is_over: AtomicBool::new(false) })
    }
}

impl Slots {
    fn take(&mut self) -> Option<u32> {
        self.given_back.pop().or_else(|| {
            let slot = (self.unused < self.all).then_some(self.unused)?;
            self.unused += 1;
            Some(slot)
        })
    }
}

impl OpenLoan {
    /// After this returns, what the receiver still reads of the source does not count.
    pub(crate) fn end(&self) {
        if self.is_over.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Some(word) = self.board.words.word(PROOF_WORDS + self.slot as usize) {
            word.store(0, Ordering::SeqCst);
        }
        // Whoever writes the source after this writes it after the word: a receiver that saw such a byte sees the word.
        fence(Ordering::SeqCst);
        self.board.free.lock().unwrap_or_else(PoisonError::into_inner).given_back.push(self.slot);
    }
}

impl Drop for OpenLoan {
    fn drop(&mut self) {
        self.end();
    }
}
