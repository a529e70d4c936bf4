//! The limit of shared memory: one thread copies the same scattered blocks.

use std::time::Instant;

use crate::bench::case::{Case, Span};

/// Two buffers of one process, as large as a pass.
pub(crate) struct Memcpy {
    case: Case,
    source: Vec<u8>,
    target: Vec<u8>,
    source_order: Vec<u32>,
    target_order: Vec<u32>,
}

impl Memcpy {
    pub(crate) fn new(case: &Case) -> Self {
        let bytes = case.bytes() as usize;
        let (source_order, target_order) = (case.source_order(), case.target_order());
        // Not zero, so that every page is there before the first pass.
        Self { case: case.clone(), source: vec![1; bytes], target: vec![2; bytes], source_order, target_order }
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
        for (from, to) in span.of(&self.source_order).iter().zip(span.of(&self.target_order)) {
            let (from, to) = (*from as usize * bytes, *to as usize * bytes);
            self.target[to..][..bytes].copy_from_slice(&self.source[from..][..bytes]);
        }
        std::hint::black_box(&mut self.target);
    }
}
