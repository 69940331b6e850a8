"""The object graph: Variables, nodes, filters, States, and the table that they are packed into."""

from . import pytrees as pytrees  # registers nodes with JAX
