"""Models across processes."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap


def test_in_two_processes():
    """The tests in two_processes.py pass in two processes that share their devices."""
    path = pathlib.Path(__file__).with_name("two_processes.py")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **flags, "COORDINATOR": coordinator, "PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:  # if one fails, the other may wait for it
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)


PROGRAM = """
    import collections
    import jax, jax.numpy as jnp
    import nnxlib as nnx

    found = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: found.update([name.rpartition("/")[2]]))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.norm = nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.drop, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return self.out(self.drop(nnx.relu(self.norm(self.conv(x)))))

    @nnx.jit
    def step(net, x):
        loss, grads = nnx.value_and_grad(lambda net: net(x).mean())(net)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net, nnx.Param), grads))
        return loss

    net, x = Net(nnx.Rngs(0)), jnp.ones((2, 4, 4, 2))
    step(net, x)
    net(x)
    layers = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(nnx.Rngs(0).split(3))
    y = nnx.scan(lambda y, layer: layer(y), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(jnp.ones(4), layers)
    nnx.cond(y[0] > 0, lambda out, y: out(y), lambda out, y: y, net.out, y)

    parts = [nnx.Linear(4, n, rngs=nnx.Rngs(n)) for n in range(1, 6)]
    a, b, c, d, e = parts

    class Losses:  # each method may read a setting, so what it refers to is captured before the trace
        def first(self, x): return a(x).sum() * a.out_features
        def second(self, x): return b(x).sum() * b.out_features
        def third(self, x): return c(x).sum() * c.out_features
        def __add__(self, x): return d(x).sum() * d.out_features
        def __mul__(self, x): return e(x).sum() * e.out_features

    losses = Losses()
    nnx.jit(lambda x: losses.first(x) + losses.second(x) + losses.third(x) + (losses + x) + losses * x)(jnp.ones(4))
    print(found["cache_hits"], found["cache_misses"])
"""


def test_a_second_process_finds_all_programs_in_the_cache_of_jax(tmp_path):
    """Nothing in what is compiled depends on addresses, or on how strings are hashed."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    (program := tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program)]
    (again, compiled), (found, anew) = [
        subprocess.run(
            command, env={**os.environ, **settings, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.split()
        for seed in "12"
    ]
    assert int(compiled) > 20
    assert (int(found), int(anew)) == (int(again) + int(compiled), 0)
