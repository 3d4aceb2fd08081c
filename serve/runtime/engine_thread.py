"""The one thread that owns the engine and JAX. It takes commands from a queue and hands outputs to the event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxspec.config import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestOutput

Result = TypeVar("Result")


@dataclass(eq=False)
class Job:
    """One request to the engine.

    Attributes:
      deliver: called with each output, on the event loop.
      refused: called with what the engine's `add` raised, a ValueError for bad input, on the event loop.
      engine_id: the engine's id of the request, once it is added; for the engine thread alone.
      aborted: whether `abort` was called; for the event loop alone.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    priority: int
    deliver: Callable[[RequestOutput], None]
    refused: Callable[[Exception], None]
    engine_id: int | None = None
    aborted: bool = False


class EngineThread:
    """Loads an engine and steps it while requests are open.

    Args:
      load: makes the engine, on the thread.
      on_crash: called with the exception that ended the thread after loading, on the event loop.

    Attributes:
      engine: None until it is loaded. Only `load` and `compiling` may be read from elsewhere.
    """

    def __init__(self, load: Callable[[], Engine], on_crash: Callable[[BaseException], None]):
        self._load, self._on_crash = load, on_crash
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Engine] = self._loop.create_future()
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._busy_since: float | None = None
        self.engine: Engine | None = None
        # A daemon: whatever XLA is doing must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> Engine:
        """Starts the thread; returns the engine once it is loaded, or raises what loading raised."""
        self._thread.start()
        self.engine = await self._loaded
        return self.engine

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step that runs; False if it is still at it after `timeout` seconds."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def stalled_seconds(self) -> float:
        """How long the step that runs has taken; 0 where the engine waits for work, or compiles."""
        since = self._busy_since
        if since is None or self.engine is None or self.engine.compiling is not None:
            return 0.0
        return time.monotonic() - since

    def submit(self, job: Job) -> None:
        """Hands a request to the engine."""
        self._commands.put(lambda engine: self._add(engine, job))

    def abort(self, job: Job) -> None:
        """Ends a request, if it is still open; its slot is free for the next step."""
        if job.aborted:
            return
        job.aborted = True
        self._commands.put(lambda engine: self._abort(engine, job))

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Runs a function on the thread, between two steps; RuntimeError where the thread has ended."""
        if not self._thread.is_alive():
            raise RuntimeError("the engine thread has ended")
        future: asyncio.Future[Result] = self._loop.create_future()

        def command(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                self._post(_fail, future, error)
            else:
                self._post(_resolve, future, result)

        self._commands.put(command)
        return await future

    # On the thread

    def _run(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._post(_fail, self._loaded, error)
            return
        self._post(_resolve, self._loaded, engine)
        try:
            while self._run_commands(engine):
                outputs = engine.step()
                if outputs:
                    self._post(_deliver, [(self._job_of(output), output) for output in outputs])
        except BaseException as error:
            self._post(self._on_crash, error)
        finally:
            self._busy_since = None

    def _run_commands(self, engine: Engine) -> bool:
        """Runs what is queued, and waits for more where no request is open; returns False to end the thread."""
        while True:
            self._busy_since = time.monotonic() if engine.has_work else None
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._busy_since = time.monotonic()
            command(engine)

    def _add(self, engine: Engine, job: Job) -> None:
        try:
            job.engine_id = engine.add(job.prompt, job.sampling, job.priority)
        except Exception as error:
            self._post(job.refused, error)
        else:
            self._jobs[job.engine_id] = job

    def _abort(self, engine: Engine, job: Job) -> None:
        if job.engine_id in self._jobs:
            engine.abort(job.engine_id)

    def _job_of(self, output: RequestOutput) -> Job:
        return self._jobs[output.request_id] if output.finish_reason is None else self._jobs.pop(output.request_id)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            assert self._loop.is_closed()  # the server is gone, and with it whoever waited for this


def _deliver(outputs: list[tuple[Job, RequestOutput]]) -> None:
    for job, output in outputs:
        job.deliver(output)


def _resolve(future: "asyncio.Future[Result]", result: Result) -> None:
    if not future.cancelled():
        future.set_result(result)


def _fail(future: "asyncio.Future[Result]", error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
