//! Proofs: who holds the cluster's key may speak.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::wire::error::ClusterKeyError;

/// Bytes of one proof or seal.
pub(crate) const PROOF_BYTES: usize = 32;

/// A secret that all engines of one cluster share.
#[derive(Clone)]
pub struct ClusterKey(Vec<u8>);

impl ClusterKey {
    /// The shortest key, in bytes.
    pub const MIN_BYTES: usize = 16;
    /// The longest key, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Checks the length and wraps the bytes.
    ///
    /// # Errors
    /// [`ClusterKeyError`] if there are too few or too many.
    pub fn new(bytes: &[u8]) -> Result<Self, ClusterKeyError> {
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&bytes.len()) {
            return Err(ClusterKeyError { found: bytes.len() });
        }
        Ok(Self(bytes.to_vec()))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ClusterKey {
    /// Shows nothing of the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

/// The keys that an endpoint holds: the one by which it proves itself when it dials, and others that it takes from diallers, too,
/// while a cluster changes its key. First every engine is given the new key as another one, then as its own, then without the old.
#[derive(Clone, Debug)]
pub struct ClusterKeys {
    own: ClusterKey,
    also: Vec<ClusterKey>,
}

impl ClusterKeys {
    /// The most other keys.
    pub const MAX_OTHERS: usize = 3;

    /// One key of its own and others; those over [`MAX_OTHERS`](Self::MAX_OTHERS) are left out.
    #[must_use]
    pub fn new(own: ClusterKey, mut also: Vec<ClusterKey>) -> Self {
        also.truncate(Self::MAX_OTHERS);
        Self { own, also }
    }

    /// The key to dial with.
    #[must_use]
    pub fn own(&self) -> &ClusterKey {
        &self.own
    }

    fn all(&self) -> impl Iterator<Item = &ClusterKey> {
        std::iter::once(&self.own).chain(&self.also)
    }
}

impl ClusterKeys {
    /// The keys of a handshake inside an encrypted channel: a proof that is heard in one channel is of no use in another.
    #[must_use]
    pub fn within(&self, channel: &ChannelSecret) -> Self {
        let bound = |key: &ClusterKey| ClusterKey(channel.mac(key.bytes()).to_vec());
        Self { own: bound(&self.own), also: self.also.iter().map(bound).collect() }
    }

    /// The same where the channel's certificates are all that the two have in common.
    #[must_use]
    pub fn of_channel(channel: &ChannelSecret) -> Self {
        ClusterKey(channel.mac(&[]).to_vec()).into()
    }
}

/// What only the two ends of one encrypted channel know: of TLS the exporter with the label [`LABEL`](Self::LABEL)
/// (RFC 8446, 7.5), without a context. A handshake inside the channel is bound to it.
#[derive(Clone)]
pub struct ChannelSecret([u8; PROOF_BYTES]);

impl ChannelSecret {
    /// The exporter's label.
    pub const LABEL: &[u8] = b"EXPORTER-kvferry-handshake";

    /// Wraps what the exporter gave.
    #[must_use]
    pub fn new(exported: [u8; 32]) -> Self {
        Self(exported)
    }

    fn mac(&self, key: &[u8]) -> [u8; PROOF_BYTES] {
        mac(&self.0, &[b"kvferry channel", key]).finalize().into_bytes().into()
    }
}

impl fmt::Debug for ChannelSecret {
    /// Shows nothing of the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChannelSecret(..)")
    }
}

impl From<ClusterKey> for ClusterKeys {
    fn from(own: ClusterKey) -> Self {
        Self::new(own, Vec::new())
    }
}

/// What binds a session's data lanes to its control lane; derived on both sides, never sent.
#[derive(Clone)]
pub struct LaneSecret(pub(crate) [u8; PROOF_BYTES]);

impl fmt::Debug for LaneSecret {
    /// Shows nothing of the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneSecret(..)")
    }
}

impl LaneSecret {
    /// Whether `binding` shows that the dialler of a data lane holds this secret. Takes the same time for every wrong binding.
    pub(crate) fn verify(&self, seal: &SealKey, session: u64, lane: u16, binding: &[u8; PROOF_BYTES]) -> bool {
        self.lane_mac(seal, session, lane).verify_slice(binding).is_ok()
    }

    pub(crate) fn binding(&self, seal: &SealKey, session: u64, lane: u16) -> [u8; PROOF_BYTES] {
        self.lane_mac(seal, session, lane).finalize().into_bytes().into()
    }

    fn lane_mac(&self, seal: &SealKey, session: u64, lane: u16) -> Hmac<Sha256> {
        mac(&self.0, &[b"kvferry lane", &seal.0, &session.to_le_bytes(), &lane.to_le_bytes()])
    }
}

/// What seals the identity and the verdict of one handshake.
#[derive(Clone)]
pub(crate) struct SealKey([u8; PROOF_BYTES]);

impl SealKey {
    pub(crate) fn seal(&self, label: &[u8], bytes: &[u8]) -> [u8; PROOF_BYTES] {
        mac(&self.0, &[label, bytes]).finalize().into_bytes().into()
    }

    /// Whether the seal is right. Takes the same time for every wrong seal.
    pub(crate) fn verify(&self, label: &[u8], bytes: &[u8], seal: &[u8]) -> bool {
        mac(&self.0, &[label, bytes]).verify_slice(seal).is_ok()
    }

    pub(crate) fn lane_secret(&self) -> LaneSecret {
        LaneSecret(mac(&self.0, &[b"kvferry lanes"]).finalize().into_bytes().into())
    }
}

/// All that was said so far; every part has a fixed size, so the parts cannot be confused.
#[derive(Clone)]
pub(crate) struct Transcript(Vec<u8>);

impl Transcript {
    pub(crate) fn new(hello: &[u8]) -> Self {
        Self(hello.to_vec())
    }

    pub(crate) fn add(&mut self, said: &[u8]) {
        self.0.extend_from_slice(said);
    }

    pub(crate) fn proof(&self, key: &ClusterKey, label: &[u8]) -> [u8; PROOF_BYTES] {
        mac(key.bytes(), &[label, &self.0]).finalize().into_bytes().into()
    }

    /// Whether the proof is right. Takes the same time for every wrong proof.
    pub(crate) fn verify(&self, key: &ClusterKey, label: &[u8], proof: &[u8]) -> bool {
        mac(key.bytes(), &[label, &self.0]).verify_slice(proof).is_ok()
    }

    /// Which of the keys a proof is right under. Takes the same time for every wrong proof.
    pub(crate) fn prover<'a>(&self, keys: &'a ClusterKeys, label: &[u8], proof: &[u8]) -> Option<&'a ClusterKey> {
        keys.all().filter(|key| self.verify(key, label, proof)).fold(None, |_, key| Some(key))
    }

    pub(crate) fn seal_key(&self, key: &ClusterKey) -> SealKey {
        SealKey(self.proof(key, b"kvferry session"))
    }
}

pub(crate) const DIALLER_PROOF: &[u8] = b"kvferry dialler";
pub(crate) const LISTENER_PROOF: &[u8] = b"kvferry listener";
pub(crate) const IDENTITY_SEAL: &[u8] = b"kvferry identity";
pub(crate) const VERDICT_SEAL: &[u8] = b"kvferry verdict";

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // The only error is a key of an impossible length, and HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_in_one_channel_is_none_in_another() {
        let keys: ClusterKeys = ClusterKey::new(&[1; 32]).unwrap().into();
        let [here, there] = [2, 3].map(|byte| ChannelSecret::new([byte; 32]));
        let said = Transcript::new(b"hello");
        for (name, of) in [
            ("with a key", &|channel: &ChannelSecret| keys.within(channel)),
            ("without one", &|channel: &ChannelSecret| ClusterKeys::of_channel(channel)),
        ] as [(&str, &dyn Fn(&ChannelSecret) -> ClusterKeys); 2]
        {
            let proof = said.proof(of(&here).own(), DIALLER_PROOF);
            assert!(said.prover(&of(&here), DIALLER_PROOF, &proof).is_some(), "{name}");
            for other in [of(&there), keys.clone()] {
                assert!(said.prover(&other, DIALLER_PROOF, &proof).is_none(), "{name}");
            }
        }
        let proof = said.proof(keys.within(&here).own(), DIALLER_PROOF);
        assert!(said.prover(&ClusterKeys::of_channel(&here), DIALLER_PROOF, &proof).is_none());
        assert_eq!(format!("{here:?}"), "ChannelSecret(..)");
    }

    #[test]
    fn a_key_is_checked_where_it_enters_and_never_shown() {
        for (bytes, fits) in [(0, false), (15, false), (16, true), (64, true), (65, false)] {
            assert_eq!(ClusterKey::new(&vec![7; bytes]).is_ok(), fits, "{bytes}");
        }
        assert_eq!(format!("{:?}", ClusterKey::new(&[0x41; 16]).unwrap()), "ClusterKey(..)");
    }

    #[test]
    fn hmac_is_the_one_of_rfc_4231() {
        let got: [u8; 32] = mac(&[0x0b; 20], &[b"Hi ", b"There"]).finalize().into_bytes().into();
        assert_eq!(got[..8], [0xb0, 0x34, 0x4c, 0x61, 0xd8, 0xdb, 0x38, 0x53], "test case 1");
    }
}
