//! Moves and reads KV pages: gather, scatter, digest, store, paged attention. Does not know what a peer is.

pub mod copy;
