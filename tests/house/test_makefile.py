"""`make serve` on a terminal: Ctrl-C reaches only the service, and make exits with its status."""

import fcntl
import os
import subprocess
import termios
from pathlib import Path

import pytest

from tests.house.test_docs import ROOT
from tests.support.service.service_processes import TIME_OUT_S, wait_until

SERVICE = """#!/bin/sh
trap 'echo stopped; exit {status}' INT
echo up
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(("status", "of_make"), [(0, 0), (1, 2)])
def test_ctrl_c_ends_make_serve_with_what_the_service_ends_with(
    status: int, of_make: int, tmp_path: Path
) -> None:
    program = tmp_path / "wideep"
    program.write_text(SERVICE.format(status=status))
    program.chmod(0o755)
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        ["make", f"--directory={ROOT}", "serve", "RUNTIME=", f"BIN={tmp_path}"], stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    written = b""

    def has_written(text: bytes) -> bool:
        nonlocal written
        if text not in written:
            written += os.read(ours, 65536)  # possibly only a part
        return text in written

    try:
        wait_until(lambda: has_written(b"up\r\n"), lambda: written.decode())
        os.write(ours, b"\x03")  # Ctrl-C on a terminal
        assert process.wait(TIME_OUT_S) == of_make
        wait_until(lambda: has_written(b"Error" if status else b"stopped\r\n"), lambda: written.decode())
        assert (b"Error" in written) is (status != 0), written
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
