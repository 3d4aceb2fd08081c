"""Warming up compiles what requests of every size and kind of sampling need."""

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.serve.runtime.warm_up import warm_up
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import tiny_target


def test_after_warming_up_nothing_is_compiled():
    lines = []
    config = EngineConfig(slots=2, batch_buckets=(2,), prefill_chunk=64)
    engine = Engine(tiny_target(), mesh=make_mesh(1), config=config, report=lines.append)
    warm_up(engine, "first")
    first = len(lines)
    warm_up(engine, "all")
    compiled = len(lines)
    assert compiled > first
    samplings = [SamplingParams(temperature=t, top_p=p, max_tokens=3) for t, p in [(0, 1.0), (1, 1.0), (1, 0.5)]]
    engine.generate([[1] * n for n in (1, 30, 64)], samplings)
    engine.generate([[1], [2]], samplings[:2])
    assert len(lines) == compiled
