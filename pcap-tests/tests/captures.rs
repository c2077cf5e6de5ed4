//! Captures through the packet path, against expected verdicts and against an evaluator that is written apart. One test program,
//! since each would link the same.

mod corpus;
mod differential;
mod floods;
mod frames;
mod oracle;
mod random;
mod reassembly;
