//! Replays the fuzz corpora, and the same with bytes changed and cut.

mod common;

use std::fs;
use std::path::PathBuf;

use common::head;
use kvferry_protocol::pages::{Extent, Loop};
use kvferry_protocol::wire::{
    BOARD, Challenge, FrameHeader, FrameKind, Hello, LaneKind, LentRun, Loan, Reach, Refusal, Share, VERSIONS,
    encode_loan, encode_table,
};
use kvferry_transport::testing::decoders::DECODERS;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)
}

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let files = fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    files.sort();
    files
}

#[test]
fn no_decoder_panics_on_its_corpus_or_near_it() {
    for &(name, decode) in DECODERS {
        let files = corpus(name);
        assert!(files.len() >= 3, "{name}: the corpus is missing");
        for (path, bytes) in files {
            println!("{}", path.display());
            decode(&bytes);
            near(decode, &bytes);
        }
    }
}

/// Every byte changed in a few ways, and every length.
fn near(decode: fn(&[u8]), bytes: &[u8]) {
    let mut changed = bytes.to_vec();
    for at in 0..bytes.len() {
        for mask in [1, 0x80, 0xff] {
            changed[at] ^= mask;
            decode(&changed);
            changed[at] ^= mask;
        }
        decode(&bytes[..at]);
    }
}

fn nest(offset: u64, count: u32, stride: u64, run_bytes: u64) -> Extent {
    Extent { offset, loops: vec![Loop { count, stride }], run_bytes }
}

fn frame(extents: &[Extent], note: &[u8], payload: u32) -> Vec<u8> {
    let mut table = Vec::new();
    encode_table(extents, note, &mut table);
    let header = FrameHeader {
        extents: extents.len() as u16,
        notification_bytes: note.len() as u16,
        payload_bytes: payload,
        write_bytes: payload.into(),
        ..FrameHeader::with_body(FrameKind::Data, &table)
    };
    [&header.encode(1)[..], &table].concat()
}

/// Frames about shared memory: what fits a region of 4096 bytes, and what does not.
fn lending() -> Vec<Vec<u8>> {
    let share = |reach, region| {
        let table = Share { region, bytes: 4096, reach, proof: 7 }.encode();
        [&FrameHeader::with_body(FrameKind::Share, &table).encode(VERSIONS.max)[..], &table].concat()
    };
    let lend = |runs: &[(u32, u64, u32)]| {
        let runs: Vec<_> = runs.iter().map(|&(region, offset, bytes)| LentRun { region, offset, bytes }).collect();
        let payload_bytes = runs.iter().map(|run| run.bytes).sum();
        let mut table = Vec::new();
        let extents = [Extent::contiguous(0, u64::from(payload_bytes))];
        encode_loan(&Loan { slot: 1, token: 2, runs }, &extents, b"note", &mut table);
        let header = FrameHeader {
            extents: 1,
            notification_bytes: 4,
            payload_bytes,
            write_bytes: payload_bytes.into(),
            ..FrameHeader::with_body(FrameKind::Lend, &table)
        };
        [&header.encode(VERSIONS.max)[..], &table].concat()
    };
    vec![
        share(Reach::Descriptor { offset: 0 }, BOARD),
        share(Reach::Address { address: 1 << 40 }, 0),
        lend(&[(0, 0, 4096)]),
        lend(&[(0, 4000, 96), (0, 8, 1), (0, 16, 2000)]),
        lend(&[(0, 4000, 97)]),
        lend(&[(1, 0, 1)]),
        lend(&[(0, u64::MAX, 1)]),
    ]
}

#[test]
#[ignore = "writes the seeds into the source tree"]
fn write_the_seeds() {
    let hello = Hello { versions: VERSIONS, lane: LaneKind::Data, nonce: [5; 32] }.encode().to_vec();
    let challenge = Challenge { versions: VERSIONS, chosen: Some(1), busy: false, nonce: [6; 32] }.encode().to_vec();
    let busy = Challenge { versions: VERSIONS, chosen: None, busy: true, nonce: [6; 32] }.encode().to_vec();
    let peer = b"\x01\x09\0\0\0\0\0\0\0\x02\0\x04\x03\x02\x01\0\0\0\0\x01\0\x02\0\x03d-0\x02\0\0\0hi".to_vec();
    let lane = [&b"\x02\x09\0\0\0\0\0\0\0\x01\0"[..], &[7; 32]].concat();
    let frames = vec![
        head(9, 1, 0, 64),
        frame(&[nest(0, 4, 128, 32), nest(32, 4, 128, 32)], b"", 256),
        frame(&[nest(0, 2, 0, 8)], b"note", 16),
        frame(&[Extent::contiguous(500, 12)], b"", 12),
        frame(&[Extent::contiguous(511, 2)], b"", 2),
        frame(&[nest(u64::MAX, u32::MAX, u64::MAX, u64::MAX)], b"", 1),
        FrameHeader::with_body(FrameKind::Message, b"hello").encode(1).to_vec(),
        FrameHeader::about(FrameKind::Refuse, Some(Refusal::TooMany), 1, 2).encode(1).to_vec(),
    ];
    let seeds: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("hello", vec![hello.clone(), challenge.clone(), busy.clone()]),
        ("identity", vec![[&peer[..], b"\x01\x01\x02\0ab"].concat(), peer, lane, vec![0x82], vec![2]]),
        ("listener", vec![hello.clone(), [&hello[..], &[0; 32]].concat(), [&hello[..], &[1; 200]].concat()]),
        ("dialler", vec![challenge.clone(), busy, [&challenge[..], &[0; 32]].concat()]),
        ("frame", frames.clone()),
        ("inbound", frames),
        ("lending", lending()),
    ];
    for (name, seeds) in seeds {
        fs::create_dir_all(folder(name)).unwrap();
        for (number, seed) in seeds.into_iter().enumerate() {
            fs::write(folder(name).join(format!("seed-{number}")), seed).unwrap();
        }
    }
}
