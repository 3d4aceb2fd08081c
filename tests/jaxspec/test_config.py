"""What the settings load when they are imported, and what they refuse."""

import subprocess
import sys

import pytest

from jaxspec.config import GRAMMAR_KINDS, Grammar
from jaxspec.engine.grammar_sandbox import COMPILERS

HEAVY = {"flax", "grpc", "jax", "llguidance", "numpy", "tokenizers"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("jaxspec.config", HEAVY), ("jaxspec.speculation.tree", HEAVY - {"jax", "numpy"})],
)
def test_the_ground_floor_is_light(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({unwanted} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_every_kind_of_grammar_is_compiled() -> None:
    assert tuple(COMPILERS) == GRAMMAR_KINDS


@pytest.mark.parametrize("source", ["", None, 3])
def test_a_grammar_without_a_text_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"Grammar.source: found {source!r}, expected the text of a regex"):
        Grammar("regex", source)
