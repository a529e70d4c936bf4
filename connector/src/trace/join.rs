//! Joins the timelines of several processes into one file, on one clock.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::file::{TraceError, write};

/// Joins the timelines in `inputs` into `output`, in their order; the earliest span is at time 0.
///
/// Processes of one host share its monotonic clock, and their order in time is exact. A file of another host is moved by the
/// difference of the hosts' wall clocks, so its spans are off by what those clocks are off: keep them synchronised.
///
/// # Errors
/// [`TraceError`].
pub fn merge(inputs: &[PathBuf], output: &Path) -> Result<(), TraceError> {
    let mut files = inputs.iter().map(|path| Timeline::read(path)).collect::<Result<Vec<_>, _>>()?;
    let clocks: Vec<Value> = files.iter().map(|file| file.clock.clone()).collect();
    let first = files.first().map_or(0.0, |file| file.unix_offset_us);
    for file in &mut files {
        let same_clock = clocks[0]["boot"] == file.clock["boot"] && file.clock["boot"] != "";
        let shift = if same_clock { 0.0 } else { file.unix_offset_us - first };
        file.shift_times(shift);
    }
    let earliest = files.iter().filter_map(Timeline::earliest).min_by(f64::total_cmp).unwrap_or(0.0);
    let mut events = Vec::new();
    for (index, mut file) in files.into_iter().enumerate() {
        file.shift_times(-earliest);
        // Two hosts may have used one process id.
        let pid = index + 1;
        for event in &mut file.events {
            event["pid"] = json!(pid);
        }
        events.push(
            json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": { "sort_index": pid } }),
        );
        events.append(&mut file.events);
    }
    let other = json!({ "producer": "kvferry", "clocks": clocks });
    write(output, &json!({ "displayTimeUnit": "ms", "otherData": other, "traceEvents": events }))
}

struct Timeline {
    clock: Value,
    unix_offset_us: f64,
    events: Vec<Value>,
}

impl Timeline {
    fn read(path: &Path) -> Result<Self, TraceError> {
        let bytes = std::fs::read(path).map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
        let malformed = |problem: &str| TraceError::Malformed { path: path.to_owned(), problem: problem.to_owned() };
        let mut trace: Value = serde_json::from_slice(&bytes).map_err(|error| malformed(&error.to_string()))?;
        let clock = trace["otherData"]["clock"].take();
        let unix_offset_us = clock["unix_minus_monotonic_us"].as_f64().ok_or_else(|| malformed("no clock"))?;
        let events = match trace["traceEvents"].take() {
            Value::Array(events) if events.iter().all(Value::is_object) => events,
            _ => return Err(malformed("no traceEvents")),
        };
        Ok(Self { clock, unix_offset_us, events })
    }

    fn earliest(&self) -> Option<f64> {
        self.events.iter().filter_map(|event| event["ts"].as_f64()).min_by(f64::total_cmp)
    }

    fn shift_times(&mut self, by_us: f64) {
        for event in &mut self.events {
            if let Some(ts) = event["ts"].as_f64() {
                event["ts"] = json!(ts + by_us);
            }
        }
    }
}
