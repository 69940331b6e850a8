"""Finding objects without a table: everything below one, and the path by which running code reaches another."""

import threading

import nnxlib as nnx
from nnxlib.core.finding import locate, reachable


def make_model():
    return nnx.Dict(layers=[nnx.Dict(w=nnx.Param(1.0)), nnx.Dict(w=nnx.Param(2.0))])


def test_locate_starts_at_the_outermost_variable():
    """A local variable of a calling frame, and the path from there."""
    model = make_model()

    def inner(v):
        return locate(v)

    assert inner(model.layers[1].w) == "model.layers[1].w"


def test_locate_prefers_names_without_an_underscore():
    """A notebook keeps its outputs under names such as `_` and `_5`, which come first."""
    _5 = make_model()
    model = _5
    assert locate(model.layers[1].w) == "model.layers[1].w"
    del model
    assert locate(_5.layers[1].w) == "_5.layers[1].w"


def test_locate_in_containers_and_by_class():
    """Objects in plain lists and dicts are found too; `self` is written as its class."""
    models = {"a": [make_model()]}
    assert locate(models["a"][0].layers[0].w) == "models.a[0].layers[0].w"  # and not the variables of pytest

    class Trainer(nnx.Pytree):
        def __init__(self):
            self.model = make_model()

        def run(self):
            return locate(self.model.layers[0].w)

    assert (lambda trainer: trainer.run())(Trainer()) == "trainer.model.layers[0].w"
    assert Trainer().run() == "Trainer.model.layers[0].w"


def test_locate_what_nobody_refers_to():
    """None for an object that no frame reaches."""
    assert (lambda: locate(nnx.Param(1.0)))() is None


def test_locate_ends_in_cyclic_and_odd_frames():
    """Cycles of nodes and lists, and strange objects in frames, do not keep it from answering."""
    model = make_model()
    model.itself = model
    odd = [model]
    odd.append(odd)

    class Strange:
        def __getattr__(self, name):
            raise RuntimeError(name)

        __eq__ = __hash__ = None

    strange = Strange()
    target = nnx.Param(3.0)
    odd.append([target])
    assert locate(target) == "target"
    del strange


def test_locate_in_another_thread():
    """Only the frames of the running thread are looked at."""
    model = make_model()
    found = []

    def work(v):
        found.append(locate(v))

    thread = threading.Thread(target=work, args=(model.layers[0].w,))
    thread.start()
    thread.join()
    assert found == ["v"]


def test_reachable_gives_first_paths_in_order():
    """Each node and Variable once, parents first, keys in order."""
    model = make_model()
    model.again = model.layers
    assert [path for path, _ in reachable(model, set())] == [
        (),
        ("again",),
        ("again", 0),
        ("again", 0, "w"),
        ("again", 1),
        ("again", 1, "w"),
    ]
