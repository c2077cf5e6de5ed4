//! Domain names in policy: which addresses DNS answers gave a pod for which names.
//!
//! For a pod whose egress rules have domain names, a worker reads what it asks the cluster's resolvers ([`Resolvers`]), and the DNS answers
//! that it forwards to the pod ([`read_answer`]). It enters what those say that the pod has asked for in the pod's [`LearntNames`], before it
//! sends them on, so that the pod's next packet finds it. A rule then matches an address by the names that were given for it ([`NameRules`]). Names are compared
//! when policy is evaluated, not when they are learnt: a rule that comes later matches what its pod has asked for before.
//!
//! Only a worker that reads an answer, or evaluates policy for such a pod, touches a table, and locks it: no other packet
//! does. Tables are bounded ([`NameLimits`]).

mod answer;
mod learnt;
mod limits;
mod questions;
mod resolvers;
mod rules;
mod streams;
mod table;

#[cfg(test)]
mod tests;

pub use answer::{Answer, AnswerError, DomainName, Question, read_answer, read_question};
pub use learnt::{LearntName, LearntNames, Moment, NameTime};
pub use limits::NameLimits;
pub use questions::DnsTalk;
pub use resolvers::Resolvers;
pub use rules::{NamePattern, NameRules};
pub use streams::{DnsSegment, Side};
pub use table::{NameCounts, NameTable, NamedPod, PodNames};
