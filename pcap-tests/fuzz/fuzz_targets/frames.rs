//! Fuzzes the pipeline with frames: `make fuzz`.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use penstock_pcap_tests::fuzz::{Subject, frames};

thread_local! {
    /// Kept between inputs: building the tables takes longer than using them.
    static SUBJECT: RefCell<Subject> = RefCell::default();
}

fuzz_target!(|octets: &[u8]| SUBJECT.with_borrow_mut(|subject| frames(subject, octets)));
