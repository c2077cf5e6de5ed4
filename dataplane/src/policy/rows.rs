//! Bitmap rows: one bit per rule, and as many words as the table's rules need.

use std::cmp::Ordering;
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
/// A row whose bits are in up to two words is stored as these words and their indexes: all rows of a table of up to 128
/// rules, and in larger ones the rows of a port, which few rules have: one of each tier. A wider row has all its words,
/// preceded by a summary: one bit for each non-zero word. So two rows with few common bits are intersected with a few
/// words, however many rules there are (aggregated bit vectors: Baboescu and Varghese, SIGCOMM 2001).
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
    /// The row's words that are not zero, in their order.
    bits: [u64; 2],
    /// Their indexes; with [`WIDE`], the first is the offset of the row's words among the wide ones.
    places: [u32; 2],
}

/// Marks the offset of a wide row.
const WIDE: u32 = 1 << 31;

/// The row without rules.
const NO_RULE: RowHead = RowHead { bits: [0; 2], places: [0; 2] };

impl RowHead {
    #[inline(always)]
    fn is_wide(&self) -> bool {
        self.places[0] & WIDE != 0
    }

    /// The word with this index of a row that is not wide.
    #[inline(always)]
    fn word(&self, place: u32) -> u64 {
        let at = |number: usize| if self.places[number] == place { self.bits[number] } else { 0 };
        at(0) | at(1)
    }
}

/// The rules that are common to rows, where these are in two words at most: the words, with their indexes in order.
#[derive(Clone, Copy)]
struct CommonWords([(u32, u64); 2]);

impl CommonWords {
    /// The lowest rule.
    #[inline(always)]
    fn first(self) -> Option<u32> {
        let [first, second] = self.0;
        let (place, bits) = if first.1 != 0 { first } else { second };
        lowest(place, bits)
    }

    /// The lowest rule from `start` on.
    #[inline(always)]
    fn first_from(self, start: u32) -> Option<u32> {
        Self(self.0.map(|(place, bits)| (place, bits & from(place, start)))).first()
    }
}

impl Rows {
    /// The lowest rule in `(a ∪ b) ∩ c`.
    #[inline]
    pub(super) fn first_common(&self, rows: [Row; 3]) -> Option<u32> {
        if self.width == 1 {
            return lowest(0, self.common_word(rows));
        }
        match self.common_words(rows) {
            Some(common) => common.first(),
            None => self.search(rows, 0),
        }
    }

    /// The lowest rule from `start` on in `(a ∪ b) ∩ c`.
    #[inline]
    pub(super) fn first_common_from(&self, rows: [Row; 3], start: u32) -> Option<u32> {
        if self.width == 1 {
            return lowest(0, self.common_word(rows) & from(0, start));
        }
        match self.common_words(rows) {
            Some(common) => common.first_from(start),
            None => self.search(rows, start),
        }
    }

    /// `(a ∪ b) ∩ c` of a table of up to 64 rules, as most are.
    #[inline(always)]
    fn common_word(&self, rows: [Row; 3]) -> u64 {
        let [a, b, c] = rows.map(|row| self.heads[row as usize].bits[0]);
        (a | b) & c
    }

    /// `(a ∪ b) ∩ c`, if `c` has two words at most: then there is nothing to search.
    #[inline(always)]
    fn common_words(&self, [a, b, c]: [Row; 3]) -> Option<CommonWords> {
        let [head_a, head_b, head_c] = [a, b, c].map(|row| &self.heads[row as usize]);
        if head_c.is_wide() {
            return None;
        }
        let common = |number: usize| {
            let (place, bits) = (head_c.places[number], head_c.bits[number]);
            // In most tables no rule has blocks.
            let of_b = if b == 0 { 0 } else { self.word(head_b, place) };
            (place, (self.word(head_a, place) | of_b) & bits)
        };
        Some(CommonWords([common(0), if head_c.bits[1] == 0 { (0, 0) } else { common(1) }]))
    }

    /// The lowest rule from `start` on in `(a ∪ b) ∩ c`, where `c` is wide.
    fn search(&self, [a, b, c]: [Row; 3], start: u32) -> Option<u32> {
        let [head_a, head_b, head_c] = [a, b, c].map(|row| &self.heads[row as usize]);
        let common = |place: u32| {
            let common = (self.word(head_a, place) | self.word(head_b, place)) & self.word(head_c, place);
            lowest(place, common & from(place, start))
        };
        if b == 0 && !head_a.is_wide() {
            return head_a.places.into_iter().find_map(common);
        }
        for part in start as usize / WORD / WORD..self.summary() {
            let summary = |row| self.part_of_summary(row, part);
            let mut candidates = (summary(head_a) | summary(head_b)) & summary(head_c);
            while candidates != 0 {
                let place = part as u32 * u64::BITS + candidates.trailing_zeros();
                if let Some(rule) = common(place) {
                    return Some(rule);
                }
                candidates &= candidates - 1;
            }
        }
        None
    }

    /// Whether a row has this rule.
    pub(super) fn has(&self, row: Row, rule: u32) -> bool {
        self.word(&self.heads[row as usize], rule / u64::BITS) >> (rule % u64::BITS) & 1 == 1
    }

    fn summary(&self) -> usize {
        self.width.div_ceil(WORD)
    }

    fn part_of_summary(&self, row: &RowHead, part: usize) -> u64 {
        if row.is_wide() {
            return self.wide[(row.places[0] & !WIDE) as usize - self.summary() + part];
        }
        let bit = |(place, bits): (u32, u64)| {
            let is_here = place as usize / WORD == part && bits != 0;
            u64::from(is_here) << (place as usize % WORD)
        };
        row.places.into_iter().zip(row.bits).map(bit).fold(0, |summary, bit| summary | bit)
    }

    #[inline(always)]
    fn word(&self, row: &RowHead, place: u32) -> u64 {
        if row.is_wide() { self.wide[(row.places[0] & !WIDE) as usize + place as usize] } else { row.word(place) }
    }

    /// The rules of a row.
    pub(super) fn rules(&self, row: Row) -> RuleSet {
        let mut words: Vec<u64> =
            (0..self.width as u32).map(|place| self.word(&self.heads[row as usize], place)).collect();
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
        match narrow(rules) {
            Some(narrow) => head == narrow,
            None => head.is_wide() && self.rules(row) == *rules,
        }
    }

    /// Size of the rows in bytes.
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.heads) + size_of_val(&*self.wide)
    }
}

/// The bits of this word from rule `start` on.
#[inline(always)]
fn from(place: u32, start: u32) -> u64 {
    match place.cmp(&(start / u64::BITS)) {
        Ordering::Less => 0,
        Ordering::Equal => u64::MAX << (start % u64::BITS),
        Ordering::Greater => u64::MAX,
    }
}

/// The lowest rule of this word of a row.
#[inline(always)]
fn lowest(place: u32, bits: u64) -> Option<u32> {
    if bits == 0 { None } else { Some(place * u64::BITS + bits.trailing_zeros()) }
}

/// A row whose bits are in two words at most.
fn narrow(rules: &RuleSet) -> Option<RowHead> {
    let mut words = (0u32..).zip(&rules.words).filter(|(_, word)| **word != 0);
    let first = words.next().map_or((0, 0), |(place, bits)| (place, *bits));
    let second = words.next().map_or((first.0, 0), |(place, bits)| (place, *bits));
    let head = RowHead { bits: [first.1, second.1], places: [first.0, second.0] };
    words.next().is_none().then_some(head)
}

fn encode(rules: &RuleSet, width: usize, wide: &mut Vec<u64>) -> RowHead {
    if let Some(head) = narrow(rules) {
        return head;
    }
    let start = wide.len();
    let summary = width.div_ceil(WORD);
    wide.resize(start + summary + width, 0);
    for (place, word) in rules.words.iter().enumerate().filter(|(_, word)| **word != 0) {
        wide[start + place / WORD] |= 1 << (place % WORD);
        wide[start + summary + place] = *word;
    }
    RowHead { places: [WIDE | (start + summary) as u32, 0], ..NO_RULE }
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

    /// None, those of a narrow row, or those of a wide one.
    fn any_rules() -> impl Strategy<Value = Vec<u32>> {
        let rule = || prop_oneof![0u32..180, any::<u32>()];
        prop_oneof![
            Just(Vec::new()),
            prop::collection::vec(rule(), 1..4),
            prop::collection::vec(rule(), 10..40),
            Just((0..180).step_by(2).collect()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8192))]

        #[test]
        fn first_common_is_the_lowest_of_the_sets(
            // Of one word, of two or three, and of many.
            rules in prop_oneof![1u32..=64, 65u32..180, 1u32..9000],
            picks in [any_rules(), any_rules(), any_rules()],
            start in prop_oneof![0u32..200, any::<u32>()],
        ) {
            let sets = picks.map(|picks| picks.into_iter().map(|rule| rule % rules).collect::<BTreeSet<u32>>());
            let mut builder = RowsBuilder::new(rules as usize);
            let row = sets.each_ref().map(|set| builder.row(&set.iter().copied().collect()));
            let rows = builder.finish();
            let expected = sets[0].union(&sets[1]).filter(|rule| sets[2].contains(rule)).min().copied();
            prop_assert_eq!(rows.first_common(row), expected);
            let start = start % (rules + 1);
            let mut common = sets[0].union(&sets[1]).filter(|rule| sets[2].contains(rule));
            let expected = common.find(|rule| **rule >= start).copied();
            prop_assert_eq!(rows.first_common_from(row, start), expected);
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
        assert_eq!(more.first_common([row, 0, new]), Some(69));
    }
}
