"""`jaxspec bench serve`: a server's speed and latencies under load."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.serve.checks import distinct, within
from jaxspec.serve.cli.options import LARGEST_COUNT, LARGEST_SEED, decimals, integers
from jaxspec.serve.cli.startup import bad_input, say
from jaxspec.serve.cli.tables import console

if TYPE_CHECKING:
    from jaxspec.serve.client.client import ServerAddress

Option = typer.Option
SCHEMA_VERSION = 1


def bench_serve_command(
    address: Annotated[str, Option(help="The server, as host:port.")] = "127.0.0.1:50051",
    tls_ca: Annotated[Path | None, Option(help="PEM file that signed the server's certificate.")] = None,
    token_file: Annotated[Path | None, Option(help="File with the bearer token.")] = None,
    concurrency: Annotated[str, Option(help="Requests open at once; levels with commas between.")] = "1,4,16",
    rate: Annotated[
        str | None, Option(help="Requests a second instead, sent at random times however many are open.")
    ] = None,
    requests: Annotated[int, Option(help="Requests of each level.")] = 32,
    prompts: Annotated[Path | None, Option(help="JSON Lines file of prompts; by default a set of our own.")] = None,
    max_tokens: Annotated[int, Option(help="New tokens of a request at most.")] = 128,
    temperature: Annotated[float, Option(help="0 takes the most probable token.")] = 0.0,
    ignore_eos: Annotated[bool, Option(help="Go on to --max-tokens whatever the model says.")] = True,
    seed: Annotated[int, Option(help="Of the sampling and of the times between requests.")] = 0,
    output: Annotated[Path | None, Option(help="Folder for report.json and plot.png.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON on stdout, no table.")] = False,
) -> None:
    """Load a server and measure it. `cached` in the table is the share of prompt tokens found in its cache."""
    from jaxspec.serve.client.client import ServerAddress

    with bad_input():
        levels: Sequence[float] = integers("--concurrency", concurrency) if rate is None else decimals("--rate", rate)
        distinct("--concurrency" if rate is None else "--rate", levels)
        for level in levels:
            within("--concurrency", level, 1, 1024) if rate is None else within("--rate", level, 0.001, 10_000)
        within("--requests", requests, 1, 1_000_000)
        within("--max-tokens", max_tokens, 1, LARGEST_COUNT)
        within("--temperature", temperature, 0, 100)
        within("--seed", seed, 0, LARGEST_SEED)
        server = ServerAddress.of(address, tls_ca, token_file)
        texts = _texts(prompts)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    settings = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos, "seed": seed}
    report = asyncio.run(_run(server, texts, settings, levels, rate is not None, requests))
    if output is not None:
        from jaxspec.serve.client.load_report import plot

        (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        plot(report["levels"], report["load"], output / "plot.png")
    if as_json:
        print(json.dumps(report))
    else:
        _print_table(report)
    if not all(level["answered"] for level in report["levels"]):
        raise typer.Exit(1)


def _texts(path: Path | None) -> list[str]:
    from jaxspec.prompt_files import read_conversations
    from jaxspec.serve.cli.demo_prompts import DEMO_PROMPTS

    if path is None:
        return [text for _, text in DEMO_PROMPTS]
    texts = [conversation.turns[0] for conversation in read_conversations(path)]
    if not texts:
        raise ValueError(f"--prompts {path}: found no prompt, expected at least one")
    return texts


async def _run(
    server: "ServerAddress",
    texts: list[str],
    settings: dict[str, Any],
    levels: Sequence[float],
    paced: bool,
    count: int,
) -> dict[str, Any]:
    """The report; where `paced`, levels are requests a second, else requests open at once."""
    import grpc
    import numpy as np
    from google.protobuf.json_format import MessageToDict

    from jaxspec.serve.client.load import closed_loop, open_loop
    from jaxspec.serve.client.load_report import summarise
    from jaxspec.v1 import generation_pb2, model_pb2, model_pb2_grpc

    async with server.aio_channel() as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            info = await stub.GetModelInfo(model_pb2.GetModelInfoRequest(), metadata=server.metadata)
            about = await stub.GetServerInfo(model_pb2.GetServerInfoRequest(), metadata=server.metadata)
        except grpc.aio.AioRpcError as error:
            say(f"error: {server.address}: {error.details()} ({error.code().name})")
            raise typer.Exit(1) from error

    def request(text: str, number: int) -> generation_pb2.GenerateRequest:
        message = generation_pb2.GenerateRequest(
            sampling=generation_pb2.SamplingOptions(
                temperature=settings["temperature"], seed=(settings["seed"] + number) % 2**32
            ),
            stopping=generation_pb2.StoppingOptions(
                max_tokens=settings["max_tokens"], ignore_eos=settings["ignore_eos"]
            ),
        )
        if info.has_chat_template:
            message.conversation.messages.add(role="user", content=text)
        else:
            message.text = text
        return message

    asked = [request(text, number) for number, text in zip(range(count), itertools.cycle(texts), strict=False)]
    results = []
    draw = np.random.default_rng(settings["seed"])
    for level in levels:
        if paced:
            say(f"{level:g} requests/s")
            seen = await open_loop(server, asked, draw.exponential(1 / level, count).tolist())
        else:
            say(f"{level:g} at once")
            await closed_loop(server, asked[: int(level)], int(level))  # whatever has to be compiled is not measured
            seen = await closed_loop(server, asked, int(level))
        results.append({"load": level} | summarise(seen))
    return {
        "schema_version": SCHEMA_VERSION,
        "model": MessageToDict(info, preserving_proto_field_name=True),
        "server": MessageToDict(about, preserving_proto_field_name=True),
        "settings": settings | {"requests": count, "prompts": len(texts)},
        "load": "requests/s" if paced else "requests at once",
        "levels": results,
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table()
    for column in (report["load"], "answered", "tokens/s", "requests/s", "τ", "cached"):
        table.add_column(column, justify="right")
    times = {"first token": "time_to_first_token", "a token": "time_per_token", "between": "between_deliveries"}
    for name in times:
        table.add_column(f"{name} ms\np50 / p99", justify="right")
    table.add_column("errors")
    for level in report["levels"]:
        table.add_row(
            f"{level['load']:g}",
            f"{level['answered']}/{level['requests']}",
            f"{level['tokens_per_second']:.1f}",
            f"{level['requests_per_second']:.2f}",
            "–" if level["tau"] is None else f"{level['tau']:.2f}",
            "–" if level["cached_share"] is None else f"{level['cached_share']:.0%}",
            *(_pair(level[key]) for key in times.values()),
            ", ".join(f"{count} {code}" for code, count in level["errors"].items()),
        )
    console(140).print(table)


def _pair(percentiles: dict[str, float] | None) -> str:
    return "–" if percentiles is None else f"{percentiles['p50'] * 1e3:.1f} / {percentiles['p99'] * 1e3:.1f}"
