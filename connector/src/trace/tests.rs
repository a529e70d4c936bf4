use std::path::PathBuf;
use std::time::Duration;

use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{Generation, TransferId};
use serde_json::{Value, json};

use super::*;
use crate::contract::RequestId;

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvferry-trace-{}-{name}.json", std::process::id()))
}

fn read(path: &PathBuf) -> Value {
    let trace = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    std::fs::remove_file(path).unwrap();
    trace
}

fn spans<'a>(trace: &'a Value, name: &str) -> Vec<&'a Value> {
    trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X" && e["name"] == name).collect()
}

#[test]
fn a_tracer_that_is_off_records_nothing_and_reads_no_clock() {
    let tracer = Tracer::off();
    assert_eq!((tracer.is_on(), tracer.start()), (false, None));
    tracer.record(|| unreachable!("what is not kept is not made"));
    let path = file("off");
    tracer.write(&path, "prefill").unwrap();
    assert!(!path.exists());
}

#[test]
fn spans_that_overlap_get_tracks_of_their_own_and_the_newest_are_kept() {
    let tracer = Tracer::keeping(NonZeroUsize::new(3).unwrap());
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let ship = |from, to| Span { start: at(from), end: at(to), ..Span::since(start, Kind::Ship) };
    for (from, to) in [(0, 1), (0, 10), (5, 15), (10, 20)] {
        tracer.record(|| ship(from, to).transfer(TransferId::new(7)).chunk(Generation::new(1), 2).bytes(64));
    }
    let path = file("tracks");
    tracer.write(&path, "prefill").unwrap();
    let trace = read(&path);
    assert_eq!(trace["otherData"]["dropped_spans"], 1);
    let ships = spans(&trace, "ship");
    let track = |index: usize| ships[index]["tid"].as_u64().unwrap();
    assert_eq!((ships.len(), track(0) == track(2), track(0) == track(1)), (3, true, false));
    assert!((ships[1]["dur"].as_f64().unwrap() - 10_000.0).abs() < 0.5);
    assert_eq!(ships[0]["args"]["bytes"], 64);
}

#[test]
fn files_of_one_host_share_a_clock_and_those_of_two_are_moved_by_their_wall_clocks() {
    let event = |ts: f64| json!({ "ph": "X", "name": "ship", "pid": 5, "tid": 0, "ts": ts, "dur": 1.0 });
    let trace = |boot: &str, offset: f64, ts: f64| {
        let clock = json!({ "name": "CLOCK_MONOTONIC", "boot": boot, "unix_minus_monotonic_us": offset });
        json!({ "otherData": { "clock": clock }, "traceEvents": [event(ts)] })
    };
    for (name, boots, want) in [
        ("one host", ["a", "a"], [0.0, 50.0]),
        ("two hosts", ["a", "b"], [0.0, 60.0]),
        ("unknown hosts", ["", ""], [0.0, 60.0]),
    ] {
        let paths = [file("one"), file("two")];
        std::fs::write(&paths[0], trace(boots[0], 1000.0, 100.0).to_string()).unwrap();
        std::fs::write(&paths[1], trace(boots[1], 1010.0, 150.0).to_string()).unwrap();
        let joined = file("joined");
        merge(&paths, &joined).unwrap();
        paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        let joined = read(&joined);
        let found: Vec<_> = spans(&joined, "ship").iter().map(|e| (e["pid"].clone(), e["ts"].clone())).collect();
        assert_eq!(found, [(json!(1), json!(want[0])), (json!(2), json!(want[1]))], "{name}");
    }
}

#[test]
fn what_is_no_timeline_is_refused_with_its_name() {
    let path = file("wrong");
    for (text, want) in [("[", "EOF"), ("{}", "no clock")] {
        std::fs::write(&path, text).unwrap();
        let error = merge(std::slice::from_ref(&path), &file("never")).unwrap_err().to_string();
        assert!(error.contains(want) && error.contains("wrong.json"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(merge(&[path], &file("never")), Err(TraceError::Read { .. })));
}

#[test]
fn a_span_learns_its_request_from_another_span_of_its_transfer() {
    let tracer = Tracer::keeping(Tracer::DEFAULT_SPANS).labelled("rank 1");
    let (start, transfer) = (Instant::now(), TransferId::new(3));
    tracer.record(|| Span::since(start, Kind::Pack).transfer(transfer).rect(Rect::new(0..16, 2..4).unwrap()));
    tracer.record(|| Span::since(start, Kind::Send).transfer(transfer).request(&RequestId::new("a\"b\n")));
    let path = file("request");
    tracer.write(&path, "prefill").unwrap();
    let trace = read(&path);
    let pack = spans(&trace, "pack")[0];
    assert_eq!(pack["args"]["request"], "a\"b\n");
    assert_eq!((&pack["args"]["tokens"], &pack["args"]["layers"]), (&json!("0..16"), &json!("2..4")));
    let names = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["name"] == "thread_name");
    assert!(names.into_iter().any(|e| e["args"]["name"] == "rank 1 pack"));
}
