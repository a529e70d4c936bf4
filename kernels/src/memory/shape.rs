//! What a kernel's arguments are checked against, wherever the pages lie.

use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvLayout;

use crate::error::KernelError;

/// A cache's layout and element size: all that says which arguments fit it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheShape<'a> {
    pub(crate) layout: &'a KvLayout,
    pub(crate) element_bytes: usize,
}

impl CacheShape<'_> {
    /// Elements of one run of a plane, which must be there.
    pub(crate) fn dim(&self, plane: usize) -> usize {
        self.layout.planes()[plane].run_bytes as usize / self.element_bytes
    }

    pub(crate) fn planes(&self) -> usize {
        self.layout.planes().len()
    }

    pub(crate) fn heads(&self) -> usize {
        self.layout.shape().heads.into()
    }

    pub(crate) fn tokens_per_block(&self) -> usize {
        self.layout.shape().tokens_per_block as usize
    }

    pub(crate) fn check_layer(&self, layer: u16) -> Result<(), KernelError> {
        let layers = self.layout.shape().layers;
        if layer < layers { Ok(()) } else { Err(KernelError::LayerOutOfRange { layer, layers }) }
    }

    pub(crate) fn check_block(&self, block: BlockId) -> Result<(), KernelError> {
        let blocks = self.layout.shape().blocks;
        if block.get() < blocks { Ok(()) } else { Err(KernelError::BlockOutOfRange { block, blocks }) }
    }
}
