//! What a peer may still read of a session that is over: posts whose source it holds in place.
//!
//! A cut says nothing of the peer's process: it may be stopped, and go on reading in an hour. So their sources are held until the tether
//! hangs up, which the kernel does when the last descriptor of its other end is closed: the peer closes it with the last of what it
//! holds, and a process that ends has let go of its memory before its descriptors are closed (`exit_mm` is before `exit_files` in Linux's
//! `do_exit`). Neither needs the peer's number or its word, and a child that it forked holds both or none.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::driver::{Driver, Key};
use super::poller::Interest;
use crate::core::{Core, Outbox, Post, SessionKey};
use crate::error::TransportError;

pub(crate) struct Estate {
    pub(crate) peer: String,
    pub(crate) tether: OwnedFd,
    pub(crate) posts: Vec<Arc<Post>>,
}

impl Estate {
    fn end(self, core: &Core, reason: &TransportError) {
        for post in &self.posts {
            Outbox::end_kept(core, post, reason.clone());
        }
    }

    /// Whether the peer has let go. It has nothing to write there; what it writes all the same is thrown away.
    fn is_let_go(&self) -> bool {
        let mut scrap = [0; 4096];
        loop {
            match rustix::io::read(&self.tether, &mut scrap) {
                Ok(0) => return true,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Driver<'_> {
    /// Holds what a peer may still read.
    pub(super) fn keep_estate(&mut self, key: SessionKey, estate: Option<Estate>) {
        let Some(estate) = estate else { return };
        let (peer, writes) = (&estate.peer, estate.posts.len());
        tracing::info!(
            peer,
            writes,
            "the session is over, and the peer may read on in place: its sources are held until it lets go"
        );
        if let Err(error) = self.poller.watch(Key::Estate(key).get(), estate.tether.as_fd(), Interest::READ) {
            tracing::error!(peer, %error, "its end cannot be waited for: these sources are held until this endpoint shuts down");
        }
        self.estates.insert(key, estate);
    }

    /// The tether has something to say.
    pub(super) fn look_at_estate(&mut self, key: SessionKey) {
        if self.estates.get(&key).is_none_or(|estate| !estate.is_let_go()) {
            return;
        }
        let Some(estate) = self.estates.remove(&key) else { return };
        self.poller.forget(Key::Estate(key).get(), estate.tether.as_fd());
        tracing::info!(peer = estate.peer, "the peer let go of what it held in place");
        let reason = "the session ended while the peer held it in place; it has let go".to_owned();
        estate.end(&self.shared.core, &TransportError::Disconnected { reason });
    }

    /// This endpoint ends: what peers read from here on does not count, and they can see that.
    pub(super) fn give_up_estates(&mut self) {
        for (_, estate) in self.estates.drain() {
            let (peer, writes) = (&estate.peer, estate.posts.len());
            tracing::warn!(
                peer,
                writes,
                "shut down while the peer may still read in place: what it reads from now on does not count"
            );
            estate.end(&self.shared.core, &TransportError::Disconnected { reason: "shutdown".to_owned() });
        }
    }
}
