"""The instruments themselves: were they blind, the other tests would show nothing."""

import socket
import threading

import pytest
from harness.margins import difference, noise, unit
from harness.pair import Landing, differing
from harness.process import Answer
from harness.proxy import Proxy


def through(flip_at: int | None, sent: bytes) -> tuple[bytes, Proxy]:
    """What arrives of bytes that a server sends through a proxy, whatever the pieces."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname()[1], flip_at)

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            arrived = b"".join(iter(lambda: client.recv(7000), b""))
        thread.join()
        proxy.close()
        return arrived, proxy


@pytest.mark.parametrize("flip_at", [0, 65_535, 65_536, 199_999])
def test_the_proxy_turns_one_bit_of_one_byte(flip_at: int) -> None:
    sent = bytes(range(250)) * 800
    arrived, proxy = through(flip_at, sent)
    assert [index for index, pair in enumerate(zip(sent, arrived)) if pair[0] != pair[1]] == [flip_at]
    assert (len(arrived), proxy.carried, proxy.flipped) == (len(sent), len(sent), 1)


def test_the_proxy_changes_nothing_unless_told() -> None:
    sent = bytes(range(250)) * 800
    arrived, proxy = through(None, sent)
    assert (arrived, proxy.flipped, proxy.connections) == (sent, 0, 1)


def answer(tokens: list[int], best: list[list[tuple[int, float]]]) -> Answer:
    return Answer(tokens, "length", None, best, 0, None, 0.0)


def test_the_first_difference_is_found_with_its_margin() -> None:
    reference = answer([5, 6, 7], [[(5, 9.0), (1, 3.0)], [(6, 8.0), (9, 7.75)], [(7, 2.0), (8, 1.0)]])
    assert difference(reference, answer([5, 6, 7], [])) is None
    parted = difference(reference, answer([5, 9, 3], []))
    assert parted is not None
    assert (parted.step, parted.margin, parted.among_best_two) == (1, 0.25, True)
    parted = difference(reference, answer([5, 4, 3], []))
    assert parted is not None and not parted.among_best_two


def test_noise_counts_only_steps_with_the_same_text() -> None:
    reference = answer([5, 6, 7], [[(5, 9.0), (1, 3.0)], [(6, 8.0), (9, 7.75)], [(7, 2.0), (8, 1.0)]])
    other = answer([5, 9, 7], [[(5, 9.125), (1, 3.0)], [(9, 8.0), (6, 7.5)], [(7, 99.0), (8, 1.0)]])
    assert noise(reference, other) == 0.5
    assert unit(reference, "bfloat16") == 8 / 128


def test_a_block_that_differs_is_named() -> None:
    source = Landing(0, {"a": ["1", "2", "3"], "b": ["4", "5", "6"]})
    assert differing(source, Landing(1, {"a": ["2", "3"], "b": ["5", "6"]})) == []
    assert differing(source, Landing(1, {"a": ["2", "x"], "b": ["y", "6"]})) == [("a", 2), ("b", 1)]
