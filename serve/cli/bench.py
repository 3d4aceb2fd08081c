"""`jaxspec bench`: what a plain step and a speculative round cost on the devices that are here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.serve.checks import distinct, one_of, within
from jaxspec.serve.cli.bench_share import ShareSettings, print_share, time_share
from jaxspec.serve.cli.options import DTYPES, Devices, integers
from jaxspec.serve.cli.startup import StartUp, bad_input, use_compilation_cache
from jaxspec.serve.cli.tables import console

if TYPE_CHECKING:
    from jaxspec.benchmark.timing import RoundTiming
    from jaxspec.engine.engine import Engine

Option = typer.Option
KERNELS_SHOWN = 12


def bench_command(
    invocation: typer.Context,
    shape: Annotated[str, Option(help="smollm2, qwen3-8b or kimi-k2.6; weights are random.")] = "smollm2",
    shard: Annotated[int, Option(help="Time one device's share of a mesh of so many, verification alone.")] = 1,
    budget: Annotated[
        str | None, Option(help="Budgets to time, with commas between.  [default: 0,16,32,64; 0,8,16,32 with --shard]")
    ] = None,
    context: Annotated[
        str | None, Option(help="Tokens of context; several with --shard.  [default: 1024; 1024,32768 with --shard]")
    ] = None,
    batch: Annotated[int, Option(help="Sequences decoded at once.")] = 1,
    devices: Devices = 1,
    drafter_layers: Annotated[int | None, Option(help="The drafter's layers; by default the shape's.")] = None,
    block_size: Annotated[int | None, Option(help="The drafter's block; by default the shape's.")] = None,
    top_k_cap: Annotated[int, Option(help="Drafter's best tokens considered at each depth.")] = 16,
    rounds_per_call: Annotated[int, Option(help="Rounds that one compiled call runs.")] = 1,
    dtype: Annotated[str, Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    profile: Annotated[Path | None, Option(help="Folder for traces; also lists the longest kernels.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object on stdout, no table.")] = False,
) -> None:
    """Time plain steps and speculative rounds on random weights."""
    if invocation.invoked_subcommand is not None:
        return
    if shard != 1:
        with bad_input():
            if (batch, devices, drafter_layers, block_size, rounds_per_call, profile) != (1, 1, None, None, 1, None):
                raise ValueError("--shard: found beside options of whole rounds, expected --budget, --context, --dtype")
            share = ShareSettings(
                shape, shard, integers("--budget", budget or "0,8,16,32"),
                integers("--context", context or "1024,32768"), dtype,
            )  # fmt: skip
            share.check()
        use_compilation_cache()
        report = time_share(share)
        print(json.dumps(report)) if as_json else print_share(report)
        return
    with bad_input():
        contexts = integers("--context", context or "1024")
        if len(contexts) > 1:
            raise ValueError(f"--context: found {context!r}, expected one number without --shard")
        settings = Settings(
            shape, integers("--budget", budget or "0,16,32,64"), contexts[0], batch, devices, drafter_layers,
            block_size, top_k_cap, rounds_per_call, dtype,
        )  # fmt: skip
        settings.check()
    use_compilation_cache()
    report = _Run(settings, profile).run()
    if as_json:
        print(json.dumps(report))
    else:
        _print_tables(report)


@dataclass(frozen=True)
class Settings:
    """What is timed, as the command's options say it."""

    shape: str
    budgets: list[int]
    context: int
    batch: int
    devices: int
    drafter_layers: int | None
    block_size: int | None
    top_k_cap: int
    rounds_per_call: int
    dtype: str

    def check(self) -> None:
        """Raises ValueError, naming the option, for values that cannot be timed."""
        from jaxspec.benchmark.shapes import SHAPES
        from jaxspec.benchmark.timing import timing_tokens
        from jaxspec.config import EngineConfig

        one_of("--shape", self.shape, list(SHAPES))
        distinct("--budget", self.budgets)
        one_of("--dtype", self.dtype, DTYPES)
        EngineConfig(slots=self.batch, devices=self.devices)
        for budget in self.budgets:
            self.speculation(budget)
        pair = self.pair()
        limit = min(pair.target.max_position_embeddings, pair.drafter.max_position_embeddings)
        room = limit // EngineConfig.page_size * EngineConfig.page_size - timing_tokens(self.speculation(0))
        within("--context", self.context, 1, room)

    def speculation(self, budget: int) -> Any:
        """Returns the engine's setting for one budget."""
        from jaxspec.config import SpeculationConfig

        return SpeculationConfig(budget=budget, top_k_cap=self.top_k_cap, rounds_per_call=self.rounds_per_call)

    def pair(self) -> Any:
        """Returns the two models' configs."""
        from jaxspec.benchmark.shapes import SHAPES

        pair = SHAPES[self.shape]
        layers, block_size = self.drafter_layers, self.block_size
        return pair.with_drafter(
            pair.drafter.num_hidden_layers if layers is None else layers,
            pair.drafter.block_size if block_size is None else block_size,
        )


class _Run:
    """One benchmark from the models to the report; each result is told as soon as it is there."""

    def __init__(self, settings: Settings, profile: Path | None):
        self._settings, self._profile = settings, profile
        self._start_up = StartUp()

    def run(self) -> dict[str, Any]:
        import jax

        from jaxspec.benchmark.synthetic import random_models
        from jaxspec.benchmark.timing import make_engine, measure_bandwidth
        from jaxspec.sharding.mesh import make_mesh

        settings, say = self._settings, self._start_up.report
        with bad_input():
            mesh = make_mesh(settings.devices)
        device = mesh.devices.flat[0]
        say(f"making random weights of {settings.shape}, {settings.dtype}, on {mesh.size} × {device.device_kind}")
        target, drafter = jax.block_until_ready(random_models(settings.pair(), mesh, settings.dtype))
        bandwidth = measure_bandwidth(device)
        say(f"measured bandwidth {bandwidth / 1e9:.0f} GB/s")

        def engine_with(drafter: Any) -> "Engine":
            speculation = settings.speculation(0)
            with bad_input():
                return make_engine(target, drafter, mesh, speculation, settings.context, settings.batch, say)

        rounds = [self._time("plain", engine_with(None), bandwidth)]
        engine = engine_with(drafter)
        for budget in settings.budgets:
            engine.speculation = settings.speculation(budget)
            rounds.append(self._time(f"N = {budget}", engine, bandwidth))
        return {
            "device": device.device_kind,
            "jax": jax.__version__,
            "settings": asdict(settings) | {"block_size": drafter.config.block_size},
            "bandwidth": bandwidth,
            "rounds": rounds,
        }

    def _time(self, name: str, engine: "Engine", bandwidth: float) -> dict[str, Any]:
        from jaxspec.benchmark.timing import time_round

        settings = self._settings
        timing = time_round(engine, settings.context)
        split = ", ".join(f"{part} {measured.seconds * 1e3:.3f}" for part, measured in timing.parts.items())
        self._start_up.report(
            f"{name}: {timing.whole.seconds * 1e3:.3f} ms a round ({split}), "
            f"{timing.engine_seconds * 1e3:.3f} ms in the engine"
        )
        report = _as_dict(name, timing, bandwidth)
        if self._profile is not None:
            from jaxspec.benchmark.profiling import profile
            from jaxspec.benchmark.round_parts import RoundParts

            parts = RoundParts(engine, settings.context)
            kernels = profile(
                lambda: [parts.round() for _ in range(10)],
                10 * settings.rounds_per_call,
                self._profile / name.replace(" = ", ""),
            )
            report["kernels"] = [asdict(kernel) for kernel in kernels]
        return report


def _as_dict(name: str, timing: "RoundTiming", bandwidth: float) -> dict[str, Any]:
    parts = {"round": timing.whole} | timing.parts
    return {
        "name": name,
        "budget": timing.budget,
        "engine_seconds": timing.engine_seconds,
        "host_wait_seconds": timing.host_wait,
        "parts": {
            part: asdict(measured) | {"bound_share": measured.bound_share(bandwidth)}
            for part, measured in parts.items()
        },
    }


def _print_tables(report: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    settings = report["settings"]
    out.print(
        f"{settings['shape']}, {settings['dtype']}, context {settings['context']}, batch {settings['batch']}, "
        f"{settings['devices']} × {report['device']}, jax {report['jax']}, "
        f"copy bandwidth {report['bandwidth'] / 1e9:.0f} GB/s"
    )
    table = Table()
    for column in ("", "part"):
        table.add_column(column)
    for column in ("ms", "ms, host waiting", "GB moved", "bound ms", "of bound"):
        table.add_column(column, justify="right")
    for entry in report["rounds"]:
        for part, measured in entry["parts"].items():
            table.add_row(
                entry["name"] if part == "round" else "",
                part,
                f"{measured['seconds'] * 1e3:.3f}",
                f"{measured['waited_seconds'] * 1e3:.3f}",
                f"{measured['bytes_moved'] / 1e9:.3f}",
                f"{measured['bytes_moved'] / report['bandwidth'] * 1e3:.3f}",
                f"{measured['bound_share']:.0%}",
            )
        table.add_row("", "in the engine", f"{entry['engine_seconds'] * 1e3:.3f}", "", "", "", "")
        table.add_row("", "host wait", f"{entry['host_wait_seconds'] * 1e3:.3f}", "", "", "", "", end_section=True)
    out.print(table)
    out.print(
        "round: the engine's own program, calls dispatched ahead. The parts are compiled one by one, so their sum "
        "may exceed it. Host wait: a round in the engine less a round dispatched ahead."
    )
    for entry in report["rounds"]:
        if entry.get("kernels"):
            out.print(_kernel_table(entry["name"], entry["kernels"]))
        elif "kernels" in entry:
            out.print(f"{entry['name']}: the trace holds no kernels of the device")


def _kernel_table(name: str, kernels: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    total = sum(kernel["seconds"] for kernel in kernels)
    launches = sum(kernel["count"] for kernel in kernels)
    table = Table(title=f"{name}: {launches:.0f} kernels, {total * 1e6:.0f} µs a round")
    table.add_column("kernel", overflow="fold")
    for column in ("launches", "µs", "share"):
        table.add_column(column, justify="right")
    rest = kernels[KERNELS_SHOWN:]
    shown = kernels[:KERNELS_SHOWN]
    if rest:
        others = {"name": f"{len(rest)} others", "count": sum(k["count"] for k in rest)}
        shown = [*shown, others | {"seconds": sum(k["seconds"] for k in rest)}]
    for kernel in shown:
        share = kernel["seconds"] / total
        table.add_row(kernel["name"], f"{kernel['count']:.0f}", f"{kernel['seconds'] * 1e6:.1f}", f"{share:.0%}")
    return table
