//! What stands in for TLS in a build without it: an identity that nobody can make.

use std::io;

use kvferry_protocol::EngineId;
use kvferry_protocol::wire::ChannelSecret;

use super::{TlsError, TlsPem};
use crate::raw::RawRun;
use crate::tcp::Socket;

/// A node's certificates. This build has no TLS, so there are none.
#[derive(Clone, Debug)]
pub enum TlsIdentity {}

impl TlsIdentity {
    /// Refuses: this build has no TLS.
    ///
    /// # Errors
    /// [`TlsError::NotBuilt`].
    pub fn new(_: &TlsPem<'_>) -> Result<Self, TlsError> {
        Err(TlsError::NotBuilt)
    }

    pub(crate) fn dial(&self) -> io::Result<Channel> {
        match *self {}
    }

    pub(crate) fn accept(&self) -> io::Result<Channel> {
        match *self {}
    }
}

/// A channel that nobody can make.
#[derive(Debug)]
pub(crate) enum Channel {}

impl Channel {
    pub(crate) fn shake(&mut self, _: &Socket) -> io::Result<bool> {
        match *self {}
    }

    pub(crate) fn secret(&self) -> io::Result<ChannelSecret> {
        match *self {}
    }

    pub(crate) fn names(&self, _: &EngineId) -> bool {
        match *self {}
    }

    pub(crate) fn send(&mut self, _: &Socket, _: &[RawRun]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn send_file(&mut self, _: &Socket, _: &[u8], _: std::os::fd::BorrowedFd<'_>) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn receive(&mut self, _: &Socket, _: &[RawRun]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn take_file(&mut self) -> Option<std::os::fd::OwnedFd> {
        match *self {}
    }

    pub(crate) fn push(&mut self, _: &Socket) -> io::Result<bool> {
        match *self {}
    }

    pub(crate) fn has_unsent(&self) -> bool {
        match *self {}
    }

    pub(crate) fn finish(&mut self, _: &Socket) {
        match *self {}
    }
}
