"""Checks of options that look at the machine: files of keys, certificates, optional packages."""

import importlib.util
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from server.options.flag import OptionsError

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # OpenTelemetry's own
_EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}  # protocol -> the last part of its package's name


def check_key(name: str, key: str) -> None:
    """Refuse a key that no header can carry.

    Raises:
        OptionsError: it is empty or has white space.
    """
    if key.split() != [key]:
        raise OptionsError(f"{name} is empty or has white space; give a key without any")


def read_keys(path: Path, name: str = "--api-key-file") -> tuple[str, ...]:
    """Read a file of keys: one per line; empty lines and those that begin with # are passed over.

    Raises:
        OptionsError: it cannot be read, or a line is no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{name} {str(path)!r} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for number, key in enumerate(keys, start=1):
        if key.split() != [key]:
            raise OptionsError(f"{name} {str(path)!r}: key {number} has white space in it")
    return tuple(keys)


MIN_KEY_BYTES = 32


def read_cluster_key(path: Path) -> bytes:
    """Read the secret that all nodes of a service share.

    Raises:
        OptionsError: it cannot be read, is too short to be one, or others can read it too.
    """
    name = f"--cluster-key-file {str(path)!r}"
    try:
        key, status = path.read_bytes().strip(), path.stat()
    except OSError as error:
        raise OptionsError(f"{name} cannot be read: {error.strerror}") from error
    if status.st_mode & 0o077:
        raise OptionsError(
            f"{name} can be used by others than its owner (mode {stat.S_IMODE(status.st_mode):o}); run chmod 600 on it"
        )
    if len(key) < MIN_KEY_BYTES:
        raise OptionsError(
            f"{name} has {len(key)} bytes; a key has {MIN_KEY_BYTES} or more: make one with `openssl rand -hex 32`"
        )
    return key


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Load a certificate now: a service that cannot use it should not have loaded a model first.

    Raises:
        OptionsError: a file is missing, or is not what it should be.
    """
    if certfile is None:
        if keyfile is not None:
            raise OptionsError("--ssl-keyfile needs a certificate: give --ssl-certfile too")
        return
    for flag, name in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if name is not None and not Path(name).is_file():
            raise OptionsError(f"{flag} is {name!r}, which is not a file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With a password at hand OpenSSL does not ask the terminal for one.
        context.load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise OptionsError(
            f"--ssl-certfile {certfile!r} cannot be used: {error}; it must be a certificate in PEM form "
            "and --ssl-keyfile its key, without a password"
        ) from error


def check_traces(environment: Mapping[str, str]) -> str:
    """Return the protocol that the environment asks for, after a check that spans can be sent with it.

    Raises:
        OptionsError: naming the missing package, or the unknown protocol.
    """
    protocol = environment.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in _EXPORTERS:
        raise OptionsError(f"{PROTOCOL_VARIABLE} is {protocol!r}; it must be one of {', '.join(_EXPORTERS)}")
    ending = _EXPORTERS[protocol]
    for module, package in (
        ("opentelemetry.sdk", "opentelemetry-sdk"),
        (f"opentelemetry.exporter.otlp.proto.{ending}", f"opentelemetry-exporter-otlp-proto-{ending}"),
    ):
        if not _is_installed(module):
            raise OptionsError(
                f"--otlp-traces-endpoint needs the package {package}, which is not installed: "
                "pip install 'wideep[otel]'"
            )
    return protocol


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
