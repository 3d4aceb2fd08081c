"""What a load test comes to: percentiles, throughput, τ; as a table, JSON and a plot."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.serve.client.load import Observation

PERCENTILES = (50, 90, 99)


def summarise(observed: Sequence[Observation]) -> dict[str, Any]:
    """Sums up one level of load; times are in seconds, latencies those of the requests that were answered."""
    answered = [one for one in observed if one.code == "OK" and one.deliveries]
    seconds = max(one.ended for one in observed) - min(one.began for one in observed)
    tokens = sum(one.tokens for one in answered)
    rounds, drafted, prompt_tokens, cached_tokens = (
        sum(getattr(one, name) for one in answered) for name in ("rounds", "drafted", "prompt_tokens", "cached_tokens")
    )
    return {
        "requests": len(observed),
        "answered": len(answered),
        "errors": dict(Counter(one.code for one in observed if one.code != "OK")),
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tau": tokens / rounds if rounds else None,
        "draft_acceptance_rate": sum(one.accepted for one in answered) / drafted if drafted else None,
        "prompt_tokens": prompt_tokens,
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else None,
        "time_to_first_token": _percentiles([one.to_first_token for one in answered]),
        "time_per_token": _percentiles([one.per_token for one in answered if one.per_token is not None]),
        "between_deliveries": _percentiles([gap for one in answered for gap in one.between]),
        "request_latency": _percentiles([one.ended - one.began for one in answered]),
    }


def plot(levels: Sequence[dict[str, Any]], load_name: str, path: Path) -> None:
    """Draws throughput and latencies over the load into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, first, per_token = figure.subplots(1, 3)
    loads = [level["load"] for level in levels]
    throughput.plot(loads, [level["tokens_per_second"] for level in levels], marker="o")
    throughput.set_ylabel("tokens/s")
    for axes, name, label in (
        (first, "time_to_first_token", "time to first token, ms"),
        (per_token, "time_per_token", "time per token, ms"),
    ):
        for percentile in PERCENTILES:
            values = [level[name] and level[name][f"p{percentile}"] * 1e3 for level in levels]
            axes.plot(loads, values, marker="o", label=f"p{percentile}")
        axes.set_ylabel(label)
        axes.legend()
    for axes in (throughput, first, per_token):
        axes.set_xlabel(load_name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": float(np.mean(values))} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
