//! One process's timeline as a file: Chrome's trace event format, JSON object form.
//!
//! Source: "Trace Event Format", <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>. Spans are complete
//! events (`X`) with times in microseconds; a write's two ends are joined by a flow (`s` at its ship, `f` at its land), whose id is
//! made of the transfer, the generation and the sequence and so is the same in both files. A track holds spans that do not
//! overlap, so each kind has as many tracks as it needs.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvferry_protocol::TransferId;
use serde_json::{Map, Value, json};

use super::{Kind, Recorded, Span, Timeline, Tracer};
use crate::contract::RequestId;

/// Why a timeline was not written or joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A file cannot be written.
    #[error("the timeline cannot be written to {}; name a file in a folder that exists and may be written", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// A file cannot be read.
    #[error("the timeline {} cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// A file is no timeline of kvferry.
    #[error("{} is no timeline of kvferry: {problem}", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl Tracer {
    /// Writes what is recorded, with `process` as the process's name. Does nothing if nothing is recorded.
    ///
    /// # Errors
    /// [`TraceError::Write`].
    pub fn write(&self, path: &Path, process: &str) -> Result<(), TraceError> {
        let Some(timeline) = &self.timeline else { return Ok(()) };
        write(path, &timeline.to_json(process))
    }
}

/// Writes a file in one go.
pub(super) fn write(path: &Path, trace: &Value) -> Result<(), TraceError> {
    let failed = |source| TraceError::Write { path: path.to_owned(), source };
    std::fs::write(path, serde_json::to_vec(trace).map_err(|error| failed(error.into()))?).map_err(failed)
}

impl Timeline {
    fn to_json(&self, process: &str) -> Value {
        let recorded = self.recorded.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let pid = std::process::id();
        let mut events = vec![
            json!({ "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": { "name": process } }),
            json!({ "ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": { "labels": format!("pid {pid}") } }),
        ];
        let requests = requests(&recorded);
        let tracks = Tracks::of(&recorded);
        for (tid, name) in tracks.names.iter().enumerate() {
            events.push(json!({ "ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": { "name": name } }));
            events.push(
                json!({ "ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": { "sort_index": tid } }),
            );
        }
        for ((_, span), &tid) in recorded.spans.iter().zip(&tracks.of_span) {
            self.span_events(span, pid, tid, &requests, &mut events);
        }
        let clock = json!({
            "name": "CLOCK_MONOTONIC", "boot": boot_id(),
            "unix_minus_monotonic_us": microseconds(self.clock.unix_ns - self.clock.monotonic_ns),
        });
        let other = json!({ "producer": "kvferry", "clock": clock, "dropped_spans": recorded.dropped });
        json!({ "displayTimeUnit": "ms", "otherData": other, "traceEvents": events })
    }

    fn span_events(
        &self,
        span: &Span,
        pid: u32,
        tid: usize,
        requests: &BTreeMap<TransferId, RequestId>,
        events: &mut Vec<Value>,
    ) {
        let (start, end) = (self.clock.monotonic_ns(span.start), self.clock.monotonic_ns(span.end));
        let (name, ts) = (span.kind.word(), microseconds(start));
        // A span without a width is not drawn.
        let dur = microseconds((end - start).max(LEAST_NS));
        let args = args(span, requests);
        events.push(
            json!({ "ph": "X", "name": name, "cat": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args }),
        );
        let (Some(transfer), Some((generation, sequence))) = (span.transfer, span.chunk) else { return };
        let id = format!("{transfer}/{generation}/{sequence}");
        let flow =
            |ph: &str| json!({ "ph": ph, "name": "write", "cat": "write", "id": id, "pid": pid, "tid": tid, "ts": ts });
        match span.kind {
            Kind::Ship => events.push(flow("s")),
            Kind::Land => {
                let mut end = flow("f");
                end["bp"] = json!("e"); // Bind to the slice that encloses it, not to the next one.
                events.push(end);
            }
            _ => {}
        }
    }
}

fn args(span: &Span, requests: &BTreeMap<TransferId, RequestId>) -> Map<String, Value> {
    let mut args = Map::new();
    let request = span.request.as_ref().or_else(|| requests.get(span.transfer.as_ref()?));
    if let Some(request) = request {
        args.insert("request".into(), request.as_str().into());
    }
    if let Some(transfer) = span.transfer {
        args.insert("transfer".into(), transfer.to_string().into());
    }
    if let Some((generation, sequence)) = span.chunk {
        args.insert("generation".into(), generation.get().into());
        args.insert("sequence".into(), sequence.into());
    }
    if let Some(rect) = span.rect {
        args.insert("tokens".into(), format!("{:?}", rect.tokens()).into());
        args.insert("layers".into(), format!("{:?}", rect.layers()).into());
    }
    if span.bytes > 0 {
        args.insert("bytes".into(), span.bytes.into());
    }
    args
}

/// Which request each transfer is of, from the spans that know both.
fn requests(recorded: &Recorded) -> BTreeMap<TransferId, RequestId> {
    recorded.spans.iter().filter_map(|(_, span)| Some((span.transfer?, span.request.clone()?))).collect()
}

/// Where each span is drawn.
struct Tracks {
    names: Vec<String>,
    /// The track of each recorded span, in their order.
    of_span: Vec<usize>,
}

impl Tracks {
    /// Gives each kind of each worker the fewest tracks on which its spans do not overlap.
    fn of(recorded: &Recorded) -> Self {
        let mut groups: BTreeMap<(Option<Arc<str>>, Kind), Vec<usize>> = BTreeMap::new();
        for (index, (label, span)) in recorded.spans.iter().enumerate() {
            groups.entry((label.clone(), span.kind)).or_default().push(index);
        }
        let mut tracks = Self { names: Vec::new(), of_span: vec![0; recorded.spans.len()] };
        for ((label, kind), mut spans) in groups {
            spans.sort_by_key(|&index| recorded.spans[index].1.start);
            let (first, mut ends) = (tracks.names.len(), Vec::new());
            for index in spans {
                let span = &recorded.spans[index].1;
                let free = ends.iter().position(|&end| end <= span.start).unwrap_or(ends.len());
                if free == ends.len() {
                    ends.push(span.end);
                }
                ends[free] = span.end;
                tracks.of_span[index] = first + free;
            }
            let label = label.map_or_else(String::new, |label| format!("{label} "));
            tracks.names.extend((1..=ends.len()).map(|number| match number {
                1 => format!("{label}{}", kind.word()),
                _ => format!("{label}{} ({number})", kind.word()),
            }));
        }
        tracks
    }
}

/// Tells hosts, and starts of a host, apart: the monotonic clocks of two files with one boot id are one clock.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}

fn microseconds(ns: i128) -> f64 {
    ns as f64 / 1e3
}

/// The least width of a span, in nanoseconds.
const LEAST_NS: i128 = 500;
