//! Who is a member of the cluster, and which engine a certificate names.

use std::sync::Arc;

use kvferry_protocol::EngineId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{DigitallySignedStruct, Error, PeerIncompatible, RootCertStore, SignatureScheme};

/// Takes a listener's certificate if one of the authorities signed it and it is in force; looks at no name. The engine that it
/// names is compared when the peer has said which it is ([`names`]).
#[derive(Debug)]
pub(super) struct Members {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl Members {
    pub(super) fn new(roots: Arc<RootCertStore>, provider: Arc<CryptoProvider>) -> Self {
        Self { roots, provider }
    }
}

impl ServerCertVerifier for Members {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Whether a certificate has the engine's id among its alternative DNS names.
pub(super) fn names(certificate: &CertificateDer<'_>, engine: &EngineId) -> bool {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
    match ServerName::try_from(engine.as_str()) {
        // An id such as `10.0.0.7` would be compared as an address.
        Ok(name @ ServerName::DnsName(_)) => verify_server_name(&parsed, &name).is_ok(),
        _ => false,
    }
}
