"""What the layers with weights share, where it has a say of its own: what it is that gives them keys."""

import jax
import jax.numpy as jnp
import pytest

import nnxlib as nnx

LAYERS = {
    "Linear": lambda rngs: nnx.Linear(2, 3, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(2, 3, 3, rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(2, 3, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(2, rngs=rngs),
    "LoRA": lambda rngs: nnx.LoRA(2, 1, 3, rngs=rngs),
}
NOT_RNGS = {"a seed": 0, "a key": jax.random.key(0), "an old key": jnp.zeros(2, jnp.uint32), "nothing": None}


@pytest.mark.parametrize("given", NOT_RNGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_no_rngs_is_an_error_with_the_remedy(layer, given):
    with pytest.raises(TypeError, match=r"rngs has to be nnx\.Rngs, .*, but got .*\. Write rngs=nnx\.Rngs\(seed\)"):
        LAYERS[layer](NOT_RNGS[given])
