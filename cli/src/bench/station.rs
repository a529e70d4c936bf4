//! One side of a bench: an endpoint, its memory, and at most one transfer in each direction.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_transport::{Adopted, Event, GrantKey, PathReport, PeerAddress, Transport, TransportError};

use super::arena::Arena;
use super::case::{Case, Span};
use super::content;
use super::endpoint::{self, Setup};
use super::flow::{Ground, InPlace, Incoming, Job, Kind, Movers, Outgoing};
use super::words::Word;
use crate::args::{Direction, Spoil};
use crate::error::CliError;

/// How long the other side may take for anything: far longer than it takes, so that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sides that wait for their turn.
const MAX_WAITING: usize = 16;
/// Words that were not yet heard; each side waits for an answer, so there are a few.
const MAX_WORDS: usize = 64;
/// How long a session may take to come up.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);

/// Dropping it ends its sessions before its memory goes.
pub(crate) struct Station {
    transport: Arc<dyn Transport>,
    /// Whether memory is such that another process may map it.
    shareable: bool,
    /// Which way the blocks of the session go.
    path: Option<PathReport>,
    movers: Movers,
    ground: Option<Arc<Ground>>,
    source: Option<Arc<Arena>>,
    target: Option<Arc<Arena>>,
    other: Option<PeerId>,
    /// Who came while another session was not known to be over.
    waiting: VecDeque<PeerId>,
    /// What either said.
    words: VecDeque<(PeerId, Word)>,
    events: Vec<Event>,
    sending: Option<Sending>,
    receiving: Option<Receiving>,
    /// Why the last attempt to reach the other side failed.
    last_refusal: Option<TransportError>,
}

struct Sending {
    flow: Arc<Outgoing>,
    writes: u32,
    started: u32,
    ended: u32,
}

struct Receiving {
    flow: Arc<Incoming>,
    writes: u32,
    landed: u32,
    checked: u32,
    wrong_digests: u32,
    /// What is held where it lies.
    lent: Vec<InPlace>,
}

impl Station {
    /// Opens an endpoint; `name` is what it calls itself unless the setup says otherwise.
    pub(crate) fn new(setup: &Setup, name: &str) -> Result<Self, CliError> {
        let transport = endpoint::open(setup, setup.name.as_deref().unwrap_or(name))?;
        Ok(Self {
            transport: transport.into(),
            shareable: setup.is_shareable(),
            path: None,
            movers: Movers::start()?,
            ground: None,
            source: None,
            target: None,
            other: None,
            waiting: VecDeque::new(),
            words: VecDeque::new(),
            events: Vec::new(),
            sending: None,
            receiving: None,
            last_refusal: None,
        })
    }

    pub(crate) fn local_address(&self) -> PeerAddress {
        self.transport.local_address()
    }

    /// Which way the blocks of the session go, on the side that dialled.
    pub(crate) fn path(&self) -> Option<&PathReport> {
        self.path.as_ref()
    }

    /// How many bytes that this side sent stayed in place, for the other to copy or to read.
    pub(crate) fn lent_bytes(&self) -> u64 {
        let stats = self.transport.stats();
        stats.lent_bytes + stats.handed_bytes
    }

    /// How many bytes went over UCX, either way.
    pub(crate) fn ucx_bytes(&self) -> u64 {
        self.transport.stats().ucx_bytes
    }

    /// Whether a peer is there.
    pub(crate) fn is_met(&self) -> bool {
        self.other.is_some()
    }

    /// Dials, and waits for the session.
    pub(crate) fn meet(&mut self, address: &PeerAddress, shown: &str) -> Result<(), CliError> {
        self.transport.connect(address).map_err(CliError::transport(format!("cannot dial {shown}")))?;
        let start = Instant::now();
        while !self.is_met() {
            self.turn(Duration::from_millis(50))?;
            if start.elapsed() > DIAL_PATIENCE {
                let seconds = DIAL_PATIENCE.as_secs();
                let silent = CliError::Silent { what: "accept a session", seconds };
                let refused = |source| CliError::Gone { peer: shown.to_owned(), source };
                return Err(self.last_refusal.take().map_or(silent, refused));
            }
        }
        Ok(())
    }

    /// Memory and content for a case; `direction` as this side sees it, `memory` bytes for each direction.
    pub(crate) fn begin(&mut self, case: Case, direction: Direction, memory: u64) -> Result<(), CliError> {
        for (arena, is_used) in [(&mut self.source, direction.sends()), (&mut self.target, direction.receives())] {
            if is_used && arena.is_none() {
                *arena = Some(Arc::new(Arena::new(&*self.transport, memory, self.shareable)?));
            }
        }
        let ground = Ground::new(Arc::clone(&self.transport), case);
        if direction.sends() {
            let mut bytes = self.source().own();
            content::fill(&mut bytes, ground.case.block_bytes);
            if ground.case.spoil == Some(Spoil::Source) {
                bytes[ground.source_order[0] as usize * ground.case.block_bytes as usize] ^= 1;
            }
        }
        self.ground = Some(Arc::new(ground));
        Ok(())
    }

    /// The memory that this side sends from.
    pub(crate) fn source(&self) -> &Arc<Arena> {
        self.source.as_ref().expect("a side that sends has begun a case with a source")
    }

    /// The memory that this side receives into.
    pub(crate) fn target(&self) -> &Arc<Arena> {
        self.target.as_ref().expect("a side that receives has begun a case with a target")
    }

    pub(crate) fn ground(&self) -> &Arc<Ground> {
        self.ground.as_ref().expect("a case has begun")
    }

    /// Whether the other side may order this one to send now.
    pub(crate) fn may_send(&self) -> Result<(), CliError> {
        let has_source = self.ground_if_begun()?.case.direction.turned().sends() && self.source.is_some();
        self.may(has_source && self.sending.is_none(), "to send, which does not fit the case or what is under way")
    }

    /// Whether the other side may order this one to receive now.
    pub(crate) fn may_receive(&self) -> Result<(), CliError> {
        let has_target = self.ground_if_begun()?.case.direction.turned().receives() && self.target.is_some();
        self.may(has_target && self.receiving.is_none(), "to receive, which does not fit the case or what is under way")
    }

    /// Whether memory is not lent to a transfer.
    pub(crate) fn may_rest(&self) -> Result<(), CliError> {
        self.may(self.sending.is_none() && self.receiving.is_none(), "for what has to wait until a transfer is over")
    }

    fn may(&self, it_may: bool, what: &str) -> Result<(), CliError> {
        it_may.then_some(()).ok_or_else(|| CliError::Word { found: format!("an order {what}") })
    }

    /// The case, if the other side has begun one.
    pub(crate) fn ground_if_begun(&self) -> Result<&Arc<Ground>, CliError> {
        self.ground.as_ref().ok_or_else(|| CliError::Word { found: "an order before it began a case".to_owned() })
    }

    /// Grants the blocks of a span to the other side.
    pub(crate) fn open(&mut self, span: Span) -> Result<GrantKey, CliError> {
        let ground = Arc::clone(self.ground());
        let target = Arc::new(self.target().lend());
        let blocks = span.of(&ground.target_order);
        let pages = ground.case.pages(target.id(), blocks);
        let in_place = ground.case.in_place;
        let watch = (!in_place).then(|| ground.watch(&target, blocks, span, true)).flatten();
        let grant = match &watch {
            None if in_place => {
                self.transport.grant_in_place(self.other()?, u64::from(span.count) * ground.case.block_bytes)
            }
            Some(watch) => self.transport.grant_watched(self.other()?, pages, Arc::clone(watch) as _),
            None => self.transport.grant(self.other()?, pages),
        };
        let grant = grant.map_err(CliError::transport("no grant"))?;
        let writes = span.writes(ground.case.batch);
        let flow = Arc::new(Incoming { ground, target, grant, span, watch });
        self.receiving = Some(Receiving { flow, writes, landed: 0, checked: 0, wrong_digests: 0, lent: Vec::new() });
        Ok(grant)
    }

    /// Begins to send the blocks of a span into a grant of the other side.
    pub(crate) fn fill(&mut self, span: Span, grant: GrantKey) -> Result<(), CliError> {
        let ground = Arc::clone(self.ground());
        let (source, to) = (Arc::new(self.source().lend()), self.other()?.clone());
        let watch = ground.watch(&source, span.of(&ground.source_order), span, false);
        let writes = span.writes(ground.case.batch);
        let flow = Arc::new(Outgoing { ground, source, to, grant, span, watch });
        self.sending = Some(Sending { flow, writes, started: 0, ended: 0 });
        self.send_more()
    }

    /// Whether all that was begun to be sent was taken.
    pub(crate) fn is_sent(&self) -> bool {
        self.sending.as_ref().is_none_or(|sending| sending.ended == sending.writes)
    }

    /// Whether all that was granted landed and was compared.
    pub(crate) fn is_received(&self) -> bool {
        self.receiving.as_ref().is_none_or(|receiving| receiving.checked == receiving.writes)
    }

    /// Whether something is being received that was not yet closed.
    pub(crate) fn is_receiving(&self) -> bool {
        self.receiving.is_some()
    }

    /// Whether something is being sent that was not yet closed.
    pub(crate) fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Takes the source back after all was sent.
    pub(crate) fn end_sending(&mut self) -> Result<(), CliError> {
        // A write may be over before the thread that posted it has let go of the source.
        while let Some((kind, outcome)) = self.movers.take(true) {
            self.job_done(kind, outcome?);
        }
        self.sending = None;
        Ok(())
    }

    /// How many digests were wrong so far.
    pub(crate) fn wrong_digests(&self) -> u32 {
        self.receiving.as_ref().map_or(0, |receiving| receiving.wrong_digests)
    }

    /// Revokes the grant and takes the target back; lets go of what is held. Returns how many blocks are not what was sent, if that is to be
    /// looked at.
    pub(crate) fn close(&mut self, check: bool) -> Result<u64, CliError> {
        self.movers.settle();
        let Some(Receiving { flow, lent, .. }) = self.receiving.take() else { return Ok(0) };
        self.transport.revoke(flow.grant);
        let (span, case) = (flow.span, &flow.ground.case);
        if case.in_place {
            let copied = self.transport.stats().landed_bytes;
            if copied > 0 {
                return Err(CliError::Word {
                    found: format!("{copied} bytes that were copied, although all stay in place"),
                });
            }
            return Ok(if check { lent.iter().map(|lent| lent.wrong_blocks(&flow)).sum() } else { 0 });
        }
        let ground = Arc::clone(&flow.ground);
        drop(flow); // the target is this side's again
        if !check {
            return Ok(0);
        }
        let (sources, targets) = (span.of(&ground.source_order), span.of(&ground.target_order));
        Ok(content::wrong_blocks(&self.target().own(), ground.case.block_bytes, sources, targets))
    }

    pub(crate) fn say(&self, word: &Word) -> Result<(), CliError> {
        let sent = self.transport.send(self.other()?, word.encode()?);
        sent.map_err(CliError::transport("a word was not taken"))
    }

    /// The next word of the other side, if it is there.
    pub(crate) fn heard(&mut self) -> Option<Word> {
        let at = self.words.iter().position(|(peer, _)| Some(peer) == self.other.as_ref())?;
        self.words.remove(at).map(|(_, word)| word)
    }

    /// Waits for the next word.
    pub(crate) fn hear(&mut self, what: &'static str) -> Result<Word, CliError> {
        self.until(what, Self::has_word)?;
        Ok(self.heard().expect("it was just seen"))
    }

    fn has_word(&self) -> bool {
        self.words.iter().any(|(peer, _)| Some(peer) == self.other.as_ref())
    }

    /// Turns until `done` holds.
    pub(crate) fn until(&mut self, what: &'static str, done: impl Fn(&Self) -> bool) -> Result<(), CliError> {
        let start = Instant::now();
        while !done(self) {
            if start.elapsed() > PATIENCE {
                return Err(CliError::Silent { what, seconds: PATIENCE.as_secs() });
            }
            self.turn(Duration::from_millis(50))?;
        }
        Ok(())
    }

    /// Waits for something to happen, and deals with it.
    pub(crate) fn turn(&mut self, wait: Duration) -> Result<(), CliError> {
        let digests_only =
            self.is_sent() && self.receiving.as_ref().is_some_and(|r| r.landed == r.writes && r.checked < r.landed);
        if !digests_only {
            let wait = if self.has_word() { Duration::ZERO } else { wait };
            self.transport.poll(&mut self.events, wait);
        }
        let events = std::mem::take(&mut self.events);
        for event in events {
            self.take_event(event)?;
        }
        while let Some((kind, outcome)) = self.movers.take(digests_only && !self.is_received()) {
            self.job_done(kind, outcome?);
        }
        self.send_more()
    }

    /// Forgets a session that is over: its grants are revoked and its posts have ended.
    pub(crate) fn forget(&mut self) {
        self.movers.settle();
        (self.sending, self.receiving) = (None, None);
        self.other = self.waiting.pop_front();
        let (other, waiting) = (&self.other, &self.waiting);
        self.words.retain(|(peer, _)| Some(peer) == other.as_ref() || waiting.contains(peer));
    }

    /// Ends the session with the other side.
    pub(crate) fn part(&self, reason: &str) {
        if let Some(other) = &self.other {
            self.transport.disconnect(other, reason);
        }
    }

    fn other(&self) -> Result<&PeerId, CliError> {
        let reason = || TransportError::NotConnected { peer: "the other side".to_owned() };
        self.other.as_ref().ok_or_else(|| CliError::Gone { peer: "no session".to_owned(), source: reason() })
    }

    fn take_event(&mut self, event: Event) -> Result<(), CliError> {
        match event {
            Event::Up { peer, path, .. } if self.other.is_none() => (self.other, self.path) = (Some(peer), Some(path)),
            Event::Up { peer, .. } if self.waiting.len() < MAX_WAITING => self.waiting.push_back(peer),
            Event::Up { peer, .. } => self.transport.disconnect(&peer, "too many sides want to measure at once"),
            Event::Down { peer: Some(peer), .. } if self.waiting.contains(&peer) => {
                self.waiting.retain(|waiting| *waiting != peer);
                self.words.retain(|(from, _)| *from != peer);
            }
            Event::Down { peer, address, reason } if peer.is_some() && peer == self.other || address.is_some() => {
                // An attempt that failed is made again, unless this was no matter of time.
                let is_final = peer.is_some()
                    || matches!(reason, TransportError::Authentication { .. } | TransportError::Protocol { .. });
                if is_final {
                    let peer = peer.map_or_else(|| format!("{address:?}"), |peer| peer.to_string());
                    return Err(CliError::Gone { peer, source: reason });
                }
                self.last_refusal = Some(reason);
            }
            Event::Message { peer, message } if self.words.len() < MAX_WORDS => match Word::decode(&message)? {
                Word::Refused { why } => return Err(CliError::Refused { why }),
                word => self.words.push_back((peer, word)),
            },
            Event::Posted { outcome, .. } => {
                outcome.map_err(CliError::transport("a write failed"))?;
                // In place a write is taken when it is held; it ends when that is over.
                if let Some(sending) = self.sending.as_mut().filter(|sending| !sending.flow.ground.case.in_place) {
                    sending.ended += 1;
                }
            }
            Event::Held { .. } => {
                if let Some(sending) = &mut self.sending {
                    sending.ended += 1;
                }
            }
            Event::Lent { grant, sequence, notification, adopted, .. } => {
                self.lent(grant, sequence, adopted, &notification)?;
            }
            Event::Landed { grant, sequence, notification, .. } => self.landed(grant, sequence, &notification)?,
            _ => {}
        }
        Ok(())
    }

    /// Checks the only write of a request at once, and others beside what goes on.
    fn check(&mut self, job: Job, is_alone: bool) -> Result<(), CliError> {
        if is_alone {
            let is_right = job.run()?;
            self.job_done(Kind::Check, is_right);
        } else {
            self.movers.submit(job);
        }
        Ok(())
    }

    fn lent(&mut self, grant: GrantKey, write: u32, adopted: Adopted, notification: &[u8]) -> Result<(), CliError> {
        let Some(receiving) = self.receiving.as_mut().filter(|receiving| receiving.flow.grant == grant) else {
            return Ok(());
        };
        let lent = InPlace { write, adopted: Arc::new(adopted) };
        receiving.landed += 1;
        receiving.lent.push(lent.clone());
        if !receiving.flow.ground.case.digest {
            receiving.checked += 1;
            return Ok(());
        }
        let digest = digest_in(notification)?;
        let job = Job::CheckInPlace { flow: Arc::clone(&receiving.flow), lent, digest };
        let is_alone = receiving.writes == 1;
        self.check(job, is_alone)
    }

    fn landed(&mut self, grant: GrantKey, write: u32, notification: &[u8]) -> Result<(), CliError> {
        let Some(receiving) = self.receiving.as_mut().filter(|receiving| receiving.flow.grant == grant) else {
            return Ok(());
        };
        receiving.landed += 1;
        if !receiving.flow.ground.case.digest {
            receiving.checked += 1;
            return Ok(());
        }
        let digest = digest_in(notification)?;
        if let Some(is_right) = receiving.flow.check_taken(write, digest) {
            self.job_done(Kind::Check, is_right);
            return Ok(());
        }
        let job = Job::Check { flow: Arc::clone(&receiving.flow), write, digest };
        let is_alone = receiving.writes == 1;
        self.check(job, is_alone)
    }

    fn job_done(&mut self, kind: Kind, is_right: bool) {
        if let (Kind::Check, Some(receiving)) = (kind, &mut self.receiving) {
            receiving.checked += 1;
            receiving.wrong_digests += u32::from(!is_right);
        }
    }

    /// Starts as many writes as may be under way.
    fn send_more(&mut self) -> Result<(), CliError> {
        let Some(sending) = &mut self.sending else { return Ok(()) };
        let case = &sending.flow.ground.case;
        let is_watched = sending.flow.watch.is_some() && self.transport.watches(&sending.flow.to);
        while sending.started < sending.writes && sending.started - sending.ended < case.posts {
            let job = Job::Ship(Arc::clone(&sending.flow), sending.started);
            sending.started += 1;
            // One write has nobody to take turns with, and without digests there is nothing to do.
            if sending.writes == 1 || !case.digest || is_watched {
                job.run()?;
            } else {
                self.movers.submit(job);
            }
        }
        Ok(())
    }
}

fn digest_in(notification: &[u8]) -> Result<u64, CliError> {
    let digest = notification.try_into().map(u64::from_le_bytes);
    digest.map_err(|_| CliError::Word { found: "a write without a digest".to_owned() })
}

impl Drop for Station {
    fn drop(&mut self) {
        self.movers.settle();
        self.transport.shutdown();
    }
}
