"""The server: gRPC on an event loop, one engine thread behind it, from the first byte listened to the last."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import EngineLoad
from jaxspec.serve.requests.answering import Answerer
from jaxspec.serve.requests.open_requests import OpenRequests
from jaxspec.serve.requests.served_model import ServedModel
from jaxspec.serve.runtime.calls import Calls
from jaxspec.serve.runtime.engine_thread import EngineThread
from jaxspec.serve.runtime.health import Health
from jaxspec.serve.runtime.metrics import Metrics
from jaxspec.serve.runtime.refusal import Refusal
from jaxspec.serve.runtime.server_config import ServerConfig
from jaxspec.serve.runtime.tracing import Tracing
from jaxspec.serve.services.admin_service import AdminService
from jaxspec.serve.services.generation_service import GenerationService
from jaxspec.serve.services.model_service import ModelService
from jaxspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

log = logging.getLogger("jaxspec.server")

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# A backstop only: it counts health checks and aborts as well. The queue is what bounds requests.
MAX_CALLS = 4096
GRACE_SECONDS = 2.0
# After a crash, so that health checks see it before the process ends.
LINGER_SECONDS = 10.0


class Server:
    """Listens at once, serves once the engine is loaded.

    Args:
      config: how to listen, and limits.
      slots: the engine's.
      load: makes the engine, on the engine thread.
      report: gets each stage.
      tracing: makes spans of calls; by default none.

    Attributes:
      port, dialect_port, metrics_port: in use, once `start` listens.
    """

    def __init__(
        self,
        config: ServerConfig,
        slots: int,
        load: Callable[[], Engine],
        report: Callable[[str], None],
        tracing: Tracing | None = None,
    ):
        self._config, self._report, self._tracing = config, report, tracing or Tracing()
        self._model: ServedModel | None = None
        self._metrics = Metrics(config.name, self._engine_load, config.vllm_metrics)
        self._health = Health([GENERATION, MODEL])
        self._engine = EngineThread(load, self._on_crash)
        self._requests = OpenRequests(self._engine, self._health, self._metrics, slots + config.queue)
        self._answerer = Answerer(
            self._loaded_model,
            self._requests,
            self._metrics,
            self._tracing,
            config.max_request_seconds,
            config.stalled_seconds,
        )
        self._grpc_servers = [self._own_server()]
        if config.dialect is not None:
            self._grpc_servers.append(self._dialect_server())
        self._metrics_server: Any = None
        self._stopping, self._stopping_now = asyncio.Event(), asyncio.Event()
        self._crashed = False
        self.port, self.dialect_port, self.metrics_port = config.port, config.dialect_port, config.metrics_port

    async def start(self) -> bool:
        """Listens and loads; False where `stop` came before the engine was there.

        Raises:
          ValueError, OSError: a port can't be had, or the models can't be loaded.
        """
        self.port = self._bind(self._grpc_servers[0], "--port", self.port)
        ports = f"port {self.port}"
        for server in self._grpc_servers[1:]:
            self.dialect_port = self._bind(server, "--dialect-port", self.dialect_port)
            ports += f", {self._config.dialect} on port {self.dialect_port}"
        if self.metrics_port is not None:
            try:
                self._metrics_server, self.metrics_port = self._metrics.serve(self._host, self.metrics_port)
            except OSError as error:
                raise ValueError(
                    f"--host, --metrics-port: found {self._host}, port {self.metrics_port}, which can't be listened "
                    f"on: {error.strerror or error}"
                ) from None
        for server in self._grpc_servers:
            await server.start()
        await self._health.loading()
        self._report(f"listening on {self._host}, {ports}; not serving yet")
        return await _unless(self._stopping, self._load())

    async def serve(self) -> int:
        """Serves until `stop`; returns the exit code: 0 after a stop, 1 after a crash of the engine."""
        watchdog = asyncio.create_task(self._health.watch(self._engine, self._config.stuck_seconds))
        await self._health.loaded()
        self._report("serving")
        await self._stopping.wait()
        watchdog.cancel()
        await self._health.draining()
        self._report(f"draining: {len(self._requests)} request(s) open")
        await _unless(self._stopping_now, self._requests.drained(self._config.drain_seconds))
        self._requests.fail_all(Refusal(StatusCode.UNAVAILABLE, "server: shut down before the answer was complete"))
        return int(self._crashed)

    async def close(self) -> bool:
        """Ends all calls and threads; False where the engine thread still runs."""
        await asyncio.gather(*(server.stop(GRACE_SECONDS) for server in self._grpc_servers))
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.shutdown)
            self._metrics_server.server_close()
        ended = await asyncio.to_thread(self._engine.stop, GRACE_SECONDS)
        await asyncio.to_thread(self._tracing.close)
        self._report("stopped")
        return ended

    def stop(self) -> None:
        """Ends the server once open requests are done; called again, at once."""
        if self._stopping.is_set():
            self._stopping_now.set()
        self._stopping.set()

    def describe(self) -> list[tuple[str, str]]:
        """Says what is served and where, as names and values for a start-up banner."""
        assert self._model is not None
        security = self._config.security
        guards = [
            "plaintext" if security.certificate is None else "TLS",
            *(["client certificates"] if security.client_authority is not None else []),
            *(["bearer token"] if security.token is not None else []),
        ]
        facts = [
            ("model", self._model.name),
            *self._model.engine.describe(),
            ("queue", f"{self._config.queue} answers"),
            ("gRPC", f"{self._host}, port {self.port} ({', '.join(guards)})"),
        ]
        if self._config.dialect is not None:
            facts.append((self._config.dialect, f"{self._host}, port {self.dialect_port}"))
        if self.metrics_port is not None:
            facts.append(("metrics", f"http://{self._host}:{self.metrics_port}/metrics"))
        return facts

    # Parts

    async def _load(self) -> None:
        engine = await self._engine.start()
        self._model = ServedModel.of(engine, self._config.name, self._config.default_sampling)

    def _on_crash(self, error: BaseException) -> None:
        log.error("the engine ended", exc_info=error)
        self._crashed = True
        self._told = asyncio.ensure_future(self._health.failed())
        self._requests.fail_all(Refusal(StatusCode.INTERNAL, "engine: ended by a fault; the server's log tells more"))
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.stop)

    @property
    def _host(self) -> str:
        return self._config.host.strip("[]")

    def _bind(self, server: grpc.aio.Server, option: str, port: int) -> int:
        """Takes a port and returns which; raises ValueError where it can't be had."""
        address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        credentials = self._config.security.credentials()
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ValueError(f"--host, {option}: found {address}, which can't be listened on; in use?") from None

    def _own_server(self) -> grpc.aio.Server:
        config, server = self._config, self._grpc_server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(self._answerer), server)
        model = ModelService(self._loaded_model, self._engine, self._health, self._metrics, config)
        model_pb2_grpc.add_ModelServiceServicer_to_server(model, server)
        admin = AdminService(self._requests, self._engine, self._health, config.drain_seconds, config.profile_folder)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        if config.reflection:
            reflection.enable_server_reflection((GENERATION, MODEL, ADMIN, HEALTH, reflection.SERVICE_NAME), server)
        return server

    def _dialect_server(self) -> grpc.aio.Server:
        from smg_grpc_proto import vllm_engine_pb2_grpc

        from jaxspec.serve.services.vllm_service import VllmService

        server = self._grpc_server()
        service = VllmService(self._answerer, self._loaded_model, self._requests, self._health, self._config.target)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)
        return server

    def _grpc_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[Calls(self._config.security, self._metrics, self._tracing)],
            options=_channel_options(self._config),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        return server

    def _loaded_model(self) -> ServedModel:
        if self._model is None:
            raise self._health.refusal or Refusal(StatusCode.UNAVAILABLE, "server: no model")
        return self._model

    def _engine_load(self) -> EngineLoad | None:
        return None if self._engine.engine is None else self._engine.engine.load


async def _unless(event: asyncio.Event, coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Runs a coroutine, but drops it once `event` is set; returns whether it was done."""
    task, stopped = asyncio.create_task(coroutine), asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        stopped.cancel()


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # A second server on the same port is refused, not given half of the calls.
        ("grpc.so_reuseport", 0),
        # Clients may ping while a long prompt sends nothing; the server pings to notice clients that are gone.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
