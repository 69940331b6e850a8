"""Random nests of transforms beside raw JAX; on eight CPU devices, in a process of its own."""

import os
import pathlib
import subprocess
import sys


def test_on_eight_devices():
    """The tests in eight_devices_nests.py pass where there are eight devices."""
    path = pathlib.Path(__file__).with_name("eight_devices_nests.py")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
