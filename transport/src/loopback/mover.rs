//! The thread that reaches peers and copies what its endpoint posts.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvferry_protocol::wire::{FrameHeader, Refusal, VERSIONS};

use super::endpoint::{Shared, Target};
use super::faults::{Dice, Faults};
use super::link::End;
use super::{FaultPlan, Network};
use crate::api::{Event, PathKind, PathReport, PeerAddress};
use crate::core::{Carrier, Counters, FrameCut, Inbound};
use crate::error::TransportError;
use crate::raw::{self, RawRun, advance};

pub(crate) const FIRST_BACK_OFF: Duration = Duration::from_millis(1);
const LONGEST_BACK_OFF: Duration = Duration::from_millis(100);

/// Bytes that are copied under one hold of the guards: a revoke waits for no more.
const COPY_BYTES: usize = 64 << 10;

/// The version that frames carry here.
const VERSION: u16 = 1;

/// A frame that comes later than it was sent.
struct Held {
    end: Arc<End>,
    cut: FrameCut,
    /// The cut's payload.
    runs: Vec<RawRun>,
    faults: Faults,
    after: u32,
}

pub(crate) fn run(shared: &Arc<Shared>, faults: FaultPlan) {
    let mut mover = Mover { dice: Dice::new(faults), held: Vec::new(), scratch: Vec::new() };
    loop {
        {
            let mut state = shared.lock();
            if state.is_stopping {
                return;
            }
            // Before anything is looked at: what changes from here on wakes the thread again.
            state.is_woken = false;
        }
        let next_try = reach(shared);
        let ends: Vec<_> = shared.lock().ends.values().cloned().collect();
        let mut is_idle = true;
        for end in &ends {
            is_idle &= !deliver_messages(end);
            is_idle &= !mover.move_frame(end);
        }
        is_idle &= !mover.release_held(is_idle);
        let state = shared.lock();
        if is_idle && !state.is_woken && !state.is_stopping {
            drop(shared.wait(state, next_try));
        }
    }
}

/// Tries the addresses whose time has come; returns when the next one's comes.
fn reach(shared: &Arc<Shared>) -> Option<Instant> {
    let now = Instant::now();
    let due: Vec<PeerAddress> = {
        let state = shared.lock();
        let is_up = |target: &Target| target.peer.as_ref().is_some_and(|peer| state.ends.contains_key(peer));
        state.targets.iter().filter(|t| t.try_at <= now && !is_up(t)).map(|t| t.address).collect()
    };
    for address in due {
        let outcome = dial(shared, &shared.network, address);
        let mut state = shared.lock();
        let Some(target) = state.targets.iter_mut().find(|target| target.address == address) else { continue };
        match outcome {
            Ok(peer) => {
                target.peer = Some(peer);
                target.back_off = FIRST_BACK_OFF;
                target.try_at = now + FIRST_BACK_OFF;
            }
            Err(reason) => {
                target.try_at = now + target.back_off;
                target.back_off = (target.back_off * 2).min(LONGEST_BACK_OFF);
                Counters::add(&shared.core.counters.sessions_down, 1);
                shared.core.events.push(Event::Down { peer: None, address: Some(address), reason });
            }
        }
    }
    let state = shared.lock();
    let is_up = |target: &Target| target.peer.as_ref().is_some_and(|peer| state.ends.contains_key(peer));
    state.targets.iter().filter(|target| !is_up(target)).map(|target| target.try_at).min()
}

fn dial(
    shared: &Arc<Shared>,
    network: &Network,
    address: PeerAddress,
) -> Result<kvferry_protocol::PeerId, TransportError> {
    let refused = |kind: io::ErrorKind| TransportError::Io {
        peer: format!("{address:?}"),
        operation: "reach a loopback endpoint",
        source: Arc::new(kind.into()),
    };
    let PeerAddress::Loopback(number) = address else { return Err(refused(io::ErrorKind::Unsupported)) };
    if number == shared.number {
        return Err(refused(io::ErrorKind::InvalidInput));
    }
    let remote = network.find(number).ok_or_else(|| refused(io::ErrorKind::ConnectionRefused))?;
    shared.supersede(&remote.peer);
    remote.supersede(&shared.peer);
    let (low, high) = if shared.number < number { (shared, &remote) } else { (&remote, shared) };
    let (mut low_state, mut high_state) = (low.lock(), high.lock());
    let (ours, theirs) =
        if shared.number < number { (&mut low_state, &mut high_state) } else { (&mut high_state, &mut low_state) };
    if ours.ends.contains_key(&remote.peer) {
        // It was quicker, or has another address.
        shared.core.events.push(Event::Found { peer: remote.peer.clone(), address });
        return Ok(remote.peer.clone());
    }
    if ours.superseded.contains(&remote.peer) || theirs.superseded.contains(&shared.peer) {
        return Err(refused(io::ErrorKind::ConnectionAborted));
    }
    if theirs.is_stopping || theirs.ends.len() >= remote.config.max_peers || theirs.ends.contains_key(&shared.peer) {
        return Err(refused(io::ErrorKind::ConnectionRefused));
    }
    let [near, far] = [shared, &remote].map(|end| VERSIONS.up_to(end.config.newest_version));
    let Some(version) = near.newest_common(far) else {
        return Err(refused(io::ErrorKind::Unsupported));
    };
    let (near, far) = End::pair(shared, &remote, address);
    for (end, state) in [(&near, ours), (&far, theirs)] {
        end.local.core.grants.open_session(end.local_session);
        state.ends.insert(end.remote.peer.clone(), Arc::clone(end));
        state.is_woken = true;
        Counters::add(&end.local.core.counters.sessions_up, 1);
        end.local.core.events.push(Event::Up {
            peer: end.remote.peer.clone(),
            session: end.local_session.0,
            address: end.address,
            version,
            greeting: end.remote.greeting.clone(),
            path: PathReport { kind: PathKind::Loopback, plain: PathKind::Loopback, not: Vec::new() },
        });
    }
    Ok(remote.peer.clone())
}

fn deliver_messages(end: &End) -> bool {
    let mut delivered = false;
    while !end.remote.core.events.is_full() {
        let Some(message) = end.messages.lock().unwrap_or_else(PoisonError::into_inner).pop_front() else { break };
        if end.is_over() {
            break;
        }
        end.remote.core.events.push(Event::Message { peer: end.local.peer.clone(), message });
        delivered = true;
    }
    delivered
}

struct Mover {
    dice: Dice,
    held: Vec<Held>,
    scratch: Vec<RawRun>,
}

impl Mover {
    /// Moves one frame of a session, or puts it aside. Returns whether there was one.
    fn move_frame(&mut self, end: &Arc<End>) -> bool {
        if end.remote.core.events.is_full() {
            return false;
        }
        let (core, frame_bytes) = (&end.local.core, end.local.config.frame_bytes);
        let Some(mut cut) = end.outbox.next_frame(core, frame_bytes, VERSION, None) else { return false };
        // The outbox gives out no payload of a device's.
        let Some(runs) = cut.take_host_runs() else { return true };
        let faults = self.dice.draw();
        let (end, after) = (Arc::clone(end), faults.delay);
        let held = Held { end, cut, runs, faults, after };
        if after > 0 {
            self.held.push(held);
        } else {
            self.carry(held);
        }
        true
    }

    /// Lets frames go whose time has come: all of them if there is nothing else to do.
    fn release_held(&mut self, is_idle: bool) -> bool {
        let is_due = |held: &mut Held| {
            held.after = held.after.saturating_sub(1);
            is_idle || held.after == 0
        };
        let due: Vec<_> = self.held.extract_if(.., is_due).collect();
        let released = !due.is_empty();
        // The last one sent comes first: reordering is what delay is for.
        for held in due.into_iter().rev() {
            self.carry(held);
        }
        released
    }

    fn carry(&mut self, held: Held) {
        let Held { end, cut, runs, faults, .. } = held;
        self.carry_once(&end, &cut, runs.clone(), faults, false);
        if faults.duplicate {
            self.carry_once(&end, &cut, runs, Faults::default(), true);
        }
    }

    fn carry_once(&mut self, end: &Arc<End>, cut: &FrameCut, mut runs: Vec<RawRun>, faults: Faults, is_copy: bool) {
        let (local, remote) = (&end.local.core, &end.remote.core);
        let refuse = |refusal: Refusal| {
            Counters::add(&remote.counters.refused_writes, 1);
            Counters::add(&remote.counters.dropped_bytes, cut.payload_bytes);
            if !is_copy {
                let outcome = match refusal {
                    Refusal::Cancelled => TransportError::Cancelled,
                    other => TransportError::Refused { reason: other.reason().to_owned() },
                };
                end.outbox.finish(local, cut.post.grant, cut.post.sequence, Err(outcome));
            }
        };
        let mut inbound = match self.admit(end, &cut.head) {
            Ok(inbound) => inbound,
            Err(refusal) => return refuse(refusal),
        };
        let cut_at = if faults.cut { inbound.left() / 2 } else { 0 };
        let mut flip_at = faults.flip.map(|at| at % inbound.left());
        let mut runs = &mut runs[..];
        while inbound.left() > cut_at {
            let Some(reading) = cut.post.read_source() else { return };
            let placed = inbound.place(|to| {
                let copied = copy_some(runs, to);
                if let Some(at) = flip_at.take_if(|at| *at < copied as u64) {
                    flip_bit(to, at as usize);
                }
                (copied, copied)
            });
            drop(reading);
            match placed {
                Ok(copied) => {
                    flip_at = flip_at.map(|at| at - copied as u64);
                    Counters::add(&local.counters.sent_bytes, copied as u64);
                    let over = advance(runs, copied);
                    runs = &mut runs[over..];
                }
                Err(refusal) => return refuse(refusal),
            }
        }
        if faults.cut {
            return end.finish(&broken("the connection was cut"), &broken("the connection was cut"));
        }
        match inbound.land(remote, &end.local.peer) {
            Ok(true) if faults.lose_ack => end.finish(&broken("the word was lost"), &broken("the word was lost")),
            Ok(true) => end.outbox.finish(local, cut.post.grant, cut.post.sequence, Ok(())),
            Ok(false) => {}
            Err(refusal) => refuse(refusal),
        }
        self.scratch = inbound.into_scratch();
    }

    fn admit(&mut self, end: &End, head: &[u8]) -> Result<Inbound, Refusal> {
        let (header, table) = head.split_first_chunk().ok_or(Refusal::Inconsistent)?;
        let scratch = std::mem::take(&mut self.scratch);
        let admitted = FrameHeader::decode(header, VERSION).and_then(|header| {
            header.check_table(table)?;
            Inbound::admit(&end.remote.core, end.remote_session, &header, table, Carrier::Processor, scratch)
        });
        // What this process encoded decodes; if not, the write is refused like any that makes no sense.
        admitted.unwrap_or(Err(Refusal::Inconsistent))
    }
}

/// Copies from the front of `from` to the front of `to`, at most [`COPY_BYTES`]. Returns how many bytes.
fn copy_some(from: &[RawRun], to: &[RawRun]) -> usize {
    let (mut copied, mut to_at, mut skip) = (0, 0, 0);
    for &run in from {
        let mut run = run;
        while run.bytes() > 0 && copied < COPY_BYTES {
            let Some(target) = to.get(to_at).map(|run| run.skip(skip)) else { return copied };
            let step = run.bytes().min(target.bytes()).min(COPY_BYTES - copied);
            raw::copy(run.keep(step), target.keep(step));
            copied += step;
            run = run.skip(step);
            skip += step;
            if step == target.bytes() {
                (to_at, skip) = (to_at + 1, 0);
            }
        }
        if copied >= COPY_BYTES {
            break;
        }
    }
    copied
}

fn flip_bit(runs: &[RawRun], mut at: usize) {
    for run in runs {
        if at < run.bytes() {
            return raw::flip(*run, at, 1 << (at % 8));
        }
        at -= run.bytes();
    }
}

fn broken(what: &str) -> TransportError {
    TransportError::Io {
        peer: "loopback".to_owned(),
        operation: "carry a frame",
        source: Arc::new(io::Error::new(io::ErrorKind::ConnectionReset, what.to_owned())),
    }
}
