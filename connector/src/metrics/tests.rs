//! The page, read back by a parser that follows the format's description and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::pool::BlockPool;

#[derive(Debug, PartialEq)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

#[derive(Debug, Default)]
struct Parsed {
    help: BTreeMap<String, String>,
    kinds: BTreeMap<String, String>,
    samples: Vec<Sample>,
}

impl Parsed {
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let same = |sample: &&Sample| {
            let own = sample.labels.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            sample.name == name && own.eq(labels.iter().copied())
        };
        let found: Vec<_> = self.samples.iter().filter(same).collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}");
        found[0].value
    }
}

fn is_name(text: &str) -> bool {
    let legal = |(at, c): (usize, char)| c.is_ascii_alphabetic() || c == '_' || (at > 0 && c.is_ascii_digit());
    !text.is_empty() && text.chars().enumerate().all(legal)
}

/// Reads `{a="b",c="d"}` and returns what follows it.
fn parse_labels(text: &str) -> (Vec<(String, String)>, &str) {
    let (mut labels, mut rest) = (vec![], text);
    loop {
        let (name, after) = rest.split_once("=\"").expect("a label has a quoted value");
        let (mut value, mut end) = (String::new(), None);
        let mut chars = after.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    end = Some(at);
                    break;
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some('n') => value.push('\n'),
                    Some(c @ ('\\' | '"')) => value.push(c),
                    other => panic!("no such escape: {other:?}"),
                },
                c => value.push(c),
            }
        }
        assert!(is_name(name), "{name:?} is a label's name");
        labels.push((name.to_owned(), value));
        rest = &after[end.expect("the value ends") + 1..];
        match rest.as_bytes()[0] {
            b',' => rest = &rest[1..],
            b'}' => return (labels, &rest[1..]),
            other => panic!("after a label: {other}"),
        }
    }
}

fn parse(page: &str) -> Parsed {
    assert!(page.ends_with('\n'), "the last line ends");
    let mut parsed = Parsed::default();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(parsed.help.insert(name.into(), help.into()).is_none(), "one HELP for {name}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(parsed.kinds.insert(name.into(), kind.into()).is_none(), "one TYPE for {name}");
            assert!(!parsed.samples.iter().any(|sample| sample.name.starts_with(name)), "TYPE of {name} goes first");
        } else {
            let end = line.find(['{', ' ']).unwrap();
            let (name, rest) = line.split_at(end);
            assert!(is_name(name), "{name:?} is a metric's name");
            let (labels, rest) = rest.strip_prefix('{').map_or((vec![], rest), parse_labels);
            let value = match rest.strip_prefix(' ').unwrap() {
                "+Inf" => f64::INFINITY,
                number => number.parse().unwrap(),
            };
            parsed.samples.push(Sample { name: name.into(), labels, value });
        }
    }
    parsed
}

#[test]
fn every_metric_has_help_type_and_samples_of_its_kind() {
    let page = parse(&Metrics::new().prometheus(&[]));
    assert_eq!(page.kinds.len(), DEFINITIONS.len());
    for definition in DEFINITIONS {
        assert_eq!(page.kinds[definition.name], definition.kind.word());
        assert_eq!(page.help[definition.name], definition.meaning);
        let of_another = |name: &str| name != definition.name && DEFINITIONS.iter().any(|other| other.name == name);
        let own = page.samples.iter().filter(|sample| !of_another(&sample.name));
        let suffixes: BTreeSet<&str> = own.filter_map(|sample| sample.name.strip_prefix(definition.name)).collect();
        let want: &[&str] = match definition.kind {
            Kind::Histogram => &["_bucket", "_count", "_sum"],
            Kind::Counter | Kind::Gauge => &[""],
        };
        assert_eq!(Vec::from_iter(suffixes), want, "{}", definition.name);
        assert_eq!(definition.name.ends_with("_total"), definition.kind == Kind::Counter, "{}", definition.name);
    }
    let distinct: BTreeSet<String> =
        page.samples.iter().map(|sample| format!("{} {:?}", sample.name, sample.labels)).collect();
    assert_eq!(distinct.len(), page.samples.len(), "no sample comes twice");
}

#[test]
fn values_reach_the_snapshot_and_the_page_under_their_own_labels() {
    let metrics = Metrics::new();
    metrics.transfers_started_total.at(Side::Send).add(2);
    metrics.transfers_started_total.at(Side::Receive).add(3);
    for (at, side) in [Side::Send, Side::Receive].into_iter().enumerate() {
        for (nth, reason) in FailureReason::ALL.iter().enumerate() {
            metrics.transfers_failed_total.at((side, *reason)).add((100 * at + nth) as u64);
        }
    }
    metrics.leases_live.add(5);
    metrics.leases_live.sub(2);
    metrics.grants_live.sub(1);
    metrics.slab_pool_limit_bytes.set(u64::MAX);

    let snapshot = metrics.snapshot();
    assert_eq!((snapshot.transfers_started_total.total(), snapshot.leases_live, snapshot.grants_live), (5, 3, 0));
    let page = parse(&snapshot.prometheus(&[]));
    assert_eq!(page.value("kvferry_transfers_started_total", &[("side", "receive")]), 3.0);
    for (at, side) in [Side::Send, Side::Receive].into_iter().enumerate() {
        for (nth, reason) in FailureReason::ALL.iter().enumerate() {
            let want = 100 * at + nth;
            assert_eq!(*snapshot.transfers_failed_total.get((side, *reason)), want as u64);
            let labels = [("side", side.word()), ("reason", reason.word())];
            assert_eq!(page.value("kvferry_transfers_failed_total", &labels), want as f64);
        }
    }
    assert!(metrics.prometheus(&[]).contains("\nkvferry_slab_pool_limit_bytes 18446744073709551615\n"));
}

#[test]
fn a_histogram_is_cumulative_and_ends_with_all_observations() {
    let metrics = Metrics::new();
    let micros = [0, 100, 101, 2_500, 2_501, 99_999_999, 100_000_000, 100_000_001, 7_000_000_000];
    for duration in micros {
        metrics.exposed_wait_seconds.observe(Duration::from_micros(duration));
    }
    let page = parse(&metrics.prometheus(&[]));
    let bucket = |bound: &str| page.value("kvferry_exposed_wait_seconds_bucket", &[("le", bound)]);
    let got = ["0.0001", "0.00025", "0.0025", "0.005", "50", "100", "+Inf"].map(bucket);
    assert_eq!(got, [2.0, 3.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
    let buckets = page.samples.iter().filter(|sample| sample.name == "kvferry_exposed_wait_seconds_bucket");
    assert!(buckets.map(|sample| sample.value).is_sorted());
    assert_eq!(page.value("kvferry_exposed_wait_seconds_count", &[]), 9.0);
    let want = micros.iter().sum::<u64>() as f64 / 1e6;
    assert!((page.value("kvferry_exposed_wait_seconds_sum", &[]) - want).abs() < 1e-6);
    assert!(HistogramValues::BOUNDS_SECONDS.is_sorted());
    assert_eq!(metrics.snapshot().exposed_wait_seconds.count(), 9);
}

#[test]
fn labels_of_any_text_survive_the_page() {
    let odd = "a\\b \"c\"\nd,e}f=g ä\\n";
    let page = parse(&Metrics::new().prometheus(&[("engine", odd), ("tp_rank", "0")]));
    let labels = [("engine", odd), ("tp_rank", "0"), ("side", "send")];
    assert_eq!(page.value("kvferry_transfers_live", &labels), 0.0);
    let labels = [("engine", odd), ("tp_rank", "0"), ("side", "send"), ("le", "+Inf")];
    assert_eq!(page.value("kvferry_transfer_seconds_bucket", &labels), 0.0);
}

#[test]
fn what_several_threads_count_is_all_there() {
    let metrics = Arc::new(Metrics::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..1000 {
                    metrics.chunks_total.at(Side::Send).add(1);
                    metrics.transfer_seconds.at(Side::Send).observe(Duration::from_millis(1));
                    metrics.grants_live.add(2);
                    metrics.grants_live.sub(2);
                }
            });
        }
    });
    let snapshot = metrics.snapshot();
    assert_eq!((*snapshot.chunks_total.get(Side::Send), snapshot.grants_live), (4000, 0));
    let seconds = snapshot.transfer_seconds.get(Side::Send);
    assert_eq!(seconds.count(), 4000);
    assert!((seconds.sum_seconds - 4.0).abs() < 1e-9);
}

#[test]
fn a_pool_is_recorded_as_it_is() {
    let metrics = Metrics::new();
    let mut pool = BlockPool::new(8).unwrap();
    let table = pool.open(&[], 3).unwrap();
    let _lease = pool.lease(&table, 0..2).unwrap();
    metrics.record_pool(&pool.counts());
    let now = metrics.snapshot();
    let blocks = (now.pool_blocks, now.pool_blocks_free, now.pool_blocks_cached, now.pool_blocks_leased);
    assert_eq!(blocks, (8, 5, 0, 2));
}

#[test]
fn the_table_has_a_row_for_each_metric() {
    assert_eq!(table().lines().count(), DEFINITIONS.len() + 2);
    assert!(table().contains("| `kvferry_leases_live` | gauge | Leases by which blocks"));
}
