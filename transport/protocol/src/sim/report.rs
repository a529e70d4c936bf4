//! What a run is asked to do, and what it was.

use std::collections::BTreeMap;
use std::fmt;

use crate::transfer::Planted;

use super::visits::Visits;

/// What a run is to do beside its seed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A bug in every machine.
    pub planted: Option<Planted>,
    /// A bug in every driver.
    pub driver_bug: Option<DriverBug>,
    /// Keep a line for each step.
    pub trace: bool,
    /// Every engine keeps to the protocol.
    pub no_liars: bool,
    /// Every clock shows this much more, in microseconds: nothing else may change.
    pub epoch_us: u64,
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
    /// The blocks of a preempted request are used again before its transfers are over.
    ReusedBeforeDrain,
    /// A request is over when its first rank says so.
    FirstRankSpeaks,
    /// Messages are written in the newest version that the writer knows, not in the session's.
    NewestVersionSpoken,
    /// Bytes that are being hashed, or were, may be written under the same grant.
    NotSealed,
    /// A grant takes the writes of any peer that knows its key.
    GrantForAnybody,
    /// What a write is said to be is believed, whichever grant it came under.
    NotificationTrusted,
    /// A word about a transfer is believed, whoever says it.
    AnybodyHeard,
}

impl DriverBug {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::FenceLies,
        Self::OldIncarnationTaken,
        Self::NoTimers,
        Self::ReusedBeforeDrain,
        Self::FirstRankSpeaks,
        Self::NewestVersionSpoken,
        Self::NotSealed,
        Self::GrantForAnybody,
        Self::NotificationTrusted,
        Self::AnybodyHeard,
    ];
}

/// What a run was.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Runs added up.
    pub runs: u64,
    /// Steps taken.
    pub steps: u64,
    /// Transfers begun on either side.
    pub transfers: u64,
    /// The most transfers of one run.
    pub most_transfers: u64,
    /// Which pairs of a state and an input were seen.
    pub visits: Visits,
    /// How many transfers ended in each pair of verdicts (receiver, sender); `-` is a crash or a request that never came.
    pub verdicts: BTreeMap<(&'static str, &'static str), u64>,
    /// How many requests ended how on their engine: what it did (`load` what its peer did `lease`, or `take` what it did `return`), and the
    /// verdict.
    pub requests: BTreeMap<(&'static str, &'static str), u64>,
    /// What happened beside, how often: faults, refusals and the like.
    pub events: BTreeMap<&'static str, u64>,
    /// How many inputs the machines did not take.
    pub ignored: u64,
    /// A digest of all that was said: two runs that differ in their epochs only say the same.
    pub said: u64,
    /// The steps in words, if asked for.
    pub trace: Vec<String>,
}

impl Report {
    pub(super) fn count(&mut self, event: &'static str) {
        *self.events.entry(event).or_default() += 1;
    }

    /// Adds another run.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.steps += other.steps;
        self.transfers += other.transfers;
        self.most_transfers = self.most_transfers.max(other.most_transfers);
        self.visits.add(&other.visits);
        for (&key, count) in &other.verdicts {
            *self.verdicts.entry(key).or_default() += count;
        }
        for (&key, count) in &other.requests {
            *self.requests.entry(key).or_default() += count;
        }
        for (&key, count) in &other.events {
            *self.events.entry(key).or_default() += count;
        }
        self.ignored += other.ignored;
        self.said = self.said.wrapping_add(other.said);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, steps, transfers, most_transfers, ignored, .. } = self;
        writeln!(f, "{runs} runs, {steps} steps, {transfers} transfers, at most {most_transfers} in a run")?;
        writeln!(f, "verdicts (receiver, sender): {:?}", self.verdicts)?;
        writeln!(f, "requests: {:?}", self.requests)?;
        writeln!(f, "beside: {:?}, {ignored} inputs ignored", self.events)?;
        let pairs = self.visits.pairs();
        let legal = pairs.iter().filter(|pair| pair.takes && pair.reached);
        let (all, seen) = (legal.clone().count(), legal.filter(|pair| pair.count > 0).count());
        let refused = pairs.iter().filter(|pair| !pair.takes && pair.count > 0).count();
        writeln!(f, "pairs of state and input: {seen} of {all} that fit, {refused} that do not fit")?;
        let words = pairs.iter().filter(|pair| pair.lies);
        let (all, heard) = (words.clone().count(), words.filter(|pair| pair.lied > 0).count());
        let new = pairs.iter().filter(|pair| pair.count == 0 && pair.lied > 0).count();
        writeln!(f, "words of liars in a state: {heard} of {all}; {new} pairs that only they bring about")?;
        f.write_str(&self.visits.table())
    }
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
        write!(f, "KVFERRY_SIM_SEED={} cargo test -p kvferry-protocol --test simulation ", self.seed)?;
        f.write_str("-- --ignored --nocapture replay")
    }
}
