//! Bitmap rows: one bit a rule, a row as many words as the table's rules need.

use std::sync::Arc;

use rustc_hash::FxHashMap;

/// Bits of a word.
const WORD: usize = u64::BITS as usize;

/// The number of a row within its [`Rows`]. Row 0 has no bit set.
pub(super) type Row = u32;

/// A set of rules of one table, by their numbers.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct RuleSet {
    /// Without trailing zero words, so that equal sets are equal values.
    words: Vec<u64>,
}

impl RuleSet {
    /// Adds a rule.
    pub fn insert(&mut self, rule: u32) {
        let word = rule as usize / WORD;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (rule as usize % WORD);
    }

    /// Takes a rule out.
    pub fn remove(&mut self, rule: u32) {
        if let Some(word) = self.words.get_mut(rule as usize / WORD) {
            *word &= !(1 << (rule as usize % WORD));
        }
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    /// Adds all rules of another set.
    pub fn union_with(&mut self, other: &Self) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
        }
    }

    /// Whether no rule is in it.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }
}

impl FromIterator<u32> for RuleSet {
    fn from_iter<I: IntoIterator<Item = u32>>(rules: I) -> Self {
        let mut set = Self::default();
        rules.into_iter().for_each(|rule| set.insert(rule));
        set
    }
}

/// The distinct rows of a table.
///
/// A table of up to 64 rules has rows of one word. A wider row is preceded by a summary, one bit for each of its
/// words that is not zero: two rows with few bits in common then meet in one or two words, however wide they are
/// (the aggregated bit vectors of Baboescu and Varghese, SIGCOMM 2001).
#[derive(Clone, Debug)]
pub(super) struct Rows {
    words: Arc<[u64]>,
    /// Words of a row without its summary.
    width: usize,
    /// Words of a row's summary; 0 where a row is one word.
    summary: usize,
}

impl Rows {
    /// The lowest rule in `(a ∪ b) ∩ c`.
    #[inline]
    pub(super) fn first_common(&self, a: Row, b: Row, c: Row) -> Option<u32> {
        if self.summary == 0 {
            let common = (self.words[a as usize] | self.words[b as usize]) & self.words[c as usize];
            return if common == 0 { None } else { Some(common.trailing_zeros()) };
        }
        self.first_common_wide(a, b, c)
    }

    fn first_common_wide(&self, a: Row, b: Row, c: Row) -> Option<u32> {
        let (a, b, c) = (self.wide(a), self.wide(b), self.wide(c));
        for part in 0..self.summary {
            let mut candidates = (a[part] | b[part]) & c[part];
            while candidates != 0 {
                let word = part * WORD + candidates.trailing_zeros() as usize;
                let at = self.summary + word;
                let common = (a[at] | b[at]) & c[at];
                if common != 0 {
                    return Some((word * WORD) as u32 + common.trailing_zeros());
                }
                candidates &= candidates - 1;
            }
        }
        None
    }

    /// A row with its summary.
    fn wide(&self, row: Row) -> &[u64] {
        let stride = self.stride();
        &self.words[row as usize * stride..][..stride]
    }

    fn stride(&self) -> usize {
        self.summary + self.width
    }

    /// The rules of a row.
    #[cfg(test)]
    pub(super) fn rules(&self, row: Row) -> RuleSet {
        let mut set = RuleSet { words: self.wide(row)[self.summary..].to_vec() };
        while set.words.last() == Some(&0) {
            set.words.pop();
        }
        set
    }

    /// These rows and one more with the given rules, if there is none like it yet; and its number.
    pub(super) fn with(&self, rules: &RuleSet) -> (Self, Row) {
        let mut encoded = Vec::with_capacity(self.stride());
        encode(rules, self.width, self.summary, &mut encoded);
        if let Some(row) = self.words.chunks_exact(self.stride()).position(|row| row == encoded) {
            return (self.clone(), row as Row);
        }
        let row = (self.words.len() / self.stride()) as Row;
        let words = self.words.iter().copied().chain(encoded).collect();
        (Self { words, ..*self }, row)
    }

    /// How many octets the rows take.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.words)
    }
}

fn encode(rules: &RuleSet, width: usize, summary: usize, into: &mut Vec<u64>) {
    let start = into.len();
    into.resize(start + summary + width, 0);
    for (index, word) in rules.words.iter().enumerate() {
        into[start + summary + index] = *word;
        if summary > 0 && *word != 0 {
            into[start + index / WORD] |= 1 << (index % WORD);
        }
    }
}

/// Collects rows, equal ones once.
pub(super) struct RowsBuilder {
    known: FxHashMap<RuleSet, Row>,
    words: Vec<u64>,
    width: usize,
    summary: usize,
}

impl RowsBuilder {
    /// For a table of this many rules.
    pub(super) fn new(rules: usize) -> Self {
        let width = rules.div_ceil(WORD).max(1);
        let summary = if width == 1 { 0 } else { width.div_ceil(WORD) };
        let mut builder = Self { known: FxHashMap::default(), words: Vec::new(), width, summary };
        builder.row(&RuleSet::default());
        builder
    }

    /// The number of the row with these rules.
    pub(super) fn row(&mut self, rules: &RuleSet) -> Row {
        if let Some(row) = self.known.get(rules) {
            return *row;
        }
        let row = self.known.len() as Row;
        encode(rules, self.width, self.summary, &mut self.words);
        self.known.insert(rules.clone(), row);
        row
    }

    pub(super) fn finish(self) -> Rows {
        Rows { words: self.words.into(), width: self.width, summary: self.summary }
    }
}

/// The rules that hold at a point of a line (ports, addresses) as one walks along it: each rule may be given by
/// several overlapping ranges.
#[derive(Default)]
pub(super) struct Sweep {
    depth: FxHashMap<u32, u32>,
    current: RuleSet,
}

impl Sweep {
    /// A range of this rule begins.
    pub(super) fn enter(&mut self, rule: u32) {
        let depth = self.depth.entry(rule).or_default();
        *depth += 1;
        if *depth == 1 {
            self.current.insert(rule);
        }
    }

    /// A range of this rule that had begun ends.
    pub(super) fn leave(&mut self, rule: u32) {
        let depth = self.depth.get_mut(&rule).expect("a range ends that had begun");
        *depth -= 1;
        if *depth == 0 {
            self.depth.remove(&rule);
            self.current.remove(rule);
        }
    }

    /// The rules that hold here.
    pub(super) fn current(&self) -> &RuleSet {
        &self.current
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn first_common_is_the_lowest_of_the_sets(
            rules in 1u32..9000,
            picks in prop::collection::vec((any::<u32>(), 0usize..3), 0..40),
        ) {
            let mut sets: [BTreeSet<u32>; 3] = Default::default();
            for (rule, which) in picks {
                sets[which].insert(rule % rules);
            }
            let mut builder = RowsBuilder::new(rules as usize);
            let row = sets.each_ref().map(|set| builder.row(&set.iter().copied().collect()));
            let rows = builder.finish();
            let expected = sets[0].union(&sets[1]).filter(|rule| sets[2].contains(rule)).min().copied();
            prop_assert_eq!(rows.first_common(row[0], row[1], row[2]), expected);
            prop_assert_eq!(rows.rules(row[2]), sets[2].iter().copied().collect());
        }
    }

    #[test]
    fn equal_rows_are_kept_once_also_when_added_later() {
        let mut builder = RowsBuilder::new(70);
        let set: RuleSet = [1, 69].into_iter().collect();
        let row = builder.row(&set);
        assert_eq!(builder.row(&set), row);
        let rows = builder.finish();
        assert_eq!(rows.with(&set).1, row);
        let (more, new) = rows.with(&[69].into_iter().collect());
        assert_eq!(new, row + 1);
        assert_eq!(more.first_common(row, 0, new), Some(69));
    }
}
