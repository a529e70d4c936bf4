//! The stores themselves, through raw pointers.
#![expect(unsafe_code, reason = "writes pages that transports and other threads see")]

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kvferry_protocol::BlockId;

use super::Slot;
use crate::dtype::KvDtype;
use crate::memory::KvCacheView;

/// Elements that are converted on the stack before they are copied to their page.
const CHUNK: usize = 64;

/// Stores rows.
///
/// # Safety
/// Layer, slots and lengths were checked against the view, and while the call lasts nobody else reads or writes these pages.
pub(super) unsafe fn store_checked(
    view: &KvCacheView,
    layer: u16,
    slots: &[Slot],
    keys: &[f32],
    values: Option<&[f32]>,
) {
    let tokens_per_block = u64::from(view.layout().shape().tokens_per_block);
    for (plane, rows) in [Some(keys), values].into_iter().flatten().enumerate() {
        let pages = view.plane(layer, plane);
        let mut runs = rows.chunks_exact(pages.dim);
        for slot in slots {
            for head in 0..view.heads() {
                let run = runs.next().expect("as many runs as slots x heads: checked");
                if *slot != Slot::SKIP {
                    let block = BlockId::new((slot.get() / tokens_per_block) as u32);
                    let at = pages.run(block, head, (slot.get() % tokens_per_block) as usize);
                    store_run(view.dtype(), run, at);
                }
            }
        }
    }
}

fn store_run(dtype: KvDtype, run: &[f32], at: *mut u8) {
    if dtype == KvDtype::F32 {
        copy(run, at);
        return;
    }
    for (index, chunk) in run.chunks(CHUNK).enumerate() {
        let at = at.wrapping_add(index * CHUNK * dtype.bytes());
        if dtype == KvDtype::F16 {
            let mut elements = [f16::ZERO; CHUNK];
            elements[..chunk.len()].convert_from_f32_slice(chunk);
            copy(&elements[..chunk.len()], at);
        } else {
            let mut elements = [bf16::ZERO; CHUNK];
            elements[..chunk.len()].convert_from_f32_slice(chunk);
            copy(&elements[..chunk.len()], at);
        }
    }
}

/// Copies elements to `at`, which need not be aligned.
fn copy<T: Copy>(elements: &[T], at: *mut u8) {
    let from = elements.as_ptr().cast::<u8>();
    // SAFETY: `at` is inside a run of this many bytes: the slot was checked, and a view's runs lie inside its regions. The
    // caller of `store_checked` holds the page for writing, so no other access overlaps. The source is a local slice.
    unsafe { std::ptr::copy_nonoverlapping(from, at, size_of_val(elements)) };
}
