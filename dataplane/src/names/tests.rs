use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::packet::Address;

/// A record of an answer, written without compression: owner, type, TTL, data.
type Record<'a> = (&'a str, u16, u32, Vec<u8>);

const A: u16 = 1;
const CNAME: u16 = 5;
const AAAA: u16 = 28;

fn wire_name(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut wire: Vec<u8> = labels.flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
    wire.push(0);
    wire
}

/// An answer to a question for A records of a name, with these flags.
fn message(flags: u16, question: &str, records: &[Record<'_>]) -> Vec<u8> {
    let mut wire = vec![0x12, 0x34];
    wire.extend(flags.to_be_bytes());
    for count in [1, records.len() as u16, 0, 0] {
        wire.extend(count.to_be_bytes());
    }
    wire.extend(wire_name(question));
    wire.extend([0, 1, 0, 1]);
    for (owner, rtype, ttl, data) in records {
        wire.extend(wire_name(owner));
        wire.extend(rtype.to_be_bytes());
        wire.extend([0, 1]);
        wire.extend(ttl.to_be_bytes());
        wire.extend((data.len() as u16).to_be_bytes());
        wire.extend(data);
    }
    wire
}

const ANSWER: u16 = 0x8180;

/// A pod's talk with its resolver.
fn talk() -> DnsTalk {
    let [resolver, pod] = ["192.0.2.53", "10.0.0.1"].map(address);
    DnsTalk { resolver, pod, port: 4000, is_stream: false }
}

/// The question in a message that is understood.
fn question_of(message: &[u8]) -> Vec<u8> {
    let mut end = 12;
    while message[end] != 0 {
        end += 1 + usize::from(message[end]);
    }
    [&message[..2], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0], &message[12..end + 5]].concat()
}

/// The pod asks, and gets this answer.
fn resolve(names: &LearntNames, message: &[u8], now: Moment) {
    names.ask(talk(), &question_of(message));
    names.hear(talk(), message, now);
}

fn a(owner: &str, ttl: u32, last: u8) -> Record<'_> {
    (owner, A, ttl, vec![192, 0, 2, last])
}

fn cname<'a>(owner: &'a str, ttl: u32, target: &str) -> Record<'a> {
    (owner, CNAME, ttl, wire_name(target))
}

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

/// Names or addresses, each with its seconds.
type Held = Vec<(String, u64)>;

fn read(question: &str, records: &[Record<'_>]) -> (Held, Held) {
    let (asked, answer) = read_answer(&message(ANSWER, question, records)).unwrap();
    assert_eq!((asked.id, asked.name, asked.rtype), (0x1234, DomainName::new(question), A));
    let names = answer.names.iter().map(|(name, left)| (name.to_string(), left.as_secs())).collect();
    (names, answer.addresses.iter().map(|(address, left)| (address.to_string(), left.as_secs())).collect())
}

fn texts(list: &[(&str, u64)]) -> Held {
    list.iter().map(|(text, seconds)| (text.to_string(), *seconds)).collect()
}

/// As unbound 1.17 and CoreDNS 1.15 have sent them: with names compressed or not, in the case of the question or another, with records of
/// other sections, and EDNS.
#[test]
fn answers_of_unbound_and_coredns_are_read() {
    const V4: [(&str, u64); 2] = [("198.51.100.7", 300), ("198.51.100.8", 300)];
    let www = [("www.example.org", 1 << 60)];
    let alias = [("alias.example.org", 300), ("www.example.org", 1 << 60)];
    let later = [("198.51.100.7", 299), ("198.51.100.8", 299)];
    type Case<'a> = (&'a str, &'a [(&'a str, u64)], &'a [(&'a str, u64)]);
    let cases: [Case<'_>; 6] = [
        (
            "12348180000100020000000103577777076558616d706c65036f72670000010001c00c000100010000012c0004c6336408c00c00010001\
             0000012c0004c633640700002904d0000000000000",
            &www,
            &V4,
        ),
        (
            "12348180000100010000000003777777076578616d706c65036f726700001c0001c00c001c00010000012c001020010db8000000000000\
             000000000007",
            &www,
            &[("2001:db8::7", 300)],
        ),
        (
            "12348180000100030000000105616c696173076558616d706c65036f72670000010001c00c000500010000012c000603777777c012c02f\
             000100010000012b0004c6336407c02f000100010000012b0004c633640800002904d0000000000000",
            &alias,
            &later,
        ),
        (
            "12348500000100020001000103577777076558616d706c65036f7267000001000103777777076578616d706c65036f7267000001000100\
             00012c0004c633640703777777076578616d706c65036f726700000100010000012c0004c6336408076578616d706c65036f7267000002\
             00010000012c0010026e73076578616d706c65036f72670000002904d0000000000000",
            &www,
            &V4,
        ),
        (
            "12348500000100010001000003777777076578616d706c65036f726700001c000103777777076578616d706c65036f726700001c000100\
             00012c001020010db8000000000000000000000007076578616d706c65036f726700000200010000012c0010026e73076578616d706c65\
             036f726700",
            &www,
            &[("2001:db8::7", 300)],
        ),
        (
            "12348500000100030001000105616c696173076578616d706c65036f7267000001000105616c696173076578616d706c65036f72670000\
             0500010000012c001103777777076578616d706c65036f72670003777777076578616d706c65036f726700000100010000012c0004c633\
             640703777777076578616d706c65036f726700000100010000012c0004c6336408076578616d706c65036f726700000200010000012c00\
             10026e73076578616d706c65036f72670000002904d0000000000000",
            &alias,
            &V4,
        ),
    ];
    for (hex, names, addresses) in cases {
        let wire: Vec<u8> =
            (0..hex.len()).step_by(2).map(|place| u8::from_str_radix(&hex[place..place + 2], 16).unwrap()).collect();
        let (_, answer) = read_answer(&wire).unwrap();
        let sorted = |mut list: Held| {
            list.sort();
            list
        };
        let found = answer.names.iter().map(|(name, left)| (name.to_string(), left.as_secs().min(1 << 60))).collect();
        assert_eq!(sorted(found), texts(names), "{hex}");
        let found = answer.addresses.iter().map(|(address, left)| (address.to_string(), left.as_secs())).collect();
        assert_eq!(sorted(found), texts(addresses), "{hex}");
    }
}

#[test]
fn an_answer_gives_its_addresses_for_each_alias() {
    let v6 = vec![0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
    let mapped = vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
    type Case<'a> = (&'a str, Vec<Record<'a>>, &'a [(&'a str, u64)], &'a [(&'a str, u64)]);
    let cases: Vec<Case<'_>> = vec![
        ("one", vec![a("one", 5, 1)], &[("one", 1 << 60)], &[("192.0.2.1", 5)]),
        ("WWW.Example.ORG", vec![a("www.example.org", 5, 1)], &[("www.example.org", 1 << 60)], &[("192.0.2.1", 5)]),
        (
            "six.org",
            vec![("six.org", AAAA, 9, v6), ("six.org", AAAA, 9, mapped)],
            &[("six.org", 1 << 60)],
            &[("2001:db8::7", 9)],
        ),
        // In any order; each alias holds for as long as the rest of the chain.
        (
            "a.org",
            vec![a("c.org", 30, 3), cname("b.org", 20, "c.org"), cname("a.org", 50, "b.org"), a("c.org", 40, 4)],
            &[("a.org", 20), ("b.org", 20), ("c.org", 1 << 60)],
            &[("192.0.2.3", 30), ("192.0.2.4", 40)],
        ),
        // Not of the chain, not of the question, a circle, an alias without addresses.
        ("a.org", vec![a("a.org", 5, 1), a("other.org", 5, 2)], &[("a.org", 1 << 60)], &[("192.0.2.1", 5)]),
        ("a.org", vec![a("other.org", 5, 2)], &[], &[]),
        ("a.org", vec![cname("a.org", 5, "b.org"), cname("b.org", 5, "a.org"), a("x.org", 5, 1)], &[], &[]),
        ("a.org", vec![cname("a.org", 5, "b.org")], &[], &[]),
        // A TTL with its highest bit set is none; other types are passed over.
        (
            "a.org",
            vec![("a.org", 16, 5, vec![1, b'x']), a("a.org", 1 << 31, 1)],
            &[("a.org", 1 << 60)],
            &[("192.0.2.1", 0)],
        ),
        // A name that no host has.
        ("a b.org", vec![a("a b.org", 5, 1)], &[], &[]),
        ("a.org", vec![], &[], &[]),
    ];
    for (question, records, names, addresses) in cases {
        let (got, found) = read(question, &records);
        let got: Vec<_> = got.into_iter().map(|(name, left)| (name, left.min(1 << 60))).collect();
        assert_eq!((got, found), (texts(names), texts(addresses)), "{question}: {records:?}");
    }
}

#[test]
fn a_dot_inside_a_label_is_no_boundary_of_labels() {
    // One label `a.example`, below `org`.
    let mut wire = message(ANSWER, "", &[]);
    wire.truncate(12);
    wire.extend([9, b'a', b'.', b'e', b'x', b'a', b'm', b'p', b'l', b'e', 3, b'o', b'r', b'g', 0, 0, 1, 0, 1]);
    wire[7] = 1;
    wire.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1]);
    assert_eq!(read_answer(&wire).map(|(_, answer)| answer), Ok(Answer::default()));
}

#[test]
fn what_is_no_answer_is_told_from_an_empty_one() {
    let records = [a("a.org", 5, 1)];
    let whole = message(ANSWER, "a.org", &records);
    for (flags, expected) in [
        (0x0100, Err(AnswerError::NotAnAnswer)),
        (0x8180 | 4 << 11, Err(AnswerError::NotAnAnswer)),
        (0x8183, Ok(Answer::default())),
        (0x8182, Ok(Answer::default())),
    ] {
        assert_eq!(read_answer(&message(flags, "a.org", &records)).map(|(_, answer)| answer), expected, "{flags:#x}");
    }
    for length in 0..whole.len() {
        assert!(read_answer(&whole[..length]).is_err(), "the first {length} bytes");
    }
    // Compressed into a circle.
    let mut circle = whole.clone();
    circle[12] = 0xc0;
    circle[13] = 12;
    assert!(read_answer(&circle).is_err());
}

#[test]
fn a_rules_name_matches_itself_or_what_is_below_it() {
    let patterns = ["example.org", "*.example.org", "*.a.example.org", "EXAMPLE.com.", "*.org.uk"];
    let patterns = patterns.map(|text| NamePattern::new(text).unwrap());
    let rules = NameRules::new((0..).zip(&patterns));
    let cases: &[(&str, &[u32])] = &[
        ("example.org", &[0]),
        ("www.example.org", &[1]),
        ("b.a.example.org", &[1, 2]),
        ("a.example.org", &[1]),
        ("notexample.org", &[]),
        ("example.com", &[3]),
        ("www.example.com", &[]),
        ("org.uk", &[]),
        ("x.org.uk", &[4]),
        ("org", &[]),
    ];
    for (name, expected) in cases {
        let mut found: Vec<u32> = rules.of(name).collect();
        found.sort_unstable();
        assert_eq!(found, *expected, "{name}");
    }
    for text in
        ["", "org", "*", "*.org", "*.*.example.org", "a..org", ".example.org", "-a.org", "a-.org", "a b.org", "a.ö"]
    {
        assert_eq!(NamePattern::new(text), None, "{text:?}");
    }
}

fn names_of(table: &NameTable, pod: &str) -> Arc<LearntNames> {
    table.of(pod_named(pod))
}

fn pod_named(pod: &str) -> NamedPod {
    NamedPod { name: pod.to_owned(), created: None, addresses: Vec::new() }
}

fn matches(names: &LearntNames, pattern: &str, address: Address, time: NameTime) -> bool {
    let pattern = NamePattern::new(pattern).unwrap();
    names.first_rule(&NameRules::new([(0, &pattern)]), address, time, |_| true) == Some(0)
}

#[test]
fn an_expired_name_holds_for_its_open_connections_alone() {
    let table = NameTable::default();
    let names = names_of(&table, "shop/web");
    let at = |millis| NameTime::At(Moment(millis));
    resolve(&names, &message(ANSWER, "a.org", &[a("a.org", 2, 1), a("a.org", 0, 2)]), Moment(10_000));
    let [first, second] = ["192.0.2.1", "192.0.2.2"].map(address);
    for (millis, expected) in
        [(10_000, [true, true]), (10_999, [true, true]), (11_000, [true, false]), (12_000, [false, false])]
    {
        assert_eq!([first, second].map(|to| matches(&names, "a.org", to, at(millis))), expected, "{millis}");
    }
    for (time, expected) in [(NameTime::Ever, true), (NameTime::Never, false)] {
        assert_eq!(matches(&names, "a.org", first, time), expected);
    }
    // Renewed; a shorter answer shortens nothing.
    resolve(&names, &message(ANSWER, "a.org", &[a("a.org", 60, 1)]), Moment(11_000));
    resolve(&names, &message(ANSWER, "a.org", &[a("a.org", 5, 1)]), Moment(12_000));
    assert!(matches(&names, "a.org", first, at(70_999)) && !matches(&names, "a.org", first, at(71_000)));
    assert_eq!(table.counts(), NameCounts { kept: 2, learnt: 4, evicted: 0, not_understood: 0, unasked: 0 });
    names.hear(talk(), b"junk", Moment(0));
    assert_eq!(table.counts().not_understood, 1);
}

#[test]
fn only_the_answer_to_what_was_asked_there_counts_and_once() {
    let table = NameTable::default();
    let names = names_of(&table, "shop/web");
    let (good, other) =
        (message(ANSWER, "a.org", &[a("a.org", 60, 1)]), message(ANSWER, "b.org", &[a("b.org", 60, 2)]));
    let mut number = good.clone();
    number[1] ^= 1;
    let mut rtype = good.clone();
    let at = question_of(&good).len() - 3;
    rtype[at] = 28;
    let talks = [
        DnsTalk { port: 4001, ..talk() },
        DnsTalk { resolver: address("192.0.2.54"), ..talk() },
        DnsTalk { is_stream: true, ..talk() },
    ];
    names.hear(talk(), &good, Moment(0));
    names.ask(talk(), &question_of(&good));
    for wrong in [&other, &number, &rtype] {
        names.hear(talk(), wrong, Moment(0));
    }
    talks.iter().for_each(|talk| names.hear(*talk, &good, Moment(0)));
    assert_eq!((names.all().len(), table.counts().unasked), (0, 7));
    // Letters of either case are the same name, as resolvers write them.
    let mut mixed = good.clone();
    mixed[13] = b'A';
    names.hear(talk(), &mixed, Moment(0));
    names.hear(talk(), &good, Moment(0));
    assert_eq!((names.all().len(), table.counts().unasked), (1, 8));
    // More questions than may wait: the oldest is forgotten.
    let numbered = |number: u16| [&number.to_be_bytes(), &good[2..]].concat();
    (0..2000).for_each(|number| names.ask(talk(), &question_of(&numbered(number))));
    names.hear(talk(), &numbered(0), Moment(0));
    names.hear(talk(), &numbered(1999), Moment(0));
    assert_eq!(table.counts().unasked, 9);
}

#[test]
fn a_hundred_thousand_names_are_kept_and_found() {
    let limits = NameLimits { per_pod: 100_000, total: 200_000, ..NameLimits::default() };
    let table = NameTable::new(limits);
    let names = names_of(&table, "shop/web");
    let patterns: Vec<NamePattern> =
        (0..100_000).map(|number| NamePattern::new(&format!("host-{number}.example.org")).unwrap()).collect();
    let rules = NameRules::new((0..).zip(&patterns));
    let to = |number: u32| Address::from_v4_bytes((0x0b00_0000 + number).to_be_bytes());
    let hour = Duration::from_secs(3600);
    for number in 0..100_000 {
        let name = DomainName::new(&format!("host-{number}.example.org")).unwrap();
        names.learn(&Answer { names: vec![(name, hour)], addresses: vec![(to(number), hour)] }, Moment(0));
    }
    assert_eq!((table.counts().kept, table.counts().evicted), (100_000, 0));
    for number in (0..100_000).step_by(997) {
        let found = names.first_rule(&rules, to(number), NameTime::At(Moment(1)), |_| true);
        assert_eq!(found, Some(number));
    }
}

#[test]
fn a_pod_learns_names_from_its_own_answers_alone() {
    let table = NameTable::default();
    let (web, db) = (names_of(&table, "shop/web"), names_of(&table, "shop/db"));
    let to = address("192.0.2.1");
    resolve(&web, &message(ANSWER, "a.org", &[a("a.org", 60, 1)]), Moment(0));
    assert!(matches(&web, "a.org", to, NameTime::Ever) && !matches(&db, "a.org", to, NameTime::Ever));
    assert!(matches(&names_of(&table, "shop/web"), "a.org", to, NameTime::Ever), "the same pod");
    let next = NamedPod { created: Some(7), ..pod_named("shop/web") };
    assert!(!matches(&table.of(next), "a.org", to, NameTime::Ever), "another of its name");
    drop(web);
    assert!(!matches(&names_of(&table, "shop/web"), "a.org", to, NameTime::Ever), "it was gone");
    assert_eq!(table.counts().kept, 0);
}

#[test]
fn an_answer_of_a_hundred_addresses_is_kept_whole() {
    let table = NameTable::default();
    let names = names_of(&table, "shop/web");
    let records: Vec<Record<'_>> = (0..100).map(|last| a("a.org", 60, last)).collect();
    resolve(&names, &message(ANSWER, "a.org", &records), Moment(0));
    let to = (0..100).map(|last| Address::from_v4_bytes([192, 0, 2, last]));
    assert!(
        to.into_iter()
            .all(|to| matches(&names, "*.org.uk", to, NameTime::Ever) != matches(&names, "a.org", to, NameTime::Ever))
    );
    assert_eq!(table.counts().kept, 100);
}

#[test]
fn over_a_limit_the_first_to_expire_goes_within_each_pod() {
    let limits = NameLimits { per_pod: 4, per_address: 2, total: 6, reserved: 1, ..NameLimits::default() };
    let table = NameTable::new(limits);
    let (web, db) = (names_of(&table, "shop/web"), names_of(&table, "shop/db"));
    let hear =
        |pod: &LearntNames, ttl, last| resolve(pod, &message(ANSWER, "a.org", &[a("a.org", ttl, last)]), Moment(0));
    let known = |pod: &LearntNames| -> Vec<u8> {
        let mut known: Vec<u8> = pod.all().iter().map(|name| name.address.v4_bytes().unwrap()[3]).collect();
        known.sort_unstable();
        known
    };
    for (ttl, last) in [(40, 1), (10, 2), (30, 3), (20, 4), (50, 5)] {
        hear(&web, ttl, last);
    }
    assert_eq!((known(&web), table.counts().evicted), (vec![1, 3, 4, 5], 1), "at most four of a pod");
    for last in 1..=4 {
        hear(&db, 60 + u32::from(last), last);
    }
    assert_eq!((known(&web), known(&db)), (vec![1, 3, 4, 5], vec![3, 4]), "at most six of all");
    let late = names_of(&table, "shop/late");
    hear(&late, 5, 1);
    assert_eq!((known(&late), table.counts().kept), (vec![1], 7), "a pod always has the reserved ones");
    for name in ["b.org", "c.org"] {
        resolve(&late, &message(ANSWER, name, &[a(name, 5, 1)]), Moment(0));
    }
    assert_eq!(late.all().len(), 1);
}

#[test]
fn what_a_run_has_learnt_is_there_in_the_next_until_it_expires() {
    let table = NameTable::default();
    names_of(&table, "gone/web");
    let web = names_of(&table, "shop/web");
    resolve(&web, &message(ANSWER, "a.org", &[a("a.org", 2, 1), a("a.org", 60, 2)]), Moment(0));
    let next = NameTable::default();
    next.restore(table.all());
    assert_eq!(next.all(), table.all(), "also before its pod is known");
    let web = names_of(&next, "shop/web");
    let to = ["192.0.2.1", "192.0.2.2"].map(address);
    assert_eq!(to.map(|to| matches(&web, "a.org", to, NameTime::At(Moment(3_000)))), [false, true]);
    assert_eq!(next.counts().kept, 2);
    next.restore(table.all());
    next.forget_recorded();
    assert_eq!(next.all().len(), 1, "what its pods have claimed stays");
}

proptest! {
    /// The oracle is the plain list of what was heard, searched from its start.
    #[test]
    fn a_table_without_eviction_agrees_with_a_list_of_answers(
        heard in prop::collection::vec((0u64..100, 0usize..6, 0u8..6, 0u32..50, 0usize..3), 0..40),
        asked in prop::collection::vec((0u64..160, 0usize..8, 0u8..6), 0..40),
    ) {
        const NAMES: [&str; 6] = ["example.org", "a.example.org", "B.a.example.org", "example.com", "a.com", "org.example"];
        const PATTERNS: [&str; 8] = [
            "example.org", "*.example.org", "*.a.example.org", "a.example.org", "example.com", "*.example.com", "a.com", "*.b.a",
        ];
        let table = NameTable::default();
        let pods = [names_of(&table, "a"), names_of(&table, "b"), names_of(&table, "c")];
        let mut heard = heard;
        heard.sort_by_key(|(at, ..)| *at);
        for (at, name, last, ttl, pod) in &heard {
            resolve(&pods[*pod], &message(ANSWER, NAMES[*name], &[a(NAMES[*name], *ttl, *last)]), Moment(at * 1000));
        }
        for (at, pattern, last) in asked {
            let (pattern, to) = (PATTERNS[pattern], Address::from_v4_bytes([192, 0, 2, last]));
            for (number, pod) in pods.iter().enumerate() {
                let given = |now: Option<u64>| heard.iter().any(|(since, name, of, ttl, hearer)| {
                    let name = NAMES[*name].to_ascii_lowercase();
                    let is_named = match pattern.strip_prefix('*') {
                        Some(parent) => name.len() > parent.len() && name.ends_with(parent),
                        None => name == pattern,
                    };
                    let holds = now.is_none_or(|now| now < since + u64::from((*ttl).max(1)));
                    *hearer == number && *of == last && is_named && holds
                });
                prop_assert_eq!(matches(pod, pattern, to, NameTime::At(Moment(at * 1000))), given(Some(at)));
                prop_assert_eq!(matches(pod, pattern, to, NameTime::Ever), given(None));
            }
        }
    }

    #[test]
    fn under_any_history_the_limits_hold_and_both_orders_agree(
        heard in prop::collection::vec((0u64..50, 0usize..4, 0u8..20, 0u32..50, 0usize..2), 0..200),
    ) {
        let limits = NameLimits { per_pod: 12, per_address: 3, total: 18, reserved: 4, ..NameLimits::default() };
        let table = NameTable::new(limits);
        let pods = [names_of(&table, "a"), names_of(&table, "b")];
        for (at, name, last, ttl, pod) in heard {
            let name = ["a.org", "b.org", "c.org", "d.org"][name];
            resolve(&pods[pod], &message(ANSWER, name, &[a(name, ttl, last)]), Moment(at));
            let kept: Vec<Vec<LearntName>> = pods.iter().map(|pod| pod.all()).collect();
            prop_assert_eq!(table.counts().kept, kept.iter().map(Vec::len).sum::<usize>() as u64);
            for (pod, kept) in pods.iter().zip(&kept) {
                prop_assert!(kept.len() <= limits.per_pod);
                for name in kept {
                    let of_address = kept.iter().filter(|other| other.address == name.address).count();
                    prop_assert!(of_address <= limits.per_address);
                    prop_assert!(matches(pod, name.name.as_str(), name.address, NameTime::Ever));
                }
            }
        }
    }

    /// Whatever a resolver, or who claims to be one, sends.
    #[test]
    fn a_mutated_answer_never_panics_and_gives_only_host_names(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let records = [cname("a.org", 9, "b.org"), cname("b.org", 9, "c.org"), a("c.org", 9, 1), a("c.org", 9, 2)];
        let mut wire = message(ANSWER, "a.org", &records);
        for (place, byte) in changes {
            let place = place.index(wire.len());
            wire[place] = byte;
        }
        if is_cut {
            wire.truncate(cut.index(wire.len()));
        }
        if let Ok((_, answer)) = read_answer(&wire) {
            for (name, left) in answer.names {
                prop_assert_eq!(DomainName::new(name.as_str()), Some(name));
                prop_assert!(left > Duration::MAX / 2 || left <= Duration::from_secs(i32::MAX as u64));
            }
        }
        let table = NameTable::default();
        let names = names_of(&table, "shop/web");
        names.ask(talk(), &question_of(&message(ANSWER, "a.org", &records)));
        names.hear(talk(), &wire, Moment(0));
    }

    #[test]
    fn no_bytes_make_the_reader_panic(wire in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = (read_answer(&wire), read_question(&wire));
    }
}
