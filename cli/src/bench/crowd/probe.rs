//! One more peer, to which small writes go: how long they take with nobody beside it, and with all the idle ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_transport::{Event, GrantKey, Source, Transport, Write};

use super::peers::Crowd;
use super::{Node, PATIENCE};
use crate::bench::arena::{Arena, Lent};
use crate::bench::case::{Case, Span};
use crate::bench::report::Rounded;
use crate::bench::words::Word;
use crate::error::CliError;
use crate::figures::Micros;

/// What a write carries.
pub(super) const WRITE_BYTES: u64 = 4 << 10;
/// Measured writes.
const WRITES: u32 = 5000;
/// Writes before them.
const WARM_UP: u32 = 200;

/// The node's side.
pub(super) struct Probe {
    peer: PeerId,
    grant: GrantKey,
    case: Case,
    source: Lent,
    sequence: u32,
}

/// A window of one block.
pub(super) fn case(memory: u64) -> Result<Case, CliError> {
    Case::new(WRITE_BYTES, Some(1), Some(1), 1, memory.max(WRITE_BYTES))
}

impl Probe {
    pub(super) fn meet(node: &Node, crowd: &mut Crowd) -> Result<Self, CliError> {
        let case = case(WRITE_BYTES)?;
        let source = Arc::new(Arena::new(&*node.transport, case.bytes(), node.shareable)?).lend();
        crowd.say("probe")?;
        let (start, mut found) = (Instant::now(), None);
        while found.is_none() {
            if start.elapsed() > PATIENCE {
                return Err(CliError::Silent { what: "bring the probe up", seconds: PATIENCE.as_secs() });
            }
            node.watch(Duration::from_millis(20), |event| {
                if let Event::Message { peer, message } = event {
                    match Word::decode(&message)? {
                        Word::Opened { grant } => found = Some((peer, grant)),
                        other => return Err(other.unexpected()),
                    }
                }
                Ok(())
            })?;
        }
        let (peer, grant) = found.expect("the loop ends with it");
        Ok(Self { peer, grant, case, source, sequence: 0 })
    }

    /// Writes one after the other: from the post to the receiver's word.
    pub(super) fn write_many(&mut self, node: &Node) -> Result<Rounded, CliError> {
        let (mut micros, mut events) = (Vec::new(), Vec::new());
        for index in 0..WARM_UP + WRITES {
            let start = Instant::now();
            self.post(&*node.transport)?;
            let mut is_over = false;
            while !is_over {
                node.transport.poll(&mut events, PATIENCE);
                for event in events.drain(..) {
                    match event {
                        Event::Posted { outcome, .. } => {
                            outcome.map_err(CliError::transport("a small write failed"))?;
                            is_over = true;
                        }
                        Event::Down { peer: Some(peer), reason, .. } => {
                            return Err(CliError::Gone { peer: peer.to_string(), source: reason });
                        }
                        _ => {}
                    }
                }
            }
            if index >= WARM_UP {
                micros.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        Ok(Micros::of(&mut micros).into())
    }

    fn post(&mut self, transport: &dyn Transport) -> Result<(), CliError> {
        let write = Write {
            grant: self.grant,
            sequence: self.sequence,
            extents: vec![Span { first: 0, count: 1 }.extent(WRITE_BYTES)],
            source: Source::Pages(vec![self.case.pages(self.source.id(), &[0])]),
            notification: Bytes::new(),
        };
        self.sequence += 1;
        let posted = transport.post(&self.peer, write).map(drop);
        posted.map_err(|error| CliError::Transport { what: "a write was not taken".to_owned(), source: error.reason })
    }
}

/// The peer's side: grants a window as soon as the node is there, and takes what comes until the session ends.
pub(super) fn receive(transport: &dyn Transport, shareable: bool) -> Result<(), CliError> {
    let case = case(WRITE_BYTES)?;
    let arena = Arc::new(Arena::new(transport, case.bytes(), shareable)?);
    let lent = arena.lend();
    let outcome = (|| {
        let mut events = Vec::new();
        loop {
            transport.poll(&mut events, Duration::from_secs(1));
            for event in events.drain(..) {
                match event {
                    Event::Up { peer, .. } => {
                        let grant = transport.grant(&peer, case.pages(lent.id(), &[0]));
                        let grant = grant.map_err(CliError::transport("no grant"))?;
                        let word = Word::Opened { grant }.encode()?;
                        transport.send(&peer, word).map_err(CliError::transport("a word was not taken"))?;
                    }
                    Event::Down { peer: Some(_), .. } => return Ok(()),
                    _ => {}
                }
            }
        }
    })();
    // Before the memory goes, however it ended.
    transport.shutdown();
    outcome
}
