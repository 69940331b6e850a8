"""How Sphinx builds the documentation: `make docs` writes it to build/docs."""

import os
import re

from sphinx.ext.autodoc.preserve_defaults import update_defvalue
from sphinx.util import inspect

import nnxlib

project = "nnxlib"
release = version = nnxlib.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["examples", "notebooks", "pictures"]

html_theme = "furo"
html_title = f"nnxlib {release}"
html_copy_source = False
html_show_copyright = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

autosummary_generate = False
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_inherit_docstrings = False  # a List does not document what a list does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings say in words what an argument is
napoleon_attr_annotations = False

# Names of other libraries are shown, and not looked up, which needs a network.
nitpick_ignore_regex = [("py:.*", r"(abc|collections|dataclasses|flax|functools|jax|jnp|numpy|optax|scipy)\..*")]
suppress_warnings = ["ref.ref"]  # labels in docstrings of JAX

# A guide links to files beside docs/, such as ../benchmarks/results/. From the built pages these are reached in the
# repository that .github/workflows names, or else in the checkout that build/docs lies in.
repository = os.environ.get("DOCS_REPOSITORY", "../..")
myst_url_schemes = {"http": None, "https": None, "beside": f"{repository}/{{{{path}}}}"}
myst_heading_anchors = 3


def link_beside(app, docname, source):
    if "/" not in docname:
        source[0] = re.sub(r"\]\(\.\./", "](beside:", source[0])


# Autodoc reads defaults in the source of a transform, which has no parameter `methods` (transforms/classes.py).
TRANSFORMS = [x for name in nnxlib.__all__ if hasattr(x := getattr(nnxlib, name), "_nnx_transform")]
for transform in TRANSFORMS:
    transform.__signature__ = inspect.signature(transform._nnx_transform)


def describe_signature(app, what, name, obj, options, signature, return_annotation):
    if obj in TRANSFORMS:
        signature = re.sub(r"(, \*\*\w+)?\)$", r", methods=None\1)", signature)
    elif what == "class" and issubclass(obj, nnxlib.Pytree):  # autodoc shows the arguments of Pytree.__new__
        update_defvalue(app, obj.__init__, False)
        found = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(found, show_annotation=False)
    return signature, return_annotation


def setup(app):
    app.connect("source-read", link_beside)
    app.connect("autodoc-process-signature", describe_signature)
