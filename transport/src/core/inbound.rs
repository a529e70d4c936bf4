//! A data frame on its way into granted memory.

use std::ops::ControlFlow;
use std::sync::Arc;

use kvferry_protocol::PeerId;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{FrameHeader, Refusal, WireError, check_extents, decode_table};

use super::Core;
use super::counters::Counters;
use super::grants::{Carrier, Grant, SessionKey};
use super::planted::Planted;
use super::progress::FrameWords;
use super::runs::RunList;
use super::seals::SealsSeen;
use crate::api::Event;
use crate::device_memory::Flush;
use crate::ffi::MAX_RUNS;
use crate::raw::{RawRun, advance};
use crate::watch::Landing;

/// A frame that was admitted: its ranges are inside the grant's window.
pub(crate) struct Inbound {
    grant: Arc<Grant>,
    words: FrameWords,
    /// Where the payload goes in the window, and the same by place in the stream.
    named: Vec<Extent>,
    extents: RunList,
    seals: SealsSeen,
    /// How many bytes are in place.
    done: u64,
    /// Memory of the next bytes, from `next` on.
    runs: Vec<RawRun>,
    next: usize,
}

impl Inbound {
    /// Checks a frame, once, against the grants of `session`. `runs` is scratch.
    pub(crate) fn admit(
        core: &Core,
        session: SessionKey,
        header: &FrameHeader,
        table: &[u8],
        carrier: Carrier,
        mut runs: Vec<RawRun>,
    ) -> Result<Result<Self, Refusal>, WireError> {
        let (named, notification) = decode_table(header, table)?;
        let Some(grant) = core.grants.find(header.grant, session) else { return Ok(Err(Refusal::UnknownGrant)) };
        let words = FrameWords {
            sequence: header.sequence,
            frame: header.frame,
            payload_bytes: header.payload_bytes.into(),
            write_bytes: header.write_bytes,
        };
        let checked = grant
            .takes(carrier)
            .and_then(|()| check_extents(&named, grant.window_bytes(), words.payload_bytes))
            .and_then(|()| RunList::of_extents(&named).ok_or(Refusal::BadExtent))
            .and_then(|extents| grant.admit(words, notification).map(|()| extents));
        Ok(match checked {
            Ok(extents) => {
                runs.clear();
                let seals = SealsSeen::default();
                Ok(Self { grant, words, named, extents, seals, done: 0, runs, next: 0 })
            }
            // A number that was taken says nothing about the write that took it.
            Err(Refusal::SequenceTaken) => Err(Refusal::SequenceTaken),
            Err(refusal) => {
                grant.refuse(words.sequence);
                Err(refusal)
            }
        })
    }

    /// What makes the frame's bytes visible once they are in place, if a device wrote them into another's memory.
    pub(super) fn flushes(&self) -> &[Arc<dyn Flush>] {
        self.grant.flushes()
    }

    /// How many bytes are missing.
    pub(crate) fn left(&self) -> u64 {
        self.words.payload_bytes - self.done
    }

    /// Calls `fill` once with the memory of the next bytes; it says how many it placed. While it runs, a revoke waits.
    pub(crate) fn place<T>(&mut self, fill: impl FnOnce(&[RawRun]) -> (usize, T)) -> Result<T, Refusal> {
        if self.next >= self.runs.len() {
            self.runs.clear();
            self.next = 0;
            self.grant.append_runs(&self.extents, self.done, MAX_RUNS, &mut self.runs);
        }
        let placing = self.grant.place(self.words.sequence, &self.named, &mut self.seals)?;
        self.grant.bug.dawdle();
        let (placed, result) = fill(&self.runs[self.next..]);
        let from = self.done;
        self.done += placed as u64;
        let look = |watch: &dyn Landing| {
            self.extents.walk(from, self.done, |_, offset, bytes| {
                watch.landed(self.words.sequence, offset..offset + bytes);
                ControlFlow::Continue(())
            });
        };
        match placing.watch() {
            Some(watch) if self.grant.bug.is(Planted::LookUnguarded) => {
                let watch = Arc::clone(watch);
                drop(placing);
                self.grant.bug.dawdle();
                look(&*watch);
            }
            Some(watch) => look(&**watch),
            None => {}
        }
        self.next += advance(&mut self.runs[self.next..], placed);
        Ok(result)
    }

    /// Counts the frame, all of whose bytes are in place. Returns whether that completed the write, which is an event then.
    pub(crate) fn land(&self, core: &Core, peer: &PeerId) -> Result<bool, Refusal> {
        Counters::add(&core.counters.landed_bytes, self.words.payload_bytes);
        self.grant.land(self.words, |notification| {
            let landed = |notification| Event::Landed {
                peer: peer.clone(),
                grant: self.grant.key,
                sequence: self.words.sequence,
                bytes: self.words.write_bytes,
                notification,
            };
            if core.bug.is(Planted::LandedTwice) {
                core.events.push(landed(notification.clone()));
            }
            core.events.push(landed(notification));
        })
    }

    /// Ends a write whose bytes do not count. Returns the word about it.
    pub(crate) fn refuse(&self, refusal: Refusal) -> Refusal {
        self.grant.refuse(self.words.sequence);
        refusal
    }

    /// The scratch, for the next frame.
    pub(crate) fn into_scratch(self) -> Vec<RawRun> {
        self.runs
    }
}
