"""JAX's transformations for functions of Modules, all on one engine (:mod:`nnxlib.transforms.lift`)."""
