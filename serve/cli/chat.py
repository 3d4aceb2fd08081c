"""`jaxspec chat`: a conversation with a server, in the terminal."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.serve.checks import within
from jaxspec.serve.cli.options import LARGEST_COUNT, LARGEST_SEED
from jaxspec.serve.cli.startup import bad_input, say

if TYPE_CHECKING:
    from jaxspec.serve.client.client import ServerAddress

Option = typer.Option
HELP = "/reset forgets the conversation, /exit or end of input leaves, Ctrl-C stops an answer"


def chat_command(
    address: Annotated[str, Option(help="The server, as host:port.")] = "127.0.0.1:50051",
    tls_ca: Annotated[Path | None, Option(help="PEM file that signed the server's certificate.")] = None,
    token_file: Annotated[Path | None, Option(help="File with the bearer token.")] = None,
    system: Annotated[str | None, Option(help="A system message before the conversation.")] = None,
    temperature: Annotated[float | None, Option(help="0 takes the most probable token.")] = None,
    top_p: Annotated[float | None, Option(help="Keep the likeliest tokens up to this mass.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the sampling; without it, a random one.")] = None,
    max_tokens: Annotated[int | None, Option(help="New tokens at most; without it, what the context holds.")] = None,
) -> None:
    """Talk to a server."""
    from jaxspec.serve.client.client import ServerAddress
    from jaxspec.v1.generation_pb2 import GenerateRequest, SamplingOptions, StoppingOptions

    with bad_input():
        for option, value, low, high in (
            ("--temperature", temperature, 0, 100),
            ("--top-p", top_p, 1e-6, 1),
            ("--seed", seed, 0, LARGEST_SEED),
            ("--max-tokens", max_tokens, 1, LARGEST_COUNT),
        ):
            if value is not None:
                within(option, value, low, high)
        server = ServerAddress.of(address, tls_ca, token_file)
        options = GenerateRequest(
            sampling=SamplingOptions(temperature=temperature, top_p=top_p, seed=seed),
            stopping=StoppingOptions(max_tokens=max_tokens),
        )
    raise typer.Exit(Chat(server, options, system).run())


class Chat:
    """Asks a server line by line, each time with the whole conversation so far.

    Args:
      server: the one that answers.
      options: a request without its conversation, copied for each question.
      system: the message that the conversation begins with, if any.
    """

    def __init__(self, server: "ServerAddress", options: Any, system: str | None):
        self._server, self._options = server, options
        self._start = [("system", system)] if system is not None else []
        self._messages = list(self._start)

    def run(self) -> int:
        """Reads lines and answers them; returns the exit code: 0 at the end, 1 where the server is at fault."""
        import grpc

        say(HELP)
        with self._server.channel() as channel:
            while (line := _read()) not in (None, "/exit"):
                if line == "/reset":
                    self._messages = list(self._start)
                elif line:
                    try:
                        self._answer(channel, line)
                    except grpc.RpcError as error:
                        say(f"error: {error.details()} ({error.code().name})")
                        if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
                            return 1
                        self._messages.pop()  # too long, say, or too early: saying something else may help
        return 0

    def _answer(self, channel: Any, line: str) -> None:
        from jaxspec.v1 import generation_pb2 as pb
        from jaxspec.v1.generation_pb2_grpc import GenerationServiceStub

        self._messages.append(("user", line))
        request = pb.GenerateRequest()
        request.CopyFrom(self._options)
        for role, content in self._messages:
            request.conversation.messages.add(role=role, content=content)
        stub = GenerationServiceStub(channel)
        call = stub.GenerateStream(pb.GenerateStreamRequest(request=request), metadata=self._server.metadata)
        text, finished, first = "", None, 0.0
        try:
            for event in call:
                if event.HasField("delta"):
                    first = first or time.perf_counter()
                    text += event.delta.text
                    sys.stdout.write(event.delta.text)
                    sys.stdout.flush()
                elif event.HasField("finished"):
                    finished = event.finished
        except KeyboardInterrupt:
            call.cancel()
        print(flush=True)
        self._messages.append(("assistant", text))
        if finished is None:
            say("stopped")
            return
        seconds = time.perf_counter() - first
        speculation, tokens = finished.ending.speculation, finished.usage.completion_tokens
        say(
            f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s, τ {tokens / max(speculation.rounds, 1):.2f} "
            f"in {speculation.rounds} rounds"
        )


def _read() -> str | None:
    """Reads the next line, without the blanks around it; returns None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError:
        say("error: found bytes that are no UTF-8, expected text")
        return ""
