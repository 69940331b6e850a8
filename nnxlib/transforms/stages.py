"""Stages: what ``lower``, ``trace`` and ``compile`` of a jitted function return, for arguments that hold Modules.

As in JAX, a compiled function is called without static arguments: these are part of the program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

from ..core.errors import ArgumentError, listed
from ..core.graph import Packed, build, pack
from ..core.graphdef import differences_listed
from ..core.tracing import at_top_level
from .dispatch import Dispatch, Miss
from .leaf_checks import is_traceable, type_changes
from .lift import Arguments, finish
from .plan import Compiled, Plan

_OTHER_STRUCTURE = "The arguments differ in structure from those it was compiled for:"
_WITHOUT_STATIC = "A compiled function is called without its static arguments."
_OF_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_shardings")
_OF_OUTPUT = ("out_avals", "output_formats", "output_shardings")
_COMPILE_AGAIN = "Call the jitted function itself, which is compiled again where it has to be, or `lower` it for these."


def pack_types(tree: Any) -> Packed:
    """:func:`pack`, with a ``jax.ShapeDtypeStruct`` for each leaf that only has a shape and dtype, which JAX allows."""
    packed = pack(tree)
    return packed._replace(leaves=[x if is_traceable(x) else _type_of(x) for x in packed.leaves])


def _type_of(x: Any) -> Any:
    try:
        return jax.eval_shape(lambda x: x, x)
    except (TypeError, OverflowError):
        return x


class Stage:
    """A traced, lowered or compiled function of Modules; all other attributes are those of the JAX stage it wraps.

    JAX has made the ``stage`` from ``traced``, a compiled function of the plan. ``arguments`` completes the arguments
    of a call as they are packed: by the static ones, and by what is captured. ``in_tree`` is the structure of those of
    JAX's function, ``(args, kwargs)``, if it takes only arrays. Then all attributes are pytrees like the arguments and
    the output; else all but ``out_info`` are flat, as the function is that JAX compiles.
    """

    def __init__(
        self,
        stage: Any,
        arguments: Callable[[tuple, dict[str, Any]], Arguments],
        plan: Plan,
        traced: Compiled,
        has_static: bool,
        in_tree: Any,
    ):
        self._stage, self._arguments, self._has_static, self._in_tree = stage, arguments, has_static, in_tree
        self._compiled, self._plan = copy.copy(traced), copy.copy(plan)  # with what was compiled ahead of time
        self._compiled.jitted, self._plan.compiled = stage, self._compiled
        self._dispatch = Dispatch(has_static, enabled=True)

    def lower(self, /, *args: Any, **kwargs: Any) -> Stage:
        return self._next(self._stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> Stage:
        return self._next(self._stage.compile(*args, **kwargs))

    def _next(self, stage: Any) -> Stage:
        return Stage(stage, self._arguments, self._plan, self._compiled, self._has_static, self._in_tree)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function.

        Raises:
          ArgumentError: if the arguments have another structure, shape or dtype than it was compiled for; says where.
        """
        arguments, found = self._arguments(args, kwargs), None
        if at_top_level():
            try:
                token = True if arguments.captured else None  # one is enough: these were found at the addresses of then
                return self._dispatch.call(*arguments, token)
            except Miss as miss:
                found = miss.found
            except TypeError:
                pass  # raised again below, where it is known which leaves do not fit
        packed = pack(arguments)
        expected = self._plan.crossing.layout
        if packed.layout is not expected:
            advice = f"{_WITHOUT_STATIC} {_COMPILE_AGAIN}" if self._has_static else _COMPILE_AGAIN
            raise ArgumentError(listed(_OTHER_STRUCTURE, differences_listed(expected, packed.layout), advice))
        if found is not None:
            self._dispatch.add(found, arguments, self._plan)
        inputs = self._compiled.inputs_of(packed.leaves)
        try:
            returned = self._stage(*inputs)
        except TypeError as error:
            compiled_for = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._stage.args_info[0])
            changes = type_changes(compiled_for, inputs, self._compiled.inputs_of(expected.leaf_paths))
            if not changes:
                raise
            head = "The arguments have other shapes or dtypes than those it was compiled for:"
            raise ArgumentError(listed(head, changes, _COMPILE_AGAIN)) from error
        return self._plan.finish(packed, self._compiled, returned)

    def __getattr__(self, name: str) -> Any:
        if name == "_stage":  # `copy` asks a copy that has no attributes yet
            raise AttributeError(name)
        found = getattr(self._stage, name)
        if self._in_tree is None:
            return found
        if name == "in_tree":
            return self._in_tree
        if name in _OF_ARGUMENTS:
            return self._in_tree.unflatten(jax.tree.leaves(found))
        if name in _OF_OUTPUT:
            return self._output(found)
        return self._out_tree(found) if name == "out_tree" else found

    @property
    def out_info(self) -> Any:
        """The output with abstract arrays, which have the shardings that were asked for; Modules in it are new ones."""
        return self._output(self._stage.out_info)

    def _output(self, returned: Any) -> Any:
        """The output, with what is given for each array that the compiled function returns."""
        layout, literals = self._plan.crossing.layout, self._plan.crossing.literals
        leaves = [literals.get(k) for k in range(len(layout.leaf_paths))]
        for k, info in zip(self._compiled.inputs, self._stage.args_info[0], strict=True):
            leaves[k] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), info)
        _, shells = build(layout, leaves)
        return finish(Packed(layout, leaves, shells), self._compiled.unpacked(returned))

    def _out_tree(self, flat: Any) -> Any:
        """The structure of the output, if it has the arrays in the order in which JAX returns them."""
        numbers = [*range(flat.num_leaves)]
        found, structure = jax.tree.flatten(self._output(flat.unflatten(numbers)))
        return structure if found == numbers else flat

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"
