//! What many peers of one node get, and what they cost it.

use std::fmt::Write as _;

use serde::Serialize;

use crate::args::Kind;
use crate::bench::report::Rounded;
use crate::figures::{best, median, rounded, rounded_to};
use crate::size::Size;

/// What many peers of one node get, and cost it.
#[derive(Debug, Serialize)]
pub(crate) struct CrowdReport {
    pub(super) transport: Kind,
    pub(super) block_bytes: u64,
    pub(super) batch: u32,
    pub(super) lanes: u16,
    pub(super) seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) idle: Option<Idle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) busy: Option<Busy>,
}

/// Peers that are connected and say nothing.
#[derive(Debug, Serialize)]
pub(super) struct Idle {
    pub(super) peers: u32,
    /// Resident memory of the node for each.
    pub(super) memory_bytes_per_peer: f64,
    /// CPU time of the node for each, in microseconds a second.
    pub(super) cpu_us_per_peer_second: f64,
    /// Open files of the node for each.
    pub(super) descriptors_per_peer: f64,
    /// Threads of the node, without and with them.
    pub(super) threads: [u64; 2],
    /// From the first dial to the last session.
    pub(super) connect_all_ms: f64,
    /// Bytes of a small write to one more peer.
    pub(super) write_bytes: u64,
    /// From its post to the receiver's word, before the idle peers are there.
    pub(super) write_alone_us: Rounded,
    /// The same beside them.
    pub(super) write_beside_us: Rounded,
}

/// Peers that write as fast as they can.
#[derive(Debug, Serialize)]
pub(super) struct Busy {
    pub(super) peers: u32,
    pub(super) gbps_total: f64,
    pub(super) gbps_median: f64,
    pub(super) gbps_least: f64,
    pub(super) gbps_most: f64,
    /// How much more than the least the most got: 0.2 is 20 % more.
    pub(super) spread: f64,
    /// Jain's index: 1 if all got the same, 1 / `peers` if one got all.
    pub(super) jain: f64,
    /// CPU time of the node for 10^9 bytes.
    pub(super) cpu_seconds_per_gb: f64,
    /// Threads of the node.
    pub(super) threads: u64,
    /// Whether each peer's window holds that peer's bytes.
    pub(super) verified: bool,
}

/// What peers that moved so many bytes got, and cost.
pub(super) fn busy(moved: &[u64], seconds: f64, cpu: f64, threads: u64, verified: bool) -> Busy {
    let mut rates: Vec<f64> = moved.iter().map(|bytes| *bytes as f64 / seconds / 1e9).collect();
    let total: f64 = rates.iter().sum();
    let (middle, most) = (median(&mut rates), best(&rates));
    let least = rates.first().copied().unwrap_or_default();
    Busy {
        peers: moved.len() as u32,
        gbps_total: rounded(total),
        gbps_median: rounded_to(middle, 6),
        gbps_least: rounded_to(least, 6),
        gbps_most: rounded_to(most, 6),
        spread: rounded(most / least - 1.0),
        jain: rounded_to(total * total / (rates.len() as f64 * rates.iter().map(|rate| rate * rate).sum::<f64>()), 4),
        cpu_seconds_per_gb: rounded(cpu / (total * seconds)),
        threads,
        verified,
    }
}

impl CrowdReport {
    /// Whether a window holds what its peer did not send.
    pub(crate) fn has_wrong(&self) -> bool {
        self.busy.as_ref().is_some_and(|busy| !busy.verified)
    }

    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        if let Some(idle) = &self.idle {
            let _ = writeln!(
                out,
                "{} idle peers over {}: {:.1} KiB, {:.1} files and {:.1} us of CPU a second for each; all up in {:.0} ms; threads \
                 {} -> {}; a write of {} to one more takes {:.0} / {:.0} us (p50 / p99) beside them, {:.0} / {:.0} without them",
                idle.peers,
                self.transport.name(),
                idle.memory_bytes_per_peer / 1024.0,
                idle.descriptors_per_peer,
                idle.cpu_us_per_peer_second,
                idle.connect_all_ms,
                idle.threads[0],
                idle.threads[1],
                Size(idle.write_bytes),
                idle.write_beside_us.p50,
                idle.write_beside_us.p99,
                idle.write_alone_us.p50,
                idle.write_alone_us.p99
            );
        }
        if let Some(busy) = &self.busy {
            let _ = writeln!(
                out,
                "{} busy peers over {}: {:.2} GB/s together; each {:.4} (median), {:.4} to {:.4}, spread {:.0} %, Jain's index \
                 {:.3}; {:.2} s of CPU for a GB; {} threads; bytes {}",
                busy.peers,
                self.transport.name(),
                busy.gbps_total,
                busy.gbps_median,
                busy.gbps_least,
                busy.gbps_most,
                busy.spread * 100.0,
                busy.jain,
                busy.cpu_seconds_per_gb,
                busy.threads,
                if busy.verified { "verified" } else { "WRONG" }
            );
        }
        out
    }
}
