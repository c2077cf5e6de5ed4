//! Fuzzes the pipeline with frames: `make fuzz`.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use penstock_pcap_tests::fuzz::{FuzzNode, frames};

thread_local! {
    /// Kept between inputs: building the tables takes longer than using them.
    static NODE: RefCell<FuzzNode> = RefCell::default();
}

fuzz_target!(|bytes: &[u8]| NODE.with_borrow_mut(|node| frames(node, bytes)));
