//! What an engine's other threads ask of its worker.

use std::sync::Arc;

use bytes::Bytes;
use kvferry_protocol::{PeerId, TransferId};
use kvferry_transport::PeerAddress;

use super::inlet::Inlet;
use super::{Board, Command, Input};
use crate::error::ConnectorError;

/// Talks to a worker from any thread.
#[derive(Clone, Debug)]
pub struct PdHandle {
    pub(super) inputs: Inlet,
    pub(super) board: Arc<Board>,
}

impl PdHandle {
    /// Reaches a peer ahead of requests, and keeps trying. What comes of it is in the metrics and the log.
    ///
    /// # Errors
    /// [`ConnectorError::Ended`].
    pub fn connect(&self, address: PeerAddress) -> Result<(), ConnectorError> {
        self.command(Command::Connect(address))
    }

    /// Whether the peer at an address that was dialled has a session at this moment. A router's hint: it may be gone at the next.
    #[must_use]
    pub fn reaches(&self, address: PeerAddress) -> bool {
        self.board.reached().contains(&address)
    }

    /// Carries bytes to a peer's engine, in order with kvferry's own messages; lost if there is no session.
    ///
    /// # Errors
    /// [`ConnectorError::Ended`].
    pub fn send_message(&self, peer: PeerId, message: Bytes) -> Result<(), ConnectorError> {
        self.command(Command::Message(peer, message))
    }

    /// Tells a peer that this engine will not take the transfer that it asked for, and why: its load fails at once.
    ///
    /// # Errors
    /// [`ConnectorError::Ended`].
    pub fn decline(&self, peer: PeerId, transfer: TransferId, why: &str) -> Result<(), ConnectorError> {
        self.command(Command::Decline(peer, transfer, why.to_owned()))
    }

    fn command(&self, command: Command) -> Result<(), ConnectorError> {
        self.inputs.send(Input::Command(command)).map_err(|_| ConnectorError::Ended)
    }
}
