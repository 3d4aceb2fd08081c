"""Spans of calls for OpenTelemetry, where the extra `telemetry` is installed and asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpc import StatusCode


class Tracing:
    """Makes no spans; what a server without OpenTelemetry uses."""

    @contextmanager
    def span(self, method: str, metadata: Mapping[str, Any]) -> Iterator[None]:
        """Stands around a call; `method` as in "/package.Service/Method", `metadata` may name the caller's own span."""
        yield

    def annotate(self, attributes: Mapping[str, Any]) -> None:
        """Adds to the span of the call that runs."""

    def ended(self, code: StatusCode) -> None:
        """Tells how the call that runs ended."""

    def close(self) -> None:
        """Sends what was not sent yet."""


class OpenTelemetry(Tracing):
    """Sends spans through one of OpenTelemetry's exporters.

    Args:
      exporter: OpenTelemetry's span exporter.
      attributes: of every span.
    """

    def __init__(self, exporter: Any, attributes: Mapping[str, str]):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxspec", **attributes}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxspec")

    @classmethod
    def to(cls, endpoint: str, attributes: Mapping[str, str]) -> "OpenTelemetry":
        """Sends spans to a collector over OTLP and gRPC.

        Raises:
          ValueError: the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ValueError(f"--otlp-endpoint: {error}; pip install 'jaxspec[telemetry]'") from error
        return cls(OTLPSpanExporter(endpoint=endpoint), attributes)

    @contextmanager
    def span(self, method: str, metadata: Mapping[str, Any]) -> Iterator[None]:
        """As `Tracing.span`; a W3C `traceparent` in the metadata becomes the parent."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        service, _, name = method.removeprefix("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        with self._tracer.start_as_current_span(
            f"{service}/{name}", context=extract(metadata), kind=SpanKind.SERVER, attributes=attributes,
            record_exception=False, set_status_on_exception=False,
        ):  # fmt: skip
            yield

    def annotate(self, attributes: Mapping[str, Any]) -> None:
        """As `Tracing.annotate`."""
        from opentelemetry.trace import get_current_span

        known = {f"jaxspec.{name}": value for name, value in attributes.items() if value is not None}
        get_current_span().set_attributes(known)

    def ended(self, code: StatusCode) -> None:
        """As `Tracing.ended`."""
        from opentelemetry.trace import Status, get_current_span
        from opentelemetry.trace import StatusCode as SpanStatus

        span = get_current_span()
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not StatusCode.OK:
            span.set_status(Status(SpanStatus.ERROR, code.name))

    def close(self) -> None:
        """As `Tracing.close`."""
        self._provider.shutdown()
