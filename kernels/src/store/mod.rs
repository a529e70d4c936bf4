//! Writes the keys and values of new tokens into their slots.

mod raw;
#[cfg(test)]
mod tests;

use kvferry_protocol::BlockId;

use crate::error::KernelError;
use crate::memory::{CacheShape, GuardMode, HostKvCache, KvCacheView};

/// One token's place: `block * tokens_per_block + offset`, as in vLLM's `slot_mapping`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Slot(u64);

impl Slot {
    /// A token that is not stored, such as padding.
    pub const SKIP: Self = Self(u64::MAX);

    /// Wraps the number.
    #[must_use]
    pub const fn new(slot: u64) -> Self {
        Self(slot)
    }

    /// The slot of token `position` of a sequence whose blocks are `blocks`; `None` past its last block.
    #[must_use]
    pub fn of_position(position: usize, blocks: &[BlockId], tokens_per_block: u32) -> Option<Self> {
        let tokens_per_block = tokens_per_block as usize;
        let block = u64::from(blocks.get(position / tokens_per_block)?.get());
        Some(Self(block * tokens_per_block as u64 + (position % tokens_per_block) as u64))
    }

    /// Reads an entry of vLLM's `slot_mapping`, where a negative number means: skip. Source: `PAD_SLOT_ID = -1` in vLLM
    /// `v1/attention/backends/utils.py`.
    #[must_use]
    pub const fn from_mapping(slot: i64) -> Self {
        if slot < 0 { Self::SKIP } else { Self(slot.cast_unsigned()) }
    }

    /// The number itself.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Stores one layer's new keys and values: row `i` of `keys` and `values` goes to `slots[i]`, rounded to the cache's element
/// type (to nearest, ties to even). Of two rows with one slot the later stays.
///
/// `layer` counts within this worker. `keys`: f32 `[slots.len(), heads, key_dim]`; `values`: f32
/// `[slots.len(), heads, value_dim]`, or `None` for MLA's one plane. The pages are held for writing while the call lasts.
///
/// # Errors
/// [`KernelError`] if a slot or the layer does not exist, a slice has the wrong length, values are missing or superfluous, or a
/// page is held by somebody else ([`KernelError::PageBusy`]), or read from elsewhere ([`KernelError::PageAliased`]). Nothing is stored then.
#[expect(unsafe_code, reason = "the guards are what the stores ask for")]
pub fn store_kv(
    cache: &HostKvCache,
    layer: u16,
    slots: &[Slot],
    keys: &[f32],
    values: Option<&[f32]>,
) -> Result<(), KernelError> {
    check(cache.view().shape(), layer, slots, keys, values)?;
    let tokens_per_block = u64::from(cache.layout().shape().tokens_per_block);
    let stored = slots.iter().filter(|&&slot| slot != Slot::SKIP);
    let mut blocks: Vec<_> = stored.map(|slot| BlockId::new((slot.get() / tokens_per_block) as u32)).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let _pages = cache.guard_layer(GuardMode::Write, layer, blocks.iter().copied())?;
    // Looked at while they are held: an alias comes and goes under a write guard.
    check_own(cache.view(), layer, blocks.into_iter())?;
    // SAFETY: `check` passed, and the pages are held for writing until the end of this function.
    unsafe { raw::store_checked(cache.view(), layer, slots, keys, values) };
    Ok(())
}

/// [`store_kv`] into memory whose pages nobody guards.
///
/// # Errors
/// As [`store_kv`], except that no page is ever busy.
///
/// # Safety
/// While the call lasts nobody else reads or writes the pages of `slots` in this layer, in any process.
#[expect(unsafe_code, reason = "the caller must keep others off the pages")]
pub unsafe fn store_kv_unguarded(
    view: &KvCacheView,
    layer: u16,
    slots: &[Slot],
    keys: &[f32],
    values: Option<&[f32]>,
) -> Result<(), KernelError> {
    check(view.shape(), layer, slots, keys, values)?;
    let tokens_per_block = u64::from(view.layout().shape().tokens_per_block);
    let stored = slots.iter().filter(|&&slot| slot != Slot::SKIP);
    check_own(view, layer, stored.map(|slot| BlockId::new((slot.get() / tokens_per_block) as u32)))?;
    // SAFETY: `check` passed, and the caller keeps others off the pages.
    unsafe { raw::store_checked(view, layer, slots, keys, values) };
    Ok(())
}

/// Pages that are read from elsewhere are nobody's to write.
fn check_own(view: &KvCacheView, layer: u16, blocks: impl Iterator<Item = BlockId>) -> Result<(), KernelError> {
    match blocks.into_iter().find(|&block| view.aliases().is_aliased(layer, block)) {
        Some(block) => Err(KernelError::PageAliased { layer, block }),
        None => Ok(()),
    }
}

pub(crate) fn check(
    shape: CacheShape<'_>,
    layer: u16,
    slots: &[Slot],
    keys: &[f32],
    values: Option<&[f32]>,
) -> Result<(), KernelError> {
    shape.check_layer(layer)?;
    let planes = shape.planes();
    match (planes, values) {
        (1, Some(_)) => {
            return Err(KernelError::Planes { planes, mend: "it keeps the latent in K; pass no values" });
        }
        (2, None) => return Err(KernelError::Planes { planes, mend: "pass values beside the keys" }),
        _ => {}
    }
    let what = ["keys f32 [tokens, heads, key_dim]", "values f32 [tokens, heads, value_dim]"];
    for (plane, rows) in [Some(keys), values].into_iter().flatten().enumerate() {
        let expected = slots.len() * shape.heads() * shape.dim(plane);
        if rows.len() != expected {
            return Err(KernelError::Length { what: what[plane], found: rows.len(), expected });
        }
    }
    let of_blocks = shape.layout.shape();
    let count = u64::from(of_blocks.blocks) * u64::from(of_blocks.tokens_per_block);
    let wrong = slots.iter().position(|&slot| slot != Slot::SKIP && slot.get() >= count);
    match wrong {
        Some(token) => Err(KernelError::SlotOutOfRange { token, slot: slots[token].get(), slots: count }),
        None => Ok(()),
    }
}
