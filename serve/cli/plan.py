"""`jaxspec plan`: what a target and its drafter take on each device and read in a pass, before anything is loaded."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jaxspec.serve.cli.options import Devices, ExpertLayout, MemoryFraction, ShardCache, byte_count
from jaxspec.serve.cli.startup import bad_input
from jaxspec.serve.cli.tables import console

if TYPE_CHECKING:
    from jaxspec.engine.memory_plan import ModelPlan, Plan

Option = typer.Option
ROWS = (1, 8, 16, 32)  # of a pass: the anchor, with drafted nodes; 1 is a plain step.
CONTEXT = 32768  # Tokens whose cache is read, to compare with.


def plan_command(
    target: Annotated[Path, Option(help="Folder of a target: converted, or with nothing but its config.json.")],
    device_memory: Annotated[str, Option(help="Memory of a device: 96GB, 80GiB.")],
    drafter: Annotated[Path | None, Option(help="Folder of its drafter, as --target.")] = None,
    devices: Devices = 1,
    device_bandwidth: Annotated[str, Option(help="What a device reads of its memory in a second.")] = "1.79TB",
    memory_fraction: MemoryFraction = 0.92,
    max_context: Annotated[
        int | None, Option(help="Tokens that a request may reach; without it, as many as fit.")
    ] = None,
    expert_layout: ExpertLayout = "tensor",
    shard_cache: ShardCache = None,
    page_size: Annotated[int, Option(help="Tokens of a cache page.")] = 16,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object on stdout, no tables.")] = False,
) -> None:
    """Say what fits on which devices and how fast it can be; exits with 1 where it does not fit."""
    with bad_input():
        memory = byte_count("--device-memory", device_memory)
        bandwidth = byte_count("--device-bandwidth", device_bandwidth)
        if not memory or not bandwidth:
            raise ValueError("--device-memory, --device-bandwidth: found 0, expected more")
    import jax

    jax.config.update("jax_platforms", "cpu")  # Only shapes are made.
    from jaxspec.config import EngineConfig
    from jaxspec.engine.memory_plan import plan_models
    from jaxspec.model.checkpoint.description import describe

    with bad_input():
        config = EngineConfig(
            devices=devices,
            page_size=page_size,
            max_context=max_context,
            expert_layout=cast(Any, expert_layout),  # Checked there.
            shard_cache=cast(Any, shard_cache),
            memory_fraction=memory_fraction,
        )
        plan = plan_models(
            describe(target, "target"), None if drafter is None else describe(drafter, "drafter"), config
        )
        if max_context is not None and max_context > plan.max_context:
            raise ValueError(
                f"--max-context: found {max_context}, expected at most the models' {plan.max_context} tokens"
            )
    room = int(memory * memory_fraction)
    report = _report(plan, room, bandwidth) | {
        "device_memory": memory,
        "memory_fraction": memory_fraction,
        "refusal": plan.shortfall(room, max_context or page_size),
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print(plan, report, max_context)
    if report["refusal"]:
        raise typer.Exit(1)


def _report(plan: "Plan", room: int, bandwidth: int) -> dict[str, Any]:
    """Returns the plan as plain values: bytes, of one device unless the name says otherwise, and seconds."""
    plain = plan.read_bytes(1)
    context = min(CONTEXT, plan.max_context)
    draft = plan.draft_bytes()

    def model(part: "ModelPlan") -> dict[str, Any]:
        parts = [
            {"name": p.name, "whole": p.whole, "bytes": p.device_bytes, "bytes_all_devices": p.total_bytes}
            for p in part.parts
        ]
        return {"parts": parts, "bytes": part.device_bytes, "cache_bytes_per_token": part.cache_bytes_per_token}

    passes = [
        {
            "rows": rows,
            "touched_experts": plan.touched_experts(rows),
            "bytes": plan.read_bytes(rows),
            "seconds": plan.read_bytes(rows) / bandwidth,
            # With the drafter's pass: tokens a round must commit to be as fast as plain steps.
            "break_even": (plan.read_bytes(rows) + (draft if rows > 1 else 0)) / plain,
        }
        for rows in ROWS
    ]
    return {
        "devices": plan.devices,
        "device_bandwidth": bandwidth,
        "room": room,
        "target": model(plan.target),
        "drafter": model(plan.drafter) if plan.drafter else None,
        "cache_bytes_per_token": plan.cache_bytes_per_token,
        "cache_tokens": plan.cache_tokens(room),
        "max_context": plan.max_context,
        "passes": passes,
        "plain_tokens_per_second": bandwidth / plain,
        "draft_bytes": draft,
        "context": context,
        "context_bytes": context * plan.target.cache_bytes_per_token,
        "plain_tokens_per_second_in_context": bandwidth / (plain + context * plan.target.cache_bytes_per_token),
    }


def _print(plan: "Plan", report: dict[str, Any], max_context: int | None) -> None:
    from rich.table import Table

    out = console(highlight=False)
    room = report["room"]
    out.print(
        f"{plan.devices} × {_gb(report['device_memory'])}, of each {report['memory_fraction']:.0%} for weights and "
        f"caches: {_gb(room)}"
    )
    weights = Table("weights", title_justify="left")
    for column in ("a device", "all devices"):
        weights.add_column(column, justify="right")
    for name, model in (("target", plan.target), ("drafter", plan.drafter)):
        if model is None:
            continue
        for part in model.parts:
            label = f"{part.name}, all on every device" if part.whole else part.name
            weights.add_row(f"  {label}", _gb(part.device_bytes), _gb(part.total_bytes))
        weights.add_row(
            f"[bold]{name}", _gb(model.device_bytes), _gb(sum(p.total_bytes for p in model.parts)), end_section=True
        )
    out.print(weights)

    cache = Table("cache, a device", "bytes a token")
    cache.columns[1].justify = "right"
    cache.add_row("target", f"{plan.target.cache_bytes_per_token:,}")
    if plan.drafter is not None:
        cache.add_row("drafter", f"{plan.drafter.cache_bytes_per_token:,}")
    out.print(cache)
    out.print(
        f"cache that fits: {report['cache_tokens']:,} tokens ({_gb(max(0, room - plan.weight_bytes))}); "
        f"a request may reach {min(max_context or plan.max_context, report['cache_tokens']):,} of the models' "
        f"{plan.max_context:,}"
    )

    table = Table("rows of a pass")
    for column in ("experts a layer", "read", "ms", "÷ plain", "τ to break even"):
        table.add_column(column, justify="right")
    plain = report["passes"][0]["bytes"]
    for entry in report["passes"]:
        table.add_row(
            f"{entry['rows']}" + (" (plain step)" if entry["rows"] == 1 else ""),
            f"{entry['touched_experts']:.1f}" if entry["touched_experts"] else "",
            _gb(entry["bytes"]),
            f"{entry['seconds'] * 1e3:.2f}",
            f"{entry['bytes'] / plain:.2f}",
            f"{entry['break_even']:.2f}" if entry["rows"] > 1 and plan.drafter is not None else "",
        )
    out.print(table)
    bandwidth = report["device_bandwidth"]
    out.print(
        f"bounds at {bandwidth / 1e12:g} TB/s a device, weights only, experts chosen independently"
        + (", on the busiest device" if plan.expert_layout == "expert" else "")
        + "; rows include the anchor"
    )
    if plan.drafter is not None:
        out.print(
            f"a drafter's pass reads {_gb(report['draft_bytes'])} with the output head: "
            f"{report['draft_bytes'] / bandwidth * 1e3:.2f} ms"
        )
    context = report["context_bytes"]
    out.print(f"a context of {report['context']:,} tokens adds {_gb(context)}: {context / bandwidth * 1e3:.2f} ms")
    out.print(
        f"plain decoding: at most {report['plain_tokens_per_second']:,.0f} tokens/s, in that context "
        f"{report['plain_tokens_per_second_in_context']:,.0f}"
    )
    out.print(f"does not fit: {report['refusal']}" if report["refusal"] else "fits", soft_wrap=True)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"
