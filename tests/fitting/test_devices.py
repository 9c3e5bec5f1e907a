# SPDX-License-Identifier: Apache-2.0
"""Data that are sharded over tasks or ratings, on devices of one process and of two."""

from pathlib import Path
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_devices_give_the_fit_of_one(processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = str(Path(__file__).parent / "on_devices.py")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(number), str(processes), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(processes)
    ]
    for process in started:
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
        assert output.count("e-") == 6, output
