//! libFuzzer's target for the parsers of room `wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::parsers(bytes));
