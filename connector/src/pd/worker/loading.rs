//! One load: its pages, its parts, and its one end.
//!
//! A load is fed by every prefill rank that holds some of this worker's heads; each such part is a transfer of its own
//! ([`Receiving`]). What the parts share is here: the pages and their guards. Which layers are complete over all parts, and how the
//! parts' ends become the load's, is for [`Parts`] to say.

use std::ops::Range;

use kvferry_kernels::PageGuards;
use kvferry_protocol::layout::sources_of;
use kvferry_protocol::message::{self, EngineBytes, Message, Reason, Verdict};
use kvferry_protocol::transfer::{Coverage, Parts, PartsEnd, PartsStep, Receiver, ReceiverConfig, Rect};
use kvferry_protocol::{BlockId, TpRank, TransferId};

use super::device::After;
use super::driver::{Driver, Side};
use super::progress::Ended;
use super::receiving::{PartFrom, Receiving};
use crate::contract::{Load, LoadFailure, RequestId};
use crate::metrics;

/// One request's KV on its way into this worker's pages.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) request: RequestId,
    /// Its transfers in [`Driver::receiving`], one a prefill rank that is read.
    pub(super) parts: Vec<TransferId>,
    /// How many ranks the prefill engine has, as the request says.
    pub(super) ranks: usize,
    /// What asks the prefill engine to compute, for its rank 0; sent with each new session until something landed.
    ask: Vec<u8>,
    /// The blocks from the one that holds `tokens.start`.
    blocks: Vec<BlockId>,
    tokens: Range<u32>,
    layerwise: bool,
    started: bool,
    /// When the engine's own work on the pages is over, where a device does it.
    pub(super) after: After,
    /// Write guards over the pages that are not verified yet.
    guards: Option<PageGuards>,
    /// How far the parts are, and why the first failed that did.
    progress: Parts<TransferId, String>,
}

impl Loading {
    /// The blocks that hold a rectangle's tokens, and the place in the sequence of their first token.
    pub(super) fn blocks_of(&self, rect: Rect, per_block: u32) -> (&[BlockId], u32) {
        let (start, end) = (rect.tokens().start - self.tokens.start, rect.tokens().end - self.tokens.start);
        let blocks = (start / per_block) as usize..end.div_ceil(per_block) as usize;
        let first_token = self.tokens.start + blocks.start as u32 * per_block;
        (&self.blocks[blocks], first_token)
    }

    /// The write guards over pages that are not verified.
    pub(super) const fn guards(&mut self) -> Option<&mut PageGuards> {
        self.guards.as_mut()
    }

    /// All blocks, and the place in the sequence of their first token.
    pub(super) fn pages(&self) -> (Vec<BlockId>, u32) {
        (self.blocks.clone(), self.tokens.start)
    }

    /// The first token that is loaded; what is before it is here.
    pub(super) const fn first_token(&self) -> u32 {
        self.tokens.start
    }

    /// How many tokens are loaded.
    pub(super) fn tokens_wanted(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// What to ask the prefill engine when its rank 0 comes up.
    pub(super) fn ask(&self) -> Option<Vec<u8>> {
        (!self.ask.is_empty() && !self.progress.has_begun()).then(|| self.ask.clone())
    }
}

impl Driver {
    /// Begins a load.
    pub(super) fn load(&mut self, load: Load, after: Result<After, String>) {
        let parts = match self.parts_from(&load) {
            Ok(parts) if load.tokens.is_empty() => return self.nothing_to_load(&load, &parts),
            Ok(parts) => parts,
            Err(problem) => return self.refuse_load(&load, problem),
        };
        if self.has_begun(&load, &parts) {
            // The other load's end is the peer's to hear, not this one's.
            let problem = format!("transfer {} is being received already; draw a new id for each", load.transfer);
            return self.refuse_load(&load, problem);
        }
        if let Err(problem) = after.and_then(|after| self.begin_load(&load, &parts, after)) {
            self.let_go(&parts, &Verdict::failed(Reason::Engine, problem.as_str()));
            return self.refuse_load(&load, problem);
        }
        let started = self.board.metrics.transfers_started_total.at(metrics::Side::Receive);
        started.add(parts.len() as u64);
        self.count_live();
        for part in parts {
            self.dial(part.address);
            if let Some((peer, session)) = self.peers.find(part.address, part.engine.as_ref(), part.rank) {
                self.attach(part.transfer, &peer, session);
            } else {
                self.turn(part.transfer, Side::Receiving);
            }
        }
    }

    /// Which prefill ranks this worker reads, and what it takes from each.
    fn parts_from(&self, load: &Load) -> Result<Vec<PartFrom>, String> {
        let tp_rank = self.config.peer().tp_rank;
        let ranks = u16::try_from(load.from.len()).map_err(|_| "more addresses than an engine has ranks".to_owned())?;
        let sources = sources_of(tp_rank, self.config.tp_size().get(), ranks, self.card.manifest.kv_heads);
        let sources = sources.map_err(|error| {
            format!(
                "{error}: the {ranks} addresses to load from are the prefill engine's ranks; list each of them once"
            )
        })?;
        let part = |rank: TpRank, heads| PartFrom {
            transfer: load.transfer.part(tp_rank, rank),
            rank,
            address: load.from[usize::from(rank.get())],
            engine: load.engine.clone(),
            heads,
        };
        Ok(sources.into_iter().map(|source| part(source.tp_rank, source.heads)).collect())
    }

    fn has_begun(&self, load: &Load, parts: &[PartFrom]) -> bool {
        let known = |part: &PartFrom| {
            self.receiving.contains_key(&part.transfer) || self.taking.entries.contains_key(&part.transfer)
        };
        self.loads.contains_key(&load.transfer) || parts.iter().any(known)
    }

    fn begin_load(&mut self, load: &Load, parts: &[PartFrom], after: After) -> Result<(), String> {
        let began = self.now();
        let limit = self.config.limits().max_transfers.get() as usize;
        if self.receiving.len() + parts.len() > limit {
            return Err(format!("{limit} transfers are under way; raise max_transfers or send less"));
        }
        // It is sent when a session is up; what can never be sent is refused now, not when the deadline is over.
        EngineBytes::new(load.ask.clone()).map_err(|error| format!("the request to the prefill engine: {error}"))?;
        let (layers, per_block) = (self.caches.layers(), self.caches.tokens_per_block());
        let needed = load.tokens.len().div_ceil(per_block as usize);
        if !load.tokens.start.is_multiple_of(per_block) || load.blocks.len() != needed {
            let (tokens, found) = (&load.tokens, load.blocks.len());
            return Err(format!(
                "{found} blocks for tokens {tokens:?}, but this worker's cache holds {per_block} tokens a block: give the \
                 scheduler half the same tokens_per_block as the cache"
            ));
        }
        let wanted = Rect::new(load.tokens.clone(), layers.clone()).map_err(|error| error.to_string())?;
        let progress = Parts::new(wanted, parts.iter().map(|part| (part.transfer, part.heads.len() as u16)));
        let progress = progress.map_err(|error| error.to_string())?;
        let guards = self.caches.guard_write(&load.blocks, layers)?;
        let mut entries = Vec::new();
        for part in parts {
            let config = self.receiver_config(part.transfer, wanted);
            let machine = Receiver::new(began, config).map_err(|error| error.to_string())?;
            entries.push((part.transfer, Receiving::new(machine, part, load.transfer, &load.request, began)));
        }
        self.receiving.extend(entries);
        let loading = Loading {
            request: load.request.clone(),
            parts: parts.iter().map(|part| part.transfer).collect(),
            ranks: load.from.len(),
            ask: load.ask.clone(),
            blocks: load.blocks.clone(),
            tokens: load.tokens.clone(),
            layerwise: load.layerwise,
            started: false,
            after,
            guards,
            progress,
        };
        self.loads.insert(load.transfer, loading);
        Ok(())
    }

    fn receiver_config(&self, transfer: TransferId, wanted: Rect) -> ReceiverConfig {
        let deadlines = self.config.deadlines();
        ReceiverConfig {
            transfer,
            wanted: Coverage::from(wanted),
            order: self.config.order().into(),
            deadline: deadlines.transfer,
            progress: deadlines.progress,
            absent: deadlines.absent,
            lease_ttl: deadlines.lease_ttl,
            ask_before_revoke: None,
            linger: deadlines.verdict,
            max_cuts: MAX_CUTS,
        }
    }

    fn refuse_load(&self, load: &Load, problem: String) {
        tracing::warn!(request = %load.request, transfer = %load.transfer, problem, "load refused");
        self.report_failure(&load.request, load.tokens.start, &[], problem);
    }

    /// Everything is here already, or nobody wants it any more: the prefill side, if it was asked by somebody else, may let go.
    fn nothing_to_load(&mut self, load: &Load, parts: &[PartFrom]) {
        if load.is_unwanted() && self.has_begun(load, parts) {
            tracing::debug!(request = %load.request, transfer = %load.transfer, "another request loads it");
        } else {
            self.let_go(parts, if load.is_unwanted() { &Verdict::Cancelled } else { &Verdict::Done });
        }
        self.board.progress.ended(&load.request, Ended::Loaded);
        self.board.results().loaded.push(load.request.clone());
        self.board.progress.forget(&load.request);
    }

    /// Tells the prefill ranks that this side takes nothing of a transfer, now or when they are reached.
    fn let_go(&mut self, parts: &[PartFrom], verdict: &Verdict) {
        for part in parts {
            self.dial(part.address);
            let ended = message::Ended { transfer: part.transfer, verdict: verdict.clone() };
            match self.peers.find(part.address, part.engine.as_ref(), part.rank) {
                Some((peer, _)) => self.send(&peer, &Message::Ended(ended)),
                None => {
                    let until = self.now() + self.config.deadlines().absent;
                    self.peers.farewell(part.address, ended, until);
                }
            }
        }
    }

    /// Ends a load: every part of it that goes on.
    pub(super) fn cancel_load(&mut self, load: TransferId) {
        let parts = self.loads.get(&load).map_or_else(Vec::new, |load| load.progress.open().copied().collect());
        self.cancel_parts(parts);
    }

    fn cancel_parts(&mut self, parts: Vec<TransferId>) {
        for part in parts {
            if self.receiving.get(&part).is_some_and(Receiving::is_live) {
                self.with_receiving(part, |entry, now| entry.machine.cancel(now));
            }
        }
    }

    /// A rectangle of one part, which carries some heads, is verified.
    pub(super) fn verified(&mut self, load: TransferId, part: TransferId, heads: &Range<u16>, rect: Rect) {
        let Some(load) = self.loads.get_mut(&load) else { return };
        let first_layer = self.caches.shard().first_layer.get();
        let complete: Vec<u16> = match load.progress.verified(&part, rect) {
            Ok(layers) => layers.into_iter().map(|layer| layer - first_layer).collect(),
            Err(error) => return tracing::error!(transfer = %part, %error, "a part verified what is not its own"),
        };
        if let Some(guards) = &mut load.guards {
            for &layer in &complete {
                guards.release_layers(layer..layer + 1);
            }
        }
        let start = load.layerwise && !load.started && complete.contains(&0);
        load.started |= start;
        let metrics = &self.board.metrics;
        metrics.chunks_total.at(metrics::Side::Receive).add(1);
        let bytes = rect.cells() * self.caches.bytes_per_cell(heads);
        metrics.transfer_bytes_total.at(metrics::Side::Receive).add(bytes);
        for layer in complete {
            self.board.progress.verified(&load.request, layer.into());
        }
        if start {
            self.board.results().started.push(load.request.clone());
        }
    }

    /// A part ended, and nothing of it touches the pages any more; with a reason, it failed.
    pub(super) fn part_landed(&mut self, id: TransferId, part: TransferId, good_until: u32, reason: Option<String>) {
        let Some(load) = self.loads.get_mut(&id) else { return };
        let several = load.parts.len() > 1;
        let rank = self.receiving.get(&part).filter(|_| several).map(|entry| entry.rank);
        let named = |reason: String| match rank {
            Some(rank) => format!("prefill tp_rank {rank}: {reason}"),
            None => reason,
        };
        match load.progress.ended(&part, good_until, reason.map(named)) {
            Ok(PartsStep::Wait) => {}
            // The last of them may bring the load's end in the middle of this.
            Ok(PartsStep::Cancel(siblings)) => self.cancel_parts(siblings),
            Ok(PartsStep::Over(end)) => {
                if let Some(load) = self.loads.remove(&id) {
                    self.finish_load(load, end);
                }
            }
            Err(error) => tracing::error!(transfer = %part, %error, "a part ended that had ended"),
        }
    }

    fn finish_load(&self, load: Loading, end: PartsEnd<TransferId, String>) {
        drop(load.guards);
        // The model thread ends what a failed load reads in place before it hears of the failure, so nothing of it is good then.
        let failed = end.first_missing().is_some() && end.failure.is_some();
        let reads_in_place = self.board.in_place.load_over(&load.request, failed);
        let (request, tokens, per_block) = (load.request, load.tokens, self.caches.tokens_per_block());
        let (Some(missing), Some((_, reason))) = (end.first_missing(), end.failure) else {
            self.board.metrics.loaded_tokens_total.add(tokens.len() as u64);
            self.board.progress.ended(&request, Ended::Loaded);
            self.board.results().loaded.push(request);
            return;
        };
        // In whole blocks. The transfer may have begun behind a local prefix, which is good as it is.
        let good_tokens = if reads_in_place { tokens.start } else { missing - missing % per_block };
        let good = (good_tokens.saturating_sub(tokens.start)).div_ceil(per_block) as usize;
        self.report_failure(&request, good_tokens, &load.blocks[..good.min(load.blocks.len())], reason);
    }

    fn report_failure(&self, request: &RequestId, good_tokens: u32, good_blocks: &[BlockId], reason: String) {
        self.board.progress.ended(request, Ended::Failed);
        self.board.results().failed.push(LoadFailure {
            request: request.clone(),
            good_tokens,
            good_blocks: good_blocks.to_vec(),
            reason,
        });
    }
}

/// Cuts of the session that one transfer survives; each costs a handshake and what was in flight.
const MAX_CUTS: u32 = 8;
