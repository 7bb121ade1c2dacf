//! libFuzzer's target for DNS messages, for the answers of a proxy and for messages of pesto(1).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::gateway_messages(bytes));
