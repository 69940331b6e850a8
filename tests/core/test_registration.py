"""Classes are registered with JAX as pytrees, each with code of its own."""

import jax
import pytest

from nnxlib.core.registration import register_pytree


def flatten(x):
    return (x.value,), None


def flatten_with_keys(x):
    return ((jax.tree_util.GetAttrKey("value"), x.value),), None


def new_class(flatten_without_keys=flatten):
    class Box:
        def __init__(self, value):
            self.value = value

    register_pytree(Box, flatten_with_keys, lambda _, children: Box(*children), flatten_without_keys)
    return Box


@pytest.mark.parametrize("flatten_without_keys", [flatten, None])
def test_objects_are_flattened_with_and_without_keys_and_unflattened(flatten_without_keys):
    box = new_class(flatten_without_keys)(3)
    assert jax.tree.leaves(box) == [3]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(box)] == [".value"]
    assert jax.tree.map(lambda x: x + 1, box).value == 4


def test_classes_do_not_share_the_code_that_flattens_them(monkeypatch):
    """CPython keeps in the code of a function how to read an attribute of one class."""
    registered = []
    monkeypatch.setattr(
        jax.tree_util, "register_pytree_with_keys", lambda kind, *functions: registered.append(functions)
    )
    new_class()
    new_class()
    (keys, _, plain), (other_keys, _, other_plain) = registered
    codes = [f.__code__ for f in (keys, plain, other_keys, other_plain, flatten, flatten_with_keys)]
    assert len(set(map(id, codes))) == len(codes)
    assert (plain.__name__, plain.__module__) == ("flatten", __name__)
