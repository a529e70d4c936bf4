//! What a Grant message carries for the layout algebra: one window for each rectangle that is missing.

use std::ops::Range;

use kvferry_protocol::codec;
use kvferry_protocol::layout::{PlanError, Selection, WindowShape, plan_in_place};
use kvferry_protocol::message::WindowBytes;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::transfer::Rect;
use kvferry_transport::{GrantKey, Transport};
use serde::{Deserialize, Serialize};

/// One granted window; crosses the wire.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct GrantedWindow {
    /// The transport's key.
    pub(super) key: GrantKey,
    /// What may be written through it.
    pub(super) rect: Rect,
    /// How its bytes are laid out.
    pub(super) shape: WindowShape,
}

impl GrantedWindow {
    /// Where a part of the window lies in it.
    pub(super) fn extents_of(&self, tokens: Range<u32>, layers: Range<u16>) -> Result<Vec<Extent>, PlanError> {
        let (layout, blocks) = (self.shape.layout(), self.shape.block_ids());
        let selection = Selection { layers, heads: self.shape.selection().heads, tokens };
        plan_in_place(&self.shape.view(&layout, &blocks), &selection)?.window_extents()
    }

    /// What the window holds beyond its rectangle: tokens that are verified already and share a block with missing ones.
    pub(super) fn margins(&self) -> Result<Vec<Extent>, PlanError> {
        let (held, rect) = (self.shape.selection(), self.rect);
        let mut extents = self.extents_of(held.tokens.start..rect.tokens().start, held.layers.clone())?;
        extents.extend(self.extents_of(rect.tokens().end..held.tokens.end, held.layers)?);
        Ok(extents)
    }
}

/// The codec of a list of them.
pub(super) struct Windows;

impl Windows {
    /// Closes a rectangle of one of the windows in the transport: no byte of it is written any more. Returns which window, and where in it.
    pub(super) fn seal(
        windows: &[GrantedWindow],
        transport: &dyn Transport,
        rect: Rect,
    ) -> Result<(usize, Vec<Extent>), String> {
        let index =
            windows.iter().position(|window| window.rect.contains(rect)).ok_or("no window holds the rectangle")?;
        let window = &windows[index];
        let extents = window.extents_of(rect.tokens(), rect.layers()).map_err(|error| error.to_string())?;
        transport.seal(window.key, &extents);
        Ok((index, extents))
    }

    /// The bytes for a Grant in a session of a version.
    pub(super) fn encode(version: u16, windows: &[GrantedWindow]) -> Result<WindowBytes, String> {
        let bytes = codec::encode_value("windows", version, &windows).map_err(|error| error.to_string())?;
        WindowBytes::new(bytes).map_err(|error| error.to_string())
    }

    /// Reads a peer's windows and checks that each holds the tokens and layers that it claims.
    pub(super) fn decode(bytes: &WindowBytes) -> Result<Vec<GrantedWindow>, String> {
        let windows: Vec<GrantedWindow> =
            codec::decode_value("windows", bytes.as_slice()).map_err(|error| error.to_string())?;
        for window in &windows {
            let (held, rect) = (window.shape.selection(), window.rect);
            let inside = held.tokens.start <= rect.tokens().start
                && rect.tokens().end <= held.tokens.end
                && held.layers.start <= rect.layers().start
                && rect.layers().end <= held.layers.end;
            if !inside {
                return Err(format!("a window of {held:?} cannot take {rect}"));
            }
        }
        Ok(windows)
    }
}
