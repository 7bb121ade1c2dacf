//! libFuzzer's target for a stack with live connections.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::stack(bytes));
