//! Capture files of any octets: `cargo +nightly fuzz run capture cases/tcp cases/ip cases/capture` in `pcap-tests/`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_pcap_tests::fuzz::capture;

fuzz_target!(|octets: &[u8]| {
    capture(octets);
});
