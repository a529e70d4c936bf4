//! A peer that speaks by hand inside TLS.
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses a part of it")]

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use kvferry_protocol::wire::{ChannelSecret, ClusterKeys, Dialler, Introduction, VERSIONS, Verdict};
use kvferry_transport::testing::certificates::{authority_pem, node_pem};
use kvferry_transport::testing::{Node, peer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{address, identity, shake, stream_to};

pub(crate) type Channel = StreamOwned<ClientConnection, TcpStream>;

/// A session with one data lane, all in TLS.
pub(crate) struct TlsPeer {
    pub(crate) control: Channel,
    pub(crate) data: Channel,
}

impl TlsPeer {
    /// Makes a session with `node` and waits until the node knows of it.
    pub(crate) fn join(node: &mut Node, name: &str) -> Self {
        let mut control = client(address(node));
        let hello = dialler(&control, Introduction::Peer(identity(name)));
        let established = shake(&mut control, hello).unwrap().unwrap();
        let Verdict::Peer(theirs) = established.verdict else { panic!("no session") };
        let mut data = client(address(node));
        let introduction = Introduction::Lane { session: theirs.session, lane: 0, secret: established.lane_secret };
        let hello = dialler(&data, introduction);
        let bound = shake(&mut data, hello).unwrap().unwrap();
        assert_eq!(bound.verdict, Verdict::Lane);
        node.wait_up(&peer(name, 1));
        Self { control, data }
    }
}

pub(crate) fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let authority = authority_pem(&["authority"]);
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&authority).map(Result::unwrap));
    roots
}

pub(crate) fn chain(node: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let (certificate, key) = node_pem(node);
    let chain = CertificateDer::pem_slice_iter(certificate).map(Result::unwrap).collect();
    (chain, PrivateKeyDer::from_pem_slice(key).unwrap())
}

pub(crate) fn client_config() -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
    let provider = Arc::new(rustls_graviola::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    builder.unwrap().with_root_certificates(roots())
}

/// The certificate of `a`, over a connection to `b`.
pub(crate) fn client(to: SocketAddr) -> Channel {
    let (chain, key) = chain("a");
    let mut config = client_config().with_client_auth_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"kvferry".to_vec()];
    let connection = ClientConnection::new(Arc::new(config), ServerName::try_from("b").unwrap()).unwrap();
    shaken(StreamOwned::new(connection, stream_to(to)))
}

pub(crate) fn shaken(mut stream: Channel) -> Channel {
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).unwrap();
    }
    stream
}

pub(crate) fn dialler(stream: &Channel, introduction: Introduction) -> Dialler {
    let secret = stream.conn.export_keying_material([0; 32], ChannelSecret::LABEL, None).unwrap();
    let keys = ClusterKeys::of_channel(&ChannelSecret::new(secret));
    let deadline = std::time::Instant::now();
    Dialler::new(keys.own().clone(), VERSIONS, introduction, [3; 32], deadline)
}
