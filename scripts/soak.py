"""Soaks a server: many clients, long and short, some that leave, some that ask for nonsense; every answer is compared.

    python scripts/soak.py --target DIR [--drafter DIR] --seconds 600

Starts `jaxspec serve`, computes each answer offline with the target alone (in float32, where both must agree token for
token), and fails if an answer differs, a request gets another status than it should, memory grows, or a slot or page is
not given back.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from jaxspec.serve.checks import within
from jaxspec.serve.cli.startup import bad_input, say, use_compilation_cache
from jaxspec.v1 import generation_pb2 as pb
from jaxspec.v1 import model_pb2, model_pb2_grpc
from jaxspec.v1.generation_pb2_grpc import GenerationServiceStub

Option = typer.Option
CANCELLED, BAD = 0.20, 0.05
START_SECONDS = 600
IDLE_SECONDS = 10.0
# Allocators settle; what leaks goes on past this.
GROWTH_BYTES, GROWTH_SHARE = 48 << 20, 0.05
NONSENSE = (
    (pb.GenerateRequest(), "INVALID_ARGUMENT"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "INVALID_ARGUMENT"),
    (pb.GenerateRequest(text="x", model="another"), "NOT_FOUND"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(temperature=-1)), "INVALID_ARGUMENT"),
    (pb.GenerateRequest(text="x", stopping=pb.StoppingOptions(stop=["x"] * 5000)), "INVALID_ARGUMENT"),
    (pb.GenerateRequest(text="x" * 10_000_000), "INVALID_ARGUMENT"),
)


@dataclass(frozen=True)
class Question:
    """A request and the tokens that answer it."""

    prompt: list[int]
    sampling: dict[str, Any]
    answer: list[int]

    def request(self) -> pb.GenerateRequest:
        """For the server."""
        options = {name: value for name, value in self.sampling.items() if name != "max_tokens"}
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=pb.SamplingOptions(**options),
            stopping=pb.StoppingOptions(max_tokens=self.sampling["max_tokens"]),
        )


@dataclass
class Soak:
    """What happened.

    Attributes:
      outcomes: how many requests ended in each way.
      faults: what must not happen, in words.
      memory: anonymous resident bytes of the server over time.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def soak_command(
    target: Annotated[Path, Option(help="Folder of the converted target, float32.")],
    drafter: Annotated[Path | None, Option(help="Folder of the converted drafter.")] = None,
    seconds: Annotated[float, Option(help="How long, at most.")] = 600.0,
    requests: Annotated[int, Option(help="How many requests, at most.")] = 100_000,
    clients: Annotated[int, Option(help="That ask at once.")] = 16,
    slots: Annotated[int, Option(help="Of the server.")] = 4,
    longest: Annotated[int, Option(help="Tokens of the longest prompt, and of the longest answer.")] = 100,
    questions: Annotated[int, Option(help="Different requests.")] = 24,
    seed: Annotated[int, Option(help="Of prompts, and of what clients do.")] = 0,
) -> None:
    """Load a server for a while and check everything that it answers."""
    with bad_input():
        within("--seconds", seconds, 1, 86400)
        within("--requests", requests, 1, 10**9)
        within("--clients", clients, 1, 1024)
        within("--longest", longest, 2, 10**6)
        within("--questions", questions, 1, 10_000)
        asked = offline(target, questions, longest, random.Random(seed))
    soak = Soak()
    with tempfile.TemporaryDirectory() as folder:
        command = ["--target", target, *([] if drafter is None else ["--drafter", drafter]), "--slots", slots]
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxspec", "serve", "--port", "0", *map(str, command)], stderr=file
            )
        try:
            port = _wait_until_serving(process, log)
            asyncio.run(_run(soak, port, process.pid, asked, clients, seconds, requests, seed))
            process.terminate()
            if (code := process.wait(60)) != 0:
                soak.faults.append(f"exit code {code}")
        finally:
            process.kill()
            process.wait()
    print(
        json.dumps(
            {
                "outcomes": soak.outcomes,
                "faults": soak.faults[:20],
                "memory_mb": [soak.memory[len(soak.memory) // 4] >> 20, soak.memory[-1] >> 20],
            }
        )
    )
    raise typer.Exit(1 if soak.faults else 0)


def offline(target: Path, count: int, longest: int, draw: random.Random) -> list[Question]:
    """Questions of all lengths, greedy and sampled, answered by the target alone."""
    from jaxspec.config import EngineConfig, SamplingParams
    from jaxspec.engine.engine import Engine

    use_compilation_cache()
    engine = Engine.from_checkpoints(target, config=EngineConfig(slots=1, cache_tokens=2 * longest))
    if engine.dtype != "float32":
        raise ValueError(f"--target: found {engine.dtype}, expected float32: others differ with the batch")
    vocab = engine.target.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": draw.randint(1, longest)}
        if number % 2
        else {"temperature": 1.0, "top_p": 0.75, "seed": draw.getrandbits(32), "max_tokens": draw.randint(1, longest)}
        for number in range(count)
    ]
    say(f"answering {count} requests offline")
    answers = engine.generate(prompts, [SamplingParams(**sampling) for sampling in samplings])
    return [
        Question(prompt, sampling, answer.tokens)
        for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True)
    ]


async def _run(
    soak: Soak,
    port: int,
    pid: int,
    questions: list[Question],
    clients: int,
    seconds: float,
    requests: int,
    seed: int,
) -> None:
    ends = time.monotonic() + seconds
    left = iter(range(requests))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def client(draw: random.Random) -> None:
            while time.monotonic() < ends and next(left, None) is not None:
                chance = draw.random()
                if chance < BAD:
                    await _ask_nonsense(soak, stub, *draw.choice(NONSENSE))
                else:
                    question = draw.choice(questions)
                    leave = draw.randint(0, len(question.answer)) if chance < BAD + CANCELLED else None
                    await _ask(soak, stub, question, leave)

        async def watch() -> None:
            while True:
                soak.memory.append(_memory(pid))
                await asyncio.sleep(min(1.0, seconds / 20))

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(client(random.Random(f"{seed} {number}")) for number in range(clients)))
        watcher.cancel()
        await _check_idle(soak, channel)
    soak.memory.append(_memory(pid))
    settled = max(soak.memory[: 1 + len(soak.memory) // 2])
    if soak.memory[-1] > settled * (1 + GROWTH_SHARE) + GROWTH_BYTES:
        soak.faults.append(f"memory grew from {settled >> 20} MB to {soak.memory[-1] >> 20} MB")


async def _ask(soak: Soak, stub: Any, question: Question, leave: int | None) -> None:
    """Asks; leaves once `leave` tokens came, if it is not None."""
    call = stub.GenerateStream(pb.GenerateStreamRequest(request=question.request()))
    tokens: list[int] = []
    try:
        async for event in call:
            tokens += event.delta.token_ids
            if leave is not None and len(tokens) >= leave:
                call.cancel()
                break
    except grpc.aio.AioRpcError as error:
        soak.outcomes[error.code().name] += 1
        soak.faults.append(f"{error.code().name}: {error.details()}")
        return
    soak.outcomes["answered" if leave is None else "left"] += 1
    expected = question.answer if leave is None else question.answer[: len(tokens)]
    if tokens != expected:
        soak.faults.append(f"{question.prompt[:8]}…: found {tokens[:8]}…, expected {expected[:8]}…")


async def _ask_nonsense(soak: Soak, stub: Any, request: pb.GenerateRequest, expected: str) -> None:
    call = stub.Generate(request)
    code = (await call.code()).name
    soak.outcomes["refused"] += 1
    if code != expected:
        soak.faults.append(f"nonsense: found {code}, expected {expected}: {str(request)[:80]}")


async def _check_idle(soak: Soak, channel: grpc.aio.Channel) -> None:
    stub: Any = model_pb2_grpc.ModelServiceStub(channel)  # type: ignore[no-untyped-call]
    until = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < until:
        load = await stub.GetLoad(model_pb2.GetLoadRequest())
        if load.running == load.waiting == load.cache_pages_used == 0:
            return
        await asyncio.sleep(0.1)
    soak.faults.append(
        f"idle, but {load.running} slots, {load.waiting} queue places and {load.cache_pages_used} pages are taken"
    )


def _memory(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) << 10 if found else 0


def _wait_until_serving(process: "subprocess.Popen[bytes]", log: Path) -> int:
    until = time.monotonic() + START_SECONDS
    while " s  serving\n" not in log.read_text():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server does not serve:\n{log.read_text()}")
        time.sleep(0.1)
    found = re.search(r"listening on \S+ port (\d+)", log.read_text())
    assert found is not None
    return int(found.group(1))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(soak_command)

if __name__ == "__main__":
    app()
