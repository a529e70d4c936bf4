//! What can be wrong with certificates before anybody is spoken to.

/// Why certificates cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// This build has no TLS.
    #[error("this build has no TLS: build it with the cargo feature `tls`")]
    NotBuilt,
    /// The processor lacks instructions.
    #[error("TLS needs a processor with {missing}: use a pre-shared key on a private network instead")]
    Processor {
        /// Which ones.
        missing: &'static str,
    },
    /// The certificate chain cannot be read.
    #[error("the certificate: {problem}; it is a chain in PEM, this node's own first")]
    Certificate {
        /// What is wrong.
        problem: String,
    },
    /// The private key cannot be read, or is another certificate's.
    #[error("the private key: {problem}; it is the certificate's own, in PEM, not encrypted")]
    Key {
        /// What is wrong.
        problem: String,
    },
    /// The authorities cannot be read.
    #[error("the authority: {problem}; it is one certificate or several in PEM")]
    Authority {
        /// What is wrong.
        problem: String,
    },
}
