"""What a load test comes to, on requests whose times are known."""

import pytest

from jaxspec.serve.client.load import Observation
from jaxspec.serve.client.load_report import plot, summarise


def seen(began, *deliveries, ended, code="OK", **speculation):
    return Observation(began, list(deliveries), ended, code, **speculation)


FIRST = seen(
    10.0,
    (10.5, 1),
    (11.0, 3),
    (12.0, 2),
    ended=12.25,
    rounds=4,
    drafted=16,
    accepted=2,
    prompt_tokens=9,
    cached_tokens=4,
)
SECOND = seen(11.0, (11.25, 4), ended=11.25, rounds=1, drafted=4, accepted=3, prompt_tokens=7)
REFUSED = seen(11.0, ended=14.0, code="RESOURCE_EXHAUSTED")


def test_times_of_a_request():
    assert FIRST.tokens == 6
    assert FIRST.to_first_token == 0.5
    assert FIRST.per_token == 1.5 / 5
    assert FIRST.between == [0.5, 1.0]
    assert SECOND.per_token is None


def test_a_level_of_load():
    level = summarise([FIRST, SECOND, REFUSED])
    assert (level["requests"], level["answered"], level["errors"]) == (3, 2, {"RESOURCE_EXHAUSTED": 1})
    assert (level["seconds"], level["tokens"], level["tokens_per_second"]) == (4.0, 10, 2.5)
    assert level["requests_per_second"] == 0.5
    assert (level["tau"], level["draft_acceptance_rate"]) == (2.0, 0.25)
    assert (level["prompt_tokens"], level["cached_share"]) == (16, 0.25)
    assert level["time_to_first_token"]["p50"] == pytest.approx(0.375)
    assert level["between_deliveries"]["mean"] == pytest.approx(0.75)
    assert level["request_latency"]["p99"] == pytest.approx(0.25 + 0.99 * 2.0)


def test_a_level_without_answers_has_no_latencies(tmp_path):
    level = summarise([REFUSED])
    assert level["time_to_first_token"] is level["tau"] is None
    assert level["tokens_per_second"] == 0
    plot([{"load": 1} | summarise([FIRST]), {"load": 2} | level], "requests at once", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
