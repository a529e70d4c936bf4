//! Who gets blocks: running requests as their texts grow, then waiting ones in order of arrival. When blocks are short the youngest request
//! is put back; it keeps what it has generated, and is computed again from what is still cached when it comes back.

use std::collections::VecDeque;

use kvferry::contract::{self, Match};

use super::request::Request;
use super::{Event, FinishReason, Scheduler};

impl<C: contract::Scheduler> Scheduler<C> {
    /// Gives running requests blocks for the tokens that they have generated, the oldest first. Returns whether nobody was put back for it.
    ///
    /// The oldest of all is put back only where blocks are held that cannot be taken: by loads and transfers, which end by themselves. So
    /// somebody always gets on.
    pub(super) fn make_room(&mut self) -> bool {
        let before = self.preempted;
        let lacks = |request: &&Request| self.blocks_for(request.tokens()) > request.block_ids().len();
        let mut short: Vec<u64> = self.running.iter().filter(lacks).map(|request| request.number).collect();
        short.sort_unstable();
        for number in short {
            // Until it has its blocks, or is put back itself.
            while let Some(request) = self.running.iter_mut().find(|request| request.number == number) {
                let tokens = request.tokens();
                let Some(table) = &mut request.table else { break };
                let Err(error) = self.cache.grow(table, tokens) else { break };
                tracing::debug!(request = %request.seen.id, %error, "the youngest request is put back");
                self.connector.short_of_blocks();
                self.put_back_for(number);
            }
        }
        self.preempted == before
    }

    /// Puts the youngest request back whose blocks nothing writes and nobody waits for; `number`, which is short of blocks, if need be.
    fn put_back_for(&mut self, number: u64) {
        let may_go =
            |request: &Request| request.number == number || (request.has_stepped && !request.is_kept_for_a_peer());
        let at =
            (0..self.running.len()).filter(|at| may_go(&self.running[*at])).max_by_key(|at| self.running[*at].number);
        let Some(at) = at else { return };
        let mut request = self.running.remove(at);
        request.put_back();
        self.preempted += 1;
        self.connector.preempted(std::slice::from_ref(&request.seen.id));
        let place = self.waiting.iter().position(|waiting| waiting.number > request.number);
        self.waiting.insert(place.unwrap_or(self.waiting.len()), request);
    }

    /// Gives blocks to waiting requests, in order of arrival.
    pub(super) fn admit(&mut self) -> Vec<Event> {
        let (mut later, mut events) = (VecDeque::new(), Vec::new());
        while self.loading.len() + self.running.len() < self.config.max_running {
            let Some(mut request) = self.waiting.pop_front() else { break };
            // One token at least is computed here: its logits choose the first of the answer, or its step hands the rest over.
            request.local = self.cache.lookup(&request.text);
            let matched = self.connector.matched_tokens(&request.seen, request.local as u32);
            let brought = match matched {
                Match::Later => {
                    later.push_back(request);
                    continue;
                }
                Match::None => 0,
                Match::Sync(tokens) | Match::Async(tokens) => {
                    tokens.get().min((request.tokens() - request.local) as u32)
                }
            };
            let is_alone = self.loading.is_empty() && self.running.is_empty();
            let spare = if is_alone { 0 } else { self.config.watermark_blocks };
            let Ok(table) = self.cache.open(&request.text, request.tokens(), spare) else {
                self.waiting.push_front(request);
                self.connector.short_of_blocks();
                break;
            };
            let id = request.seen.id.clone();
            let accepted = self.connector.allocated(&request.seen, table.ids(), request.local as u32, brought);
            if !std::mem::replace(&mut request.is_known, true) {
                self.local_prompt += request.local as u64;
            }
            request.table = Some(table);
            request.brought = brought as usize;
            request.computed = (request.local + request.brought).min(request.most_brought());
            match matched {
                Match::Async(_) => self.loading.push(request),
                _ => self.running.push(request),
            }
            if let Err(error) = accepted {
                events.extend(self.finish(&id, FinishReason::Failed(error.to_string())));
            }
        }
        // Those that must ask again keep their place in the queue.
        later.append(&mut self.waiting);
        self.waiting = later;
        events
    }
}
