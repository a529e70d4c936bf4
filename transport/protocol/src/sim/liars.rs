//! Ranks of an engine that lies. It holds the cluster's key, so its peers speak with it; it keeps to nothing else.
//!
//! It now and then plays along, so that the machines of its peers get into every state; and it says any word about any transfer, its own
//! or others', with any number in it, repeats what it heard, and floods within the limits of the transport. It writes under every key
//! that it knows (others' too), says that a write is what it is not, gives one number twice, writes over what it wrote, and knows what
//! the receiver's memory holds, so that its digests are right where it wants. What its own transfers carry is its affair; everything
//! else must hold for its peers, and they must have their pages and leases back in time.

use std::collections::VecDeque;

use crate::ids::{Generation, TransferId};
use crate::message::{
    Abort, Ended, EngineBytes, Grant, HashBytes, Message, Missing, Offer, OpaqueKey, Reason, Renew, Spare, Stop,
    Stopped, Verdict, WindowBytes, Working,
};
use crate::transfer::{MessageKind, Rect};

use super::node::{Inbox, PeerView};
use super::plan::{LAYERS, MS, whole};
use super::versions;
use super::world::{Event, World};

/// What a rank that lies remembers.
#[derive(Debug)]
pub(super) struct Liar {
    /// How much it will still say and write.
    left: u32,
    /// Grants that it heard, and on which link.
    pub(super) grants: VecDeque<(usize, Grant)>,
    heard: VecDeque<Message>,
    generation: u32,
    pub(super) sequence: u32,
}

impl Default for Liar {
    fn default() -> Self {
        Self { left: 160, grants: VecDeque::new(), heard: VecDeque::new(), generation: 0, sequence: 0 }
    }
}

const REMEMBERED: usize = 12;

/// The words about a transfer that a machine may be given; those that end it come last.
const WORDS: [MessageKind; 8] = [
    MessageKind::Working,
    MessageKind::Renew,
    MessageKind::Offer,
    MessageKind::Stopped,
    MessageKind::Stop,
    MessageKind::Grant,
    MessageKind::Abort,
    MessageKind::Ended,
];

impl World {
    /// A rank that lies takes an input.
    pub(super) fn liar_takes(&mut self, index: usize, input: Inbox) -> Result<(), String> {
        match input {
            Inbox::Up { link, incarnation, session, version } => {
                let peer = self.links[link].ends[1 - self.links[link].side_of(index)];
                let id = self.peer_id(peer, incarnation);
                self.nodes[index].views.insert(link, PeerView { id, incarnation, session, version, up: true });
                for _ in 0..self.rng.within(4..16) {
                    let wait = self.rng.within(0..2500 * MS);
                    self.lie_later(index, wait);
                }
                Ok(())
            }
            Inbox::Down { link } => {
                if let Some(view) = self.nodes[index].views.get_mut(&link) {
                    view.up = false;
                }
                Ok(())
            }
            Inbox::Message { link, bytes, .. } => self.liar_hears(index, link, &bytes),
            _ => Ok(()),
        }
    }

    fn lie_later(&mut self, index: usize, wait: u64) {
        let incarnation = self.nodes[index].incarnation;
        self.after(wait, Event::Lie { node: index, incarnation });
    }

    fn liar_hears(&mut self, index: usize, link: usize, bytes: &[u8]) -> Result<(), String> {
        let Some(version) = self.nodes[index].views.get(&link).map(|view| view.version) else { return Ok(()) };
        let Ok(message) = versions::decode(version, bytes) else { return Ok(()) };
        let liar = &mut self.nodes[index].liar;
        if let Message::Grant(grant) = &message {
            liar.grants.push_back((link, grant.clone()));
            if liar.grants.len() > REMEMBERED {
                liar.grants.pop_front();
            }
        }
        liar.heard.push_back(message.clone());
        if liar.heard.len() > REMEMBERED {
            liar.heard.pop_front();
        }
        if self.rng.once_in(3) {
            let wait = self.rng.within(0..300 * MS);
            self.lie_later(index, wait);
        }
        if self.rng.once_in(4) || !self.spend(index) { Ok(()) } else { self.play_along(index, link, message) }
    }

    /// Whether it has anything left to say; one word less then.
    fn spend(&mut self, index: usize) -> bool {
        let left = &mut self.nodes[index].liar.left;
        let has = *left > 0;
        *left = left.saturating_sub(1);
        has
    }

    /// Answers as one who keeps to the protocol would.
    fn play_along(&mut self, index: usize, link: usize, message: Message) -> Result<(), String> {
        let Some(transfer) = message.transfer() else { return Ok(()) };
        let answer = match message {
            Message::Grant(grant) => {
                self.fill(index, link, &grant);
                return Ok(());
            }
            Message::Renew(_) => Message::Working(Working { transfer }),
            Message::Stop(stop) => Message::Stopped(Stopped { transfer, generation: stop.generation }),
            Message::Offer(_) | Message::Spare(_) => match self.good_grant(index, transfer) {
                Some(grant) => grant,
                None => return Ok(()),
            },
            Message::Abort(abort) => Message::Ended(Ended { transfer, verdict: abort.why }),
            Message::Ended(ended) => Message::Ended(ended),
            _ => return Ok(()),
        };
        self.liar_says(index, link, &answer)
    }

    /// A grant that its peer can use.
    fn good_grant(&mut self, index: usize, transfer: TransferId) -> Option<Message> {
        let part = self.part_of(transfer)?;
        let wanted = self.plan.requests[self.plan.parts[part].request].wanted();
        let liar = &mut self.nodes[index].liar;
        liar.generation += 1;
        Some(Message::Grant(Grant {
            transfer,
            generation: Generation::new(liar.generation),
            key: OpaqueKey::new(liar.generation.into()),
            ttl_ms: u32::try_from(self.plan.timing.lease_ttl).unwrap_or(u32::MAX),
            window: WindowBytes::default(),
            missing: Missing::new(vec![wanted]).ok()?,
        }))
    }

    fn liar_says(&mut self, index: usize, link: usize, message: &Message) -> Result<(), String> {
        let (state, incarnation) = (&self.links[link], self.nodes[index].incarnation);
        let side = state.side_of(index);
        if !state.carries_from(side) || !versions::has(state.version, message) {
            return Ok(());
        }
        self.report.count("words of liars");
        let bytes = versions::encode(state.version, message)?;
        self.say_bytes(link, 1 - side, incarnation, bytes);
        Ok(())
    }

    /// Does something that no honest rank does, or not now.
    pub(super) fn lie(&mut self, index: usize, incarnation: u64) -> Result<(), String> {
        let node = &self.nodes[index];
        if node.incarnation != incarnation || !node.alive || !self.spend(index) {
            return Ok(());
        }
        let up = self.nodes[index].views.iter().filter(|(_, view)| view.up);
        let up: Vec<usize> = up.map(|(&link, _)| link).collect();
        let Some(&link) = self.rng.one_of(&up) else { return Ok(()) };
        let part = self.some_part(index, link);
        match self.rng.within(0..18) {
            0..=5 => {
                let word = self.any_word(index, part);
                self.liar_says(index, link, &word)
            }
            6..=7 => {
                let heard: Vec<Message> = self.nodes[index].liar.heard.iter().cloned().collect();
                match self.rng.one_of(&heard).cloned() {
                    Some(word) => self.liar_says(index, link, &word),
                    None => Ok(()),
                }
            }
            8..=12 => {
                self.write_a_lie(index);
                Ok(())
            }
            13 => self.flood(index, link),
            14 => {
                self.say_nonsense(index, link);
                Ok(())
            }
            15 if self.rng.once_in(3) => {
                self.cut(link);
                Ok(())
            }
            _ => self.begin_well(index, link, part),
        }
    }

    /// A transfer of this link, mostly; or one that its peer has, with whomever.
    fn some_part(&mut self, index: usize, link: usize) -> usize {
        let links = &self.plan.nodes[self.plan.peer_of(link, index)].links;
        let link = if self.rng.once_in(4) { self.rng.one_of(links).copied().unwrap_or(link) } else { link };
        // A link is there for its parts.
        self.rng.one_of(&self.plan.links[link].parts).copied().unwrap_or_default()
    }

    /// Speaks first, as its role in a transfer is.
    fn begin_well(&mut self, index: usize, link: usize, part: usize) -> Result<(), String> {
        let plan = &self.plan.parts[part];
        let (transfer, request) = (plan.transfer, &self.plan.requests[plan.request]);
        let word = if plan.receiver == index {
            self.good_grant(index, transfer)
        } else if request.returns {
            Some(self.spare_of(part))
        } else {
            Some(Message::Offer(Offer { transfer, held: request.held() }))
        };
        word.map_or(Ok(()), |word| self.liar_says(index, link, &word))
    }

    /// What a sender says of the blocks that go back.
    pub(super) fn spare_of(&self, part: usize) -> Message {
        let plan = &self.plan.parts[part];
        let request = &self.plan.requests[plan.request];
        let tokens_per_block = self.plan.engines[request.from].tokens_per_block;
        let blocks = request.wanted().tokens().len().div_ceil(tokens_per_block as usize);
        let hashes = vec![7; blocks.min(HashBytes::MAX_BYTES / HashBytes::EACH) * HashBytes::EACH];
        let hashes = HashBytes::new(hashes).unwrap_or_default();
        Message::Spare(Spare { transfer: plan.transfer, first_token: request.local, tokens_per_block, hashes })
    }

    /// Many words at once, as many as the transport takes.
    fn flood(&mut self, index: usize, link: usize) -> Result<(), String> {
        self.report.count("floods");
        let same = self.rng.once_in(2).then(|| self.some_part(index, link));
        for _ in 0..self.rng.within(10..60) {
            let part = same.unwrap_or_else(|| self.some_part(index, link));
            let mut word = self.any_word(index, part);
            if same.is_none() {
                rename(&mut word, TransferId::new(self.rng.next().into()));
            }
            self.liar_says(index, link, &word)?;
        }
        Ok(())
    }

    /// Bytes that are no message of the session.
    fn say_nonsense(&mut self, index: usize, link: usize) {
        let (state, incarnation) = (&self.links[link], self.nodes[index].incarnation);
        let (side, version) = (state.side_of(index), state.version);
        if !state.carries_from(side) {
            return;
        }
        let transfer = TransferId::new(0);
        let mut bytes = match self.rng.within(0..3) {
            0 => (0..self.rng.within(0..40)).map(|_| self.rng.next() as u8).collect(),
            // Another version, or a kind that there is not.
            1 => versions::encode(version + 1, &Message::Working(Working { transfer })).unwrap_or_default(),
            _ => versions::encode(version, &Message::Working(Working { transfer })).unwrap_or_default(),
        };
        if let Some(kind) = bytes.get_mut(2).filter(|kind| **kind == 9) {
            *kind = 250;
        }
        self.say_bytes(link, 1 - side, incarnation, bytes);
    }

    /// Each word that there is, about one transfer.
    pub(super) fn say_everything(&mut self, index: usize, link: usize, part: usize) {
        for kind in WORDS {
            let word = self.word(index, part, kind);
            // It is a word of this release, and sessions without one say nothing.
            let _said = self.liar_says(index, link, &word);
        }
    }

    fn any_word(&mut self, index: usize, part: usize) -> Message {
        match self.rng.within(0..20) {
            0 => Message::Engine(EngineBytes::default()),
            1..=2 => {
                let Message::Spare(mut spare) = self.spare_of(part) else {
                    return Message::Engine(EngineBytes::default());
                };
                match self.rng.within(0..4) {
                    0 => spare.first_token = u32::MAX - 1,
                    1 => spare.tokens_per_block = u32::MAX,
                    2 => spare.hashes = HashBytes::default(),
                    _ => {}
                }
                Message::Spare(spare)
            }
            kind => self.word(index, part, WORDS[kind as usize % WORDS.len()]),
        }
    }

    fn word(&mut self, index: usize, part: usize, kind: MessageKind) -> Message {
        let transfer = self.plan.parts[part].transfer;
        let generation = self.any_generation(index);
        let ttl_ms = [0, 1, 700, u32::MAX][self.rng.within(0..4) as usize];
        match kind {
            MessageKind::Grant => {
                let heard = self.nodes[index].liar.grants.back().map(|(_, grant)| grant.key);
                let key = heard.filter(|_| self.rng.once_in(2)).unwrap_or(OpaqueKey::new(self.rng.next().into()));
                let (window, missing) = (WindowBytes::default(), self.any_missing(part));
                Message::Grant(Grant { transfer, generation, key, ttl_ms, window, missing })
            }
            MessageKind::Renew => Message::Renew(Renew { transfer, ttl_ms }),
            MessageKind::Stop => Message::Stop(Stop { transfer, generation }),
            MessageKind::Stopped => Message::Stopped(Stopped { transfer, generation }),
            MessageKind::Abort => Message::Abort(Abort { transfer, why: self.any_verdict() }),
            MessageKind::Ended => Message::Ended(Ended { transfer, verdict: self.any_verdict() }),
            MessageKind::Working => Message::Working(Working { transfer }),
            MessageKind::Offer | MessageKind::Manifest | MessageKind::Engine | MessageKind::Spare => {
                let request = &self.plan.requests[self.plan.parts[part].request];
                let few = Rect::new(0..1, 0..1).unwrap_or_else(|_| whole());
                let held = [request.held(), request.wanted(), whole(), few][self.rng.within(0..4) as usize];
                Message::Offer(Offer { transfer, held })
            }
        }
    }

    fn any_verdict(&mut self) -> Verdict {
        match self.rng.within(0..5) {
            0..=1 => Verdict::Done,
            2 => Verdict::Cancelled,
            3 => Verdict::failed(Reason::Unknown, "never heard of it"),
            _ => Verdict::failed(Reason::Engine, "no, or yes"),
        }
    }

    pub(super) fn any_generation(&mut self, index: usize) -> Generation {
        let own = self.nodes[index].liar.generation;
        let last = self.nodes[index].liar.grants.back().map_or(own, |(_, grant)| grant.generation.get());
        let any = [last, last, last.saturating_add(1), last.saturating_sub(1), 0, u32::MAX];
        Generation::new(any[self.rng.within(0..6) as usize])
    }

    fn any_missing(&mut self, part: usize) -> Missing {
        let request = &self.plan.requests[self.plan.parts[part].request];
        let (wanted, held) = (request.wanted(), request.held());
        let rects = match self.rng.within(0..6) {
            0 => Vec::new(),
            1 => vec![whole()],
            2 => vec![held, wanted],
            // As shredded as may be.
            3 => (0..24).filter_map(|n| Rect::new(2 * n..2 * n + 1, (n as u16 % LAYERS)..LAYERS).ok()).collect(),
            _ => vec![wanted],
        };
        Missing::new(rects).unwrap_or_default()
    }
}

/// Makes a word one about another transfer.
fn rename(word: &mut Message, other: TransferId) {
    match word {
        Message::Manifest(_) | Message::Engine(_) => {}
        Message::Offer(word) => word.transfer = other,
        Message::Grant(word) => word.transfer = other,
        Message::Renew(word) => word.transfer = other,
        Message::Stop(word) => word.transfer = other,
        Message::Stopped(word) => word.transfer = other,
        Message::Abort(word) => word.transfer = other,
        Message::Ended(word) => word.transfer = other,
        Message::Working(word) => word.transfer = other,
        Message::Spare(word) => word.transfer = other,
    }
}
