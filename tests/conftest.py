"""What every test shares: eight virtual devices, a compilation cache, and the real SmolLM2 target."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

from serve.packaged import converted, packaged_gguf

# These run in an environment of their own: `make test-gateway`.
collect_ignore = ["gateway"]

CACHE = Path(__file__).resolve().parent.parent / ".cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return packaged_gguf()


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct converted to float32, kept from run to run."""
    return converted(smollm2_gguf, CACHE / "checkpoints")


@pytest.fixture(scope="session")
def smollm2_drafter() -> Path:
    """The drafter that the project ships, converted to float32."""
    return converted(CACHE.parent / "drafters" / "smollm2-135m-dflash", CACHE / "checkpoints")


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Leaves out LLVM's own optimisations: the same XLA program, compiled in about half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
