//! Words that were meant: the nearest one to what somebody wrote.

/// The beginning of what somebody wrote, fit for one line of a log.
pub(crate) fn short(text: &str) -> String {
    const MOST: usize = 64;
    let mut shown: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push_str("...");
    }
    shown
}

/// How many letters must be added, taken or changed, or swapped with their neighbour, to make one word of the other.
pub(crate) fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    // Rows of the table for the letters of `one` before this one, for all beginnings of `other`.
    let (mut before, mut last) = (vec![0; other.len() + 1], (0..=other.len()).collect::<Vec<_>>());
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1; other.len() + 1];
        for (j, b) in other.iter().enumerate() {
            let changed = last[j] + usize::from(a != b);
            row[j + 1] = changed.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && one[i - 1] == *b && other[j - 1] == *a {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        (before, last) = (last, row);
    }
    last[other.len()]
}

/// The nearest of some words, if it is so near that it may have been meant.
pub(crate) fn nearest<'a>(word: &str, of: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 256 {
        return None; // no key is as long, and the distance takes the product of the lengths
    }
    let nearest = of.min_by_key(|candidate| distance(word, candidate))?;
    (distance(word, nearest) <= 1 + word.chars().count() / 4).then_some(nearest)
}
