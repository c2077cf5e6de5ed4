//! Domain names in policy: which addresses DNS answers gave a pod for which names.
//!
//! For a pod whose egress rules have domain names, a worker reads the DNS answers that it forwards to the pod
//! ([`read_answer`]) and enters what they say in the pod's [`LearntNames`] before it sends them on, so that the pod's next
//! packet finds it. A rule then matches an address by the names that were given for it ([`NameRules`]). Names are compared
//! when policy is evaluated, not when they are learnt: a rule that comes later matches what its pod has asked for before.
//!
//! Only a worker that reads an answer, or evaluates policy for such a pod, touches a table, and locks it: no other packet
//! does. Tables are bounded ([`NameLimits`]).

mod answer;
mod learnt;
mod limits;
mod rules;
mod table;

#[cfg(test)]
mod tests;

pub use answer::{Answer, AnswerError, DomainName, read_answer};
pub use learnt::{LearntName, LearntNames, Moment, NameTime};
pub use limits::NameLimits;
pub use rules::{NamePattern, NameRules};
pub use table::{NameCounts, NameTable, NamedPod, PodNames};
