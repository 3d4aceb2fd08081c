"""How a server listens, and its limits."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.serve.checks import within
from jaxspec.serve.runtime.security import Security, is_loopback

LONGEST_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class ServerConfig:
    """All settings of a server beside the engine's.

    Attributes:
      name: the one that clients know the model by.
      default_sampling: arguments of SamplingParams for what a request leaves unset.
      host, port: where gRPC listens; port 0 takes a free one.
      dialect: another API beside our own, on its own port of the same host; None offers none.
      dialect_port: of that API; 0 takes a free one.
      target: folder of the converted target, for those who ask for its tokenizer.
      security: who may call, on all ports but the one for metrics.
      queue: answers that may wait beside those in slots.
      max_message_bytes: a request may be no larger.
      max_request_seconds: a request may take no longer, queueing included.
      stalled_seconds: a client that takes nothing for so long is dropped.
      stuck_seconds: a step that takes longer, compiling apart, makes the server unhealthy.
      drain_seconds: how long open requests may go on after SIGTERM.
      metrics_port: for Prometheus, on the same host; None serves none, 0 takes a free one.
      vllm_metrics: repeat metrics under vLLM's names.
      reflection: whether clients can ask for the protos.
      profile_folder: where traces go; None makes none.
    """

    name: str
    default_sampling: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 50051
    dialect: str | None = None
    dialect_port: int = 50052
    target: Path = Path()
    security: Security = field(default_factory=Security)
    queue: int = 256
    max_message_bytes: int = 16 << 20
    max_request_seconds: float = 3600.0
    stalled_seconds: float = 30.0
    stuck_seconds: float = 60.0
    drain_seconds: float = 60.0
    metrics_port: int | None = None
    vllm_metrics: bool = False
    reflection: bool = True
    profile_folder: Path | None = None

    def warnings(self) -> Iterator[str]:
        """Says what is unsafe, or can't work, about how the server listens."""
        if warning := self.security.warning(self.host):
            yield warning
        if self.metrics_port is not None and not is_loopback(self.host):
            yield f"WARNING: metrics on {self.host}, port {self.metrics_port}, are open to all who reach the port"
        if self.dialect is not None and self.security.token is not None:
            yield "WARNING: --token-file holds for --dialect's port, too, but the smg gateway carries no token"

    def __post_init__(self) -> None:
        within("--port", self.port, 0, 65535)
        within("--dialect-port", self.dialect_port, 0, 65535)
        if self.metrics_port is not None:
            within("--metrics-port", self.metrics_port, 0, 65535)
        within("--queue", self.queue, 0, 100_000)
        within("--max-message-bytes", self.max_message_bytes, 1024, 1 << 30)
        within("--max-request-seconds", self.max_request_seconds, 0.001, LONGEST_SECONDS)
        within("--stalled-seconds", self.stalled_seconds, 0.001, LONGEST_SECONDS)
        within("--stuck-seconds", self.stuck_seconds, 0.01, LONGEST_SECONDS)
        within("--drain-seconds", self.drain_seconds, 0, LONGEST_SECONDS)
        if not self.name or len(self.name) > 256 or not self.name.isprintable():
            raise ValueError(f"--served-model-name: found {self.name!r}, expected 1 to 256 printable characters")
