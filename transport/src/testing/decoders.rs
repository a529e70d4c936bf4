//! Every way in for a peer's bytes, as functions of those bytes: what the fuzz targets run, and the tests that replay their
//! corpora. Each panics if a decoder takes what it should not; none should for any input.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Loop, Pages, Piece};
use kvferry_protocol::wire::{
    Challenge, ClusterKey, Dialler, FrameHeader, FrameKind, Hello, Identity, Introduction, Listener, Loan,
    PeerIdentity, Share, Step, VERSIONS, Verdict, check_extents, decode_table,
};

use super::arena::Arena;
use super::node::peer;
use crate::core::{Bug, Carrier, Core, Inbound, RunList};
use crate::raw::{self, RawRun};
use crate::share::{Adoption, Sharing};

/// A decoder and its name, which is that of its fuzz target and of its corpus.
pub type Decoder = (&'static str, fn(&[u8]));

/// All of them.
pub const DECODERS: &[Decoder] = &[
    ("hello", hello),
    ("identity", identity),
    ("listener", listener),
    ("dialler", dialler),
    ("frame", frame),
    ("inbound", inbound),
    ("lending", lending),
];

/// The two messages that come before any proof.
///
/// # Panics
/// If what was decoded encodes to other bytes.
pub fn hello(bytes: &[u8]) {
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode()[..], *bytes);
    }
    if let Ok(challenge) = Challenge::decode(bytes) {
        assert_eq!(challenge.encode()[..], *bytes);
    }
}

/// What a proved peer says of itself, and what it is answered.
pub fn identity(bytes: &[u8]) {
    for version in VERSIONS.min..=VERSIONS.max {
        let _ = Identity::decode(bytes, version);
        let _ = Verdict::decode(bytes, version);
    }
}

/// A whole conversation with a listener.
///
/// # Panics
/// If somebody without the key gets past the proof.
pub fn listener(bytes: &[u8]) {
    let mut listener = Listener::new(key(), VERSIONS, [2; 32], Instant::now(), false);
    let mut rest = bytes;
    while let (wants @ 1.., true) = (listener.wants(), rest.len() >= listener.wants()) {
        let (now, later) = rest.split_at(wants);
        rest = later;
        match listener.feed(now) {
            Ok(Step::More) => {}
            Ok(Step::Said(_)) => panic!("a proof was guessed"),
            Err(_) => break,
        }
        let _ = listener.poll_output();
    }
}

/// A whole conversation with a dialler.
///
/// # Panics
/// If somebody without the key gets past the proof.
pub fn dialler(bytes: &[u8]) {
    let (greeting, offers) = (Vec::new(), Vec::new());
    let identity = PeerIdentity { peer: peer("fuzz", 1), lanes: 1, session: 0, greeting, offers };
    let mut dialler = Dialler::new(key(), VERSIONS, Introduction::Peer(identity), [1; 32], Instant::now());
    let mut rest = bytes;
    while let (wants @ 1.., true) = (dialler.wants(), rest.len() >= dialler.wants()) {
        let (now, later) = rest.split_at(wants);
        rest = later;
        match dialler.feed(now) {
            Ok(Step::More) => {}
            Ok(Step::Said(_)) => panic!("a proof was guessed"),
            Err(_) => break,
        }
        let _ = dialler.poll_output();
    }
}

/// A header and its table. Checksums are put right first, else a fuzzer would never get past them.
///
/// # Panics
/// If extents are accepted that leave the window or do not add up.
pub fn frame(bytes: &[u8]) {
    const WINDOW_BYTES: u64 = 1 << 16;
    let Some((header, table)) = checked(bytes, 1) else { return };
    let Ok((extents, _)) = decode_table(&header, &table) else { return };
    if check_extents(&extents, WINDOW_BYTES, header.payload_bytes.into()).is_ok() {
        let mut total = 0;
        for extent in &extents {
            extent.for_each_run(|start| {
                assert!(start + extent.run_bytes <= WINDOW_BYTES);
                total += extent.run_bytes;
            });
        }
        assert_eq!(total, u64::from(header.payload_bytes));
    }
}

/// A data frame, up to the memory that it goes to: nothing but granted pages may change, whatever the frame says.
///
/// # Panics
/// If another byte changes, or as many bytes are not placed as the frame announces.
pub fn inbound(bytes: &[u8]) {
    const REGION_BYTES: usize = 4096;
    let arena = Arena::new(REGION_BYTES, 0);
    let core = Core::new(4, 64, Bug::default());
    core.register(arena.memory()).expect("a region");
    let session = core.next_session();
    core.grants.open_session(session);
    // 4 blocks of 2 x 64 bytes, with gaps.
    let loops = vec![Loop { count: 2, stride: 100 }];
    let piece = Piece { region: RegionId::new(0), offset: 10, loops, run_bytes: 64 };
    let pages = Pages { bases: vec![0, 3000, 1000, 500], pieces: vec![piece] };
    let grant = core.grant(&peer("fuzz", 1), session, &pages, None, || Ok(())).expect("a grant");
    let Some((mut header, table)) = checked(bytes, 1) else { return };
    header.grant = grant.0;
    let Ok(Ok(mut inbound)) = Inbound::admit(&core, session, &header, &table, Carrier::Processor, Vec::new()) else {
        return;
    };
    let mut payload = vec![0xff; 4096];
    let mut placed = 0;
    while inbound.left() > 0 {
        let step = inbound.place(|runs| {
            let run = runs.first().map_or(RawRun::of(&[]), |run| run.keep(payload.len()));
            raw::copy(RawRun::of_mut(&mut payload), run);
            (run.bytes(), run.bytes())
        });
        let step = step.expect("nobody revokes");
        assert!(step > 0, "it stands still");
        placed += step;
    }
    assert_eq!(placed as u64, u64::from(header.payload_bytes));
    let mut granted = vec![false; REGION_BYTES];
    for &base in &pages.bases {
        pages.pieces[0].for_each_run(base, |start| granted[start as usize..start as usize + 64].fill(true));
    }
    for (at, byte) in arena.read(0, REGION_BYTES).into_iter().enumerate() {
        assert!(byte == 0 || granted[at], "byte {at} is nobody's");
    }
    let _ = inbound.land(&core, &peer("fuzz", 1));
    core.grants.close_session(session);
}

/// What a peer shares, and what it lends of a region of 4096 bytes that it shared.
///
/// # Panics
/// If a share encodes to other bytes, or a loan is not as long as its frame announces.
pub fn lending(bytes: &[u8]) {
    const REGION_BYTES: usize = 4096;
    let Some((header, table)) = checked(bytes, VERSIONS.max) else { return };
    if let Ok(share) = Share::decode(&table) {
        assert_eq!(share.encode(), table);
    }
    let Ok((loan, rest)) = Loan::take(&table, header.payload_bytes) else { return };
    let table = decode_table(&header, rest);
    let arena = Arena::new(REGION_BYTES, 0);
    let core = Core::new(4, 64, Bug::default());
    core.register(arena.memory()).expect("a region");
    let (near, _far) = UnixStream::pair().expect("a pair of sockets");
    let sharing = Sharing::new(true, false, false, near.as_fd(), 4).expect("a board");
    while let Some((share, file)) = sharing.lender.next_share(&core.regions) {
        let file = file.map(|file| file.try_clone().expect("a descriptor"));
        sharing.borrower.accept(&share, file).expect("it is our own");
    }
    let borrow = || sharing.borrower.borrow(&loan);
    let Some(mut borrowed) = borrow() else { return };
    if let Some((again, (extents, _))) = borrow().zip(table.ok())
        && check_extents(&extents, REGION_BYTES as u64, header.payload_bytes.into()).is_ok()
        && let Some(extents) = RunList::of_extents(&extents)
        && let Some(adoption) = Adoption::new(again, &extents)
    {
        assert!(!adoption.is_live(), "no post was lent");
        adoption.assert_inside(REGION_BYTES, header.payload_bytes as usize);
    }
    let mut sink = vec![0xff; REGION_BYTES];
    let mut copied = 0;
    while copied < header.payload_bytes as usize {
        let step = borrowed.copy(&[RawRun::of_mut(&mut sink)], 1000).expect("the region is mapped");
        assert!(step > 0, "it stands still");
        copied += step;
    }
    assert_eq!(copied, header.payload_bytes as usize);
    assert!(!borrowed.is_live(), "no post was lent");
}

/// A header and table whose checksums were put right.
fn checked(bytes: &[u8], version: u16) -> Option<(FrameHeader, Vec<u8>)> {
    let (header, table) = bytes.split_first_chunk::<{ FrameHeader::BYTES }>()?;
    let mut header = *header;
    header[52..56].copy_from_slice(&crc32(table).to_le_bytes());
    let checksum = crc32(&header[..60]).to_le_bytes();
    header[60..].copy_from_slice(&checksum);
    let header = FrameHeader::decode(&header, version).ok()?;
    (header.table_bytes as usize == table.len() && header.check_table(table).is_ok()).then(|| (header, table.to_vec()))
}

fn crc32(bytes: &[u8]) -> u32 {
    FrameHeader::with_body(FrameKind::Message, bytes).table_checksum
}

fn key() -> ClusterKey {
    ClusterKey::new(&[7; 32]).expect("a legal key")
}
