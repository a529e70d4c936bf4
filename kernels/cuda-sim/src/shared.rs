//! A block's shared memory.

/// What memory holds that nobody wrote: NaN in every floating-point type.
pub(crate) const POISON: u8 = 0xff;

/// Shared memory that a device gives one block. Source: CUDA C++ Programming Guide, table of compute capabilities, 9.0: 227 KiB.
pub(crate) const MOST_BYTES: u64 = 227 << 10;

type Word = u128;

/// The shared memory of one block at a time; kept by a host's thread from block to block.
#[derive(Default)]
pub(crate) struct Shared {
    dynamic: Vec<Word>,
    dynamic_bytes: u64,
    /// Of each variable: who asks for it, its memory, its bytes, and whether this block has it already.
    variables: Vec<Variable>,
}

struct Variable {
    key: usize,
    words: Vec<Word>,
    bytes: u64,
    seen: bool,
}

impl Shared {
    /// Begins a block: nothing that the one before wrote is left.
    pub(crate) fn begin(&mut self, dynamic_bytes: u64) {
        poisoned(&mut self.dynamic, dynamic_bytes);
        self.dynamic_bytes = dynamic_bytes;
        for variable in &mut self.variables {
            variable.seen = false;
        }
    }

    pub(crate) fn dynamic(&mut self) -> *mut u8 {
        self.dynamic.as_mut_ptr().cast()
    }

    /// The variable that `key` names: the same memory for all threads of a block.
    pub(crate) fn variable(&mut self, key: usize, bytes: u64) -> *mut u8 {
        let at = self.variables.iter().position(|variable| variable.key == key).unwrap_or_else(|| {
            self.variables.push(Variable { key, words: Vec::new(), bytes, seen: false });
            self.variables.len() - 1
        });
        let variable = &mut self.variables[at];
        if !variable.seen {
            variable.seen = true;
            poisoned(&mut variable.words, bytes);
        }
        variable.words.as_mut_ptr().cast()
    }

    /// Bytes that the block has used so far.
    pub(crate) fn bytes(&self) -> u64 {
        let seen = self.variables.iter().filter(|variable| variable.seen);
        self.dynamic_bytes + seen.map(|variable| variable.bytes).sum::<u64>()
    }

    /// Whether so many bytes at an address are the block's.
    pub(crate) fn holds(&self, address: usize, bytes: u64) -> bool {
        let inside = |words: &[Word], len: u64| {
            let start = words.as_ptr() as usize;
            address >= start && (address - start) as u64 + bytes <= len
        };
        let mut seen = self.variables.iter().filter(|variable| variable.seen);
        inside(&self.dynamic, self.dynamic_bytes) || seen.any(|variable| inside(&variable.words, variable.bytes))
    }
}

fn poisoned(words: &mut Vec<Word>, bytes: u64) {
    words.clear();
    words.resize((bytes as usize).div_ceil(size_of::<Word>()), Word::from_ne_bytes([POISON; size_of::<Word>()]));
}
