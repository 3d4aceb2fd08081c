"""The small layers every model is made of. Code here runs on one device's share of the weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.parameters import weight
from jaxspec.sharding.collectives import device_index, sum_over_devices
from jaxspec.sharding.layout import Layout


def precision(dtype: Any) -> jax.lax.Precision:
    """float32 products are exact (a GPU would otherwise use TF32); lower types use the hardware's own."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(equation: str, a: jax.Array, b: jax.Array, out: Any = None) -> jax.Array:
    """`jnp.einsum` with float32 accumulation, returned as `out` (by default the dtype of `a`)."""
    result = jnp.einsum(equation, a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)
    return result.astype(out or a.dtype)


def _product_forward(
    equation: str, a: jax.Array, b: jax.Array, out: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(equation, a, b, out), (a, b)


def _product_backward(
    equation: str, out: Any, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The transposed products in the operands' own dtype: left alone, the float32 result would widen them."""
    _, transposed = jax.vjp(partial(jnp.einsum, equation, precision=precision(operands[0].dtype)), *operands)
    return transposed(cotangent.astype(operands[0].dtype))


product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Module):
    """y = x Wᵀ, the weight stored [out, in] as on disk. `axes` names the two dimensions for the layout."""

    def __init__(self, outputs: int, inputs: int, axes: tuple[str | None, str | None], dtype: Any):
        self.weight = weight((outputs, inputs), dtype, axes)

    def __call__(self, x: jax.Array, out: Any = None) -> jax.Array:
        """[..., in] → [..., out], in the dtype `out` (by default that of `x`)."""
        return product("...i,oi->...o", x, self.weight[...], out)


class RMSNorm(nnx.Module):
    """x / rms(x) · weight over the last dimension, in float32, rounded to the input's dtype before the weight."""

    def __init__(self, size: int, eps: float, dtype: Any):
        self.eps = eps
        self.weight = weight((size,), dtype, (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] → the same shape and dtype."""
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


class Embedding(nnx.Module):
    """The token embedding, its rows split over the vocabulary where the mesh divides it; also a tied output head."""

    def __init__(self, vocab: int, hidden: int, layout: Layout, dtype: Any):
        self.split = layout.splits("vocab")
        self.weight = weight((vocab, hidden), dtype, ("vocab", None))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] → [..., hidden], the same on every device."""
        table = self.weight[...]
        local = tokens - device_index(self.split) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        rows = table.at[jnp.where(here, local, 0)].get(mode="clip")
        return sum_over_devices(jnp.where(here[..., None], rows, 0), self.split)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] → float32 [..., vocab / devices], this device's rows of the vocabulary."""
        return product("...i,oi->...o", hidden, self.weight[...], jnp.float32)


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), its inner units (`axis`) split over the mesh where they divide."""

    def __init__(self, hidden: int, inner: int, layout: Layout, dtype: Any, axis: str = "mlp"):
        self.split = layout.splits(axis)
        self.gate_proj = Linear(inner, hidden, (axis, None), dtype)
        self.up_proj = Linear(inner, hidden, (axis, None), dtype)
        self.down_proj = Linear(hidden, inner, (None, axis), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] → the same shape, equal on every device."""
        return sum_over_devices(self.partial(x), self.split)

    def partial(self, x: jax.Array) -> jax.Array:
        """What this device's inner units contribute, not yet added over the devices."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
