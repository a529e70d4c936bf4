//! Sessions and messages between two ranks, as a transport promises them and no better.
//!
//! Messages of one session arrive in order, at most once. A partition holds them back, until it heals or a side gives the session
//! up; each side learns of its session's end in its own time.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::ids::{Generation, Incarnation, PeerId, PpRank, TpRank, TransferId};
use crate::message::{Abort, Message, Offer, Renew, Stop, Stopped, Verdict, Working};
use crate::transfer::PostOutcome;

use super::node::Inbox;
use super::plan::MS;
use super::report::DriverBug;
use super::rng::mix;
use super::versions;
use super::world::{Event, World};

/// The sessions of one prefill and one decode rank. Two of a kind are by side: prefill, decode.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) ends: [usize; 2],
    pub(super) session: u64,
    pub(super) version: u16,
    /// Nothing new enters the session.
    cut: bool,
    pub(super) up: [bool; 2],
    /// The session ended on a side, but its driver still hears what came before, and then of the end.
    lagging: [bool; 2],
    /// Another incarnation's session took the place of the last one, and its driver has not heard of either.
    superseded: [bool; 2],
    /// Who the session is between.
    incarnations: [u64; 2],
    /// Nothing gets through to a side until then.
    pub(super) blocked: [u64; 2],
    /// What is on its way to each side: from which incarnation, and the bytes.
    queue: [VecDeque<(u64, Vec<u8>)>; 2],
    /// When the last message to each side arrives.
    arrival: [u64; 2],
    /// The last messages: to which side, from which incarnation.
    said: VecDeque<(usize, u64, Rc<Message>)>,
}

pub(super) const PREFILL: usize = 0;
pub(super) const DECODE: usize = 1;

/// A transport ends a session whose reader is further behind.
const MAX_QUEUE: usize = 64;

impl Link {
    pub(super) fn new(ends: [usize; 2]) -> Self {
        Self {
            ends,
            session: 0,
            version: 0,
            cut: true,
            up: [false; 2],
            lagging: [false; 2],
            superseded: [false; 2],
            incarnations: [0; 2],
            blocked: [0; 2],
            queue: [VecDeque::new(), VecDeque::new()],
            arrival: [0; 2],
            said: VecDeque::new(),
        }
    }

    /// How much longer nothing gets through to a side.
    pub(super) const fn blocked_for(&self, side: usize, now: u64) -> u64 {
        self.blocked[side].saturating_sub(now)
    }

    /// On which side a rank is.
    pub(super) fn side_of(&self, node: usize) -> usize {
        usize::from(self.ends[DECODE] == node)
    }

    /// Whether a side may say something now.
    pub(super) const fn carries_from(&self, side: usize) -> bool {
        self.up[side] && (!self.cut || self.lagging[1 - side])
    }
}

impl World {
    /// Begins the next session, unless one is up or an engine is away.
    pub(super) fn connect(&mut self, link: usize) -> Result<(), String> {
        let now = self.now;
        let ends = self.links[link].ends;
        let (engines, state) = (ends.map(|end| self.plan.nodes[end].engine), &self.links[link]);
        let incarnations = ends.map(|end| self.nodes[end].incarnation);
        let in_use = |side: usize| state.up[side] || state.lagging[side];
        let old = |side: usize| state.incarnations[1 - side] != incarnations[1 - side];
        let over = [PREFILL, DECODE].iter().all(|&side| !in_use(side) || old(side));
        if engines.iter().any(|&engine| !self.engines[engine].alive) || !state.cut || !over {
            return Ok(());
        }
        let blocked = state.blocked_for(PREFILL, now).max(state.blocked_for(DECODE, now));
        if blocked > 0 {
            let wait = blocked + self.delay(30);
            self.after(wait, Event::Connect { link });
            return Ok(());
        }
        let dialler = usize::from(self.rng.once_in(2));
        let ranges = [dialler, 1 - dialler].map(|side| self.engines[engines[side]].versions);
        let version = match versions::negotiate(ranges[0], ranges[1]) {
            Ok(version) => version,
            Err(error) if error.starts_with("invariant") => return Err(error),
            Err(_) => {
                self.report.count("sessions refused for their versions");
                return Ok(());
            }
        };
        self.report.count(if version == 1 { "sessions in version 1" } else { "sessions in a later version" });
        for side in [PREFILL, DECODE] {
            self.supersede(link, side);
        }
        let state = &mut self.links[link];
        state.session += 1;
        state.incarnations = incarnations;
        state.version = version;
        state.cut = false;
        state.queue.iter_mut().for_each(VecDeque::clear);
        let session = state.session;
        for side in [PREFILL, DECODE] {
            let wait = self.delay(20);
            self.after(wait, Event::SideUp { link, session, side });
            self.links[link].arrival[side] = now + wait + 1;
        }
        for (side, incarnation, message) in std::mem::take(&mut self.links[link].said) {
            if self.rng.once_in(self.plan.odds.repeat) {
                self.say(link, side, incarnation, &message)?;
            }
        }
        Ok(())
    }

    pub(super) fn side_up(&mut self, link: usize, session: u64, side: usize) {
        let state = &mut self.links[link];
        if state.session != session || state.cut || state.up[side] {
            return;
        }
        state.up[side] = true;
        state.superseded[side] = false;
        let (node, version) = (state.ends[side], state.version);
        let incarnation = state.incarnations[1 - side];
        self.push(node, Inbox::Up { link, incarnation, session, version });
    }

    /// The network between two ranks fails; each side learns of it in its own time.
    pub(super) fn cut(&mut self, link: usize) {
        if std::mem::replace(&mut self.links[link].cut, true) {
            return;
        }
        for side in [PREFILL, DECODE] {
            self.side_will_be_down(link, side, 80);
        }
    }

    fn side_will_be_down(&mut self, link: usize, side: usize, usual: u64) {
        let (session, blocked) = (self.links[link].session, self.links[link].blocked_for(side, self.now));
        let wait = blocked + self.delay(usual);
        self.after(wait, Event::SideDown { link, session, side });
    }

    /// A side learns that its session ended, or ends it: its grants are dead before its driver hears of it.
    pub(super) fn side_down(&mut self, link: usize, session: u64, side: usize) {
        if self.links[link].session != session {
            return;
        }
        if !std::mem::replace(&mut self.links[link].cut, true) {
            self.side_will_be_down(link, 1 - side, 60);
        }
        let was_up = std::mem::replace(&mut self.links[link].up[side], false);
        if was_up {
            self.end_transport(link, side);
            self.links[link].lagging[side] = true;
            let lags = if self.rng.once_in(3) { 2 * MS..200 * MS } else { 2 * MS..40 * MS };
            let wait = if self.rng.once_in(3) { self.rng.within(lags) } else { 0 };
            self.after(wait, Event::SideTold { link, session, side });
        } else if std::mem::replace(&mut self.links[link].superseded[side], false) {
            // The session that took the last one's place never came up.
            self.push(self.links[link].ends[side], Inbox::Down { link });
        }
        self.reconnect_if_over(link);
    }

    /// The driver of a side hears that its session ended.
    pub(super) fn side_told(&mut self, link: usize, session: u64, side: usize) {
        let state = &mut self.links[link];
        if state.session == session && std::mem::replace(&mut state.lagging[side], false) {
            self.push(self.links[link].ends[side], Inbox::Down { link });
            self.reconnect_if_over(link);
        }
    }

    fn reconnect_if_over(&mut self, link: usize) {
        let state = &self.links[link];
        if state.up == [false; 2] && state.lagging == [false; 2] {
            let wait = self.delay(150);
            self.after(wait, Event::Connect { link });
        }
    }

    /// The session of an older incarnation makes way: its end is told by the next one's beginning.
    fn supersede(&mut self, link: usize, side: usize) {
        let state = &mut self.links[link];
        let was_up = std::mem::replace(&mut state.up[side], false);
        if std::mem::replace(&mut state.lagging[side], false) || was_up {
            state.superseded[side] = true;
            self.report.count("sessions superseded");
            self.end_transport(link, side);
        }
    }

    /// What a side's transport does at a session's end: its grants are dead, or its posts end.
    fn end_transport(&mut self, link: usize, side: usize) {
        self.kill_grants(link, side);
        let late = self.rng.once_in(self.plan.odds.late_posts);
        for write in self.posts_on(link, side) {
            let held =
                self.writes.part(write).is_some_and(|part| self.nodes[self.links[link].ends[side]].is_held(part));
            if late || held {
                let wait = if held { self.rng.within(300 * MS..700 * MS) } else { self.rng.within(0..400 * MS) };
                self.after(wait, Event::PostEnds { write, outcome: PostOutcome::Lost });
            } else {
                self.post_ends(write, PostOutcome::Lost);
            }
        }
    }

    /// A crashed rank's sessions end at once on its own side; the peers hear of it at once, or only by its silence.
    pub(super) fn drop_sessions(&mut self, node: usize, silently: bool) {
        let silence = if silently { self.plan.timing.keep_alive * MS } else { 0 };
        for link in self.plan.nodes[node].links.clone() {
            let state = &mut self.links[link];
            let side = usize::from(state.ends[DECODE] == node);
            state.up[side] = false;
            state.lagging[side] = false;
            state.superseded[side] = false;
            if !std::mem::replace(&mut state.cut, true) {
                let session = state.session;
                let wait = silence + self.links[link].blocked_for(1 - side, self.now) + self.delay(80);
                self.after(wait, Event::SideDown { link, session, side: 1 - side });
            }
        }
    }

    /// A rank says something, now and then twice, or with something that is not for the other side.
    pub(super) fn send(&mut self, from: usize, link: usize, message: Message) -> Result<(), String> {
        self.check_durations(&message)?;
        let side = 1 - self.links[link].side_of(from);
        if !self.links[link].carries_from(1 - side) {
            return Ok(());
        }
        let incarnation = self.nodes[from].incarnation;
        let message = Rc::new(message);
        let said = &mut self.links[link].said;
        said.push_back((side, incarnation, Rc::clone(&message)));
        if said.len() > 6 {
            said.pop_front();
        }
        self.say(link, side, incarnation, &message)?;
        if self.rng.once_in(self.plan.odds.echo) {
            self.say(link, side, incarnation, &message)?;
        }
        if self.rng.once_in(self.plan.odds.stray) {
            let stray = self.stray(self.links[link].ends[side], &message);
            self.say(link, side, incarnation, &stray)?;
        }
        Ok(())
    }

    /// A message that a rank never takes, about the same transfer.
    fn stray(&mut self, to: usize, message: &Message) -> Message {
        let transfer = message.transfer().unwrap_or(TransferId::new(0));
        let generation = Generation::new(self.rng.within(0..3) as u32);
        let to_sender = self.part_of(transfer).is_some_and(|part| self.plan.parts[part].sender == to);
        match (to_sender, self.rng.within(0..4)) {
            (true, 0) => Message::Working(Working { transfer }),
            (true, 1) => Message::Stopped(Stopped { transfer, generation }),
            (true, 2) => Message::Abort(Abort { transfer, why: Verdict::Cancelled }),
            (true, _) => Message::Offer(Offer { transfer, held: super::plan::whole() }),
            (_, 0) => Message::Renew(Renew { transfer, ttl_ms: 1 }),
            // It may be for a receiver, but comes at any time.
            (_, 1) => Message::Working(Working { transfer }),
            (_, _) => Message::Stop(Stop { transfer, generation }),
        }
    }

    fn say(&mut self, link: usize, side: usize, incarnation: u64, message: &Message) -> Result<(), String> {
        if !versions::has(self.links[link].version, message) {
            // It is a word of an earlier session, in a later version.
            return Ok(());
        }
        let version = match self.options.driver_bug {
            Some(DriverBug::NewestVersionSpoken) => {
                let from = self.links[link].ends[1 - side];
                self.engines[self.plan.nodes[from].engine].versions.max
            }
            _ => self.links[link].version,
        };
        self.say_bytes(link, side, incarnation, versions::encode(version, message)?);
        Ok(())
    }

    /// Bytes on their way to a side.
    pub(super) fn say_bytes(&mut self, link: usize, side: usize, incarnation: u64, bytes: Vec<u8>) {
        let said = bytes.iter().fold(link as u64, |said, &byte| said.rotate_left(7) ^ u64::from(byte));
        self.report.said = mix(self.report.said ^ said);
        let wait = self.delay(40);
        let (now, state) = (self.now, &mut self.links[link]);
        state.queue[side].push_back((incarnation, bytes));
        state.arrival[side] = state.arrival[side].max(now + wait);
        let (session, arrival) = (state.session, state.arrival[side]);
        let full = state.queue[side].len() > MAX_QUEUE;
        self.after(arrival - now, Event::Deliver { link, session, side });
        if full {
            self.report.count("sessions ended for a slow reader");
            self.cut(link);
        }
    }

    /// The peer of a side says its last words in this session again.
    pub(super) fn repeat_words(&mut self, link: usize, side: usize) {
        let peer = self.links[link].ends[1 - side];
        let incarnation = self.nodes[peer].incarnation;
        let said = self.links[link].said.iter().filter(|(to, of, _)| (*to, *of) == (side, incarnation));
        let words: Vec<Message> = said.map(|(_, _, message)| message.as_ref().clone()).collect();
        for message in words {
            let message = Box::new(message);
            self.push(peer, Inbox::Again { link, incarnation, message });
        }
    }

    pub(super) fn deliver(&mut self, link: usize, session: u64, side: usize) {
        let now = self.now;
        let state = &mut self.links[link];
        if state.session != session {
            return;
        }
        let blocked = state.blocked_for(side, now);
        if blocked > 0 {
            self.after(blocked, Event::Deliver { link, session, side });
            return;
        }
        let Some((incarnation, bytes)) = state.queue[side].pop_front() else { return };
        let (up, lagging, cut, node) = (state.up[side], state.lagging[side], state.cut, state.ends[side]);
        // What was on its way when the session was cut may still arrive, or not.
        if lagging || (up && !(cut && self.rng.once_in(2))) {
            self.push(node, Inbox::Message { link, incarnation, bytes });
        }
    }

    pub(super) fn peer_id(&self, node: usize, incarnation: u64) -> PeerId {
        let plan = &self.plan.nodes[node];
        PeerId {
            engine: self.engines[plan.engine].id.clone(),
            incarnation: Incarnation::new(incarnation),
            pp_rank: PpRank::new(0),
            tp_rank: TpRank::new(plan.rank),
        }
    }

    /// Invariant 6: what a peer is told to wait is a duration, the same whatever this side's clock shows.
    fn check_durations(&self, message: &Message) -> Result<(), String> {
        let (Message::Grant(crate::message::Grant { ttl_ms, .. }) | Message::Renew(Renew { ttl_ms, .. })) = message
        else {
            return Ok(());
        };
        if u64::from(*ttl_ms) == self.plan.timing.lease_ttl {
            return Ok(());
        }
        Err(format!("invariant 6: a lease of {ttl_ms} ms is asked for, {} is meant", self.plan.timing.lease_ttl))
    }

    /// How long a word of the receiver of a write takes to its sender.
    pub(super) fn way_back(&mut self, link: usize, sender: usize, part: usize, usual: u64) -> u64 {
        let state = &self.links[link];
        state.blocked_for(state.side_of(sender), self.now) + self.work(sender, part, usual)
    }
}
