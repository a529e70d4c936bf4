//! The bytes that vLLM hashes: a tuple of parent, tokens and extra keys, as CPython's pickle or as canonical CBOR.
//!
//! Source: `vllm/utils/hashing.py` (`pickle.dumps` with `HIGHEST_PROTOCOL`, 5; `cbor2.dumps(canonical=True)`), CPython's
//! `Modules/_pickle.c`, RFC 8949 section 4.2.1. Compared with CPython and cbor2 in `connector/tests/engine_hashes.rs`.

/// Writes the few Python values that a block's name is made of. Tuples are told before and after their items.
pub(super) trait Encode: Default {
    fn begin(&mut self);
    fn tuple(&mut self, len: usize);
    fn end_tuple(&mut self, len: usize);
    fn bytes(&mut self, bytes: &[u8]);
    /// A string object that occurs nowhere else in the value.
    fn text(&mut self, text: &str);
    /// A string constant of vLLM's source: one object, however often it occurs.
    fn constant(&mut self, text: &'static str);
    fn int(&mut self, value: i64);
    /// As many integers, one after another.
    fn tokens(&mut self, tokens: &[u32]);
    fn none(&mut self);
    fn finish(&mut self) -> &[u8];
}

/// Appends tokens, each as the lowest `len` bytes that `form` gives it.
///
/// Eight bytes are written for each, and those behind its end overwritten by the next: which form a token takes cannot be foretold, and
/// a branch that goes wrong half of the time costs more than hashing does.
#[inline]
fn append(out: &mut Vec<u8>, tokens: &[u32], form: impl Fn(u32) -> (u64, usize)) {
    let mut at = out.len();
    out.resize(at + 8 * tokens.len(), 0);
    for token in tokens {
        let (bytes, len) = form(*token);
        // There is room: no token takes more than 8.
        out[at..at + 8].copy_from_slice(&bytes.to_le_bytes());
        at += len;
    }
    out.truncate(at);
}

/// Pickle protocol 5, one frame.
///
/// A pickler numbers the strings, bytes and tuples that it wrote and refers to an object that it meets again; what is the same
/// *object* thus decides the bytes.
#[derive(Default)]
pub(super) struct Pickle {
    out: Vec<u8>,
    memo: u32,
    /// Constants that were written, with their numbers.
    constants: Vec<(&'static str, u32)>,
}

/// From here on CPython would begin a second frame.
pub(super) const PICKLE_FRAME_BYTES: usize = 64 << 10;

const PICKLE_HEAD: [u8; 11] = [0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0];

impl Pickle {
    fn memoize(&mut self) {
        self.out.push(0x94);
        self.memo += 1;
    }
}

impl Encode for Pickle {
    fn begin(&mut self) {
        self.out.clear();
        self.out.extend_from_slice(&PICKLE_HEAD);
        self.constants.clear();
        self.memo = 0;
    }

    fn tuple(&mut self, len: usize) {
        if len > 3 {
            self.out.push(b'(');
        }
    }

    fn end_tuple(&mut self, len: usize) {
        // The empty tuple is one object, and never numbered.
        self.out.push(match len {
            0 => b')',
            1 => 0x85,
            2 => 0x86,
            3 => 0x87,
            _ => b't',
        });
        if len > 0 {
            self.memoize();
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        match u8::try_from(bytes.len()) {
            Ok(len) => self.out.extend_from_slice(&[b'C', len]),
            Err(_) => {
                self.out.push(b'B');
                self.out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            }
        }
        self.out.extend_from_slice(bytes);
        self.memoize();
    }

    fn text(&mut self, text: &str) {
        match u8::try_from(text.len()) {
            Ok(len) => self.out.extend_from_slice(&[0x8c, len]),
            Err(_) => {
                self.out.push(b'X');
                self.out.extend_from_slice(&(text.len() as u32).to_le_bytes());
            }
        }
        self.out.extend_from_slice(text.as_bytes());
        self.memoize();
    }

    fn constant(&mut self, text: &'static str) {
        match self.constants.iter().find(|(written, _)| *written == text) {
            Some((_, number)) => match u8::try_from(*number) {
                Ok(number) => self.out.extend_from_slice(&[b'h', number]),
                Err(_) => {
                    self.out.push(b'j');
                    self.out.extend_from_slice(&number.to_le_bytes());
                }
            },
            None => {
                self.constants.push((text, self.memo));
                self.text(text);
            }
        }
    }

    #[inline]
    fn int(&mut self, value: i64) {
        let bytes = value.to_le_bytes();
        if let Ok(value) = u16::try_from(value) {
            match value <= 0xff {
                true => self.out.extend_from_slice(&[b'K', bytes[0]]),
                false => self.out.extend_from_slice(&[b'M', bytes[0], bytes[1]]),
            }
        } else if i32::try_from(value).is_ok() {
            self.out.extend_from_slice(&[b'J', bytes[0], bytes[1], bytes[2], bytes[3]]);
        } else {
            // As few bytes as keep the sign.
            let bits = 65 - if value < 0 { value.leading_ones() } else { value.leading_zeros() };
            let len = bits.div_ceil(8) as usize;
            self.out.extend_from_slice(&[0x8a, len as u8]);
            self.out.extend_from_slice(&bytes[..len]);
        }
    }

    #[inline]
    fn tokens(&mut self, tokens: &[u32]) {
        append(&mut self.out, tokens, |token| {
            let value = u64::from(token);
            let (code, len) = match token {
                0..=0xff => (u64::from(b'K'), 2),
                0x100..=0xffff => (u64::from(b'M'), 3),
                0x1_0000..=0x7fff_ffff => (u64::from(b'J'), 5),
                // Five bytes, so that it stays above zero.
                _ => return (value << 16 | 0x058a, 7),
            };
            (value << 8 | code, len)
        });
    }

    fn none(&mut self) {
        self.out.push(b'N');
    }

    fn finish(&mut self) -> &[u8] {
        self.out.push(b'.');
        let len = (self.out.len() - PICKLE_HEAD.len()) as u64;
        self.out[3..PICKLE_HEAD.len()].copy_from_slice(&len.to_le_bytes());
        &self.out
    }
}

/// Canonical CBOR: every length and integer in its shortest form. Tuples are arrays.
#[derive(Default)]
pub(super) struct Cbor {
    out: Vec<u8>,
}

impl Cbor {
    #[inline]
    fn head(&mut self, major: u8, value: u64) {
        let bytes = value.to_be_bytes();
        match value {
            0..=23 => self.out.push(major | bytes[7]),
            24..=0xff => self.out.extend_from_slice(&[major | 24, bytes[7]]),
            0x100..=0xffff => self.out.extend_from_slice(&[major | 25, bytes[6], bytes[7]]),
            0x1_0000..=0xffff_ffff => {
                self.out.extend_from_slice(&[major | 26, bytes[4], bytes[5], bytes[6], bytes[7]]);
            }
            _ => {
                self.out.push(major | 27);
                self.out.extend_from_slice(&bytes);
            }
        }
    }
}

impl Encode for Cbor {
    fn begin(&mut self) {
        self.out.clear();
    }

    fn tuple(&mut self, len: usize) {
        self.head(0x80, len as u64);
    }

    fn end_tuple(&mut self, _: usize) {}

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(0x40, bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.head(0x60, text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn constant(&mut self, text: &'static str) {
        self.text(text);
    }

    #[inline]
    fn int(&mut self, value: i64) {
        match value {
            0.. => self.head(0, value as u64),
            _ => self.head(0x20, !(value as u64)),
        }
    }

    #[inline]
    fn tokens(&mut self, tokens: &[u32]) {
        append(&mut self.out, tokens, |token| {
            let value = u64::from(token.swap_bytes());
            match token {
                0..=23 => (u64::from(token), 1),
                24..=0xff => (u64::from(token) << 8 | 24, 2),
                0x100..=0xffff => (value >> 16 << 8 | 25, 3),
                _ => (value << 8 | 26, 5),
            }
        });
    }

    fn none(&mut self) {
        self.out.push(0xf6);
    }

    fn finish(&mut self) -> &[u8] {
        &self.out
    }
}
