"""Conditions: what must hold at a call of a function for an earlier trace of it to be right (docs/how_it_works.md).

The objects that the function captures, the *roots*, must be where they were. So each look-up on the chains to them
(chains.py) is made again, as a :class:`~nnxlib.core.chains.Step`.

The numbers, texts and arrays that a function refers to are constants of the compiled function, as in JAX: it is not
traced again when one of them changes. But where there was a number, or None, there may be a Module later, and then the
function has to be traced again. So each call compares the *types* of what is at all places that the function may look
at. All constants count as one type, and so do tuples of constants; any other tuple must have the same members.

- The members of a container, and the attributes of a plain object, are compared all at once (:class:`Members`); for a
  dict also their order, if its keys are simple (:func:`~nnxlib.core.chains.are_simple`), such as text or integers.
- What stands alone, in a closure, in globals or in a class, is an :class:`End`, and is looked up. So is each tuple,
  wherever it is, since its type says nothing of what is in it.

The functions, containers and objects on the chains to these places must be the same as before.

All these look-ups are compiled into one function when it is first needed. One by one they take 0.35 us for one look-up
and 0.5 us for three; as one expression 0.05 and 0.12 us::

    r0() is encoder is not None and type(RATE) is t1 and type(c2) is t3

This function has the globals of the user's function, and the same cells in its closure. So the interpreter itself
caches where each value is found.
"""

from __future__ import annotations

import functools
import keyword
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, ValuesView
from typing import Any

from . import look_ups
from .annotations import NamedTuple
from .chains import MAPPINGS, MUTABLE_CONTAINERS, Chain, Reference, Step, are_simple, same_attributes
from .fingerprints import TupleFingerprint, are_constants, fingerprint_of, is_constant_type, is_fixed
from .graphdef import GraphDef
from .identity import Identified
from .look_ups import LookUp, attribute, entry, in_class, in_context, is_of_library, own, referent
from .references import Reached, is_left_over
from .static import dict_of

_MOST_MEMBERS = 100  # of a container whose members are compared; of a longer one only the length is
_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial
_FIXED_HOLDERS = tuple, frozenset, types.MethodType, types.BuiltinMethodType, functools.partial
_NO_HOLDERS = Identified, GraphDef, type, types.ModuleType, *_FUNCTIONS, threading.local, *weakref.ProxyTypes


class Conditions:
    """The conditions for one function.

    Args:
      found: what the function refers to.
      others: the chains to objects that are not captured.
      roots: those that are, and the chains to each.
      functions: the conditions must not refer to these, since they will be kept on one of them.
    """

    steps: list[Step]
    ends: list[End]
    members: list[Members]

    def __init__(
        self,
        found: Reached,
        others: Iterable[Chain] = (),
        roots: Iterable[tuple[weakref.ref, Iterable[Chain]]] = (),
        functions: Collection[Any] = (),
    ):
        known, steps = set[int](), list[Step]()  # known: the ids of chains and holders, see `Chain.steps`
        # The roots: one step to each yields it.
        for root, chains in roots:
            directly = Step(LookUp(referent, root), root)
            last, *further = [step for chain in chains for step in chain.steps(known)] or [directly]
            steps += [last._replace(is_root=True), *further]
        steps += [step for chain in found.alternatives for step in chain.steps(known)]
        # What is compared: the members of containers and objects, the holders; and what stands alone.
        holders = found.followable([chain for chain in found.chains if _compared_in(chain.value) is not None])
        containers = [(chain.value, container) for chain in holders for container in _compared_in(chain.value) or ()]
        alone = found.followable([chain for chain in [*found.ends, *others] if _is_alone(chain)])
        # How these are reached.
        known |= {id(chain.value) for chain in holders}  # their lengths need not be compared
        chains = [*holders, *[chain.before for chain in alone if chain.before is not None]]
        steps += [step for chain in chains for step in chain.steps(known)]
        objects = [x for x, container in containers if container is not x]
        steps += [step for x in objects for step in same_attributes(x, known)]
        ends = [chain for chain in alone if not chain.look_up.refers_to(functions)]
        self.steps = [step for step in steps if not step.look_up.refers_to(functions)]
        self.ends = [End(chain.look_up, types.CellType(fingerprint_of(chain.value))) for chain in ends]
        self.members = [Members(container) for _, container in containers]

    def __bool__(self) -> bool:
        return bool(self.steps or self.ends or self.members)

    @functools.cached_property
    def find_or_raise(self) -> Callable[[], tuple[Any, ...] | None]:
        """As :meth:`find`, but it may raise an error in place of None."""
        return _compile(self.steps, self.ends, self.members)

    def find(self) -> tuple[Any, ...] | None:
        """The roots, if all holders are where they were, and hold values of the same types as before, or constants.

        None if not.
        """
        try:
            return self.find_or_raise()
        except Exception:  # of a look-up, or a container that another thread changes
            return None


class End(NamedTuple):
    """A place that stands alone."""

    look_up: LookUp
    fingerprint: types.CellType  # which holds that of the value that was there last

    def accepts(self, x: Any) -> bool:
        """Whether ``x`` is the same tuple, or a constant in place of a constant, whose fingerprint is then kept."""
        before, now = self.fingerprint.cell_contents, fingerprint_of(x)
        if type(before) is TupleFingerprint:
            return before == now
        accepted = are_constants([x]) and (not isinstance(before, type) or is_constant_type(before))
        if accepted:
            self.fingerprint.cell_contents = now
        return accepted


class Members:
    """The types of the members of a container, or of the attributes of an object, to which it does not refer itself.

    They must stay as they are, and in a dict also the keys and their order, except that constants may come and go. For
    each tuple that is there at first there is an :class:`End`; others are compared here.
    """

    __slots__ = ("_at_first", "_container", "_count", "_others", "held", "is_mapping", "keyed", "keys", "types")

    held: Collection[Any]  # the members; empty if there are so many that only their number is compared
    types: list[type] | None  # of the members; None if there are so many; empty if only `are_as_before` can tell
    keyed: Collection[Any]  # the container, if it is a dict with simple keys; empty if not
    keys: list[Any]  # in their order

    def __init__(self, container: Any):
        self._container, self.is_mapping = container, isinstance(container, MAPPINGS)
        self._at_first = set() if _is_long(container) else self._places_of_tuples()
        self._note(self._others_now())

    def _note(self, others: list[Any]) -> None:
        held = self._container
        self._others, self._count = others, len(held)
        if _is_long(held):
            self.held, self.types = (), None
        else:
            self.held = held.values() if self.is_mapping else held
            self.types = [*map(type, self.held)] if self._places_of_tuples() <= self._at_first else []
        keys = [*held] if self.is_mapping and self.types is not None else []
        self.keyed, self.keys = (held, keys) if are_simple(keys) and keys else ((), [])

    def _places_of_tuples(self) -> set[Any]:
        """The indices or keys of the members that are tuples; those of an object are numbered."""
        held = self._container
        return {place for place, x in (held.items() if self.is_mapping else enumerate(held)) if is_fixed(type(x))}

    def _others_now(self) -> list[Any]:
        """The fingerprints of members that are neither constants nor left over by a trace, with simple keys."""
        held = self._container
        if are_constants([*held, *held.values()] if self.is_mapping else held):
            return []
        if not self.is_mapping:
            return [fingerprint_of(x) for x in held if _is_other(x)]
        keys = [*held]
        if are_simple(keys):
            return [(key, fingerprint_of(x)) for key, x in held.items() if _is_other(x)]
        return [fingerprint_of(x) for x in (*keys, *held.values()) if _is_other(x)]

    def are_as_before(self) -> bool:
        """Whether only constants have come or gone; to be asked if ``types`` are not those of ``held`` any more."""
        if self.types is None and len(self._container) == self._count:
            return True
        others = self._others_now()
        if others != self._others:
            return False
        self._note(others)
        return True


def _is_long(x: Any) -> bool:
    """Whether this is a container with so many members that only their number is compared."""
    return issubclass(type(x), (*MUTABLE_CONTAINERS, ValuesView)) and len(x) > _MOST_MEMBERS


def _is_other(x: Any) -> bool:
    """Whether this is neither a constant nor left over by a trace."""
    return not (are_constants([x]) or is_left_over(x))


def _compared_in(x: Any) -> list[Any] | None:
    """Whose members are compared: a container itself, and the attributes of an object; None for other values.

    None of a frozen dataclass are, but it must be the same one.
    """
    held = [x] if issubclass(type(x), MUTABLE_CONTAINERS) else None
    if type(x) in MUTABLE_CONTAINERS or issubclass(type(x), _NO_HOLDERS) or is_of_library(vars(type(x))):
        return held
    if _is_frozen(x):
        return []
    attributes = dict_of(x)
    return [*(held or ()), attributes.values()] if type(attributes) is dict else held


def _is_frozen(x: Any) -> bool:
    """Whether this is an instance of a frozen dataclass."""
    return getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False)


def _is_alone(chain: Chain) -> bool:
    """Whether the value at the end of a chain may be replaced, and is no member that :class:`Members` compares."""
    if chain.before is None or not _finds(chain.look_up, type(chain.value)):
        return False
    holder, kind = chain.before.value, chain.look_up.kind
    if issubclass(type(holder), _FIXED_HOLDERS) or _is_frozen(holder):
        return False
    if kind in (referent, in_context, in_class):
        return True
    if kind is attribute:
        return not isinstance(holder, types.FunctionType)  # its defaults
    return not _compared_in(holder) or (is_fixed(type(chain.value)) and not _is_long(holder))


def _finds(look_up: LookUp, kind: type) -> bool:
    """Whether a look-up finds something of this very type; no, if it fails."""
    try:
        return type(look_up.find()) is kind
    except Exception:
        return False


# --- compiled ---------------------------------------------------------------------------------------------------------


def _compile(
    steps: Sequence[Step], ends: Sequence[End], members: Sequence[Members]
) -> Callable[[], tuple[Any, ...] | None]:
    """A function that returns the roots among the steps if everything holds; else None, or it raises an error."""
    code = _Code(_most_common_namespace([look_up for look_up, *_ in (*steps, *ends)]))
    code.terms += [code.finds_same(*step) for step in steps]
    kind_of, each = code.held(type), code.held(map)
    for end in ends:
        found, before = code.found_by(end.look_up), end.fingerprint.cell_contents
        if type(before) is TupleFingerprint:
            same = code.has_fingerprint(found, before)
        else:
            now = f"{kind_of}({found})" if isinstance(before, type) else found
            same = f"{now} is {code.name(end.fingerprint)}"
        code.terms.append(f"({same} or {code.held(end.accepts)}({found}))")
    for x in members:
        held = code.held(x)
        keys = f" and [*{held}.keyed] == {held}.keys" if x.is_mapping else ""
        code.terms.append(f"([*{each}({kind_of}, {held}.held)] == {held}.types{keys} or {held}.are_as_before())")
    return code.function()


_PREFIX = "_nnx_"  # of the names of what is in the closure of the code
_SOURCES = {in_class: "{}.__dict__[{!r}]", look_ups.item: "{}[{!r}]", in_context: "{}.get()", referent: "{}()"}


class _Code:
    """The code of a function without arguments: ``terms``, to be joined by ``and``, and the cells in its closure."""

    def __init__(self, namespace: dict[str, Any]):
        self.namespace, self.terms = namespace, list[str]()
        self._cells, self._roots = dict[str, types.CellType](), list[str]()

    def name(self, cell: types.CellType) -> str:
        """A new name for the contents of a cell."""
        name = f"{_PREFIX}{len(self._cells)}"
        self._cells[name] = cell
        return name

    def held(self, value: Any) -> str:
        """A new name for a value."""
        return self.name(types.CellType(value))

    def finds_same(self, look_up: LookUp, before: Reference, is_root: bool) -> str:
        """An expression for whether a look-up finds the same as before."""
        if look_up.kind is look_ups.has_length:
            return f"{self.held(len)}({self.held(look_up.holder)}) == {look_up.key}"
        found = self.found_by(look_up)
        if is_root:
            self._roots.append(f"{_PREFIX}root_{len(self._roots)}")
            found = f"({self._roots[-1]} := {found})"
        same = f"{self.held(before)}()" if isinstance(before, weakref.ReferenceType) else self.held(before())
        return f"{same} is {found} is not None"

    def has_fingerprint(self, found: str, before: Any) -> str:
        """An expression for whether a tuple, or a member of one, has this fingerprint.

        It is False for a frozenset, which has no order; then :meth:`End.accepts` decides.
        """
        if type(before) is TupleFingerprint:
            if issubclass(before.kind, frozenset):
                return "False"
            terms = [self.has_fingerprint(found, before.kind), f"{self.held(len)}({found}) == {len(before.members)}"]
            terms += [self.has_fingerprint(f"{found}[{k}]", member) for k, member in enumerate(before.members)]
            return f"({' and '.join(terms)})"
        if isinstance(before, type):
            return f"{self.held(type)}({found}) is {self.held(before)}"
        same = f"{self.held(before)}()" if isinstance(before, weakref.ReferenceType) else self.held(before)
        return f"{same} is {found} is not None"

    def found_by(self, look_up: LookUp) -> str:
        """An expression for what a look-up finds; it may raise an error if that is nothing."""
        kind, holder, key = look_up
        if kind is look_ups.in_closure:
            return self.name(holder)
        if kind is look_ups.inside:
            return f"{self.found_by(holder)}.__dict__[{key!r}]"
        if kind is look_ups.in_tuple:
            return f"{self.found_by(holder)}[{key}]"
        if kind in _SOURCES:
            return _SOURCES[kind].format(self.held(holder), key)
        if kind is attribute and _is_plain(key) and hasattr(holder, key):  # not if it is in a slot that is not set
            return f"{self.held(holder)}.{key}"
        if _is_in_dict(look_up):
            return key if holder is self.namespace and _is_plain(key) else f"{self.held(holder)}[{self.held(key)}]"
        return f"{self.held(kind)}({self.held(holder)}, {self.held(key)})"

    def function(self) -> Callable[[], tuple[Any, ...] | None]:
        """The function."""
        roots = f"({', '.join(self._roots)},)" if self._roots else "()"
        holds = " and ".join(self.terms) or "True"
        code = _compiled(f"lambda {', '.join(self._cells)}: lambda: {roots} if {holds} else None")
        closure = tuple([self._cells[name] for name in code.co_freevars])
        return types.FunctionType(code, self.namespace, "conditions", None, closure)


@functools.lru_cache(maxsize=1000)
def _compiled(source: str) -> types.CodeType:
    """The code of the function that the function in ``source`` makes."""
    return next(x for x in eval(source).__code__.co_consts if isinstance(x, types.CodeType))


def _is_plain(name: Any) -> bool:
    """Whether a name can be written in the code as it is."""
    is_name = type(name) is str and name.isidentifier() and name.isascii()
    return is_name and not keyword.iskeyword(name) and not name.startswith(_PREFIX)


def _is_in_dict(look_up: LookUp) -> bool:
    """Whether something is found in a dict now."""
    return look_up.kind in (entry, own) and type(look_up.holder) is dict and look_up.key in look_up.holder


def _most_common_namespace(made: Iterable[LookUp]) -> dict[str, Any]:
    """The globals that are read most often; an empty namespace if there are none."""
    read = [look_up.holder for look_up in made if _is_in_dict(look_up) and "__name__" in look_up.holder]
    counts = Counter(map(id, read))
    return max(read, key=lambda mapping: counts[id(mapping)], default={})
