//! libFuzzer's target for the reader of a guest's datagrams.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::first_datagrams(bytes));
