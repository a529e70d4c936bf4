#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry_transport::testing::decoders::lending(bytes));
