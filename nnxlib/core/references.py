"""References: the search for what a function refers to.

At a later call a jitted function must know, without a trace, whether it would still capture the same objects
(docs/how_it_works.md, "Closures"). So :func:`search` finds the chains of look-ups that lead to these (chains.py), which
each call follows again (conditions.py). They go through closures, plain containers, plain objects and their classes,
weak references, thread-local and context variables, and other functions.

A place may hold None or a number when the function is traced, and a Module later. So the chains to such places are
followed, too, if code of the function names them: each is an *end*.

From the globals of its functions, half of a program can be reached. So the globals that functions of other files read
are searched last, and only if something that is sought has not been found; but Modules and None in them are found at
once. If it is still missing, code may have reached it by text, as in ``globals()["model"]``, or by the ``__getattr__``
of a module.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from . import look_ups
from .annotations import NamedTuple
from .calls import is_observed, is_wrapper
from .chains import OVER_ALL, Chain
from .closures import RunningCode, is_lent_elsewhere
from .fingerprints import CONSTANTS, is_constant_type, is_fixed
from .identity import Identified
from .look_ups import BY_SYNTAX, LookUp, is_of_library
from .objects import Node
from .tracing import current_trace

_MOST = 1000  # values to find: a function may refer to half of a program
_MOST_TO_FIND = 30_000  # look-ups in a search, of a few microseconds each
_MOST_ELSEWHERE = 100  # functions of other files whose globals are searched

_LEADS_NOWHERE = *CONSTANTS, type, types.ModuleType
_BY_ANY_NAME = "getattr", "hasattr", *OVER_ALL  # code with one of these names may read any attribute


class Reached(NamedTuple):
    """The values that can be reached from a function."""

    chains: list[Chain]  # the shortest one to each value, then all others to Modules and Variables
    ends: list[Chain]  # all chains to constants, and to tuples
    names: set[str]  # in the code of functions among the values
    alternatives: Sequence[Chain] = ()  # other chains to values, such as containers, through which objects are reached

    def followable(self, chains: Iterable[Chain]) -> list[Chain]:
        """Select the chains that the function may follow."""
        along = {id(chain.value) for chain in self.alternatives}
        return [chain for chain in chains if chain.may_be_followed(self.names, along)]

    def chains_to_objects(self) -> list[Chain]:
        """The chains to Modules and Variables that the function may use: it names each attribute on the chain."""
        found = [chain for chain in self.chains if issubclass(type(chain.value), Identified)]
        return self.followable([chain for chain in found if not is_left_over(chain.value)])

    def used_unnoticed(self) -> list[Any]:
        """The Modules that it may use unnoticed by a trace, which does not notice that a flag is read.

        These are the ones that it names, and those of which it may read an attribute.
        """
        chains = [chain for chain in self.chains_to_objects() if isinstance(chain.value, Node)]
        return [chain.value for chain in chains if chain.is_named or _is_read(chain.value, self.names)]


def _namespace_of(f: Any) -> dict[str, Any] | None:
    """The globals of a function, or of the innermost one that it wraps; of an object, those of its ``__call__``."""
    namespace = None
    while f is not None:
        namespace = getattr(f, "__globals__", namespace)
        if isinstance(f, types.FunctionType) or hasattr(f, "__wrapped__"):
            f = getattr(f, "__wrapped__", None)
        else:
            f = getattr(f, "__func__", None) or inspect.getattr_static(type(f), "__call__", None)
            f = f if isinstance(f, types.FunctionType) else None
    return namespace


def search(
    function: Callable,
    sought: Collection[Any] = (),
    running: Iterable[RunningCode] = (),
    given: Sequence[Any] = (),
    names: Collection[str] = (),
) -> Reached:
    """Search for everything that can be reached from a function.

    In a large program it finds the nearest values. It goes on while some that are sought are missing, up to a limit:
    from a test file all tests can be reached, and a search there takes a tenth of a second or two.

    Args:
      function: where the chains begin.
      sought: what has to be found.
      running: code that ran when the function was called; its globals count as the function's own.
      given: what also counts as the function's own, such as its static arguments.
      names: those in the code that an earlier search found, which this one may not reach.
    """
    return _Search(function, sought, running, given, names).run()


class _Search:
    """A search for what can be reached from a function, nearest first."""

    def __init__(
        self,
        function: Callable,
        sought: Collection[Any],
        running: Iterable[RunningCode],
        given: Sequence[Any],
        names: Collection[str],
    ):
        self.start = Chain(function, LookUp(look_ups.itself, function), None)
        further = [Chain(x, LookUp(look_ups.item, given, k), self.start) for k, x in enumerate(given)]
        self.queue = deque([self.start, *further])  # the chains that are yet to be visited, the shortest first
        self.look_ups_left, self.elsewhere_left = _MOST_TO_FIND, _MOST_ELSEWHERE
        self.missing = set(map(id, sought))
        self.namespace = _namespace_of(function)
        self.running = [x for x in running if not is_wrapper(x.code) and not is_of_library(x.namespace)]
        # The names in the code visited so far; and those of which methods have been searched for in all objects.
        self.names = {*names, *[name for code in self.running for name in look_ups.names_in(code.code)]}
        self.looked_for = set[str]()
        self.unnamed = list[Chain]()  # to objects whose methods the syntax of Python calls, yet to be searched
        self.visited_code = set[int]()  # of functions, by id
        self.elsewhere = deque[Chain]()  # to functions of other files
        # The first chain to each value, by its id; further ones to Modules and Variables; all to constants and tuples.
        self.found, self.others, self.ends = dict[int, Chain](), list[Chain](), list[Chain]()
        self.alternatives = dict[Hashable, Chain]()  # by place: chains to values that were found on another chain

    def run(self) -> Reached:
        self.visit_all()  # what the function itself refers to
        for code, namespace in reversed(self.running):  # the globals of code that was running
            if id(code) not in self.visited_code:
                self.go_on(self.start, look_ups.globals_in(code, namespace))
                self.visit_all()
        self.visit_elsewhere()  # those of functions of other files
        if self.missing:  # what is reached by text
            self.look_ups_left = max(self.look_ups_left, _MOST)  # allow a few, even if none is left
            namespaces = [self.namespace or {}, *[code.namespace for code in self.running]]
            for namespace in {id(x): x for x in namespaces}.values():
                self.go_on(self.start, look_ups.globals_by_text(self.names, namespace))
            self.visit_all()
            self.visit_elsewhere()
        chains = [*self.found.values(), *self.others]
        return Reached(chains, self.ends, self.names, self.alternatives_to_objects(chains))

    def alternatives_to_objects(self, chains: Sequence[Chain]) -> list[Chain]:
        """The alternatives that lead to objects, and that the function may follow."""
        objects = [chain for chain in chains if issubclass(type(chain.value), Identified)]
        leading = {id(holder) for chain in objects for _, holder in chain.back()} if self.alternatives else ()
        found, along = list[Chain](), set[int]()
        for chain in self.alternatives.values():
            if id(chain.value) in leading and chain.may_be_followed(self.names, along):
                found.append(chain)
                along.add(id(chain.value))
        return found

    def visit_all(self) -> None:
        while self.queue and (self.missing or len(self.found) < _MOST):
            self.visit(self.queue.popleft())
            if not self.queue:
                self.look_for_methods()

    def visit_elsewhere(self) -> None:
        """As long as something is missing, go on to the globals of functions of other files, some found meanwhile."""
        while self.missing and self.elsewhere and self.elsewhere_left:
            self.elsewhere_left -= 1
            chain = self.elsewhere.popleft()
            self.go_on(chain, look_ups.globals_of(chain.value))
            self.visit_all()

    def look_for_methods(self) -> None:
        """Go on to methods that are named by code visited later than their objects, and to those that no code names."""
        names = self.names - self.looked_for
        self.looked_for |= names
        for chain in [*self.found.values()] if names else ():
            self.go_on(chain, look_ups.methods_in(chain.value, names))
        unnamed, self.unnamed = self.unnamed, []
        for chain in unnamed:
            if chain.may_be_followed(self.names):
                self.go_on(chain, look_ups.methods_in(chain.value, BY_SYNTAX))
            else:
                self.unnamed.append(chain)

    def visit(self, chain: Chain) -> None:
        value = chain.value
        kind = type(value)
        self.names.update(look_ups.names_by_text(value))
        if (is_constant_type(kind) or is_fixed(kind)) and not _is_kept_by_library(chain):
            self.ends.append(chain)
        if id(value) in self.found:
            if issubclass(type(value), Identified):  # isinstance would ask a proxy, perhaps to what is gone
                self.others.append(chain)
            elif not issubclass(type(value), _LEADS_NOWHERE):
                place = _place(chain.look_up)
                if place != _place(self.found[id(value)].look_up):
                    self.alternatives[place] = chain
        elif chain.look_up.found() is value:  # not if a look-up finds another value each time
            self.found[id(value)] = chain
            self.missing.discard(id(value))
            if type(value) is types.FunctionType:
                self.enter(chain, value)
            ours = type(value) is types.FunctionType and is_observed(value)  # a wrapper; so is its closure
            self.go_on(chain, look_ups.in_dict_of(value) if ours else look_ups.look_ups_in(value, self.names))
            if look_ups.has_unnamed_methods(type(value)):
                self.unnamed.append(chain)

    def enter(self, chain: Chain, function: types.FunctionType) -> None:
        """Go on to the globals of a function; not of a library, whose use of a Module the trace notices."""
        is_own = function.__globals__ is self.namespace
        if is_observed(function) or (not is_own and is_of_library(function.__globals__)):
            return
        self.names |= look_ups.names_in(function.__code__)
        if is_own:
            self.visited_code.add(id(function.__code__))
            self.go_on(chain, look_ups.globals_of(function))
        else:
            self.elsewhere.append(chain)
            self.go_on(chain, look_ups.objects_in_globals(function))

    def go_on(self, chain: Chain, further: Iterable[LookUp]) -> None:
        """Go on from the end of a chain with these look-ups; with none if they cannot be made."""
        with contextlib.suppress(Exception):  # a weak proxy to what is gone, or an unusual error of a __getattr__
            for look_up in itertools.islice(further, self.look_ups_left):
                self.look_ups_left -= 1
                self.queue.append(chain.further(look_up))


def _place(look_up: LookUp) -> Hashable:
    """A key that is equal for two look-ups of the same key in the same holder."""
    kind, holder, key = look_up
    return kind, holder.address if kind in look_ups.WITHIN else id(holder), key


def is_left_over(x: Any) -> bool:
    """Whether this is a Module or Variable of a trace that has ended, which no function can use."""
    if current_trace() is not None or not issubclass(type(x), Identified):
        return False
    return x._nnx_trace is not None and not is_lent_elsewhere(x._nnx_trace)


def _is_kept_by_library(chain: Chain) -> bool:
    """Whether a chain ends in the closure or the defaults of a function of a library, where no Module will come."""
    holder = None if chain.before is None else chain.before.value
    return type(holder) is types.FunctionType and is_of_library(holder.__globals__)


def _is_read(x: Node, names: set[str]) -> bool:
    """Whether code with these names may use a Module without calling its methods, which a trace notices."""
    if isinstance(x, list | dict) or not (names.isdisjoint(x._nnx_contents()) and names.isdisjoint(_BY_ANY_NAME)):
        return True
    named = {*names, *BY_SYNTAX}
    in_classes = [vars(cls)[name] for cls in type(x).__mro__[:-1] for name in vars(cls).keys() & named]
    return not all(map(is_observed, in_classes))
