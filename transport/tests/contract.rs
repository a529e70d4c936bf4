//! Every transport runs the whole contract.

mod common;

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::testing::a_receiver_that_does_not_poll_holds_its_peers_back_and_loses_nothing as held_back;
use kvferry_transport::testing::{Arena, peer};
use kvferry_transport::{
    Credentials, DeviceAccess, FaultPlan, FaultRates, LoopbackConfig, LoopbackNetwork, Memory, MemoryKind, PathKind,
    Tcp, TcpConfig, TcpConfigFile, Transport,
};

/// Events that an endpoint keeps before it reads no more: few for the one called `b`.
fn events(peer: &PeerId, usual: usize) -> usize {
    if peer.engine.as_str() == "b" { 8 } else { usual }
}

fn tcp(file: TcpConfigFile, peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
    tcp_with(file, key(), peer, greeting)
}

fn tcp_with(file: TcpConfigFile, credentials: Credentials, peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
    let file = TcpConfigFile { redial_first_ms: 2, redial_longest_ms: 20, ..file };
    let config = TcpConfig::try_from(file).unwrap();
    Box::new(Tcp::bind(config, credentials, peer, greeting).unwrap())
}

/// All nodes show the same certificate.
#[cfg(feature = "tls")]
fn tls() -> Credentials {
    kvferry_transport::testing::certificates::tls("a", &["authority"], kvferry_transport::tls::TlsNames::Any).into()
}

fn key() -> Credentials {
    ClusterKey::new(&[7; 32]).unwrap().into()
}

#[test]
fn memory_of_a_device_is_refused_where_it_is_registered() {
    let network = LoopbackNetwork::new();
    let loopback = network.endpoint(peer("a", 1), Bytes::new(), LoopbackConfig::default(), FaultPlan::NONE);
    let memory = Arena::new(4096, 0);
    for transport in
        [Box::new(loopback) as Box<dyn Transport>, tcp(TcpConfigFile::default(), peer("a", 1), Bytes::new())]
    {
        let memory = Memory { kind: MemoryKind::Device(DeviceAccess::default()), ..memory.memory() };
        #[expect(unsafe_code, reason = "registering is the caller's promise")]
        // SAFETY: the memory outlives the transport, and is refused.
        let refused = unsafe { transport.register(memory) }.unwrap_err().to_string();
        assert!(refused.contains("a device's") && refused.contains("host memory"), "{refused}");
    }
}

mod loopback {
    use super::*;

    kvferry_transport::contract_tests!({
        let network = LoopbackNetwork::new();
        move |peer, greeting| -> Box<dyn Transport> {
            Box::new(network.endpoint(peer, greeting, LoopbackConfig::default(), FaultPlan::NONE))
        }
    });

    #[test]
    fn a_receiver_that_does_not_poll_holds_its_peers_back() {
        let network = LoopbackNetwork::new();
        held_back(&move |peer, greeting| -> Box<dyn Transport> {
            let usual = LoopbackConfig::default();
            let config = LoopbackConfig { max_events: events(&peer, usual.max_events), ..usual };
            Box::new(network.endpoint(peer, greeting, config, FaultPlan::NONE))
        });
    }
}

mod loopback_with_frames_out_of_order {
    use super::*;

    kvferry_transport::contract_tests!({
        let network = LoopbackNetwork::new();
        move |peer, greeting| -> Box<dyn Transport> {
            let rates = FaultRates { delay: 200_000, ..FaultRates::default() };
            let plan = FaultPlan { seed: 11, rates };
            let config = LoopbackConfig { frame_bytes: 16 << 10, ..LoopbackConfig::default() };
            Box::new(network.endpoint(peer, greeting, config, plan))
        }
    });
}

/// UCX's tcp, whose puts are emulated: all that most machines have.
mod ucx {
    use kvferry_transport::testing::Node;
    use kvferry_transport::ucx::UcxConfigFile;
    use kvferry_transport::{Event, PathReport};

    use super::*;

    /// An emulated device, too, on which it takes seconds to connect.
    fn emulated() -> UcxConfigFile {
        UcxConfigFile { emulated_puts: true, connect_ms: 25_000, ..UcxConfigFile::default() }
    }

    fn ucx(peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
        with(emulated(), peer, greeting)
    }

    fn with(ucx: UcxConfigFile, peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
        let paths = vec![PathKind::Ucx, PathKind::Tcp];
        super::tcp(TcpConfigFile { paths, ucx, ..TcpConfigFile::default() }, peer, greeting)
    }

    kvferry_transport::contract_tests!(ignored: "needs libucp", ucx);

    /// The path of a new session, which both sides tell alike.
    fn path(a: &mut Node, b: &mut Node) -> PathReport {
        a.transport.connect(&b.transport.local_address()).unwrap();
        let (of_a, of_b) = (a.peer.clone(), b.peer.clone());
        let told = [(&mut *a, of_b), (b, of_a)].map(|(node, other)| match node.wait_up(&other) {
            Event::Up { path, .. } => path,
            other => panic!("{other:?}"),
        });
        assert_eq!(told[0].kind, told[1].kind);
        told[0].clone()
    }

    #[test]
    #[ignore = "needs libucp"]
    fn the_path_is_told() {
        let mut b = Node::new(&ucx, peer("b", 1), 1 << 20);
        let mut a = Node::new(&ucx, peer("a", 1), 1 << 20);
        let told = path(&mut a, &mut b);
        assert_eq!(told.kind, PathKind::Ucx, "{told:?}");
    }

    #[test]
    #[ignore = "needs libucp"]
    fn a_link_that_cannot_be_made_is_not_the_path() {
        let one_link = |peer, greeting| with(UcxConfigFile { max_links: 1, ..emulated() }, peer, greeting);
        let mut b = Node::new(&one_link, peer("b", 1), 1 << 20);
        let [mut first, mut second] = ["first", "second"].map(|name| Node::new(&ucx, peer(name, 1), 1 << 20));
        assert_eq!(path(&mut first, &mut b).kind, PathKind::Ucx);
        let told = path(&mut second, &mut b);
        assert_eq!(told.kind, PathKind::Tcp, "{told:?}");
        assert!(
            told.not.iter().any(|(kind, why)| *kind == PathKind::Ucx && why.contains("could not make")),
            "{told:?}"
        );
        let grant = b.grant(&second.peer, 0, 1 << 20);
        let post = second.post(&b.peer, grant, 0, 0, 0, 1 << 20);
        b.wait_landed(grant);
        second.wait_posted(post).unwrap();
        assert_eq!(second.transport.stats().ucx_bytes, 0);
    }
}

/// Payload over one of the ways between processes.
macro_rules! between_processes {
    ($($(#[$attribute:meta])* $name:ident: $path:expr, $credentials:expr;)+) => {$(
        $(#[$attribute])*
        mod $name {
            use super::*;

            kvferry_transport::contract_tests!(|peer, greeting| -> Box<dyn Transport> {
                let file = TcpConfigFile { paths: $path.to_vec(), ..TcpConfigFile::default() };
                super::tcp_with(file, $credentials, peer, greeting)
            });

            #[test]
            fn a_receiver_that_does_not_poll_holds_its_peers_back() {
                held_back(&|peer, greeting| {
                    let usual = TcpConfigFile { paths: $path.to_vec(), ..TcpConfigFile::default() };
                    let max_events = events(&peer, usual.max_events as usize) as u32;
                    super::tcp_with(TcpConfigFile { max_events, ..usual }, $credentials, peer, greeting)
                });
            }
        }
    )+};
}

between_processes! {
    tcp: [PathKind::Tcp], key();
    unix_sockets: [PathKind::UnixSocket], key();
    shared_memory: [PathKind::SharedMemory, PathKind::UnixSocket], key();
    process_memory: [PathKind::ProcessMemory, PathKind::UnixSocket], key();
    #[cfg(feature = "tls")]
    tls_over_tcp: [PathKind::Tcp], tls();
    #[cfg(feature = "tls")]
    tls_over_unix_sockets: [PathKind::UnixSocket], tls();
    #[cfg(feature = "tls")]
    tls_beside_shared_memory: [PathKind::SharedMemory, PathKind::UnixSocket], tls();
}

/// Over soft-RoCE too: `integration-tests/softroce/tests.sh`.
mod rdma {
    use super::*;

    fn make(peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
        // Each grant is told to the peer and fenced by a question, which takes a slow guest a millisecond.
        super::tcp(TcpConfigFile { max_grants: 1024, ..common::rdma_config() }, peer, greeting)
    }

    kvferry_transport::contract_tests!(ignored: "needs an RDMA device", make);
}
