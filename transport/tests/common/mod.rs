//! A peer that speaks the wire by hand: as slowly and as wrongly as a test wants.
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses a part of it")]

#[cfg(feature = "tls")]
pub(crate) mod channel;
pub(crate) mod unix;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{
    ClusterKey, Dialler, Established, FrameHeader, FrameKind, HandshakeError, Introduction, LaneSecret, PeerIdentity,
    Step, VERSIONS, Verdict, VersionRange, encode_table,
};
use kvferry_transport::rdma::RdmaConfigFile;
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::{Credentials, PathKind, PeerAddress, Tcp, TcpConfig, TcpConfigFile, Transport};

pub(crate) const KEY: [u8; 32] = [7; 32];
pub(crate) const VERSION: u16 = VERSIONS.max;

pub(crate) fn key() -> ClusterKey {
    ClusterKey::new(&KEY).unwrap()
}

pub(crate) fn config() -> TcpConfigFile {
    let paths = vec![PathKind::Tcp];
    TcpConfigFile { redial_first_ms: 2, redial_longest_ms: 20, paths, ..TcpConfigFile::default() }
}

/// Payload by RDMA devices, soft-RoCE in an emulated guest among them: it moves some MB/s, so requests are short, and waits long.
pub(crate) fn rdma_config() -> TcpConfigFile {
    let rdma = RdmaConfigFile {
        request_bytes: 64 << 10,
        lane_bytes: 256 << 10,
        part_bytes: 64 << 10,
        ack_timeout: 15,
        stall_ms: 60_000,
        prove_ms: 60_000,
        ask_ms: 60_000,
        drain_ms: 10_000,
        ..RdmaConfigFile::default()
    };
    TcpConfigFile { paths: vec![PathKind::Rdma, PathKind::Tcp], rdma, ..config() }
}

pub(crate) fn node(name: &str, file: TcpConfigFile, bytes: usize) -> Node {
    node_with(name, file, bytes, key())
}

pub(crate) fn node_with(name: &str, file: TcpConfigFile, bytes: usize, credentials: impl Into<Credentials>) -> Node {
    let credentials = credentials.into();
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), credentials.clone(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, 1), bytes)
}

pub(crate) fn address(node: &Node) -> SocketAddr {
    match node.transport.local_address() {
        PeerAddress::Tcp(address) => address,
        other => panic!("{other:?}"),
    }
}

/// A session with one data lane.
pub(crate) struct RawPeer {
    pub(crate) control: TcpStream,
    pub(crate) data: TcpStream,
    pub(crate) session: u64,
    pub(crate) secret: LaneSecret,
}

pub(crate) fn stream_to(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Shakes hands as a dialler; `None` if the other side hung up.
pub(crate) fn shake<S: Read + Write>(
    stream: &mut S,
    mut dialler: Dialler,
) -> Option<Result<Established, HandshakeError>> {
    loop {
        if let Some(output) = dialler.poll_output() {
            stream.write_all(&output).ok()?;
        }
        let mut input = vec![0; dialler.wants()];
        stream.read_exact(&mut input).ok()?;
        match dialler.feed(&input) {
            Ok(Step::More) => {}
            Ok(Step::Said(established)) => return Some(Ok(established)),
            Err(error) => return Some(Err(error)),
        }
    }
}

pub(crate) fn dialler(introduction: Introduction, versions: VersionRange) -> Dialler {
    Dialler::new(key(), versions, introduction, [3; 32], Instant::now())
}

pub(crate) fn identity(name: &str) -> PeerIdentity {
    PeerIdentity { peer: peer(name, 1), lanes: 1, session: 0, greeting: b"by hand".to_vec(), offers: Vec::new() }
}

impl RawPeer {
    /// Makes a session with `node` and waits until the node knows of it.
    pub(crate) fn join(node: &mut Node, name: &str) -> Self {
        let mut control = stream_to(address(node));
        let introduction = Introduction::Peer(identity(name));
        let established = shake(&mut control, dialler(introduction, VERSIONS)).unwrap().unwrap();
        let Verdict::Peer(theirs) = established.verdict else { panic!("no session") };
        let (session, secret) = (theirs.session, established.lane_secret);
        let mut data = stream_to(address(node));
        let introduction = Introduction::Lane { session, lane: 0, secret: secret.clone() };
        let bound = shake(&mut data, dialler(introduction, VERSIONS)).unwrap().unwrap();
        assert_eq!(bound.verdict, Verdict::Lane);
        node.wait_up(&peer(name, 1));
        Self { control, data, session, secret }
    }

    /// The next frame's header on the data lane.
    pub(crate) fn word(&mut self) -> FrameHeader {
        let mut bytes = [0; FrameHeader::BYTES];
        self.data.read_exact(&mut bytes).unwrap();
        FrameHeader::decode(&bytes, VERSION).unwrap()
    }
}

/// Header and table of a write's only frame.
pub(crate) fn head(grant: u128, sequence: u32, offset: u64, bytes: u32) -> Vec<u8> {
    let extents = [Extent::contiguous(offset, bytes.into())];
    let mut table = Vec::new();
    encode_table(&extents, b"note", &mut table);
    let header = FrameHeader {
        grant,
        sequence,
        extents: 1,
        notification_bytes: 4,
        payload_bytes: bytes,
        write_bytes: bytes.into(),
        ..FrameHeader::with_body(FrameKind::Data, &table)
    };
    [&header.encode(VERSION)[..], &table].concat()
}
