//! The domain names of rules.

use rustc_hash::FxHashMap;

/// A name in a rule.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum NamePattern {
    Name(Box<str>),
    /// Every name with one or more labels before this one, but not this one.
    Under(Box<str>),
}

impl NamePattern {
    /// `example.org`, or `*.example.org`. Case and a dot at the end do not count. `None` for other texts.
    pub fn new(text: &str) -> Option<Self> {
        let (name, is_under) = text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_inner = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let is_label = |label: &str| {
            is_end(label.chars().next()) && is_end(label.chars().next_back()) && label.chars().all(is_inner)
        };
        if !name.contains('.') || !name.split('.').all(is_label) {
            return None;
        }
        let name = name.to_ascii_lowercase().into();
        Some(if is_under { Self::Under(name) } else { Self::Name(name) })
    }
}

/// The rules of a table that have domain names, by these.
#[derive(Clone, Debug, Default)]
pub struct NameRules {
    names: FxHashMap<Box<str>, Vec<u32>>,
    under: FxHashMap<Box<str>, Vec<u32>>,
}

impl NameRules {
    /// Rules by their number in the table, each with one of its names.
    pub fn new<'a>(rules: impl IntoIterator<Item = (u32, &'a NamePattern)>) -> Self {
        let mut all = Self::default();
        for (rule, pattern) in rules {
            let (map, name) = match pattern {
                NamePattern::Name(name) => (&mut all.names, name),
                NamePattern::Under(name) => (&mut all.under, name),
            };
            map.entry(name.clone()).or_default().push(rule);
        }
        all
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.under.is_empty()
    }

    /// Whether a rule matches a name, which is in lower case and has no dot at its end.
    pub fn match_name(&self, name: &str) -> bool {
        self.of(name).next().is_some()
    }

    /// The rules that match a name, which is in lower case and has no dot at its end; in no order, and a rule may repeat.
    pub(crate) fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = u32> + 'a {
        let parents = name.match_indices('.').filter_map(|(dot, _)| self.under.get(&name[dot + 1..]));
        self.names.get(name).into_iter().chain(parents).flatten().copied()
    }
}
