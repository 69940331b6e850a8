"""Programs: operations on leaves, such as a loop or a checkpoint, cached on the functions that they were made from.

At top level a program goes through ``jax.jit``. So a loop that is called again is neither traced nor compiled again, as
with ``jax.lax``; and as there, the arrays to which its functions refer are inputs of what is compiled. (As constants in
it, 200 MB of them took 3.3 s and 600 MB to compile.) Inside of a trace, such as that of a training step, a program is
traced by itself, and its equations are inlined into the enclosing trace; another call with leaves of the same types
only inlines them again. So of forty equal layers that are recomputed in the backward pass, only one is traced.

A body is traced at each call if it captures a Module, or arrays of the enclosing trace, since these may have changed;
or if it refers to a place where there is a Module now, and was none. So is every body while a quantiser or an exporter
has replaced functions of JAX: a program kept from before would lack the replacements, and one made now would keep them.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..core.buffers import note_buffers
from ..core.calls import followed
from ..core.closures import CapturedObjects, call_lending, call_watched
from ..core.conditions import Conditions
from ..core.data import is_data, is_node
from ..core.formulas import functions_are_replaced
from ..core.graph import Packed, commit
from ..core.held_by_arguments import held_in, used_by_arguments
from ..core.layout import KEPT, Layout
from ..core.look_ups import PROGRAMS, is_jitted
from ..core.objects import Node
from ..core.packing import pack_live
from ..core.recordings import recorded_anew
from ..core.references import search
from ..core.static import Const, Identity, state_of
from ..core.tables import table_of
from ..core.tracing import at_top_level, evaluate, with_room
from .callables import name_of
from .checkify import note_nan
from .leaf_checks import explain_untraced
from .lift import Arguments


class Program:
    """An operation on a list of leaves.

    At top level it is ``jitted``, as JAX compiles loops, and :func:`watched` while it is traced. If it is not
    ``compiled``, its operations are executed one by one.
    """

    __slots__ = ("_traced", "captures", "conditions", "function", "jitted", "kinds", "until")

    until: list[weakref.ref]  # to its functions; when one of these is gone, the program is forgotten

    def __init__(self, function: Callable, jitted: Callable | None = None, *, compiled: bool = True):
        self.function = function
        self._traced: Any = jax.jit(watched(function))  # once: `jax.make_jaxpr` jits at each call
        self.jitted = jitted or (_compiled(self._traced) if compiled else None)
        self.captures = False  # whether it is known to capture objects
        self.kinds: list[type] = []  # the types of the objects to which its functions refer
        self.conditions: list[Conditions] = []  # while these hold, the functions refer to no other objects

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if not self.captures and not followed():
            try:
                run = self.jitted if self.jitted and at_top_level() else self._inlined
                return run(list(leaves))
            except CapturedObjects:
                self.captures = True
            except FloatingPointError as error:
                note_nan(error, self.function, leaves)
                raise
        return self.function(list(leaves))

    def look_at(self, functions: Sequence[Callable]) -> None:
        """Note what the functions refer to; not if they capture objects, which would be kept alive in vain."""
        found = [search(f) for f in functions]
        self.captures |= any(each.used_unnoticed() for each in found)
        found = [] if self.captures else found
        conditions = [Conditions(each, each.chains_to_objects(), functions=functions) for each in found]
        self.conditions = [each for each in conditions if each]
        self.kinds = [type(chain.value) for each in found for chain in each.chains_to_objects()]

    def _inlined(self, leaves: list[Any]) -> Any:
        """Inline the equations of the program into the running trace; it is traced once for leaves of the same types.

        Raises:
          CapturedObjects: if the function captures objects.
        """
        jitted = self._traced
        if jitted is None:
            return self.function(leaves)
        flat = jtu.tree_leaves(leaves)

        def trace() -> tuple[Any, Any]:
            traced = jitted.trace(leaves)
            if len(traced.jaxpr.in_avals) <= len(flat):
                return traced.jaxpr, traced.out_info
            # It also takes arrays of the enclosing trace, which are constants here.
            found = jax.make_jaxpr(jitted.__wrapped__, return_shape=True)(leaves)  # from JAX's cache
            self._traced = None  # then JAX forgets the trace, too
            return found

        closed, out = call_lending(self, (), trace)
        return jtu.tree_unflatten(jtu.tree_structure(out), evaluate(closed, *flat))


def _compiled(jitted: Any) -> Callable:
    """``jitted``, with the arrays to which the function refers as inputs of what is compiled, not as constants in it.

    These are the constants of the first trace. One for leaves of other types, if it has others, is compiled with them.
    If there are none, ``jitted`` itself is called, which is not traced again.
    """
    kept: list[Sequence[Any]] = []

    @jax.jit
    def program(constants: Sequence[Any], leaves: list[Any]) -> Any:
        traced = jitted.trace(leaves)
        closed, flat = traced.jaxpr, jtu.tree_leaves(leaves)
        if len(kept[0]) == len(closed.consts) and all(map(operator.is_, kept[0], closed.consts)):
            out = evaluate(closed.replace(consts=constants), *flat)
        else:
            out = evaluate(closed, *flat)
        return jtu.tree_unflatten(jtu.tree_structure(traced.out_info), out)

    def call(leaves: list[Any]) -> Any:
        if jax.config.jax_disable_jit:  # the function is to see values
            return jitted(leaves)
        if not kept:
            kept.append(jitted.trace(leaves).jaxpr.consts)
        return program(kept[0], leaves) if kept[0] else jitted(leaves)

    return call


def watched(function: Callable) -> Callable:
    """A function that raises CapturedObjects if it uses live objects, whose present values would be kept."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return with_room(call_watched, function, *args)

    return wrapper


class WeakFunction:
    """A weak reference to a function, which can be called in its place.

    The programs that are kept on a function refer to it by this, so that it does not keep itself alive. The caller of a
    program has to keep its functions alive meanwhile.
    """

    __slots__ = ("__weakref__", "_hash", "_reference")

    def __init__(self, function: Any):
        self._reference, self._hash = weakref.ref(function), hash(function)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # by which JAX finds what its messages name
        return self._reference()

    @property
    def __name__(self) -> str:
        return self.__wrapped__.__name__

    def __reduce__(self) -> tuple:  # cloudpickle takes a transformed method of a class along with the class
        return WeakFunction, (self.__wrapped__,)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        function = self.__wrapped__
        # not by the name of the class, which is gone when a program is forgotten as Python exits
        return isinstance(other, type(self)) and function is not None and function is other.__wrapped__


def weakly(f: Callable) -> Callable:
    """``f``, as a program has to refer to it: weakly, if it is a function, on which the program may be kept."""
    return WeakFunction(f) if _is_function(f) else f


def _is_function(f: Any) -> bool:
    """Whether this is a function, or is as constant as one: a jitted one, or one of JAX itself (jax.nn.relu)."""
    if isinstance(f, types.FunctionType) or is_jitted(f):
        return True
    module = getattr(f, "__module__", None) or ""
    return module.startswith("jax.") and getattr(sys.modules.get(module), getattr(f, "__name__", ""), None) is f


def as_function(f: Callable) -> Callable:
    """``f``, or a new function that calls it, on which programs can be kept; the caller has to keep it alive."""
    if _is_function(f):
        return f
    method = f if isinstance(f, types.MethodType) else f.__call__  # a search reads its code

    @functools.wraps(f, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    function.__name__ = function.__qualname__ = name_of(f)
    return function


def settings_of(f: Callable) -> Hashable:
    """The attributes on which a program made from a callable object, or a method of a plain object, depends.

    Of a Module among them only the type counts, since another one is noticed (:meth:`Program.look_at`). Arrays are
    compared by identity, all else by value; if something cannot be compared, the result equals no other. A function has
    no such attributes.
    """
    holder = f.__self__ if isinstance(f, types.MethodType) else f
    if isinstance(holder, Node) or _is_function(holder):
        return ()
    try:
        held = vars(holder) if isinstance(holder, type) else state_of(holder)
        return tuple([(name, _setting(x, name)) for name, x in held.items()])
    except Exception:  # of user code, such as a comparison
        return object()


def _setting(x: Any, name: str) -> Hashable:
    if not is_data(x):
        return Const.of(x, (name,))
    leaves, treedef = jtu.tree_flatten(x, is_leaf=is_node)
    return treedef, tuple([type(leaf) if is_node(leaf) else Identity(leaf) for leaf in leaves])


class _Programs(dict):
    """The programs of a function, by key; not pickled with it."""

    def __reduce__(self) -> tuple:
        return _Programs, ()


def program_of(functions: tuple[Callable, ...], layout: Layout, key: tuple, make: Callable[[], Program]) -> Program:
    """The program of some functions for arguments of a layout, cached on the first of them, while all of them live.

    The ``key`` says what the program depends on besides these, and besides the settings of Modules in functions among
    the static values of the arguments, such as ``attention_fn=partial(attend, rope=RoPE())``.

    It is cached only for functions (:func:`_is_function`), since other callables may change what they do. ``functions``
    are those that :func:`weakly` returns, and the program has to refer to these. While functions of JAX are replaced,
    each call has its own program.
    """
    if not all(isinstance(f, WeakFunction) for f in functions) or functions_are_replaced():
        return make()
    plain = [f.__wrapped__ for f in functions]
    programs = plain[0].__dict__.setdefault(PROGRAMS, _Programs())
    held = [table_of(x).layout for x in held_in(layout) if issubclass(type(x), Node)]
    # The functions are part of the key, since functools.wraps copies the attribute to other functions.
    key = (functions, layout, *held, *key)
    program = programs.get(key)
    if program is None:
        if len(programs) >= KEPT:  # with a model that grows, each call has another key
            programs.pop(next(iter(programs)), None)
        program = programs[key] = make()
        forget = functools.partial(_forget, weakref.ref(programs), key)
        program.until = [weakref.ref(f, forget) for f in plain]
        program.look_at(plain)
        program.captures |= bool(used_by_arguments(plain, layout)[0])
    elif not program.captures and not all(each.find() is not None for each in program.conditions):
        before = program.kinds
        program.look_at(plain)
        program.captures |= program.kinds != before
    return program


def _forget(reference: weakref.ref[_Programs], key: tuple, _: weakref.ref) -> None:
    """Forget a program, one of whose functions is gone."""
    programs = reference()
    if programs is not None:
        programs.pop(key, None)


def run_program(program: Callable[[list[Any]], Any], packed: Packed, *extra: Any) -> Any:
    """Run a program on the packed leaves and ``extra`` ones, and commit the leaves and the Outcome that it returns."""
    try:
        leaves, outcome = program([*packed.leaves, *extra])
    except (TypeError, OverflowError) as error:
        explain_untraced(error, packed.layout, packed.leaves)
        raise
    except (RuntimeError, ValueError) as error:
        note_buffers(error, lambda: packed)
        raise
    return commit(packed.layout, outcome.delta, leaves, packed.objects)


def call_program(
    functions: tuple[Callable, ...], key: tuple, run: Callable[..., Any], arguments: Arguments, *extra: Any
) -> Any:
    """Pack the arguments of some functions, and run the program ``run(layout, leaves)`` of these functions on them.

    The ``key`` says what the program depends on besides the functions and the layout; ``extra`` are further leaves.
    """
    with recorded_anew(arguments):
        packed = pack_live(arguments)
        layout = packed.layout

        def program(leaves: list[Any]) -> Any:
            return run(layout, leaves)

        return run_program(program_of(functions, layout, key, lambda: Program(program)), packed, *extra)
