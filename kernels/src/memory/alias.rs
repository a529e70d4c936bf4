//! Pages that are read where somebody else has them: a page of this cache may be *aliased*, and then attention reads the same runs from an
//! address that is not this cache's, while its own memory lies idle.
//!
//! An alias is set and cleared by who holds the page for writing, and read by who holds it for reading, so nobody reads a page while
//! that changes. Lock order: pages, then the owners' table, which is a leaf.
#![expect(unsafe_code, reason = "takes the caller's word for memory that is not the cache's, and copies out of it")]

use std::any::Any;
use std::collections::HashMap;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvShape;

use super::cache::HostKvCache;
use super::guards::{GuardMode, PageGuards};
use super::view::KvCacheView;
use crate::error::KernelError;

/// What keeps the memory of aliased pages mapped and unchanged, until it is dropped.
pub type AliasOwner = Arc<dyn Any + Send + Sync>;

/// The aliases of a cache's pages; takes memory with the first of them.
#[derive(Debug)]
pub(crate) struct Aliases {
    layers: usize,
    planes: usize,
    blocks: usize,
    /// `[layer][plane][block]`: where the page's first run lies, or null.
    pages: OnceLock<Box<[AtomicPtr<u8>]>>,
    owners: Mutex<HashMap<BlockId, Vec<Owned>>>,
}

/// What becomes of pages that are read from elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settle {
    /// Their bytes are copied into the cache's own memory.
    Copy,
    /// Nobody needs them: what the cache's own memory holds is undefined.
    Forget,
}

/// Compared by its place.
struct Owned(AliasOwner);

impl std::fmt::Debug for Owned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Owned")
    }
}

impl Aliases {
    pub(super) fn new(shape: &KvShape) -> Self {
        let (layers, planes, blocks) = (shape.layers.into(), shape.run_bytes.len(), shape.blocks as usize);
        Self { layers, planes, blocks, pages: OnceLock::new(), owners: Mutex::default() }
    }

    /// Those of one plane of one layer, by block; empty if there never was any.
    #[inline]
    pub(super) fn plane(&self, layer: u16, plane: usize) -> &[AtomicPtr<u8>] {
        let first = (usize::from(layer) * self.planes + plane) * self.blocks;
        self.pages.get().map_or(&[], |pages| &pages[first..first + self.blocks])
    }

    /// Where a page's first run lies, if it is aliased.
    pub(super) fn page(&self, layer: u16, plane: usize, block: BlockId) -> Option<NonNull<u8>> {
        // Relaxed: guards of the page order this after what set or cleared it.
        NonNull::new(self.plane(layer, plane).get(block.get() as usize)?.load(Ordering::Relaxed))
    }

    /// Whether a page is read from elsewhere; all planes of a page are, or none.
    pub(crate) fn is_aliased(&self, layer: u16, block: BlockId) -> bool {
        self.page(layer, 0, block).is_some()
    }

    /// Sets a page's alias, an address a plane. The caller holds the page for writing.
    pub(super) fn set(&self, layer: u16, block: BlockId, planes: &[NonNull<u8>], owner: &AliasOwner) {
        let pages = self.pages.get_or_init(|| {
            let count = self.layers * self.planes * self.blocks;
            std::iter::repeat_with(|| AtomicPtr::new(ptr::null_mut())).take(count).collect()
        });
        let mut owners = self.owners();
        let of_block = owners.entry(block).or_default();
        if !of_block.iter().any(|known| Arc::ptr_eq(&known.0, owner)) {
            of_block.push(Owned(Arc::clone(owner)));
        }
        for (plane, address) in planes.iter().enumerate() {
            let at = (usize::from(layer) * self.planes + plane) * self.blocks + block.get() as usize;
            pages[at].store(address.as_ptr(), Ordering::Relaxed);
        }
    }

    /// Clears a page's alias. The caller holds the page for writing.
    pub(super) fn clear(&self, layer: u16, block: BlockId) {
        for plane in 0..self.planes {
            if let Some(page) = self.plane(layer, plane).get(block.get() as usize) {
                page.store(ptr::null_mut(), Ordering::Relaxed);
            }
        }
    }

    /// Lets go of a block's owners. None of its pages is aliased any more.
    pub(super) fn let_go(&self, block: BlockId) {
        let owners = self.owners().remove(&block);
        // Outside the lock: it may run another crate's code.
        drop(owners);
    }

    fn owners(&self) -> MutexGuard<'_, HashMap<BlockId, Vec<Owned>>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageGuards {
    /// Has attention read a page from elsewhere from now on, until [`HostKvCache::settle`]: an address a plane, of the page's first run (head
    /// 0, token 0); the others follow it as in the cache's own layout. This guard keeps the page; it was taken for writing.
    ///
    /// # Errors
    /// [`KernelError::Alias`] if the guard does not hold the page for writing, or the cache has another number of planes.
    ///
    /// # Safety
    /// Until `owner` is dropped every run of the page is mapped and readable at its address, and holds the same bytes. `owner` may be dropped
    /// by any thread.
    pub unsafe fn alias(
        &mut self,
        layer: u16,
        block: BlockId,
        planes: &[NonNull<u8>],
        owner: &AliasOwner,
    ) -> Result<(), KernelError> {
        let view = &self.cache().view;
        let problem = match (self.mode(), self.holds(layer, block)) {
            (GuardMode::Write, true) if planes.len() == view.layout().planes().len() => {
                view.aliases().set(layer, block, planes, owner);
                return Ok(());
            }
            (GuardMode::Write, true) => "it has another number of planes",
            _ => "the guard does not hold it for writing",
        };
        Err(KernelError::Alias { layer, block, problem })
    }
}

impl HostKvCache {
    /// Has the pages of some blocks that are read from elsewhere read from this cache's own memory again, in all layers, and lets go of who
    /// had them. Returns how many pages that were. Other pages stay as they are.
    ///
    /// Whether what was copied is what was to be read, the owner says: ask after this.
    ///
    /// # Errors
    /// [`KernelError::BlockOutOfRange`], before anything is done; [`KernelError::PageBusy`] if somebody reads one: what was done before it stays
    /// done, its own block is not let go, and it can be asked for again.
    pub fn settle(&self, blocks: &[BlockId], how: Settle) -> Result<usize, KernelError> {
        let view = self.view();
        blocks.iter().try_for_each(|&block| view.shape().check_block(block))?;
        let mut pages = 0;
        for &block in blocks {
            for layer in 0..view.layout().shape().layers {
                if !view.aliases().is_aliased(layer, block) {
                    continue;
                }
                let held = self.guard_layer(GuardMode::Write, layer, std::iter::once(block))?;
                if how == Settle::Copy {
                    // SAFETY: the page is held for writing, and its owner is in the table: this block is let go below.
                    unsafe { copy_page(view, layer, block) };
                }
                view.aliases().clear(layer, block);
                drop(held);
                pages += 1;
            }
            view.aliases().let_go(block);
        }
        Ok(pages)
    }

    /// Whether a page is read from elsewhere; `false` if there is no such page.
    #[must_use]
    pub fn is_aliased(&self, layer: u16, block: BlockId) -> bool {
        layer < self.layout().shape().layers && self.view().aliases().is_aliased(layer, block)
    }
}

/// Copies an aliased page into the cache's own memory.
///
/// # Safety
/// Layer and block are the cache's; the caller holds the page for writing, and its alias stands.
unsafe fn copy_page(view: &KvCacheView, layer: u16, block: BlockId) {
    let shape = view.layout().shape();
    for (index, plane) in view.layout().planes().iter().enumerate() {
        let pages = view.plane(layer, index);
        let Some(from) = view.aliases().page(layer, index, block) else { continue };
        // A head's tokens at once, where they abut.
        let abut = plane.token == u64::from(plane.run_bytes);
        let (steps, bytes) = match abut {
            true => (1, shape.tokens_per_block as usize * plane.run_bytes as usize),
            false => (shape.tokens_per_block as usize, plane.run_bytes as usize),
        };
        for head in 0..usize::from(shape.heads) {
            for token in 0..steps {
                let source = from.as_ptr().wrapping_add(head * pages.head_stride() + token * pages.token_stride());
                // SAFETY: whoever set the alias promised that every run of the page is mapped at its address by the layout's strides; the
                // target is the cache's own page, which the caller holds for writing. They are two mappings, or two pages of one.
                unsafe { ptr::copy_nonoverlapping(source, pages.run(block, head, token), bytes) };
            }
        }
    }
}
