"""What the server counts, for Prometheus: requests, tokens, latencies, speculation, and calls by method and status."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grpc import StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric

from jaxspec.engine.request import EngineLoad, RequestStatistics, RoundCounts

PREFIX, VLLM_PREFIX = "jaxspec_", "vllm:"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)


class Metrics:
    """Everything that one server counts.

    Names behind the prefix are those of vLLM, speculation's included.

    Args:
      model: the label `model_name`.
      load: tells how busy the engine is, None while there is no engine.
      vllm_names: repeat every metric under `vllm:`, for dashboards and clients that look for that.

    Attributes:
      speculation: what speculation did in all rounds since the start.
    """

    def __init__(self, model: str, load: Callable[[], EngineLoad | None], vllm_names: bool = False):
        self._own = CollectorRegistry()
        self._exposed = CollectorRegistry()
        self._exposed.register(self._own)
        if vllm_names:
            self._exposed.register(_Renamed(self._own))
        self._model = model
        self.speculation = RequestStatistics()

        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens of admitted requests")
        self._generation_tokens = self._make(Counter, "generation_tokens", "Tokens produced")
        self._finished = self._make(Counter, "request_success", "Answers by how they ended", ["finished_reason"])
        self._drafts = self._make(Counter, "spec_decode_num_drafts", "Rounds that verified drafted tokens")
        self._draft_tokens = self._make(Counter, "spec_decode_num_draft_tokens", "Drafted tokens verified")
        self._accepted = self._make(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._accepted_at = self._make(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by depth", ["position"]
        )
        self.first_token = self._make(Histogram, "time_to_first_token_seconds", "From admission to the first tokens")
        self.queue_time = self._make(Histogram, "request_queue_time_seconds", "From admission to a slot")
        self.between = self._make(Histogram, "inter_token_latency_seconds", "Between two deliveries of one answer")
        self.per_token = self._make(
            Histogram, "time_per_output_token_seconds", "A token, after an answer's first delivery"
        )
        self.whole = self._make(Histogram, "e2e_request_latency_seconds", "From admission to an answer's end")
        for name, text, value in (
            ("num_requests_running", "Requests in slots", lambda load: load.running),
            ("num_requests_waiting", "Requests that wait for a slot", lambda load: load.waiting),
            ("kv_cache_usage_perc", "Cache pages in use, 0 to 1", lambda load: load.pages_used / load.pages),
        ):
            gauge = self._make(Gauge, name, text)
            gauge.set_function(lambda value=value: 0.0 if (now := load()) is None else value(now))
        ProcessCollector(registry=self._exposed)
        labels = ["grpc_service", "grpc_method"]
        self._started = Counter("grpc_server_started", "Calls", labels, registry=self._exposed)
        self._handled = Counter("grpc_server_handled", "Ended calls", [*labels, "grpc_code"], registry=self._exposed)
        self._handling = Histogram(
            "grpc_server_handling_seconds", "Duration of calls", labels, registry=self._exposed, buckets=SECONDS
        )

    def serve(self, host: str, port: int) -> tuple[Any, int]:
        """Serves /metrics over HTTP from a thread of its own; returns the server and its port."""
        server, _ = start_http_server(port, host, registry=self._exposed)
        return server, server.server_port

    def admitted(self, prompt_tokens: int) -> None:
        """Counts a request."""
        self._prompt_tokens.inc(prompt_tokens)

    def rounds(self, rounds: Iterable[RoundCounts]) -> None:
        """Counts what the engine did for one request in one step."""
        for counts in rounds:
            self.speculation.record(counts, depth=counts.accepted)
            self._generation_tokens.inc(counts.produced)
            if counts.drafted:
                self._drafts.inc()
                self._draft_tokens.inc(counts.drafted)
                self._accepted.inc(counts.accepted)
                for position in range(counts.accepted):
                    self._accepted_at.labels(self._model, position).inc()

    def finished(self, reason: str) -> None:
        """Counts an answer that ended."""
        self._finished.labels(self._model, reason).inc()

    def call_started(self, method: str) -> None:
        """Counts a call; `method` as in "/package.Service/Method"."""
        self._started.labels(*_names(method)).inc()

    def call_ended(self, method: str, code: StatusCode, seconds: float) -> None:
        """Counts a call that ended."""
        self._handled.labels(*_names(method), code.name).inc()
        self._handling.labels(*_names(method)).observe(seconds)

    def _make(self, kind: Any, name: str, text: str, labels: Iterable[str] = ()) -> Any:
        """Makes a metric of this model; one with further labels still wants those."""
        more = {"buckets": SECONDS} if kind is Histogram else {}
        metric = kind(PREFIX + name, text, ["model_name", *labels], registry=self._own, **more)
        return metric if labels else metric.labels(self._model)


class AnswerClock:
    """Measures the deliveries of one answer."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._tokens = 0
        self._ended = False
        self.seconds_to_first_token: float | None = None

    def delivered(self, tokens: int) -> None:
        """Notes that tokens came."""
        now = time.perf_counter()
        if self.seconds_to_first_token is None:
            self._first = now
            self.seconds_to_first_token = now - self._began
            self._metrics.first_token.observe(self.seconds_to_first_token)
        else:
            self._metrics.between.observe(now - self._last)
            self._tokens += tokens
        self._last = now

    def ended(self, reason: str) -> None:
        """Notes that the answer is complete."""
        self._ended = True
        self._metrics.finished(reason)
        self._metrics.whole.observe(self.seconds)
        if self._tokens:
            self._metrics.per_token.observe((self._last - self._first) / self._tokens)

    def closed(self, reason: str) -> None:
        """Notes that the call is over; where the answer is not complete, `reason` tells why."""
        if not self._ended:
            self._metrics.finished(reason)

    @property
    def seconds(self) -> float:
        """How long it has been since admission."""
        return time.perf_counter() - self._began


class _Renamed:
    """Repeats another registry's metrics under vLLM's prefix."""

    def __init__(self, source: CollectorRegistry):
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            copy = Metric(metric.name.replace(PREFIX, VLLM_PREFIX, 1), metric.documentation, metric.type)
            copy.samples = [s._replace(name=s.name.replace(PREFIX, VLLM_PREFIX, 1)) for s in metric.samples]
            yield copy


def _names(method: str) -> list[str]:
    return method.removeprefix("/").split("/", 1)
