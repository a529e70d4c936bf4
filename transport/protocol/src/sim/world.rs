//! The run: a queue of events in the order of time, and what each of them does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ids::Generation;
use crate::transfer::{PostOutcome, Rect};

use super::checks::Ledger;
use super::links::Link;
use super::node::{Inbox, Node};
use super::plan::{Fault, MS, Plan};
use super::report::{DriverBug, Options, Report, Violation};
use super::rng::Rng;
use super::scheduler::{Engine, Step};
use super::writes::{Grants, Writes};

#[derive(Debug)]
pub(super) enum Event {
    Connect {
        link: usize,
    },
    SideUp {
        link: usize,
        session: u64,
        side: usize,
    },
    SideDown {
        link: usize,
        session: u64,
        side: usize,
    },
    /// The driver hears that its session ended.
    SideTold {
        link: usize,
        session: u64,
        side: usize,
    },
    /// The driver hears of the first write under a grant that it has not heard of.
    Notify {
        grant: u64,
    },
    /// The first message in the session's queue to a side arrives.
    Deliver {
        link: usize,
        session: u64,
        side: usize,
    },
    Depart {
        write: u64,
        piece: usize,
    },
    Land {
        write: u64,
        piece: usize,
    },
    PostEnds {
        write: u64,
        outcome: PostOutcome,
    },
    FenceReturns {
        node: usize,
        incarnation: u64,
        part: usize,
        generation: Generation,
        grant: u64,
    },
    GrantAnswer {
        node: usize,
        incarnation: u64,
        part: usize,
        generation: Generation,
        missing: Vec<Rect>,
    },
    /// An input reaches the node's inbox, unless the node crashed meanwhile.
    Input {
        node: usize,
        incarnation: u64,
        input: Inbox,
    },
    /// A step of an engine's scheduler; of one incarnation, or of whoever lives then.
    Engine {
        engine: usize,
        incarnation: Option<u64>,
        step: Step,
    },
    Poll {
        node: usize,
        incarnation: u64,
    },
    Timer {
        node: usize,
        incarnation: u64,
    },
    /// A machine must be finished by now.
    Limit {
        node: usize,
        incarnation: u64,
        part: usize,
        postponed: u32,
    },
    Fault(Fault),
    /// A rank that lies says or writes something.
    Lie {
        node: usize,
        incarnation: u64,
    },
    Restart {
        engine: usize,
    },
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) now: u64,
    queue: Queue,
    pub(super) rng: Rng,
    pub(super) plan: Plan,
    pub(super) options: Options,
    pub(super) nodes: Vec<Node>,
    pub(super) engines: Vec<Engine>,
    pub(super) links: Vec<Link>,
    pub(super) grants: Grants,
    pub(super) writes: Writes,
    pub(super) ledger: Ledger,
    pub(super) report: Report,
}

/// What will happen, by its time; what happens at one time keeps the order in which it was put in.
#[derive(Debug, Default)]
struct Queue {
    /// When, the how-manieth, and where the event is kept.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Event>>,
    unused: Vec<usize>,
    next: u64,
}

impl Queue {
    fn push(&mut self, at: u64, event: Event) {
        let place = self.unused.pop().unwrap_or(self.events.len());
        match self.events.get_mut(place) {
            Some(kept) => *kept = Some(event),
            None => self.events.push(Some(event)),
        }
        self.next += 1;
        self.order.push(Reverse((at, self.next, place)));
    }

    fn pop(&mut self) -> Option<(u64, Event)> {
        let Reverse((at, _, place)) = self.order.pop()?;
        self.unused.push(place);
        Some((at, self.events[place].take()?))
    }
}

/// No run needs more.
const MAX_STEPS: u64 = 3_000_000;

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
        let plan = Plan::draw(&mut rng, !options.no_liars);
        let mut nodes: Vec<Node> =
            (0..plan.nodes.len()).map(|node| Node::new(&plan, node, 1, options.epoch_us)).collect();
        nodes.iter_mut().for_each(|node| node.early.plant(options.planted));
        let engines = plan.engines.iter().map(|engine| Engine::new(engine, 1, engine.versions)).collect();
        let links = plan.links.iter().map(|link| Link::new(link.ends)).collect();
        let ledger = Ledger::new(plan.requests.len(), plan.parts.len());
        let transfers = plan.parts.len() as u64;
        let mut report = Report { runs: 1, transfers, most_transfers: transfers, ..Report::default() };
        if plan.engines.iter().any(|engine| engine.lies) {
            report.count("runs with a liar");
        }
        let mut world = Self {
            now: 0,
            queue: Queue::default(),
            rng,
            plan,
            options,
            nodes,
            engines,
            links,
            grants: Grants::default(),
            writes: Writes::default(),
            ledger,
            report,
        };
        world.schedule_plan();
        world
    }

    fn schedule_plan(&mut self) {
        for link in 0..self.links.len() {
            let wait = self.rng.within(0..200) * MS;
            self.after(wait, Event::Connect { link });
        }
        for (at, fault) in self.plan.faults.clone() {
            self.after(at, Event::Fault(fault));
        }
        for (request, plan) in self.plan.requests.clone().into_iter().enumerate() {
            self.after(
                plan.from_at,
                Event::Engine { engine: plan.from, incarnation: None, step: Step::Begin { request } },
            );
            if !plan.returns {
                self.after(
                    plan.to_at,
                    Event::Engine { engine: plan.to, incarnation: None, step: Step::Begin { request } },
                );
            }
            for (at, receiver, whim) in plan.whims {
                let engine = if receiver { plan.to } else { plan.from };
                self.after(at, Event::Engine { engine, incarnation: None, step: Step::Whim { request, whim } });
            }
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some((at, event)) = self.queue.pop() {
            self.now = at;
            self.report.steps += 1;
            if self.report.steps > MAX_STEPS {
                return Err(format!("invariant 2: no rest after {MAX_STEPS} steps"));
            }
            if self.options.trace {
                self.report.trace.push(format!("{at:>9} us  {event:?}"));
            }
            match self.resumes_at(&event) {
                Some(until) => self.after(until - self.now, event),
                None => self.step(event)?,
            }
        }
        self.check_end()
    }

    /// When the process that an event needs goes on, if it is stopped.
    fn resumes_at(&self, event: &Event) -> Option<u64> {
        let node = match event {
            Event::SideUp { link, side, .. }
            | Event::SideDown { link, side, .. }
            | Event::SideTold { link, side, .. }
            | Event::Deliver { link, side, .. } => self.links[*link].ends[*side],
            Event::Depart { write, .. } => self.writes.process_that_sends(*write)?,
            Event::Land { write, .. } => self.writes.process_that_receives(*write)?,
            Event::FenceReturns { node, .. } | Event::GrantAnswer { node, .. } | Event::Poll { node, .. } => *node,
            Event::Connect { link } => {
                let ends = self.links[*link].ends;
                return ends.iter().map(|&end| self.nodes[end].stopped_until).max().filter(|&until| until > self.now);
            }
            Event::PostEnds { .. }
            | Event::Notify { .. }
            | Event::Input { .. }
            | Event::Engine { .. }
            | Event::Timer { .. }
            | Event::Limit { .. }
            | Event::Fault(_)
            | Event::Lie { .. }
            | Event::Restart { .. } => return None,
        };
        Some(self.nodes[node].stopped_until).filter(|&until| until > self.now)
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Connect { link } => return self.connect(link),
            Event::SideUp { link, session, side } => self.side_up(link, session, side),
            Event::SideDown { link, session, side } => self.side_down(link, session, side),
            Event::Deliver { link, session, side } => self.deliver(link, session, side),
            Event::Depart { write, piece } => return self.depart(write, piece),
            Event::Land { write, piece } => return self.land(write, piece),
            Event::PostEnds { write, outcome } => self.post_ends(write, outcome),
            Event::FenceReturns { node, incarnation, part, generation, grant } => {
                self.fence_returns(node, incarnation, part, generation, grant);
            }
            Event::GrantAnswer { node, incarnation, part, generation, missing } => {
                return self.answer_grant(node, incarnation, part, generation, &missing);
            }
            Event::Notify { grant } => {
                self.notify(grant);
            }
            Event::SideTold { link, session, side } => self.side_told(link, session, side),
            Event::Input { node, incarnation, input } => self.input(node, incarnation, input),
            Event::Engine { engine, incarnation, step } => return self.engine_step(engine, incarnation, step),
            Event::Poll { node, incarnation } => return self.poll(node, incarnation),
            Event::Timer { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.nodes[node].timer_at = None;
                }
                self.input(node, incarnation, Inbox::Timer);
            }
            Event::Limit { node, incarnation, part, postponed } => {
                return self.check_limit(node, incarnation, part, postponed);
            }
            Event::Fault(fault) => self.fault(fault),
            Event::Lie { node, incarnation } => return self.lie(node, incarnation),
            Event::Restart { engine } => self.restart(engine),
        }
        Ok(())
    }

    pub(super) fn after(&mut self, wait: u64, event: Event) {
        self.queue.push(self.now + wait, event);
    }

    /// Puts an input into a node's inbox, unless it is another process by now.
    pub(super) fn input(&mut self, node: usize, incarnation: u64, input: Inbox) {
        if self.nodes[node].incarnation == incarnation {
            self.push(node, input);
        }
    }

    /// Puts an input into a node's inbox; the driver takes one at a time.
    pub(super) fn push(&mut self, node: usize, input: Inbox) {
        if !self.nodes[node].alive {
            return;
        }
        self.nodes[node].inbox.push_back(input);
        self.schedule_poll(node);
    }

    /// The same, before all that waits there.
    pub(super) fn push_first(&mut self, node: usize, input: Inbox) {
        self.nodes[node].inbox.push_front(input);
        self.schedule_poll(node);
    }

    pub(super) fn schedule_poll(&mut self, node: usize) {
        if self.nodes[node].polling || self.nodes[node].inbox.is_empty() {
            return;
        }
        self.nodes[node].polling = true;
        let (incarnation, pace) = (self.nodes[node].incarnation, self.nodes[node].pace);
        let wait = self.rng.within(0..pace);
        self.after(wait, Event::Poll { node, incarnation });
    }

    pub(super) fn schedule_timer(&mut self, node: usize) {
        if self.options.driver_bug == Some(DriverBug::NoTimers) {
            return;
        }
        let Some(due) = self.nodes[node].next_timeout() else { return };
        let at = self.nodes[node].world_time(due).max(self.now);
        if self.nodes[node].timer_at.is_some_and(|scheduled| scheduled <= at) {
            return;
        }
        self.nodes[node].timer_at = Some(at);
        let incarnation = self.nodes[node].incarnation;
        self.after(at - self.now, Event::Timer { node, incarnation });
    }

    /// How long a grant, a fence, a hash or the end of a post takes.
    pub(super) fn work(&mut self, node: usize, part: usize, usual: u64) -> u64 {
        if self.nodes[node].is_held(part) {
            return self.rng.within(300..700) * MS;
        }
        if self.rng.once_in(self.plan.odds.slow_work) {
            return self.rng.within(50..400) * MS;
        }
        self.delay(usual)
    }

    /// A delay around `usual` milliseconds, now and then a long one.
    pub(super) fn delay(&mut self, usual: u64) -> u64 {
        if self.rng.once_in(self.plan.odds.slow) {
            return self.rng.within(50..700) * MS;
        }
        self.rng.within(0..usual * MS)
    }
}
