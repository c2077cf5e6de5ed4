//! Bitmap rows: one bit per rule, and as many words as the table's rules need.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};

const WORD: usize = u64::BITS as usize;

/// Index of a row within its [`Rows`]; below 2^31. Row 0 has no bit set.
pub(super) type Row = u32;

/// A set of rules of one table, by number. Its size grows with the rules in it, not with those of the table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuleSet {
    /// The words that are not zero, each with its index, in order.
    words: Vec<(u32, u64)>,
}

impl RuleSet {
    pub fn insert(&mut self, rule: u32) {
        let (place, bit) = (rule / u64::BITS, 1 << (rule % u64::BITS));
        match self.find(place) {
            Ok(at) => self.words[at].1 |= bit,
            Err(at) => self.words.insert(at, (place, bit)),
        }
    }

    pub fn remove(&mut self, rule: u32) {
        let Ok(at) = self.find(rule / u64::BITS) else { return };
        self.words[at].1 &= !(1 << (rule % u64::BITS));
        if self.words[at].1 == 0 {
            self.words.remove(at);
        }
    }

    /// Where the word with this index is, or belongs. Most sets grow at the end.
    fn find(&self, place: u32) -> Result<usize, usize> {
        match self.words.last() {
            Some(&(last, _)) if last >= place => self.words.binary_search_by_key(&place, |word| word.0),
            _ => Err(self.words.len()),
        }
    }

    pub fn union_with(&mut self, other: &Self) {
        if self.words.is_empty() {
            self.words.clone_from(&other.words);
            return;
        }
        if other.words.is_empty() {
            return;
        }
        let mine = std::mem::take(&mut self.words);
        self.words.reserve(mine.len() + other.words.len());
        let (mut mine, mut theirs) = (mine.into_iter().peekable(), other.words.iter().copied().peekable());
        loop {
            let next = match (mine.peek(), theirs.peek()) {
                (Some(own), Some(other)) if own.0 == other.0 => {
                    let both = (own.0, own.1 | other.1);
                    mine.next();
                    theirs.next();
                    Some(both)
                }
                (Some(own), Some(other)) if own.0 > other.0 => theirs.next(),
                (Some(_), _) => mine.next(),
                (None, _) => theirs.next(),
            };
            let Some(next) = next else { return };
            self.words.push(next);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The words by chunk, each with its number: the index of its first word divided by [`WORD`].
    fn chunks(&self) -> impl Iterator<Item = (u32, &[(u32, u64)])> {
        self.words.chunk_by(|a, b| a.0 / u64::BITS == b.0 / u64::BITS).map(|words| (words[0].0 / u64::BITS, words))
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
/// rules, and in larger ones the rows of a port, which few rules have: one of each tier. A wider row is a list of chunks of
/// 64 words. A chunk has a summary, one bit for each word that is not zero, and then these words. So two rows with few common bits are
/// intersected with a few words, however many rules there are (aggregated bit vectors: Baboescu and Varghese, SIGCOMM 2001). Rows share
/// equal chunks: neighbours on the line of addresses or ports differ by a rule or two, so memory grows with the blocks and
/// ranges that are written.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    heads: Arc<[RowHead]>,
    /// Wide rows: the place of each of their chunks.
    wide: Arc<[u32]>,
    /// Chunks: summary, then words. The first has no bit set.
    chunks: Arc<[u64]>,
    /// Words of a row.
    width: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RowHead {
    /// The row's words that are not zero, in their order.
    bits: [u64; 2],
    /// Their indexes; with [`WIDE`], the first is the offset of the row's chunks among those of the wide rows.
    places: [u32; 2],
}

/// Marks the offset of a wide row.
const WIDE: u32 = 1 << 31;

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
    #[inline(always)]
    fn first(self) -> Option<u32> {
        let [first, second] = self.0;
        let (place, bits) = if first.1 != 0 { first } else { second };
        lowest(place, bits)
    }

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
        for part in start as usize / WORD / WORD..self.parts() {
            let summary = |row| self.summary(row, part);
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

    pub(super) fn has(&self, row: Row, rule: u32) -> bool {
        self.word(&self.heads[row as usize], rule / u64::BITS) >> (rule % u64::BITS) & 1 == 1
    }

    fn parts(&self) -> usize {
        self.width.div_ceil(WORD)
    }

    /// Place of a chunk of a wide row.
    #[inline(always)]
    fn chunk(&self, row: &RowHead, part: usize) -> usize {
        self.wide[(row.places[0] & !WIDE) as usize + part] as usize
    }

    /// One bit for each word of a chunk that is not zero.
    fn summary(&self, row: &RowHead, part: usize) -> u64 {
        if row.is_wide() {
            return self.chunks[self.chunk(row, part)];
        }
        let bit = |(place, bits): (u32, u64)| {
            let is_here = place as usize / WORD == part && bits != 0;
            u64::from(is_here) << (place as usize % WORD)
        };
        row.places.into_iter().zip(row.bits).map(bit).fold(0, |summary, bit| summary | bit)
    }

    #[inline(always)]
    fn word(&self, row: &RowHead, place: u32) -> u64 {
        if !row.is_wide() {
            return row.word(place);
        }
        let chunk = self.chunk(row, place as usize / WORD);
        let (summary, bit) = (self.chunks[chunk], 1u64 << (place as usize % WORD));
        if summary & bit == 0 { 0 } else { self.chunks[chunk + 1 + (summary & (bit - 1)).count_ones() as usize] }
    }

    pub(super) fn rules(&self, row: Row) -> RuleSet {
        let words = (0..self.width as u32).map(|place| (place, self.word(&self.heads[row as usize], place)));
        RuleSet { words: words.filter(|(_, word)| *word != 0).collect() }
    }

    /// These rows plus one for each of these sets, unless it exists; and their indexes.
    pub(super) fn with(&self, sets: impl IntoIterator<Item = RuleSet>) -> (Self, Vec<Row>) {
        let mut rows = self.clone();
        let mut more: Option<RowsBuilder> = None;
        let mut found = Vec::new();
        for rules in sets {
            let known = (0..self.heads.len() as Row).find(|row| self.is_row(*row, &rules));
            found.push(known.unwrap_or_else(|| more.get_or_insert_with(|| RowsBuilder::behind(self)).row(&rules)));
        }
        if let Some(more) = more {
            rows = more.finish();
        }
        (rows, found)
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
        size_of_val(&*self.heads) + size_of_val(&*self.wide) + size_of_val(&*self.chunks)
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
    let (first, second) = match rules.words[..] {
        [] => return Some(NO_RULE),
        [first] => (first, (first.0, 0)),
        [first, second] => (first, second),
        _ => return None,
    };
    Some(RowHead { bits: [first.1, second.1], places: [first.0, second.0] })
}

/// Collects rows without duplicates.
pub(super) struct RowsBuilder {
    heads: Vec<RowHead>,
    wide: Vec<u32>,
    chunks: Vec<u64>,
    width: usize,
    /// Rows by what they are made of.
    narrow: FxHashMap<([u64; 2], [u32; 2]), Row>,
    by_chunks: FxHashMap<Box<[u32]>, Row>,
    /// Places of chunks by a hash of their words.
    places: FxHashMap<u64, Vec<u32>>,
}

/// Place of the chunk without a bit.
const NO_WORD: u32 = 0;

impl RowsBuilder {
    /// For a table with this many rules.
    pub(super) fn new(rules: usize) -> Self {
        let width = rules.div_ceil(WORD).max(1);
        Self::of(vec![NO_RULE], Vec::new(), vec![0], width)
    }

    /// More rows behind these. Those and their chunks are not compared with new ones.
    fn behind(rows: &Rows) -> Self {
        Self::of(rows.heads.to_vec(), rows.wide.to_vec(), rows.chunks.to_vec(), rows.width)
    }

    fn of(heads: Vec<RowHead>, wide: Vec<u32>, chunks: Vec<u64>, width: usize) -> Self {
        let narrow = FxHashMap::from_iter([((NO_RULE.bits, NO_RULE.places), 0)]);
        Self { heads, wide, chunks, width, narrow, by_chunks: FxHashMap::default(), places: FxHashMap::default() }
    }

    /// Index of the row with these rules.
    pub(super) fn row(&mut self, rules: &RuleSet) -> Row {
        let next = self.heads.len() as Row;
        if let Some(head) = narrow(rules) {
            let row = *self.narrow.entry((head.bits, head.places)).or_insert(next);
            if row == next {
                self.heads.push(head);
            }
            return row;
        }
        let mut row = vec![NO_WORD; self.width.div_ceil(WORD)];
        for (part, words) in rules.chunks() {
            row[part as usize] = self.chunk(words);
        }
        let row = row.into_boxed_slice();
        if let Some(known) = self.by_chunks.get(&row) {
            return *known;
        }
        self.heads.push(RowHead { places: [WIDE | self.wide.len() as u32, 0], ..NO_RULE });
        self.wide.extend(&row);
        self.by_chunks.insert(row, next);
        next
    }

    /// Place of the chunk with these words.
    fn chunk(&mut self, words: &[(u32, u64)]) -> u32 {
        let summary = words.iter().fold(0, |summary, (place, _)| summary | 1u64 << (*place as usize % WORD));
        let mut hasher = FxHasher::default();
        words.iter().for_each(|word| word.hash(&mut hasher));
        let known = self.places.entry(hasher.finish()).or_default();
        let is_same = |at: &&u32| {
            let (start, end) = (**at as usize + 1, **at as usize + 1 + words.len());
            self.chunks[start - 1] == summary && words.iter().map(|(_, word)| word).eq(&self.chunks[start..end])
        };
        if let Some(at) = known.iter().find(is_same) {
            return *at;
        }
        let at = self.chunks.len() as u32;
        self.chunks.push(summary);
        self.chunks.extend(words.iter().map(|(_, word)| word));
        known.push(at);
        at
    }

    pub(super) fn finish(self) -> Rows {
        let Self { heads, wide, chunks, width, .. } = self;
        Rows { heads: heads.into(), wide: wide.into(), chunks: chunks.into(), width }
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
    pub(super) fn begin_range(&mut self, rule: u32) {
        let depth = self.depth.entry(rule).or_default();
        *depth += 1;
        if *depth == 1 {
            self.current.insert(rule);
        }
    }

    pub(super) fn end_range(&mut self, rule: u32) {
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
            // Rows of one word, of two or three, and of many.
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
        let mut builder = RowsBuilder::new(200);
        let sets: [RuleSet; 2] = [[1, 69].into_iter().collect(), [1, 69, 140, 199].into_iter().collect()];
        let row = sets.each_ref().map(|set| builder.row(set));
        assert_eq!(sets.each_ref().map(|set| builder.row(set)), row);
        let rows = builder.finish();
        assert_eq!(rows.with(sets.clone()).1, row);
        let new: [RuleSet; 3] =
            [[69].into_iter().collect(), [2, 70, 141].into_iter().collect(), [69].into_iter().collect()];
        let (more, found) = rows.with(new.clone());
        assert!(found[0] > row[1] && found[1] > found[0] && found[2] == found[0], "{found:?}");
        assert_eq!(more.with(new).1, found);
        assert_eq!(more.first_common([row[0], 0, found[0]]), Some(69));
        assert_eq!(more.first_common([row[1], found[1], found[1]]), Some(2));
        assert_eq!(sets.map(|set| more.with([set]).1[0]), row);
    }

    #[test]
    fn rows_that_differ_by_a_rule_share_the_rest() {
        let rules = 100_000;
        let mut builder = RowsBuilder::new(rules as usize);
        let mut current: RuleSet = (0..rules).step_by(2).collect();
        builder.row(&current);
        let before = builder.chunks.len();
        for rule in (1..rules).step_by(100) {
            current.insert(rule);
            builder.row(&current);
        }
        let each = (builder.chunks.len() - before) / 1000;
        assert!(each <= 65, "{each} words a row");
        let size = builder.finish().size();
        assert!(size < 1000 * 1000, "{size} bytes for 1,000 rows of 50,000 rules");
    }
}
