//! What kvferry uses of UCX's libucp: generated declarations, and the library opened at run time.
//!
//! Nothing of UCX is needed to build this crate. [`library`] opens libucp once for the process and says by name what it looked
//! for if there is none. The declarations are those of UCX 1.13, whose binary interface all later 1.x releases keep: structures
//! that grew are guarded by field masks. `generate.sh` beside this crate writes `src/generated.rs` anew.

mod generated;
mod library;
mod pointer;

pub use generated::*;
pub use library::{LIBRARY_VARIABLE, Library, LoadError, Version, library};
pub use pointer::{Outcome, outcome};
