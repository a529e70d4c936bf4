//! A node's certificates, ready for new lanes.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::channel::Channel;
use super::error::TlsError;
use super::provider::provider;
use super::verify::Members;
use super::{TlsNames, TlsPem};

/// What is spoken inside: a certificate of the same authority that some other server shows is of no use here, nor ours there.
pub(super) const PROTOCOL: &[u8] = b"kvferry";

/// A node's certificates and the authority that it trusts, checked and ready.
#[derive(Clone)]
pub struct TlsIdentity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    names: TlsNames,
}

impl TlsIdentity {
    /// Reads PEM texts.
    ///
    /// # Errors
    /// [`TlsError`] that names the text that cannot be used, or what the processor lacks.
    pub fn new(pem: &TlsPem<'_>) -> Result<Self, TlsError> {
        let provider = provider()?;
        let chain = certificates(pem.certificate).map_err(|problem| TlsError::Certificate { problem })?;
        let broken_key = |problem: String| TlsError::Key { problem };
        let key = PrivateKeyDer::from_pem_slice(pem.key).map_err(|error| broken_key(error.to_string()))?;
        let broken_authority = |problem: String| TlsError::Authority { problem };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(pem.authority).map_err(broken_authority)? {
            roots.add(certificate).map_err(|error| broken_authority(error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let of_chain = |error: rustls::Error| match error {
            rustls::Error::InvalidCertificate(error) => TlsError::Certificate { problem: error.to_string() },
            error => broken_key(error.to_string()),
        };

        let members = Arc::new(Members::new(Arc::clone(&roots), Arc::clone(&provider)));
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13]);
        let client = client.map_err(|error| broken_key(error.to_string()))?;
        let client = client.dangerous().with_custom_certificate_verifier(members);
        let mut client = client.with_client_auth_cert(chain.clone(), key.clone_key()).map_err(of_chain)?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.resumption = Resumption::disabled();
        client.enable_sni = false;

        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let verifier = verifier.build().map_err(|error| broken_authority(error.to_string()))?;
        let server = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let server = server.map_err(|error| broken_key(error.to_string()))?;
        let server = server.with_client_cert_verifier(verifier);
        let mut server = server.with_single_cert(chain, key).map_err(of_chain)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;

        Ok(Self { client: Arc::new(client), server: Arc::new(server), names: pem.names })
    }

    /// The dialling end of a channel.
    pub(crate) fn dial(&self) -> io::Result<Channel> {
        // Peers are not known by addresses; the name is neither sent nor compared.
        let nobody = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        let connection = ClientConnection::new(Arc::clone(&self.client), nobody).map_err(io::Error::other)?;
        Ok(Channel::new(Connection::Client(connection), self.names))
    }

    /// The listening end of a channel.
    pub(crate) fn accept(&self) -> io::Result<Channel> {
        let connection = ServerConnection::new(Arc::clone(&self.server)).map_err(io::Error::other)?;
        Ok(Channel::new(Connection::Server(connection), self.names))
    }
}

impl fmt::Debug for TlsIdentity {
    /// Shows nothing of the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").field("names", &self.names).finish_non_exhaustive()
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| error.to_string())?;
    if read.is_empty() { Err("there is none in the file".to_owned()) } else { Ok(read) }
}
