#![no_main]

use kvferry_examples::messages::Ask;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(ask) = Ask::decode(bytes) {
        assert_eq!(Ask::decode(&ask.encode().expect("it was short enough")), Ok(ask));
    }
});
