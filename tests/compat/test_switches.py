"""The switches of flax.nnx, passed to functions of nnxlib itself: refused, with what to write instead."""

import jax.numpy as jnp
import pytest

import nnxlib as nnx

LAYER = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def total(layer):
    return layer.kernel.sum()


def same(layer):
    return layer


CALLS = {
    "jit": lambda **switch: nnx.jit(total, **switch),
    "jit, as a decorator": lambda **switch: nnx.jit(**switch)(total),
    "jit_partial": lambda **switch: nnx.jit_partial(total, LAYER, **switch),
    "grad": lambda **switch: nnx.grad(total, **switch),
    "value_and_grad, as a decorator": lambda **switch: nnx.value_and_grad(**switch)(total),
    "vmap": lambda **switch: nnx.vmap(total, **switch),
    "scan": lambda **switch: nnx.scan(total, **switch),
    "remat": lambda **switch: nnx.remat(total, **switch),
    "shard_map": lambda **switch: nnx.shard_map(total, **switch),
    "custom_vjp": lambda **switch: nnx.custom_vjp(total, **switch),
    "cond": lambda **switch: nnx.cond(True, total, total, LAYER, **switch),
    "switch": lambda **switch: nnx.switch(0, [total], LAYER, **switch),
    "while_loop": lambda **switch: nnx.while_loop(lambda layer: False, same, LAYER, **switch),
    "fori_loop": lambda **switch: nnx.fori_loop(0, 1, lambda i, layer: layer, LAYER, **switch),
    "split": lambda **switch: nnx.split(LAYER, **switch),
    "state": lambda **switch: nnx.state(LAYER, **switch),
    "merge": lambda **switch: nnx.merge(*nnx.split(LAYER), **switch),
    "clone": lambda **switch: nnx.clone(LAYER, **switch),
    "iter_graph": lambda **switch: nnx.iter_graph(LAYER, **switch),
    "iter_children": lambda **switch: nnx.iter_children(LAYER, **switch),
    "iter_modules": lambda **switch: nnx.iter_modules(LAYER, **switch),
    "iter_module_children": lambda **switch: nnx.iter_module_children(LAYER, **switch),
    "split_rngs": lambda **switch: nnx.split_rngs(LAYER, splits=2, **switch),
    "fork_rngs": lambda **switch: nnx.fork_rngs(LAYER, **switch),
    "with_rngs": lambda **switch: nnx.with_rngs(nnx.Rngs(0), split=2, **switch),
    "reseed": lambda **switch: nnx.reseed(LAYER, **switch),
    "view": lambda **switch: nnx.view(nnx.Dropout(0.5), **switch),
    "view_info": lambda **switch: nnx.view_info(LAYER, **switch),
    "with_attributes": lambda **switch: nnx.with_attributes(LAYER, **switch),
}


@pytest.mark.parametrize(
    "switch", [{"graph": False}, {"graph_updates": False}, {"graph": True, "graph_updates": False}]
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_switch_is_refused_with_a_remedy(call, switch):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**switch)
    notes = [note for note in caught.value.__notes__ if "from nnxlib.compat import flax as nnx" in note]
    assert len(notes) == 1
    assert "one mode" in notes[0]


def test_another_option_of_that_kind_has_no_such_note():
    for call in CALLS.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            call(grph=False)
        assert not any("compat" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_error_in_a_function_with_an_argument_of_that_name_has_no_such_note():
    def neighbours(layer, graph):
        return jnp.zeros(()) + {}["missing"]

    with pytest.raises(KeyError) as caught:
        nnx.eval_shape(neighbours, LAYER, graph=jnp.ones(3))
    assert not any("compat" in note for note in caught.value.__notes__)
