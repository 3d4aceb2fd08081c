"""The target that every test of training trains beside."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.model.families.llama import layout_of as target_layout
from jaxspec.model.layers.parameters import fill
from tests.support.training import TARGET


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    random = np.random.default_rng(3)
    build = lambda: LlamaForCausalLM(TARGET, target_layout(TARGET, 1), jnp.float32)  # noqa: E731
    return fill(build, lambda s: jnp.asarray(random.normal(len(s.shape) == 1, 0.2, s.shape), s.dtype))
