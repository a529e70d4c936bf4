//! Writes that are handed over in place: nothing is placed anywhere; who polls gets where the bytes lie.
//!
//! Lock order: a grant's guard, then what it collects, which is a leaf.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{FrameHeader, Refusal, WireError, check_extents, decode_table};

use super::counters::Counters;
use super::grants::SessionKey;
use super::progress::FrameWords;
use super::runs::RunList;
use super::{Core, SessionInPlace};
use crate::api::{Event, GrantKey};
use crate::share::{Adoption, Borrowed};

/// The most pieces under one grant, over all its writes.
const MAX_RUNS: usize = 1 << 18;

/// What came under a grant in place, of writes that are not whole.
#[derive(Debug)]
pub(crate) struct Adopting {
    /// Of the window.
    pub(super) bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    open: HashMap<u32, Adoption>,
    runs_left: usize,
    /// Each byte of the window is taken once at most.
    bytes_left: u64,
}

impl Adopting {
    pub(super) fn new(bytes: u64) -> Self {
        let state = State { open: HashMap::new(), runs_left: MAX_RUNS, bytes_left: bytes };
        Self { bytes, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a frame until its write is whole.
    pub(super) fn collect(&self, words: FrameWords, adoption: Adoption) -> Result<(), Refusal> {
        let mut state = self.lock();
        let (runs, bytes) = (adoption.runs(), words.payload_bytes);
        let (Some(runs_left), Some(bytes_left)) =
            (state.runs_left.checked_sub(runs), state.bytes_left.checked_sub(bytes))
        else {
            return Err(Refusal::TooMany);
        };
        (state.runs_left, state.bytes_left) = (runs_left, bytes_left);
        match state.open.entry(words.sequence) {
            Entry::Occupied(mut known) => known.get_mut().join(adoption).then_some(()).ok_or(Refusal::Inconsistent),
            Entry::Vacant(none) => {
                none.insert(adoption);
                Ok(())
            }
        }
    }

    /// Takes all of a write, or forgets what came of it.
    pub(super) fn take(&self, sequence: u32) -> Option<Adoption> {
        self.lock().open.remove(&sequence)
    }
}

/// Takes a frame under a grant in place. Returns whether that completed the write, which is an event then.
pub(crate) fn adopt(
    core: &Core,
    session: SessionKey,
    peer: &PeerId,
    (header, table): (&FrameHeader, &[u8]),
    borrowed: Option<Borrowed>,
    owner: &Arc<impl SessionInPlace>,
) -> Result<Result<bool, Refusal>, WireError> {
    let (named, notification) = decode_table(header, table)?;
    let Some(grant) = core.grants.find(header.grant, session) else { return Ok(Err(Refusal::UnknownGrant)) };
    let Some(adopting) = grant.adopting() else { return Ok(Err(Refusal::NotInPlace)) };
    let words = FrameWords {
        sequence: header.sequence,
        frame: header.frame,
        payload_bytes: header.payload_bytes.into(),
        write_bytes: header.write_bytes,
    };
    let take = || -> Result<bool, Refusal> {
        check_extents(&named, adopting.bytes, words.payload_bytes)?;
        let extents = RunList::of_extents(&named).ok_or(Refusal::BadExtent)?;
        let adoption = borrowed.and_then(|borrowed| Adoption::new(borrowed, &extents));
        let (adoption, tether) = adoption.zip(owner.tether()).ok_or(Refusal::NotInPlace)?;
        // The sender does not let go by itself once it said this; a word that fell says that it gave up.
        if !adoption.is_live() {
            return Err(Refusal::Cancelled);
        }
        grant.admit(words, notification)?;
        adopting.collect(words, adoption)?;
        let whole = |notification| {
            let Some(adoption) = adopting.take(words.sequence) else { return };
            owner.hold(grant.key, words.sequence);
            let adopted = adoption.whole(grant.key.0, words.sequence, tether, Arc::clone(owner).let_go());
            Counters::add(&core.counters.adopted_bytes, words.write_bytes);
            core.events.push(Event::Lent {
                peer: peer.clone(),
                grant: grant.key,
                sequence: words.sequence,
                bytes: words.write_bytes,
                notification,
                adopted,
            });
        };
        grant.land(words, whole)
    };
    Ok(take().inspect_err(|refusal| {
        // A number that was taken says nothing about the write that took it.
        if *refusal != Refusal::SequenceTaken {
            grant.refuse(words.sequence);
        }
    }))
}

/// The key of a grant says whether it is one in place: to a sender of a session in which that was agreed on.
impl GrantKey {
    pub(crate) const fn is_in_place(self) -> bool {
        self.0 & 1 == 1
    }

    pub(super) const fn marked(self, in_place: bool) -> Self {
        Self(if in_place { self.0 | 1 } else { self.0 & !1 })
    }
}
