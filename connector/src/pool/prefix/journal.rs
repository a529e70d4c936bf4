//! What changed in a prefix cache, as events: the cache knows names, a registration's text knows the tokens.

use std::sync::Arc;

use crate::events::{BlockName, KvEvent, Medium, Removed, Stored};
use crate::pool::PrefixChange;
use crate::pool::hash::{BlockHash, BlockHasher};

use super::Text;

/// Events since they were taken.
pub(super) struct Journal {
    hasher: Arc<BlockHasher>,
    medium: Option<Medium>,
    events: Vec<KvEvent>,
}

impl Journal {
    pub(super) fn new(hasher: Arc<BlockHasher>, medium: Option<Medium>) -> Self {
        Self { hasher, medium, events: Vec::new() }
    }

    pub(super) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Writes down changes of one call. Names that are stored are the text's, in the order of its blocks.
    pub(super) fn note(&mut self, changes: Vec<PrefixChange>, text: Option<&Text>) {
        let mut next = 0;
        let mut follows = false;
        for change in changes {
            match (change, text) {
                (PrefixChange::Stored(name), Some(text)) => {
                    let Some(more) = text.names()[next..].iter().position(|other| *other == name) else { continue };
                    self.store(text, next + more, follows && more == 0);
                    (next, follows) = (next + more + 1, true);
                }
                (PrefixChange::Stored(name), None) => tracing::error!(%name, "a block was stored without its tokens"),
                (PrefixChange::Removed(name), _) => self.remove(name),
                (PrefixChange::Cleared, _) => self.events.push(KvEvent::Cleared),
            }
        }
    }

    /// `follows` says that the last event ends with the block before.
    fn store(&mut self, text: &Text, position: usize, follows: bool) {
        let size = self.hasher.tokens_per_block();
        let name = self.name(text.names()[position]);
        let tokens = &text.tokens()[position * size..(position + 1) * size];
        if let (true, Some(KvEvent::Stored(stored))) = (follows, self.events.last_mut()) {
            stored.blocks.push(name);
            stored.tokens.extend_from_slice(tokens);
            return;
        }
        let parent = position.checked_sub(1).map(|before| self.name(text.names()[before]));
        self.events.push(KvEvent::Stored(Stored {
            blocks: vec![name],
            parent,
            tokens: tokens.to_vec(),
            tokens_per_block: size as u32,
            medium: self.medium,
            ..Stored::default()
        }));
    }

    fn remove(&mut self, name: BlockHash) {
        let name = self.name(name);
        if let Some(KvEvent::Removed(removed)) = self.events.last_mut() {
            removed.blocks.push(name);
            return;
        }
        let medium = self.medium;
        self.events.push(KvEvent::Removed(Removed { blocks: vec![name], medium, ..Removed::default() }));
    }

    fn name(&self, name: BlockHash) -> BlockName {
        self.hasher.event_id(&name).into()
    }
}
