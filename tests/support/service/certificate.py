"""A self-signed certificate for 127.0.0.1, made by the `openssl` program."""

import subprocess
from pathlib import Path


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """Write a certificate and its key. Return both paths."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=127.0.0.1",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key
