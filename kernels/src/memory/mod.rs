//! Page memory: regions, who may touch which page when, and where each run lies.

mod alias;
mod cache;
mod guards;
mod raw;
mod shape;
mod view;

#[cfg(test)]
mod tests;

pub use alias::{AliasOwner, Settle};
pub use cache::{HostKvCache, Placement};
pub use guards::{GuardMode, PageGuards};
pub use raw::HostRegion;
pub(crate) use shape::CacheShape;
pub use view::KvCacheView;
pub(crate) use view::{PlanePages, end_of_plane};
