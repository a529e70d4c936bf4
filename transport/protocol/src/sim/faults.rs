//! What each fault does.

use crate::transfer::SenderInput;

use super::links::{DECODE, PREFILL};
use super::node::{Inbox, Node};
use super::plan::{Act, Fault, MS};
use super::scheduler::Engine;
use super::world::{Event, World};

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Cut { link } => {
                self.report.count("cuts");
                self.cut(link);
            }
            Fault::Partition { link, to, lasts } => {
                self.report.count(if to == [true, true] { "partitions" } else { "one-way partitions" });
                self.partition(link, to, lasts);
            }
            Fault::Crash { engine, away } => self.crash(engine, away),
            Fault::Stop { node, lasts } => self.stop(node, lasts),
            Fault::Jump { node, by } => {
                self.report.count("clock jumps");
                self.nodes[node].jump(by);
                self.nodes[node].timer_at = None;
                self.schedule_timer(node);
            }
            Fault::Slow { node, lasts, pace } => {
                let usual = self.plan.nodes[node].pace;
                if self.nodes[node].pace == usual && pace > usual {
                    self.report.count("slow drivers");
                    self.after(lasts, Event::Fault(Fault::Slow { node, lasts: 0, pace: usual }));
                }
                self.nodes[node].pace = pace;
            }
        }
    }

    /// Nothing gets through; who hears nothing for long enough ends the session on its side.
    fn partition(&mut self, link: usize, to: [bool; 2], lasts: u64) {
        let keep_alive = self.plan.timing.keep_alive * MS;
        let (until, session) = (self.now + lasts, self.links[link].session);
        for side in [PREFILL, DECODE] {
            if !to[side] {
                continue;
            }
            let blocked = &mut self.links[link].blocked[side];
            *blocked = (*blocked).max(until);
            if lasts > keep_alive {
                let wait = keep_alive + self.rng.within(0..30 * MS);
                self.after(wait, Event::SideDown { link, session, side });
            }
        }
    }

    /// An engine is gone with all its ranks and all they knew.
    fn crash(&mut self, engine: usize, away: u64) {
        if !self.engines[engine].alive {
            return;
        }
        self.report.count("crashes");
        self.ledger.crashed(&self.plan, engine);
        let silently = self.rng.once_in(2);
        let incarnation = self.engines[engine].incarnation + 1;
        for node in self.plan.engines[engine].nodes.clone() {
            self.drop_sessions(node, silently);
            self.drop_transports(node);
            for slot in self.nodes[node].senders.values() {
                self.report.visits.lease(slot.machine.lease_visits());
            }
            self.nodes[node] = Node::new(&self.plan, node, incarnation, self.options.epoch_us);
            self.nodes[node].alive = false;
            self.nodes[node].early.plant(self.options.planted);
        }
        let plan = &self.plan.engines[engine];
        self.engines[engine] = Engine::new(plan, incarnation, plan.upgraded);
        self.engines[engine].alive = false;
        self.after(away, Event::Restart { engine });
    }

    pub(super) fn restart(&mut self, engine: usize) {
        self.engines[engine].alive = true;
        for node in self.plan.engines[engine].nodes.clone() {
            self.nodes[node].alive = true;
            for link in self.plan.nodes[node].links.clone() {
                let wait = self.delay(100);
                self.after(wait, Event::Connect { link });
            }
        }
    }

    /// A process takes no input for a while; its peers may miss it.
    fn stop(&mut self, node: usize, lasts: u64) {
        if !self.nodes[node].alive {
            return;
        }
        self.report.count("stopped processes");
        let until = self.now + lasts;
        self.nodes[node].stopped_until = self.nodes[node].stopped_until.max(until);
        let keep_alive = self.plan.timing.keep_alive * MS;
        if lasts <= keep_alive {
            return;
        }
        for link in self.plan.nodes[node].links.clone() {
            let (session, peer) = (self.links[link].session, usize::from(self.links[link].ends[PREFILL] == node));
            let wait = keep_alive + self.rng.within(0..30 * MS);
            self.after(wait, Event::SideDown { link, session, side: peer });
        }
    }

    /// Does to a machine what lay in wait for its state.
    pub(super) fn ambush(&mut self, node: usize, part: usize, act: Act) {
        self.report.count("ambushes");
        let (link, peer) = (self.plan.parts[part].link, self.plan.peer_in(part, node));
        let side = self.links[link].side_of(node);
        let act = if self.plan.lies(peer) && act.leads_nowhere() && self.rng.once_in(2) { Act::Lie } else { act };
        let wait = self.rng.within(0..MS / 4);
        match act {
            Act::Cancel => self.push_first(node, Inbox::CancelPart { part }),
            Act::Fail => self.push_first(node, Inbox::FailPart { part }),
            Act::CancelPeer => self.push_first(peer, Inbox::CancelPart { part }),
            Act::HoldCancel => {
                self.nodes[node].hold(part);
                self.push_first(node, Inbox::CancelPart { part });
            }
            Act::HoldCancelPeer => {
                self.nodes[node].hold(part);
                self.push_first(peer, Inbox::CancelPart { part });
            }
            Act::Cut => self.after(wait, Event::Fault(Fault::Cut { link })),
            Act::Down | Act::HoldDown | Act::HoldDownUnhash => {
                if act != Act::Down {
                    self.nodes[node].hold(part);
                }
                if act == Act::HoldDownUnhash {
                    self.unhash(node, part);
                }
                let session = self.links[link].session;
                self.after(wait, Event::SideDown { link, session, side });
            }
            Act::CrashPeer => {
                let (engine, away) = (self.plan.nodes[peer].engine, self.rng.within(1..300) * MS);
                self.after(wait, Event::Fault(Fault::Crash { engine, away }));
            }
            Act::Stop => {
                let lasts = self.rng.within(20..1500) * MS;
                self.after(wait, Event::Fault(Fault::Stop { node, lasts }));
            }
            Act::Jump => self.after(wait, Event::Fault(Fault::Jump { node, by: 20_000 * MS })),
            Act::JumpPeerWord => {
                let by = (self.plan.timing.word + 1) * MS;
                self.after(wait, Event::Fault(Fault::Jump { node: peer, by }));
            }
            Act::JumpPeer => self.after(wait, Event::Fault(Fault::Jump { node: peer, by: 20_000 * MS })),
            Act::Unhash => self.unhash(node, part),
            Act::Repeat => self.repeat_words(link, side),
            Act::Lie => self.say_everything(peer, link, part),
        }
    }

    fn unhash(&mut self, node: usize, part: usize) {
        if let Some(slot) = self.nodes[node].receivers.get_mut(&part) {
            slot.unhashed = true;
        }
    }

    pub(super) fn fail_part(&mut self, index: usize, part: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        self.sender(index, part, SenderInput::Fail, |slot| slot.machine.fail(now, "no memory"))
    }
}
