"""What every test shares: eight virtual devices, quick compilation, and the real SmolLM2 with its drafter."""

import fcntl
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The same XLA programs, their machine code made the quick way. `make test-full` has it made as in use.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Newer versions have one emitter, and end the process over a flag that they do not know.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1 "
    f"{'--xla_cpu_use_fusion_emitters=false' if version('jaxlib') < '0.11' else ''} {os.environ.get('XLA_FLAGS', '')}"
)

import hypothesis
import jax
import pytest

from jaxspec.serve.cli.demo_model import converted, packaged_gguf

# These run in an environment of their own: `make test-gateway`.
collect_ignore = ["gateway"]

CACHE = Path(__file__).resolve().parent.parent / ".cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


# The machine may be busy, and an example may be the first to compile.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def kept_conversion(source: Path) -> Path:
    """Converts to float32, one process at a time; kept from run to run."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return converted(source, CACHE / "checkpoints")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return packaged_gguf()


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct converted to float32."""
    return kept_conversion(smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2_drafter() -> Path:
    """The drafter that the project ships, converted to float32."""
    return kept_conversion(CACHE.parent / "drafters" / "smollm2-135m-dflash")
