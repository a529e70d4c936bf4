//! A peer that speaks by hand over a Unix lane, on which memory is shared.
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses a part of it")]

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{
    BOARD, FrameHeader, FrameKind, Introduction, LentRun, Loan, Offer, OfferKind, PeerIdentity, Reach, Share, VERSIONS,
    Verdict, encode_loan,
};
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::{GrantKey, PeerAddress};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{VERSION, dialler, identity, shake, stream_to};

/// A peer that speaks by hand over a Unix lane.
pub(crate) struct ByHand {
    pub(crate) control: TcpStream,
    pub(crate) data: UnixStream,
}

impl ByHand {
    pub(crate) fn join(node: &mut Node, name: &str) -> Self {
        let PeerAddress::Tcp(address) = node.transport.local_address() else { panic!("not TCP") };
        let mut control = stream_to(address);
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let boot: Vec<u8> = boot.trim().bytes().filter(|byte| *byte != b'-').collect();
        let boot: Vec<u8> =
            boot.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect();
        let offers = vec![
            Offer { kind: OfferKind::SHARED_MEMORY, parameters: Vec::new() },
            Offer { kind: OfferKind::PROCESS_MEMORY, parameters: Vec::new() },
            Offer { kind: OfferKind::IN_PLACE, parameters: Vec::new() },
            Offer { kind: OfferKind::UNIX, parameters: [&boot[..], b"kvferry-nobody"].concat() },
        ];
        let introduction = Introduction::Peer(PeerIdentity { offers, ..identity(name) });
        let established = shake(&mut control, dialler(introduction, VERSIONS)).unwrap().unwrap();
        let Verdict::Peer(theirs) = established.verdict else { panic!("no session") };
        let unix = theirs.offers.iter().find(|offer| offer.kind == OfferKind::UNIX).unwrap();
        let name_of = SocketAddr::from_abstract_name(&unix.parameters[16..]).unwrap();
        let mut data = UnixStream::connect_addr(&name_of).unwrap();
        data.set_read_timeout(Some(PATIENCE)).unwrap();
        let introduction = Introduction::Lane { session: theirs.session, lane: 0, secret: established.lane_secret };
        let bound = shake(&mut data, dialler(introduction, VERSIONS)).unwrap().unwrap();
        assert_eq!(bound.verdict, Verdict::Lane);
        node.wait_up(&peer(name, 1));
        Self { control, data }
    }

    /// Shares memory; returns the peer's problem with it.
    pub(crate) fn share(&mut self, share: &Share, file: Option<&OwnedFd>) -> Option<String> {
        self.tell(share, file);
        let (header, body) = self.word(FrameKind::Mapped);
        assert_eq!(header.sequence, share.region);
        (!body.is_empty()).then(|| String::from_utf8(body).unwrap())
    }

    pub(crate) fn tell(&mut self, share: &Share, file: Option<&OwnedFd>) {
        let table = share.encode();
        let header = FrameHeader { sequence: share.region, ..FrameHeader::with_body(FrameKind::Share, &table) };
        let bytes = [&header.encode(VERSION)[..], &table].concat();
        match file {
            Some(file) => {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                let files = [file.as_fd()];
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
                let sent = sendmsg(&self.data, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
                assert_eq!(sent, bytes.len());
            }
            None => self.data.write_all(&bytes).unwrap(),
        }
    }

    pub(crate) fn lend(&mut self, grant: GrantKey, sequence: u32, loan: &Loan) {
        let payload_bytes: u32 = loan.runs.iter().map(|run| run.bytes).sum();
        let mut table = Vec::new();
        encode_loan(loan, &[Extent::contiguous(0, payload_bytes.into())], b"note", &mut table);
        let header = FrameHeader {
            grant: grant.0,
            sequence,
            extents: 1,
            notification_bytes: 4,
            payload_bytes,
            write_bytes: payload_bytes.into(),
            ..FrameHeader::with_body(FrameKind::Lend, &table)
        };
        self.data.write_all(&[&header.encode(VERSION)[..], &table].concat()).unwrap();
    }

    /// Says a word of a write on the data lane.
    pub(crate) fn say(&mut self, kind: FrameKind, grant: u128, sequence: u32) {
        self.data.write_all(&FrameHeader::about(kind, None, grant, sequence).encode(VERSION)).unwrap();
    }

    /// Answers all shares until something is lent, and gives that frame.
    pub(crate) fn take_shares(&mut self) -> FrameHeader {
        loop {
            let (header, _) = self.any();
            match header.kind {
                FrameKind::Share => {
                    let mapped = FrameHeader { sequence: header.sequence, ..FrameHeader::empty(FrameKind::Mapped) };
                    self.data.write_all(&mapped.encode(VERSION)).unwrap();
                }
                FrameKind::Lend => return header,
                other => panic!("{other:?}"),
            }
        }
    }

    fn any(&mut self) -> (FrameHeader, Vec<u8>) {
        let mut bytes = [0; FrameHeader::BYTES];
        self.data.read_exact(&mut bytes).unwrap();
        let header = FrameHeader::decode(&bytes, VERSION).unwrap();
        let mut body = vec![0; header.table_bytes as usize];
        self.data.read_exact(&mut body).unwrap();
        (header, body)
    }

    /// The next frame of a kind on the data lane; what the node shares itself is passed over.
    pub(crate) fn word(&mut self, kind: FrameKind) -> (FrameHeader, Vec<u8>) {
        loop {
            let (header, body) = self.any();
            if header.kind == kind {
                return (header, body);
            }
            assert_eq!(header.kind, FrameKind::Share);
        }
    }
}

pub(crate) fn file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("by-hand", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes.len() as u64).unwrap();
    assert_eq!(rustix::io::write(&file, bytes).unwrap(), bytes.len());
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// A board of 4096 bytes with this proof, whose slot 0 holds token 77.
pub(crate) fn board() -> (Share, OwnedFd) {
    let proof = 0x1234_5678_u128;
    let mut bytes = vec![0; 4096];
    bytes[..16].copy_from_slice(&proof.to_le_bytes());
    bytes[16..24].copy_from_slice(&77u64.to_ne_bytes());
    let share = Share { region: BOARD, bytes: 4096, reach: Reach::Descriptor { offset: 0 }, proof };
    (share, file(&bytes, SealFlags::SHRINK))
}

pub(crate) fn region(bytes: u64) -> Share {
    Share { region: 0, bytes, reach: Reach::Descriptor { offset: 0 }, proof: 0 }
}

pub(crate) fn loan(slot: u32, token: u64, runs: &[(u32, u64, u32)]) -> Loan {
    let runs = runs.iter().map(|&(region, offset, bytes)| LentRun { region, offset, bytes }).collect();
    Loan { slot, token, runs }
}
