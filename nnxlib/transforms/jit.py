"""``jit``: compile a function of Modules.

There are two paths from a call to the compiled function, a :class:`~nnxlib.transforms.plan.Plan`:

- The fast path (dispatch.py) is for calls at top level, if no structure has changed since an earlier call.
- The slow path packs the arguments. It is for the first call, calls under a trace, ``lower`` and ``trace``.

Both lead to the same plans, and so to the same compiled functions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from ..core.annotations import stand_for
from ..core.buffers import note_buffers
from ..core.calls import followed, following, observed
from ..core.closures import CapturedObjects, Occupied, Watch, all_borrowed, call_lending, is_watched, wait_for_loans
from ..core.data import HIDING
from ..core.errors import ArgumentError
from ..core.filters import looks_at_values
from ..core.graph import Packed, commit, pack
from ..core.look_ups import Jitted
from ..core.missing import MISSING
from ..core.pickling import global_name
from ..core.recordings import give_on, with_carrier
from ..core.static import StaticArgument
from ..core.tracing import EAGER, at_top_level, boundary, hide_frames, running_trace
from .abstract import eval_packed
from .callables import check_options, resolve
from .checkify import note_nan_in_call
from .classes import lifts_classes
from .closure_inputs import EMPTY, NOTHING, CapturedNow, Captures, Known
from .dispatch import Dispatch, KnownCall, Miss
from .labels import label_arguments, lanes_of
from .leaf_checks import check_traceable
from .lift import Arguments, cross
from .literals import LiteralToken, literals_of
from .plan import Compiled, JitCrossing, Plan, WithOutcome
from .prefixes import PrefixMapping, argument_entries, refuse_nodes, same_entries
from .retraces import Traces
from .selection import Selection, as_static, holders_in
from .signatures import as_jit
from .stages import Stage, pack_types

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


@as_jit
@lifts_classes()
def jit(
    fun: Callable = MISSING,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    **options: Any,
) -> Any:
    """Compile a function whose arguments and outputs may hold Modules; ``jax.jit`` with state.

    Changes that ``fun`` makes to its arguments (values, attributes, submodules) appear on the objects that were
    passed in, once the call has succeeded. A call that raises changes nothing.

    Args:
      fun: a function, a method, a callable Module, or a partial of these; may be left out, to be used as a decorator.
      in_shardings: a pytree prefix of the positional arguments that are not static, with shardings, or
        :class:`StateSharding` for a Module. The Variables of an argument are left with the sharding they went in with,
        whether they change or not.
      out_shardings: the same for the output.
      static_argnums: numbers of arguments that are part of the program; compared by value (lists and dicts too).
      static_argnames: the same, by name. Each implies the other by the signature of ``fun``, unless both are given.
      donate_argnums: numbers of arguments whose buffers may be reused. Objects among them keep valid values.
      donate_argnames: the same, by name.
      **options: every other option of the installed ``jax.jit`` (``keep_unused``, ``inline``, ``compiler_options``...).

    Returns:
      The jitted function, with ``lower``, ``trace``, ``eval_shape``, ``clear_cache``, and ``explain``, which says why
      it was traced again.

    >>> import nnxlib as nnx, jax.numpy as jnp
    >>> @nnx.jit
    ... def scale(layer, by):
    ...   layer.kernel *= by
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    >>> scale(layer, 2.0)
    >>> layer.kernel.value.sum().item()
    12.0

    Raises:
      PrefixError: for shardings that do not fit, or an object in their place.
      ArgumentError: for an argument that JAX cannot trace, naming it.
      StaticValueError: for a static argument that cannot be compared.
      TraceContextError: if the call changes an object that belongs to another trace.
      PlacementError: if what comes back does not fit its sharding; lists the paths.
    """
    check_options(options, jax.jit)
    static, donated = (static_argnums, static_argnames), (donate_argnums, donate_argnames)
    return JitWrapped(fun, in_shardings, out_shardings, static, donated, options)


class JitWrapped(Jitted, Generic[P, R]):
    """A jitted function of Modules; what :func:`nnxlib.jit` returns."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R]
    _made_of: tuple

    def __new__(cls, *args: Any):
        self = super().__new__(cls)
        self._made_of = args
        return self

    def __init__(
        self,
        fun: Callable[P, R],
        in_shardings: Any,
        out_shardings: Any,
        static: tuple[Any, Any],
        donated: tuple[Any, Any],
        options: dict[str, Any],
    ):
        self._function, self._args, self._kwargs = resolve(fun)
        stand_for(self, fun)
        self._first_class = self._args[0].__class__ if self._args else None  # see `_resolve_again`
        self._options = options
        shift = len(self._args)
        self._static = Selection(self._function, shift, *static, "static")
        self._donated = Selection(self._function, shift, *donated, "donate")
        self._static.check_apart(self._donated)
        refuse_nodes(in_shardings, "in_shardings")
        refuse_nodes(out_shardings, "out_shardings")
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        # Whether the arguments of a call have to be completed by `_bind`; whether all leaves are treated alike.
        self._binds = bool(self._args or self._kwargs or self._static)
        self._one_lane = in_shardings is None and out_shardings is None and not self._donated
        mappings = jax.tree.leaves((in_shardings, out_shardings), is_leaf=_is_label)
        filters = [f for x in mappings if isinstance(x, PrefixMapping) for f in x.filters]
        self._captures = Captures(self._function)
        self._captures_given: dict[tuple[int, ...], Captures] = {}  # by the ids of static arguments
        self._traces = Traces(getattr(self, "__qualname__", repr(self._function)))
        self._plans: dict[Any, Plan] = {}  # by layout, token of the captured objects, and lanes
        bound = (*self._args, *self._kwargs.values())
        self._has_static = bool(self._static) or any(type(x) is StaticArgument for x in bound)
        # With filters that look at values each call may have other lanes.
        self._dispatch = Dispatch(self._has_static, enabled=not any(map(looks_at_values, filters)))

    # --- calling ---

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._traces.calls += 1
        captures = self._captures
        try:
            if self._binds:
                args, kwargs = self._bind(args, kwargs)  # type: ignore[assignment]
                captures = self._captures_of(args, kwargs) if self._has_static else self._captures
            objects, token = now = NOTHING if captures.known is EMPTY else captures.now()
            if running_trace() is not EAGER or following or (Watch.all and all_borrowed()):
                return self._call_packed(captures, args, kwargs, now)
            try:
                return self._dispatch.call(args, kwargs, objects, token)
            except Miss as miss:
                found = miss.found
            return self._call_packed(captures, args, kwargs, now, found)
        except Exception as error:
            if isinstance(error, FloatingPointError):
                note_nan_in_call(error, self._function, Arguments(args, kwargs))
            elif isinstance(error, (RuntimeError, ValueError)):
                note_buffers(error, lambda: pack(Arguments(args, kwargs, captures.now()[0])))
            hide_frames(error)
            raise

    def _call_packed(
        self, captures: Captures, args: tuple, kwargs: dict[str, Any], now: CapturedNow, found: KnownCall | None = None
    ) -> Any:
        """Call the function on packed arguments and what it captures; ``found`` is to dispatch the next call."""
        if followed():
            return self._call_followed(Arguments(args, kwargs))

        def call(plan: Plan, packed: Packed, arguments: Arguments, token: object) -> Any:
            if found is not None and token == now[1]:
                self._dispatch.add(found, arguments, plan)
            return plan.call(packed)

        return self._with_plan(call, captures, args, kwargs, now, at_top_level())

    def _with_plan(
        self,
        use: Callable,
        captures: Captures,
        args: tuple,
        kwargs: dict[str, Any],
        now: CapturedNow,
        donate: bool,
        pack: Callable[[Any], Packed] = pack,
    ) -> Any:
        """``use(plan, packed, arguments, token)``; again, after each trace that was abandoned or needs integers.

        If a trace has captured objects, the next one takes these as inputs, too, once no other thread borrows them.
        """
        count = 0
        while True:
            objects, token = now
            arguments = Arguments(args, kwargs, objects)
            packed = pack(arguments)
            try:
                if objects:
                    token = captures.note_literals(packed, token)
                return use(self._plan(captures, packed, arguments, token, donate), packed, arguments, token)
            except CapturedObjects as outside:
                if not isinstance(outside, Occupied):
                    count += 1
                    now = captures.add(outside, objects, packed, count)
                    continue
                if is_watched():  # the enclosing trace is abandoned as well
                    raise
                wait_for_loans()
            except TypeError:  # an `if` on a traced value, say
                if not (objects and captures.switch_integers(packed)):
                    raise
            now = captures.now()

    def _captures_of(self, args: tuple, kwargs: dict[str, Any]) -> Captures:
        """The Captures for a call with these arguments, of which some may be static."""
        given = holders_in((*args, *kwargs.values()) if kwargs else args)
        if not given:
            return self._captures
        key = tuple(map(id, given))
        found = self._captures_given.get(key)
        if found is None:
            found = self._captures_given[key] = Captures(self._function, given)  # keeps them alive, so no id is reused
        return found

    def _call_followed(self, arguments: Arguments) -> Any:
        """Call the function as part of the enclosing trace: a cached trace would hide the calls of Modules in it."""
        function, name = self._function, getattr(self, "__name__", "")
        if arguments.args and inspect.getattr_static(type(arguments.args[0]), name, None) is self:
            function = observed(function, name)
        arguments = with_carrier(arguments)
        packed = pack(arguments)
        _, after = cross(function, packed.layout, packed.leaves)
        out = commit(packed.layout, after.delta, after.leaves, packed.objects)
        give_on(arguments)
        return out

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> JitWrapped[P, R]: ...
    @overload
    def __get__(
        self: Callable[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __copy__(self) -> JitWrapped[P, R]:  # as for a function
        return self

    def __deepcopy__(self, memo: Any) -> JitWrapped[P, R]:
        return self

    def __reduce__(self) -> Any:
        return global_name(self, sys._getframe(1)) or (JitWrapped, self._made_of)

    def __repr__(self) -> str:
        return f"nnx.jit({getattr(self._function, '__qualname__', self._function)})"

    def explain(self) -> str:
        """Say how often this function was traced, and why it was traced last.

        >>> import nnxlib as nnx, jax.numpy as jnp
        >>> total = nnx.jit(lambda layer, x: layer(x).sum())
        >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        >>> _ = total(layer, jnp.ones(3)), total(layer, jnp.ones(3))
        >>> layer.rate = 0.1
        >>> _ = total(layer, jnp.ones(3))
        >>> print(total.explain())
        <lambda> has been called 3 times and traced 2 times, last in call 3. What differs from the trace in call 1:
          args[0].rate: 0.5 (float) became 0.1 (float)
        """
        return self._traces.explain()

    # --- ahead of time ---

    @boundary
    def lower(self, /, *args: Any, **kwargs: Any) -> Stage:
        """Trace and lower for these arguments, or abstract arrays.

        What ``.compile()`` returns is called without the static arguments, as in JAX.

        >>> import nnxlib as nnx, jax.numpy as jnp
        >>> layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
        >>> compiled = nnx.jit(lambda layer, x: layer(x)).lower(layer, x).compile()
        >>> compiled(layer, x).shape
        (1, 3)
        """
        return self._stage("lower", args, kwargs)

    @boundary
    def trace(self, /, *args: Any, **kwargs: Any) -> Stage:
        """Trace for these arguments; has the ``jaxpr``, and ``.lower()``."""
        return self._stage("trace", args, kwargs)

    def _stage(self, name: str, args: tuple, kwargs: dict[str, Any], count: int = 0) -> Stage:
        """A stage whose calls leave out the first ``count`` arguments, and the static ones."""
        bound = self._bind(args, kwargs)
        captures = self._captures_of(*bound)
        first = len(self._args) + count
        left_out = [(i, x) for i, x in enumerate(bound[0]) if i < first or type(x) is StaticArgument]
        named = {k: x for k, x in bound[1].items() if k not in kwargs or type(x) is StaticArgument}
        passed = tuple([x for i, x in enumerate(bound[0]) if i >= first and type(x) is not StaticArgument])
        passed_named = {k: x for k, x in bound[1].items() if k not in named}

        def make(plan: Plan, packed: Packed, arguments: Arguments, token: object) -> Stage:
            def trace() -> tuple[Compiled, Any]:
                compiled, traced = plan.staged(packed.leaves)
                return compiled, traced.lower() if name == "lower" else traced

            compiled, stage = call_lending(self._traces, packed.objects, trace)
            call = functools.partial(self._arguments, captures.known, token, left_out, named)
            in_tree = None if packed.layout.rows else jax.tree.structure((passed, passed_named))
            if in_tree is not None and in_tree.num_leaves != len(compiled.inputs):  # a partial has bound arrays
                in_tree = None
            return Stage(stage, call, plan, compiled, self._has_static, in_tree)

        return self._with_plan(make, captures, *bound, captures.now(), True, pack_types)

    @boundary
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> R:
        """Return the output with abstract arrays, and the shardings that ``out_shardings`` gives; changes nothing."""
        if self._out_shardings is not None:
            return self.trace(*args, **kwargs).out_info
        return eval_packed(self._function, pack(Arguments(*self._bind(args, kwargs))))

    @property
    def jitted_fn(self) -> JitWrapped[P, R]:
        """The function itself, for code that asks ``jitted_fn._cache_size()``."""
        return self

    def _cache_size(self) -> int:
        """The number of traces of the function; functions jitted by JAX have this method, too."""
        return self._traces.count if self._plans else 0

    def clear_cache(self) -> None:
        """Forget every compiled function."""
        self._plans.clear()
        self._dispatch.clear()
        self._captures_given.clear()

    # --- plans ---

    def _arguments(
        self,
        known: Known | None,
        token: object,
        left_out: list[tuple[int, Any]],
        named: dict[str, Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Arguments:
        """All arguments of a stage: those of a call, and those that it leaves out, by number or by name.

        What was ``known`` of the captured objects when the stage was made, and the ``token``, tell what it is for.

        Raises:
          ArgumentError: if the function now refers to what it has captured at other addresses.
        """
        if left_out:
            given = list(args)
            for i, x in left_out:
                given.insert(i, x)
            args = tuple(given)
        kwargs = {**named, **kwargs} if named else kwargs
        captures = self._captures_of(args, kwargs)
        objects, token_now = captures.now()
        if isinstance(token, LiteralToken):  # another Variable may have taken the place of one that holds them
            token_now = captures.note_literals(pack(Arguments(args, kwargs, objects)), token_now)
        if token_now != token:  # perhaps only since calls with other static arguments have captured other objects
            if known is None or known.token != token or (found := known.conditions.find()) is None:
                raise ArgumentError(_OTHER_PLACES)
            objects = found
        return Arguments(args, kwargs, objects)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """All arguments, the bound ones first; static ones are wrapped."""
        if self._args:
            if self._args[0].__class__ is not self._first_class:
                self._resolve_again()
            args = (*self._args, *args)
        kwargs = {**self._kwargs, **kwargs} if self._kwargs else kwargs
        if self._has_static:
            chosen = self._static.among(len(args))
            args = tuple([as_static(x, i) if i in chosen else x for i, x in enumerate(args)])
            if kwargs:
                kwargs = {k: as_static(x, k) if self._static.has(k) else x for k, x in kwargs.items()}
        return args, kwargs

    def _resolve_again(self) -> None:
        """If this wraps a Module whose class has been set to another one, take the ``__call__`` of that class.

        What is compiled is kept: the class is part of its key.
        """
        if resolve(self._made_of[0])[0] is not self._function:
            kept = self._traces, self._plans, self._dispatch
            JitWrapped.__init__(self, *self._made_of)
            self._traces, self._plans, self._dispatch = kept
        self._first_class = self._args[0].__class__

    def _plan(self, captures: Captures, packed: Packed, arguments: Arguments, token: object, donate: bool) -> Plan:
        """The plan for a layout, the token of the captured objects, and the labels of the leaves.

        Donation only matters at top level. With shardings, the output has one lane for each of them.
        """
        layout, labels = packed.layout, None
        entries: list[Any] = []
        leaf_labels: Sequence[Any] = ()
        if not self._one_lane:
            entries = self._entries(arguments, donate)
            labels, leaf_labels = label_arguments(packed, entries)
        key = layout, token, tuple(leaf_labels)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        captures.capture_held(packed, arguments.captured)
        if arguments.captured:
            captures.capture_sharing(arguments.captured)
        if captures.forget_if_many():
            self.clear_cache()
        check_traceable(layout, packed.leaves)
        options, of_lanes, in_shardings = self._options, (), None
        if self._in_shardings is not None or self._out_shardings is not None:
            out = jax.tree.map(lambda x: _to_label(x, False), self._out_shardings, is_leaf=_is_label)
            lanes, lane_of = lanes_of(leaf_labels, entries, out)
            of_lanes = lanes, lane_of, labels, out
            out_shardings: Any = WithOutcome(tuple([lane.sharding for lane in lanes]), None)  # type: ignore[arg-type]
            options = {**options, "out_shardings": out_shardings}
            in_shardings = None if self._in_shardings is None else [label.sharding for label in leaf_labels]
        crossing = JitCrossing(layout, self._traces, literals_of(token), *of_lanes)
        donated = frozenset([k for k, label in enumerate(leaf_labels) if label.donated])
        plan = self._plans[key] = Plan(crossing, self._function, options, donated, in_shardings)
        return plan

    def _entries(self, arguments: Arguments, donate: bool) -> list[Any]:
        """For each node and leaf of the arguments its label, or a mapping to labels."""
        args, kwargs, captured = arguments
        count, bound = len(args), len(self._args)
        has_prefix = [i >= bound and type(x) is not StaticArgument for i, x in enumerate(args)]
        own_args = tuple(itertools.compress(args, has_prefix))
        shardings = iter(argument_entries(self._in_shardings, own_args, "in_shardings"))
        entries = []
        for i, x in enumerate(args):
            donated = donate and self._donated.has(i, count)
            own: Any = same_entries(None, x)
            if has_prefix[i]:
                own = itertools.islice(shardings, len(own))
            entries += [_to_label(sharding, donated) for sharding in own]
        for name in sorted(kwargs):
            entries += same_entries(_Label(None, donate and self._donated.has(name)), kwargs[name])
        return entries + [_Label()] * len(captured)


_OTHER_PLACES = """\
The function now refers to other objects, text or truth values than those, or the structure, that it was compiled for. \
Lower and compile it again."""


HIDING.add(JitWrapped)


class _Label:  # no dataclass, whose making takes 1% of the time to import nnxlib; no tuple, which JAX would flatten
    """The label of a leaf: its sharding, and whether it is donated."""

    __slots__ = ("donated", "sharding")

    def __init__(self, sharding: Any = None, donated: bool = False):
        self.sharding, self.donated = sharding, donated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Label) and (self.sharding, self.donated) == (other.sharding, other.donated)

    def __hash__(self) -> int:
        return hash((self.sharding, self.donated))

    def __repr__(self) -> str:  # in a prefix: what the user gave
        return repr(self.sharding)

    def __str__(self) -> str:
        sharding = "no sharding" if self.sharding is None else self.sharding
        return f"{sharding}, {'donated' if self.donated else 'not donated'}"

    def yields_to(self, other: _Label) -> bool:
        """Whether an object with the ``other`` label stays in its lane where this label is asked for."""
        return self.sharding in (None, other.sharding)


def _is_label(x: Any) -> bool:
    return x is None or isinstance(x, PrefixMapping | jax.sharding.Sharding | jax.sharding.PartitionSpec)


def _to_label(sharding: Any, donated: bool) -> Any:
    if isinstance(sharding, PrefixMapping):
        return sharding.relabelled(lambda label: _Label(label, donated))
    return _Label(sharding, donated)
