//! What the connector counts: cheap to update, typed to read, and in Prometheus' text format.
//!
//! [`Metrics`] is shared by `Arc`; each update is one relaxed atomic operation. [`Metrics::snapshot`] copies all into a
//! [`ConnectorMetrics`]; values that are updated meanwhile may be from a moment later than others. [`Metrics::prometheus`] writes a
//! page for a scraper. All metrics stand in one table (`catalogue.rs`), from which both structs, the exporter and the
//! documentation ([`table`]) come.
//!
//! ```
//! use kvferry::metrics::{Metrics, Side};
//!
//! let metrics = Metrics::new();
//! metrics.transfers_started_total.at(Side::Receive).add(1);
//! assert_eq!(metrics.snapshot().transfers_started_total.get(Side::Receive), &1);
//! let page = metrics.prometheus(&[("engine", "decode-0")]);
//! assert!(page.contains("kvferry_transfers_started_total{engine=\"decode-0\",side=\"receive\"} 1\n"));
//! ```

mod catalogue;
mod instrument;
mod label;
mod prometheus;

pub use catalogue::{ConnectorMetrics, DEFINITIONS, Metrics};
pub use instrument::{ByLabel, Counter, Family, Gauge, Histogram, HistogramValues, Kind};
pub use label::{DropReason, FailureReason, Labels, Path, RefusalReason, ReturnRefusal, Side, TierDrop};
pub use prometheus::{CONTENT_TYPE, Definition, table};

#[cfg(test)]
mod tests;
