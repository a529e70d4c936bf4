//! Mutual TLS on every lane: certificates, what is checked of them, and the channel that a lane's bytes go through.
//!
//! TLS 1.3 alone, and no session is resumed, so what an authority or a certificate is replaced by holds for every new lane. Both
//! sides show a certificate of the cluster's own authority. Inside the channel the usual handshake takes place, under keys that
//! are bound to this channel by its exporter; with a pre-shared key, too, if there is one.
//!
//! The cryptography is graviola's: assembly with proofs for the arithmetic, in Rust sources, so that no C compiler is needed. It
//! asks for instructions that x86-64 has had since about 2015 and most ARM servers have; without them [`TlsError::Processor`] is
//! the end of it, at the start and not in the middle.

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod channel;
mod error;
#[cfg(feature = "tls")]
mod identity;
#[cfg(feature = "tls")]
mod provider;
#[cfg(feature = "tls")]
mod verify;

#[cfg(not(feature = "tls"))]
pub(crate) use absent::Channel;
#[cfg(not(feature = "tls"))]
pub use absent::TlsIdentity;
#[cfg(feature = "tls")]
pub(crate) use channel::Channel;
pub use error::TlsError;
#[cfg(feature = "tls")]
pub use identity::TlsIdentity;

/// What a node shows, and what it asks of others: PEM texts, as they stand in files.
#[derive(Clone, Copy, Debug)]
pub struct TlsPem<'a> {
    /// This node's certificate, and those between it and the authority.
    pub certificate: &'a [u8],
    /// Its private key: PKCS #8, SEC 1 or PKCS #1.
    pub key: &'a [u8],
    /// The certificates of the cluster's own authorities: several while one is replaced. Whoever has a certificate of one of them
    /// is a member of the cluster, so no public authority belongs here.
    pub authority: &'a [u8],
    /// What a certificate must say of its holder.
    pub names: TlsNames,
}

/// Which names of a certificate are compared, and with what. Addresses never are: a cluster needs no DNS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TlsNames {
    /// None: a certificate of the authority admits, whatever its holder calls itself.
    #[default]
    Any,
    /// A DNS name among the certificate's alternative names (a wildcard for a whole label counts) must be the engine id that the
    /// peer says it has. Then no node can pass for another engine.
    Engine,
}

/// One word of what is wrong with a channel, for both ends of an `io::Error`.
#[cfg(feature = "tls")]
#[derive(Debug, thiserror::Error)]
#[error("TLS: {0}")]
struct Broken(String);
