//! Fuzzes capture files: `make fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_pcap_tests::fuzz::capture;

fuzz_target!(|bytes: &[u8]| {
    capture(bytes);
});
