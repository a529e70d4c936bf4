#![no_main]

use kvferry_examples::http::CompletionBody;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(CompletionBody::parse(bytes)));
