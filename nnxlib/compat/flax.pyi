"""What type checkers and editors know of :mod:`nnxlib.compat.flax`: nnxlib's names, and those that take switches."""

# pyright: reportAssignmentType=false
# (What is declared here takes the place of nnxlib's; mypy keeps nnxlib's, so it does not know the switches.)

from collections.abc import Callable, Iterator, Sequence
from typing import Any as _Any
from typing import TypeVar, overload

import nnxlib
from nnxlib import *
from nnxlib.core.errors import Path
from nnxlib.core.filters import Filter
from nnxlib.core.switches import Switch as Switch
from nnxlib.transforms.signatures import Jit, Operator, Transform, ValueAndGrad

from .variablelib import var_defaults as var_defaults

_F = TypeVar("_F", bound=Callable[..., _Any])
_M = TypeVar("_M")
_R = TypeVar("_R")
_T = TypeVar("_T")

# --- switches for all calls ---

class set_graph_mode(Switch): ...
class set_graph_updates(Switch): ...

# --- models and States ---

@overload
def split(node: _T, /, **switches: bool | None) -> tuple[GraphDef[_T], State]: ...
@overload
def split(node: _T, a: Filter, /, **switches: bool | None) -> tuple[GraphDef[_T], State]: ...
@overload
def split(node: _T, a: Filter, b: Filter, /, **switches: bool | None) -> tuple[GraphDef[_T], State, State]: ...
@overload
def split(node: _T, /, *filters: Filter, **switches: bool | None) -> tuple[GraphDef[_T], *tuple[State, ...]]: ...
@overload
def state(node: _Any, /, **switches: bool | None) -> State: ...
@overload
def state(node: _Any, filter: Filter, /, **switches: bool | None) -> State: ...
@overload
def state(node: _Any, /, *filters: Filter, **switches: bool | None) -> tuple[State, ...]: ...

variables = state

def merge(
    graphdef: GraphDef[_T] | GraphState,
    /,
    *states: _Any,
    copy: bool = False,
    strict: bool = False,
    **switches: bool | None,
) -> _T: ...
def update(node: _Any, state: _Any, /, *states: _Any, strict: bool = True, **switches: bool | None) -> None: ...
def graphdef(node: _T, /, **switches: bool | None) -> GraphDef[_T]: ...
def clone(node: _T, variables: bool = True, **switches: bool | None) -> _T: ...
def flatten(node: _T, /, *, with_paths: bool = True, **switches: bool | None) -> tuple[GraphDef[_T], _Any]: ...
def unflatten(graphdef: GraphDef[_T], state: _Any, /, **switches: bool | None) -> _T: ...
def call(graphdef_state: tuple[GraphDef[_T], _Any], /, **switches: bool | None) -> _Any: ...
def unpack(node: _Any, *filters: Filter, **switches: bool | None) -> _Any: ...
def iter_graph(node: _Any, /, **switches: bool | None) -> Iterator[tuple[Path, _Any]]: ...
def iter_children(node: _Any, /, **switches: bool | None) -> Iterator[tuple[_Any, _Any]]: ...
def iter_modules(module: _Any, /, **switches: bool | None) -> Iterator[tuple[Path, _Any]]: ...
def recursive_map(f: Callable[[Path, _Any], _Any], node: _Any, /, **switches: bool | None) -> _Any: ...
def find_duplicates(node: _Any, **options: _Any) -> _Any: ...
def view(
    node: _T, /, *, only: Filter = ..., raise_if_not_found: bool = True, graph: bool | None = None, **settings: _Any
) -> _T: ...
def view_info(node: _Any, /, *, only: Filter = ..., **switches: bool | None) -> str: ...
def reseed(node: _Any, /, *, policy: _Any = ..., graph: bool | None = None, **stream_keys: _Any) -> None: ...
def with_vars(
    node: _T,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> _T: ...

vars_as = with_vars

class Optimizer(nnxlib.Optimizer[_M]):
    def __init__(self, model: _M, tx: _Any, *, wrt: Filter = ..., graph: bool | None = None) -> None: ...

class ModelAndOptimizer(nnxlib.ModelAndOptimizer[_M], Optimizer[_M]): ...

class EMA(nnxlib.EMA):
    def __init__(self, params: _Any, decay: float, *, only: Filter = ..., graph: bool | None = None) -> None: ...

# --- transforms ---

jit: Jit[...]
grad: Operator[...]
value_and_grad: ValueAndGrad[...]
make_jaxpr: Operator[...]
checkify: Operator[...]
vmap: Transform[...]
pmap: Transform[...]
scan: Transform[...]
remat: Transform[...]
checkpoint: Transform[...]
shard_map: Transform[...]
custom_vjp: _Any
jvp: _Any
vjp: _Any
split_rngs: _Any
fork_rngs: _Any

def cond(
    pred: _Any, true_fun: Callable[..., _R], false_fun: Callable[..., _R], *operands: _Any, **switches: bool | None
) -> _R: ...
def switch(index: _Any, branches: Sequence[Callable[..., _R]], *operands: _Any, **switches: bool | None) -> _R: ...
def while_loop(
    cond_fun: Callable[..., _Any], body_fun: Callable[..., _Any], init_val: _Any, **switches: bool | None
) -> _Any: ...
def fori_loop(
    lower: _Any, upper: _Any, body_fun: Callable[..., _Any], init_val: _Any, **options: bool | int | None
) -> _Any: ...
def eval_shape(f: Callable[..., _R], *args: _Any, **kwargs: _Any) -> _R: ...
def jit_partial(fun: Callable[..., _Any], *partial_args: _Any, **options: _Any) -> _Any: ...
def cached_partial(f: Callable[..., _Any], *cached_args: _Any, **switches: bool | None) -> Callable[..., _Any]: ...
