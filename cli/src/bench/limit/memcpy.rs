//! The limit of shared memory: one thread copies the same scattered blocks.

use std::time::Instant;

use crate::bench::arena::Arena;
use crate::bench::case::{Case, Span};
use crate::error::CliError;

/// Two buffers of one process, as large as a pass, in memory of the same kind as the transport's.
pub(crate) struct Memcpy {
    case: Case,
    source: Arena,
    target: Arena,
    source_order: Vec<u32>,
    target_order: Vec<u32>,
}

impl Memcpy {
    pub(crate) fn new(case: &Case, shareable: bool) -> Result<Self, CliError> {
        let (source_order, target_order) = (case.source_order(), case.target_order());
        let memory = || Arena::unregistered(case.bytes(), shareable);
        Ok(Self { case: case.clone(), source: memory()?, target: memory()?, source_order, target_order })
    }

    /// GB/s of a pass.
    pub(crate) fn pass(&mut self) -> f64 {
        let start = Instant::now();
        self.copy(self.case.pass());
        self.case.bytes() as f64 / start.elapsed().as_secs_f64() / 1e9
    }

    /// Microseconds of each request.
    pub(crate) fn requests(&mut self, blocks: u32, count: u32) -> Vec<f64> {
        (0..count)
            .map(|index| {
                let span = self.case.request(blocks, index);
                let start = Instant::now();
                self.copy(span);
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect()
    }

    fn copy(&mut self, span: Span) {
        let bytes = self.case.block_bytes as usize;
        let (source, mut target) = (self.source.own(), self.target.own());
        for (from, to) in span.of(&self.source_order).iter().zip(span.of(&self.target_order)) {
            let (from, to) = (*from as usize * bytes, *to as usize * bytes);
            target[to..][..bytes].copy_from_slice(&source[from..][..bytes]);
        }
        std::hint::black_box(&mut target[..]);
    }
}
