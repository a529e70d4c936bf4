//! What the transport reports, and which transfer it concerns.

use bytes::Bytes;
use kvferry_protocol::message::{Message, Wrote};
use kvferry_protocol::{PeerId, TransferId, codec};
use kvferry_transport::{Event, GrantKey, PathReport, PeerAddress, TransportError};

use super::driver::{Driver, Side};
use super::receiving::Receiving;
use super::sending::Sending;
use crate::metrics::{DropReason, Labels, Path, RefusalReason};
use crate::trace::{Kind, Span};

impl Driver {
    pub(super) fn event(&mut self, event: Event) {
        match event {
            Event::Up { peer, session, address, version, greeting, path } => {
                tracing::info!(%peer, path = path.taken(), not = path.not_taken(), "payload's way");
                self.tell_how(&peer, &path);
                self.up(peer, (session, version), address, path, &greeting);
                self.count_paths();
            }
            Event::Down { peer, address, reason } => {
                self.down(peer.as_ref(), address, &reason);
                self.count_paths();
            }
            Event::Found { peer, address } => self.found(&peer, address),
            Event::Message { peer, message } => self.message(peer, &message),
            Event::Posted { post, outcome } => self.post_ended(post, outcome),
            Event::Held { post } => self.post_held(post),
            Event::Landed { peer, grant, notification, bytes, .. } => self.landed(&peer, grant, bytes, &notification),
            Event::Lent { peer, grant, notification, bytes, adopted, .. } => {
                self.lent(&peer, (grant, bytes), &notification, adopted);
            }
            Event::Recalled { peer, grant, sequence } => self.recalled(&peer, grant, sequence),
            _ => {}
        }
    }

    /// Sets the gauges of the ways that sessions go.
    fn count_paths(&self) {
        let metrics = &self.board.metrics;
        for &path in Path::ALL {
            let (mut taken, mut missing) = (0, 0);
            for report in self.peers.paths() {
                // The peer's cache is taken to be like this one.
                let kind = if self.caches.is_mappable() { report.kind } else { report.plain };
                taken += u64::from(Path::from(kind) == path);
                missing += u64::from(report.not.iter().any(|(kind, _)| Path::from(*kind) == path));
            }
            metrics.sessions_by_path.at(path).set(taken);
            metrics.sessions_without_path.at(path).set(missing);
        }
    }

    fn up(
        &mut self,
        peer: PeerId,
        (session, version): (u64, u16),
        address: Option<PeerAddress>,
        path: PathReport,
        greeting: &Bytes,
    ) {
        let card = match self.card.check(&peer, greeting) {
            Ok(card) => card,
            Err(refusal) => return self.send_away(&peer, address, &refusal.to_string()),
        };
        tracing::info!(%peer, session, version, "peer is up");
        self.bury_predecessors(&peer);
        self.peers.up(peer.clone(), address, (session, version), path, &card);
        self.board.reached().extend(address);
        for ended in address.map(|address| self.peers.take_farewells(address)).unwrap_or_default() {
            self.send(&peer, &Message::Ended(ended));
        }
        for (transfer, _) in self.transfers_where(|entry| entry.waits_for(&peer, address), |_| false) {
            self.attach(transfer, &peer, session);
        }
        for (transfer, _) in self.transfers_where(|_| false, |entry| entry.peer.as_ref() == Some(&peer)) {
            self.reach(transfer, session);
        }
    }

    /// An address leads to a peer that is up already: what waits for the address goes on in that session.
    fn found(&mut self, peer: &PeerId, address: PeerAddress) {
        let Some(session) = self.peers.found(peer, address) else { return };
        self.board.reached().insert(address);
        for ended in self.peers.take_farewells(address) {
            self.send(peer, &Message::Ended(ended));
        }
        for (transfer, _) in self.transfers_where(|entry| entry.waits_for(peer, Some(address)), |_| false) {
            self.attach(transfer, peer, session);
        }
    }

    /// A peer that has another cache, or would not speak when we wait.
    fn send_away(&mut self, peer: &PeerId, address: Option<PeerAddress>, refusal: &str) {
        tracing::warn!(%peer, refusal, "peer refused");
        self.board.metrics.peers_refused_total.at(RefusalReason::Manifest).add(1);
        self.transport.disconnect(peer, refusal);
        if let Some(address) = address {
            self.peers.missed(address, refusal);
            self.refused(address, refusal);
        }
    }

    /// An engine that started anew is a new peer: what its earlier incarnation was a part of is over.
    fn bury_predecessors(&mut self, peer: &PeerId) {
        let older = |known: Option<&PeerId>| {
            known.is_some_and(|known| {
                let (theirs, new) =
                    ((&known.engine, known.pp_rank, known.tp_rank), (&peer.engine, peer.pp_rank, peer.tp_rank));
                theirs == new && known.incarnation != peer.incarnation
            })
        };
        self.taken_down(|of| older(Some(of)), true);
        for (transfer, side) in
            self.transfers_where(|entry| older(entry.peer.as_ref()), |entry| older(entry.peer.as_ref()))
        {
            match side {
                Side::Receiving => self.with_receiving(transfer, |entry, now| entry.machine.peer_restarted(now)),
                Side::Sending => self.with_sending(transfer, |entry, now| entry.machine.peer_restarted(now)),
                Side::Taking => {}
            }
        }
    }

    fn down(&mut self, peer: Option<&PeerId>, address: Option<PeerAddress>, reason: &TransportError) {
        if let Some(peer) = peer {
            tracing::info!(%peer, ?address, reason = full(reason), "session ended");
            if let Some(addresses) = self.peers.down(peer) {
                self.board.metrics.sessions_lost_total.add(1);
                self.board.reached().retain(|reached| !addresses.contains(reached));
            }
            self.early.peer_down(peer);
            let dropped = self.unheard.peer_down(peer);
            self.board.metrics.messages_dropped_total.at(DropReason::Overflow).add(dropped);
            self.taken_down(|of| of == peer, false);
            self.ask_back(peer, None);
            let theirs = |entry: &Receiving| entry.peer.as_ref() == Some(peer);
            for (transfer, side) in self.transfers_where(theirs, |entry| entry.peer.as_ref() == Some(peer)) {
                match side {
                    Side::Receiving => self.with_receiving(transfer, |entry, now| entry.machine.peer_down(now)),
                    Side::Sending => self.with_sending(transfer, |entry, now| entry.machine.peer_down(now)),
                    Side::Taking => {}
                }
            }
        }
        // A peer that has another key, or sent us away, will do so again: what waits for it need not wait for its deadline.
        let Some(address) = address else { return };
        self.board.reached().remove(&address);
        // Our own word to a peer that was refused says less than why it was.
        if !matches!(reason, TransportError::Disconnected { .. }) {
            let times = self.peers.missed(address, &full(reason));
            log_miss(address, reason, times);
        }
        match reason {
            // A cut in the middle of a handshake looks like a wrong key: it is believed the second time.
            TransportError::Authentication { .. } if self.peers.distrust(address) => {
                self.board.metrics.peers_refused_total.at(RefusalReason::Key).add(1);
                self.refused(address, &full(reason));
            }
            TransportError::Disconnected { .. } | TransportError::Ended { .. } => {
                self.refused(address, &full(reason));
            }
            _ => {}
        }
        self.forget_unwanted(address);
    }

    /// Lets go of an address that does not answer, or does no more, unless somebody waits for it.
    fn forget_unwanted(&mut self, address: PeerAddress) {
        let now = self.now();
        if self.peers.is_kept(address, now) || self.receiving.values().any(|entry| entry.from == address) {
            return;
        }
        tracing::debug!(?address, "nobody waits for this address: it is not dialled any more");
        self.transport.forget(&address);
        self.peers.drop_address(address);
    }

    /// An address answers, but not as one of us: loads from it fail, and the next one dials anew.
    fn refused(&mut self, address: PeerAddress, reason: &str) {
        self.peers.forget_address(address);
        for (transfer, _) in self.transfers_where(|entry| entry.from == address && entry.peer.is_none(), |_| false) {
            self.refuse_part(transfer, reason.to_owned());
        }
    }

    fn message(&mut self, peer: PeerId, bytes: &Bytes) {
        let Some(version) = self.peers.version(&peer) else {
            // Sent away, or gone meanwhile: nobody here speaks with it.
            self.board.metrics.messages_dropped_total.at(DropReason::Late).add(1);
            return;
        };
        let message = match codec::decode(version, bytes) {
            Ok(message) => message,
            Err(error) => {
                self.board.metrics.messages_dropped_total.at(DropReason::Malformed).add(1);
                tracing::warn!(%peer, %error, "message cannot be read");
                self.transport.disconnect(&peer, &error.to_string());
                return;
            }
        };
        let Some(transfer) = message.transfer() else { return self.session_message(peer, message) };
        let message = match message {
            Message::Spare(spare) => return self.spare(peer, spare),
            message if self.is_refused(&peer, &message) => return,
            message => message,
        };
        // An id is believed only from the endpoint that the transfer is with.
        let ours = |known: Option<&PeerId>| known == Some(&peer);
        if ours(self.receiving.get(&transfer).and_then(|entry| entry.peer.as_ref())) {
            self.with_receiving(transfer, |entry, now| entry.machine.message(now, message));
        } else if ours(self.sending.get(&transfer).and_then(|entry| entry.peer.as_ref())) {
            self.with_sending(transfer, |entry, now| entry.machine.message(now, message));
        } else if self.sending.get(&transfer).is_some_and(|entry| entry.may_be(&peer)) {
            self.meet(transfer, peer, message);
        } else if ours(self.taking.entries.get(&transfer).map(|entry| &entry.peer)) {
            self.taken_message(transfer, message);
        // One that was declined to this peer before it asked is answered below, with the reason that was given then.
        } else if !self.early.is_declined(&peer, transfer)
            && let (Message::Grant(_), Some(why)) = (&message, self.ended.why(transfer, peer.tp_rank))
        {
            let why = why.to_owned();
            self.decline(&peer, transfer, &why);
        } else if let Some(answer) = self.early.message(self.now(), &peer, message) {
            self.send(&peer, &answer);
        }
    }

    fn session_message(&mut self, peer: PeerId, message: Message) {
        if let Message::Engine(bytes) = message {
            let message = Bytes::from(bytes.into_vec());
            if let Err(overflow) = self.unheard.hear(&self.messages, peer.clone(), message) {
                // It says all of it again in its next session.
                let dropped = self.unheard.peer_down(&peer) + 1;
                self.board.metrics.messages_dropped_total.at(DropReason::Overflow).add(dropped);
                tracing::warn!(%peer, %overflow, "an engine message was dropped, and its peer is sent away");
                self.transport.disconnect(&peer, &overflow.to_string());
            }
        } else {
            self.board.metrics.messages_dropped_total.at(DropReason::Unknown).add(1);
        }
    }

    fn landed(&mut self, peer: &PeerId, grant: GrantKey, bytes: u64, notification: &Bytes) {
        let Some(wrote) = self.wrote(peer, grant, bytes, notification) else { return };
        if self.taking.entries.contains_key(&wrote.transfer) {
            return self.taken_landed(wrote);
        }
        self.with_receiving(wrote.transfer, |entry, now| entry.machine.landed(now, wrote));
    }

    /// What a write's notification says, if it is what the grant was made for.
    pub(super) fn wrote(&mut self, peer: &PeerId, grant: GrantKey, bytes: u64, notification: &Bytes) -> Option<Wrote> {
        let began = self.board.tracer.start();
        let Some(version) = self.peers.version(peer) else {
            self.board.metrics.messages_dropped_total.at(DropReason::Late).add(1);
            return None;
        };
        let wrote = match codec::decode_wrote(version, notification) {
            Ok(wrote) => wrote,
            Err(error) => {
                self.board.metrics.messages_dropped_total.at(DropReason::Malformed).add(1);
                tracing::warn!(%peer, %error, "a write's notification cannot be read");
                self.transport.disconnect(peer, &error.to_string());
                return None;
            }
        };
        // What the notification names must be what the grant was made for.
        if self.granted.get(&grant) != Some(&wrote.transfer) {
            self.board.metrics.messages_dropped_total.at(DropReason::Late).add(1);
            return None;
        }
        let taken = self.taking.entries.contains_key(&wrote.transfer);
        let heads = match self.receiving.get(&wrote.transfer) {
            Some(entry) => entry.heads.clone(),
            None if taken => self.caches.heads(),
            None => return None,
        };
        if bytes != wrote.rect.cells() * self.caches.bytes_per_cell(&heads) {
            let problem = format!("a write of {bytes} bytes was announced as {}", wrote.rect);
            tracing::warn!(%peer, transfer = %wrote.transfer, problem, "peer broke the protocol");
            self.transport.disconnect(peer, &problem);
            return None;
        }
        tracing::trace!(transfer = %wrote.transfer, rect = %wrote.rect, bytes, "landed");
        if let Some(began) = began {
            let span = || Span::since(began, Kind::Land).transfer(wrote.transfer).rect(wrote.rect).bytes(bytes);
            self.board.tracer.record(|| span().chunk(wrote.generation, wrote.sequence));
        }
        Some(wrote)
    }

    /// The transfers that two conditions pick, receiving ones first.
    fn transfers_where(
        &self,
        receiving: impl Fn(&Receiving) -> bool,
        sending: impl Fn(&Sending) -> bool,
    ) -> Vec<(TransferId, Side)> {
        let receiving = self.receiving.iter().filter(|(_, entry)| receiving(entry));
        let sending = self.sending.iter().filter(|(_, entry)| sending(entry));
        receiving
            .map(|(&transfer, _)| (transfer, Side::Receiving))
            .chain(sending.map(|(&transfer, _)| (transfer, Side::Sending)))
            .collect()
    }
}

/// An error with its cause, which says what to mend.
fn full(reason: &TransportError) -> String {
    match std::error::Error::source(reason) {
        Some(source) => format!("{reason}: {source}"),
        None => reason.to_string(),
    }
}

/// Says why an address was not reached, `times` in a row: at first, and then ever more seldom.
fn log_miss(address: PeerAddress, reason: &TransportError, times: u32) {
    let is_final = matches!(reason, TransportError::Authentication { .. } | TransportError::Protocol { .. });
    let reason = full(reason);
    match (times.is_power_of_two(), is_final) {
        (true, true) => tracing::warn!(?address, reason, times, "peer was not reached"),
        (true, false) => tracing::info!(?address, reason, times, "peer was not reached"),
        (false, _) => tracing::debug!(?address, reason, times, "peer was not reached"),
    }
}
