//! What was found, as a table and as JSON.

use std::fmt::Write as _;

use kvferry_transport::PathReport;
use serde::Serialize;

use crate::args::{Direction, Kind};
use crate::figures::{Micros, rounded_to};
use crate::size::Size;

/// All sizes of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) sizes: Vec<Row>,
}

/// One block size. Rates are 10^9 bytes a second of payload, medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) transport: Kind,
    /// Which way the session took, and why no better one.
    #[serde(skip)]
    pub(crate) path: Option<PathReport>,
    pub(crate) block_bytes: u64,
    /// Blocks of a pass.
    pub(crate) blocks: u32,
    /// Blocks of a write.
    pub(crate) batch: u32,
    /// Writes under way at once.
    pub(crate) posts: u32,
    pub(crate) lanes: u16,
    /// Whether they were encrypted.
    pub(crate) tls: bool,
    pub(crate) direction: Direction,
    pub(crate) digest: bool,
    /// Whether nothing was copied.
    pub(crate) in_place: bool,
    /// Which share of a pass's bytes stayed in place until the receiver copied them, or was done: 1 for memory that is shared or read.
    pub(crate) lent_share: f64,
    pub(crate) gbps_median: f64,
    pub(crate) gbps_best: f64,
    /// Of each round.
    pub(crate) gbps_rounds: Vec<f64>,
    /// One block, from the first byte read at the sender to its verified end.
    pub(crate) one_block_us: Rounded,
    /// `request_blocks` blocks at once.
    pub(crate) request_us: Rounded,
    pub(crate) request_blocks: u32,
    /// From dialling to a session that proved itself.
    pub(crate) connect_us: f64,
    /// The first block of the session, cold.
    pub(crate) first_block_us: f64,
    #[serde(flatten)]
    pub(crate) limit: LimitFigures,
    /// The same over one plain socket, or by memcpy.
    pub(crate) limit_one_block_us: Option<Rounded>,
    pub(crate) limit_request_us: Option<Rounded>,
    /// Whether bytes were compared and none was wrong.
    pub(crate) verified: bool,
    #[serde(flatten)]
    pub(crate) wrong: Wrong,
}

/// The limit of the path, measured in turn with the transport.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct LimitFigures {
    /// What it is: the fastest of those that were measured.
    #[serde(rename = "limit_name")]
    pub(crate) name: Option<String>,
    #[serde(rename = "limit_gbps")]
    pub(crate) gbps: Option<f64>,
    /// The median of the rounds' ratios to it.
    pub(crate) ratio: Option<f64>,
    /// Why there is none.
    #[serde(rename = "limit_missing", skip_serializing_if = "Option::is_none")]
    pub(crate) missing: Option<String>,
}

/// What did not arrive as it was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Wrong {
    #[serde(rename = "wrong_digests")]
    pub(crate) digests: u64,
    #[serde(rename = "wrong_blocks")]
    pub(crate) blocks: u64,
}

/// Percentiles as they are reported.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Rounded {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

impl From<Micros> for Rounded {
    fn from(micros: Micros) -> Self {
        let one = |value| rounded_to(value, 1);
        Self { p50: one(micros.p50), p99: one(micros.p99), p999: one(micros.p999) }
    }
}

impl Report {
    /// Whether anything arrived otherwise than it was sent.
    pub(crate) fn has_wrong(&self) -> bool {
        self.sizes.iter().any(|row| row.wrong != Wrong::default())
    }

    /// A table for people.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        let Some(first) = self.sizes.first() else { return out };
        let digest = if first.digest { "digests on both sides" } else { "no digests" };
        let tls = if first.tls { " in TLS" } else { "" };
        let _ = writeln!(
            out,
            "{}, {}, {} lanes{tls}, {digest}; GB/s are medians, microseconds p50 / p99 / p999",
            first.transport.name(),
            first.direction.name(),
            first.lanes
        );
        let _ = writeln!(
            out,
            "{:>9} {:>7} {:>7} {:>7} {:>6}  {:>24} {:>28} {:>9} {:>9}  verified",
            "block", "GB/s", "best", "limit", "ratio", "one block us", "request us", "connect", "first us"
        );
        for row in &self.sizes {
            let _ = writeln!(
                out,
                "{:>9} {:>7.2} {:>7.2} {:>7} {:>6}  {:>24} {:>28} {:>9.0} {:>9.0}  {}",
                Size(row.block_bytes),
                row.gbps_median,
                row.gbps_best,
                shown(row.limit.gbps),
                shown(row.limit.ratio),
                micros(&row.one_block_us),
                format!("{} ({})", micros(&row.request_us), row.request_blocks),
                row.connect_us,
                row.first_block_us,
                row.verdict()
            );
        }
        self.foot(&mut out);
        out
    }

    /// What the limits are, and how they do with requests.
    fn foot(&self, out: &mut String) {
        for row in &self.sizes {
            let size = Size(row.block_bytes);
            if row.in_place {
                let of_request = row.request_us.p50 / f64::from(row.request_blocks);
                let _ = writeln!(
                    out,
                    "in place at {size}: {:.1} us for one block alone, {of_request:.2} us a block in requests of {}; nothing was copied",
                    row.one_block_us.p50, row.request_blocks
                );
            }
            if row.lent_share > 0.0 && row.lent_share < 0.999 {
                let _ = writeln!(
                    out,
                    "at {size} only {:.1} % of the bytes stayed in place; the others were streamed",
                    row.lent_share * 100.0
                );
            }
            match (&row.limit.name, &row.limit.missing) {
                (Some(name), _) => {
                    let _ = write!(out, "limit at {size}: {name}");
                    if let (Some(one), Some(request)) = (&row.limit_one_block_us, &row.limit_request_us) {
                        let _ = write!(out, "; one block {} us, request {} us", micros(one), micros(request));
                    }
                    let _ = writeln!(out);
                }
                (None, Some(why)) => {
                    let _ = writeln!(out, "no limit at {size}: {why}");
                }
                (None, None) => {}
            }
        }
    }
}

impl Row {
    fn verdict(&self) -> String {
        match (self.verified, self.wrong) {
            (true, _) => "yes".to_owned(),
            (false, wrong) if wrong == Wrong::default() => "no (--verify)".to_owned(),
            (false, Wrong { digests, blocks }) => format!("WRONG: {blocks} blocks, {digests} digests"),
        }
    }
}

fn micros(values: &Rounded) -> String {
    format!("{:.0} / {:.0} / {:.0}", values.p50, values.p99, values.p999)
}

fn shown(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}
