"""Where a round's device time goes, by kernel."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class KernelTime:
    """One kernel, or several of a kind.

    Attributes:
      count, seconds: launches and device time of one round.
    """

    name: str
    count: float
    seconds: float


def profile(call: Callable[[], Any], rounds: int, folder: Path) -> list[KernelTime]:
    """Traces calls that run `rounds` rounds together, into `folder`, and adds up their kernels, longest first."""
    jax.block_until_ready(call())
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(call())
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return kernel_times(jax.profiler.ProfileData.from_file(str(newest)), rounds)


def kernel_times(data: Any, rounds: int) -> list[KernelTime]:
    """Adds up the kernels of a trace's first device, longest first.

    A kernel that layers share is launched many times a round and keeps its name. Those launched once a round, or less,
    are added up with all others whose names differ in their numbers only.
    """
    launches: dict[str, list[float]] = defaultdict(list)
    for event in _events(data):
        launches[event.name].append(event.duration_ns * 1e-9)
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, seconds in launches.items():
        kinds[name if len(seconds) > rounds else re.sub(r"([._]\d+)+$", "", name)] += seconds
    kernels = [KernelTime(name, len(seconds) / rounds, sum(seconds) / rounds) for name, seconds in kinds.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _events(data: Any) -> list[Any]:
    planes = {plane.name: plane for plane in data.planes}
    devices = sorted(name for name in planes if name.startswith("/device:") and "CUSTOM" not in name)
    for name in devices:
        streams = [line for line in planes[name].lines if line.name.startswith("Stream")]
        if streams:
            return [event for line in streams for event in line.events]
    # A CPU has no streams: its operations run on threads of the host, among other events.
    host = planes["/host:CPU"]
    events = [event for line in host.lines if line.name.startswith("tf_XLA") for event in line.events]
    return [event for event in events if not event.name.startswith("end: ") and "hlo_op" in dict(event.stats)]
