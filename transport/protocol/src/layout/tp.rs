//! Which tensor-parallel rank holds which KV heads, and who reads from whom when the two sides' sizes differ.

use std::ops::Range;

use crate::ids::TpRank;

/// What a rank takes from one rank of the other side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeadSource {
    /// The rank that is read.
    pub tp_rank: TpRank,
    /// KV heads of the model.
    pub heads: Range<u16>,
}

/// Why heads cannot be spread over ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TpError {
    /// A group or a model of nothing.
    #[error("tensor parallel: {axis} is 0; it must be at least 1")]
    Empty {
        /// `tp_size` or `total_heads`.
        axis: &'static str,
    },
    /// The rank is not one of the group's.
    #[error("tensor parallel: rank {tp_rank} is outside a group of {tp_size}")]
    Rank {
        /// The rank.
        tp_rank: TpRank,
        /// The group's size.
        tp_size: u16,
    },
    /// Neither size divides the other.
    #[error(
        "tensor parallel: {total_heads} KV heads do not spread evenly over {tp_size} ranks; one must divide the other"
    )]
    Uneven {
        /// The group's size.
        tp_size: u16,
        /// KV heads of the model.
        total_heads: u16,
    },
}

/// The KV heads of the model that a rank holds.
///
/// Where heads run out, each is held by `tp_size / total_heads` ranks in a row, as vLLM and SGLang place them (their
/// `num_kv_head_replicas`). MLA has one head, which every rank holds.
///
/// # Errors
/// [`TpError`] if a size is 0, the rank is outside the group, or neither size divides the other.
pub fn heads_of(tp_rank: TpRank, tp_size: u16, total_heads: u16) -> Result<Range<u16>, TpError> {
    let group = Group::new(tp_size, total_heads)?;
    if tp_rank.get() >= tp_size {
        return Err(TpError::Rank { tp_rank, tp_size });
    }
    let first = tp_rank.get() / group.replicas * group.heads;
    Ok(first..first + group.heads)
}

/// From which ranks a destination rank takes which of its heads, by rising head; each head from exactly one rank.
///
/// Where the source holds a head several times, the destination's ranks that want it are spread over the holders.
///
/// # Errors
/// As [`heads_of`], for either side.
pub fn sources_of(
    dst_rank: TpRank,
    dst_tp_size: u16,
    src_tp_size: u16,
    total_heads: u16,
) -> Result<Vec<HeadSource>, TpError> {
    let wanted = heads_of(dst_rank, dst_tp_size, total_heads)?;
    let (dst, src) = (Group::new(dst_tp_size, total_heads)?, Group::new(src_tp_size, total_heads)?);
    let copy = u32::from(dst_rank.get() % dst.replicas) * u32::from(src.replicas) / u32::from(dst.replicas);
    let mut out: Vec<HeadSource> = Vec::new();
    let mut head = wanted.start;
    while head < wanted.end {
        let holder = head / src.heads;
        // `copy` is below `src.replicas`, and `holder * replicas` below the group's size.
        let tp_rank = TpRank::new(holder * src.replicas + copy as u16);
        let end = wanted.end.min((holder + 1) * src.heads);
        out.push(HeadSource { tp_rank, heads: head..end });
        head = end;
    }
    Ok(out)
}

/// How many destination ranks read from a source rank, and so how many must have finished before it lets go.
///
/// 0 for a holder of a replicated head whom no one chose.
///
/// # Errors
/// As [`heads_of`], for either side.
pub fn readers_of(src_rank: TpRank, src_tp_size: u16, dst_tp_size: u16, total_heads: u16) -> Result<u16, TpError> {
    let held = heads_of(src_rank, src_tp_size, total_heads)?;
    let dst = Group::new(dst_tp_size, total_heads)?;
    let ranks = held.start / dst.heads * dst.replicas..(held.end - 1) / dst.heads * dst.replicas + dst.replicas;
    let mut readers = 0;
    for rank in ranks {
        let sources = sources_of(TpRank::new(rank), dst_tp_size, src_tp_size, total_heads)?;
        readers += u16::from(sources.iter().any(|source| source.tp_rank == src_rank));
    }
    Ok(readers)
}

/// How heads lie on a group's ranks: `heads` on each, each held by `replicas` ranks in a row.
struct Group {
    heads: u16,
    replicas: u16,
}

impl Group {
    const fn new(tp_size: u16, total_heads: u16) -> Result<Self, TpError> {
        if tp_size == 0 {
            return Err(TpError::Empty { axis: "tp_size" });
        }
        if total_heads == 0 {
            return Err(TpError::Empty { axis: "total_heads" });
        }
        if total_heads.is_multiple_of(tp_size) {
            Ok(Self { heads: total_heads / tp_size, replicas: 1 })
        } else if tp_size.is_multiple_of(total_heads) {
            Ok(Self { heads: 1, replicas: tp_size / total_heads })
        } else {
            Err(TpError::Uneven { tp_size, total_heads })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(sources: &[HeadSource]) -> Vec<u16> {
        sources.iter().map(|source| source.tp_rank.get()).collect()
    }

    /// Fact 47 of the vLLM contract: (tp2, rank1, remote2) -> (1); (tp4, rank2, remote2) -> (1); (tp1, rank0, remote2) -> (0, 1).
    #[test]
    fn a_rank_reads_from_the_ranks_that_hold_its_heads() {
        for (tp_size, rank, remote, want) in
            [(2, 1, 2, vec![1]), (4, 2, 2, vec![1]), (1, 0, 2, vec![0, 1]), (16, 9, 8, vec![4]), (8, 3, 16, vec![6])]
        {
            let sources = sources_of(TpRank::new(rank), tp_size, remote, 8).unwrap();
            assert_eq!(ranks(&sources), want, "tp{tp_size} rank {rank} from tp{remote}");
        }
    }

    /// Fact 48: the offset of a rank's heads inside the remote rank's: (rank 3, tp8, remote 1, 8 heads) -> 3; (5, 8, 2, 8) -> 1;
    /// (5, 16, 1, 8) -> 2.
    #[test]
    fn heads_lie_at_their_offset_in_the_rank_that_is_read() {
        for (rank, tp_size, remote, heads, want) in [(3, 8, 1, 8, 3), (5, 8, 2, 8, 1), (5, 16, 1, 8, 2)] {
            let sources = sources_of(TpRank::new(rank), tp_size, remote, heads).unwrap();
            let held = heads_of(sources[0].tp_rank, remote, heads).unwrap();
            assert_eq!(sources[0].heads.start - held.start, want, "rank {rank} of tp{tp_size} from tp{remote}");
        }
    }

    /// Fact 50: the count that a source rank waits for is the number of ranks that read from it.
    #[test]
    fn a_source_rank_waits_for_as_many_as_read_from_it() {
        for heads in [1, 2, 4, 8, 16] {
            for src_tp in [1, 2, 4, 8, 16] {
                for dst_tp in [1, 2, 4, 8, 16] {
                    let mut readers = vec![0; usize::from(src_tp)];
                    for rank in 0..dst_tp {
                        let wanted = heads_of(TpRank::new(rank), dst_tp, heads).unwrap();
                        let sources = sources_of(TpRank::new(rank), dst_tp, src_tp, heads).unwrap();
                        let mut next = wanted.start;
                        for source in &sources {
                            let held = heads_of(source.tp_rank, src_tp, heads).unwrap();
                            assert!(held.start <= source.heads.start && source.heads.end <= held.end);
                            assert_eq!(source.heads.start, next, "each head once, in order");
                            next = source.heads.end;
                            readers[usize::from(source.tp_rank.get())] += 1;
                        }
                        assert_eq!(next, wanted.end);
                    }
                    for (rank, &want) in readers.iter().enumerate() {
                        let rank = TpRank::new(rank as u16);
                        assert_eq!(
                            readers_of(rank, src_tp, dst_tp, heads).unwrap(),
                            want,
                            "{rank} of {src_tp} to {dst_tp}"
                        );
                    }
                    let (most, least) = (readers.iter().max().unwrap(), readers.iter().min().unwrap());
                    let spread = dst_tp >= src_tp || heads >= src_tp;
                    assert!(!spread || most - least == 0, "uneven: {readers:?}, {heads} heads, {src_tp} to {dst_tp}");
                }
            }
        }
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused() {
        for (tp_size, total_heads) in [(3, 8), (6, 4), (0, 8), (8, 0)] {
            assert!(heads_of(TpRank::new(0), tp_size, total_heads).is_err(), "{tp_size} ranks, {total_heads} heads");
        }
        let outside = heads_of(TpRank::new(4), 4, 8).unwrap_err();
        assert_eq!(outside, TpError::Rank { tp_rank: TpRank::new(4), tp_size: 4 });
        assert!(sources_of(TpRank::new(0), 4, 3, 8).is_err());
    }
}
