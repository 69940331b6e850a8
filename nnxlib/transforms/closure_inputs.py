"""What a jitted function captures: the objects that it refers to without taking them as arguments.

They are found while the function is traced, and are inputs and outputs from then on. Each call asks what they are now,
because a closure or a global may have been set. (docs/how_it_works.md, "Closures", has all steps of this, and the files
where they are.)

If the objects have to be searched again, there may be as many as before, of the same structure, to which other chains
lead. A compiled function takes them in a certain order: first the Module under one name, then the one under another. So
the *addresses* of the objects are part of its key: what is looked up on the chains to each (core/chains.py).

All of this is kept in one record, :class:`Known`, which :class:`Captures` replaces when something has changed. Some
values of captured Variables are part of the key, too (literals.py).
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

from ..core.annotations import NamedTuple
from ..core.chains import Chain
from ..core.closures import CapturedObjects, Running, Watch, is_live, note_running, running_in
from ..core.conditions import Conditions
from ..core.errors import TraceContextError
from ..core.finding import reachable
from ..core.graph import Packed, pack
from ..core.held_by_arguments import held_in, statics_and_classes, used_by_arguments
from ..core.identity import Identified
from ..core.layout import KEPT, Layout
from ..core.references import Reached, search
from ..core.rows import Ref, children, parts
from ..core.tracing import current_trace
from .leaf_checks import is_integer
from .literals import Literals, LiteralToken, literals_in

# The objects that a function captures at a call, and a *token*, which is part of the key of its compiled functions: two
# are equal if each object was found at the same addresses, and the literals are equal.
CapturedNow = tuple[tuple[Any, ...], Hashable]

NOTHING: CapturedNow = (), None


class Known(NamedTuple):
    """All that is known about the objects that a function captures."""

    roots: Sequence[weakref.ref] = ()  # the objects
    running: Running = MappingProxyType({})  # the code that was running when they were noticed
    literals: Literals = Literals((), ())
    holders: Sequence[Any] = ()  # held by arguments; chains to the objects begin there, too
    conditions: Conditions = Conditions(Reached([], [], set()))
    token: object = None  # of the addresses alone

    def token_now(self) -> Hashable:
        """The token of the addresses and the present literals."""
        found = self.literals
        return LiteralToken.of(self.token, found, found.now()) if found.positions else self.token


EMPTY = Known()  # no objects, and nothing to look up


class Captures:
    """The objects that a function captures, as found while it was traced; see core/closures.py.

    Each call asks for them (:meth:`now`), which searches again if something has changed. If a trace uses others, these
    are added (:meth:`add`), and it is made again.

    What static arguments refer to, if these are ``given``, counts as if it was in the closure of the function.
    """

    def __init__(self, function: Callable, given: Sequence[Any] = ()):
        self._function, self._given = function, given
        self._adding = threading.RLock()  # a signal handler may call the function while it is searched
        self._tokens: dict[Hashable, object] = {}  # by the addresses that were met so far
        self._names: set[str] = set()  # in the code that was found so far
        self._integers = False  # whether integers are literals
        self.known: Known | None = None  # None if it has to be found anew at each call

    def now(self) -> CapturedNow:
        """What the function captures, as far as is known; searched again, if it now refers to other objects."""
        known = self.known
        if known is None:
            return _now(self._start_anew())
        try:  # inlined `conditions.find()`, to save a call
            found = known.conditions.find_or_raise()
        except Exception:
            found = None
        if found is None:
            return _now(self._found_again(known))
        if Watch.all:
            note_running(known.running)
        return found, known.token_now() if known.literals.positions else known.token

    def add(self, outside: CapturedObjects, before: Sequence[Any], packed: Packed, count: int) -> CapturedNow:
        """Add objects that a trace of what was ``packed`` has captured besides those that it was given ``before``.

        Returns what to give to the next trace: what the function captures now. But if the added objects are not found
        again, since something that the function refers to is another object at each look-up: these, and those given
        before. So each trace is given more than the last, and tracing ends.

        Raises:
          TraceContextError: if it was given these before; or if the call has abandoned many traces (``count``), since
            each uses other objects, which come from a queue or another thread.
        """
        roots = outside.roots
        if roots and (count > _MOST_TRACES or not _new_ids(roots, before)):
            raise TraceContextError(_CAPTURED.format(names=", ".join(type(root).__name__ for root in roots)))
        with self._adding:
            if _new_ids(roots, self.now()[0]):  # if not, another thread has added them
                self.known = self._known_with(outside, packed.layout)
        now = self.now()
        return now if _hold_all(map(weakref.ref, now[0]), roots) else ((*before, *roots), self._token_of(object()))

    def note_literals(self, packed: Packed, token: Any) -> Hashable:
        """The token with the literals in what was packed, which are known from now on."""
        values, known = literals_in(packed.layout, packed.leaves, self._integers), self.known
        variables = [packed.objects[packed.layout.variables[k]] for k in values]
        literals = Literals(tuple(values), list(map(weakref.ref, variables)))
        if known is not None and not literals.are(known.literals):
            self.known = known._replace(literals=literals)
        of_addresses = token.of_addresses if isinstance(token, LiteralToken) else token
        if not values:
            return of_addresses
        found = LiteralToken.of(of_addresses, literals, values.values())
        self._token_of(found)  # so that it is counted, see `forget_if_many`
        return found

    def switch_integers(self, packed: Packed) -> bool:
        """After a failed trace, make captured integers literals; returns whether to trace again.

        If they were literals already, the trace failed for another reason, and they become inputs again.
        """
        integers = [is_integer(x) and path[0] == "captured" for path, x in zip(packed.layout.leaf_paths, packed.leaves)]
        self._integers = not self._integers and any(integers)
        return self._integers

    def forget_if_many(self) -> bool:
        """Forget everything if there have been very many tokens; returns whether to drop the programs for them, too.

        For the objects may be those of former arguments, which nothing else keeps alive.
        """
        if len(self._tokens) <= KEPT:
            return False
        self._tokens, self.known = {}, None
        return True

    def capture_held(self, packed: Packed, captured: Sequence[Any]) -> None:
        """Before a trace, capture what its arguments lead to (core/held_by_arguments.py).

        The trace would not notice it if it only reads settings; if it noticed it, it would be made twice. If they lead
        to objects that are captured already, it is known from now on how: they may be replaced there.

        Raises:
          CapturedObjects: if anything is to be captured, or is known now; then without objects.
        """
        given = set(map(id, packed.objects))
        used, methods = used_by_arguments([self._function], packed.layout)
        others = [x for x in (*held_in(packed.layout), *used) if x._nnx_is_captured and id(x) not in given]
        found = [*filter(_is_within_reach, others)]
        if found:
            raise CapturedObjects(found, running_in(methods))
        with self._adding:
            known = self.known
            if not captured or known is None or [*map(id, captured)] != [id(reference()) for reference in known.roots]:
                return
            running = {**known.running, **running_in(methods)}
            more, reached = self._with_holders(known._replace(running=running), captured, packed.layout)
            if len(running) == len(known.running) and more.holders is known.holders:
                return
            self.known = self._known_from(reached, known.roots, more)
        raise CapturedObjects(())

    def capture_sharing(self, captured: Sequence[Any]) -> None:
        """Before a trace borrows these objects, capture others that share parts with them, or are parts of them.

        The trace would not notice them, since it has borrowed the parts. But at a later call another object, which
        shares nothing, may have taken the place of one.

        Raises:
          CapturedObjects: if there are any.
        """
        seen = set[int]()
        below = {id(part) for x in captured for _, part in reachable(x, seen)}
        given = set(map(id, captured))
        known = self.known or EMPTY
        others = _objects_on(self._search(known, captured).chains)
        found = [x for x in others if id(x) not in given and any(id(part) in below for _, part in reachable(x, set()))]
        if found:
            raise CapturedObjects(found)

    def _known_with(self, outside: CapturedObjects, layout: Layout) -> Known:
        """What is known with further objects, to which the function leads, or arguments of the layout."""
        known = self.known or self._start_anew()
        known = known._replace(running={**known.running, **outside.running})
        sought = [*outside.roots, *[reference() for reference in known.roots]]
        known, found = self._with_holders(known, sought, layout, pack(sought).layout)
        return self._known_from(found, _with_more(known.roots, outside.roots, found), known)

    def _with_holders(self, known: Known, objects: Sequence[Any], *layouts: Layout) -> tuple[Known, Reached]:
        """What is known, with what else arguments of the layouts hold that leads to these objects; and what is reached.

        Such an object may be replaced there, and nothing else would notice that.
        """
        own = self._search(known, objects)
        more = [x for x in statics_and_classes(*layouts) if not any(x is holder for holder in known.holders)]
        if more:
            given = (*self._given, *known.holders, *more)
            others = search(self._function, objects, known.running.values(), given, self._names)
            more = _leading_to(objects, more, others, own)
        if not more:
            return known, own
        known = known._replace(holders=(*known.holders, *more))
        return known, self._search(known, objects)

    def _found_again(self, before: Known) -> Known:
        """The Known after something has changed: the objects that are now at addresses of captured ones.

        Perhaps a dict has only grown, or another model has taken the place of one.
        """
        found = self._search(before)
        used = _used(found)
        for roots, token in self._met_before(found):
            known = self._known_from(found, roots, before)
            if known.token is token and _hold_all(roots, used):
                self.known = known
                return known
        return self._start_anew()

    def _met_before(self, found: Reached) -> list[tuple[list[weakref.ref], object]]:
        """The objects that are now at the addresses of a token, and the token; for each token, the newest first."""
        shapes = dict[int, Hashable]()
        try:
            objects = [chain for chain in found.chains if issubclass(type(chain.value), Identified)]
            at: dict[Hashable, Any] = {chain.address(shapes): chain.value for chain in objects}
            met = [(where[0], token) for where, token in self._tokens.items() if type(where) is tuple]
            at_addresses = [(_objects_at(addresses, at), token) for addresses, token in reversed(met)]
        except Exception:  # a key has no hash, or an error of user code, such as a comparison of two keys
            return []
        return [(roots, token) for roots, token in at_addresses if roots is not None]

    def _start_anew(self) -> Known:
        """Start anew: only the Modules that the function may use unnoticed by a trace are captured."""
        found = self._search(EMPTY)
        used = _used(found)
        here = [*filter(_is_within_reach, used)]
        known = self._known_from(found, _with_more((), here, found), EMPTY)
        if len(here) < len(used):  # another trace may take those that this one cannot: no program fits both
            self.known = None
            return Known(known.roots, token=self._token_of(object()))
        self.known = known
        return known

    def _search(self, known: Known, sought: Sequence[Any] = ()) -> Reached:
        found = search(self._function, sought, known.running.values(), (*self._given, *known.holders), self._names)
        self._names = found.names
        return found

    def _known_from(self, found: Reached, roots: Sequence[weakref.ref], before: Known) -> Known:
        """The Known of a search: what to look up on the chains to the roots, and to where Modules may come."""
        chains_to: dict[int, list[Chain]] = {}
        for chain in found.chains:
            chains_to.setdefault(id(chain.value), []).append(chain)
        ids = [id(reference()) for reference in roots]
        to_roots = [chains_to.get(root, []) for root in ids]
        others = [chain for chain in found.chains_to_objects() if id(chain.value) not in ids]
        conditions = Conditions(found, others, zip(roots, to_roots, strict=True))
        if not conditions:
            return EMPTY
        others += found.alternatives
        token = self._token_of_chains(to_roots, others) if to_roots or others else None
        return before._replace(roots=roots, conditions=conditions, token=token)

    def _token_of_chains(self, to_roots: list[list[Chain]], others: list[Chain]) -> object:
        """The token of the addresses of each root, and of other objects."""
        shapes = dict[int, Hashable]()
        try:
            addresses = tuple([frozenset([chain.address(shapes) for chain in chains]) for chains in to_roots])
            of_others = frozenset([(chain.address(shapes), type(chain.value)) for chain in others])
            return self._token_of((addresses, of_others) if all(addresses) else object())
        except Exception:  # a key has no hash, or an error of user code, such as a comparison of two keys
            return self._token_of(object())

    def _token_of(self, addresses: Hashable) -> object:
        """The very same object for the same addresses."""
        return self._tokens.setdefault(addresses, object())


# --- what a search has found ----------------------------------------------------------------------------------------


def _used(found: Reached) -> list[Any]:
    """The Modules that the function may use unnoticed by a trace, if they can be captured."""
    return [x for x in found.used_unnoticed() if x._nnx_is_captured]


def _leading_to(objects: Sequence[Any], holders: Sequence[Any], found: Reached, own: Reached) -> list[Any]:
    """The holders from which objects can be reached, other than through functions on the ``own`` chains.

    What such a function refers to is looked up at each call already.
    """
    by_part = _by_part(found)
    named = {id(x) for part in objects for x in by_part.get(id(part), ())}
    known = {id(chain.value) for chain in own.chains if type(chain.value) is types.FunctionType}
    first = set[int]()
    for chain in found.chains_to_objects():
        *values, _ = chain.value, *[holder for _, holder in chain.back()]  # the last is the function itself
        if id(chain.value) in named and known.isdisjoint(map(id, values)):
            first.add(id(values[-1]))
    return [x for x in holders if id(x) in first]


def _objects_at(addresses: Iterable[Iterable[Hashable]], at: dict[Hashable, Any]) -> list[weakref.ref] | None:
    """The objects at the addresses of each root; None if these are not one object each, or of another trace."""
    found = [[at.get(address) for address in of_one] for of_one in addresses]
    are_whole = all(x is not None and _is_within_reach(x) and all(y is x for y in more) for x, *more in found)
    return [weakref.ref(x) for x, *_ in found] if are_whole else None


def _hold_all(roots: Iterable[weakref.ref], objects: Sequence[Any]) -> bool:
    """Whether each of these objects is a root, or below one."""
    seen = set[int]()
    held = {id(x) for root in roots for _, x in reachable(root(), seen)} if objects else ()
    return all(id(x) in held for x in objects)


def _is_within_reach(x: Any) -> bool:
    """Whether the running trace can take an object as an input: not if it is what another trace has made."""
    return x._nnx_trace is current_trace() or is_live(x._nnx_trace)


def _now(known: Known) -> CapturedNow:
    """The CapturedNow of a Known that was just found; nothing if an object is gone already."""
    roots = tuple([reference() for reference in known.roots])
    return (roots, known.token_now()) if all(root is not None for root in roots) else NOTHING


def _new_ids(roots: Sequence[Any], before: Sequence[Any]) -> set[int]:
    """The ids of the roots that were not there before."""
    return {id(root) for root in roots} - {id(root) for root in before}


def _objects_on(chains: Iterable[Chain]) -> list[Any]:
    """The objects at the end of chains that can be captured, each once."""
    objects = {id(chain.value): chain.value for chain in chains if issubclass(type(chain.value), Identified)}
    return [x for x in objects.values() if x._nnx_is_captured]


def _by_part(found: Reached) -> dict[int, list[Any]]:
    """By id of an object, those at the end of chains that hold it; an object holds itself."""
    holders: dict[int, list[Any]] = {}
    for x in _objects_on(found.chains):
        for _, part in reachable(x, set()):
            holders.setdefault(id(part), []).append(x)
    return holders


def _with_more(before: Sequence[weakref.ref], more: Sequence[Any], found: Reached) -> list[weakref.ref]:
    """References to the roots ``before``, and to ``more`` of them.

    An object that others at the end of chains hold is captured by these holders: it may be replaced in them.
    """
    holders = _by_part(found) if more else {}
    present = {id(reference()) for reference in before}
    named = {id(x): x for root in more for x in holders.get(id(root), [root])}
    new = [x for x in named.values() if id(x) not in present] or [x for x in more if id(x) not in present]
    return [*before, *map(weakref.ref, new)]


_MOST_TRACES = 8  # of one call; nearly always the second trace has all that is captured

_CAPTURED = """\
The function uses objects ({names}) that belong to another trace, or are others in each trace (from a queue, say), in \
a way that nnx.jit cannot follow. Pass them as arguments."""


def captured_rows(layout: Layout) -> list[int]:
    """The rows of the captured objects in packed :class:`Arguments`, and of those below them."""
    stack: list[Any] = [child for path, child in children(layout.root) if path[0] == "captured"]
    found = set[int]()
    while stack:
        for _, spec in parts(stack.pop()):
            if isinstance(spec, Ref) and spec.index not in found:
                found.add(spec.index)
                stack.append(layout.rows[spec.index])
    return sorted(found)
