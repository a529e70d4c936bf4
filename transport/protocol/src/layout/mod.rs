//! Where the bytes of (layer, block, plane, head, token) lie, and how two such places are copied into each other.
//!
//! A KV cache is one or more regions and a [`KvLayout`]: byte strides for the five axes and the contiguous run C at the end
//! (one token of one head of one plane). Nothing outside this module branches on a layout's name.

mod order;
mod strides;

pub use order::{Axis, LayoutOrder, OrderError};
pub use strides::{KvLayout, KvShape, LayerBase, LayoutError, Place, PlaneStrides};
