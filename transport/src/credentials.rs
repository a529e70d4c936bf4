//! By what an endpoint and its peers prove themselves.

use kvferry_protocol::wire::{ChannelSecret, ClusterKey, ClusterKeys};

use crate::tls::TlsIdentity;

/// By what an endpoint and its peers prove themselves; the same kind on all nodes of a cluster.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// Who holds the key is a member. What is carried is neither hidden nor protected from somebody inside the network path.
    Keys(ClusterKeys),
    /// Every lane goes through mutual TLS: who has a certificate of the cluster's authority is a member, and, if there are keys,
    /// too, holds one of them.
    Tls {
        /// What this node shows, and whom it trusts.
        identity: TlsIdentity,
        /// Keys beside the certificates.
        keys: Option<ClusterKeys>,
    },
}

impl Credentials {
    /// Whether lanes are encrypted.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.tls().is_some()
    }

    pub(crate) fn tls(&self) -> Option<&TlsIdentity> {
        match self {
            Self::Keys(_) => None,
            Self::Tls { identity, .. } => Some(identity),
        }
    }

    /// The keys of a handshake inside a channel, or without one. `None` if there is no channel where there has to be one, or the
    /// other way round.
    pub(crate) fn keys(&self, channel: Option<&ChannelSecret>) -> Option<ClusterKeys> {
        match (self, channel) {
            (Self::Keys(keys), None) => Some(keys.clone()),
            (Self::Tls { keys: Some(keys), .. }, Some(channel)) => Some(keys.within(channel)),
            (Self::Tls { keys: None, .. }, Some(channel)) => Some(ClusterKeys::of_channel(channel)),
            (Self::Keys(_), Some(_)) | (Self::Tls { .. }, None) => None,
        }
    }
}

impl From<ClusterKeys> for Credentials {
    fn from(keys: ClusterKeys) -> Self {
        Self::Keys(keys)
    }
}

impl From<ClusterKey> for Credentials {
    fn from(key: ClusterKey) -> Self {
        Self::Keys(key.into())
    }
}

impl From<TlsIdentity> for Credentials {
    fn from(identity: TlsIdentity) -> Self {
        Self::Tls { identity, keys: None }
    }
}
