"""The table of the calls in a model: rows, inputs and outputs, Variables and totals, estimates, layout of the text."""

import copy
import pickle
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.nn.dtypes import LayerInputError

X = jnp.ones((3, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return self.dropout(self.norm(self.linear(x))) * scale


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)
        self.again = self.block
        self.heads = [nnx.Linear(4, 2, rngs=rngs)]
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x, *, flag=True):
        if flag:
            x = self.again(self.block(x, scale=2.0))
        return {"y": self.encode(x), "x": (x, None)}

    def encode(self, x):
        return self.heads[0](self.scaled(x))

    def scaled(self, x):
        return x * self.scale


class Lifted(nnx.Module):
    """Layers stacked by vmap and run by scan, and others under further transforms."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 5))
        self.block = Block(rngs)

    def run(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    @nnx.jit
    def __call__(self, x):
        x = nnx.remat(lambda block, x: block(x))(self.block, x)
        return self.run(nnx.jit(self.block.linear)(x))


def rows(*args, columns=("path",), **kwargs):
    """The cells of the rows, header and total left out; lines of a cell joined by |."""
    return cells(nnx.tabulate(*args, columns=columns, console_kwargs={"width": 300}, **kwargs))[1:-1]


def cells(text):
    found, current = [], None
    for line in text.split("\n")[1:]:
        if line[:1] in ("│", "┃"):
            parts = [part.strip() for part in line.replace("┃", "│").split("│")[1:-1]]
            current = parts if current is None else [f"{a}|{b}" for a, b in zip(current, parts)]
        elif current is not None:
            found.append([cell.rstrip("|") for cell in current])
            current = None
    return [row[0] if len(row) == 1 else tuple(row) for row in found]


def net():
    return Net(nnx.Rngs(0))


def test_a_row_for_each_call():
    """In the order in which the calls begin, shared Modules under their first path; methods of its own, too."""
    block = ["again", "again/linear", "again/norm", "again/dropout"]
    assert rows(net(), X) == ["", *block, *block, "encode", "scaled", "heads/0"]
    assert rows(net(), X, columns=("type",))[:3] == ["Net", "Block", "Linear"]


def test_inputs_and_outputs():
    """Arrays by dtype and shape, several with their names, one a line, and nested ones in one line."""
    shown = rows(net(), X, columns=("inputs", "outputs"), depth=1)
    assert shown[0] == ("float32[3,4]", "y: float32[3,2]|x: (float32[3,4], None)")
    assert shown[1] == ("- float32[3,4]|scale: 2.0", "float32[3,4]")

    class Many(nnx.Module):
        def __call__(self, *args, **kwargs):
            return [args[0], 1]

    inputs, outputs = rows(
        Many(), jnp.ones(2, "int8"), [X, {"a": X}], nnx.relu, word="w", columns=("inputs", "outputs")
    )[0]
    assert inputs == "- int8[2]|- [float32[3,4], {a: float32[3,4]}]|- relu|word: 'w'"
    assert outputs == "- int8[2]|- 1"


def test_python_values_stay_what_they_are():
    """A flag may steer the forward; shapes may stand for arrays; a model may be abstract."""
    assert rows(net(), X, flag=False) == ["", "encode", "scaled", "heads/0"]
    assert rows(net(), jax.ShapeDtypeStruct((3, 4), "float32"), flag=False) == ["", "encode", "scaled", "heads/0"]
    assert rows(nnx.eval_shape(net), np.ones((3, 4), "float32"), flag=False) == ["", "encode", "scaled", "heads/0"]


def test_methods():
    """Another method than __call__, of the model or of what it calls, is named after its path."""
    assert rows(net(), X, method="encode") == ["encode", "scaled", "heads/0"]
    rnn = nnx.RNN(nnx.SimpleCell(4, 2, rngs=nnx.Rngs(0)))
    assert rows(rnn, X) == ["", "cell/initialize_carry", "cell", "cell/dense_i", "cell/dense_h"]


def test_depth_and_filter():
    """depth limits the length of paths, row_filter says which of the rest; the totals stay."""
    assert rows(net(), X, depth=0) == ["", "encode", "scaled"]
    assert rows(net(), X, depth=1) == ["", "again", "again", "encode", "scaled"]
    assert rows(net(), X, row_filter=lambda row: row.type is nnx.Linear) == ["again/linear", "again/linear", "heads/0"]
    seen = []
    nnx.tabulate(net(), X, row_filter=lambda row: seen.append(row) or True)
    assert [row.call_order for row in seen] == list(range(12))
    assert (seen[1].path, seen[1].type, seen[1].method) == (("again",), Block, "__call__")
    assert seen[1].inputs_repr == "- float32[3,4]\nscale: 2.0"


def test_random_streams_are_left_out():
    """Unless a filter takes them."""
    assert rows(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), X) == [""]


def test_variables():
    """Own ones by name, and the size of all below; each Module shows its once, shared ones at their first path."""
    shown = rows(net(), X, columns=("path", "Param", "BatchStat", "RngState"))
    assert shown[:5] == [
        ("", "scale: float32[4]||42 (168 B)", "8 (32 B)", "2 (12 B)"),
        ("again", "28 (112 B)", "8 (32 B)", "2 (12 B)"),
        ("again/linear", "bias: float32[4]|kernel: float32[4,4]||20 (80 B)", "", ""),
        (
            "again/norm",
            "bias: float32[4]|scale: float32[4]||8 (32 B)",
            "mean: float32[4]|var: float32[4]||8 (32 B)",
            "",
        ),
        ("again/dropout", "", "", "2 (12 B)"),
    ]
    assert shown[5] == ("again", "", "", "")


def test_metadata():
    """Below the Variable that has it, in one line each."""

    class Unknown:
        def __repr__(self):
            return "<unknown>"

    block = Block(nnx.Rngs(0))
    block.linear.kernel.set_metadata({"sharding": ("in", None), "what": Unknown(), "note": "a text " * 9})
    kernel = "kernel: float32[4,4]|out_sharding: ('in', None)|what: <unknown>|note: str"
    assert rows(block, X, columns=("Param",))[1] == f"bias: float32[4]|{kernel}||20 (80 B)"


def test_totals():
    """Whatever rows are shown, the last row and the line below count the whole model, in units of 1000."""
    text = nnx.tabulate(net(), X, depth=0, console_kwargs={"width": 200})
    assert cells(text)[-1] == ("", "", "", "Total", "8 (32 B)", "42 (168 B)", "2 (12 B)")
    assert "Total Parameters: 52 (212 B)" in text
    assert "Total Parameters: 1,001,000 (4.0 MB)" in nnx.tabulate(
        nnx.eval_shape(lambda: nnx.Linear(1000, 1000, rngs=nnx.Rngs(0))), jnp.ones(1000)
    )
    assert "Total Parameters: 0 (0 B)" in nnx.tabulate(nnx.Sequential(nnx.relu), X)


def test_values_of_other_kinds():
    """Variables with pytrees, subclasses of Param and plain arrays have sizes as well."""

    class Own(nnx.Param): ...

    class Odd(nnx.Module):
        def __init__(self):
            self.tree, self.own, self.array = nnx.Param({"a": X, "b": 1}), Own(X), nnx.data(X)

        def __call__(self):
            return None

    names = ("Array", "Own", "Param", "outputs")
    assert rows(Odd(), columns=names)[0] == (
        "array: float32[3,4]||12 (48 B)",
        "own: float32[3,4]||12 (48 B)",
        "tree: {a: float32[3,4], b: 1}||12 (48 B)",
        "None",
    )


def test_columns():
    """In the order that is asked for; a wrong one is an error that lists those there are."""
    assert cells(nnx.tabulate(net(), X, columns=("Param", "path"), depth=0))[0] == ("Param", "path")
    with pytest.raises(ValueError, match=r"no columns \['param'\].*'path'.*'Param'"):
        nnx.tabulate(net(), X, columns=("param",))
    with pytest.raises(ValueError, match=r"needs a column.*'path'.*'Param'"):
        nnx.tabulate(net(), X, columns=())


def test_calls_inside_transforms():
    """Under scan, remat and jit, of functions and of methods, compiled before or not: the same rows."""
    model = Lifted(nnx.Rngs(0))
    model.block.eval()
    expected = ["", "block", "block/linear", "block/norm", "block/dropout", "block/linear", "run", "layers"]
    assert rows(model, X) == expected
    model(X)
    assert rows(model, X) == expected
    assert rows(model, X, columns=("path", "inputs", "Param"))[-1] == (
        "layers", "float32[3,4]", "bias: float32[5,4]|kernel: float32[5,4,4]||100 (400 B)"
    )  # fmt: skip


def test_it_traces_once_and_changes_nothing():
    """Neither statistics nor streams, and the very arrays stay in place."""
    traces = []

    class Counted(Net):
        def __call__(self, x):
            traces.append(1)
            return super().__call__(x)

    model = Counted(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    assert rows(model, X)[0] == ""
    assert len(traces) == 1
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
    model(X)


def test_a_forward_that_fails():
    """The model's own error shows, with the path, and the model and its classes work as before."""
    model = net()
    before = jax.tree.leaves(nnx.state(model))
    for flops in (False, True):
        with pytest.raises(LayerInputError, match=r"again\.linear|Linear"):
            nnx.tabulate(model, jnp.ones((3, 5)), compute_flops=flops)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
    assert model(X)["y"].shape == (3, 2)


def test_a_call_that_fails_and_is_caught():
    """The row of the failed call has no output, and the rows after it are right."""

    class Careful(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(5, 1, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            try:
                return self.first(x)
            except LayerInputError:
                return self.second(x)

    shown = rows(Careful(nnx.Rngs(0)), X, columns=("path", "outputs"))
    assert shown == [("", "float32[3,1]"), ("first", "None"), ("second", "float32[3,1]")]


def test_modules_that_do_not_belong_to_the_model():
    """One made in the forward, and one passed as an input, are rows without Variables of the model."""

    class Maker(nnx.Module):
        def __call__(self, other, x):
            return nnx.Linear(4, 2, rngs=nnx.Rngs(0))(other(x))

    assert rows(Maker(), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), X, columns=("path", "inputs")) == [
        ("", "- Linear|- float32[3,4]"),
        ("<input>/1", "float32[3,4]"),
        ("Linear", "float32[3,4]"),
    ]


def test_flops():
    """Those of XLA: 2mnk for a product and mn for a bias; the backward pass adds two products and a sum."""
    names = ("path", "flops", "vjp_flops")
    linear = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    assert rows(linear, X, columns=names, compute_flops=True, compute_vjp_flops=True) == [("", "54", "154")]
    by_path = dict(rows(net(), X, columns=("path", "flops"), compute_flops=True))
    assert (by_path["again/linear"], by_path["heads/0"]) == ("108", "54")
    assert int(by_path[""].replace(",", "")) > 2 * int(by_path["again"])


def test_flops_of_a_call_that_failed():
    """It has none, where its caller went on; the others have theirs."""

    class Tried(nnx.Module):
        def __init__(self, rngs):
            self.wide, self.linear = nnx.Linear(5, 2, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            try:
                return self.wide(x)
            except LayerInputError:
                return self.linear(x)

    names = ("path", "flops", "vjp_flops")
    shown = rows(Tried(nnx.Rngs(0)), X, columns=names, compute_flops=True, compute_vjp_flops=True)
    assert shown == [("", "54", "154"), ("wide", "", ""), ("linear", "54", "154")]


def test_flops_of_a_scan():
    """The body counts as often as it runs, also nested and on the way back."""
    model = Lifted(nnx.Rngs(0))
    shown = dict(rows(model, X, method="run", columns=("path", "flops"), compute_flops=True))
    per_layer = int(shown["layers"]) // 5
    assert per_layer == 108
    assert 5 * per_layer <= int(shown["run"]) < 6 * per_layer

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.model = Lifted(rngs)

        def __call__(self, x):
            return nnx.fori_loop(0, 3, lambda i, x: self.model.run(x), x)

    path, outer = rows(Twice(nnx.Rngs(0)), X, columns=("path", "flops"), compute_flops=True)[0]
    assert int(outer.replace(",", "")) >= 15 * per_layer


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("unroll", [2, 3, 5, 8, True])
def test_flops_do_not_depend_on_unroll(length, unroll):
    """However many copies of the body the program holds."""

    class Looped(nnx.Module):
        def __init__(self, unroll):
            self.linear, self.unroll = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)), unroll

        def __call__(self, x):
            return jax.lax.scan(lambda x, _: (self.linear(x), None), x, length=length, unroll=self.unroll)[0]

    def flops(unroll):
        return int(rows(Looped(unroll), X, columns=("path", "flops"), compute_flops=True)[0][1])

    each = 2 * X.shape[0] * 4 * 4
    assert length * each <= flops(unroll) <= length * each + 4  # of the counter of the loop, which is not always there
    assert abs(flops(unroll) - flops(1)) <= 4


def test_the_text():
    """A title in the middle, lines of one length, and wrapped to the width that is asked for."""
    text = nnx.tabulate(net(), X, console_kwargs={"width": 70}, table_kwargs={"title": "A title"}, column_kwargs={})
    lines = text.split("\n")
    assert lines[0].strip() == "A title"
    assert {len(line) for line in lines[1:-3]} == {70}
    assert lines[-3] == ""
    assert len(lines[-2]) <= 70
    wide = nnx.tabulate(net(), X, console_kwargs={"width": 500, "force_terminal": True})
    assert "│ kernel: float32[4,4] │" in wide
    assert "Net Summary" in wide


def test_what_has_no_method():
    """An object that cannot be called needs a method."""

    class Silent(nnx.Module):
        pass

    with pytest.raises(TypeError, match="Silent has no '__call__'"):
        nnx.tabulate(Silent(), X)
    with pytest.raises(TypeError, match="Net has no 'decode'"):
        nnx.tabulate(net(), X, method="decode")


def test_lifted_modules_show_how_many_they_are():
    """A row of stacked layers says how many, also of those in it without Variables, and counts the FLOPs of all."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.block, self.identity = nnx.Linear(4, 4, rngs=rngs), Identity()

        def __call__(self, x):
            return self.identity(self.block(x))

    class Identity(nnx.Module):
        def __call__(self, x):
            return 2 * x

    class Nested(nnx.Module):
        def __init__(self, rngs):
            self.stack = nnx.Stack(lambda rngs: Layer(rngs), 3, rngs=rngs)
            self.heads = nnx.vmap(lambda key: nnx.Linear(4, 2, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 5))

        def __call__(self, x):
            x = nnx.remat(lambda stack, x: stack(x))(self.stack, x)
            return nnx.vmap(lambda head, x: head(x), in_axes=(0, None))(self.heads, x)

    options = {"compute_flops": True, "compute_vjp_flops": True, "columns": ("path", "type", "outputs", "flops")}
    shown = rows(Nested(nnx.Rngs(0)), X, **options)
    assert [row[:2] for row in shown] == [
        ("", "Nested"),
        ("stack", "Stack"),
        ("stack/layers", "Layer ×3"),
        ("stack/layers/block", "Linear ×3"),
        ("stack/layers/identity", "Identity ×3"),
        ("heads", "Linear ×5"),
    ]
    assert (shown[3][3], shown[4][3], shown[5][3]) == ("324", "36", "270")
    assert shown[5][2] == "float32[3,2]"
    assert 324 + 36 + 270 <= int(shown[0][3]) < 800

    backward = dict(rows(Nested(nnx.Rngs(0)), X, columns=("path", "vjp_flops"), compute_vjp_flops=True))
    backward = {path: int(count.replace(",", "")) for path, count in backward.items()}
    assert backward["stack/layers/block"] > 2 * 324
    assert backward["stack"] >= backward["stack/layers"] > backward["stack/layers/block"]
    assert backward[""] >= backward["stack"] + backward["heads"] > 1.4 * backward["stack"]

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.outer = nnx.vmap(lambda key: nnx.Stack(make, 3, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 2))

        def __call__(self, x):
            return nnx.vmap(lambda stack, x: stack(x), in_axes=(0, None))(self.outer, x)

    def make(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    assert rows(Twice(nnx.Rngs(0)), X, columns=("type",)) == ["Twice", "Stack ×2", "Linear ×6"]


def test_reused_modules():
    """A layer that is called three times has three rows, with its Variables in the first; the FLOPs are of all."""

    class Shared(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.linear(self.linear(x)))

    shown = rows(Shared(nnx.Rngs(0)), X, columns=("path", "flops", "Param"), compute_flops=True)
    assert shown == [
        ("", "288", "16 (64 B)"),
        ("linear", "96", "kernel: float32[4,4]||16 (64 B)"),
        *[("linear", "96", "")] * 2,
    ]


def test_html():
    """A notebook shows the same cells as HTML, well formed and escaped, with nothing from elsewhere; it is a string."""

    class Odd(nnx.Module):
        def __call__(self, x, word):
            return x

    text = nnx.tabulate(Odd(), X, word='<b>&"', table_kwargs={"title": "<i>"})
    assert isinstance(text, str)
    page = xml.etree.ElementTree.fromstring(text._repr_html_())
    assert page.find(".//caption").text == "<i>"
    assert [cell.text for cell in page.findall(".//td")][2].endswith("word: '<b>&\"'")
    assert "http" not in text.html
    assert "<script" not in text.html

    model = net()
    table = nnx.tabulate(model, X, console_kwargs={"width": 400}, compute_flops=True)
    page = xml.etree.ElementTree.fromstring(table.html)
    written = [tuple((cell.text or "").replace("\n", "|") for cell in row) for row in page.findall(".//tr")]
    assert written == cells(table)
    assert pickle.loads(pickle.dumps(table)).html == copy.copy(table).html == table.html


def test_stacked_parameters_beside_broadcast_ones():
    """What some of the Variables of a layer are sliced along counts, though others are shared by all layers."""

    class Mixed(nnx.Module):
        def __init__(self):
            self.layers = Layer(nnx.BatchStat(jnp.zeros(4)), nnx.Param(jnp.ones((6, 4))))

        def __call__(self, x):
            axes = nnx.StateAxes({nnx.Param: 0, ...: None})
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)(x, self.layers)

    class Layer(nnx.Module):
        def __init__(self, shift, scale):
            self.shift, self.scale = shift, scale

        def __call__(self, x):
            return x * self.scale + self.shift

    assert rows(Mixed(), X, columns=("type",)) == ["Mixed", "Layer ×6"]


def test_the_last_row_has_the_total_of_estimates():
    """Also where the row of the whole is not shown."""
    columns = ["path", "outputs", "flops", "Param"]
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    text = nnx.tabulate(model, jnp.ones((3, 4)), columns=columns, compute_flops=True, row_filter=lambda row: row.path)
    assert cells(text)[-1] == ("", "Total", "216", "40 (160 B)")


@pytest.mark.parametrize("given", [nnx.Linear, len, 3], ids=["class", "function", "number"])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(
        TypeError, match=r"takes a Module, made or abstract, and then its inputs; got (the class Linear|a )"
    ):
        nnx.tabulate(given, jnp.ones((3, 4)))


def test_what_is_run_again_and_again_counts_as_often():
    """The cell of an RNN, a layer mapped over a batch, one in nested loops: rows and the whole agree."""

    class Looped(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.SimpleCell(4, 8, rngs=rngs))
            self.head = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        def __call__(self, x):
            again = nnx.scan(lambda y, head: head(y), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3)
            return nnx.vmap(again, in_axes=(0, None))(self.rnn(x)[:, -1], self.head)

    found = rows(Looped(nnx.Rngs(0)), jnp.ones((2, 16, 4)), columns=("path", "type", "flops"), compute_flops=True)
    flops = {(path, kind): int(flops.replace(",", "")) for path, kind, flops in found}
    assert flops["head", "Linear ×6"] == 2 * 3 * (2 * 8 * 8)
    assert flops["rnn/cell/dense_h", "Linear ×16"] == pytest.approx(16 * 2 * (2 * 8 * 8), rel=0.1)
    assert flops["rnn/cell", "SimpleCell ×16"] == pytest.approx(flops["rnn", "RNN"], rel=0.01)


def test_a_table_without_inputs():
    """The error of the call, and what to add."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inputs'") as caught:
        nnx.tabulate(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert caught.value.__notes__[-1] == "Pass example inputs: nnx.tabulate(model, x)."
