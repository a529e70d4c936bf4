//! The engines' schedulers: they give blocks to requests and take them back, and know how each request ended.
//!
//! A request's blocks are the same on every rank, and each rank has its own part of the bytes. It is over exactly once, when every
//! rank has spoken; only then may its blocks be used for anything else.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::ids::EngineId;
use crate::message::Verdict;
use crate::transfer::Rect;
use crate::wire::VersionRange;

use super::memory::{Blocks, cells, content};
use super::node::Inbox;
use super::plan::{EnginePlan, LAYERS, MS, Whim};
use super::report::DriverBug;
use super::world::{Event, World};

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) id: EngineId,
    pub(super) incarnation: u64,
    pub(super) alive: bool,
    pub(super) versions: VersionRange,
    pub(super) tokens_per_block: u32,
    /// The last one freed is the first one used again, so that late bytes hit somebody.
    free: Vec<u32>,
    /// Requests that wait for blocks; the first is served first.
    waiting: VecDeque<usize>,
    running: BTreeMap<usize, Running>,
}

#[derive(Debug)]
struct Running {
    blocks: Rc<Blocks>,
    /// By rank.
    spoken: Vec<Option<Spoken>>,
    preempted: bool,
    /// The other ranks were told to give up.
    told: bool,
    over: bool,
}

/// How a request ended on one rank, or on all.
#[derive(Debug, Clone)]
pub(super) struct Spoken {
    pub(super) verdict: Verdict,
    /// Tokens before this one are good.
    pub(super) good: u32,
}

/// What a scheduler does next.
#[derive(Debug)]
pub(super) enum Step {
    Begin {
        request: usize,
    },
    Whim {
        request: usize,
        whim: Whim,
    },
    /// A rank has spoken.
    Report {
        request: usize,
        rank: usize,
        spoken: Spoken,
    },
    /// A peer offers blocks.
    Offered {
        request: usize,
    },
    /// The request waited long enough for blocks.
    GiveUp {
        request: usize,
    },
    /// The engine read the blocks, or used them for something else, and needs them no more.
    Free {
        request: usize,
    },
}

/// Requests that wait for blocks on one engine; one more is refused.
const MAX_WAITING: usize = 3;

impl Engine {
    pub(super) fn new(plan: &EnginePlan, incarnation: u64, versions: VersionRange) -> Self {
        Self {
            id: EngineId::new(&format!("engine-{}", plan.nodes.start)).expect("a legal name"),
            incarnation,
            alive: true,
            versions,
            tokens_per_block: plan.tokens_per_block,
            free: (0..plan.blocks).collect(),
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
        }
    }

    /// Takes blocks for tokens `first..end`; `None` if there are too few.
    fn allocate(&mut self, request: usize, first: u32, end: u32) -> Option<Blocks> {
        let first_block = first / self.tokens_per_block;
        let count = (end.div_ceil(self.tokens_per_block) - first_block) as usize;
        let left = self.free.len().checked_sub(count)?;
        Some(Blocks { request, first_block, ids: self.free.split_off(left) })
    }

    pub(super) fn left_over(&self, blocks: u32) -> Option<String> {
        if let Some(request) = self.running.keys().chain(&self.waiting).next() {
            return Some(format!("invariant 2: request {request} is left over"));
        }
        (self.free.len() != blocks as usize).then(|| "invariant 4: blocks are left over".to_owned())
    }
}

impl World {
    pub(super) fn engine_step(&mut self, engine: usize, incarnation: Option<u64>, step: Step) -> Result<(), String> {
        let state = &self.engines[engine];
        if self.plan.engines[engine].lies
            || !state.alive
            || incarnation.is_some_and(|incarnation| incarnation != state.incarnation)
        {
            return Ok(());
        }
        match step {
            Step::Begin { request } => self.admit(engine, request),
            Step::Offered { request } => self.offered(engine, request),
            Step::Whim { request, whim } => self.whim(engine, request, whim),
            Step::Report { request, rank, spoken } => self.rank_spoke(engine, request, rank, spoken),
            Step::GiveUp { request } => {
                let waiting = &mut self.engines[engine].waiting;
                let Some(at) = waiting.iter().position(|&waits| waits == request) else { return Ok(()) };
                waiting.remove(at);
                self.refuse(engine, request)
            }
            Step::Free { request } => self.free(engine, request),
        }
    }

    /// Whether an engine is the one that receives a request's bytes.
    pub(super) fn receives(&self, engine: usize, request: usize) -> bool {
        self.plan.requests[request].to == engine
    }

    pub(super) fn engine_later(&mut self, engine: usize, wait: u64, step: Step) {
        let incarnation = Some(self.engines[engine].incarnation);
        self.after(wait, Event::Engine { engine, incarnation, step });
    }

    fn admit(&mut self, engine: usize, request: usize) -> Result<(), String> {
        let receives = self.receives(engine, request);
        self.ledger.began(request, receives)?;
        if self.start(engine, request) {
            return Ok(());
        }
        let waiting = &mut self.engines[engine].waiting;
        if waiting.len() >= MAX_WAITING {
            return self.refuse(engine, request);
        }
        self.report.count("requests that waited for blocks");
        self.engines[engine].waiting.push_back(request);
        let wait = self.rng.within(50..600) * MS;
        self.engine_later(engine, wait, Step::GiveUp { request });
        Ok(())
    }

    pub(super) fn start(&mut self, engine: usize, request: usize) -> bool {
        let plan = &self.plan.requests[request];
        let (first, end) = if self.receives(engine, request) { (plan.local, plan.tokens) } else { (0, plan.held) };
        let Some(blocks) = self.engines[engine].allocate(request, first, end) else { return false };
        let blocks = Rc::new(blocks);
        let nodes = self.plan.engines[engine].nodes.clone();
        let running = Running {
            blocks: Rc::clone(&blocks),
            spoken: vec![None; nodes.len()],
            preempted: false,
            told: false,
            over: false,
        };
        self.engines[engine].running.insert(request, running);
        self.tell(engine, |_| true, || Inbox::Begin { request, blocks: Rc::clone(&blocks) });
        true
    }

    /// Refused in writing: the peers hear it from every rank.
    fn refuse(&mut self, engine: usize, request: usize) -> Result<(), String> {
        let receives = self.receives(engine, request);
        self.ledger.request_ended(request, receives)?;
        self.report.count("requests refused for want of blocks");
        self.tell(engine, |_| true, || Inbox::Decline { request });
        Ok(())
    }

    /// Tells some ranks of an engine; what a rank is told arrives in order.
    pub(super) fn tell(&mut self, engine: usize, whom: impl Fn(usize) -> bool, input: impl Fn() -> Inbox) {
        for (rank, node) in self.plan.engines[engine].nodes.clone().enumerate() {
            if !whom(rank) {
                continue;
            }
            let wait = self.rng.within(0..3 * MS);
            let at = (self.now + wait).max(self.nodes[node].told_at + 1);
            self.nodes[node].told_at = at;
            let incarnation = self.nodes[node].incarnation;
            self.after(at - self.now, Event::Input { node, incarnation, input: input() });
        }
    }

    fn whim(&mut self, engine: usize, request: usize, whim: Whim) -> Result<(), String> {
        let state = &mut self.engines[engine];
        if let Some(at) = state.waiting.iter().position(|&waits| waits == request) {
            state.waiting.remove(at);
            return self.refuse(engine, request);
        }
        let Some(running) = state.running.get_mut(&request).filter(|running| !running.over) else { return Ok(()) };
        match whim {
            Whim::Cancel => self.tell(engine, |_| true, || Inbox::Cancel { request }),
            Whim::Fail => self.tell(engine, |_| true, || Inbox::Fail { request }),
            Whim::Preempt => {
                running.preempted = true;
                self.report.count("preempted requests");
                self.tell(engine, |_| true, || Inbox::Cancel { request });
                if self.options.driver_bug == Some(DriverBug::ReusedBeforeDrain) {
                    return self.use_otherwise(engine, request);
                }
            }
        }
        Ok(())
    }

    fn rank_spoke(&mut self, engine: usize, request: usize, rank: usize, spoken: Spoken) -> Result<(), String> {
        let receives = self.receives(engine, request);
        let Some(running) = self.engines[engine].running.get_mut(&request) else {
            return Err(format!("invariant 2: rank {rank} speaks of request {request}, which is over"));
        };
        let failed = spoken.verdict != Verdict::Done;
        if running.spoken[rank].replace(spoken).is_some() {
            return Err(format!("invariant 2: rank {rank} speaks twice of request {request}"));
        }
        if running.spoken.iter().all(Option::is_some) || self.options.driver_bug == Some(DriverBug::FirstRankSpeaks) {
            return self.request_over(engine, request);
        }
        if failed && receives && self.plan.cancel_ranks && !std::mem::replace(&mut running.told, true) {
            let silent: Vec<bool> = running.spoken.iter().map(Option::is_none).collect();
            self.tell(engine, |rank| silent[rank], || Inbox::Cancel { request });
        }
        Ok(())
    }

    /// All ranks have spoken.
    fn request_over(&mut self, engine: usize, request: usize) -> Result<(), String> {
        let receives = self.receives(engine, request);
        self.ledger.request_ended(request, receives)?;
        let Some(running) = self.engines[engine].running.get_mut(&request) else { return Ok(()) };
        running.over = true;
        let preempted = running.preempted;
        let spoken = running.spoken.iter().flatten();
        let verdict = spoken.clone().find(|spoken| spoken.verdict != Verdict::Done);
        let verdict = verdict.map_or(Verdict::Done, |spoken| spoken.verdict.clone());
        let good = spoken.map(|spoken| spoken.good).min().unwrap_or_default();
        let side = match (self.plan.requests[request].returns, receives) {
            (false, true) => "load",
            (false, false) => "lease",
            (true, true) => "take",
            (true, false) => "return",
        };
        *self.report.requests.entry((side, verdict.name())).or_default() += 1;
        if receives {
            self.ledger.check_request(&self.plan, request, &verdict)?;
            self.check_good(engine, request, good)?;
            if verdict == Verdict::Done && good != self.plan.requests[request].tokens {
                return Err(format!("invariant 2: request {request} is done, but only {good} tokens are good"));
            }
        }
        if preempted {
            self.use_otherwise(engine, request)?;
        } else if !(receives && verdict == Verdict::Done) {
            return self.free(engine, request);
        }
        self.engine_later(engine, self.plan.requests[request].hold, Step::Free { request });
        Ok(())
    }

    /// The blocks serve something else at once.
    fn use_otherwise(&mut self, engine: usize, request: usize) -> Result<(), String> {
        let Some(running) = self.engines[engine].running.get_mut(&request) else { return Ok(()) };
        let blocks = Rc::clone(&running.blocks);
        for node in self.plan.engines[engine].nodes.clone() {
            self.nodes[node].memory.free(&blocks)?;
            self.nodes[node].memory.poison(&blocks)?;
        }
        Ok(())
    }

    fn free(&mut self, engine: usize, request: usize) -> Result<(), String> {
        let Some(running) = self.engines[engine].running.remove(&request) else { return Ok(()) };
        let (blocks, receives) = (running.blocks, self.receives(engine, request));
        let done = running.spoken.iter().flatten().all(|spoken| spoken.verdict == Verdict::Done);
        for node in self.plan.engines[engine].nodes.clone() {
            if running.preempted {
                self.nodes[node].memory.clean(&blocks)?;
                continue;
            }
            if receives && done {
                let plan = &self.plan.requests[request];
                self.check_tokens(node, &blocks, plan.local..plan.tokens, "invariant 3: read")?;
            }
            self.nodes[node].memory.free(&blocks)?;
        }
        self.engines[engine].free.extend(&blocks.ids);
        while let Some(&next) = self.engines[engine].waiting.front() {
            if !self.start(engine, next) {
                break;
            }
            self.engines[engine].waiting.pop_front();
        }
        Ok(())
    }

    /// What the engine goes on with is right on every rank.
    fn check_good(&self, engine: usize, request: usize, good: u32) -> Result<(), String> {
        let Some(running) = self.engines[engine].running.get(&request) else { return Ok(()) };
        let first = self.plan.requests[request].local;
        for node in self.plan.engines[engine].nodes.clone() {
            self.check_tokens(node, &running.blocks, first..good.max(first), "invariant 8: good on all ranks")?;
        }
        Ok(())
    }

    /// All layers and heads of some tokens hold what they must; what comes from a liar is only looked at.
    pub(super) fn check_tokens(
        &self,
        node: usize,
        blocks: &Blocks,
        tokens: std::ops::Range<u32>,
        what: &str,
    ) -> Result<(), String> {
        let Ok(rect) = Rect::new(tokens, 0..LAYERS) else { return Ok(()) };
        self.check_cells(node, blocks, rect, self.plan.nodes[node].heads.clone(), what)
    }

    pub(super) fn check_cells(
        &self,
        node: usize,
        blocks: &Blocks,
        rect: Rect,
        heads: std::ops::Range<u16>,
        what: &str,
    ) -> Result<(), String> {
        let (salt, known) = (self.plan.requests[blocks.request].salt, !self.plan.has_liar(blocks.request));
        for cell in cells(rect, heads) {
            if self.nodes[node].memory.read(blocks, cell)? != content(salt, cell) && known {
                let (token, layer, head) = cell;
                let request = blocks.request;
                return Err(format!("{what}: token {token} layer {layer} head {head} of request {request} is wrong"));
            }
        }
        Ok(())
    }
}
