"""Filters and their algebra."""

import copy
import dataclasses
import pickle
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlib as nnx
from nnxlib.core import filters
from nnxlib.core.errors import FilterOrderError, InvalidFilterError
from nnxlib.core.filters import (
    All,
    Any,
    Everything,
    FilterObject,
    Not,
    Nothing,
    OfType,
    PathContains,
    PathIn,
    Where,
    WithTag,
    filters_to_predicates,
    group_by_filters,
    looks_at_values,
    to_predicate,
)
from nnxlib.core.variables import BatchStat, Cache, Intermediate, Param, Perturbation, Variable


def is_long(path, x):
    return len(path) > 1


keys = st.integers(0, 2) | st.sampled_from(["a", "b", "ab"])
paths = st.lists(keys, max_size=3).map(tuple)
variables = st.builds(
    lambda kind, metadata: kind(1.0, **metadata),
    st.sampled_from([Param, BatchStat, Intermediate, Perturbation]),
    st.sampled_from([{}, {"tag": "head"}, {"tag": "body"}]),
)
universe = st.lists(st.tuples(paths, variables | st.sampled_from([1, 2.0, "text", None])), max_size=6)
literals = st.sampled_from([Param, Variable, Intermediate, float, "head", "body", ..., True, None, False, is_long])
atoms = (
    literals
    | st.builds(PathContains, keys, st.booleans())
    | st.builds(PathIn, paths, paths)
    | st.sampled_from([Everything(), Nothing()])
)
any_filter = st.recursive(
    atoms, lambda f: st.lists(f, max_size=3) | st.builds(Any, f, f) | st.builds(All, f, f) | st.builds(Not, f)
)
objects = any_filter.map(to_predicate)


def selects_same(universe, a, b):
    return all(bool(a(*item)) == bool(b(*item)) for item in universe)


# --- what each filter takes ---


def test_a_type_takes_instances_and_what_stands_for_it():
    """A type takes its instances, Variables of it or a subclass, and stand-ins that name it as `.type`."""
    param = to_predicate(Param)
    assert param((), Param(1.0))
    assert param((), SimpleNamespace(type=Param))
    assert not param((), BatchStat(1.0))
    assert not param((), Param)
    assert not param((), SimpleNamespace(type="Param"))
    assert to_predicate(Intermediate)((), Perturbation(1.0))
    assert to_predicate(float)((), 1.0)


def test_a_string_takes_what_has_the_tag():
    """A tag is metadata of a Variable, an attribute of its class, or an attribute of anything else."""

    class Tagged(Variable):
        tag = "head"

    head = to_predicate("head")
    assert head((), Param(1.0, tag="head"))
    assert head((), Tagged(1.0))
    assert head((), SimpleNamespace(tag="head"))
    assert not head((), Param(1.0, tag="body"))
    assert not head((), Param(1.0))
    assert not head((), Param)
    assert not head((), jnp.ones(2))


def test_structural_filters_do_not_look_at_values():
    """Asking a Variable for type and tag runs none of its hooks."""
    reads = []
    variable = Param(1.0, on_get_value=lambda v, x: reads.append(x))
    Any(BatchStat, "head", PathContains("a"), PathIn(("b",)))(("c",), variable)
    assert reads == []


def test_path_contains():
    """A key of the path, exactly; or with exact=False, a part of the text of a key."""
    assert PathContains("kernel")(("layers", 0, "kernel"), None)
    assert PathContains(0)(("layers", 0, "kernel"), None)
    assert not PathContains("0")(("layers", 0, "kernel"), None)
    assert not PathContains("kern")(("kernel",), None)
    assert PathContains("kern", exact=False)(("kernel",), None)
    assert PathContains("1", exact=False)((11,), None)
    assert PathContains(1, exact=False)((11,), None)
    assert not PathContains("x", exact=False)(("kernel",), None)


def test_path_in():
    """The paths given, and no others."""
    filter = PathIn(("layers", 0), ("scale",))
    assert filter(("layers", 0), None)
    assert not filter(("layers",), None)
    assert not filter((), None)


def test_sequences_and_unions_take_what_one_of_them_takes():
    """Lists, tuples and unions of types are any of; an empty one selects nothing."""
    for filter in ([Param, "head"], (Param, "head"), Any(Param, "head")):
        assert to_predicate(filter) == Any(OfType(Param), WithTag("head"))
    assert to_predicate(Param | BatchStat) == Any(Param, BatchStat)
    assert to_predicate([]) == to_predicate(()) == Nothing()


def test_constants():
    """`...` and True take everything, None and False nothing."""
    assert to_predicate(...) == to_predicate(True) == Everything()
    assert to_predicate(None) == to_predicate(False) == Nothing()


@pytest.mark.parametrize("bad", [3, 2.5, {Param}, {"a": 1}, object(), jnp.ones(2), Param(1.0)])
def test_what_is_not_a_filter_is_refused(bad):
    """The error says what it got and what is accepted; nested and on either side of an operator, too."""
    for use in (to_predicate, Not, lambda f: Any(Param, [f]), lambda f: OfType(Param) - f):
        with pytest.raises(InvalidFilterError, match=f"(?s)Not a filter.*{type(bad).__name__}.*a type"):
            use(bad)


def test_filters_check_their_arguments():
    """A type that is no class, a tag that is no string and a path that is no tuple could never match."""
    with pytest.raises(InvalidFilterError, match="takes a class"):
        OfType(Param(1.0))
    with pytest.raises(InvalidFilterError, match="tag is a string"):
        WithTag(3)
    with pytest.raises(InvalidFilterError, match="path is a tuple"):
        PathIn("kernel")


# --- sequences of filters ---


@pytest.mark.parametrize("total", [..., True])
def test_what_takes_everything_comes_last(total):
    """`...` before another filter is an error that says which; several of them at the end are not."""
    with pytest.raises(FilterOrderError, match="is filter 2 of 3"):
        filters_to_predicates([Param, total, BatchStat])
    assert filters_to_predicates([Param, total, total]) == (OfType(Param), Everything(), Everything())
    assert filters_to_predicates([]) == ()


@given(universe, st.lists(any_filter.filter(lambda f: f is not ... and f is not True), max_size=3))
def test_grouping_is_a_partition_by_the_first_match(universe, filters):
    """Each item is in the group of the first filter that takes it, or in the rest; order is kept."""
    groups = group_by_filters(universe, filters)
    assert len(groups) == len(filters) + 1
    predicates = [*map(to_predicate, filters), Everything()]
    first = [next(i for i, p in enumerate(predicates) if p(*item)) for item in universe]
    for i, group in enumerate(groups):
        assert group == [item for item, place in zip(universe, first) if place == i]


def test_looks_at_values():
    """Only functions may look at values, wherever they are nested, unless they promise not to."""

    def by_path(path, x):
        return path == ()

    class Judge(type):
        def __instancecheck__(cls, x):
            return x.value > 1

    by_path.looks_at_values = False
    assert looks_at_values(is_long)
    assert looks_at_values(Not(Judge("Large", (), {})))
    assert looks_at_values(Any(Param, Not(is_long)))
    assert looks_at_values(All(Param, [is_long, "head"]))
    assert not looks_at_values(by_path)
    assert not looks_at_values(Not(Any(Param, "head", by_path, PathContains("a"), PathIn(("a",)), None)))


def test_a_function_without_a_hash_makes_a_filter_with_one():
    """Such as an instance of a dataclass; the filter is equal to that of an equal function."""

    @dataclasses.dataclass
    class Deeper:
        than: int

        def __call__(self, path, x):
            return len(path) > self.than

    assert len({to_predicate(Deeper(1)), to_predicate(Deeper(1)), to_predicate(Deeper(2))}) == 2


# --- the algebra ---


@given(universe, objects, objects, objects)
def test_boolean_laws(universe, a, b, c):
    """What filters select obeys the laws of a Boolean algebra."""

    def law(left, right):
        assert selects_same(universe, left, right)

    law(a | b, b | a)
    law(a & b, b & a)
    law(a | (b | c), (a | b) | c)
    law(a & (b & c), (a & b) & c)
    law(a & (b | c), (a & b) | (a & c))
    law(a | (b & c), (a | b) & (a | c))
    law(~(a | b), ~a & ~b)
    law(~(a & b), ~a | ~b)
    law(a | (a & b), a)
    law(a & (a | b), a)
    law(a | ~a, Everything())
    law(a & ~a, Nothing())
    law(a - b, a & ~b)
    law(a - (b | c), (a - b) - c)


@given(objects, objects, objects)
def test_laws_that_need_no_expansion_are_equalities(a, b, c):
    """Filters that differ by order, nesting, repetition, double or distributed negation are equal and hash equal."""
    equal = [
        (a | b, b | a),
        (a & b, b & a),
        (a | (b | c), (a | b) | c),
        (a & (b & c), (a & b) & c),
        (~(a | b), ~a & ~b),
        (~(a & b), ~a | ~b),
        (~~a, a),
        (a | a, a),
        (a & a, a),
        (a - b, a & ~b),
        (a | Nothing(), a),
        (a & Everything(), a),
        (a | Everything(), Everything()),
        (a & Nothing(), Nothing()),
        (a - Nothing(), a),
    ]
    for left, right in equal:
        assert left == right
        assert hash(left) == hash(right)


@given(universe, any_filter)
def test_the_complement_takes_exactly_the_rest(universe, filter):
    """`~f` and `Not(f)` take what `f` does not, and are filter objects again."""
    predicate = to_predicate(filter)
    assert isinstance(~predicate, FilterObject)
    assert Not(filter) == ~predicate
    for item in universe:
        assert Not(filter)(*item) is not predicate(*item)


@given(objects)
def test_negation_stands_before_single_predicates(filter):
    """The form that filters are kept in: flat, two parts at least, `Not` only before an atom."""
    stack = [filter]
    while stack:
        part = stack.pop()
        if isinstance(part, Not):
            assert not isinstance(part.predicate, Any | All | Not | Everything | Nothing)
        if isinstance(part, Any | All):
            assert len(part.predicates) > 1
            assert not any(isinstance(p, type(part) | Everything | Nothing) for p in part.predicates)
            stack += part.predicates


def test_neutral_and_contradictory_parts():
    """No parts, one part, and a part with its own negation reduce to what they mean."""
    assert Any() == Nothing()
    assert All() == Everything()
    assert Any(Param) == All(Param) == OfType(Param)
    assert Any(Param, Not(Param)) == Everything()
    assert All(Param, "head", Not(Param)) == Nothing()
    assert Not(Not(Param)) == OfType(Param)
    assert Not(Not(is_long)) == to_predicate(is_long)


def test_emptiness():
    """Whether a combination can take anything shows by comparing with `Nothing()`."""
    assert OfType(Param) - Param == Nothing()
    assert OfType(Param) - BatchStat != Nothing()


@pytest.mark.parametrize("literal", [BatchStat, "head", ..., True, None, False, is_long, [BatchStat, "head"]])
def test_operators_take_literals_on_either_side(literal):
    """`f op literal` and `literal op f` mean the same as with the literal spelled out."""
    f, spelled = OfType(Param), to_predicate(literal)
    assert f | literal == literal | f == f | spelled
    assert f & literal == literal & f == f & spelled
    assert f - literal == f - spelled
    assert literal - f == spelled - f


def test_different_filters_are_unequal():
    """Equality looks at kind and content."""
    different = [
        OfType(Param),
        OfType(Cache),
        WithTag("a"),
        PathContains("a"),
        PathContains("a", exact=False),
        PathIn(("a",)),
        PathIn(("b",)),
        Where(is_long),
        Not("a"),
        Not(Param),
        Any("a", "b"),
        All("a", "b"),
        Any("a", "b", "c"),
        Everything(),
        Nothing(),
    ]
    assert len(set(different)) == len(different)
    assert all((a == b) == (i == j) for i, a in enumerate(different) for j, b in enumerate(different))


@given(objects)
def test_the_repr_makes_an_equal_filter(filter):
    """`eval(repr(f)) == f`, with the names that it uses in scope."""
    assert eval(repr(filter), vars(filters) | globals()) == filter


@given(objects)
def test_filters_copy_and_pickle(filter):
    """A copy is equal, and so is a pickled filter."""
    for twin in (copy.copy(filter), copy.deepcopy(filter), pickle.loads(pickle.dumps(filter))):
        assert twin == filter
        assert repr(twin) == repr(filter)


def test_reprs_are_readable():
    """The repr reads as one would write it."""
    assert repr(Not([Param, "head"])) == "All(Not(OfType(Param)), Not(WithTag('head')))"
    assert repr(PathContains(0)) == "PathContains(0, exact=True)"
    assert repr(PathIn(("b", "x"), ("b", 1), ("a",))) == "PathIn(('a',), ('b', 1), ('b', 'x'))"
    assert repr(to_predicate(is_long)) == "Where(is_long)"


@pytest.mark.parametrize("filter", [Any(int, "head"), All(int, "head"), Not(int)], ids=repr)
def test_a_combination_can_be_documented(filter):
    """A combination with a name of its own is documented where it is named; it stays equal to one that is not."""
    plain = copy.copy(filter)
    filter.__doc__ = "What is trained."
    assert filter.__doc__ == "What is trained."
    assert plain.__doc__ != filter.__doc__
    assert filter == plain
    assert hash(filter) == hash(plain)


def test_the_base_class_is_abstract():
    """A filter object must say what it takes."""
    with pytest.raises(NotImplementedError):
        FilterObject()((), None)


def test_a_module_that_can_be_called_is_no_filter():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidFilterError, match="of type Linear"):
        nnx.state(layer, layer)


@pytest.mark.parametrize("kind", [nnx.Linear, nnx.Module, nnx.Rngs, nnx.List])
def test_the_class_of_a_node_takes_no_leaf(kind):
    """There is a warning where leaves are selected, at the line of the user; filters of Modules take it."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with nnx.split_context() as context:
        splits = [lambda m, f, split=split: split(m, nnx.Param, f, ...)[2] for split in (nnx.split, context.split)]
    for select in (nnx.state, nnx.pop, *splits):
        message = rf"^{kind.__name__} selects nothing: filters see Variables"
        with pytest.warns(UserWarning, match=message) as warned:
            assert select(model, kind) == {}
        assert [w.filename for w in warned] == [__file__]
    assert isinstance(model.layers[0].kernel, nnx.Param)
    model.set_attributes(nnx.Linear, use_bias=True)


def test_text_that_is_a_key_and_not_a_tag_takes_nothing_with_a_warning():
    """As in ``nnx.state(model, "kernel")``. A tag that is a key, too, is no mistake, nor is text found nowhere."""
    model = nnx.Dict(kernel=nnx.Param(1.0), bias=nnx.Param(2.0, tag="bias"), ends=nnx.List([nnx.Param(3.0)]))
    with nnx.split_context() as context:
        splits = [lambda m, f, split=split: split(m, f, ...)[1] for split in (nnx.split, context.split)]
    for select in (nnx.state, nnx.pop, *splits):
        message = r"^'kernel' selects nothing: text is a tag.* write nnx.PathContains\('kernel'\)\.$"
        with pytest.warns(UserWarning, match=message) as warned:
            assert select(model, "kernel") == {}
        assert [w.filename for w in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert select(model, "head") == {}
            assert select(nnx.clone(model), "bias") != {}


def test_the_name_of_a_collection_takes_nothing_with_a_warning():
    """In Linen ``"params"`` selects parameters; here text is a tag, as of the stream ``params``."""
    for name, kind in {"params": "Param", "batch_stats": "BatchStat"}.items():
        with pytest.warns(UserWarning, match=rf"^'{name}' selects nothing: text is a tag.* write {kind}\.$"):
            assert nnx.state(nnx.Dict(a=nnx.Param(1.0)), name) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nnx.state(nnx.Rngs(params=0), "params") != {}


def test_a_function_of_one_argument_is_no_filter():
    with pytest.raises(InvalidFilterError, match=r"takes \(path, value\), which only_path does not"):

        def only_path(path):
            return True

        nnx.state(nnx.Dict(a=nnx.Param(1)), only_path)


def test_a_type_error_in_a_filter_comes_out():
    with pytest.raises(TypeError, match=r"^of its own$"):

        def fails(path, value):
            raise TypeError("of its own")

        nnx.state(nnx.Dict(a=nnx.Param(1)), fails)
