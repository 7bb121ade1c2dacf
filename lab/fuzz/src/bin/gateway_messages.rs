//! libFuzzer's target for DNS messages and for the answers of a proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::gateway_messages(bytes));
