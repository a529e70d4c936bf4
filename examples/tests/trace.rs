//! The timeline that `pair --trace` writes: both processes on one clock, and for each write of a hand-over its life in order.

use std::collections::BTreeMap;

use clap::Parser;
use kvferry_examples::cli::PairOptions;
use kvferry_examples::pair;
use serde_json::Value;

/// One write: transfer, generation, sequence.
type Chunk = (String, u64, u64);

async fn timeline(name: &str, args: &str) -> Value {
    let path = std::env::temp_dir().join(format!("kvferry-pair-{}-{name}.json", std::process::id()));
    let line = format!("pair {args} --trace {}", path.display());
    let options = PairOptions::try_parse_from(line.split_whitespace()).unwrap();
    let report = pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap();
    assert!(report.all_identical(), "{report}");
    let trace = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    trace
}

fn chunk(event: &Value) -> Option<Chunk> {
    let args = &event["args"];
    Some((args["transfer"].as_str()?.to_owned(), args["generation"].as_u64()?, args["sequence"].as_u64()?))
}

/// The spans of one kind of one process, by the write that they are about: when each began and ended, in microseconds.
fn by_chunk(events: &[Value], pid: u64, kind: &str) -> BTreeMap<Chunk, (f64, f64)> {
    let of_kind = events.iter().filter(|e| e["ph"] == "X" && e["name"] == kind && e["pid"] == pid);
    of_kind
        .map(|e| {
            let (start, dur) = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
            (chunk(e).expect("a span of a write names it"), (start, start + dur))
        })
        .collect()
}

#[tokio::test]
async fn each_write_is_packed_then_shipped_then_lands_then_is_verified_on_one_clock() {
    for (name, args) in [
        ("packed", "--max-tokens 4 --chunk 32 --prefill-layout LPBNHC --decode-layout BHLPNC"),
        ("direct", "--max-tokens 4 --chunk 32 --concurrency 4"),
    ] {
        let trace = timeline(name, args).await;
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<_> =
            events.iter().filter(|e| e["name"] == "process_name").map(|e| (&e["pid"], &e["args"]["name"])).collect();
        assert_eq!(names, [(&Value::from(1), &Value::from("prefill")), (&Value::from(2), &Value::from("decode"))]);
        let [pack, ship] = ["pack", "ship"].map(|kind| by_chunk(events, 1, kind));
        let [land, verify] = ["land", "verify"].map(|kind| by_chunk(events, 2, kind));
        assert!(ship.len() >= 5, "{name}: {} writes", ship.len());
        for other in [&pack, &land, &verify] {
            assert!(other.keys().eq(ship.keys()), "{name}: not every write has all its spans");
        }
        for (chunk, &(shipped, acknowledged)) in &ship {
            let (packed, landed, verified) = (pack[chunk].1, land[chunk].0, verify[chunk].0);
            // What is sent as it lies is digested on its way out.
            let sent = if name == "direct" { acknowledged } else { shipped };
            assert!(packed <= sent, "{name} {chunk:?}: shipped at {sent}, before it was packed at {packed}");
            assert!(shipped <= landed, "{name} {chunk:?}: landed at {landed}, before it was shipped at {shipped}");
            assert!(landed <= verified, "{name} {chunk:?}: verified at {verified}, before it landed at {landed}");
            assert!(acknowledged >= shipped);
        }
        let flow = |ph: &str| events.iter().filter(|e| e["ph"] == ph).map(|e| e["id"].as_str().unwrap()).collect();
        let (starts, ends): (std::collections::BTreeSet<&str>, _) = (flow("s"), flow("f"));
        assert_eq!((&starts, starts.len()), (&ends, ship.len()), "{name}: an arrow from each ship to its land");
        check_steps_and_tracks(events, name);
    }
}

/// Prefill's groups of layers lie inside its steps, hand-overs have both of their sides, and spans of a track do not overlap.
fn check_steps_and_tracks(events: &[Value], name: &str) {
    let spans = || events.iter().filter(|e| e["ph"] == "X");
    let time = |e: &Value| (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap());
    let steps: Vec<_> = spans().filter(|e| e["name"] == "step" && e["pid"] == 1).map(time).collect();
    let computed: Vec<_> = spans().filter(|e| e["name"] == "compute").collect();
    assert!(!steps.is_empty() && computed.len() >= 5, "{name}: {} steps, {} groups", steps.len(), computed.len());
    for group in computed {
        let (start, end) = time(group);
        // A nanosecond's place is the last that a file holds.
        let inside = steps.iter().any(|step| step.0 <= start + 0.002 && end <= step.1 + 0.002);
        assert!(inside && group["args"]["layers"].is_string(), "{name}: {group} is in no step");
    }
    let transfers = |kind: &str| {
        let sides = spans().filter(|e| e["name"] == kind).map(|e| e["args"]["transfer"].as_str().unwrap());
        sides.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!((transfers("send"), transfers("send").len()), (transfers("load"), 5), "{name}");
    let mut tracks: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for span in spans() {
        tracks.entry((span["pid"].as_u64().unwrap(), span["tid"].as_u64().unwrap())).or_default().push(time(span));
    }
    for (track, mut spans) in tracks {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Half a microsecond: the width that a span without one is given.
        let overlap = spans.windows(2).find(|pair| pair[1].0 + 0.502 < pair[0].1);
        assert_eq!(overlap, None, "{name}: track {track:?}");
    }
}
