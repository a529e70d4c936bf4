//! Moves and reads KV pages on the CPU; does not know what a peer is.
//!
//! A [`HostKvCache`] owns pages in any [`KvLayout`](kvferry_protocol::layout::KvLayout). [`store_kv`] writes tokens into them,
//! [`paged_attention`] reads them in place, and [`PageGuards`] keep both off pages that a transport reads or writes.
//! [`copy`] follows plans over pages: gather, scatter, digest. An engine with its own memory describes it with a [`KvCacheView`]
//! and calls the `_unguarded` twins. [`select`] chooses the pages that a decode step reads. [`cuda`] does all of this but selection
//! in a device's memory, and [`device`] is what such a device offers.
//!
//! Attention is *invariant*: the same bits whatever the chunking of the prompt, the batch, the block size, the layout, the
//! number of threads and the CPU's vector width. How: the head of `attention/rows.rs`.
#![deny(unsafe_code)]

mod attention;
pub mod copy;
pub mod cuda;
pub mod device;
mod dtype;
mod error;
mod memory;
pub mod select;
mod store;

pub use attention::{
    AttentionBatch, AttentionOptions, AttentionSequence, Threads, Values, paged_attention, paged_attention_unguarded,
};
pub use dtype::{KvDtype, KvDtypeError};
pub use error::{Held, KernelError};
pub use memory::{AliasOwner, GuardMode, HostKvCache, HostRegion, KvCacheView, PageGuards, Placement, Settle};
pub use store::{Slot, store_kv, store_kv_unguarded};
