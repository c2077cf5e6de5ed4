//! Reads names and addresses in DNS answers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use domain::base::iana::{Class, Opcode, Rcode};
use domain::base::{Message, ParsedName, ParsedRecord, ToName, Ttl};
use domain::dep::octseq::Octets;
use domain::rdata::{A, Aaaa, Cname};

use crate::packet::Address;

/// The most records of an answer that are read. A datagram has room for more, but no resolver gives them for one name.
const MOST_RECORDS: usize = 1024;
/// The longest chain of aliases that is followed; resolvers stop earlier.
const LONGEST_CHAIN: usize = 16;

/// The name of a host: labels of letters, digits, hyphens and underscores, in lower case, between dots, without one at the end.
/// At most 253 characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DomainName(Arc<str>);

impl DomainName {
    /// A name as text, with or without a dot at its end. `None` if it has a character that no host's name has: such a name
    /// matches no rule.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.strip_suffix('.').unwrap_or(text);
        let is_label = |label: &str| !label.is_empty() && label.len() <= 63 && label.bytes().all(is_plain);
        let is_name = text.len() <= 253 && text.split('.').all(is_label);
        is_name.then(|| Self(text.to_ascii_lowercase().into()))
    }

    /// The name in a message; `None` as in [`DomainName::new`]. A label may contain any byte there, a dot included, which must
    /// not be taken for the end of a label.
    fn read(name: &impl ToName) -> Option<Self> {
        let mut text = String::new();
        for label in name.iter_labels().filter(|label| !label.is_root()) {
            if !label.as_slice().iter().copied().all(is_plain) {
                return None;
            }
            if !text.is_empty() {
                text.push('.');
            }
            text.extend(label.as_slice().iter().map(|byte| char::from(byte.to_ascii_lowercase())));
        }
        (!text.is_empty()).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

/// A question, and its number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    pub id: u16,
    /// The name; `None`: no host has such a name.
    pub name: Option<DomainName>,
    pub rtype: u16,
}

/// The records of an answer: each of these addresses for each of these names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// The name that was asked for, and the aliases on the way to the addresses, each with how long its alias holds.
    pub names: Vec<(DomainName, Duration)>,
    /// The addresses, each with how long it holds.
    pub addresses: Vec<(Address, Duration)>,
}

/// Why a datagram is no answer that is understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AnswerError {
    /// It is no DNS message, or a part of one.
    #[error("not a whole DNS message")]
    Malformed,
    /// It is a question, or has not exactly one, of the Internet class.
    #[error("not an answer to one question")]
    NotAnAnswer,
}

impl From<domain::base::wire::ParseError> for AnswerError {
    fn from(_: domain::base::wire::ParseError) -> Self {
        Self::Malformed
    }
}

/// Reads a question.
///
/// # Errors
/// The message is malformed, or no question.
pub fn read_question(message: &[u8]) -> Result<Question, AnswerError> {
    let message = Message::from_octets(message).map_err(|_| AnswerError::Malformed)?;
    if message.header().qr() { Err(AnswerError::NotAnAnswer) } else { question_of(&message) }
}

fn question_of<Octs: Octets + ?Sized>(message: &Message<Octs>) -> Result<Question, AnswerError> {
    let (header, question) = (message.header(), message.sole_question()?);
    if header.opcode() != Opcode::QUERY || question.qclass() != Class::IN {
        return Err(AnswerError::NotAnAnswer);
    }
    let name = DomainName::read(question.qname());
    Ok(Question { id: header.id(), name, rtype: question.qtype().to_int() })
}

/// Reads a DNS message (RFC 1035 section 4), and which question it answers. An answer without addresses is empty. Only the answer section counts: what else
/// comes with it was not asked for.
///
/// # Errors
/// The message is malformed, or no answer.
pub fn read_answer(message: &[u8]) -> Result<(Question, Answer), AnswerError> {
    let message = &Message::from_octets(message).map_err(|_| AnswerError::Malformed)?;
    let question = question_of(message)?;
    if !message.header().qr() {
        return Err(AnswerError::NotAnAnswer);
    }
    if message.header().rcode() != Rcode::NOERROR {
        return Ok((question, Answer::default()));
    }
    let mut records = Records::default();
    for record in message.answer()?.take(MOST_RECORDS) {
        records.add(&record?)?;
    }
    let answer = records.of(question.name.clone());
    Ok((question, answer))
}

/// The records of an answer section, by their owners.
#[derive(Default)]
struct Records {
    aliases: Vec<(DomainName, DomainName, Ttl)>,
    addresses: Vec<(DomainName, Address, Ttl)>,
}

impl Records {
    fn add<'a, Octs: Octets + ?Sized>(&mut self, record: &ParsedRecord<'a, Octs>) -> Result<(), AnswerError> {
        let owner = DomainName::read(&record.owner()).filter(|_| record.class() == Class::IN);
        let Some(owner) = owner else { return Ok(()) };
        let ttl = record.ttl();
        if let Some(alias) = record.to_record::<Cname<ParsedName<Octs::Range<'a>>>>()? {
            self.aliases.extend(DomainName::read(alias.data().cname()).map(|target| (owner, target, ttl)));
        } else if let Some(address) = record.to_record::<A>()? {
            self.addresses.push((owner, Address::from_v4_bytes(address.data().addr().octets()), ttl));
        } else if let Some(address) = record.to_record::<Aaaa>()? {
            // A mapped address is no IPv6 address of a packet.
            let address = address.data().addr();
            if address.to_ipv4_mapped().is_none() {
                self.addresses.push((owner, Address::from_v6_bytes(address.octets()), ttl));
            }
        }
        Ok(())
    }

    /// The addresses that they give for the name that was asked for. Records stand in any order.
    fn of(&self, asked: Option<DomainName>) -> Answer {
        let mut chain = Vec::new();
        let mut next = asked;
        while let Some(name) = next.filter(|name| !chain.iter().any(|(before, _)| before == name)) {
            if chain.len() == LONGEST_CHAIN {
                return Answer::default();
            }
            let alias = self.aliases.iter().find(|(owner, ..)| *owner == name);
            chain.push((name, alias.map(|(.., ttl)| *ttl)));
            next = alias.map(|(_, target, _)| target.clone());
        }
        let Some((end, _)) = chain.last() else { return Answer::default() };
        let addresses: Vec<_> = self.addresses.iter().filter(|(owner, ..)| owner == end).collect();
        if addresses.is_empty() {
            return Answer::default();
        }
        // A name leads to the end of the chain for as long as each alias from there on holds.
        let mut left = Duration::MAX;
        let mut names = Vec::with_capacity(chain.len());
        for (name, ttl) in chain.iter().rev() {
            left = ttl.map_or(left, |ttl| left.min(seconds(ttl)));
            names.push((name.clone(), left));
        }
        names.reverse();
        Answer { names, addresses: addresses.into_iter().map(|(_, address, ttl)| (*address, seconds(*ttl))).collect() }
    }
}

/// A TTL with its highest bit set is zero (RFC 2181 section 8).
fn seconds(ttl: Ttl) -> Duration {
    let seconds = ttl.as_secs();
    Duration::from_secs(if seconds > i32::MAX as u32 { 0 } else { seconds.into() })
}
