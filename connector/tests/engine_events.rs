//! KV events over sockets: to a subscriber of this process, and to the Python that routers are made of.
//!
//! `integration-tests/hashes/environment.sh` makes the Python and says how to run what is ignored.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvferry::events::{EventBatch, EventPublisher, EventsConfig, KvEvent, Removed, Stored};
use kvferry::pool::EventId;
use serde_json::{Value, json};

const TOPIC: &str = "kv@pod@model";

fn publisher() -> EventPublisher {
    let any = "127.0.0.1:0".parse().unwrap();
    let config = EventsConfig {
        listen: any,
        replay_listen: Some(any),
        topic: TOPIC.into(),
        kept_batches: 3,
        ..EventsConfig::default()
    };
    EventPublisher::start(config).unwrap()
}

fn removed(id: u64) -> EventBatch {
    let removed = Removed { blocks: vec![EventId::Unsigned(id).into()], ..Removed::default() };
    EventBatch { at: Duration::from_millis(1500), events: vec![KvEvent::Removed(removed)], dp_rank: Some(2) }
}

fn removed_as_read(id: u64) -> Value {
    json!([1.5, [{ "type": "BlockRemoved", "block_hashes": [id], "medium": null }], 2])
}

#[test]
fn an_address_that_is_taken_is_named_with_its_key() {
    let first = publisher();
    for (key, config) in [
        ("listen", EventsConfig { listen: first.local_address(), ..EventsConfig::default() }),
        (
            "replay_listen",
            EventsConfig {
                listen: "127.0.0.1:0".parse().unwrap(),
                replay_listen: first.replay_address(),
                ..EventsConfig::default()
            },
        ),
        ("kept_batches", EventsConfig { kept_batches: 0, ..EventsConfig::default() }),
    ] {
        let error = EventPublisher::start(config).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

#[test]
fn a_publisher_that_nobody_hears_waits_for_nobody_and_ends() {
    let publisher = publisher();
    (0..1000).for_each(|id| publisher.publish(&removed(id)));
    drop(publisher);
}

struct Subscriber {
    child: Child,
    heard: BufReader<std::process::ChildStdout>,
}

impl Subscriber {
    fn of(publisher: &EventPublisher) -> Self {
        let python = std::env::var("KVFERRY_PYTHON").expect("KVFERRY_PYTHON names a Python with pyzmq and msgspec");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine_events/subscriber.py");
        let addresses = [publisher.local_address(), publisher.replay_address().unwrap()].map(|at| at.to_string());
        let mut command = Command::new(python);
        command.arg(script).args(addresses).arg(TOPIC);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let heard = BufReader::new(child.stdout.take().unwrap());
        Self { child, heard }
    }

    fn ask(&mut self, question: &str) -> Value {
        writeln!(self.child.stdin.as_mut().unwrap(), "{question}").unwrap();
        let mut line = String::new();
        self.heard.read_line(&mut line).unwrap();
        serde_json::from_str(&line).expect("the subscriber answers")
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs a Python with pyzmq and msgspec"]
fn a_subscriber_reads_batches_in_order_and_gets_what_it_missed() {
    let publisher = publisher();
    let mut subscriber = Subscriber::of(&publisher);
    assert_eq!(subscriber.ask("missed 0"), json!([[-1, null]]), "nothing was published yet");
    // Who subscribes is heard of late: batches go out until one arrives, and some more.
    let (first, published) = std::thread::scope(|scope| {
        let heard = scope.spawn(|| subscriber.ask("hear"));
        let mut ids = 0..;
        while !heard.is_finished() {
            publisher.publish(&removed(ids.next().unwrap()));
            std::thread::yield_now();
        }
        ids.by_ref().take(3).for_each(|id| publisher.publish(&removed(id)));
        (heard.join().unwrap(), ids.next().unwrap())
    });
    let number = first[0].as_u64().unwrap();
    assert_eq!(first, json!([number, removed_as_read(number)]));
    // The last three are kept, whoever asks for more.
    let mut kept: Vec<Value> = (published - 3..published).map(|id| json!([id, removed_as_read(id)])).collect();
    kept.push(json!([-1, null]));
    assert_eq!(subscriber.ask("missed 0"), json!(kept));
    assert_eq!(subscriber.ask(&format!("missed {}", published - 1)), json!(kept[2..]));
    let stored = Stored {
        blocks: vec![EventId::Unsigned(u64::MAX).into()],
        tokens: vec![1, 70_000],
        tokens_per_block: 2,
        ..Stored::default()
    };
    publisher.publish(&EventBatch { at: Duration::ZERO, events: vec![KvEvent::Stored(stored)], dp_rank: None });
    let last = loop {
        let heard = subscriber.ask("hear");
        if heard[1][1][0]["type"] == "BlockStored" {
            break heard;
        }
    };
    assert_eq!(
        (&last[1][1][0]["block_hashes"], &last[1][1][0]["token_ids"]),
        (&json!([u64::MAX]), &json!([1, 70_000]))
    );
}
