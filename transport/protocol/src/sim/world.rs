//! The run: a queue of events in the order of time, and what each of them does.

use std::collections::BTreeMap;
use std::fmt;

use crate::ids::Generation;
use crate::transfer::{Planted, PostOutcome, Rect};

use super::checks::Ledger;
use super::network::{GrantRecord, Links, Write};
use super::node::{Inbox, Key, Node};
use super::plan::{Crash, MS, Plan};
use super::rng::Rng;

/// What a run is to do beside its seed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A bug in every machine.
    pub planted: Option<Planted>,
    /// A bug in every driver.
    pub driver_bug: Option<DriverBug>,
    /// Keep a line for each step.
    pub trace: bool,
}

/// A bug to plant in the drivers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DriverBug {
    /// `fenced` is said, but the grant lives.
    FenceLies,
    /// Messages of a peer's old incarnation are handed to the machines.
    OldIncarnationTaken,
    /// A machine's timers are never looked at.
    NoTimers,
}

/// What a run was.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Steps taken.
    pub steps: u64,
    /// How often each (side, state, input) was seen.
    pub visited: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// How many transfers ended in each pair of verdicts (receiver, sender); `-` is a crash or a request that never came.
    pub verdicts: BTreeMap<(&'static str, &'static str), u64>,
    /// How many inputs the machines did not take.
    pub ignored: u64,
    /// How many messages of old incarnations the drivers refused.
    pub refused: u64,
    /// The steps in words, if asked for.
    pub trace: Vec<String>,
}

/// An invariant that did not hold.
#[derive(Debug, Clone, thiserror::Error)]
pub struct Violation {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The moment, in microseconds of the world.
    pub at_us: u64,
    /// What did not hold.
    pub what: String,
    /// The steps in words, if asked for.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}, {} us: {}; replay: ", self.seed, self.step, self.at_us, self.what)?;
        write!(f, "KVFERRY_SIM_SEED={} cargo test -p kvferry-protocol --features sim --test simulation ", self.seed)?;
        f.write_str("-- --ignored --nocapture replay")
    }
}

#[derive(Debug)]
pub(super) enum Event {
    Connect {
        link: (usize, usize),
    },
    SideUp {
        link: (usize, usize),
        session: u64,
        side: usize,
    },
    SideDown {
        link: (usize, usize),
        session: u64,
        side: usize,
    },
    Cut {
        link: (usize, usize),
    },
    Crash(Crash),
    Restart {
        node: usize,
    },
    Deliver {
        link: (usize, usize),
        session: u64,
        side: usize,
        incarnation: u64,
        bytes: Vec<u8>,
    },
    Depart {
        write: u64,
        part: usize,
    },
    Land {
        write: u64,
        part: usize,
    },
    PostEnds {
        write: u64,
        outcome: PostOutcome,
    },
    FenceReturns {
        node: usize,
        incarnation: u64,
        key: Key,
        generation: Generation,
        grant: u64,
    },
    /// An input reaches the node's inbox, unless the node crashed meanwhile.
    Input {
        node: usize,
        incarnation: u64,
        input: Inbox,
    },
    /// An input of the engine itself: whoever lives there now.
    Engine {
        node: usize,
        input: Inbox,
    },
    Poll {
        node: usize,
        incarnation: u64,
    },
    Timer {
        node: usize,
        incarnation: u64,
    },
    GrantAnswer {
        node: usize,
        incarnation: u64,
        key: Key,
        generation: Generation,
        missing: Vec<Rect>,
    },
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) now: u64,
    queue: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    pub(super) next_id: u64,
    pub(super) rng: Rng,
    pub(super) plan: Plan,
    pub(super) options: Options,
    pub(super) nodes: Vec<Node>,
    pub(super) links: Links,
    pub(super) grants: BTreeMap<u64, GrantRecord>,
    pub(super) writes: BTreeMap<u64, Write>,
    pub(super) ledger: Ledger,
    pub(super) report: Report,
}

/// No run needs more.
const MAX_STEPS: u64 = 100_000;

/// Runs one cluster to its rest.
///
/// # Errors
/// [`Violation`]: the first invariant that did not hold.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Violation>> {
    let mut world = World::new(seed, options.clone());
    match world.run() {
        Ok(()) => Ok(world.report),
        Err(what) => {
            let (step, at_us, trace) = (world.report.steps, world.now, world.report.trace);
            Err(Box::new(Violation { seed, step, at_us, what, trace }))
        }
    }
}

impl World {
    fn new(seed: u64, options: Options) -> Self {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng);
        let nodes = plan.nodes.iter().map(|node| Node::new(node, 1)).collect();
        let mut world = Self {
            now: 0,
            queue: BTreeMap::new(),
            next_event: 0,
            next_id: 0,
            rng,
            plan,
            options,
            nodes,
            links: Links::new(),
            grants: BTreeMap::new(),
            writes: BTreeMap::new(),
            ledger: Ledger::default(),
            report: Report::default(),
        };
        world.connect_all();
        for (at, link) in world.plan.cuts.clone() {
            world.after(at, Event::Cut { link });
        }
        for crash in world.plan.crashes.clone() {
            world.after(crash.at, Event::Crash(crash));
        }
        for (request, plan) in world.plan.requests.clone().into_iter().enumerate() {
            world.after(plan.decode_at, Event::Engine { node: plan.decode, input: Inbox::Decode { request } });
            world.after(plan.prefill_at, Event::Engine { node: plan.prefill, input: Inbox::Prefill { request } });
            for (at, node, input) in [
                (plan.cancel_decode, plan.decode, Inbox::CancelReceiver { request }),
                (plan.cancel_prefill, plan.prefill, Inbox::CancelSender { request }),
                (plan.fail_prefill, plan.prefill, Inbox::FailSender { request }),
            ] {
                if let Some(at) = at {
                    world.after(at, Event::Engine { node, input });
                }
            }
        }
        world
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            self.report.steps += 1;
            if self.report.steps > MAX_STEPS {
                return Err(format!("invariant 2: no rest after {MAX_STEPS} steps"));
            }
            if self.options.trace {
                self.report.trace.push(format!("{at:>9} us  {event:?}"));
            }
            self.step(event)?;
            self.check_step()?;
        }
        self.check_end()
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Connect { link } => self.connect(link),
            Event::SideUp { link, session, side } => self.side_up(link, session, side),
            Event::SideDown { link, session, side } => self.side_down(link, session, side),
            Event::Cut { link } => self.cut(link),
            Event::Crash(crash) => self.crash(crash),
            Event::Restart { node } => self.restart(node),
            Event::Deliver { link, session, side, incarnation, bytes } => {
                self.deliver(link, session, side, incarnation, bytes);
            }
            Event::Depart { write, part } => return self.depart(write, part),
            Event::Land { write, part } => return self.land(write, part),
            Event::PostEnds { write, outcome } => self.post_ends(write, outcome),
            Event::FenceReturns { node, incarnation, key, generation, grant } => {
                self.fence_returns(node, incarnation, key, generation, grant);
            }
            Event::Input { node, incarnation, input } => {
                if self.nodes[node].incarnation == incarnation {
                    self.push(node, input);
                }
            }
            Event::Engine { node, input } => self.push(node, input),
            Event::Poll { node, incarnation } => return self.poll(node, incarnation),
            Event::Timer { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.nodes[node].timer_at = None;
                    self.push(node, Inbox::Timer);
                }
            }
            Event::GrantAnswer { node, incarnation, key, generation, missing } => {
                if self.nodes[node].incarnation == incarnation {
                    self.push(node, Inbox::Granted { key, generation, missing });
                }
            }
        }
        Ok(())
    }

    pub(super) fn after(&mut self, wait: u64, event: Event) {
        self.next_event += 1;
        self.queue.insert((self.now + wait, self.next_event), event);
    }

    /// Puts an input into a node's inbox; the driver takes one at a time.
    pub(super) fn push(&mut self, node: usize, input: Inbox) {
        if !self.nodes[node].alive {
            return;
        }
        self.nodes[node].inbox.push_back(input);
        self.schedule_poll(node);
    }

    pub(super) fn schedule_poll(&mut self, node: usize) {
        if self.nodes[node].polling || self.nodes[node].inbox.is_empty() {
            return;
        }
        self.nodes[node].polling = true;
        let incarnation = self.nodes[node].incarnation;
        let wait = self.rng.within(0..2 * MS);
        self.after(wait, Event::Poll { node, incarnation });
    }

    pub(super) fn schedule_timer(&mut self, node: usize) {
        if self.options.driver_bug == Some(DriverBug::NoTimers) {
            return;
        }
        let Some((due, _)) = self.nodes[node].next_timeout() else { return };
        let at = self.nodes[node].world_time(due).max(self.now);
        if self.nodes[node].timer_at.is_some_and(|scheduled| scheduled <= at) {
            return;
        }
        self.nodes[node].timer_at = Some(at);
        let incarnation = self.nodes[node].incarnation;
        self.after(at - self.now, Event::Timer { node, incarnation });
    }

    /// An engine is gone with all it knew.
    fn crash(&mut self, crash: Crash) {
        let node = crash.node;
        if !self.nodes[node].alive {
            return;
        }
        self.drop_sessions(node);
        let incarnation = self.nodes[node].incarnation;
        self.nodes[node] = Node::new(&self.plan.nodes[node], incarnation + 1);
        self.nodes[node].alive = false;
        self.after(crash.away, Event::Restart { node });
    }

    fn restart(&mut self, node: usize) {
        self.nodes[node].alive = true;
        self.reconnect(node);
    }
}
