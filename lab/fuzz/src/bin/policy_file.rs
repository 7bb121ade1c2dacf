//! libFuzzer's target for the reader of policy files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fulmar_fuzz::policy_file(bytes));
