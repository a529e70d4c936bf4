"""The process in which one vLLM engine runs: takes commands from a pipe, tells what came out.

Two ways to run it. `Stepped` holds the whole engine in this process (scheduler, connector and model together) and steps it as the
engine core's own loop does, so that a test can look at the scheduler between two steps. `Served` is the engine as users start it:
the front end here, the engine core and the worker in processes of their own.

Messages, parent to child: `(command, call, arguments)`. Child to parent: `("ready", facts)`, `("first" | "done", request, facts)`,
`("reply", call, value)`, `("error", text)`. Times are of the host's monotonic clock, in seconds.
"""

import asyncio
import os
import sys
import time
import traceback
from typing import Any

from .spec import EngineSpec

IDLE_STEP_S = 0.001
"""The engine core's own loop sleeps as long after a step in which no model ran."""


def main(connection: Any, spec: EngineSpec) -> None:
    """Runs the engine until the parent closes the pipe or says `stop`."""
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A parent without standard input (CI) has none to pass on.
    sys.stdin = open(os.devnull)
    os.environ.update(spec.environment())
    try:
        if spec.served:
            asyncio.run(Served(connection, spec).run())
        else:
            Stepped(connection, spec).run()
        code = 0
    except (EOFError, BrokenPipeError):
        code = 0
    except BaseException:
        text = traceback.format_exc()
        sys.stderr.write(text)
        try:
            connection.send(("error", text))
        except OSError:
            pass
        code = 1
    sys.stderr.flush()
    # Some connectors keep threads that would hold the interpreter's end, or crash in it.
    os._exit(code)


class Stepped:
    """An engine that this process steps."""

    def __init__(self, connection: Any, spec: EngineSpec) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.connection = connection
        self.spec = spec
        self.engine = LLMEngine.from_engine_args(EngineArgs(**spec.engine_arguments()))
        self.core = self.engine.engine_core.engine_core
        self.requests: dict[str, dict[str, Any]] = {}
        self.running = True
        self.held = False
        self.most_running = 0

    def run(self) -> None:
        self.connection.send(("ready", _facts(self.engine.vllm_config)))
        while self.running:
            busy = self.has_work()
            # An engine without work waits for a command, as the engine core does.
            while self.running and self.connection.poll(0 if busy else None):
                self.obey(*self.connection.recv())
                busy = self.has_work()
            if busy:
                self.step()
        self.engine.engine_core.shutdown()

    def has_work(self) -> bool:
        return not self.held and self.core.scheduler.has_requests()

    def step(self) -> None:
        for output in self.engine.step():
            self.tell(output)
        self.most_running = max(self.most_running, len(self.core.scheduler.running))
        # Only transfers are left to wait for: their threads need the interpreter too.
        if not self.core.scheduler.running and self.core.scheduler.has_requests():
            time.sleep(IDLE_STEP_S)

    def tell(self, output: Any) -> None:
        request = self.requests[output.request_id]
        if not request["first"] and output.outputs and output.outputs[0].token_ids:
            request["first"] = True
            self.connection.send(("first", output.request_id, {"at": time.monotonic()}))
        if output.finished:
            self.connection.send(("done", output.request_id, _result(output)))

    def obey(self, command: str, call: int, arguments: dict[str, Any]) -> None:
        value = getattr(self, "on_" + command)(**arguments)
        self.connection.send(("reply", call, value))

    def on_add(self, request: str, tokens: list[int], **how: Any) -> float:
        self.requests[request] = {"first": False}
        began = time.monotonic()
        self.requests[request]["internal"] = self.engine.add_request(request, {"prompt_token_ids": tokens}, _sampling(how))
        return began

    def on_abort(self, request: str) -> None:
        self.engine.abort_request([request])

    def on_hold(self, on: bool) -> int:
        """Takes no step while held, so that requests begin together; tells how many ran together since the last call."""
        self.held = on
        most, self.most_running = self.most_running, 0
        return most

    def on_state(self) -> dict[str, Any]:
        """The scheduler's and the block pool's own figures."""
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        stats = scheduler.make_stats()
        return {
            "requests": len(scheduler.requests),
            "running": stats.num_running_reqs,
            "waiting": stats.num_waiting_reqs,
            "skipped": stats.num_skipped_waiting_reqs,
            "fetching": dict(stats.num_kv_fetch_reqs_by_stage),
            "usage": stats.kv_cache_usage,
            # One block, the null block, belongs to the pool itself.
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def on_reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def on_metrics(self) -> dict[str, float]:
        return _metrics()

    def on_timings(self) -> dict[str, Any]:
        """What the observer measured since the last call."""
        return sys.modules["harness.observed"].take_timings()

    def on_connector_metrics(self) -> str:
        """kvferry's own metrics page, as its worker half serves it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker.metrics()

    def on_corrupt_landings(self, on: bool) -> None:
        sys.modules["harness.observed"].SETTINGS["corrupt"] = on

    def on_stop(self) -> None:
        self.running = False


class Served:
    """An engine as it is served: its core and worker are processes of their own."""

    def __init__(self, connection: Any, spec: EngineSpec) -> None:
        self.connection = connection
        self.spec = spec
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.spec.engine_arguments()))
        self.connection.send(("ready", _facts(self.engine.vllm_config)))
        loop = asyncio.get_running_loop()
        while True:
            command, call, arguments = await loop.run_in_executor(None, self.connection.recv)
            if command == "stop":
                self.engine.shutdown()
                return self.connection.send(("reply", call, None))
            value = await getattr(self, "on_" + command)(**arguments)
            self.connection.send(("reply", call, value))

    async def on_add(self, request: str, tokens: list[int], **how: Any) -> float:
        began = time.monotonic()
        self.tasks[request] = asyncio.create_task(self.generate(request, tokens, how))
        return began

    async def generate(self, request: str, tokens: list[int], how: dict[str, Any]) -> None:
        first = False
        try:
            async for output in self.engine.generate({"prompt_token_ids": tokens}, _sampling(how), request):
                if not first and output.outputs and output.outputs[0].token_ids:
                    first = True
                    self.connection.send(("first", request, {"at": time.monotonic()}))
                if output.finished:
                    self.connection.send(("done", request, _result(output)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.connection.send(("done", request, {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}))

    async def on_abort(self, request: str) -> None:
        await self.engine.abort(request)

    async def on_reject(self, request: str, kv: dict[str, Any]) -> None:
        """What vLLM's server does with a decode leg that ends without an answer."""
        await self.engine.notify_kv_transfer_request_rejected(request, kv)

    async def on_metrics(self) -> dict[str, float]:
        return _metrics()

    async def on_state(self) -> dict[str, Any]:
        """The engine's own metrics; they are as new as its last step."""
        metrics = _metrics()
        return {"usage": metrics["vllm:kv_cache_usage_perc"], "running": metrics["vllm:num_requests_running"]}


def _sampling(how: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    count = how["count"]
    extra = {"kv_transfer_params": how["kv"]} if how.get("kv") is not None else None
    return SamplingParams(
        temperature=0,
        max_tokens=count,
        min_tokens=count,
        ignore_eos=True,
        detokenize=False,
        logprobs=2 if how.get("margins") else None,
        extra_args=extra,
    )


def _result(output: Any) -> dict[str, Any]:
    completion = output.outputs[0] if output.outputs else None
    # Each step's two best tokens with their logits, best first.
    best = []
    for entry in (completion and completion.logprobs) or []:
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:2]
        best.append([(token, value.logprob) for token, value in ranked])
    return {
        "at": time.monotonic(),
        "tokens": list(completion.token_ids) if completion else [],
        "reason": completion.finish_reason if completion else None,
        "kv": output.kv_transfer_params,
        "best": best,
        "cached": output.num_cached_tokens,
    }


def _facts(config: Any) -> dict[str, Any]:
    import vllm

    return {"vllm": vllm.__version__, "blocks": config.cache_config.num_gpu_blocks, "block_size": config.cache_config.block_size}


def _metrics() -> dict[str, float]:
    """vLLM's Prometheus series of this process, added up over their labels."""
    from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

    values: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, (Counter, Gauge)):
            values[metric.name] = values.get(metric.name, 0) + metric.value
    return values
