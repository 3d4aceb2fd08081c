"""For tests whose time goes into compiling many small programs."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Leaves out LLVM's own optimisations: the same XLA program, compiled in about half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
