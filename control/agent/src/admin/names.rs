//! The domain names that pods have learnt, for `penstock names`.

use penstock_admin::types::{LearntName, Names, NamesQuery};
use penstock_dataplane::conntrack::Timestamp;
use penstock_dataplane::names::{NamePattern, NameRules, NameTable, PodNames};

const MOST: usize = 100_000;

/// The names of a table that a query wants. Nobody waits for it but who asks: a table may be large.
pub(crate) fn list(table: &NameTable, query: &NamesQuery) -> Result<(usize, Vec<LearntName>), String> {
    let pattern = query.name.as_deref().map(|text| {
        let wrong = || format!("{text:?} is not a domain name: write example.org or *.example.org");
        NamePattern::new(text).map(|pattern| NameRules::new([(0, &pattern)])).ok_or_else(wrong)
    });
    let pattern = pattern.transpose()?;
    let is_wanted = |name: &str| pattern.as_ref().is_none_or(|rules| rules.match_name(name));
    let pods = table.all().into_iter().filter(|it| query.pod.as_ref().is_none_or(|pod| *pod == it.pod.name));
    let now = Timestamp::now().as_millis();
    let of_pod = |PodNames { pod, names }| {
        let wanted = names.into_iter().filter(|it| is_wanted(it.name.as_str()));
        let listed = wanted.map(|it| LearntName {
            pod: pod.name.clone(),
            name: it.name.to_string(),
            address: it.address.into(),
            seconds: it.expires.0.saturating_sub(now).div_ceil(1000),
        });
        listed.collect::<Vec<_>>()
    };
    let mut names: Vec<LearntName> = pods.flat_map(of_pod).collect();
    names.sort();
    let matching = names.len();
    names.truncate(query.limit.unwrap_or(MOST).min(MOST));
    Ok((matching, names))
}

/// Whether nothing is followed that could be listed, and the remedy.
pub(crate) fn off() -> String {
    "domain names are not followed: set domain_names.enabled = true".to_owned()
}

/// The answer, with the DNS servers whose answers count.
pub(crate) fn answer(
    (matching, names): (usize, Vec<LearntName>),
    resolvers: impl IntoIterator<Item = impl ToString>,
    has_resolver: bool,
) -> Names {
    let resolvers = resolvers.into_iter().map(|resolver| resolver.to_string()).collect();
    Names { matching, names, resolvers, has_resolver }
}
