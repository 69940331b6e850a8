"""``while_loop`` and ``fori_loop``: loops over a value that may hold Modules.

The number of iterations is not known, so nothing can be stacked: of what the body records for an ``nnx.capture``, the
last iteration's recordings come out. They are part of the carry, zeros at first, but no iteration sees them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import BodyError, describe, format_path
from ..core.layout import Layout
from ..core.operators import unwrapped
from ..core.rows import ROOT, Tree
from ..core.tracing import at_top_level, boundary
from . import body_checks
from .body import Body, as_scalar, as_unroll, trace_body, zeros
from .callables import as_bound, resolve
from .lift import Arguments, Outcome
from .naming import named
from .program import call_program, weakly


@boundary
def while_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
    """Apply ``body_fun`` to a value as long as ``cond_fun`` of it is true; ``jax.lax.while_loop`` with state.

    Args:
      cond_fun: from the value to a boolean scalar; may not change anything.
      body_fun: from the value to a value of the same structure. It may change the values of Variables, but not attach
        or delete attributes. Variables that it leaves alone are not carried. In place of an object it may return, or
        set as an attribute, a new one of the same structure.
      init_val: a pytree of arrays and Modules.

    Returns:
      The last value; Modules in it are those that were passed in, or new ones where the body makes new ones.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> def double(v):
    ...   v.value *= 2
    ...   return v
    >>> nnx.while_loop(lambda v: v < 100, double, nnx.Variable(jnp.array(3))).value.item()
    192

    Raises:
      BodyError: if the structure, a shape or a dtype changes; names the path.
    """
    (test, *test_bound), (step, *step_bound) = resolve(cond_fun), resolve(body_fun)
    test, step = weakly(test), weakly(step)
    arguments = Arguments((init_val, tuple(test_bound), tuple(step_bound)), {})

    # A loop hands on all of its arguments: a Module that is bound to one of the functions may change, too.
    def apply(value: Any, test_bound: Any, bound: Any) -> Arguments:
        return Arguments((step(*bound[0], value, **bound[1]), as_bound(*test_bound), as_bound(*bound)), {})

    def is_on(value: Any, bound: Any, _: Any) -> Any:
        return unwrapped(test(*bound[0], value, **bound[1]))

    def run(layout: Layout, leaves: list[Any]) -> Any:
        loop = _loop(layout, named(apply, step), leaves, "body of while_loop")
        condition = trace_body(named(is_on, test), layout, loop.constant)
        _refuse_changes(layout, condition)
        answer = _position_of_answer(condition)

        def is_to_go_on(carry: Sequence[Any]) -> Any:
            return condition.run(loop.leaves(carry))[answer]

        def iteration(carry: Sequence[Any]) -> list[Any]:
            return loop.body.run(loop.leaves(carry))

        if not condition.has_effects:
            carry = jax.lax.while_loop(is_to_go_on, iteration, loop.carry)
        else:  # a condition of JAX does not see what the body writes to a jax.Ref, so the body asks it
            first = is_to_go_on(loop.carry), loop.carry

            def asking(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
                carry = iteration(state[1])
                return is_to_go_on(carry), carry

            _, carry = jax.lax.while_loop(lambda state: state[0], asking, first)
        return carry, Outcome(loop.body.delta)

    return call_program((step, test), ("while",), run, arguments).args[0]


@boundary
def fori_loop(lower: Any, upper: Any, body_fun: Callable, init_val: Any, *, unroll: int | bool | None = None) -> Any:
    """Apply ``body_fun(i, value)`` for ``i`` from ``lower`` to ``upper``; ``jax.lax.fori_loop`` with state.

    Args:
      lower: the first index. If both bounds are known, indices are weakly typed, like Python numbers, as in JAX; else
        its integer type is that of all indices, unless ``upper`` needs a wider one.
      upper: the first index that is not used.
      body_fun: from the index and the value to a value of the same structure; as in :func:`while_loop`.
      init_val: a pytree of arrays and Modules.
      unroll: as in ``jax.lax.fori_loop``.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> nnx.fori_loop(0, 4, lambda i, x: x + i, jnp.array(0)).item()
    6

    Raises:
      BodyError: if the structure, a shape or a dtype changes; names the path.
    """
    step, *bound = resolve(body_fun)
    step = weakly(step)
    first, last = _known(lower), _known(upper)
    is_known = first is not None and last is not None
    start = as_scalar(first if is_known else lower, "The lower bound of nnx.fori_loop")
    end = as_scalar(last if is_known else upper, "The upper bound of nnx.fori_loop")
    start, end = _in_one_type(start, end, last)
    arguments = Arguments((init_val, tuple(bound), start), {})
    # Only a loop with known bounds can be differentiated in reverse. At top level nothing differentiates it, so there
    # one program serves all bounds.
    static = is_known and (unroll is not None or not at_top_level())

    def apply(value: Any, bound: Any, i: Any) -> Arguments:
        return Arguments((step(*bound[0], i, value, **bound[1]), as_bound(*bound), i), {})

    def run(layout: Layout, leaves: list[Any]) -> Any:
        *leaves, stop = leaves
        loop = _loop(layout, named(apply, step), leaves, "body of fori_loop")
        start, stop = (first, last) if static else (leaves[-1], stop)
        # The index is the last leaf, of the arguments and of what comes back; JAX carries one already.
        carry = jax.lax.fori_loop(
            start, stop, lambda i, carry: loop.body.run(loop.leaves([*carry, i]))[:-1], loop.carry[:-1], unroll=unroll
        )
        return [*carry, leaves[-1]], Outcome(loop.body.delta)

    unroll = as_unroll(unroll)
    key = ("fori", unroll, type(unroll), (first, last) if static else None)  # unroll=True is not unroll=1
    return call_program((step,), key, run, arguments, end).args[0]


def _known(bound: Any) -> int | None:
    """The value of a bound, or None if it is traced, or not an integer."""
    try:
        return None if isinstance(bound, bool) else operator.index(bound)
    except TypeError:
        return None


def _in_one_type(lower: jax.Array, upper: jax.Array, last: int | None) -> tuple[jax.Array, jax.Array]:
    """Bounds in one integer type: that of the lower one, unless the upper one may not fit into it.

    JAX refuses bounds of two types, and an index of a narrower type than the upper bound would never reach it.
    """
    if not all(jnp.issubdtype(bound.dtype, jnp.integer) for bound in (lower, upper)):
        return lower, upper
    limits = jnp.iinfo(lower.dtype)
    fits = last is not None and limits.min <= last <= limits.max
    common = lower.dtype if fits else jnp.result_type(lower.dtype, upper.dtype)
    start, end = (x if x.dtype == common else jax.lax.convert_element_type(x, common) for x in (lower, upper))
    return start, end


def _loop(layout: Layout, function: Callable, leaves: list[Any], what: str) -> _Loop:
    """Trace a body, and once more if a weakly typed number that it carries needs another type from the start."""
    loop = _Loop(layout, trace_body(function, layout, leaves), leaves, what)
    strong = body_checks.retyped(leaves, *loop.recurring)
    if strong is not None:
        loop = _Loop(layout, trace_body(function, layout, strong), strong, what)
    positions, types = loop.recurring
    given, paths = [loop.constant[k] for k in positions], [layout.leaf_paths[k] for k in positions]
    body_checks.check_types(given, types, paths, what)
    return loop


class _Loop:
    """A traced body as a step of a loop that carries the leaves it returns; so its Delta is also that of the loop.

    Attributes:
      body: the body.
      carry: the values to begin with.
      positions: for each leaf of the carry, its position in the layout; None for what the body records, which the next
        iteration does not see.
      constant: all leaves of the layout, as they were before the loop.
      recurring: the positions, and the types at the end of an iteration, of the leaves that the next one sees.
    """

    def __init__(self, layout: Layout, body: Body, leaves: list[Any], what: str):
        replaced = body_checks.successors(layout, body, [(layout.root, body.delta.root)])
        changes = body_checks.structural_changes(layout, body, replaced or {})
        body_checks.refuse_structural([change for change in changes if not change.is_taken_out], what)
        if replaced is None:
            out = body.delta.root
            if isinstance(out, Tree) and not any(path[:2] == ("args", 0) for path in out.paths):
                raise BodyError(f"The {what} returned nothing. Return the value that it was given, changed or not.")
            said = f"The {what} must return a value like the one it is given:"
            body_checks.check_same_output(layout, layout.root, body.delta.root, said, body_checks.RETURN_ALIKE)
            replaced = {}
        body_checks.refuse_written(layout, body, replaced, what)
        self.body, self.constant = body, leaves
        self.positions = [layout.owner_positions.get((replaced.get(i, i), k)) for i, k in body.owners]
        pairs = list(zip(self.positions, body.types, strict=True))
        self.carry = [zeros(type_) if k is None else leaves[k] for k, type_ in pairs]
        recurring = [(k, type_) for k, type_ in pairs if k is not None]
        self.recurring = [k for k, _ in recurring], [type_ for _, type_ in recurring]

    def leaves(self, carry: Sequence[Any]) -> list[Any]:
        """All leaves of the layout, with the present values of those that are carried."""
        leaves = list(self.constant)
        for k, leaf in zip(self.positions, carry, strict=True):
            if k is not None:
                leaves[k] = leaf
        return leaves


def _position_of_answer(condition: Body) -> int:
    """Which of the leaves that the condition of a loop returns is its output."""
    numbers = [k for k, (row, _) in enumerate(condition.owners) if row == ROOT]
    types = [condition.types[k] for k in numbers]
    if len(types) != 1 or types[0].shape or types[0].dtype != bool:
        raise BodyError(
            "cond_fun of while_loop must return a boolean scalar, but it returned "
            f"{', '.join(map(describe, types)) or 'no array'}. Compare numbers, and reduce arrays with all() or any()."
        )
    return numbers[0]


def _refuse_changes(layout: Layout, condition: Body) -> None:
    """Raise :class:`BodyError` if the condition of a loop has changed something, recordings apart."""
    leaves = zip(condition.owners, condition.leaf_paths, strict=True)
    changed = [path for (row, _), path in leaves if row in range(len(layout.rows))]
    changed += [change.path for change in body_checks.structural_changes(layout, condition) if not change.is_taken_out]
    if changed:
        paths = ", ".join(map(format_path, dict.fromkeys(changed)))
        raise BodyError(
            f"cond_fun of while_loop may not change anything, but it changes {paths}. Make the change in body_fun."
        )
