"""Blocks whose bytes say where they came from, as `kvferry bench` makes them, and the order in which they move."""

import mmap

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)
BLOCK = 0xBF58476D1CE4E5B9
POISON = 0xA5


class Arena:
    """Page-aligned memory that is there before the first transfer; huge pages where the system gives them, as kvferry asks for."""

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages refuses the advice, and nothing is lost but speed
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.bytes[:] = 0
        self.address: int = self.bytes.ctypes.data
        self.size = size

    def fill(self, block: int) -> None:
        """Each block gets its own content."""
        words = self.bytes.view(np.uint64).reshape(-1, block // 8)
        base = np.arange(block // 8, dtype=np.uint64) * STEP
        for number, place in enumerate(words):
            np.bitwise_xor(base, _key(number), out=place)

    def poison(self) -> None:
        """Overwrites what an earlier pass left."""
        self.bytes[:] = POISON

    def wrong_blocks(self, block: int, sources: np.ndarray, targets: np.ndarray) -> int:
        """How many targets do not hold exactly the bytes of the source at the same place."""
        words = self.bytes.view(np.uint64).reshape(-1, block // 8)
        base = np.arange(block // 8, dtype=np.uint64) * STEP
        return sum(not np.array_equal(words[target], base ^ _key(int(source))) for source, target in zip(sources, targets))


def _key(number: int) -> np.uint64:
    return np.uint64(((number + 1) * BLOCK) & (2**64 - 1))


def orders(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks the sender reads and the receiver fills: both scattered, the same on both sides."""
    random = np.random.default_rng(7)
    return random.permutation(count), random.permutation(count)
