//! The bytes of every message in every version; a change here breaks a running cluster.

use std::collections::BTreeMap;

use kvferry_protocol::codec::{self, CodecError};
use kvferry_protocol::manifest::{Fingerprint, KvDtype, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::message::{
    Abort, Ended, EngineBytes, Grant, HashBytes, Message, Missing, Offer, OpaqueKey, Reason, Renew, Spare, Stop,
    Stopped, Verdict, WindowBytes, Working, Wrote,
};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{Digest, Generation, TransferId};

const GOLDEN: [(u16, &str); 3] =
    [(1, include_str!("golden/v1.txt")), (2, include_str!("golden/v2.txt")), (3, include_str!("golden/v3.txt"))];

fn id() -> TransferId {
    TransferId::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677)
}

fn rect(tokens: std::ops::Range<u32>, layers: std::ops::Range<u16>) -> Rect {
    Rect::new(tokens, layers).unwrap()
}

fn manifest() -> Manifest {
    Manifest {
        model: "SmolLM2-135M-Instruct".into(),
        model_fingerprint: Fingerprint([7; 32]),
        kv_dtype: KvDtype::Bf16,
        layers: 30,
        kv_heads: 3,
        head_size_k: 64,
        head_size_v: 64,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Half,
            theta_bits: 100_000.0f64.to_bits(),
            rotary_elements: 64,
            scaling: "none".into(),
        },
        scales: Scales { per: ScalePer::Layer, fingerprint: Fingerprint([9; 32]) },
        hash_scheme: "h1".into(),
        digest_scheme: "d1".into(),
        options: Options::new(BTreeMap::from([("lora".into(), "none".into())])).unwrap(),
    }
}

fn grant() -> Grant {
    Grant {
        transfer: id(),
        generation: Generation::new(3),
        key: OpaqueKey::new(0xfeed_0000_0000_0000_0000_0000_0000_beef),
        ttl_ms: 30_000,
        window: WindowBytes::new(vec![1, 2, 3]).unwrap(),
        missing: Missing::new(vec![rect(0..16, 0..30), rect(1024..70_000, 4..5)]).unwrap(),
    }
}

fn spare() -> Spare {
    let hashes = HashBytes::new((0..64).collect()).unwrap();
    Spare { transfer: id(), first_token: 1504, tokens_per_block: 16, hashes }
}

fn messages() -> Vec<(&'static str, Message)> {
    let (transfer, generation) = (id(), Generation::new(300));
    let ended = |verdict| Message::Ended(Ended { transfer, verdict });
    vec![
        ("manifest", Message::Manifest(Box::new(manifest()))),
        ("offer", Message::Offer(Offer { transfer, held: rect(0..1500, 0..30) })),
        ("grant", Message::Grant(grant())),
        ("renew", Message::Renew(Renew { transfer, ttl_ms: 1000 })),
        ("stop", Message::Stop(Stop { transfer, generation })),
        ("stopped", Message::Stopped(Stopped { transfer, generation })),
        ("abort-cancelled", Message::Abort(Abort { transfer, why: Verdict::Cancelled })),
        ("ended-done", ended(Verdict::Done)),
        ("ended-deadline", ended(Verdict::failed(Reason::Deadline, "after 30 s"))),
        ("ended-stalled", ended(Verdict::failed(Reason::Stalled, ""))),
        ("ended-peer-absent", ended(Verdict::failed(Reason::PeerAbsent, ""))),
        ("ended-peer-restarted", ended(Verdict::failed(Reason::PeerRestarted, ""))),
        ("ended-digest", ended(Verdict::failed(Reason::Digest, ""))),
        ("ended-protocol", ended(Verdict::failed(Reason::Protocol, ""))),
        ("ended-grant", ended(Verdict::failed(Reason::Grant, ""))),
        ("ended-lease-expired", ended(Verdict::failed(Reason::LeaseExpired, ""))),
        ("ended-no-word", ended(Verdict::failed(Reason::NoWord, ""))),
        ("ended-engine", ended(Verdict::failed(Reason::Engine, ""))),
        ("ended-unknown", ended(Verdict::failed(Reason::Unknown, ""))),
        ("ended-limit", ended(Verdict::failed(Reason::Limit, ""))),
        ("ended-cuts", ended(Verdict::failed(Reason::Cuts, ""))),
        ("ended-range", ended(Verdict::failed(Reason::Range, ""))),
        ("engine", Message::Engine(EngineBytes::new(b"any bytes".to_vec()).unwrap())),
        ("working", Message::Working(Working { transfer: id() })),
        ("spare", Message::Spare(spare())),
    ]
}

fn wrote() -> Wrote {
    Wrote {
        transfer: id(),
        generation: Generation::new(u32::MAX),
        sequence: u32::MAX,
        rect: rect(u32::MAX - 1..u32::MAX, u16::MAX - 1..u16::MAX),
        digest: Digest::new(u64::MAX),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn golden(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(' ')).collect()
}

/// The messages that a version has.
fn messages_of(version: u16) -> Vec<(&'static str, Message)> {
    messages().into_iter().filter(|(_, message)| message.since() <= version).collect()
}

#[test]
fn every_version_has_the_bytes_that_it_had() {
    assert_eq!(GOLDEN.map(|(version, _)| version).to_vec(), codec::VERSIONS.collect::<Vec<_>>());
    for (version, text) in GOLDEN {
        let golden = golden(text);
        let of_version = messages_of(version).into_iter();
        let mut found: Vec<(&str, Vec<u8>)> =
            of_version.map(|(name, message)| (name, codec::encode(version, &message).unwrap())).collect();
        found.push(("wrote", codec::encode_wrote(version, &wrote()).unwrap()));
        let changed: Vec<String> = found
            .iter()
            .filter(|(name, bytes)| golden.get(name).copied() != Some(hex(bytes).as_str()))
            .map(|(name, bytes)| format!("{name} {}", hex(bytes)))
            .collect();
        assert!(changed.is_empty(), "these bytes differ from golden/v{version}.txt:\n{}", changed.join("\n"));
        assert_eq!(golden.len(), found.len(), "golden/v{version}.txt has a line that no message is tested against");
    }
}

#[test]
fn every_message_is_read_as_it_was_written() {
    for version in codec::VERSIONS {
        for (name, message) in messages_of(version) {
            assert_eq!(codec::decode(version, &codec::encode(version, &message).unwrap()), Ok(message), "{name}");
        }
        let bytes = codec::encode_wrote(version, &wrote()).unwrap();
        assert_eq!(codec::decode_wrote(version, &bytes), Ok(wrote()));
    }
}

#[test]
fn what_is_said_in_another_version_than_the_sessions_is_refused() {
    for (session, found) in [(1, 2), (2, 1), (2, 3), (3, 2)] {
        for (name, message) in messages_of(found) {
            let bytes = codec::encode(found, &message).unwrap();
            let want = CodecError::OtherVersion { what: "message", found, session };
            assert_eq!(codec::decode(session, &bytes), Err(want), "{name}");
        }
        let bytes = codec::encode_wrote(found, &wrote()).unwrap();
        let want = CodecError::OtherVersion { what: "notification", found, session };
        assert_eq!(codec::decode_wrote(session, &bytes), Err(want));
    }
}

#[test]
fn a_message_that_the_sessions_version_does_not_have_is_neither_written_nor_read() {
    let spare = Message::Spare(spare());
    let want = CodecError::NotInVersion { message: "Spare", since: 2, session: 1 };
    assert_eq!(codec::check(1, &spare), Err(want.clone()));
    assert_eq!(codec::encode(1, &spare), Err(want.clone()));
    // As a peer would write it that does not keep to the session.
    let mut bytes = codec::encode(2, &spare).unwrap();
    bytes[..2].copy_from_slice(&1_u16.to_le_bytes());
    assert_eq!(codec::decode(1, &bytes), Err(want));
}

#[test]
fn a_message_cut_anywhere_or_with_bytes_behind_it_is_refused() {
    for (name, message) in messages() {
        let mut bytes = codec::encode(2, &message).unwrap();
        for length in 0..bytes.len() {
            assert!(codec::decode(2, &bytes[..length]).is_err(), "{name} cut at {length}");
        }
        bytes.push(0);
        assert_eq!(codec::decode(2, &bytes), Err(CodecError::Trailing { what: "message", found: 1 }), "{name}");
    }
}

#[test]
fn bytes_that_are_no_message_have_an_error_that_says_why() {
    let claimed = |kind: u8, tail: &[u8]| [&[1, 0, kind][..], tail].concat();
    for (name, bytes, want) in [
        ("nothing", vec![], "0 bytes hold no version"),
        ("half a version", vec![1], "1 bytes hold no version"),
        ("version 0", vec![0, 0, 7], "version 0 is not among 1 to 3"),
        ("a later version", vec![4, 0, 7], "version 4 is not among 1 to 3"),
        ("an unknown kind", claimed(200, &[]), "expected variant index 0 <= i < 11"),
        ("an engine message that claims 4 GiB", claimed(8, &[252, 0xff, 0xff, 0xff, 0xff]), "LimitExceeded"),
        ("too many bytes", vec![0; codec::MAX_MESSAGE_BYTES + 1], "over the limit of 1048576"),
        ("an empty rectangle", claimed(1, &[1, 5, 5, 0, 1]), "5..5 x layers 0..1 is empty"),
    ] {
        let error = codec::decode(1, &bytes).unwrap_err().to_string();
        assert!(error.contains(want), "{name}: {error}");
    }
    let long = vec![1; codec::MAX_WROTE_BYTES + 1];
    assert!(matches!(codec::decode_wrote(1, &long), Err(CodecError::TooLong { found: 65, limit: 64, .. })));
    assert!(matches!(codec::encode(4, &messages()[1].1), Err(CodecError::Version { found: 4, .. })));
}

#[test]
fn a_field_over_its_own_limit_is_refused_where_it_is_read() {
    let swollen = |from: &Message, name: &str, count: usize, item: &[u8], at: usize| {
        let mut bytes = codec::encode(1, from).unwrap();
        // The count is one byte in `from`; it becomes the three bytes of a 16-bit number, or five of a 32-bit one.
        let marker = match u16::try_from(count) {
            Ok(short) => [&[251][..], &short.to_le_bytes()].concat(),
            Err(_) => [&[252][..], &u32::try_from(count).unwrap().to_le_bytes()].concat(),
        };
        bytes.truncate(at);
        bytes.extend(marker);
        (0..count).for_each(|_| bytes.extend_from_slice(item));
        let error = codec::decode(1, &bytes).unwrap_err().to_string();
        assert!(error.contains("over the limit") || error.contains("LimitExceeded"), "{name}: {error}");
    };
    let empty = Grant { window: WindowBytes::default(), missing: Missing::default(), ..grant() };
    let length = codec::encode(1, &Message::Grant(empty.clone())).unwrap().len();
    let empty = Message::Grant(empty);
    swollen(&empty, "missing", Missing::MAX_RECTS + 1, &[0, 1, 0, 1], length - 1);
    swollen(&empty, "window", WindowBytes::MAX_BYTES + 1, &[0], length - 2);
    let failed = Message::Ended(Ended { transfer: id(), verdict: Verdict::failed(Reason::Engine, "") });
    let length = codec::encode(1, &failed).unwrap().len();
    swollen(&failed, "text", 257, b"x", length - 1);
    let engine = Message::Engine(EngineBytes::default());
    swollen(&engine, "engine message", EngineBytes::MAX_BYTES + 1, &[0], 3);
    let mut options = manifest();
    options.options = Options::default();
    let bare = Message::Manifest(Box::new(options));
    let length = codec::encode(1, &bare).unwrap().len();
    let mut bytes = codec::encode(1, &bare).unwrap();
    bytes.truncate(length - 1);
    bytes.push(33);
    (0..33).for_each(|n: u8| bytes.extend_from_slice(&[1, b'A' + n, 0]));
    let error = codec::decode(1, &bytes).unwrap_err().to_string();
    assert!(error.contains("33 options are over the limit of 32"), "{error}");
}
