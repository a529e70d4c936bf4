//! What a request says: its tokens, and the names of its complete blocks.

use std::sync::Arc;

use crate::pool::hash::{BlockHash, BlockHasher, Extras};

/// A request's prompt and what was generated so far.
///
/// A hash cache finds it by the names of its blocks, a radix cache by its tokens. Texts whose hashers have different roots (another
/// model, adapter or salt) share nothing in either. Blocks that are named by more than tokens (media, prompt embeddings) are not for it.
#[derive(Clone, Debug)]
pub struct Text {
    tokens: Vec<u32>,
    names: Vec<BlockHash>,
    hasher: Option<Arc<BlockHasher>>,
    namespace: Box<[u8]>,
}

impl Text {
    /// Takes a prompt. Without a hasher its blocks have no names: a hash cache shares none of them, and no event tells of them.
    #[must_use]
    pub fn new(hasher: Option<&Arc<BlockHasher>>, tokens: Vec<u32>) -> Self {
        let names = hasher.map(|hasher| hasher.chain(&tokens)).unwrap_or_default();
        let namespace = hasher.map(|hasher| (*hasher.root().get()).into()).unwrap_or_default();
        Self { tokens, names, hasher: hasher.cloned(), namespace }
    }

    /// Appends a token. Returns the name of the block that it completes, if it does.
    pub fn push(&mut self, token: u32) -> Option<BlockHash> {
        self.tokens.push(token);
        let hasher = self.hasher.as_ref()?;
        let known = self.names.len();
        let more = &self.tokens[known * hasher.tokens_per_block()..];
        if more.len() < hasher.tokens_per_block() {
            return None;
        }
        let parent = self.names.last().copied().unwrap_or_else(|| hasher.root());
        // Only extra keys can be refused.
        let name = hasher.chain_after(parent, known, more, &Extras::default()).ok()?.pop()?;
        self.names.push(name);
        Some(name)
    }

    /// All tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The names of its complete blocks, from the first one on.
    #[must_use]
    pub fn names(&self) -> &[BlockHash] {
        &self.names
    }

    pub(super) fn namespace(&self) -> &[u8] {
        &self.namespace
    }
}
