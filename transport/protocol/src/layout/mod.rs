//! Where the bytes of (layer, block, plane, head, token) lie, and how two such places are copied into each other.
//!
//! A KV cache is one or more regions and a [`KvLayout`]: byte strides for the five axes and the contiguous run C at the end
//! (one token of one head of one plane). Nothing outside this module branches on a layout's name, and inside it only
//! [`KvLayout::packed`] does: [`plan()`] sees strides. A receiver that grants a window says how it is laid out with a
//! [`WindowShape`], so that the sender plans from its own layout to the window and never learns the receiver's.

mod build;
mod nest;
mod order;
mod overlap;
mod page;
mod plan;
mod spans;
mod strides;
mod tp;
mod view;
mod window;
mod wire;

pub use nest::{PieceEnd, PlanLoop, PlanPiece};
pub use order::{Axis, LayoutOrder, OrderError};
pub use page::{PageCopy, Strip};
pub use plan::{CopyPlan, PlanGroup, plan, plan_in_place};
pub use spans::Pair;
pub use strides::{KvLayout, KvShape, LayerBase, LayoutError, Place, PlaneStrides};
pub use tp::{HeadSource, TpError, heads_of, readers_of, sources_of};
pub use view::{CacheView, PlanError, Selection, Shard, Side};
pub use window::{RawWindow, WindowError, WindowShape, window_pages};
