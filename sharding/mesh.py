"""The device mesh: one axis, `tensor`."""

import jax
import numpy as np

TENSOR_AXIS = "tensor"


def make_mesh(devices: int = 1) -> jax.sharding.Mesh:
    """Builds the one-axis mesh over the first `devices` devices.

    Raises:
      ValueError: if fewer devices exist than were asked for.
    """
    found = jax.devices()
    if not 1 <= devices <= len(found):
        raise ValueError(
            f"devices: found {devices}, expected 1 to {len(found)} "
            f"(this machine shows {len(found)} {found[0].platform} device(s))"
        )
    return jax.sharding.Mesh(np.array(found[:devices]), (TENSOR_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
