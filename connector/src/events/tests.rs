use super::*;

fn batch(events: Vec<KvEvent>, dp_rank: Option<u32>) -> EventBatch {
    EventBatch { at: Duration::from_secs(1), events, dp_rank }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unsigned(id: u64) -> BlockName {
    EventId::Unsigned(id).into()
}

/// Two blocks of a prompt, of which hashes and tokens are those of the vectors of the block hashes.
fn two_blocks() -> Stored {
    Stored {
        blocks: vec![unsigned(8_866_452_693_264_111_234), unsigned(807_986_237_951_177_663)],
        tokens: (1..33).collect(),
        tokens_per_block: 16,
        medium: Some(Medium::Device),
        ..Stored::default()
    }
}

fn with_everything() -> Stored {
    Stored {
        blocks: vec![BlockName::Digest((0..32).collect())],
        parent: Some(unsigned(8_866_452_693_264_111_234)),
        tokens: vec![1, 300, 70_000],
        tokens_per_block: 3,
        lora: Some(LoraName { id: Some(7), name: Some("my-lora".into()) }),
        medium: Some(Medium::Host),
        extra_keys: vec![
            vec![
                ExtraKey::Text("my-lora".into()),
                ExtraKey::Media("mmhash".into(), 3),
                ExtraKey::Text("tenant-a".into()),
                ExtraKey::Digest(vec![1, 2]),
            ],
            vec![],
        ],
        group: Some(GroupOf { index: 1, kind: Some("sliding_window".into()), window: Some(1024) }),
        locality: Some(Locality::Local),
        salt: None,
    }
}

/// Bytes that vLLM 0.32.0's own encoder makes of the same events.
#[test]
fn batches_have_the_bytes_of_vllms_own() {
    let removed = vec![
        KvEvent::Removed(Removed {
            blocks: vec![unsigned(8_866_452_693_264_111_234)],
            medium: Some(Medium::Device),
            ..Removed::default()
        }),
        KvEvent::Removed(Removed {
            blocks: vec![unsigned(8_866_452_693_264_111_234)],
            medium: None,
            group: Some(2),
            locality: Some(Locality::Remote),
        }),
        KvEvent::Cleared,
    ];
    for (name, events, dp_rank, want) in [
        ("two blocks", vec![KvEvent::Stored(two_blocks())], Some(0), STORED),
        ("all fields", vec![KvEvent::Stored(with_everything())], Some(3), STORED_WITH_EVERYTHING),
        ("removed and cleared", removed, None, REMOVED),
    ] {
        assert_eq!(hex(&Dialect::Vllm.encode(&batch(events, dp_rank))), want.replace(['\n', ' '], ""), "{name}");
    }
}

#[test]
fn the_older_form_is_arrays_with_every_field() {
    let events = vec![
        KvEvent::Stored(Stored {
            blocks: vec![unsigned(5)],
            tokens: vec![1],
            tokens_per_block: 1,
            ..Stored::default()
        }),
        KvEvent::Removed(Removed { blocks: vec![unsigned(5)], medium: Some(Medium::Disk), ..Removed::default() }),
        KvEvent::Cleared,
    ];
    // [1.0, [["BlockStored", [5], nil, [1], 1, nil x 7], ["BlockRemoved", [5], "STORAGE", nil], ["AllBlocksCleared"]], nil]
    let stored = "9c ab426c6f636b53746f726564 9105 c0 9101 01 c0 c0 c0 c0 c0 c0 c0";
    let removed = "94 ac426c6f636b52656d6f766564 9105 a753544f52414745 c0";
    let want = format!("93 cb3ff0000000000000 93 {stored} {removed} 91 b0416c6c426c6f636b73436c6561726564 c0");
    assert_eq!(hex(&Dialect::VllmArrays.encode(&batch(events, None))), want.replace(' ', ""));
}

#[test]
fn sglang_signs_its_names_and_tells_a_salt_beside_them() {
    let stored = |salt: Option<&str>| {
        KvEvent::Stored(Stored {
            blocks: vec![EventId::Signed(-2).into()],
            tokens: vec![1],
            tokens_per_block: 1,
            medium: Some(Medium::Host),
            salt: salt.map(str::to_owned),
            ..Stored::default()
        })
    };
    let head = "93 cb3ff0000000000000 91";
    let pinned = "aa4350555f50494e4e4544";
    let salt = "aa63616368655f73616c74 a173"; // "cache_salt", "s"
    let unsalted = format!("{head} 97 ab426c6f636b53746f726564 91fe c0 9101 01 c0 {pinned} c0");
    let salted = format!("{head} 98 ab426c6f636b53746f726564 91fe c0 9101 01 c0 {pinned} 81 {salt} c0");
    let map = format!(
        "{head} 88 a474797065 ab426c6f636b53746f726564 ac626c6f636b5f686173686573 91fe b1706172656e745f626c6f636b5f68617368 c0 \
         a9746f6b656e5f696473 9101 aa626c6f636b5f73697a65 01 a76c6f72615f6964 c0 a66d656469756d {pinned} {salt} c0"
    );
    for (dialect, event, want) in [
        (Dialect::SglangArrays, stored(None), unsalted),
        (Dialect::SglangArrays, stored(Some("s")), salted),
        (Dialect::Sglang, stored(Some("s")), map),
    ] {
        assert_eq!(hex(&dialect.encode(&batch(vec![event], None))), want.replace(' ', ""), "{dialect:?}");
    }
}

#[test]
fn who_missed_batches_gets_those_that_are_kept() {
    let mut log = EventLog::new(Dialect::Vllm, 3, usize::MAX);
    let sequences = |log: &EventLog, from| log.since(from).map(|batch| batch.sequence).collect::<Vec<_>>();
    assert!(sequences(&log, 0).is_empty());
    let made: Vec<_> = (0..5).map(|_| log.append(&batch(vec![KvEvent::Cleared], None))).collect();
    assert_eq!(log.next(), 5);
    for (from, want) in [(0, vec![2, 3, 4]), (2, vec![2, 3, 4]), (4, vec![4]), (5, vec![]), (u64::MAX, vec![])] {
        assert_eq!(sequences(&log, from), want, "{from}");
    }
    assert!(log.since(4).eq(&made[4..]));
}

#[test]
fn what_is_kept_is_bounded_in_bytes_too() {
    let one = Dialect::Vllm.encode(&batch(vec![KvEvent::Cleared], None)).len();
    let mut log = EventLog::new(Dialect::Vllm, 100, 2 * one);
    (0..5).for_each(|_| drop(log.append(&batch(vec![KvEvent::Cleared], None))));
    assert_eq!(log.since(0).count(), 2);
    let big = log.append(&batch(vec![KvEvent::Cleared; 100], None));
    assert_eq!((big.sequence, log.since(0).count()), (5, 0), "one that is too big alone is published and not kept");
}

const STORED: &str = "93cb3ff00000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf7b0bf7bf7fd01682cf0b368b
    33d87bf3bfb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00200102030405060708090a0b0c0d0e0f101112131415161718191a1b
    1c1d1e1f20aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000";

const STORED_WITH_EVERYTHING: &str = "93cb3ff0000000000000918da474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420000102
    030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fb1706172656e745f626c6f636b5f68617368cf7b0bf7bf7fd01682a9746f6b656e5f69
    64739301cd012cce00011170aa626c6f636b5f73697a6503a76c6f72615f696407a66d656469756da3435055a96c6f72615f6e616d65a76d792d6c6f7261aa65
    787472615f6b6579739294a76d792d6c6f726192a66d6d6861736803a874656e616e742d61c4020102c0a967726f75705f69647801b26b765f63616368655f73
    7065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cd0400a86c6f63616c697479
    a54c4f43414c03";

const REMOVED: &str = "93cb3ff00000000000009383a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf7b0bf7bf7fd01682a66d
    656469756da347505585a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf7b0bf7bf7fd01682a66d656469756dc0a967726f75
    705f69647802a86c6f63616c697479a652454d4f544581a474797065b0416c6c426c6f636b73436c6561726564c0";
