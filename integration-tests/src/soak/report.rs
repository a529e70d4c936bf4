//! What came of a long run: always the same table, so that two runs can be laid side by side.

use std::fmt;
use std::time::Duration;

use crate::{Node, Tally};

/// What came of it.
#[derive(Debug)]
pub struct SoakReport {
    /// Answers that were right.
    pub right: u64,
    /// Requests that failed because their KV was lost, where that is the policy.
    pub refused: u64,
    /// Clients whose decode node was killed under them.
    pub lost_with_node: u64,
    /// Clients that hung up.
    pub hung_up: u64,
    /// The longest idle wait of a node for an answer, and what its deadlines allow.
    pub longest_idle: (Duration, Duration),
    /// How often each fault was done.
    pub faults: Vec<(&'static str, u64)>,
    /// The nodes that lived from the beginning to the end.
    pub nodes: Vec<NodeReport>,
    /// How much of the beginning and of the end is compared.
    pub window: Duration,
    /// Latencies of the first and the last window.
    pub latency: [Latency; 2],
    /// Transfers and losses that the surviving nodes counted.
    pub tally: Tally,
}

/// One node, whole and at rest before the load, under load at the end of the first window, and at rest after it.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// Which.
    pub name: String,
    /// Before, warm, after.
    pub usage: [Usage; 3],
    /// Before, warm, after.
    pub pools: [Pools; 3],
}

/// What a process has of its system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Memory, in KiB.
    pub resident_kib: u64,
    /// File descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Tasks of its async runtime.
    pub tasks: u64,
}

/// What a node's pools and tables hold.
#[derive(Clone, PartialEq, Debug)]
pub struct Pools(Vec<(&'static str, f64)>);

/// How long answers took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    /// How many.
    pub count: usize,
    /// The median, in milliseconds.
    pub p50_ms: f64,
    /// What one in a hundred exceeds, in milliseconds.
    pub p99_ms: f64,
}

/// The gauges of the report: kvferry's names without their prefix.
const GAUGES: [&str; 14] = [
    "pool_blocks",
    "pool_blocks_free",
    "pool_blocks_cached",
    "pool_blocks_leased",
    "slab_pool_limit_bytes",
    "slab_pool_used_bytes",
    "transfers_live",
    "grants_live",
    "leases_live",
    "early_grants_live",
    "engine_messages_waiting",
    "sessions_live",
    "tier_blocks_filled",
    "tier_queue_blocks",
];

impl Usage {
    pub(super) fn of(node: &Node) -> Self {
        Self {
            resident_kib: node.resident_kib(),
            descriptors: node.descriptors(),
            threads: node.threads(),
            tasks: node.metric("node_tokio_tasks", "") as u64,
        }
    }
}

impl Pools {
    pub(super) fn of(node: &Node) -> Self {
        Self(GAUGES.map(|gauge| (gauge, node.metric(&format!("kvferry_{gauge}"), ""))).to_vec())
    }
}

impl Latency {
    pub(super) fn of(mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        let ms = |per_mille: usize| {
            let at = (took.len() * per_mille / 1000).min(took.len().saturating_sub(1));
            took.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e3)
        };
        Self { count: took.len(), p50_ms: ms(500), p99_ms: ms(990) }
    }
}

impl NodeReport {
    pub(super) fn of(name: String, node: &Node, before: (Usage, Pools), warm: (Usage, Pools)) -> Self {
        let (usage, pools) = ([before.0, warm.0, Usage::of(node)], [before.1, warm.1, Pools::of(node)]);
        Self { name, usage, pools }
    }
}

impl SoakReport {
    /// # Panics
    /// If a node has more in the end than it had.
    pub(super) fn check(&self) {
        for NodeReport { name, usage: [before, warm, after], .. } in &self.nodes {
            // Memory is compared with what load takes, the rest with rest.
            let most_kib = warm.resident_kib + warm.resident_kib / 4 + (8 << 10);
            let (from, to) = (warm.resident_kib, after.resident_kib);
            assert!(to <= most_kib, "{name} grew from {from} KiB to {to} KiB");
            assert!(after.tasks <= before.tasks + MORE_TASKS, "{name}: {} tasks became {}", before.tasks, after.tasks);
        }
    }
}

/// Connections that ask for metrics have a task each, and one that was just answered may not have ended.
const MORE_TASKS: u64 = 4;

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { right, refused, lost_with_node, hung_up, longest_idle: (idle, limit), window, .. } = self;
        writeln!(
            f,
            "answers: {right} right, {refused} refused as the policy says, {lost_with_node} lost with their node, \
             {hung_up} clients hung up"
        )?;
        writeln!(
            f,
            "longest idle wait for an answer: {:.1} s of the {:.1} s that the deadlines allow",
            idle.as_secs_f64(),
            limit.as_secs_f64()
        )?;
        let all: u64 = self.faults.iter().map(|(_, count)| count).sum();
        let faults: Vec<_> = self.faults.iter().map(|(fault, count)| format!("{fault} {count}")).collect();
        writeln!(f, "faults: {all}: {}", faults.join(", "))?;
        for (latency, when) in self.latency.iter().zip(["first", "last"]) {
            let (Latency { count, p50_ms, p99_ms }, minutes) = (latency, window.as_secs_f64() / 60.0);
            writeln!(f, "{when} {minutes:.1} minutes: {count} answers, p50 {p50_ms:.0} ms, p99 {p99_ms:.0} ms")?;
        }
        self.nodes.iter().try_for_each(|node| node.fmt(f))?;
        write!(f, "{:?}", self.tally)
    }
}

impl fmt::Display for NodeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<26}{:>12}{:>12}{:>12}", self.name, "before", "warm", "after")?;
        let mut row = |name: &str, values: [f64; 3]| {
            let [before, warm, after] = values;
            writeln!(f, "  {name:<24}{before:>12}{warm:>12}{after:>12}")
        };
        row("resident KiB", self.usage.map(|usage| usage.resident_kib as f64))?;
        row("descriptors", self.usage.map(|usage| usage.descriptors as f64))?;
        row("threads", self.usage.map(|usage| usage.threads as f64))?;
        row("tokio tasks", self.usage.map(|usage| usage.tasks as f64))?;
        for (index, gauge) in GAUGES.iter().enumerate() {
            row(gauge, self.pools.each_ref().map(|Pools(values)| values[index].1))?;
        }
        Ok(())
    }
}
