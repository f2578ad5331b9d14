"""Private services of `LLM`, with processes that share their imports."""

from server.clients.private_service import PrivateService
from tests.support.service.forked import WIDEEP, importing_once


def import_once() -> None:
    """Let private services that this process starts import torch once, and fork their children."""
    defaults = PrivateService.__init__.__kwdefaults__
    assert defaults is not None
    defaults["command"] = (*importing_once(WIDEEP), "serve")
