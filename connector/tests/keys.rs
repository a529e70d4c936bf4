//! The cluster's key, or a node's certificates, are changed in their files, and the endpoint takes the new ones without a restart.

mod common;

use std::time::{Duration, Instant};

use common::PATIENCE;
use kvferry::config::{ConnectorConfig, RawConfig};
use kvferry::open_transport;
use kvferry_protocol::Incarnation;
use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::testing::certificates::{authority_pem, node_pem, tls};
use kvferry_transport::tls::TlsNames;
use kvferry_transport::{Credentials, Event, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError};

/// Dials until a session is up, or fails to be as it should; each attempt is an endpoint of its own.
fn dial(credentials: impl Into<Credentials>, to: &dyn Transport, number: u64) -> Result<(), TransportError> {
    let file = TcpConfigFile { redial_first_ms: 2, redial_longest_ms: 20, ..TcpConfigFile::default() };
    let peer = kvferry_transport::testing::peer("dialler", number);
    let config = TcpConfig::try_from(file).unwrap();
    let dialler = Tcp::bind(config, credentials, peer, bytes::Bytes::new()).unwrap();
    dialler.connect(&to.local_address()).unwrap();
    let mut events = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        dialler.poll(&mut events, Duration::from_millis(20));
        for event in events.drain(..) {
            match event {
                Event::Up { .. } => return Ok(()),
                Event::Down { reason, .. } => return Err(reason),
                _ => {}
            }
        }
    }
    panic!("neither up nor refused")
}

#[test]
fn a_key_that_is_changed_in_its_file_is_taken_without_a_restart() {
    let folder = std::env::temp_dir().join(format!("kvferry-keys-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (own, also) = (folder.join("own"), folder.join("also"));
    let [old, new, third] =
        ["the old key of the cluster", "the new key of the cluster, longer", "some third key of 16+"];
    std::fs::write(&own, old).unwrap();
    std::fs::write(&also, third).unwrap();
    let toml = format!("engine_id = 'a'\nrole = 'both'\npsk_file = {own:?}\npsk_also_file = {also:?}");
    let config = ConnectorConfig::try_from((RawConfig::from_toml(&toml).unwrap(), Incarnation::new(1))).unwrap();
    let listener = open_transport(&config, bytes::Bytes::new()).unwrap();
    let mut number = 0;
    let mut try_key = |key: &str| {
        number += 1;
        dial(ClusterKey::new(key.as_bytes()).unwrap(), &*listener, number)
    };
    try_key(old).unwrap();
    try_key(third).unwrap();
    assert!(matches!(try_key(new), Err(TransportError::Authentication { .. })));
    std::fs::write(&own, new).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while try_key(new).is_err() {
        assert!(Instant::now() < deadline, "the new key is not taken");
    }
    try_key(third).unwrap();
    std::fs::write(&also, "\n").unwrap();
    while try_key(third).is_ok() {
        assert!(Instant::now() < deadline, "the third key is still taken");
    }
    try_key(new).unwrap();
    assert!(matches!(try_key(old), Err(TransportError::Authentication { .. })));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The listener's certificates, one file after the other, as an operator does it; each dialler shows and trusts what it is given.
#[test]
fn certificates_that_are_changed_in_their_files_are_taken_without_a_restart() {
    let folder = std::env::temp_dir().join(format!("kvferry-certificates-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [certificate, key, authority] = ["certificate", "key", "authority"].map(|name| folder.join(name));
    let write_node = |node: &str| {
        let (chain, secret) = node_pem(node);
        std::fs::write(&certificate, chain).unwrap();
        std::fs::write(&key, secret).unwrap();
    };
    write_node("b");
    std::fs::write(&authority, authority_pem(&["authority"])).unwrap();
    let toml = format!(
        "engine_id = 'b'\nrole = 'both'\ntls_certificate_file = {certificate:?}\ntls_key_file = {key:?}\n\
         tls_authority_file = {authority:?}"
    );
    let config = ConnectorConfig::try_from((RawConfig::from_toml(&toml).unwrap(), Incarnation::new(1))).unwrap();
    let listener = open_transport(&config, bytes::Bytes::new()).unwrap();
    let mut number = 100;
    let mut try_node = |node: &str, trusts: &[&str]| {
        number += 1;
        dial(tls(node, trusts, TlsNames::Any), &*listener, number)
    };
    let deadline = Instant::now() + PATIENCE;
    let both = ["authority", "other"];
    try_node("a", &["authority"]).unwrap();
    assert!(matches!(try_node("a-other", &both), Err(TransportError::Authentication { .. })));
    // A text that is none changes nothing.
    std::fs::write(&authority, "-----BEGIN CERTIFICATE-----\n").unwrap();
    try_node("a", &["authority"]).unwrap();
    std::fs::write(&authority, authority_pem(&both)).unwrap();
    while try_node("a-other", &both).is_err() {
        assert!(Instant::now() < deadline, "the new authority is not trusted");
    }
    write_node("b-other");
    while try_node("a-other", &["other"]).is_err() {
        assert!(Instant::now() < deadline, "the new certificate is not shown");
    }
    try_node("a", &both).unwrap();
    std::fs::write(&authority, authority_pem(&["other"])).unwrap();
    while try_node("a", &both).is_ok() {
        assert!(Instant::now() < deadline, "the old authority is still trusted");
    }
    try_node("a-other", &["other"]).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}
