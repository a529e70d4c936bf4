//! Traces that are drawn: the shape of conversations, and of agents.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Trace;

/// splitmix64 (Steele, Lea, Flood 2014).
struct Chance(u64);

impl Chance {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    /// From 0 to 1, the low end open.
    fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -self.unit().ln() * mean
    }

    /// One of `count`, the first ones most often: Zipf's law.
    fn popular(&mut self, count: usize) -> usize {
        ((count as f64 + 1.0).powf(self.unit()) as usize).clamp(1, count) - 1
    }
}

/// What a session does, step by step.
struct Shape {
    name: &'static str,
    /// Kinds of beginnings that sessions share, and blocks of each.
    beginnings: usize,
    beginning_blocks: u64,
    /// Steps of a session, blocks that each adds, and the time between two, in units of the time between two sessions' begins.
    steps: f64,
    step_blocks: f64,
    pause: f64,
    /// One step in so many splits off a second session.
    branches: u64,
}

/// Conversations: short common instructions, some turns of an answer and a question each, and pauses in which the user thinks.
pub(crate) fn conversations(sessions: usize) -> Trace {
    let (beginnings, beginning_blocks, branches) = (20, 4, 1000);
    let shape = Shape {
        name: "conversations (drawn)",
        beginnings,
        beginning_blocks,
        steps: 5.0,
        step_blocks: 6.0,
        pause: 60.0,
        branches,
    };
    drawn(&shape, sessions)
}

/// Agents: long common instructions and tools, many short steps at short intervals, and parts that run side by side.
pub(crate) fn agents(sessions: usize) -> Trace {
    let (beginnings, beginning_blocks, branches) = (12, 24, 12);
    let shape = Shape {
        name: "agents (drawn)",
        beginnings,
        beginning_blocks,
        steps: 15.0,
        step_blocks: 2.0,
        pause: 6.0,
        branches,
    };
    drawn(&shape, sessions)
}

fn drawn(shape: &Shape, sessions: usize) -> Trace {
    let mut chance = Chance(7);
    let mut next_block = shape.beginnings as u64 * shape.beginning_blocks;
    let mut prompts = Vec::new();
    let mut texts: Vec<(Vec<u64>, f64)> = Vec::new();
    // By the time of the next step, in millionths.
    let mut due = BinaryHeap::new();
    let mut begin = 0.0;
    let at = |time: f64| (time * 1e6) as u64;
    for session in 0..sessions {
        begin += chance.exponential(1.0);
        let first = chance.popular(shape.beginnings) as u64 * shape.beginning_blocks;
        texts.push(((first..first + shape.beginning_blocks).collect(), chance.exponential(shape.steps).max(1.0)));
        due.push(Reverse((at(begin), session)));
    }
    while let Some(Reverse((now, session))) = due.pop() {
        let (text, left) = &mut texts[session];
        let more = 1 + chance.exponential(shape.step_blocks - 1.0) as u64;
        text.extend(next_block..next_block + more);
        next_block += more;
        prompts.push(text.clone());
        *left -= 1.0;
        if *left > 0.0 {
            // A part that runs beside the rest is short.
            let again = (text.clone(), left.min(3.0));
            due.push(Reverse((now + at(chance.exponential(shape.pause)), session)));
            if chance.below(shape.branches) == 0 {
                texts.push(again);
                due.push(Reverse((now + at(chance.exponential(shape.pause)), texts.len() - 1)));
            }
        }
    }
    Trace { name: shape.name.to_owned(), prompts }
}
