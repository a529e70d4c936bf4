"""Engines that several tests share: starting one takes seconds. A test that breaks an engine starts its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.connectors import Connector, KvFerry
from harness.model import TINY, make
from harness.pair import Pair, engine, pair
from harness.process import EngineProcess


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write their logs and what they saw; KVFERRY_TEST_LOGS keeps it elsewhere."""
    if kept := os.environ.get("KVFERRY_TEST_LOGS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The small model's folder."""
    return make(TINY)


@pytest.fixture(scope="session")
def reference(folder: Path, tiny: Path) -> Iterator[EngineProcess]:
    """The aggregated engine at float32: it computes prompts and answers itself."""
    alone = engine(folder, tiny, Connector(), "aggregated", prefix_caching=False)
    yield alone.wait_ready()
    alone.close()


@pytest.fixture(scope="session")
def ferry(folder: Path, tiny: Path) -> Iterator[Pair]:
    """A prefill and a decode engine at float32 that fail a request whose load fails."""
    with pair(folder, tiny, KvFerry(policy="fail")) as both:
        yield both


@pytest.fixture(scope="session")
def forgiving(folder: Path, tiny: Path, ferry: Pair) -> Iterator[Pair]:
    """The same prefill engine with another decode engine, which computes what a load does not bring."""
    connector = KvFerry(policy="recompute", port=ferry.connector.port)
    decode = engine(folder, tiny, connector, "decode")
    yield Pair(connector, ferry.prefill, decode.wait_ready(), ferry.requests)
    decode.close()
