//! A window: pages whose bounds were checked, addressable by byte.

use std::ops::ControlFlow;

use super::runs::RunList;
use crate::place::{DeviceRegion, Place, Run};
use crate::raw::Region;

/// Registered bytes of one kind of memory in stream order.
pub(crate) struct Window<P = Region> {
    list: RunList,
    /// The region of each piece.
    regions: Vec<P>,
}

/// A window over whichever kind of memory its pages lie in: all of them in one.
pub(crate) enum AnyWindow {
    Host(Window<Region>),
    Device(Window<DeviceRegion>),
}

impl<P: Place> Window<P> {
    /// `regions[i]` is where piece `i` of the list lies; the caller has checked that all of it does.
    pub(crate) fn new(list: RunList, regions: Vec<P>) -> Self {
        Self { list, regions }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.list.bytes()
    }

    /// Appends the memory of bytes `from..to` to `out`, neighbours joined, until `out` has `max_runs`. Returns how many bytes
    /// were appended.
    pub(crate) fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<P::Run>) -> u64 {
        let mut appended = 0;
        self.list.walk(from, to, |piece, offset, bytes| {
            // Checked when the window was made, and again here for the price of a comparison.
            let Some(run) = self.regions.get(piece).and_then(|region| region.run(offset, bytes)) else {
                return ControlFlow::Break(());
            };
            let joined = appended > 0 && out.last_mut().is_some_and(|last| last.join(run));
            if !joined {
                if out.len() >= max_runs {
                    return ControlFlow::Break(());
                }
                out.push(run);
            }
            appended += bytes;
            ControlFlow::Continue(())
        });
        appended
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use kvferry_protocol::RegionId;
    use kvferry_protocol::pages::{Loop, Pages, Piece};
    use proptest::prelude::*;

    use super::super::regions::RegionTable;
    use super::{AnyWindow, Window};
    use crate::api::{Memory, MemoryKind};
    use crate::device_memory::DeviceAccess;
    use crate::error::TransportError;
    use crate::place::DeviceRun;
    use crate::raw::{RawRun, copy};

    fn of_host(window: AnyWindow) -> Window {
        let AnyWindow::Host(window) = window else { panic!("a window over a device's memory") };
        window
    }

    fn any_pages() -> impl Strategy<Value = Pages> {
        let piece = (0u64..30, prop::collection::vec((1u32..4, 0u64..40), 0..3), 1u64..9).prop_map(
            |(offset, loops, run_bytes)| Piece {
                region: RegionId::new(0),
                offset,
                loops: loops.into_iter().map(|(count, stride)| Loop { count, stride }).collect(),
                run_bytes,
            },
        );
        (prop::collection::vec(0u64..200, 1..4), prop::collection::vec(piece, 1..4))
            .prop_map(|(bases, pieces)| Pages { bases, pieces })
    }

    proptest! {
        #[test]
        fn any_part_of_a_window_is_what_counting_byte_by_byte_finds(pages in any_pages(), from in 0u64..300, bytes in 0u64..300, max_runs in 1usize..40) {
            let mut memory: Vec<u8> = (0..1024u32).map(|at| (at % 251) as u8).collect();
            let regions = RegionTable::new();
            let address = NonNull::new(memory.as_mut_ptr()).unwrap();
            regions.add(Memory { address, bytes: memory.len(), kind: MemoryKind::Host, file: None }).unwrap();
            let mut naive = Vec::new();
            for &base in &pages.bases {
                for piece in &pages.pieces {
                    piece.for_each_run(base, |start| naive.extend(start..start + piece.run_bytes));
                }
            }
            let window = of_host(regions.window(&pages, "a page").unwrap());
            prop_assert_eq!(window.bytes(), naive.len() as u64);
            let (mut runs, mut got) = (Vec::new(), Vec::new());
            let appended = window.append_runs(from, from + bytes, max_runs, &mut runs);
            for run in runs {
                let mut copied = vec![0; run.bytes()];
                copy(run, RawRun::of_mut(&mut copied));
                got.extend(copied);
            }
            let start = (from as usize).min(naive.len());
            let all = &naive[start..naive.len().min(from.saturating_add(bytes) as usize).max(start)];
            let want: Vec<u8> = all.iter().take(appended as usize).map(|&at| (at % 251) as u8).collect();
            prop_assert_eq!(&got, &want);
            prop_assert!(got.len() == all.len() || max_runs < 40);
        }
    }

    /// Memory where nothing is mapped: whoever touches it dies.
    fn of_device(bytes: usize) -> Memory {
        let address = NonNull::new(std::ptr::without_provenance_mut(4096)).unwrap();
        Memory { address, bytes, kind: MemoryKind::Device(DeviceAccess::default()), file: None }
    }

    #[test]
    fn a_window_lies_in_one_kind_of_memory_and_a_devices_gives_numbers_only() {
        let mut memory = [0u8; 100];
        let regions = RegionTable::new();
        let address = NonNull::new(memory.as_mut_ptr()).unwrap();
        regions.add(Memory { address, bytes: memory.len(), kind: MemoryKind::Host, file: None }).unwrap();
        let refused = regions.add(of_device(100)).unwrap_err().to_string();
        assert!(refused.contains("a device's"), "{refused}");
        regions.add_of_device(of_device(100)).unwrap();
        let piece = |region, offset| Piece {
            region: RegionId::new(region),
            offset,
            loops: vec![Loop { count: 2, stride: 40 }],
            run_bytes: 20,
        };
        let pages = Pages { bases: vec![0, 10], pieces: vec![piece(1, 5)] };
        let AnyWindow::Device(window) = regions.window(&pages, "a page").unwrap() else { panic!("host memory") };
        let mut runs = Vec::new();
        assert_eq!((window.bytes(), window.append_runs(10, 70, 9, &mut runs)), (80, 60));
        let run = |at: u64, bytes| DeviceRun { address: 4096 + at, bytes };
        assert_eq!(runs, [run(15, 10), run(45, 20), run(15, 20), run(55, 10)]);
        let mixed = Pages { bases: vec![0], pieces: vec![piece(0, 0), piece(1, 0)] };
        let refused = regions.window(&mixed, "a page").err().unwrap();
        assert!(matches!(&refused, TransportError::DeviceMemory { what: "a page", .. }), "{refused}");
        let outside = Pages { bases: vec![36], pieces: vec![piece(1, 5)] };
        assert!(matches!(regions.window(&outside, "a page"), Err(TransportError::Range { .. })));
    }

    #[test]
    fn a_page_outside_its_region_makes_no_window() {
        let mut memory = [0u8; 100];
        let regions = RegionTable::new();
        let address = NonNull::new(memory.as_mut_ptr()).unwrap();
        regions.add(Memory { address, bytes: memory.len(), kind: MemoryKind::Host, file: None }).unwrap();
        let pages = |region, base, offset, loops: &[(u32, u64)], run_bytes| Pages {
            bases: vec![0, base],
            pieces: vec![Piece {
                region: RegionId::new(region),
                offset,
                loops: loops.iter().map(|&(count, stride)| Loop { count, stride }).collect(),
                run_bytes,
            }],
        };
        for (name, pages, fits) in [
            ("to the last byte", pages(0, 40, 10, &[(2, 30)], 20), true),
            ("one over", pages(0, 41, 10, &[(2, 30)], 20), false),
            ("no such region", pages(1, 0, 0, &[], 1), false),
            ("base overflows", pages(0, u64::MAX, 1, &[], 1), false),
            ("stride overflows", pages(0, 0, 0, &[(u32::MAX, u64::MAX)], 1), false),
            ("no steps", pages(0, 0, 0, &[(0, 1)], 1), false),
            ("no bytes", pages(0, 0, 0, &[], 0), false),
        ] {
            assert_eq!(regions.window(&pages, "a page").is_ok(), fits, "{name}");
        }
    }
}
