//! Bitmap rows: one bit per rule, and as many words as the table's rules need.

use std::sync::Arc;

use rustc_hash::FxHashMap;

/// Bits of a word.
const WORD: usize = u64::BITS as usize;

/// Index of a row within its [`Rows`]; below 2^31. Row 0 has no bit set.
pub(super) type Row = u32;

/// A set of rules of one table, by number.
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

    /// Removes a rule.
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

    /// Whether it contains no rule.
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
/// A row whose bits are in one word, as all rows of a table of up to 64 rules and most in larger ones, is stored as
/// that word and its index. A wider row has all its words, preceded by a summary: one bit for each non-zero word. So
/// two rows with few common bits are intersected with one or two words, however many rules there are (aggregated bit
/// vectors: Baboescu and Varghese, SIGCOMM 2001).
#[derive(Clone, Debug)]
pub(super) struct Rows {
    heads: Arc<[RowHead]>,
    /// Wide rows: summary, then words.
    wide: Arc<[u64]>,
    /// Words of a wide row.
    width: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RowHead {
    /// The row's only word.
    bits: u64,
    /// Index of that word; with [`WIDE`], the offset of the row among the wide ones.
    place: u32,
}

/// Marks the offset of a wide row.
const WIDE: u32 = 1 << 31;

/// The row without rules.
const NO_RULE: RowHead = RowHead { bits: 0, place: 0 };

impl Rows {
    /// The lowest rule in `(a ∪ b) ∩ c`.
    #[inline]
    pub(super) fn first_common(&self, a: Row, b: Row, c: Row) -> Option<u32> {
        let [a, b, c] = [a, b, c].map(|row| self.heads[row as usize]);
        if (a.place | b.place | c.place) & WIDE != 0 {
            return self.first_common_wide([a, b, c], 0);
        }
        let from = |row: RowHead| if row.place == c.place { row.bits } else { 0 };
        let common = (from(a) | from(b)) & c.bits;
        if common == 0 { None } else { Some(c.place * u64::BITS + common.trailing_zeros()) }
    }

    /// The lowest rule from `start` on in `(a ∪ b) ∩ c`.
    #[inline]
    pub(super) fn first_common_from(&self, a: Row, b: Row, c: Row, start: u32) -> Option<u32> {
        self.first_common_wide([a, b, c].map(|row| self.heads[row as usize]), start)
    }

    fn first_common_wide(&self, [a, b, c]: [RowHead; 3], start: u32) -> Option<u32> {
        let (first_place, mask) = (start as usize / WORD, u64::MAX << (start as usize % WORD));
        let common = |place: usize| {
            let common = (self.word(a, place) | self.word(b, place)) & self.word(c, place);
            let common = if place == first_place { common & mask } else { common };
            (common != 0).then(|| (place * WORD) as u32 + common.trailing_zeros())
        };
        // Where one side has a single word, there is nothing to search.
        let single = if c.place & WIDE == 0 { Some(c) } else { (b == NO_RULE && a.place & WIDE == 0).then_some(a) };
        if let Some(RowHead { place, .. }) = single {
            return if (place as usize) < first_place { None } else { common(place as usize) };
        }
        if b == NO_RULE && self.summary() == 1 {
            return self.first_common_of_two(a, c, start);
        }
        for part in first_place / WORD..self.summary() {
            let summary = |row| self.part_of_summary(row, part);
            let mut candidates = (summary(a) | summary(b)) & summary(c);
            if part == first_place / WORD {
                candidates &= u64::MAX << (first_place % WORD);
            }
            while candidates != 0 {
                if let Some(rule) = common(part * WORD + candidates.trailing_zeros() as usize) {
                    return Some(rule);
                }
                candidates &= candidates - 1;
            }
        }
        None
    }

    /// The same for two wide rows of up to 4,096 rules, which have one word of summary: most of the wide ones.
    #[inline]
    fn first_common_of_two(&self, a: RowHead, c: RowHead, start: u32) -> Option<u32> {
        let (first_place, mask) = (start / u64::BITS, u64::MAX << (start % u64::BITS));
        let row = |row: RowHead| &self.wide[(row.place & !WIDE) as usize..][..=self.width];
        let ((a, a_words), (c, c_words)) = (row(a).split_first()?, row(c).split_first()?);
        let mut candidates = a & c & u64::MAX.checked_shl(first_place).unwrap_or(0);
        while candidates != 0 {
            let place = candidates.trailing_zeros();
            let common = a_words[place as usize] & c_words[place as usize];
            let common = if place == first_place { common & mask } else { common };
            if common != 0 {
                return Some(place * u64::BITS + common.trailing_zeros());
            }
            candidates &= candidates - 1;
        }
        None
    }

    fn summary(&self) -> usize {
        self.width.div_ceil(WORD)
    }

    fn part_of_summary(&self, row: RowHead, part: usize) -> u64 {
        if row.place & WIDE != 0 {
            return self.wide[(row.place & !WIDE) as usize + part];
        }
        let place = row.place as usize;
        if place / WORD == part { u64::from(row.bits != 0) << (place % WORD) } else { 0 }
    }

    fn word(&self, row: RowHead, place: usize) -> u64 {
        if row.place & WIDE != 0 {
            return self.wide[(row.place & !WIDE) as usize + self.summary() + place];
        }
        if row.place as usize == place { row.bits } else { 0 }
    }

    /// The rules of a row.
    pub(super) fn rules(&self, row: Row) -> RuleSet {
        let mut words: Vec<u64> = (0..self.width).map(|place| self.word(self.heads[row as usize], place)).collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        RuleSet { words }
    }

    /// These rows plus one with the given rules, unless it exists; and its index.
    pub(super) fn with(&self, rules: &RuleSet) -> (Self, Row) {
        if let Some(row) = (0..self.heads.len() as Row).find(|row| self.is_row(*row, rules)) {
            return (self.clone(), row);
        }
        let mut wide = self.wide.to_vec();
        let head = encode(rules, self.width, &mut wide);
        let heads: Arc<[RowHead]> = self.heads.iter().copied().chain([head]).collect();
        let row = heads.len() as Row - 1;
        (Self { heads, wide: wide.into(), width: self.width }, row)
    }

    fn is_row(&self, row: Row, rules: &RuleSet) -> bool {
        let head = self.heads[row as usize];
        match one_word(rules) {
            Some(one) => head == one,
            None => head.place & WIDE != 0 && self.rules(row) == *rules,
        }
    }

    /// Size of the rows in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.heads) + size_of_val(&*self.wide)
    }
}

/// A row whose bits are in one word.
fn one_word(rules: &RuleSet) -> Option<RowHead> {
    let mut words = (0u32..).zip(&rules.words).filter(|(_, word)| **word != 0);
    match (words.next(), words.next()) {
        (None, _) => Some(NO_RULE),
        (Some((place, bits)), None) => Some(RowHead { bits: *bits, place }),
        (Some(_), Some(_)) => None,
    }
}

fn encode(rules: &RuleSet, width: usize, wide: &mut Vec<u64>) -> RowHead {
    if let Some(head) = one_word(rules) {
        return head;
    }
    let start = wide.len();
    let summary = width.div_ceil(WORD);
    wide.resize(start + summary + width, 0);
    for (place, word) in rules.words.iter().enumerate().filter(|(_, word)| **word != 0) {
        wide[start + place / WORD] |= 1 << (place % WORD);
        wide[start + summary + place] = *word;
    }
    RowHead { bits: 0, place: WIDE | start as u32 }
}

/// Collects rows without duplicates.
pub(super) struct RowsBuilder {
    known: FxHashMap<RuleSet, Row>,
    heads: Vec<RowHead>,
    wide: Vec<u64>,
    width: usize,
}

impl RowsBuilder {
    /// For a table with this many rules.
    pub(super) fn new(rules: usize) -> Self {
        let width = rules.div_ceil(WORD).max(1);
        let known = FxHashMap::from_iter([(RuleSet::default(), 0)]);
        Self { known, heads: vec![NO_RULE], wide: Vec::new(), width }
    }

    /// Index of the row with these rules.
    pub(super) fn row(&mut self, rules: &RuleSet) -> Row {
        if let Some(row) = self.known.get(rules) {
            return *row;
        }
        let row = self.heads.len() as Row;
        self.heads.push(encode(rules, self.width, &mut self.wide));
        self.known.insert(rules.clone(), row);
        row
    }

    pub(super) fn finish(self) -> Rows {
        Rows { heads: self.heads.into(), wide: self.wide.into(), width: self.width }
    }
}

/// The rules that apply at a point while sweeping along a line (ports, addresses). A rule may have several overlapping
/// ranges.
#[derive(Default)]
pub(super) struct RuleSweep {
    depth: FxHashMap<u32, u32>,
    current: RuleSet,
}

impl RuleSweep {
    /// A range of this rule begins.
    pub(super) fn enter(&mut self, rule: u32) {
        let depth = self.depth.entry(rule).or_default();
        *depth += 1;
        if *depth == 1 {
            self.current.insert(rule);
        }
    }

    /// A range of this rule ends.
    pub(super) fn leave(&mut self, rule: u32) {
        let depth = self.depth.get_mut(&rule).expect("a range ends that had begun");
        *depth -= 1;
        if *depth == 0 {
            self.depth.remove(&rule);
            self.current.remove(rule);
        }
    }

    /// The rules that apply here.
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
            picks in prop::collection::vec((prop_oneof![0u32..130, any::<u32>()], 0usize..3), 0..40),
            start in prop_oneof![0u32..200, any::<u32>()],
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
            let start = start % (rules + 1);
            let mut common = sets[0].union(&sets[1]).filter(|rule| sets[2].contains(rule));
            let expected = common.find(|rule| **rule >= start).copied();
            prop_assert_eq!(rows.first_common_from(row[0], row[1], row[2], start), expected);
            prop_assert_eq!(rows.rules(row[2]), sets[2].iter().copied().collect());
        }
    }

    #[test]
    fn equal_rows_are_stored_once() {
        let mut builder = RowsBuilder::new(70);
        let set: RuleSet = [1, 69].into_iter().collect();
        let row = builder.row(&set);
        assert_eq!(builder.row(&set), row);
        let rows = builder.finish();
        assert_eq!(rows.with(&set).1, row);
        let (more, new) = rows.with(&[69].into_iter().collect());
        assert!(new > row);
        assert_eq!(more.with(&[69].into_iter().collect()).1, new);
        assert_eq!(more.first_common(row, 0, new), Some(69));
    }
}
