"""What every test shares: eight virtual devices, quick compilation and its cache, and the real SmolLM2 target."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The same XLA programs, their machine code made the quick way. `make test-full` has it made as in use.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false "
    f"--xla_cpu_parallel_codegen_split_count=1 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import pytest

from serve.packaged import converted, packaged_gguf

# These run in an environment of their own: `make test-gateway`.
collect_ignore = ["gateway"]

CACHE = Path(__file__).resolve().parent.parent / ".cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_collection_finish() -> None:
    """What imports made lives until the end; the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


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
