//! The handshake as two machines that see only bytes and the time.
//!
//! Dialler: `Challenge -> ListenerProof -> VerdictPrefix -> Verdict -> Over`.
//! Listener: `Hello -> DiallerProof -> IdentityPrefix -> Identity -> Judge -> Over`.
//!
//! A driver reads exactly [`wants`](Dialler::wants) bytes, feeds them, writes what [`poll_output`](Dialler::poll_output)
//! gives, and fails the handshake at [`poll_timeout`](Dialler::poll_timeout). Reading no more than wanted leaves the frames
//! that follow in the socket. Until the proof was right, only the fixed-size hello was looked at.

use std::time::Instant;

use crate::wire::auth::{
    ClusterKey, ClusterKeys, DIALLER_PROOF, IDENTITY_SEAL, LISTENER_PROOF, LaneSecret, PROOF_BYTES, SealKey,
    Transcript, VERDICT_SEAL,
};
use crate::wire::error::{HandshakeError, HandshakeStep, WireError};
use crate::wire::hello::{Challenge, HELLO_BYTES, Hello, LaneKind, VersionRange, version_error};
use crate::wire::identity::{Identity, LaneIdentity, MAX_SEALED_BYTES, PeerIdentity, Verdict};

/// Bytes before a sealed body: `length u32, zero u32`.
const PREFIX_BYTES: usize = 8;

/// What feeding bytes led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<T> {
    /// More bytes are wanted.
    More,
    /// The other side has said what there was to say.
    Said(T),
}

/// A lane on which frames may flow.
#[derive(Debug, Clone)]
pub struct Established {
    /// The protocol version of the session.
    pub version: u16,
    /// What binds data lanes to this control lane.
    pub lane_secret: LaneSecret,
    /// What the listener said: who it is, or that the data lane is bound.
    pub verdict: Verdict,
}

/// What a dialler introduces.
#[derive(Debug, Clone)]
pub enum Introduction {
    /// A new session.
    Peer(PeerIdentity),
    /// Lane `lane` of an existing session.
    Lane {
        /// The listener's number of the session.
        session: u64,
        /// Which lane, from 0.
        lane: u16,
        /// What the control lane's handshake gave.
        secret: LaneSecret,
    },
}

/// The side that opened the connection.
pub struct Dialler {
    key: ClusterKey,
    versions: VersionRange,
    transcript: Transcript,
    introduction: Option<Introduction>,
    deadline: Instant,
    output: Option<Vec<u8>>,
    state: DiallerState,
}

enum DiallerState {
    Challenge,
    ListenerProof { version: u16 },
    VerdictPrefix { version: u16, seal: SealKey },
    Verdict { version: u16, seal: SealKey, prefix: [u8; PREFIX_BYTES], body_bytes: usize },
    Over,
}

impl Dialler {
    /// Starts a handshake; `nonce` is 32 fresh random bytes.
    #[must_use]
    pub fn new(
        key: ClusterKey,
        versions: VersionRange,
        introduction: Introduction,
        nonce: [u8; 32],
        deadline: Instant,
    ) -> Self {
        let lane = match introduction {
            Introduction::Peer(_) => LaneKind::Control,
            Introduction::Lane { .. } => LaneKind::Data,
        };
        let hello = Hello { versions, lane, nonce }.encode();
        Self {
            key,
            versions,
            transcript: Transcript::new(&hello),
            introduction: Some(introduction),
            deadline,
            output: Some(hello.to_vec()),
            state: DiallerState::Challenge,
        }
    }

    /// How many bytes to feed next; 0 when the handshake is over.
    #[must_use]
    pub fn wants(&self) -> usize {
        match &self.state {
            DiallerState::Challenge => HELLO_BYTES,
            DiallerState::ListenerProof { .. } => PROOF_BYTES,
            DiallerState::VerdictPrefix { .. } => PREFIX_BYTES,
            DiallerState::Verdict { body_bytes, .. } => body_bytes + PROOF_BYTES,
            DiallerState::Over => 0,
        }
    }

    /// Bytes to send, if any.
    pub fn poll_output(&mut self) -> Option<Vec<u8>> {
        self.output.take()
    }

    /// When the handshake is given up.
    #[must_use]
    pub fn poll_timeout(&self) -> Instant {
        self.deadline
    }

    /// What is awaited; names the step when the other side hangs up or is too slow.
    #[must_use]
    pub fn awaits(&self) -> HandshakeStep {
        match &self.state {
            DiallerState::Challenge => HandshakeStep::Challenge,
            DiallerState::ListenerProof { .. } => HandshakeStep::ListenerProof,
            DiallerState::VerdictPrefix { .. } | DiallerState::Verdict { .. } | DiallerState::Over => {
                HandshakeStep::Verdict
            }
        }
    }

    /// Takes exactly the wanted bytes.
    ///
    /// # Errors
    /// [`HandshakeError`]; the connection is to be closed then.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Step<Established>, HandshakeError> {
        let step = self.awaits();
        exact(step, bytes, self.wants())?;
        match std::mem::replace(&mut self.state, DiallerState::Over) {
            DiallerState::Challenge => {
                let challenge = Challenge::decode(bytes).map_err(malformed(step))?;
                let version = challenge.agreed(self.versions)?;
                self.transcript.add(bytes);
                let proof = self.transcript.proof(&self.key, DIALLER_PROOF);
                self.transcript.add(&proof);
                self.output = Some(proof.to_vec());
                self.state = DiallerState::ListenerProof { version };
                Ok(Step::More)
            }
            DiallerState::ListenerProof { version } => {
                if !self.transcript.verify(&self.key, LISTENER_PROOF, bytes) {
                    return Err(HandshakeError::Proof { step });
                }
                self.transcript.add(bytes);
                let seal = self.transcript.seal_key(&self.key);
                let identity = match self.introduction.take() {
                    Some(Introduction::Peer(peer)) => Identity::Peer(peer),
                    Some(Introduction::Lane { session, lane, secret }) => {
                        let binding = secret.binding(&seal, session, lane);
                        Identity::Lane(LaneIdentity { session, lane, binding })
                    }
                    None => return Ok(Step::More), // the introduction is taken here and only here
                };
                self.output = Some(sealed(&seal, IDENTITY_SEAL, &identity.encode(version)));
                self.state = DiallerState::VerdictPrefix { version, seal };
                Ok(Step::More)
            }
            DiallerState::VerdictPrefix { version, seal } => {
                let (prefix, body_bytes) = read_prefix(step, bytes)?;
                self.state = DiallerState::Verdict { version, seal, prefix, body_bytes };
                Ok(Step::More)
            }
            DiallerState::Verdict { version, seal, prefix, .. } => {
                let body = unseal(&seal, VERDICT_SEAL, step, &prefix, bytes)?;
                match Verdict::decode(body, version).map_err(malformed(step))? {
                    Verdict::Declined(why) => Err(HandshakeError::Declined(why)),
                    verdict => Ok(Step::Said(Established { version, lane_secret: seal.lane_secret(), verdict })),
                }
            }
            DiallerState::Over => Ok(Step::More),
        }
    }
}

/// The side that accepted the connection.
pub struct Listener {
    keys: ClusterKeys,
    versions: VersionRange,
    nonce: [u8; 32],
    deadline: Instant,
    busy: bool,
    output: Option<Vec<u8>>,
    state: ListenerState,
}

enum ListenerState {
    Hello,
    DiallerProof { version: u16, lane: LaneKind, transcript: Transcript },
    IdentityPrefix { version: u16, lane: LaneKind, seal: SealKey },
    Identity { version: u16, lane: LaneKind, seal: SealKey, prefix: [u8; PREFIX_BYTES], body_bytes: usize },
    Judge { version: u16, seal: SealKey },
    Over,
}

impl Listener {
    /// Starts a handshake; `nonce` is 32 fresh random bytes. A `busy` listener answers the hello by saying so, and no more.
    #[must_use]
    pub fn new(
        keys: impl Into<ClusterKeys>,
        versions: VersionRange,
        nonce: [u8; 32],
        deadline: Instant,
        busy: bool,
    ) -> Self {
        Self { keys: keys.into(), versions, nonce, deadline, busy, output: None, state: ListenerState::Hello }
    }

    /// How many bytes to feed next; 0 when a verdict is due or the handshake is over.
    #[must_use]
    pub fn wants(&self) -> usize {
        match &self.state {
            ListenerState::Hello => HELLO_BYTES,
            ListenerState::DiallerProof { .. } => PROOF_BYTES,
            ListenerState::IdentityPrefix { .. } => PREFIX_BYTES,
            ListenerState::Identity { body_bytes, .. } => body_bytes + PROOF_BYTES,
            ListenerState::Judge { .. } | ListenerState::Over => 0,
        }
    }

    /// Bytes to send, if any; also after an error that the dialler is told about.
    pub fn poll_output(&mut self) -> Option<Vec<u8>> {
        self.output.take()
    }

    /// When the handshake is given up.
    #[must_use]
    pub fn poll_timeout(&self) -> Instant {
        self.deadline
    }

    /// What is awaited; names the step when the other side hangs up or is too slow.
    #[must_use]
    pub fn awaits(&self) -> HandshakeStep {
        match &self.state {
            ListenerState::Hello => HandshakeStep::Hello,
            ListenerState::DiallerProof { .. } => HandshakeStep::DiallerProof,
            ListenerState::IdentityPrefix { .. } | ListenerState::Identity { .. } => HandshakeStep::Identity,
            ListenerState::Judge { .. } | ListenerState::Over => HandshakeStep::Verdict,
        }
    }

    /// Takes exactly the wanted bytes. After [`Step::Said`] a verdict is due.
    ///
    /// # Errors
    /// [`HandshakeError`]; the connection is to be closed after the output was sent.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Step<Identity>, HandshakeError> {
        let step = self.awaits();
        exact(step, bytes, self.wants())?;
        match std::mem::replace(&mut self.state, ListenerState::Over) {
            ListenerState::Hello => {
                let hello = Hello::decode(bytes).map_err(malformed(step))?;
                let common = self.versions.newest_common(hello.versions);
                let chosen = if self.busy { None } else { common };
                let challenge = Challenge { versions: self.versions, chosen, busy: self.busy, nonce: self.nonce };
                let challenge = challenge.encode();
                self.output = Some(challenge.to_vec());
                let version = match chosen {
                    Some(version) => version,
                    None if self.busy => return Err(HandshakeError::Busy),
                    None => return Err(version_error(self.versions, hello.versions)),
                };
                let mut transcript = Transcript::new(bytes);
                transcript.add(&challenge);
                self.state = ListenerState::DiallerProof { version, lane: hello.lane, transcript };
                Ok(Step::More)
            }
            ListenerState::DiallerProof { version, lane, mut transcript } => {
                let Some(key) = transcript.prover(&self.keys, DIALLER_PROOF, bytes) else {
                    return Err(HandshakeError::Proof { step });
                };
                transcript.add(bytes);
                let proof = transcript.proof(key, LISTENER_PROOF);
                transcript.add(&proof);
                self.output = Some(proof.to_vec());
                let seal = transcript.seal_key(key);
                self.state = ListenerState::IdentityPrefix { version, lane, seal };
                Ok(Step::More)
            }
            ListenerState::IdentityPrefix { version, lane, seal } => {
                let (prefix, body_bytes) = read_prefix(step, bytes)?;
                self.state = ListenerState::Identity { version, lane, seal, prefix, body_bytes };
                Ok(Step::More)
            }
            ListenerState::Identity { version, lane, seal, prefix, .. } => {
                let body = unseal(&seal, IDENTITY_SEAL, step, &prefix, bytes)?;
                let identity = Identity::decode(body, version).map_err(malformed(step))?;
                let said = matches!(identity, Identity::Lane(_));
                if said != (lane == LaneKind::Data) {
                    let what = "an identity that is not of the lane's kind: this one";
                    return Err(malformed(step)(WireError::Value { what, found: said.into() }));
                }
                self.state = ListenerState::Judge { version, seal };
                Ok(Step::Said(identity))
            }
            state @ (ListenerState::Judge { .. } | ListenerState::Over) => {
                self.state = state;
                Ok(Step::More)
            }
        }
    }

    /// The secret of the session that this control lane opens, and the protocol version; `None` before the identity came.
    #[must_use]
    pub fn session(&self) -> Option<(u16, LaneSecret)> {
        match &self.state {
            ListenerState::Judge { version, seal } => Some((*version, seal.lane_secret())),
            _ => None,
        }
    }

    /// Whether the dialler of a data lane holds the secret of the session that it names.
    #[must_use]
    pub fn binds(&self, lane: &LaneIdentity, secret: &LaneSecret) -> bool {
        match &self.state {
            ListenerState::Judge { seal, .. } => secret.verify(seal, lane.session, lane.lane, &lane.binding),
            _ => false,
        }
    }

    /// Gives the verdict, which ends the handshake once the output was sent. Does nothing before the identity came.
    pub fn judge(&mut self, verdict: &Verdict) {
        if let ListenerState::Judge { version, seal } = std::mem::replace(&mut self.state, ListenerState::Over) {
            self.output = Some(sealed(&seal, VERDICT_SEAL, &verdict.encode(version)));
        }
    }
}

fn exact(step: HandshakeStep, bytes: &[u8], want: usize) -> Result<(), HandshakeError> {
    if bytes.len() == want {
        return Ok(());
    }
    let source = WireError::Length { what: "a step", found: bytes.len() as u64, want: want as u64 };
    Err(HandshakeError::Malformed { step, source })
}

fn malformed(step: HandshakeStep) -> impl Fn(WireError) -> HandshakeError {
    move |source| HandshakeError::Malformed { step, source }
}

fn sealed(seal: &SealKey, label: &[u8], body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PREFIX_BYTES + body.len() + PROOF_BYTES);
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(body);
    let proof = seal.seal(label, &out);
    out.extend_from_slice(&proof);
    out
}

fn read_prefix(step: HandshakeStep, bytes: &[u8]) -> Result<([u8; PREFIX_BYTES], usize), HandshakeError> {
    let mut prefix = [0; PREFIX_BYTES];
    prefix.copy_from_slice(bytes);
    let body_bytes = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
    if body_bytes == 0 || body_bytes > MAX_SEALED_BYTES {
        let (found, limit) = (body_bytes as u64, MAX_SEALED_BYTES as u64);
        return Err(malformed(step)(WireError::Limit { what: "a sealed body", found, limit }));
    }
    Ok((prefix, body_bytes))
}

fn unseal<'a>(
    seal: &SealKey,
    label: &[u8],
    step: HandshakeStep,
    prefix: &[u8; PREFIX_BYTES],
    bytes: &'a [u8],
) -> Result<&'a [u8], HandshakeError> {
    let (body, proof) = bytes.split_at(bytes.len() - PROOF_BYTES);
    if !seal.verify(label, &[prefix, body].concat(), proof) {
        return Err(HandshakeError::Proof { step });
    }
    Ok(body)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
#[expect(clippy::disallowed_methods, reason = "a test needs some moment to count from")]
mod tests;
