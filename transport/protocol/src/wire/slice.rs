//! A part of a nest is a few nests.

use crate::pages::Extent;

/// Appends extents that name, in order, bytes `from..to` of the stream that `extent` describes (0 is its first byte).
///
/// At most two extents a loop and one more: the size does not grow with the number of runs. Bytes past the end are ignored.
pub fn slice_extents(extent: &Extent, from: u64, to: u64, out: &mut Vec<Extent>) {
    let to = to.min(extent.bytes().unwrap_or(0));
    if from < to {
        slice(extent.offset, extent, 0, from, to, out);
    }
}

fn slice(offset: u64, extent: &Extent, depth: usize, from: u64, to: u64, out: &mut Vec<Extent>) {
    let Some(outer) = extent.loops.get(depth) else {
        out.push(Extent::contiguous(offset + from, to - from));
        return;
    };
    let inner = &extent.loops[depth + 1..];
    let step_bytes = inner.iter().fold(extent.run_bytes, |bytes, l| bytes * u64::from(l.count));
    let at = |step: u64| offset + step * outer.stride;
    let (first, last) = (from / step_bytes, (to - 1) / step_bytes);
    if first == last {
        let start = first * step_bytes;
        return slice(at(first), extent, depth + 1, from - start, to - start, out);
    }
    let (mut whole_from, mut whole_to) = (first, last + 1);
    if from > first * step_bytes {
        slice(at(first), extent, depth + 1, from - first * step_bytes, step_bytes, out);
        whole_from += 1;
    }
    if to < (last + 1) * step_bytes {
        whole_to -= 1;
    }
    match whole_to - whole_from {
        0 => {}
        1 => out.push(Extent { offset: at(whole_from), loops: inner.to_vec(), run_bytes: extent.run_bytes }),
        steps => {
            let mut loops = extent.loops[depth..].to_vec();
            loops[0].count = steps as u32; // no more than the loop had
            out.push(Extent { offset: at(whole_from), loops, run_bytes: extent.run_bytes });
        }
    }
    if whole_to == last {
        slice(at(last), extent, depth + 1, 0, to - last * step_bytes, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Loop;
    use proptest::prelude::*;

    fn bytes_of(extents: &[Extent]) -> Vec<u64> {
        let mut bytes = Vec::new();
        for extent in extents {
            extent.for_each_run(|start| bytes.extend(start..start + extent.run_bytes));
        }
        bytes
    }

    proptest! {
        #[test]
        fn slices_put_together_are_the_whole(
            loops in prop::collection::vec((1u32..5, 0u64..100), 0..4), run_bytes in 1u64..9, cuts in prop::collection::vec(0u64..700, 0..6),
        ) {
            let loops: Vec<_> = loops.into_iter().map(|(count, stride)| Loop { count, stride }).collect();
            let extent = Extent { offset: 5, loops, run_bytes };
            let whole = bytes_of(std::slice::from_ref(&extent));
            let mut cuts = cuts;
            cuts.extend([0, whole.len() as u64]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let mut part = Vec::new();
                slice_extents(&extent, pair[0], pair[1], &mut part);
                prop_assert!(part.len() <= 2 * extent.loops.len() + 1);
                let range = |at: u64| (at as usize).min(whole.len());
                prop_assert_eq!(bytes_of(&part), &whole[range(pair[0])..range(pair[1])]);
            }
        }
    }
}
