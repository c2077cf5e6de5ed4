//! The syntax of names (Kubernetes, "Object Names and IDs" and "Labels and Selectors"; `k8s.io/apimachinery`
//! `pkg/util/validation`).

use super::FieldProblem;

/// An RFC 1123 label: the name of a namespace.
pub(super) fn dns_label(name: &str) -> Result<(), FieldProblem> {
    let rule = "use at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends";
    check(name, "name", rule, is_dns_label(name))
}

/// An RFC 1123 subdomain: the name of most objects.
pub(super) fn dns_subdomain(name: &str) -> Result<(), FieldProblem> {
    let rule = "use at most 253 of a-z, 0-9, '-' and '.', with a letter or digit at both ends of each part";
    check(name, "name", rule, is_dns_subdomain(name))
}

/// Whether this can be the key of a label, or of a taint: a name, with or without the prefix of a DNS subdomain.
pub fn is_label_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_label_name(name),
        None => is_label_name(key),
    }
}

pub(super) fn label_key(key: &str) -> Result<(), FieldProblem> {
    let rule = "use [DNS-PREFIX/]NAME, NAME of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends";
    check(key, "label key", rule, is_label_key(key))
}

/// The value of a label; it may be empty.
pub(super) fn label_value(value: &str) -> Result<(), FieldProblem> {
    let rule = "use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or nothing";
    check(value, "label value", rule, value.is_empty() || is_label_name(value))
}

/// The name of a port (RFC 6335 section 5.1: an IANA service name).
pub(super) fn port_name(name: &str) -> Result<(), FieldProblem> {
    let valid = name.len() <= 15
        && has_ends(name, |c| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
        && name.bytes().any(|c| c.is_ascii_lowercase())
        && !name.contains("--");
    let rule = "use at most 15 of a-z, 0-9 and single '-', with at least one letter; a port's number is written without quotes";
    check(name, "port name", rule, valid)
}

fn check(value: &str, what: &'static str, rule: &'static str, valid: bool) -> Result<(), FieldProblem> {
    match (value, valid) {
        (_, true) => Ok(()),
        ("", false) => Err(FieldProblem::Missing(rule)),
        (value, false) => Err(FieldProblem::Name { value: value.to_owned(), what, rule }),
    }
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= 63 && has_ends(name, inner) && name.bytes().all(|c| inner(c) || c == b'-')
}

/// Whether this is an RFC 1123 subdomain. A part may be longer than a label: only the whole is limited.
pub fn is_dns_subdomain(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let part = |part: &str| has_ends(part, inner) && part.bytes().all(|c| inner(c) || c == b'-');
    name.len() <= 253 && name.split('.').all(part)
}

fn is_label_name(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_alphanumeric();
    name.len() <= 63 && has_ends(name, inner) && name.bytes().all(|c| inner(c) || matches!(c, b'-' | b'_' | b'.'))
}

fn has_ends(name: &str, valid: impl Fn(u8) -> bool) -> bool {
    name.bytes().next().is_some_and(&valid) && name.bytes().next_back().is_some_and(&valid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_kubernetes_syntax() {
        let long = |n: usize| "a".repeat(n);
        type Check = fn(&str) -> Result<(), FieldProblem>;
        let table: [(Check, &[&str], &[&str]); 5] = [
            (dns_label, &["a", "shop-1", "1a", &long(63)], &["", "Shop", "a.b", "-a", "a-", "a_b", &long(64), "ä"]),
            (dns_subdomain, &["a", "web.shop-1", &long(64), &long(253)], &["", "a..b", ".a", "a-.b", "A", &long(254)]),
            (
                label_key,
                &["app", "App_x.y-z", "a.b/c", &format!("{}/{}", long(253), long(63))],
                &["", "/a", "a/", "a/b/c", "-a", "A/b", "a b", &long(64)],
            ),
            (label_value, &["", "a", "A-1_b.c", &long(63)], &["-", "a/b", "a b", ".a", &long(64)]),
            (port_name, &["http", "a", "8a", "serve-80-tcp", &long(15)], &["", "80", "a--b", "-a", "HTTP", &long(16)]),
        ];
        for (check, valid, invalid) in table {
            for name in valid {
                assert_eq!(check(name), Ok(()), "{name}");
            }
            for name in invalid {
                assert!(check(name).is_err(), "{name}");
            }
        }
    }
}
