#![no_main]

#[path = "../targets.rs"]
#[expect(dead_code, reason = "each binary checks one target")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::wrote(bytes));
