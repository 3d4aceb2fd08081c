"""`jaxspec bench --shard`: what verification passes cost one device of a mesh, at the true sizes of its share."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxspec.serve.checks import distinct, one_of, within
from jaxspec.serve.cli.options import DTYPES
from jaxspec.serve.cli.startup import StartUp
from jaxspec.serve.cli.tables import console


@dataclass(frozen=True)
class ShareSettings:
    """What is timed, as the command's options say it."""

    shape: str
    shard: int
    budgets: list[int]
    contexts: list[int]
    dtype: str

    def check(self) -> None:
        """Raises ValueError, naming the option, for values that cannot be timed."""
        from jaxspec.benchmark.shapes import SHAPES
        from jaxspec.config import MAX_BUDGET

        one_of("--shape", self.shape, list(SHAPES))
        one_of("--dtype", self.dtype, DTYPES)
        within("--shard", self.shard, 2, 1024)
        distinct("--budget", self.budgets)
        distinct("--context", self.contexts)
        target = SHAPES[self.shape].share(self.shard).target
        for budget in self.budgets:
            within("--budget", budget, 0, MAX_BUDGET)
        for context in self.contexts:
            within("--context", context, 1, target.max_position_embeddings - max(self.budgets) - 1)


def time_share(settings: ShareSettings) -> dict[str, Any]:
    """Builds one device's share of a published model with random weights and times its passes."""
    import jax

    from jaxspec.benchmark.shapes import SHAPES
    from jaxspec.benchmark.synthetic import random_target
    from jaxspec.benchmark.timing import measure_bandwidth, weight_bytes
    from jaxspec.benchmark.verify_timing import VerifyBench
    from jaxspec.sharding.mesh import make_mesh

    start_up = StartUp()
    pair, mesh = SHAPES[settings.shape].share(settings.shard), make_mesh(1)
    device = mesh.devices.flat[0]
    start_up.report(f"making one of {settings.shard} shares of {settings.shape} on {device.device_kind}")
    target = jax.block_until_ready(random_target(pair, mesh, settings.dtype))
    size = sum(weight_bytes(target).values())
    start_up.report(f"{size / 1e9:.2f} GB of weights")
    bandwidth = measure_bandwidth(device)
    start_up.report(f"measured bandwidth {bandwidth / 1e9:.0f} GB/s")
    cases = [(budget, context) for context in settings.contexts for budget in settings.budgets]
    bench = VerifyBench(target, mesh, pair.drafter.target_layer_ids, cases, start_up.report)
    passes = []
    for case in cases:
        timing = bench.time(*case)
        start_up.report(f"{timing.nodes} nodes over {timing.context} tokens: {timing.seconds * 1e3:.2f} ms")
        passes.append(asdict(timing) | {"bound_share": timing.bytes_moved / bandwidth / timing.seconds})
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "settings": asdict(settings),
        "weight_bytes": size,
        "bandwidth": bandwidth,
        "passes": passes,
    }


def print_share(report: dict[str, Any]) -> None:
    """Prints the report as a table."""
    from rich.table import Table

    out = console()
    settings = report["settings"]
    out.print(
        f"one of {settings['shard']} shares of {settings['shape']}, {settings['dtype']}, "
        f"{report['weight_bytes'] / 1e9:.2f} GB of weights, no collectives, {report['device']}, "
        f"jax {report['jax']}, copy bandwidth {report['bandwidth'] / 1e9:.0f} GB/s"
    )
    table = Table()
    for column in ("context", "nodes", "ms", "ms, host waiting", "experts a layer", "GB moved", "bound ms", "of bound"):
        table.add_column(column, justify="right")
    for one in report["passes"]:
        table.add_row(
            str(one["context"]),
            str(one["nodes"] or "plain"),
            f"{one['seconds'] * 1e3:.2f}",
            f"{one['waited_seconds'] * 1e3:.2f}",
            f"{one['experts']:.1f}",
            f"{one['bytes_moved'] / 1e9:.2f}",
            f"{one['bytes_moved'] / report['bandwidth'] * 1e3:.2f}",
            f"{one['bound_share']:.0%}",
        )
    out.print(table)
