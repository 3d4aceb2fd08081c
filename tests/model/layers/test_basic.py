"""Products, and the gradients that training takes through them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.layers.basic import product


def test_products_gradient_is_the_transposed_product_in_the_operands_dtype():
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((3, 4), (5, 4)))
    loss = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, b)))  # noqa: E731
    ours = jax.grad(loss(lambda a, b: product("ri,oi->ro", a, b)), (0, 1))(a, b)
    plain = jax.grad(loss(lambda a, b: jnp.einsum("ri,oi->ro", a, b)), (0, 1))(a, b)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    low = jax.grad(loss(lambda a, b: product("ri,oi->ro", a, b, jnp.float32)), (0, 1))
    text = str(jax.make_jaxpr(low)(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)))
    for shape in ("3,4", "5,4"):
        assert f"bf16[{shape}] = dot_general" in text
        assert f"f32[{shape}] = dot_general" not in text
