"""Pictures of object graphs: what is in a box, where boxes stand, what is shared, and that the text is an SVG."""

import itertools
import shutil
import subprocess
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlib as nnx
from nnxlib.inspection.picture import MOST_BOXES

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SVG = "{http://www.w3.org/2000/svg}"


class Layer(nnx.Module):
    def __init__(self, n=4):
        self.kernel, self.bias = nnx.Param(np.zeros((n, n), "float32")), None
        self.size, self.act = n, nnx.relu


class Model(nnx.Module):
    def __init__(self):
        self.layers = [Layer() for _ in range(12)]
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.heads = {"a": Layer(2), "sizes": [1, 2]}


def parse(model, **options):
    return xml.etree.ElementTree.fromstring(nnx.draw(model, **options).svg)


def texts(model, **options):
    """The lines of text, joined from their pieces, tooltips left out."""
    found = []
    for text in parse(model, **options).iter(f"{SVG}text"):
        pieces = [text.text or "", *((x.text or "") + (x.tail or "") for x in text if x.tag != f"{SVG}title")]
        found.append("".join(pieces).strip())
    return found


def paths(model, kind):
    return [x.get("d") for x in parse(model).iter(f"{SVG}path") if x.get("class") == kind]


def boxes(root):
    """(x, y, width, height) of each box, without the shadows of stacks."""
    found = [
        tuple(float(x.get(name)) for name in ("x", "y", "width", "height"))
        for x in root.iter(f"{SVG}rect")
        if x.get("class") == "box"
    ]
    shadows = {(x - 8, y - 8) for x, y, *_ in found} & {(x, y) for x, y, *_ in found}
    hidden = {(x + d, y + d) for x, y in shadows for d in (4, 8)}
    return [box for box in found if box[:2] not in hidden]


def test_a_box_for_each_module():
    """With its name and class, what it holds, its Variables with shapes, and its settings but for None."""
    shown = texts(Model())
    for line in (
        "Model",
        "Param 204 (816 B)  BatchStat 8 (32 B)",
        "norm BatchNorm",
        "mean BatchStat(float32[4])",
        "heads.a Layer",
        "kernel Param(float32[2, 2])",
        "size=2, act=relu",
        "heads.sizes=List([1, 2])",
        "dropout Dropout",
        "rngs RngStream",
    ):
        assert line in shown
    assert not any(word in line for line in shown for word in ("None", "promote_dtype", "broadcast_dims"))
    assert "size=2, act=relu" not in texts(Model(), settings=False)


def test_equal_layers_are_one_box():
    """Twelve layers are a stack with its number; layers that differ have boxes of their own."""
    shown = texts(Model())
    assert "layers[0…11] Layer" in shown
    assert "×12" in shown
    assert len(boxes(parse(Model()))) == 5
    mixed = nnx.Dict(layers=[Layer(), Layer(), Layer(3)], scales=[nnx.Param(1.0)] + [nnx.Param(2.0) for _ in range(3)])
    shown = texts(mixed)
    assert {"layers[0…1] Layer", "×2", "layers[2] Layer", "scales[0] Param(1.0)"} <= set(shown)
    assert "scales[1…3] Param(2.0) ×3" in shown


def test_boxes_do_not_overlap():
    """In a model with boxes of many sizes, and each is inside of the picture."""
    model = Model()
    model.deep = nnx.Sequential(*(nnx.Sequential(*(Layer(i + j) for j in range(i))) for i in range(4)))
    model.attention = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0))
    root = parse(model)
    width, height = float(root.get("width")), float(root.get("height"))
    found = boxes(root)
    assert len(found) > 15
    for x, y, w, h in found:
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(found, 2):
        assert x + w < u or u + s < x or y + h < v or v + t < y


def test_text_fits_into_its_box():
    """By the width of the characters of the font, wide ones too; long lines are cut, with the whole in a tooltip."""
    model = nnx.Dict(w=nnx.Param(jnp.zeros(3), note="x" * 80), n="名" * 60, **{"k" * 90: Layer()})
    root = parse(model)
    assert max(len(text) for text in texts(model)) <= 46 + 1 + 5
    tooltips = [x.text for x in root.iter(f"{SVG}title")]
    assert any("x" * 80 in text for text in tooltips)


_MEASURE = """
const svg = document.querySelector('svg'), view = svg.viewBox.baseVal;
const all = [...svg.querySelectorAll('text, rect, path')].map(x => [x, x.getBBox()]);
const beyond = all.filter(([x, b]) => b.x < 0 || b.y < 0 || b.x + b.width > view.width || b.y + b.height > view.height);
const texts = all.filter(([x, b]) => x.tagName == 'text');
const meets = (a, b) => Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1
    && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 3;
const overlapping = texts.filter(([x, a], i) => texts.some(([y, b], k) => k < i && meets(a, b)));
const boxes = [...document.querySelectorAll('rect.box')].map(x => x.getBBox());
const outside = [...document.querySelectorAll('text')].filter(text => {
    const t = text.getBBox();
    const around = boxes.filter(b => b.x <= t.x && t.x < b.x + b.width && b.y <= t.y + 4 && t.y < b.y + b.height);
    return around.length > 0 && !around.some(b => t.x + t.width <= b.x + b.width);
}).map(text => text.textContent);
const names = pairs => pairs.map(([x, b]) => x.textContent || x.getAttribute('d'));
document.body.textContent = 'measured: ' + JSON.stringify([outside, names(beyond), names(overlapping)]);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="measures text in Chromium")
def test_text_fits_into_its_box_in_a_browser(tmp_path):
    """The same, measured where the picture is shown; nothing is beyond its edge, and no two texts overlap."""
    model = Model()
    model.attention = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0))
    model.note, model.tied, model.wide = "x" * 100, model.norm, "名" * 60
    model.heads["b"] = nnx.List([Layer(3), model, model.layers[7]])
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{nnx.draw(model).svg}<script>{_MEASURE}</script></body>")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    ran = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    assert "measured: [[],[],[]]" in ran.stdout, ran.stdout


def test_shared_objects_and_cycles():
    """Each second reference is a row with an arrow to the first, also between Variables and back to the root."""
    model = Model()
    assert not paths(model, "same")
    model.tied, model.me, model.w = model.heads["a"], model, model.norm.scale
    shown = texts(model)
    assert {"tied = heads.a", "me = <root>", "w = norm.scale", "the same object"} <= set(shown)
    assert len(paths(model, "head")) == 3
    assert len(paths(model, "same")) == 3 + 1  # and the legend


def test_references_into_a_stack():
    """To a layer that is drawn as one of many, and to its Variable: the arrows go to the layer that is drawn."""
    model = nnx.Dict(layers=[Layer() for _ in range(5)])
    model.last, model.w = model.layers[4], model.layers[3].kernel
    (x, y, _, _), *_ = (box for box in boxes(parse(model)) if box[0] > 100)
    heads = paths(model, "head")
    assert len(heads) == 2
    for head in heads:
        to_x, to_y = map(float, head[1:].split("l")[0].split())
        assert to_x == pytest.approx(x, abs=1)
        assert y < to_y < y + 80


def test_abstract_and_traced_models():
    """Shapes are all that is needed."""
    seen = []
    nnx.jit(lambda model: seen.append(nnx.draw(model).svg))(Model())
    assert seen == [nnx.draw(nnx.eval_shape(Model)).svg]


def test_huge_models_are_folded():
    """Boxes are as many as can be looked at, and those that are left out are counted; depth sets another limit."""
    model = nnx.Sequential(*(nnx.Sequential(*(Layer(10 * i + j) for j in range(20))) for i in range(20)))
    assert len(boxes(parse(model))) == 21
    assert sum("more inside" in line for line in texts(model)) == 20
    assert len(boxes(parse(model, depth=2))) == 421 > MOST_BOXES
    assert len(boxes(parse(model, depth=0))) == 1
    wide = nnx.Dict({f"k{i}": nnx.Param(jnp.zeros(())) for i in range(200)})
    assert "… and 136 more" in " ".join(texts(wide))


def test_deep_models():
    """A chain of 2,000 Modules is drawn as far as there is room."""
    model = Layer()
    for i in range(2000):
        model = nnx.Dict(next=model) if i % 2 else nnx.Sequential(model)
    assert 5 < len(boxes(parse(model))) < MOST_BOXES


def test_hostile_text():
    """Markup, control characters and halves of characters do not break the file."""
    model = nnx.Dict({"</text><script>alert(1)</script>": Layer(), "a": nnx.static("\x00\ud800<&\"'>")})
    model["\x1b]"] = nnx.Param(1.0, note="]]>")
    root = parse(model)
    assert root.find(f".//{SVG}script") is None
    assert not [x for x in root.iter() if x.tag == "script"]
    class_ = type("Vär<1>", (nnx.Param,), {})
    assert "Vär<1>" in " ".join(texts(nnx.Dict(v=class_(1.0))))


def test_saving_and_showing(tmp_path):
    """A file, a string for SVG and one for HTML, and a short repr."""
    picture = nnx.draw(Model())
    picture.save(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text(encoding="utf-8") == picture.svg + "\n"
    assert picture._repr_svg_() == picture.svg
    assert picture.svg in picture._repr_html_()
    assert repr(picture) == f"<Picture of Model, {picture.width} × {picture.height}>"
    assert "http" not in picture.svg.replace("http://www.w3.org/2000/svg", "")
    assert picture.svg == nnx.draw(Model()).svg


def test_what_cannot_be_drawn():
    """A value, a Variable, an object that was never made, and a negative depth."""
    for value in (3, nnx.Param(1.0), jax.numpy.zeros(3), object.__new__(Layer)):
        with pytest.raises(TypeError, match=r"nnx.draw draws Modules and other nodes, .*; got a \w+"):
            nnx.draw(value)
    with pytest.raises(ValueError, match=r"depth=-1"):
        nnx.draw(Model(), depth=-1)
