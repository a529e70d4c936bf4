//! Certificates of the tests; `tls/make.sh` made them. Their keys are public.

use crate::tls::{TlsIdentity, TlsNames, TlsPem};

macro_rules! pem {
    ($($name:literal),+) => {
        fn certificate(name: &str) -> (&'static [u8], &'static [u8]) {
            match name {
                $($name => (
                    include_bytes!(concat!("tls/", $name, ".pem")), include_bytes!(concat!("tls/", $name, ".key.pem"))
                ),)+
                other => panic!("there is no certificate called {other}"),
            }
        }
    };
}

pem!("a", "b", "a-other", "b-other", "chained", "expired");

/// The PEM texts of a node: certificate and key.
///
/// # Panics
/// If there is no node of that name.
#[must_use]
pub fn node_pem(node: &str) -> (&'static [u8], &'static [u8]) {
    certificate(node)
}

/// The PEM text of authorities, `authority` or `other`.
///
/// # Panics
/// If there is no authority of that name.
#[must_use]
pub fn authority_pem(names: &[&str]) -> Vec<u8> {
    let one = |name: &&str| -> &'static [u8] {
        match *name {
            "authority" => include_bytes!("tls/authority.pem"),
            "other" => include_bytes!("tls/other.pem"),
            other => panic!("there is no authority called {other}"),
        }
    };
    names.iter().map(one).collect::<Vec<_>>().concat()
}

/// What the node `node` shows, when it trusts these authorities.
///
/// # Panics
/// If the processor cannot do TLS.
#[must_use]
pub fn tls(node: &str, authorities: &[&str], names: TlsNames) -> TlsIdentity {
    let (certificate, key) = node_pem(node);
    let authority = authority_pem(authorities);
    TlsIdentity::new(&TlsPem { certificate, key, authority: &authority, names }).expect("the certificates can be used")
}
