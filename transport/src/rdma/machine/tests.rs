//! Two machines and a scripted wire: whatever the script does, what the machines promise holds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::mock::{Fabric, Mine};
use super::{Machine, MachineConfig, MachineEvent, Plant, Planted, Why};
use crate::rdma::work::{Fault, Key, Order, Run};

const ORDERS: usize = 24;
/// Bytes of one order's places, at the source and at the target; with gaps, fewer are used.
const SPAN: usize = 512;
const TARGETS: usize = ORDERS * SPAN;
const POISON: u8 = 0xEE;

pub(super) fn config() -> MachineConfig {
    MachineConfig {
        payload_lanes: 3,
        window: 4,
        head_bytes: 16,
        send_depth: 8,
        lane_bytes: 200,
        request_bytes: 64,
        segments: 2,
        chain: 4,
        part_bytes: 100,
        max_orders: ORDERS,
        stall: Duration::from_secs(5),
        drain: Duration::from_secs(2),
    }
}

/// Numbers that a seed gives.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// How often something bad happens: once in so many steps; 0 is never.
#[derive(Clone, Copy, Default, Debug)]
struct Faults {
    duplicate: usize,
    lose: usize,
    refuse: usize,
    fence: usize,
    kill: usize,
}

impl Faults {
    /// Whether every write must arrive all the same.
    fn are_harmless(self) -> bool {
        [self.lose, self.refuse, self.fence, self.kill].iter().all(|often| *often == 0)
    }
}

struct World {
    fabric: Fabric,
    machines: [Machine; 2],
    now: Instant,
    dice: Dice,
    orders: [Vec<Option<Tracked>>; 2],
    is_killed: [bool; 2],
    is_over: [bool; 2],
    broken: [Option<Fault>; 2],
    has_lost: bool,
}

/// What the world knows of an order of one side.
struct Tracked {
    runs: Vec<Run>,
    end: Option<bool>,
    has_landed: bool,
}

impl World {
    fn new(seed: u64, plant: Option<Plant>) -> Self {
        let (now, config) = (Instant::now(), config());
        let lanes = config.payload_lanes + 1;
        let mut fabric = Fabric::new(2 * TARGETS, lanes, config.send_depth.into(), config.window as usize);
        let machine = || {
            let mut machine = Machine::new(config, now);
            machine.planted = Planted(plant);
            machine.inbound.planted = Planted(plant);
            machine
        };
        let mut machines = [machine(), machine()];
        for (side, machine) in machines.iter_mut().enumerate() {
            machine.open(&mut Mine(&mut fabric, side), config.window, config.head_bytes, now);
        }
        let orders = [(0..ORDERS).map(|_| None).collect(), (0..ORDERS).map(|_| None).collect()];
        let dice = Dice(seed.wrapping_mul(2_654_435_769).wrapping_add(99));
        Self {
            fabric,
            machines,
            now,
            dice,
            orders,
            is_killed: [false; 2],
            is_over: [false; 2],
            broken: [None, None],
            has_lost: false,
        }
    }

    fn post(&mut self, side: usize) -> Result<(), String> {
        let Some(id) = self.orders[side].iter().position(Option::is_none) else { return Ok(()) };
        let (source, target) = (id * SPAN, TARGETS + id * SPAN);
        let mut runs: Vec<Run> = Vec::new();
        let (mut from, mut to) = (source, target);
        while runs.len() < 12 {
            let bytes = 1 + self.dice.below(80);
            if from + bytes > source + SPAN || to + bytes > target + SPAN {
                break;
            }
            let (local, remote) = (from as u64, to as u64);
            runs.push(Run { local, local_key: Key(0), remote, remote_key: Key(0), bytes: bytes as u64 });
            from += bytes + self.dice.below(2) * 3;
            to += bytes + self.dice.below(2) * 3;
        }
        for run in &runs {
            let memory = &mut self.fabric.sides[side].memory;
            memory[run.local as usize..(run.local + run.bytes) as usize].fill(pattern(side, id));
        }
        let order = Order {
            id: id as u64,
            head: Bytes::from(vec![id as u8; 1 + id % 3]),
            runs: runs.clone(),
            is_spread: false,
        };
        let machine = &mut self.machines[side];
        if machine.post(&mut Mine(&mut self.fabric, side), order, self.now).is_ok() {
            self.orders[side][id] = Some(Tracked { runs, end: None, has_landed: false });
        } else if machine.is_open() {
            return Err("an order was refused".to_owned());
        }
        Ok(())
    }

    fn deliver(&mut self, side: usize, lane: usize, faults: Faults) {
        let again = faults.duplicate > 0 && self.dice.one_in(faults.duplicate);
        let lose = faults.lose > 0 && self.dice.one_in(faults.lose);
        let completion = match again {
            true => self.fabric.sides[side].lanes[lane].last_delivered.clone(),
            false => self.fabric.next_completion(side, lane),
        };
        let Some(completion) = completion else { return };
        if lose && !again {
            self.has_lost = true;
            return;
        }
        if self.is_killed[side] {
            return;
        }
        let (machine, mut lanes) = (&mut self.machines[side], Mine(&mut self.fabric, side));
        machine.complete(&mut lanes, completion, self.now);
        machine.advance(&mut lanes, self.now);
    }

    fn step(&mut self, faults: Faults) -> Result<(), String> {
        let (side, lane) = (self.dice.below(2), self.dice.below(config().payload_lanes + 1));
        let happens = |dice: &mut Dice, often: usize| often > 0 && dice.one_in(often);
        if happens(&mut self.dice, faults.fence) && !self.is_killed[side] {
            self.machines[side].fence(&mut Mine(&mut self.fabric, side), self.now);
        }
        if happens(&mut self.dice, faults.refuse) {
            let faults = [Fault::RemoteAccess, Fault::ReceiverNotReady, Fault::Unreachable];
            self.fabric.refuse(side, lane, faults[self.dice.below(faults.len())].clone());
        }
        if happens(&mut self.dice, faults.kill) && !self.is_killed.contains(&true) {
            self.is_killed[side] = true;
            self.fabric.kill(side);
        }
        match self.dice.below(5) {
            0 if !self.is_killed[side] => self.post(side)?,
            0..=2 => {
                let may_run = self.dice.one_in(2);
                self.fabric.run(side, lane, may_run);
            }
            _ => self.deliver(side, lane, faults),
        }
        self.drain_events()
    }

    /// Lets everything happen that still can.
    fn settle(&mut self) -> Result<(), String> {
        loop {
            let mut is_busy = false;
            for side in 0..2 {
                for lane in 0..=config().payload_lanes {
                    is_busy |= self.fabric.is_busy(side, lane);
                    is_busy |= !self.fabric.sides[side].lanes[lane].completions.is_empty();
                    self.fabric.run(side, lane, false);
                    self.deliver(side, lane, Faults::default());
                }
            }
            self.drain_events()?;
            if !is_busy {
                return Ok(());
            }
        }
    }

    fn drain_events(&mut self) -> Result<(), String> {
        for side in 0..2 {
            while let Some(event) = self.machines[side].poll_event() {
                if self.is_over[side] {
                    return Err(format!("side {side}: {event:?} after the end"));
                }
                self.take(side, event)?;
            }
        }
        self.check_poison()
    }

    fn take(&mut self, side: usize, event: MachineEvent) -> Result<(), String> {
        match event {
            MachineEvent::Sent { id } => self.end(side, id as usize, true),
            MachineEvent::Failed { id, .. } => self.end(side, id as usize, false),
            MachineEvent::Landed { head } => self.landed(side, &head),
            MachineEvent::Broken { fault } => match self.broken[side].replace(fault) {
                None => Ok(()),
                Some(before) => Err(format!("broken twice, first by {before}")),
            },
            MachineEvent::Closed => {
                self.is_over[side] = true;
                self.fabric.sides[side].memory[TARGETS..].fill(POISON);
                Ok(())
            }
        }
    }

    fn end(&mut self, side: usize, id: usize, is_sent: bool) -> Result<(), String> {
        let order = self.orders[side][id].as_mut().ok_or("an end of nothing")?;
        if order.end.replace(is_sent).is_some() {
            return Err(format!("order {id} ended twice"));
        }
        let peer = &self.fabric.sides[1 - side];
        let is_there = order.has_landed
            || self.is_over[1 - side]
            || peer.is_closed
            || is_in(&peer.memory, order, pattern(side, id));
        // The source has a new owner: whoever reads it from here on carries wrong bytes.
        for run in &order.runs {
            self.fabric.sides[side].memory[run.local as usize..(run.local + run.bytes) as usize].fill(0x55);
        }
        if is_sent && !is_there {
            Err(format!("order {id} ended as sent, and its bytes are not there"))
        } else {
            Ok(())
        }
    }

    fn landed(&mut self, side: usize, head: &[u8]) -> Result<(), String> {
        let id = usize::from(head[0]);
        if head != vec![id as u8; 1 + id % 3] {
            return Err("another head came than was sent".to_owned());
        }
        let order = self.orders[1 - side][id].as_mut().ok_or("a landing of nothing")?;
        if std::mem::replace(&mut order.has_landed, true) {
            return Err(format!("order {id} landed twice"));
        }
        if !is_in(&self.fabric.sides[side].memory, order, pattern(1 - side, id)) {
            return Err(format!("order {id} landed before all of its bytes were there"));
        }
        // The pages have a new owner.
        for run in &order.runs {
            let memory = &mut self.fabric.sides[side].memory;
            memory[run.remote as usize..(run.remote + run.bytes) as usize].fill(POISON);
        }
        Ok(())
    }

    /// No byte comes to pages that have a new owner.
    fn check_poison(&mut self) -> Result<(), String> {
        for side in 0..2 {
            let memory = &self.fabric.sides[side].memory;
            if self.is_over[side] && memory[TARGETS..].iter().any(|byte| *byte != POISON) {
                return Err(format!("side {side}: a byte came after the end"));
            }
            let landed = self.orders[1 - side].iter().flatten().filter(|order| order.has_landed);
            for run in landed.flat_map(|order| &order.runs) {
                if memory[run.remote as usize..(run.remote + run.bytes) as usize].iter().any(|byte| *byte != POISON) {
                    return Err(format!("side {side}: a byte came after its landing"));
                }
            }
        }
        Ok(())
    }

    /// Ends both sides, and says what is wrong then.
    fn finish(&mut self, faults: Faults) -> Result<(), String> {
        self.settle()?;
        if faults.are_harmless() {
            for (side, orders) in self.orders.iter().enumerate() {
                if !orders.iter().flatten().all(|order| order.end == Some(true) && order.has_landed) {
                    return Err(format!("side {side}: a write has not ended, though nothing failed"));
                }
            }
            if let Some(fault) = self.broken.iter().flatten().next() {
                return Err(format!("broken without a cause: {fault}"));
            }
        }
        for side in 0..2 {
            if !self.is_killed[side] {
                self.machines[side].fence(&mut Mine(&mut self.fabric, side), self.now);
            }
        }
        self.settle()?;
        self.now += config().stall + config().drain;
        for side in (0..2).filter(|side| !self.is_killed[*side]) {
            self.machines[side].time_out(&mut Mine(&mut self.fabric, side), self.now);
        }
        self.settle()?;
        for side in (0..2).filter(|side| !self.is_killed[*side]) {
            let counts = self.machines[side].counts;
            if !self.is_over[side] || self.orders[side].iter().flatten().any(|order| order.end.is_none()) {
                return Err(format!("side {side} has not ended"));
            }
            if counts.lost > 0 && !self.has_lost {
                return Err(format!("side {side}: draining took all its time though no completion was lost"));
            }
            if self.machines[side].poll_timeout().is_some() {
                return Err(format!("side {side} waits for something after its end"));
            }
        }
        match self.fabric.breaches.first() {
            Some(breach) if !self.has_lost => Err(breach.clone()),
            _ => Ok(()),
        }
    }
}

fn is_in(memory: &[u8], order: &Tracked, byte: u8) -> bool {
    let bytes = |run: &Run| &memory[run.remote as usize..(run.remote + run.bytes) as usize];
    order.runs.iter().all(|run| bytes(run).iter().all(|found| *found == byte))
}

fn pattern(side: usize, id: usize) -> u8 {
    (1 + side * 64 + id) as u8
}

fn play(seed: u64, faults: Faults, plant: Option<Plant>) -> Result<World, String> {
    let mut world = World::new(seed, plant);
    for _ in 0..600 {
        world.step(faults)?;
    }
    world.finish(faults)?;
    Ok(world)
}

const SCRIPTS: [(&str, Faults); 6] = [
    ("nothing fails", Faults { duplicate: 0, lose: 0, refuse: 0, fence: 0, kill: 0 }),
    ("completions come twice", Faults { duplicate: 5, lose: 0, refuse: 0, fence: 0, kill: 0 }),
    ("completions are lost", Faults { duplicate: 0, lose: 40, refuse: 0, fence: 0, kill: 0 }),
    ("a request is refused", Faults { duplicate: 9, lose: 0, refuse: 200, fence: 0, kill: 0 }),
    ("one side is fenced", Faults { duplicate: 9, lose: 0, refuse: 0, fence: 200, kill: 0 }),
    ("one side is killed", Faults { duplicate: 0, lose: 0, refuse: 0, fence: 0, kill: 200 }),
];

#[test]
fn whatever_the_wire_does_each_write_ends_once_and_no_byte_comes_late() {
    for (name, faults) in SCRIPTS {
        let mut seen = BTreeMap::new();
        for seed in 0..300 {
            let world = play(seed, faults, None).unwrap_or_else(|problem| panic!("{name}, seed {seed}: {problem}"));
            let ends = world.orders.iter().flatten().flatten().filter_map(|order| order.end);
            ends.for_each(|end| *seen.entry(end).or_insert(0) += 1);
        }
        assert!(seen.contains_key(&true), "{name}: nothing was ever sent");
        assert_eq!(seen.contains_key(&false), !faults.are_harmless(), "{name}: {seen:?}");
    }
}

#[test]
fn each_planted_bug_is_seen() {
    for plant in [
        Plant::DuplicateTaken,
        Plant::ReceiveNotPosted,
        Plant::WindowIgnored,
        Plant::DepthIgnored,
        Plant::LastUnsignalled,
        Plant::ClosedBeforeDrained,
        Plant::PlacesReturnedTwice,
        Plant::LandedEarly,
        Plant::EarlyTagDropped,
        Plant::FailureTakenForSuccess,
    ] {
        let mut plays = SCRIPTS.iter().flat_map(|(_, faults)| (0..100).map(|seed| play(seed, *faults, Some(plant))));
        assert!(plays.any(|played| played.is_err()), "{plant:?} was not seen");
    }
}

fn one_order(bytes: &[u64]) -> Order {
    let run = |(at, bytes): (usize, &u64)| Run {
        local: at as u64,
        local_key: Key(0),
        remote: at as u64,
        remote_key: Key(0),
        bytes: *bytes,
    };
    Order {
        id: 1,
        head: Bytes::from_static(b"head"),
        runs: bytes.iter().enumerate().map(run).collect(),
        is_spread: false,
    }
}

#[test]
fn an_order_that_cannot_go_is_handed_back_with_the_reason() {
    let (now, config) = (Instant::now(), MachineConfig { max_orders: 2, ..config() });
    let mut fabric = Fabric::new(64, config.payload_lanes + 1, 8, 4);
    let mut lanes = Mine(&mut fabric, 0);
    let mut machine = Machine::new(config, now);
    let refused = |machine: &mut Machine, lanes: &mut Mine<'_>, order: Order| {
        machine.post(lanes, order, now).map_err(|untaken| untaken.why)
    };
    assert_eq!(refused(&mut machine, &mut lanes, one_order(&[1])), Err(Why::NotOpen));
    machine.open(&mut lanes, 1, 4, now);
    for (name, order) in [
        ("no runs", one_order(&[])),
        ("an empty run", one_order(&[1, 0])),
        ("an overflow", one_order(&[u64::MAX, 1])),
        ("a head longer than the peer takes", Order { head: Bytes::from_static(b"heads"), ..one_order(&[1]) }),
    ] {
        assert_eq!(refused(&mut machine, &mut lanes, order), Err(Why::Malformed), "{name}");
    }
    // One has begun, two wait: the peer has one place.
    for _ in 0..3 {
        assert_eq!(refused(&mut machine, &mut lanes, one_order(&[1])), Ok(()));
    }
    assert!(!machine.has_room());
    assert_eq!(refused(&mut machine, &mut lanes, one_order(&[1])), Err(Why::Full));
    assert!(machine.withdraw(1).is_some());
    assert_eq!(refused(&mut machine, &mut lanes, one_order(&[1])), Ok(()));
}

#[test]
fn a_peer_that_answers_nothing_is_given_up_at_the_deadline_and_drained_by_another() {
    let (now, config) = (Instant::now(), config());
    let mut fabric = Fabric::new(64, config.payload_lanes + 1, 8, 4);
    let mut lanes = Mine(&mut fabric, 0);
    let mut machine = Machine::new(config, now);
    machine.open(&mut lanes, 1, 4, now);
    assert_eq!(machine.poll_timeout(), None, "nothing is in flight");
    machine.post(&mut lanes, one_order(&[10]), now).unwrap();
    assert_eq!(machine.poll_timeout(), Some(now + config.stall));
    machine.time_out(&mut lanes, now + config.stall / 2);
    assert_eq!(machine.poll_event(), None);
    let stalled = now + config.stall;
    machine.time_out(&mut lanes, stalled);
    let fault = Fault::Stalled { lane: 0, waited: config.stall };
    assert_eq!(machine.poll_event(), Some(MachineEvent::Broken { fault: fault.clone() }));
    assert_eq!(machine.poll_event(), None, "the source may still be read");
    assert_eq!(machine.poll_timeout(), Some(stalled + config.drain));
    machine.time_out(&mut lanes, stalled + config.drain);
    assert_eq!(machine.poll_event(), Some(MachineEvent::Failed { id: 1, fault }));
    assert_eq!(machine.poll_event(), Some(MachineEvent::Closed));
    assert!(machine.counts.lost > 0 && fabric.sides[0].is_closed);
}
