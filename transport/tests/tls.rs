//! Mutual TLS: who gets in, what strangers are told, what a change of certificates does, what is done to the stream on the way.
#![cfg(feature = "tls")]

mod common;
#[path = "common/log.rs"]
mod log;

use std::io::{Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use common::channel::{chain, client, client_config, dialler, roots};
use common::{address, config, identity, key, node_with, shake, stream_to};
use kvferry_protocol::wire::{ClusterKey, ClusterKeys, Declined, HandshakeError, Introduction, Verdict};
use kvferry_transport::testing::certificates::{authority_pem, node_pem, tls};
use kvferry_transport::testing::{Node, Proxy, ProxyPlan, peer};
use kvferry_transport::tls::{TlsError, TlsIdentity, TlsNames, TlsPem};
use kvferry_transport::ucx::UcxConfigFile;
use kvferry_transport::{Credentials, Event, PathKind, PeerAddress, Tcp, TcpConfig, TcpConfigFile, TransportError};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

const MIB: usize = 1 << 20;
const ANY: TlsNames = TlsNames::Any;

/// Far longer than any test: what fails within it fails by name, not by its deadline.
fn patient() -> TcpConfigFile {
    TcpConfigFile { handshake_ms: 600_000, ..config() }
}

fn node(name: &str, credentials: impl Into<Credentials>, bytes: usize) -> Node {
    node_with(name, patient(), bytes, credentials)
}

fn works(a: &mut Node, b: &mut Node) {
    let grant = b.grant(&a.peer, 0, 64);
    let post = a.post(&b.peer, grant, 0, 0, 0, 64);
    a.wait_posted(post).unwrap();
    b.transport.revoke(grant);
}

fn down(node: &mut Node) -> TransportError {
    match node.wait("Down", |event| matches!(event, Event::Down { .. })) {
        Event::Down { reason, .. } => reason,
        _ => unreachable!("the filter takes only Down"),
    }
}

/// Each case: what the dialler `a` and the listener `b` show and trust, what the dialler is told, and what the listener logs.
#[test]
fn who_does_not_belong_is_refused_by_name_on_both_sides() {
    log::listen();
    let member = |name: &str| -> Credentials { tls(name, &["authority"], ANY).into() };
    let named = |node: &str| -> Credentials { tls(node, &["authority"], TlsNames::Engine).into() };
    let with_key = |byte: u8| {
        let keys = Some(ClusterKey::new(&[byte; 32]).unwrap().into());
        Credentials::Tls { identity: tls("a", &["authority"], ANY), keys }
    };
    let strange = |node: &str, trusts: &[&str]| -> Credentials { tls(node, trusts, ANY).into() };
    for (case, dials, listens, told, logged) in [
        (
            "the dialler is another authority's",
            strange("a-other", &["authority", "other"]),
            member("b"),
            "our certificate",
            "its certificate is not from an authority of ours",
        ),
        (
            "the listener is another authority's",
            member("a"),
            strange("b-other", &["authority", "other"]),
            "its certificate is not from an authority of ours",
            "our certificate is not from an authority of its own",
        ),
        ("the dialler's time is over", member("expired"), member("b"), "our certificate", "expired"),
        ("the listener's time is over", member("a"), member("expired"), "expired", "our certificate has expired"),
        ("the dialler is called otherwise", member("b"), named("b"), "does not name this engine", ""),
        ("the listener is called otherwise", named("a"), member("a"), "does not name the engine b", ""),
        ("the dialler's key is another one", with_key(1), with_key(2), "key", "the proof is wrong"),
        ("only the dialler has a key", with_key(1), member("b"), "key", "the proof is wrong"),
        ("only the listener has a key", member("a"), with_key(1), "key", "the proof is wrong"),
        (
            "the dialler is plain",
            key().into(),
            member("b"),
            "it speaks TLS, and this node has no certificates",
            "what comes is not TLS",
        ),
        ("the listener is plain", member("a"), key().into(), "hung up before TLS was up", "it speaks TLS"),
    ] {
        let (mut a, mut b) = (node("a", dials, 64), node("b", listens, 64));
        a.transport.connect(&b.transport.local_address()).unwrap();
        let reason = down(&mut a).to_string();
        assert!(reason.contains(told), "{case}: {reason}");
        if !logged.is_empty() {
            b.wait_stats(case, |stats| stats.refused_peers > 0);
            log::wait(&["a peer was refused", logged]);
        }
        let (a, b) = (a.transport.stats(), b.transport.stats());
        assert_eq!((a.sessions_up, b.sessions_up), (0, 0), "{case}");
    }
}

#[test]
fn members_meet_whatever_lies_between_them_and_the_authority() {
    for (name, dials, listens) in [
        ("names are compared", tls("a", &["authority"], TlsNames::Engine), tls("b", &["authority"], TlsNames::Engine)),
        ("an authority below", tls("chained", &["authority"], TlsNames::Engine), tls("b", &["authority"], ANY)),
        ("two authorities", tls("a", &["authority", "other"], ANY), tls("b-other", &["other", "authority"], ANY)),
    ] {
        let (mut a, mut b) = (node("a", dials, 4096), node("b", listens, 4096));
        a.meet(&mut b);
        works(&mut a, &mut b);
        works(&mut b, &mut a);
        assert_eq!(b.transport.stats().refused_peers, 0, "{name}");
    }
}

/// As for keys: the new authority beside the old one everywhere, then the new certificates, then the new authority alone.
#[test]
fn a_cluster_changes_certificates_and_authority_while_sessions_go_on() {
    let both = ["authority", "other"];
    let mut a = node("a", tls("a", &["authority"], ANY), 4096);
    let mut b = node("b", tls("b", &["authority"], ANY), 4096);
    a.meet(&mut b);
    for (step, of_a, of_b) in [
        ("another certificate", tls("chained", &["authority"], ANY), tls("b", &["authority"], ANY)),
        ("both are trusted", tls("a", &both, ANY), tls("b", &both, ANY)),
        ("one has the new certificate", tls("a-other", &both, ANY), tls("b", &both, ANY)),
        ("both have it", tls("a-other", &both, ANY), tls("b-other", &both, ANY)),
        ("one trusts the new one alone", tls("a-other", &["other"], ANY), tls("b-other", &both, ANY)),
        ("both do", tls("a-other", &["other"], ANY), tls("b-other", &["other"], ANY)),
    ] {
        a.transport.set_credentials(of_a.into());
        b.transport.set_credentials(of_b.into());
        works(&mut a, &mut b); // what is up stays up
        b.transport.disconnect(&a.peer, "to prove itself anew");
        a.wait_down(&b.peer.clone());
        a.wait_up(&b.peer.clone());
        b.wait_up(&a.peer.clone());
        works(&mut a, &mut b);
        assert_eq!(b.transport.stats().refused_peers, 0, "{step}");
    }
    // Nothing is resumed: the old certificate has no way in.
    a.transport.set_credentials(tls("a", &both, ANY).into());
    works(&mut a, &mut b);
    b.transport.disconnect(&a.peer, "to prove itself anew");
    a.wait("a refusal", |event| matches!(event, Event::Down { reason: TransportError::Authentication { .. }, .. }));
    // Nor does a node fall back to keys.
    a.transport.set_credentials(key().into());
    a.drain();
    assert!(matches!(down(&mut a), TransportError::Authentication { .. }));
}

#[test]
fn a_bit_turned_or_a_cut_in_the_stream_lands_nothing_wrong_and_the_session_comes_back() {
    let mut b = node("b", tls("b", &["authority"], ANY), 4 * MIB);
    let mut a = node("a", tls("a", &["authority"], ANY), 4 * MIB);
    a.memory.fill(0, 4 * MIB, 0x5c);
    let proxy = Proxy::new(address(&b), ProxyPlan::default());
    a.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
    a.wait_up(&b.peer.clone());
    b.wait_up(&a.peer.clone());
    let mib = MIB as u64;
    for plan in [
        ProxyPlan { flip_at_byte: Some(mib), ..ProxyPlan::default() },
        ProxyPlan { flip_at_byte: Some(mib / 2 + 17), ..ProxyPlan::default() },
        ProxyPlan { cut_after_bytes: Some(mib), ..ProxyPlan::default() },
        ProxyPlan { cut_after_bytes: Some(100_003), ..ProxyPlan::default() },
    ] {
        // This session's connections are the ones that break.
        proxy.set_plan(plan);
        proxy.cut_all();
        a.wait_down(&b.peer.clone());
        b.wait_down(&a.peer.clone());
        a.wait_up(&b.peer.clone());
        b.wait_up(&a.peer.clone());
        proxy.set_plan(ProxyPlan::default());
        b.memory.fill(0, 4 * MIB, 0);
        let grant = b.grant(&a.peer, 0, 4 * mib);
        let post = a.post(&b.peer, grant, 0, 0, 0, 4 * mib);
        a.wait_posted(post).expect_err("the stream was broken");
        let Event::Down { reason, .. } = b.wait_down(&a.peer.clone()) else { unreachable!("wait_down gives Down") };
        assert!(matches!(reason, TransportError::Io { .. } | TransportError::Ended { .. }), "{plan:?}: {reason}");
        let landed = b.drain().into_iter().any(|event| matches!(event, Event::Landed { .. }));
        assert!(!landed, "{plan:?}");
        let bytes = b.memory.read(0, 4 * MIB);
        assert!(bytes.iter().all(|byte| matches!(byte, 0 | 0x5c)), "{plan:?}: neither the sender's nor what was there");
        a.wait_down(&b.peer.clone());
        a.wait_up(&b.peer.clone());
        b.wait_up(&a.peer.clone());
        works(&mut a, &mut b);
        a.drain();
        b.drain();
    }
}

/// Turned and cut at every stage of the TLS handshake and of ours: never a session, never a hang, and then all is well.
#[test]
fn a_handshake_broken_anywhere_fails_and_is_tried_again() {
    let mut b = node("b", tls("b", &["authority"], ANY), 4096);
    let mut broken = 0;
    for towards_dialler in [false, true] {
        for at in (3..1100).step_by(137) {
            for plan in [
                ProxyPlan { towards_dialler, flip_at_byte: Some(at), ..ProxyPlan::default() },
                ProxyPlan { towards_dialler, cut_after_bytes: Some(at), ..ProxyPlan::default() },
            ] {
                // A turned bit in a record's length makes its reader wait for more: there the deadline is the end.
                let file = TcpConfigFile { handshake_ms: 150, ..config() };
                let mut a = node_with("a", file, 64, tls("a", &["authority"], ANY));
                let proxy = Proxy::new(address(&b), plan);
                a.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
                match a.wait("an end", |event| matches!(event, Event::Up { .. } | Event::Down { .. })) {
                    Event::Down { .. } => broken += 1,
                    _ => proxy.cut_all(), // the handshake has fewer bytes
                }
                proxy.set_plan(ProxyPlan::default());
                a.wait_up(&b.peer.clone());
            }
        }
    }
    assert!(broken >= 30, "{broken} of 36 were broken");
    let mut a = node("z", tls("a", &["authority"], ANY), 4096);
    a.meet(&mut b);
    works(&mut a, &mut b);
}

/// Nothing else happens on the lane that could remind it of the records that it holds.
#[test]
fn records_that_the_socket_did_not_take_go_when_it_does() {
    let file = TcpConfigFile { lanes_same_host: 1, socket_buffer_bytes: Some(16 << 10), ..patient() };
    let mut a = node_with("a", file.clone(), 4 * MIB, tls("a", &["authority"], ANY));
    let mut b = node_with("b", file, 4 * MIB, tls("b", &["authority"], ANY));
    a.meet(&mut b);
    let grant = b.grant(&a.peer, 0, 4 * MIB as u64);
    for sequence in 0..8_u32 {
        a.memory.fill(0, 4 * MIB, sequence as u8 + 1);
        let bytes = 4 * MIB as u64 - u64::from(sequence) * 10_007;
        let post = a.post(&b.peer, grant, sequence, 0, 0, bytes);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        assert!(b.memory.is_all(0, bytes as usize, sequence as u8 + 1), "{sequence}");
    }
}

#[test]
fn what_is_carried_cannot_be_read_on_the_way() {
    const SECRET: &[u8] = b"what nobody on the way may read";
    for (credentials, is_seen) in [
        (tls("a", &["authority"], ANY).into(), false),
        (Credentials::from(key()), true), // the eavesdropper has ears
    ] {
        let mut b = node("b", credentials.clone(), 64 << 10);
        let mut a = node("a", credentials, 64 << 10);
        a.memory.fill(0, 64 << 10, 0xa5);
        let tap = Tap::new(address(&b));
        a.transport.connect(&PeerAddress::Tcp(tap.address)).unwrap();
        a.wait_up(&b.peer);
        b.wait_up(&a.peer);
        a.transport.send(&b.peer, Bytes::from_static(SECRET)).unwrap();
        b.wait("Message", |event| matches!(event, Event::Message { .. }));
        let grant = b.grant(&a.peer, 0, 64 << 10);
        let post = a.post(&b.peer, grant, 0, 0, 0, 64 << 10);
        a.wait_posted(post).unwrap();
        assert!(b.memory.is_all(0, 64 << 10, 0xa5));
        let heard = tap.heard.lock().unwrap();
        for (what, words) in [("a message", SECRET), ("payload", &[0xa5; 32]), ("who dials", b"I am a")] {
            let seen = heard.iter().any(|said| said.windows(words.len()).any(|window| window == words));
            assert_eq!(seen, is_seen, "{what}");
        }
    }
}

#[test]
fn a_member_in_the_middle_cannot_pass_a_handshake_from_one_channel_to_another() {
    log::listen();
    for keys in [None, Some(ClusterKeys::from(key()))] {
        let credentials =
            |name: &str| Credentials::Tls { identity: tls(name, &["authority"], ANY), keys: keys.clone() };
        let b = node("b", credentials("b"), 64);
        let mut a = node("a", credentials("a"), 64);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        a.transport.connect(&PeerAddress::Tcp(listener.local_addr().unwrap())).unwrap();
        // It has certificates of its own, so both take it for the other, and it reads all that is said.
        let mut near = server(listener.accept().unwrap().0);
        let mut far = client(address(&b));
        let mut said = [0; 48];
        near.read_exact(&mut said).unwrap();
        assert_eq!(&said[..4], b"KVFY");
        far.write_all(&said).unwrap();
        far.read_exact(&mut said).unwrap();
        near.write_all(&said).unwrap();
        near.read_exact(&mut said[..32]).unwrap();
        far.write_all(&said[..32]).unwrap();
        assert_eq!(far.read(&mut said).unwrap_or(0), 0, "the proof was taken");
        drop(near);
        let reason = down(&mut a);
        assert!(matches!(reason, TransportError::Authentication { .. }), "{reason}");
        assert_eq!((b.transport.stats().refused_peers, b.transport.stats().sessions_up), (1, 0));
    }
}

#[test]
fn a_data_lane_of_one_session_is_of_no_use_in_another() {
    let mut b = node("b", tls("b", &["authority"], ANY), 64);
    let open = |name: &str| {
        let mut control = client(address(&b));
        let dialler = dialler(&control, Introduction::Peer(identity(name)));
        let established = shake(&mut control, dialler).unwrap().unwrap();
        let Verdict::Peer(theirs) = established.verdict else { panic!("no session") };
        (control, theirs.session, established.lane_secret)
    };
    let (_control, session, secret) = open("c");
    let (_other_control, other_session, other_secret) = open("other");
    let lane = |session: u64, secret: &kvferry_protocol::wire::LaneSecret| {
        let mut data = client(address(&b));
        let introduction = Introduction::Lane { session, lane: 0, secret: secret.clone() };
        let dialler = dialler(&data, introduction);
        shake(&mut data, dialler).unwrap().map(|_| data)
    };
    for (session, secret) in [(session, &other_secret), (other_session, &secret), (session ^ 1, &secret)] {
        let refused = lane(session, secret).unwrap_err();
        assert_eq!(refused, HandshakeError::Declined(Declined::UnknownSession));
    }
    // The teeth: with their own secrets they are taken.
    let lanes = (lane(session, &secret).unwrap(), lane(other_session, &other_secret).unwrap());
    b.wait_up(&peer("c", 1));
    b.wait_up(&peer("other", 1));
    drop(lanes);
}

#[test]
fn a_stranger_without_a_certificate_and_garbage_make_no_session_and_do_no_harm() {
    log::listen();
    let mut b = node("b", tls("b", &["authority"], ANY), 64);
    let mut refused = 0;
    // TLS, but no certificate.
    let mut stream = StreamOwned::new(
        ClientConnection::new(Arc::new(anonymous()), ServerName::try_from("b").unwrap()).unwrap(),
        stream_to(address(&b)),
    );
    let _ = stream.write_all(&[0; 48]);
    let error = stream.read(&mut [0]).unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    refused += 1;
    b.wait_stats("it is counted", |stats| stats.refused_peers == refused);
    log::wait(&["a peer was refused", "a certificate is missing"]);
    // Garbage, some of which begins as a TLS record does.
    let mut noise = 0x1234_5678_u32;
    for length in [1, 5, 6, 47, 300, 5000, 100_000] {
        for prefix in [&[][..], &[0x16, 3, 1, 2, 0, 1], &[0x17, 3, 3, 0x40, 0], &[0x15, 3, 3, 0, 2, 2, 40]] {
            let mut bytes: Vec<u8> = prefix.to_vec();
            bytes.extend((0..length).map(|_| {
                noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (noise >> 24) as u8
            }));
            let mut stream = stream_to(address(&b));
            // The other side may be done with us before all is sent.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.len() < 64, "more than an alert: {} bytes", answer.len());
            refused += 1;
        }
    }
    // Garbage of a member, inside TLS, where a hello belongs.
    for length in [48, 49, 4096] {
        let mut stream = client(address(&b));
        stream.write_all(&vec![0x5a; length]).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        refused += 1;
    }
    b.wait_stats("all are counted", |stats| stats.refused_peers == refused);
    assert!(b.drain().is_empty(), "strangers make no events");
    let mut a = node("a", tls("a", &["authority"], ANY), 64);
    a.meet(&mut b);
}

#[test]
fn strangers_that_say_nothing_are_let_go() {
    let limit = 4;
    let file = TcpConfigFile { max_unauthenticated: limit, handshake_ms: 300, ..config() };
    let mut b = node_with("b", file, 64, tls("b", &["authority"], ANY));
    let silent: Vec<TcpStream> = (0..limit).map(|_| stream_to(address(&b))).collect();
    for mut stream in silent {
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "hung up at the deadline");
    }
    let mut a = node("a", tls("a", &["authority"], ANY), 64);
    a.meet(&mut b);
}

#[test]
fn descriptors_cross_beside_encrypted_lanes() {
    let file = TcpConfigFile { paths: vec![PathKind::SharedMemory, PathKind::UnixSocket], ..patient() };
    let mut a = node_with("a", file.clone(), 4096, tls("a", &["authority"], ANY));
    let mut b = node_with("b", file, 4096, tls("b", &["authority"], ANY));
    a.transport.connect(&b.transport.local_address()).unwrap();
    let Event::Up { path, .. } = a.wait_up(&b.peer.clone()) else { unreachable!("wait_up gives Up") };
    assert_eq!(path.kind, PathKind::SharedMemory, "{path:?}");
    b.wait_up(&a.peer.clone());
    // What is registered is shared at some moment; from then on it is lent.
    let mut sequence = 0;
    let grant = b.grant(&a.peer, 0, 64);
    while a.transport.stats().lent_bytes == 0 {
        let post = a.post(&b.peer, grant, sequence, 0, 0, 64);
        a.wait_posted(post).unwrap();
        sequence += 1;
        assert!(sequence < 100_000, "nothing is ever lent");
    }
}

#[test]
fn a_path_that_is_not_encrypted_has_to_be_allowed() {
    let bind = |plain_payload, credentials: Credentials| {
        let paths = vec![PathKind::Ucx, PathKind::Tcp];
        let ucx = UcxConfigFile::default();
        let file = TcpConfigFile { paths, plain_payload, ucx, ..config() };
        Tcp::bind(TcpConfig::try_from(file).unwrap(), credentials, peer("a", 1), Bytes::new())
    };
    let identity = || tls("a", &["authority"], ANY).into();
    let Err(error) = bind(false, identity()) else { panic!("payload would go in the clear") };
    assert!(matches!(error, TransportError::Plain { path: "ucx" }), "{error}");
    bind(true, identity()).unwrap();
    bind(false, key().into()).unwrap();
}

#[test]
fn what_cannot_be_used_is_named() {
    let (certificate, key) = node_pem("a");
    let authority = authority_pem(&["authority"]);
    let good = TlsPem { certificate, key, authority: &authority, names: ANY };
    TlsIdentity::new(&good).unwrap();
    let torn = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (name, pem, want) in [
        ("no certificate", TlsPem { certificate: b"", ..good }, "the certificate: there is none"),
        ("a torn certificate", TlsPem { certificate: torn, ..good }, "the certificate:"),
        ("no key", TlsPem { key: b"", ..good }, "the private key:"),
        ("another's key", TlsPem { key: node_pem("b").1, ..good }, "the private key:"),
        ("no authority", TlsPem { authority: b"", ..good }, "the authority: there is none"),
        ("a torn authority", TlsPem { authority: torn, ..good }, "the authority:"),
    ] {
        let error: TlsError = TlsIdentity::new(&pem).unwrap_err();
        assert!(error.to_string().contains(want), "{name}: {error}");
    }
    let shown = format!("{:?}", Credentials::from(TlsIdentity::new(&good).unwrap()));
    assert!(!shown.to_lowercase().contains("key: ["), "{shown}");
}

/// Copies what it hears of every connection.
struct Tap {
    address: SocketAddr,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Tap {
    fn new(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&heard);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { return };
                for (mut from, mut to) in [
                    (near.try_clone().unwrap(), far.try_clone().unwrap()),
                    (far.try_clone().unwrap(), near.try_clone().unwrap()),
                ] {
                    let all = Arc::clone(&all);
                    let number = {
                        let mut all = all.lock().unwrap();
                        all.push(Vec::new());
                        all.len() - 1
                    };
                    std::thread::spawn(move || {
                        let mut buffer = vec![0; 64 << 10];
                        while let Ok(got @ 1..) = from.read(&mut buffer) {
                            all.lock().unwrap()[number].extend_from_slice(&buffer[..got]);
                            if to.write_all(&buffer[..got]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, heard }
    }
}

fn anonymous() -> ClientConfig {
    let mut config = client_config().with_no_client_auth();
    config.alpn_protocols = vec![b"kvferry".to_vec()];
    config
}

/// The certificate of `b`, over a connection that was accepted.
fn server(stream: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    let (chain, key) = chain("b");
    let provider = Arc::new(rustls_graviola::default_provider());
    let verifier =
        rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots()), Arc::clone(&provider));
    let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder.unwrap().with_client_cert_verifier(verifier.build().unwrap());
    let mut config = builder.with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"kvferry".to_vec()];
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), stream)
}
