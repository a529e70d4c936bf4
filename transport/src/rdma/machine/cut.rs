//! Cutting a write into parts, one a lane, and a part into requests.

use std::sync::Arc;

use crate::rdma::work::{Chain, Order, Posting, Request, Run, Segment};

/// Limits of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// The most bytes of one request.
    pub(crate) bytes: u32,
    /// The most segments that one request gathers.
    pub(crate) segments: usize,
}

/// Bytes of a write that go by one lane, from a place in its runs on.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) tag: u32,
    order: Arc<Order>,
    run: usize,
    skip: u64,
    pub(crate) left: u64,
}

/// Cuts a write into `count` parts of about the same length. Cuts fall on whole cache lines of the stream, so that no two lanes
/// write the same one if the runs are aligned.
pub(crate) fn parts(order: &Arc<Order>, tag: u32, bytes: u64, count: u64) -> Vec<Part> {
    const LINE: u64 = 128;
    let share = (bytes / count).next_multiple_of(LINE).max(1);
    let mut parts = Vec::with_capacity(count as usize);
    let (mut run, mut skip, mut left) = (0, 0, bytes);
    while left > 0 {
        let is_last = parts.len() as u64 + 1 == count;
        let take = if is_last { left } else { share.min(left) };
        parts.push(Part { tag, order: Arc::clone(order), run, skip, left: take });
        (run, skip) = walk(&order.runs, run, skip, take);
        left -= take;
    }
    parts
}

fn walk(runs: &[Run], mut run: usize, mut skip: u64, mut bytes: u64) -> (usize, u64) {
    while bytes > 0 {
        let step = (runs[run].bytes - skip).min(bytes);
        bytes -= step;
        skip += step;
        if skip == runs[run].bytes {
            (run, skip) = (run + 1, 0);
        }
    }
    (run, skip)
}

impl Part {
    /// Appends the next request to the chain: bytes that are contiguous in the peer's memory, gathered from here. The last one
    /// carries the tag. Returns how many bytes it has.
    pub(crate) fn cut(&mut self, number: u64, limits: RequestLimits, chain: &mut Chain) -> u64 {
        let first = self.order.runs[self.run];
        let (remote, remote_key) = (first.remote + self.skip, first.remote_key);
        let limit = self.left.min(limits.bytes.into());
        let start = chain.segments.len();
        let mut bytes = 0;
        while bytes < limit {
            let run = self.order.runs[self.run];
            if run.remote_key != remote_key || run.remote + self.skip != remote + bytes {
                break;
            }
            let take = (run.bytes - self.skip).min(limit - bytes);
            if !append(chain, start, limits.segments, run, self.skip, take) {
                break;
            }
            bytes += take;
            self.skip += take;
            if self.skip == run.bytes {
                (self.run, self.skip) = (self.run + 1, 0);
            }
        }
        self.left -= bytes;
        let tag = (self.left == 0).then_some(self.tag);
        let segments = start..chain.segments.len();
        let request = Request::Write { remote, remote_key, segments, tag };
        chain.postings.push(Posting { number, request, is_signalled: false });
        bytes
    }
}

/// Adds a source to the request whose segments begin at `start`; `false` if it has as many as it may.
fn append(chain: &mut Chain, start: usize, most: usize, run: Run, skip: u64, take: u64) -> bool {
    let address = run.local + skip;
    // At most a request's bytes, which are a `u32`.
    let take = take as u32;
    if chain.segments.len() > start
        && let Some(last) = chain.segments.last_mut()
        && last.key == run.local_key
        && last.address + u64::from(last.bytes) == address
    {
        last.bytes += take;
        return true;
    }
    if chain.segments.len() - start >= most {
        return false;
    }
    chain.segments.push(Segment { address, bytes: take, key: run.local_key });
    true
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::rdma::work::Key;

    fn any_runs() -> impl Strategy<Value = Vec<Run>> {
        let step = (1u64..300, 0u64..3, 0u64..3, 0u32..2, 0u32..2);
        prop::collection::vec(step, 1..30).prop_map(|steps| {
            let (mut local, mut remote) = (1 << 20, 1 << 30);
            let run = |(bytes, local_gap, remote_gap, local_key, remote_key)| {
                let run = Run { local, local_key: Key(local_key), remote, remote_key: Key(remote_key), bytes };
                local += bytes + local_gap / 2;
                remote += bytes + remote_gap / 2;
                run
            };
            steps.into_iter().map(run).collect()
        })
    }

    proptest! {
        #[test]
        fn requests_move_each_byte_once_to_its_place_within_the_limits(
            runs in any_runs(), count in 1u64..5, bytes in 1u32..500, segments in 1usize..4,
        ) {
            let total = runs.iter().map(|run| run.bytes).sum();
            let limits = RequestLimits { bytes, segments };
            let order = Arc::new(Order { id: 1, head: Bytes::new(), runs, is_spread: false });
            let mut moved = Vec::new();
            let parts = parts(&order, 7, total, count);
            prop_assert!(parts.len() as u64 <= count);
            for mut part in parts {
                let mut chain = Chain::default();
                while part.left > 0 {
                    part.cut(0, limits, &mut chain);
                }
                let tags = chain.postings.iter().filter(|p| matches!(p.request, Request::Write { tag: Some(7), .. })).count();
                prop_assert_eq!(tags, 1);
                for posting in &chain.postings {
                    let Request::Write { remote, remote_key, segments, .. } = &posting.request else { unreachable!() };
                    let segments = &chain.segments[segments.clone()];
                    prop_assert!(segments.len() <= limits.segments);
                    let mut to = *remote;
                    for segment in segments {
                        let from = segment.address..segment.address + u64::from(segment.bytes);
                        moved.extend(from.map(|from| { to += 1; (segment.key, from, *remote_key, to - 1) }));
                    }
                    prop_assert!(to - remote <= limits.bytes.into() && to > *remote);
                }
                let last = chain.postings.last().map(|p| p.request.clone());
                let carries_tag = matches!(last, Some(Request::Write { tag: Some(7), .. }));
                prop_assert!(carries_tag);
            }
            let want: Vec<_> = order.runs.iter().flat_map(|run| {
                (0..run.bytes).map(|at| (run.local_key, run.local + at, run.remote_key, run.remote + at))
            }).collect();
            prop_assert_eq!(moved, want);
        }
    }
}
