"""Models across processes."""

import os
import pathlib
import socket
import subprocess
import sys


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
