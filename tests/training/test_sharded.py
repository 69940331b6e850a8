"""Training across devices, on eight CPU devices in a process of its own."""

import pathlib


def test_on_eight_devices(run_on_eight_devices):
    """The tests in eight_devices_training.py pass where there are eight devices."""
    run_on_eight_devices(pathlib.Path(__file__).with_name("eight_devices_training.py"))
