"""Sequential: layers, or any functions, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core.annotations import parameters_of
from ..core.containers import List
from ..core.errors import ArgumentError, accepts
from ..core.module import Module, ModuleMeta


class Sequential(Module):
    """Layers, or any functions, applied one after the other.

    If one returns a tuple, its items are the arguments of the next; the items of a dict are keyword arguments. Keyword
    arguments of the call (``deterministic=True``, ``rngs=rngs``) are passed to each layer that takes them.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> model(jnp.ones((1, 2))).shape, len(model), model[1] is nnx.relu
    ((1, 3), 2, True)

    Raises:
      TypeError: for an item that cannot be called, and for a keyword argument that another item returns too.
    """

    def __init__(self, *fns: Callable[..., Any]):
        self.layers = List(fns)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.layers:
            return args[0] if len(args) == 1 else args or kwargs or None
        output: Any = args
        for i, layer in enumerate(self.layers):
            if isinstance(layer, ModuleMeta):
                raise ArgumentError(f"Sequential.layers[{i}] is the class {layer.__name__}; make a layer of it first.")
            if not callable(layer):
                hint = " Unpack it: nnx.Sequential(*layers)." if isinstance(layer, list | tuple) else ""
                raise ArgumentError(
                    f"Sequential.layers[{i}] is a {type(layer).__name__}, which cannot be called.{hint}"
                )
            args, named = ((), output) if isinstance(output, dict) else (output, {})
            if not isinstance(args, tuple):
                args = (args,)
            if kwargs:
                shared = _taken(layer, len(args), kwargs)
                if both := sorted(named.keys() & shared.keys()):
                    raise ArgumentError(
                        f"Got multiple values for arguments {both} in Sequential[{i}]: from the call, and in the dict "
                        f"that Sequential[{i - 1}] returned."
                    )
                named = {**named, **shared}
            try:
                output = layer(*args, **named)
            except TypeError as error:
                if i and isinstance(output, tuple) and len(args) != 1 and not accepts(layer, *args, **named):
                    error.add_note(_UNPACKED.format(kind=type(output).__name__, before=i - 1, count=len(args), layer=i))
                raise
        return output

    def __getitem__(self, index: int | slice) -> Any:
        return type(self)(*self.layers[index]) if isinstance(index, slice) else self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)


_UNPACKED = """\
layers[{before}] returned a {kind}, whose {count} items nnx.Sequential passes as the arguments of layers[{layer}]; to \
pass it whole, call the layers in a Module of your own"""


def _taken(function: Callable, positional: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function takes, besides this number of positional ones."""
    parameters = parameters_of(function)
    ordered = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = set(ordered[:positional])
    return {name: x for name, x in kwargs.items() if name not in given and (any_name or name in named)}
