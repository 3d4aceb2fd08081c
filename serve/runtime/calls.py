"""What every call goes through: who may call, malformed messages, errors turned into statuses, counts."""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import StatusCode

from jaxspec.serve.runtime.metrics import Metrics
from jaxspec.serve.runtime.refusal import Refusal
from jaxspec.serve.runtime.security import Security
from jaxspec.serve.runtime.tracing import Tracing
from jaxspec.serve.runtime.unknown_fields import check_known

log = logging.getLogger("jaxspec.calls")

# Services of this prefix ignore no field.
OWN = "/jaxspec.v1."
# Request and response streaming or not → a handler's attribute, and what makes such a handler.
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class Malformed:
    """Stands for a message that could not be read."""

    def __init__(self, error: Exception):
        self.message = " ".join(str(error).split())


class Calls(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    A handler raises `Refusal` to end its call with a status; anything else that it raises is logged and becomes
    INTERNAL without details.
    """

    def __init__(self, security: Security, metrics: Metrics, tracing: Tracing):
        self._security, self._metrics, self._tracing = security, metrics, tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler, wrapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        name, make_handler = _KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, name)
        method = handler_call_details.method
        guard = self._guard

        async def call(request: Any, context: Any) -> Any:
            async with guard(method, request, context):
                return await behaviour(request, context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with guard(method, request, context):
                async for message in behaviour(request, context):
                    yield message

        wrapped = generate if inspect.isasyncgenfunction(behaviour) else call
        return make_handler(wrapped, _tolerant(handler.request_deserializer), handler.response_serializer)

    @asynccontextmanager
    async def _guard(self, method: str, request: Any, context: Any) -> AsyncIterator[None]:
        self._metrics.call_started(method)
        began = time.perf_counter()
        code = StatusCode.OK
        with self._tracing.span(method, dict(context.invocation_metadata() or ())):
            try:
                self._security.check(method, context)
                if isinstance(request, Malformed):
                    raise Refusal(StatusCode.INVALID_ARGUMENT, f"request: not readable: {request.message}")
                if method.startswith(OWN):
                    check_known(request)
                yield
            except Refusal as refusal:
                code = refusal.code
                await context.abort_with_status(refusal.status())
            except asyncio.CancelledError:
                code = StatusCode.DEADLINE_EXCEEDED if context.time_remaining() == 0 else StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except grpc.aio.BaseError:
                code = StatusCode.CANCELLED  # the client went away while something was sent
                raise
            except Exception:
                code = StatusCode.INTERNAL
                log.exception("%s failed", method)
                await context.abort(code, "server: a fault of its own; its log tells more")
            finally:
                self._tracing.ended(code)
                self._metrics.call_ended(method, code, time.perf_counter() - began)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:  # the library's DecodeError, or whatever else odd bytes cause
            return Malformed(error)

    return read
