//! The questions that a pod has asked, so that only the answers to that teach it anything.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::answer::{Question, read_question};
use crate::packet::Address;

/// Questions of a pod that may wait for an answer. Resolvers in a pod's processes wait for a few.
const MOST: usize = 1024;

/// The ends of a pod's talk with a resolver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DnsTalk {
    /// The resolver, by the address at which the pod asks it.
    pub resolver: Address,
    pub pod: Address,
    pub port: u16,
    /// By TCP.
    pub is_stream: bool,
}

/// Questions that wait for their answers. The oldest make room.
#[derive(Debug, Default)]
pub(super) struct Questions {
    waiting: FxHashMap<(DnsTalk, u16), (u64, Question)>,
    /// In the order in which they were asked, each with its number.
    order: VecDeque<(DnsTalk, u16, u64)>,
    asked: u64,
}

impl Questions {
    /// The pod asks by this message, if it is a question.
    pub(super) fn ask_by(&mut self, talk: DnsTalk, message: &[u8]) {
        if let Ok(question) = read_question(message) {
            self.ask(talk, question);
        }
    }

    fn ask(&mut self, talk: DnsTalk, question: Question) {
        self.asked += 1;
        self.order.push_back((talk, question.id, self.asked));
        self.waiting.insert((talk, question.id), (self.asked, question));
        while self.order.len() > MOST {
            let Some((talk, id, number)) = self.order.pop_front() else { break };
            if self.waiting.get(&(talk, id)).is_some_and(|(asked, _)| *asked == number) {
                self.waiting.remove(&(talk, id));
            }
        }
    }

    /// Whether this is what the pod has asked there, with the same number. An answer is taken once.
    pub(super) fn take(&mut self, talk: DnsTalk, answered: &Question) -> bool {
        let is_it = self.waiting.get(&(talk, answered.id)).is_some_and(|(_, question)| question == answered);
        if is_it {
            self.waiting.remove(&(talk, answered.id));
        }
        is_it
    }
}
