"""A connector's class, wrapped: what it computed and what landed, as hashes of the engine's own tensors, and what its calls cost.

The engine loads `ObservedConnector` in place of the real class, which the variable OBSERVED_KV_CONNECTOR names. Its JSON:

- `module`, `class`: the connector that is observed.
- `events`: a file to which events are appended, one JSON object a line; none are made without it.
- `timings`: whether calls are timed (then `take_timings` returns them; only within one process).
- `corrupt`: whether every landed block is spoilt after the connector said that it is good, before anything is computed with it.
"""

import hashlib
import importlib
import json
import os
import time
from typing import Any

SETTINGS: dict[str, Any] = json.loads(os.environ["OBSERVED_KV_CONNECTOR"])
SCHEDULER_CALLS = (
    "on_new_request get_num_new_matched_tokens get_loaded_kv_cache_group_ids update_state_after_alloc "
    "get_external_cache_hit_sources build_connector_meta update_connector_output request_finished "
    "request_finished_all_groups register_finished_partial_tail has_pending_block_frees has_pending_push_work "
    "take_events"
).split()
WORKER_CALLS = (
    "handle_preemptions bind_connector_metadata start_load_kv wait_for_layer_load save_kv_layer finish_forward "
    "wait_for_save get_transfer_results get_block_ids_with_load_errors build_connector_worker_meta "
    "get_kv_connector_kv_cache_events clear_connector_metadata"
).split()

_seconds = 0.0
_busy = False
_steps: list[float] = []
_loads: dict[str, float] = {}
_transfers: list[float] = []


def take_timings() -> dict[str, Any]:
    """Seconds in the connector's calls for each engine step, and from a load's order to its arrival, since the last call."""
    global _steps, _transfers
    taken = {"steps": _steps, "transfers": _transfers}
    _steps, _transfers = [], []
    return taken


def _timed(name: str) -> Any:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        global _seconds, _busy
        inherited = getattr(super(Timed, self), name)
        if _busy:
            return inherited(*arguments, **named)
        _busy = True
        began = time.perf_counter()
        try:
            return inherited(*arguments, **named)
        finally:
            _seconds += time.perf_counter() - began
            _busy = False

    call.__name__ = name
    return call


def _real_class() -> type:
    if SETTINGS.get("before"):
        importlib.import_module(SETTINGS["before"])
    return getattr(importlib.import_module(SETTINGS["module"]), SETTINGS["class"])


REAL: type = _real_class()

if SETTINGS.get("timings"):
    Timed = type(
        "Timed",
        (REAL,),
        {name: _timed(name) for name in [*SCHEDULER_CALLS, *WORKER_CALLS] if hasattr(REAL, name)},
    )
else:
    Timed = REAL


class ObservedConnector(Timed):  # type: ignore[misc, valid-type]
    """The real connector; watches what passes and changes nothing, unless told to corrupt."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Scheduler side.
        self._seen: dict[str, Any] = {}
        self._manager: Any = None
        self._computed: set[str] = set()
        self._admitted: dict[str, Any] = {}
        # Worker side.
        self._caches: dict[str, Any] = {}
        self._awaited: dict[str, Any] = {}
        self._hash_after_step: dict[str, Any] = {}
        self._step = 0

    # The scheduler's half notes which blocks the worker's half shall look at, and the notes travel with the step's metadata.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        super().bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._seen[request.request_id] = request
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            block_size = self._vllm_config.cache_config.block_size
            # What is loaded ends the prompt, for a connector that hands over prefill's work.
            end = request.num_prompt_tokens
            ids = blocks.get_block_ids()[0]
            start = (end - num_external_tokens) // block_size
            self._admitted[request.request_id] = {"start": start, "blocks": ids[start : -(-end // block_size)]}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        computed = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._seen.get(request_id)
            if request is None or request_id in self._computed:
                continue
            if request.num_computed_tokens + count >= request.num_prompt_tokens:
                self._computed.add(request_id)
                block_size = self._vllm_config.cache_config.block_size
                needed = -(-request.num_prompt_tokens // block_size)
                computed[request_id] = {"start": 0, "blocks": self._manager.get_block_ids(request_id)[0][:needed]}
        object.__setattr__(meta, "observed", {"computed": computed, "admitted": self._admitted})
        self._admitted = {}
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._forget(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._forget(request)
        return super().request_finished_all_groups(request, block_ids)

    def _forget(self, request: Any) -> None:
        self._seen.pop(request.request_id, None)
        self._computed.discard(request.request_id)

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        notes = getattr(connector_metadata, "observed", None) or {"computed": {}, "admitted": {}}
        self._awaited |= notes["admitted"]
        self._hash_after_step = notes["computed"]
        now = time.perf_counter()
        _loads.update(dict.fromkeys(notes["admitted"], now))
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id, what in self._hash_after_step.items():
            self._tell("computed", request_id, what)
        now = time.perf_counter()
        for request_id in results.finished_recving or ():
            if request_id in _loads:
                _transfers.append(now - _loads.pop(request_id))
            what = self._awaited.pop(request_id, None)
            if request_id in results.failed_recving:
                self._append({"event": "failed request", "request": request_id})
            elif what is not None:
                if SETTINGS.get("corrupt"):
                    self._spoil(what["blocks"])
                self._tell("landed", request_id, what)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = super().get_block_ids_with_load_errors()
        if bad:
            self._append({"event": "bad blocks", "blocks": sorted(bad)})
        return bad

    def clear_connector_metadata(self) -> None:
        global _seconds
        super().clear_connector_metadata()
        self._step += 1
        if SETTINGS.get("timings"):
            # A step ends here. What the scheduler does with its results counts for the next one.
            _steps.append(_seconds)
            _seconds = 0.0

    def _tell(self, event: str, request_id: str, what: dict[str, Any]) -> None:
        if SETTINGS.get("events"):
            pages = {layer: [_digest(cache[block]) for block in what["blocks"]] for layer, cache in self._caches.items()}
            self._append({"event": event, "request": request_id, **what, "pages": pages})

    def _spoil(self, blocks: list[int]) -> None:
        for cache in self._caches.values():
            for block in blocks:
                cache[block].neg_()

    def _append(self, event: dict[str, Any]) -> None:
        if SETTINGS.get("events"):
            with open(SETTINGS["events"], "a") as file:
                file.write(json.dumps({"step": self._step, **event}) + "\n")


def _digest(page: Any) -> str:
    """SHA-256 of one block's bytes in one layer, in the engine's own tensor."""
    import torch

    return hashlib.sha256(page.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
