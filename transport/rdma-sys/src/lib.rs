//! Declarations of libibverbs, opened at run time.
//!
//! [`Verbs::open`] finds `libibverbs.so.1`; a machine without it gets an error that says what was looked for. The declarations
//! are generated (`generate.sh`) and checked in, so that a build needs neither the library nor its headers. Four calls are
//! inline functions in C, which go through the device's own table; they are in [`inline`].

#[expect(
    missing_docs,
    non_camel_case_types,
    clippy::allow_attributes,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    reason = "generated"
)]
mod bindings;
pub mod inline;
mod library;

pub use bindings::*;
pub use library::{LIBRARY, OpenError, Verbs};
