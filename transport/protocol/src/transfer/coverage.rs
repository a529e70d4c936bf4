//! A set of (token, layer) cells of one transfer, as few rectangles.
//!
//! Layers are cut into bands with equal token ranges, so the form is canonical: equal sets have equal bands. The number of
//! rectangles is limited, because a peer chooses how it cuts its writes.

use std::cmp::Ordering;
use std::ops::Range;

use super::rect::Rect;

/// A set of cells. Every operation that may cut it into more pieces is limited to [`Coverage::MAX_RECTS`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Coverage {
    /// By layer, disjoint, none without tokens, none equal to its direct neighbour.
    bands: Vec<Band>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Band {
    layers: Range<u16>,
    /// In order, disjoint, not touching.
    tokens: Vec<Range<u32>>,
}

/// A set was cut into too many rectangles.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("more than {limit} rectangles; write larger pieces, or in order")]
pub struct TooFragmented {
    /// The most rectangles.
    pub limit: usize,
}

impl Coverage {
    /// The most rectangles of one set.
    pub const MAX_RECTS: usize = 1024;

    /// The empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { bands: Vec::new() }
    }

    /// All cells of some rectangles, which may overlap.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn of(rects: &[Rect]) -> Result<Self, TooFragmented> {
        let mut all = Self::new();
        for &rect in rects {
            all.insert(rect)?;
        }
        Ok(all)
    }

    /// Adds the cells of a rectangle; on an error nothing changes.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn insert(&mut self, rect: Rect) -> Result<(), TooFragmented> {
        *self = self.combine(&rect.into(), union)?;
        Ok(())
    }

    /// Takes the cells of a rectangle out; on an error nothing changes.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn remove(&mut self, rect: Rect) -> Result<(), TooFragmented> {
        *self = self.combine(&rect.into(), minus)?;
        Ok(())
    }

    /// The cells in either set.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn union(&self, other: &Self) -> Result<Self, TooFragmented> {
        self.combine(other, union)
    }

    /// The cells in this set and not in the other.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn minus(&self, other: &Self) -> Result<Self, TooFragmented> {
        self.combine(other, minus)
    }

    /// The cells in both sets.
    ///
    /// # Errors
    /// [`TooFragmented`].
    pub fn intersect(&self, other: &Self) -> Result<Self, TooFragmented> {
        self.combine(other, intersect)
    }

    /// Whether all cells of `rect` are in the set.
    #[must_use]
    pub fn contains(&self, rect: Rect) -> bool {
        let (tokens, layers) = (rect.tokens(), rect.layers());
        let mut next_layer = layers.start;
        for band in self.bands_over(&layers) {
            if band.layers.start > next_layer
                || !band.tokens.iter().any(|t| t.start <= tokens.start && tokens.end <= t.end)
            {
                return false;
            }
            next_layer = band.layers.end;
        }
        next_layer >= layers.end
    }

    /// Whether any cell of `rect` is in the set.
    #[must_use]
    pub fn overlaps(&self, rect: Rect) -> bool {
        let tokens = rect.tokens();
        self.bands_over(&rect.layers())
            .any(|band| band.tokens.iter().any(|t| t.start < tokens.end && tokens.start < t.end))
    }

    /// Whether all cells of the other set are in this one.
    #[must_use]
    pub fn contains_all(&self, other: &Self) -> bool {
        other.rects().all(|rect| self.contains(rect))
    }

    /// Whether there are no cells.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bands.is_empty()
    }

    /// How many cells.
    #[must_use]
    pub fn cells(&self) -> u64 {
        self.rects().map(Rect::cells).sum()
    }

    /// Disjoint rectangles that make up the set: by layer, then by token.
    pub fn rects(&self) -> impl Iterator<Item = Rect> {
        self.bands.iter().flat_map(|band| {
            band.tokens.iter().filter_map(|tokens| Rect::new(tokens.clone(), band.layers.clone()).ok())
        })
    }

    /// The rectangle with the lowest token, and of those the one with the lowest layer.
    #[must_use]
    pub fn first(&self) -> Option<Rect> {
        self.rects().min_by_key(|rect| (rect.tokens().start, rect.layers().start))
    }

    /// The lowest token of any layer.
    #[must_use]
    pub fn first_token(&self) -> Option<u32> {
        self.bands.iter().filter_map(|band| band.tokens.first()).map(|tokens| tokens.start).min()
    }

    /// One past the highest token of any layer; 0 for the empty set.
    #[must_use]
    pub fn end_token(&self) -> u32 {
        self.bands.iter().filter_map(|band| band.tokens.last()).map(|tokens| tokens.end).max().unwrap_or(0)
    }

    fn bands_over(&self, layers: &Range<u16>) -> impl Iterator<Item = &Band> {
        let (start, end) = (layers.start, layers.end);
        let first = self.bands.partition_point(|band| band.layers.end <= start);
        self.bands[first..].iter().take_while(move |band| band.layers.start < end)
    }

    /// Sweeps over the layers of both sets and joins the token ranges of each band.
    fn combine(&self, other: &Self, join: Join) -> Result<Self, TooFragmented> {
        let mut edges: Vec<u16> =
            self.bands.iter().chain(&other.bands).flat_map(|band| [band.layers.start, band.layers.end]).collect();
        edges.sort_unstable();
        edges.dedup();
        let mut bands: Vec<Band> = Vec::with_capacity(edges.len());
        let mut rects = 0;
        let (mut ours, mut theirs) = (self.bands.iter().peekable(), other.bands.iter().peekable());
        for edge in edges.windows(2) {
            let layers = edge[0]..edge[1];
            let tokens = join(tokens_at(&mut ours, &layers), tokens_at(&mut theirs, &layers));
            if tokens.is_empty() {
                continue;
            }
            match bands.last_mut() {
                Some(last) if last.layers.end == layers.start && last.tokens == tokens => last.layers.end = layers.end,
                _ => {
                    rects += tokens.len();
                    if rects > Self::MAX_RECTS {
                        return Err(TooFragmented { limit: Self::MAX_RECTS });
                    }
                    bands.push(Band { layers, tokens });
                }
            }
        }
        Ok(Self { bands })
    }
}

impl From<Rect> for Coverage {
    fn from(rect: Rect) -> Self {
        Self { bands: vec![Band { layers: rect.layers(), tokens: vec![rect.tokens()] }] }
    }
}

type Join = fn(&[Range<u32>], &[Range<u32>]) -> Vec<Range<u32>>;

/// The token ranges of the band that holds `layers`; bands before it are passed for good.
fn tokens_at<'a>(
    bands: &mut std::iter::Peekable<impl Iterator<Item = &'a Band>>,
    layers: &Range<u16>,
) -> &'a [Range<u32>] {
    while bands.next_if(|band| band.layers.end <= layers.start).is_some() {}
    match bands.peek() {
        Some(band) if band.layers.start <= layers.start => &band.tokens,
        Some(_) | None => &[],
    }
}

fn union(a: &[Range<u32>], b: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut all: Vec<Range<u32>> = Vec::with_capacity(a.len() + b.len());
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    loop {
        let next = match (a.peek(), b.peek()) {
            (Some(x), Some(y)) if x.start <= y.start => a.next(),
            (_, Some(_)) => b.next(),
            (_, None) => a.next(),
        };
        match (next, all.last_mut()) {
            (None, _) => return all,
            (Some(range), Some(last)) if range.start <= last.end => last.end = last.end.max(range.end),
            (Some(range), _) => all.push(range.clone()),
        }
    }
}

fn intersect(a: &[Range<u32>], b: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut both = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let (start, end) = (x.start.max(y.start), x.end.min(y.end));
        if start < end {
            both.push(start..end);
        }
        match x.end.cmp(&y.end) {
            Ordering::Less => i += 1,
            Ordering::Equal | Ordering::Greater => j += 1,
        }
    }
    both
}

fn minus(a: &[Range<u32>], b: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut rest = Vec::new();
    let mut cuts = b.iter().peekable();
    for range in a {
        let mut start = range.start;
        while let Some(cut) = cuts.peek() {
            if cut.start >= range.end {
                break;
            }
            if start < cut.start {
                rest.push(start..cut.start);
            }
            start = start.max(cut.end);
            if cut.end > range.end {
                break;
            }
            cuts.next();
        }
        if start < range.end {
            rest.push(start..range.end);
        }
    }
    rest
}

#[cfg(test)]
mod tests;
