"""Engines that are shut down after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Engine


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_PSK", raising=False)


@pytest.fixture
def psk(tmp_path: Path) -> Path:
    path = tmp_path / "psk"
    path.write_text("a key that all engines share")
    return path


@pytest.fixture
def engines(psk: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str, role: str, **kwargs: Any) -> Engine:
        engine = Engine(name, role, kwargs.pop("psk_file", psk), **kwargs)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.worker.shutdown(0.5)
