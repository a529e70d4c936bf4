//! A peer that holds the key, or a certificate, and then says whatever it likes, over TCP, Unix lanes and TLS, again and again: no other
//! byte of memory changes than it was granted, an honest peer is served beside it, and nothing is left of it.
//!
//! `KVFERRY_HOSTILE_ROUNDS=100000 KVFERRY_FAULT_SEED=1 cargo test -p kvferry-transport --test hostile` goes on for longer.

mod common;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use common::unix::ByHand;
use common::{RawPeer, VERSION, config, node_with};
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};
use kvferry_protocol::wire::{
    BOARD, FrameHeader, FrameKind, LentRun, Loan, MAX_MESSAGE_BYTES, MAX_TABLE_BYTES, Reach, Refusal, Share, TETHER,
    encode_table,
};
use kvferry_transport::testing::{Node, peer};
use kvferry_transport::{Credentials, Event, GrantKey, PathKind, TcpConfigFile};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const KIB: u64 = 1 << 10;
/// What the hostile peer may be granted; the rest of the victim's memory is nobody's business.
const GRANTED: u64 = 256 * KIB;
const MEMORY: u64 = 512 * KIB;
const ROUNDS: u64 = 150;
/// What the victim may hold of all that: buffers of lanes, the allocator's own.
const MOST_GROWTH_KIB: u64 = 32 << 10;

struct Chance(u64);

impl Chance {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A number near a border, small, or anything.
    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => u64::MAX - self.below(4),
            1 => (GRANTED + self.below(3)).saturating_sub(1),
            2 => self.below(4),
            3 => self.draw(),
            4 => 1 << self.below(64),
            _ => self.below(GRANTED),
        }
    }
}

/// What a hostile peer knows: grants of its own, of before, of others, and made up.
struct Known {
    keys: Vec<u128>,
}

fn extent(chance: &mut Chance) -> Extent {
    let mut loops = Vec::new();
    for _ in 0..chance.below(4) {
        loops.push(Loop { count: chance.number() as u32, stride: chance.number() });
    }
    Extent { offset: chance.number(), loops, run_bytes: chance.number() }
}

/// A frame with its table and payload; checksums mostly right, since what follows them is to be reached.
fn frame(chance: &mut Chance, known: &Known) -> Vec<u8> {
    // Half of them as they should be, so that the others meet writes that are under way.
    let wild = chance.one_in(2);
    let honest_extent = |chance: &mut Chance| {
        let bytes = 1 + chance.below(4096);
        Extent::contiguous(chance.below(GRANTED - bytes), bytes)
    };
    let extents: Vec<Extent> = match wild {
        true => (0..1 + chance.below(4)).map(|_| extent(chance)).collect(),
        false => vec![honest_extent(chance)],
    };
    let note = vec![0x4e; chance.below(20) as usize];
    let honest: u64 = extents.iter().filter_map(Extent::bytes).fold(0, u64::saturating_add);
    let payload_bytes = if wild && chance.one_in(4) { chance.number() as u32 } else { honest.min(64 * KIB) as u32 };
    let is_lent = chance.one_in(3);
    let mut table = Vec::new();
    if is_lent {
        let mut runs = Vec::new();
        for _ in 0..if wild { 1 + chance.below(3) } else { 1 } {
            let offset = if !wild || chance.one_in(2) { 0 } else { chance.number() };
            runs.push(LentRun {
                region: if wild { chance.below(3) as u32 } else { 0 },
                offset,
                bytes: payload_bytes.max(1),
            });
        }
        let token = if wild && chance.one_in(3) { chance.number() } else { 77 };
        Loan { slot: chance.below(3) as u32, token, runs }.encode(&mut table);
    }
    encode_table(&extents, &note, &mut table);
    let kind = match if wild { chance.below(12) } else { 12 } {
        0 => FrameKind::Ack,
        1 => FrameKind::Cancel,
        2 => FrameKind::Message,
        3 => FrameKind::Mapped,
        4 => FrameKind::Share,
        5 => FrameKind::Ping,
        6 => FrameKind::Held,
        _ if is_lent => FrameKind::Lend,
        _ => FrameKind::Data,
    };
    // Mostly the grant that came last.
    let back = if wild && chance.one_in(3) { chance.below(known.keys.len() as u64) as usize } else { 0 };
    let grant = known.keys[known.keys.len() - 1 - back];
    let header = FrameHeader {
        grant,
        sequence: if wild && chance.one_in(3) { chance.number() as u32 } else { chance.below(8) as u32 },
        frame: if wild && chance.one_in(4) { chance.number() as u32 } else { 0 },
        extents: if wild && chance.one_in(8) { chance.number() as u16 } else { extents.len() as u16 },
        notification_bytes: if wild && chance.one_in(8) { chance.number() as u16 } else { note.len() as u16 },
        payload_bytes,
        write_bytes: if wild && chance.one_in(4) { chance.number() } else { payload_bytes.into() },
        refusal: (kind == FrameKind::Refuse).then_some(Refusal::TooMany),
        ..FrameHeader::with_body(kind, &table)
    };
    let mut bytes = [&header.encode(VERSION)[..], &table].concat();
    if kind == FrameKind::Data {
        bytes.resize(bytes.len() + (payload_bytes as usize).min(64 << 10), 0xee);
    }
    if wild && chance.one_in(10) {
        let at = chance.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << chance.below(8);
    }
    if wild && chance.one_in(10) {
        bytes.truncate(chance.below(bytes.len() as u64) as usize);
    }
    bytes
}

fn control(chance: &mut Chance, known: &Known) -> Vec<u8> {
    match chance.below(8) {
        0 => FrameHeader::empty(FrameKind::Ping).encode(VERSION).repeat(1 + chance.below(200) as usize),
        1 => {
            let body = vec![0x6d; chance.below(3 * KIB) as usize];
            [&FrameHeader::with_body(FrameKind::Message, &body).encode(VERSION)[..], &body].concat()
        }
        2 => {
            let header =
                FrameHeader { table_bytes: MAX_MESSAGE_BYTES as u32, ..FrameHeader::empty(FrameKind::Message) };
            header.encode(VERSION).to_vec() // and nothing follows
        }
        3 => {
            let header =
                FrameHeader { table_bytes: MAX_TABLE_BYTES as u32 + 1, ..FrameHeader::empty(FrameKind::Goodbye) };
            header.encode(VERSION).to_vec()
        }
        4 | 5 => {
            let grant = known.keys[chance.below(known.keys.len() as u64) as usize];
            let kind = [FrameKind::Cancel, FrameKind::Ack, FrameKind::Recall][chance.below(3) as usize];
            FrameHeader::about(kind, None, grant, chance.below(8) as u32).encode(VERSION).to_vec()
        }
        6 => (0..chance.below(300)).map(|_| chance.draw() as u8).collect(),
        _ => frame(chance, known),
    }
}

/// Where a hostile peer speaks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lanes {
    /// TCP and Unix sockets.
    Plain,
    #[cfg(feature = "tls")]
    Tls,
}

impl Lanes {
    /// What a node of this name shows; the names are of certificates.
    fn credentials(self, name: &str) -> Credentials {
        match self {
            Self::Plain => common::key().into(),
            #[cfg(feature = "tls")]
            Self::Tls => kvferry_transport::testing::certificates::tls(
                name,
                &["authority"],
                kvferry_transport::tls::TlsNames::Any,
            )
            .into(),
        }
    }

    /// The victim, with little room for what it is made to say.
    fn victim(self) -> Node {
        let paths = match self {
            Self::Plain => PathKind::ALL.to_vec(),
            #[cfg(feature = "tls")]
            Self::Tls => vec![PathKind::Tcp],
        };
        // A busy machine is no reason to let a handshake go.
        let file = TcpConfigFile { paths, max_queued_message_bytes: 1 << 16, handshake_ms: 600_000, ..config() };
        node_with("b", file, MEMORY as usize, self.credentials("b"))
    }
}

fn memory_file(bytes: usize, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes as u64).unwrap();
    // As a board it shows proof 0, and all its posts stand.
    let words: Vec<u8> = (0..4096 / 8).flat_map(|word: u64| if word < 2 { 0 } else { 77u64 }.to_ne_bytes()).collect();
    rustix::io::pwrite(&file, &words[..words.len().min(bytes)], 0).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn hostile_round(lanes: Lanes, chance: &mut Chance, victim: &mut Node, known: &mut Known, name: &str) {
    let all = |bytes| Piece { region: RegionId::new(0), offset: 0, loops: Vec::new(), run_bytes: bytes };
    let who = peer(name, 1);
    let grant = |victim: &Node, in_place: bool| {
        if in_place && let Ok(key) = victim.transport.grant_in_place(&who, GRANTED) {
            return Some(key);
        }
        let window = Pages { bases: vec![0], pieces: vec![all(GRANTED)] };
        victim.transport.grant(&who, window).ok()
    };
    let limit = Some(Duration::from_millis(300));
    let frames = 1 + chance.below(60);
    let mut speak = |lane: &mut dyn Write, control_lane: &mut dyn Write, victim: &Node, chance: &mut Chance| {
        let mut live: Vec<GrantKey> = Vec::new();
        for _ in 0..frames {
            if live.is_empty()
                && let Some(key) = grant(victim, chance.one_in(2))
            {
                known.keys.push(key.0);
                live.push(key);
            }
            if chance.one_in(5)
                && let Some(key) = live.pop()
            {
                victim.transport.revoke(key); // and it goes on to be used
            }
            let goes = match chance.one_in(4) {
                true => control_lane.write_all(&control(chance, known)).is_ok(),
                false => lane.write_all(&frame(chance, known)).is_ok(),
            };
            if !goes {
                break;
            }
        }
        live.into_iter().for_each(|key| victim.transport.revoke(key));
    };
    match lanes {
        Lanes::Plain if chance.one_in(2) => {
            let mut raw = RawPeer::join(victim, name);
            raw.data.set_write_timeout(limit).unwrap();
            raw.control.set_write_timeout(limit).unwrap();
            speak(&mut raw.data, &mut raw.control, victim, chance);
        }
        Lanes::Plain => {
            let mut hand = ByHand::join(victim, name);
            hand.data.set_write_timeout(limit).unwrap();
            hand.control.set_write_timeout(limit).unwrap();
            let is_proper = share_something(chance, &mut hand);
            // Some hand one write over in place as they should, so that what follows meets one that is held.
            let in_place = is_proper.then(|| victim.transport.grant_in_place(&who, GRANTED).ok()).flatten();
            if let Some(key) = in_place {
                hand.lend(
                    key,
                    0,
                    &Loan { slot: 2, token: 77, runs: vec![LentRun { region: 0, offset: 0, bytes: 64 }] },
                );
            }
            speak(&mut hand.data, &mut hand.control, victim, chance);
            in_place.into_iter().for_each(|key| victim.transport.revoke(key));
        }
        #[cfg(feature = "tls")]
        Lanes::Tls => {
            let mut inside = common::channel::TlsPeer::join(victim, name);
            inside.data.sock.set_write_timeout(limit).unwrap();
            inside.control.sock.set_write_timeout(limit).unwrap();
            speak(&mut inside.data, &mut inside.control, victim, chance);
        }
    }
    let down = |event: &Event| matches!(event, Event::Down { peer: Some(peer), .. } if *peer == who);
    victim.wait("the hostile peer's end", down);
}

/// Shares regions, half of the times as they should be: then it returns `true`.
fn share_something(chance: &mut Chance, hand: &mut ByHand) -> bool {
    let wild = chance.one_in(2);
    let file = |chance: &mut Chance| {
        let seals = if wild && chance.one_in(3) { SealFlags::GROW } else { SealFlags::SHRINK };
        memory_file((1 + chance.below(128 * KIB) as usize).next_multiple_of(4096), seals)
    };
    for region in [BOARD, TETHER, 0, 1] {
        if wild && chance.one_in(4) {
            continue;
        }
        let reach = match if wild { chance.below(4) } else { 2 } {
            0 => Reach::Address { address: chance.number() >> 1 },
            1 => Reach::Descriptor { offset: chance.number() >> 1 },
            _ => Reach::Descriptor { offset: 0 },
        };
        let bytes = if wild && chance.one_in(3) { 1 + (chance.number() >> 2) } else { 4096 };
        let share = Share { region, bytes, reach, proof: 0 };
        if matches!(reach, Reach::Address { .. }) {
            hand.share(&share, None);
        } else if wild && chance.one_in(8) {
            // A descriptor that is missing ends the session.
            hand.tell(&share, None);
            break;
        } else {
            hand.share(&share, Some(&file(chance)));
        }
    }
    !wild
}

fn resources() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib = line.trim().trim_end_matches(" kB").parse().unwrap();
    (kib, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[test]
fn a_peer_that_says_whatever_it_likes_reaches_nothing_that_it_was_not_granted() {
    attack(Lanes::Plain, ROUNDS);
}

#[cfg(feature = "tls")]
#[test]
fn nor_does_one_with_a_certificate() {
    attack(Lanes::Tls, ROUNDS);
}

fn attack(lanes: Lanes, rounds: u64) {
    let rounds = number("KVFERRY_HOSTILE_ROUNDS", rounds);
    let seed = number("KVFERRY_FAULT_SEED", std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into());
    eprintln!("KVFERRY_FAULT_SEED={seed} KVFERRY_HOSTILE_ROUNDS={rounds} runs this again");
    let mut chance = Chance(seed);
    let mut victim = lanes.victim();
    let mut honest = node_with("a", config(), MEMORY as usize, lanes.credentials("a"));
    honest.meet(&mut victim);
    honest.memory.fill(0, MEMORY as usize, 0x33);
    victim.memory.fill(0, MEMORY as usize, 0x11);
    let mut known = Known { keys: vec![0, u128::MAX, 7] };
    let mut before = resources();
    for round in 0..rounds {
        // A grant of somebody else's, which the hostile peer has heard of.
        let others = victim.grant(&honest.peer, GRANTED, 64 * KIB);
        known.keys.push(others.0);
        let name = format!("hostile-{}", chance.below(3));
        hostile_round(lanes, &mut chance, &mut victim, &mut known, &name);
        assert!(victim.memory.is_all(GRANTED as usize, (MEMORY - GRANTED) as usize, 0x11), "round {round}");
        victim.memory.fill(0, GRANTED as usize, 0x55);
        let post = honest.post(&victim.peer, others, 0, 0, 0, 64 * KIB);
        honest.wait_posted(post).expect("an honest peer is served");
        assert!(victim.memory.is_all(GRANTED as usize, 64 * KIB as usize, 0x33), "round {round}");
        victim.transport.revoke(others);
        victim.memory.fill(GRANTED as usize, 64 * KIB as usize, 0x11);
        assert!(victim.memory.is_all(0, GRANTED as usize, 0x55), "round {round}: late bytes");
        // What it handed over in place is read, each byte, and whatever becomes of it.
        for event in victim.drain() {
            if let Event::Lent { adopted, .. } = event {
                for run in adopted.runs() {
                    let _ = adopted.copy(run.offset, &mut vec![0; run.bytes]);
                }
            }
        }
        honest.drain();
        let most = known.keys.len().saturating_sub(64);
        known.keys.drain(..most);
        if round == rounds / 5 {
            before = resources();
        }
    }
    let stats = victim.transport.stats();
    eprintln!("{stats:?}");
    assert_eq!(stats.grants_live, 0);
    // It got as far as the pages, and it was refused: some 7 times as often as is asked for, by chance.
    assert!(stats.landed_bytes > rounds * 64 * KIB && stats.refused_writes > rounds / 50, "{stats:?}");
    if lanes == Lanes::Plain {
        assert!(stats.adopted_bytes > 0, "nothing was handed over in place: {stats:?}");
    }
    let after = resources();
    assert!(after.0 < before.0 + MOST_GROWTH_KIB, "{before:?} KiB and descriptors, then {after:?}");
    assert!(after.1 <= before.1 + 16, "{before:?} KiB and descriptors, then {after:?}");
}
