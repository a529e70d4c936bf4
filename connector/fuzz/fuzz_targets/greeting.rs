#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry::pd::decoders::greeting(bytes));
