//! Payload that stays in the sender's memory, as a lane sees it: shares, their answers, and the copies.

use std::io;
use std::time::Instant;

use kvferry_protocol::wire::{FrameHeader, FrameKind, MAX_MAPPED_BYTES, Reach, Refusal, Share};

use super::{Incoming, Lane, NO_HEADER, Outgoing, Turn};
use crate::core::{Core, adopt};
use crate::error::TransportError;
use crate::share::Borrowed;

/// How much is copied out of the peer's memory at a time; a revoke waits for no more.
const COPY_BYTES: usize = 256 << 10;

impl Lane {
    /// Copies a piece of lent payload into the granted pages.
    pub(super) fn copy(&mut self, core: &Core) -> Result<Turn, TransportError> {
        let Incoming::Copy { header, inbound, borrowed } = &mut self.incoming else { return Ok(Turn::Nothing) };
        let placed = inbound.place(|runs| {
            let copied = borrowed.copy(runs, COPY_BYTES);
            (*copied.as_ref().unwrap_or(&0), copied)
        });
        let header = *header;
        match placed {
            Err(refusal) => self.refuse(core, &header, refusal, 0),
            // What a process shares may go away while it lives: it says so, and what was there does not count.
            Ok(Err(error)) => return Err(self.broken("copy out of the peer's memory", error)),
            Ok(Ok(copied)) => {
                self.moved_bytes += copied as u64;
                self.session.note_moved(Instant::now());
                let is_over = inbound.left() == 0;
                if is_over && !borrowed.is_live() {
                    let refusal = inbound.refuse(Refusal::Cancelled);
                    self.refuse(core, &header, refusal, 0);
                } else if is_over {
                    self.land(core, &header);
                }
            }
        }
        Ok(Turn::Moved)
    }

    /// Takes a frame whose bytes stay where they are.
    pub(super) fn adopt(
        &mut self,
        core: &Core,
        header: &FrameHeader,
        table: &[u8],
        borrowed: Option<Borrowed>,
        follows: u64,
    ) -> Result<(), TransportError> {
        let session = &self.session;
        let adopted = adopt(core, session.key, &session.peer, (header, table), borrowed, session);
        match adopted.map_err(|e| self.torn(&e))? {
            Ok(is_whole) => {
                self.session.note_moved(Instant::now());
                if is_whole {
                    self.say(FrameKind::Held, None, header);
                }
                self.incoming = NO_HEADER;
            }
            Err(refusal) => self.refuse(core, header, refusal, follows),
        }
        Ok(())
    }

    /// What is to be told to the peer of the memory that it may read.
    pub(super) fn next_share(&mut self, core: &Core) -> Option<Outgoing> {
        let sharing = self.session.sharing.as_ref().filter(|_| self.tells)?;
        let (share, file) = sharing.lender.next_share(&core.regions)?;
        let table = share.encode();
        let header = FrameHeader { sequence: share.region, ..FrameHeader::with_body(FrameKind::Share, &table) };
        let bytes = [&header.encode(self.session.version)[..], &table].concat();
        Some(Outgoing::Words { bytes, sent: 0, file })
    }

    /// The peer shares memory: says whether it can be read.
    pub(super) fn take_share(&mut self, table: &[u8]) -> Result<(), TransportError> {
        let share = Share::decode(table).map_err(|e| self.torn(&e))?;
        let file = match share.reach {
            Reach::Descriptor { .. } => self.file.take().or_else(|| self.stream.take_file()),
            Reach::Address { .. } => self.file.take(),
        };
        // The system threw it away. The peer shares it anew in a new session; in this one what is granted in place cannot be handed over.
        if self.session.is_in_place && file.is_none() && matches!(share.reach, Reach::Descriptor { .. }) {
            let problem = "the descriptor of what the peer shares is lost: this process has too many files open";
            return Err(self.broken("map shared memory", io::Error::other(problem)));
        }
        let problem = match &self.session.sharing {
            Some(sharing) => sharing.borrower.accept(&share, file).err(),
            None => Some("no memory is shared in this session".to_owned()),
        };
        if let Some(problem) = &problem {
            tracing::warn!(peer = self.session.name, region = share.region, problem, "shared memory cannot be read");
        }
        let problem = problem.unwrap_or_default();
        let body = &problem.as_bytes()[..problem.floor_char_boundary(MAX_MAPPED_BYTES)];
        let header = FrameHeader { sequence: share.region, ..FrameHeader::with_body(FrameKind::Mapped, body) };
        self.words.extend_from_slice(&header.encode(self.session.version));
        self.words.extend_from_slice(body);
        Ok(())
    }

    /// The peer's answer to a share.
    pub(super) fn mapped(&self, core: &Core, header: &FrameHeader, problem: Option<&[u8]>) {
        let (peer, region) = (&self.session.name, header.sequence);
        self.take_answer(core, header, problem.is_none());
        if let Some(problem) = problem {
            let problem: String = String::from_utf8_lossy(problem).chars().filter(|c| !c.is_control()).collect();
            tracing::warn!(peer, region, problem, "the peer cannot read shared memory; its bytes go over the lanes");
        }
    }

    fn take_answer(&self, core: &Core, header: &FrameHeader, is_mapped: bool) {
        let Some(sharing) = &self.session.sharing else { return };
        if is_mapped {
            sharing.lender.mapped(header.sequence, &core.regions);
        }
        sharing.lender.answered();
        if self.session.is_in_place && sharing.lender.is_settled(&core.regions) {
            self.session.ring_lanes(); // what is handed over in place may wait for that
        }
    }
}
