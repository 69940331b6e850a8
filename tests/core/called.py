"""Modules whose calls are watched, and the name scopes under which a program has them."""

import re

import jax
import jax.numpy as jnp

import nnxlib as nnx


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return jnp.sin(self.w * x)

    def helper(self, x):
        return jnp.cos(x)

    def _private(self, x):
        return jnp.tan(x)


class Block(nnx.Module):
    def __init__(self):
        self.layers = [Layer(), Layer()]
        self.heads = {"a": Layer()}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x)


class Net(nnx.Module):
    def __init__(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)


def scopes(f, *args, **kwargs):
    """The name scope of each primitive that a jitted function traces, in order: {'sin': [scope, ...]}."""
    text = nnx.jit(f).lower(*args, **kwargs).compile().as_text()
    names = re.findall(r'op_name="(jit\(.*?)"', text)
    found = {}
    for name in names:
        *scope, primitive = name.split("/")
        scope = "/".join(part for part in scope if not re.fullmatch(r"jit\(.*\)|checkpoint|rematted_computation", part))
        if scope not in found.setdefault(primitive, []):
            found[primitive].append(scope)
    return found


_ADDED = {"cond", "while", "body", "closed_call", "eval_jaxpr", "branch_0_fun", "branch_1_fun"}


def plain(scope):
    """A scope without what JAX adds for its transforms."""
    scope = re.sub(r"(?:transpose|jvp|vmap|rematted_computation|checkpoint)\(([^()]*)\)", r"\1", scope)
    scope = re.sub(r"(?:transpose|jvp|vmap)\(([^()]*)\)", r"\1", scope)
    return "/".join(p for p in scope.split("/") if p and p not in _ADDED)


# A transform of a function of a Module and an array, by name.
INSIDE = {
    "grad": lambda f, m, x: nnx.grad(lambda m, x: f(m, x).sum(), argnums=1)(m, x),
    "jit": lambda f, m, x: nnx.jit(f)(m, x),
    "remat": lambda f, m, x: nnx.remat(f)(m, x),
    "cond": lambda f, m, x: nnx.cond(True, f, f, m, x),
    "vmap": lambda f, m, x: nnx.vmap(f, in_axes=(None, 0))(m, x),
    "fori_loop": lambda f, m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], f(*c)), (m, x))[1],
    "scan": lambda f, m, x: nnx.scan(lambda x, m: f(m, x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(
        x, m
    ),
    "while_loop": lambda f, m, x: nnx.while_loop(lambda c: c[1].sum() < 0, lambda c: (c[0], f(*c)), (m, x))[1],
    "switch": lambda f, m, x: nnx.switch(1, [f, f], m, x),
    "vjp": lambda f, m, x: nnx.vjp(f, m, x)[0],
    "jvp": lambda f, m, x: nnx.jvp(lambda x: f(m, x), (x,), (x,))[1],
    "linearize": lambda f, m, x: nnx.linearize(lambda x: f(m, x), x)[1](x),
    "jacrev": lambda f, m, x: nnx.jacrev(lambda x: f(m, x).sum())(x),
    "jacfwd": lambda f, m, x: nnx.jacfwd(lambda x: f(m, x).sum())(x),
    "checkify": lambda f, m, x: nnx.checkify(f)(m, x)[1],
    "lift": lambda f, m, x: nnx.lift(jax.checkpoint)(f)(m, x),
    "map_variables": lambda f, m, x: nnx.map_variables(f, nnx.Param, lambda state: state)(m, x),
    "shard_map": lambda f, m, x: nnx.shard_map(
        f, mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), in_specs=jax.P(), out_specs=jax.P()
    )(m, x),
    "capture": lambda f, m, x: nnx.capture(f, nnx.Intermediate)(m, x)[0],
    "grad in jit in remat": lambda f, m, x: nnx.remat(
        lambda m, x: nnx.jit(lambda m, x: nnx.grad(lambda m, x: f(m, x).sum(), argnums=1)(m, x))(m, x)
    )(m, x),
}
