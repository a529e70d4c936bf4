//! Whether the runs of a layout are disjoint.
//!
//! Disjointness is shown by nesting: sorted by stride, each axis must step over all that the axes inside it cover. Every view
//! of a dense tensor, padded or cut, nests. Strides that interleave without nesting are refused with the overlapping ones.

use super::order::Axis;
use super::strides::{KvShape, LayerBase, LayoutError, PlaneStrides};

/// Checks that addresses fit 63 bits and that no two runs share a byte.
pub(super) fn check(shape: &KvShape, planes: &[PlaneStrides], bases: &[LayerBase]) -> Result<(), LayoutError> {
    check_ends(shape, planes, bases)?;
    let (first, second) = match planes {
        [a, b] if b.offset < a.offset => (1, 0),
        [_, _] => (0, 1),
        _ => (0, 0),
    };
    let mut steps = axis_steps(shape, planes, bases);
    // The plane that comes first in memory orders the steps: what lies inside its own span is nearer than the other plane, and
    // what steps over both is farther. The other plane's strides prove neither, as its runs may be much longer.
    for step in &mut steps {
        if let Kind::Axis { strides, .. } = &step.kind {
            step.key = strides[first];
        }
    }
    if first != second {
        steps.push(Step { name: "plane", key: planes[second].offset - planes[first].offset, kind: Kind::Plane });
    }
    steps.sort_by_key(|step| step.key);

    let mut spans: Vec<u64> = planes.iter().map(|plane| plane.run_bytes.into()).collect();
    let mut joined = false;
    let mut inside = "run";
    for step in steps {
        let overlap = |plane: usize| LayoutError::Overlap { a: step.name, b: inside, plane };
        match step.kind {
            Kind::Axis { count, strides, extent } => {
                if joined && strides.windows(2).any(|pair| pair[0] != pair[1]) {
                    return Err(overlap(second));
                }
                for (plane, span) in spans.iter_mut().enumerate() {
                    let stride = strides[plane];
                    if stride < *span {
                        return Err(overlap(plane));
                    }
                    *span += extent.unwrap_or_else(|| stride * (count - 1));
                }
            }
            Kind::Plane => {
                if step.key < spans[first] {
                    return Err(overlap(second));
                }
                let both = step.key + spans[second];
                spans.fill(both);
                joined = true;
            }
        }
        inside = step.name;
    }
    Ok(())
}

struct Step {
    name: &'static str,
    /// The first plane's stride: it orders the steps from the inside out.
    key: u64,
    kind: Kind,
}

enum Kind {
    /// A step of each plane by its own stride. `extent`: what the steps cover together, where it is not `stride * (count - 1)`.
    Axis { count: u64, strides: Vec<u64>, extent: Option<u64> },
    /// From the plane that comes first in memory to the other.
    Plane,
}

fn axis_steps(shape: &KvShape, planes: &[PlaneStrides], bases: &[LayerBase]) -> Vec<Step> {
    let axis =
        |name, count: u64, strides: Vec<u64>| Step { name, key: 0, kind: Kind::Axis { count, strides, extent: None } };
    let of = |stride: fn(&PlaneStrides) -> u64| planes.iter().map(stride).collect::<Vec<_>>();
    let mut steps = vec![
        axis("block", shape.count(Axis::Block), of(|plane| plane.block)),
        axis("head", shape.count(Axis::Head), of(|plane| plane.head)),
        axis("token", shape.count(Axis::Token), of(|plane| plane.token)),
    ];
    if bases.len() == 1 {
        steps.push(axis("layer", shape.count(Axis::Layer), of(|plane| plane.layer)));
    } else if let Some((gap, extent)) = gap_and_extent(bases) {
        let kind = Kind::Axis { count: 2, strides: vec![gap; planes.len()], extent: Some(extent) };
        steps.push(Step { name: "layer", key: 0, kind });
    }
    // An axis of one step never moves.
    steps.retain(|step| !matches!(step.kind, Kind::Axis { count: 1, .. }));
    steps
}

/// The smallest distance between two layers of one region, and the largest from a region's first layer to its last;
/// `None` if no region has two layers.
fn gap_and_extent(bases: &[LayerBase]) -> Option<(u64, u64)> {
    let mut sorted: Vec<_> = bases.iter().map(|base| (base.region, base.offset)).collect();
    sorted.sort_unstable();
    let mut found: Option<(u64, u64)> = None;
    let mut start = sorted[0];
    for pair in sorted.windows(2) {
        if pair[0].0 != pair[1].0 {
            start = pair[1];
            continue;
        }
        let (gap, extent) = (pair[1].1 - pair[0].1, pair[1].1 - start.1);
        found = Some(found.map_or((gap, extent), |(g, e)| (g.min(gap), e.max(extent))));
    }
    found
}

fn check_ends(shape: &KvShape, planes: &[PlaneStrides], bases: &[LayerBase]) -> Result<(), LayoutError> {
    let base = bases.iter().map(|base| base.offset).max().unwrap_or(0);
    for plane in planes {
        let layer = if bases.len() == 1 { plane.layer } else { 0 };
        let mut end = u128::from(base) + u128::from(plane.offset) + u128::from(plane.run_bytes);
        for (axis, stride) in
            [(Axis::Layer, layer), (Axis::Block, plane.block), (Axis::Head, plane.head), (Axis::Token, plane.token)]
        {
            end += u128::from(shape.count(axis) - 1) * u128::from(stride);
        }
        // Twice the room, so that the sums of two such addresses cannot overflow either.
        if end >= 1 << 62 {
            return Err(LayoutError::TooLarge);
        }
    }
    Ok(())
}
