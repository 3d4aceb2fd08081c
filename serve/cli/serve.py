"""`jaxspec serve`: the gRPC server."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.serve.checks import one_of
from jaxspec.serve.cli.options import Budget, Devices, ExpertLayout, MemoryFraction, ShardCache, TopKCap
from jaxspec.serve.cli.startup import StartUp, bad_input, banner, say, use_compilation_cache
from jaxspec.serve.runtime.logs import FORMATS, use_log_format
from jaxspec.serve.runtime.warm_up import WARM_UPS, warm_up

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.serve.runtime.server_config import ServerConfig
    from jaxspec.serve.runtime.tracing import Tracing

Option = typer.Option
METRICS_COMPAT = DIALECTS = ("none", "vllm")


def serve_command(
    target: Annotated[Path, Option(help="Folder of the converted target.")],
    drafter: Annotated[Path | None, Option(help="Folder of the converted drafter; without it: plain decoding.")] = None,
    served_model_name: Annotated[
        str | None, Option(help="Name that clients know the model by; by default the target folder's.")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on; the default is for this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one and says which.")] = 50051,
    dialect: Annotated[str, Option(help="vllm: also speak the API of the smg gateway, on a port of its own.")] = "none",
    dialect_port: Annotated[int, Option(help="Port of the dialect; 0 takes a free one.")] = 50052,
    budget: Budget = SpeculationConfig.budget,
    top_k_cap: TopKCap = SpeculationConfig.top_k_cap,
    devices: Devices = EngineConfig.devices,
    expert_layout: ExpertLayout = EngineConfig.expert_layout,
    shard_cache: ShardCache = EngineConfig.shard_cache,
    memory_fraction: MemoryFraction = EngineConfig.memory_fraction,
    slots: Annotated[int, Option(help="Answers decoded at once.")] = EngineConfig.slots,
    max_context: Annotated[
        int | None, Option(help="Tokens of prompt and answer together; by default the model's limit.")
    ] = EngineConfig.max_context,
    cache_tokens: Annotated[
        int | None, Option(help="Tokens that the cache holds; by default slots × context, or what fits.")
    ] = EngineConfig.cache_tokens,
    prefill_chunk: Annotated[
        int, Option(help="Prompt tokens of a request that one call processes.")
    ] = EngineConfig.prefill_chunk,
    queue: Annotated[int, Option(help="Answers that may wait beside those in slots.")] = 256,
    max_request_seconds: Annotated[float, Option(help="A request may take no longer, queueing included.")] = 3600.0,
    stalled_seconds: Annotated[float, Option(help="A client that takes nothing for so long is dropped.")] = 30.0,
    stuck_seconds: Annotated[float, Option(help="A step that takes longer makes the server unhealthy.")] = 60.0,
    drain_seconds: Annotated[float, Option(help="How long open requests may go on after SIGTERM.")] = 60.0,
    max_message_bytes: Annotated[int, Option(help="Size of a request at most.")] = 16 << 20,
    tls_cert: Annotated[Path | None, Option(help="PEM file of the server's certificate.")] = None,
    tls_key: Annotated[Path | None, Option(help="PEM file of the certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None, Option(help="PEM file of the authority that signs clients' certificates (mutual TLS).")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File with the bearer token that calls must carry.")] = None,
    admin_token_file: Annotated[
        Path | None, Option(help="File with AdminService's own token; without it: loopback only.")
    ] = None,
    metrics_port: Annotated[int | None, Option(help="Port for Prometheus on the same host; 0: a free one.")] = None,
    metrics_compat: Annotated[str, Option(help="vllm repeats all metrics under vLLM's names.")] = "none",
    reflection: Annotated[bool, Option(help="Let clients ask for the protos.")] = True,
    warm_up_extent: Annotated[
        str,
        Option("--warm-up", help="Programs compiled before serving: those of the first request, or all but long ones."),
    ] = "first",
    profile_dir: Annotated[Path | None, Option(help="Folder for the traces that AdminService takes.")] = None,
    otlp_endpoint: Annotated[
        str | None, Option(help="Where OpenTelemetry's collector listens for gRPC; needs the extra `telemetry`.")
    ] = None,
    log_format: Annotated[str, Option(help="text or json.")] = "text",
) -> None:
    """Serve a model over gRPC."""
    with bad_input():
        one_of("--dialect", dialect, DIALECTS)
        one_of("--metrics-compat", metrics_compat, METRICS_COMPAT)
        one_of("--log-format", log_format, FORMATS)
        one_of("--warm-up", warm_up_extent, WARM_UPS)
        speculation = SpeculationConfig(budget=budget, top_k_cap=top_k_cap)
        # Anything else is refused by the config itself.
        layout: Any = {"expert_layout": expert_layout, "shard_cache": shard_cache}
        engine_config = EngineConfig(
            **layout,
            devices=devices,
            memory_fraction=memory_fraction,
            slots=slots,
            max_context=max_context,
            cache_tokens=cache_tokens,
            prefill_chunk=prefill_chunk,
        )
        from jaxspec.serve.requests.served_model import default_sampling
        from jaxspec.serve.runtime.security import Security, read_token
        from jaxspec.serve.runtime.server_config import ServerConfig
        from jaxspec.serve.runtime.tracing import OpenTelemetry

        security = Security(
            certificate=tls_cert,
            key=tls_key,
            client_authority=tls_client_ca,
            token=None if token_file is None else read_token("--token-file", token_file),
            admin_token=None if admin_token_file is None else read_token("--admin-token-file", admin_token_file),
        )
        config = ServerConfig(
            name=target.resolve().name if served_model_name is None else served_model_name,
            default_sampling=default_sampling(target),
            host=host,
            port=port,
            dialect=None if dialect == "none" else dialect,
            dialect_port=dialect_port,
            target=target,
            security=security,
            queue=queue,
            max_message_bytes=max_message_bytes,
            max_request_seconds=max_request_seconds,
            stalled_seconds=stalled_seconds,
            stuck_seconds=stuck_seconds,
            drain_seconds=drain_seconds,
            metrics_port=metrics_port,
            vllm_metrics=metrics_compat == "vllm",
            reflection=reflection,
            profile_folder=profile_dir,
        )
        tracing = None if otlp_endpoint is None else OpenTelemetry.to(otlp_endpoint, {"jaxspec.model": config.name})
    use_log_format(log_format)
    use_compilation_cache()
    start_up = StartUp()

    def load() -> "Engine":
        from jaxspec.engine.engine import Engine

        engine = Engine.from_checkpoints(
            target, drafter, speculation=speculation, config=engine_config, report=start_up.report
        )
        start_up.report("compiling")
        warm_up(engine, warm_up_extent)
        return engine

    code, ended = asyncio.run(_run(config, engine_config.slots, load, start_up, tracing))
    if not ended:
        # A thread is inside XLA: the interpreter's own way out would wait for it, or pull the ground from under it.
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


async def _run(
    config: "ServerConfig", slots: int, load: Callable[[], "Engine"], start_up: StartUp, tracing: "Tracing | None"
) -> tuple[int, bool]:
    """Runs the server; returns the exit code, and whether its engine thread has ended."""
    from jaxspec.serve.server import Server

    server = Server(config, slots, load, start_up.report, tracing)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    code = 0
    try:
        with bad_input():
            loaded = await server.start()
        if loaded:
            banner(server.describe())
            for warning in config.warnings():
                say(warning)
            code = await server.serve()
    finally:
        ended = await server.close()
    return code, ended
