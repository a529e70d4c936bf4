//! The way to the driver: what is sent there ends its wait for the transport.

use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, bounded};
use kvferry_transport::Transport;

use super::Input;

/// Sends to the driver, from any thread.
#[derive(Clone)]
pub(super) struct Inlet {
    inputs: Sender<Input>,
    /// Not kept alive by a thread that waits for its tier, or by an engine's handle.
    transport: Weak<dyn Transport>,
}

/// The driver has ended.
#[derive(Debug)]
pub(super) struct Closed;

impl Inlet {
    /// At most `capacity` inputs wait; who sends more waits for room.
    pub(super) fn new(capacity: usize, transport: &Arc<dyn Transport>) -> (Self, Receiver<Input>) {
        let (inputs, inbox) = bounded(capacity);
        (Self { inputs, transport: Arc::downgrade(transport) }, inbox)
    }

    pub(super) fn send(&self, input: Input) -> Result<(), Closed> {
        self.inputs.send(input).map_err(|_| Closed)?;
        if let Some(transport) = self.transport.upgrade() {
            transport.interrupt();
        }
        Ok(())
    }
}

impl std::fmt::Debug for Inlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inlet").field("waiting", &self.inputs.len()).finish_non_exhaustive()
    }
}
