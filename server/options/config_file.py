"""The YAML file of --config: options by name, as vLLM and SGLang write theirs."""

from pathlib import Path
from typing import Any

import yaml

from server.options.flag import OptionsError


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the options of a file by the names that it gives them; null is not said.

    Raises:
        OptionsError: it cannot be read, is no YAML, or is no mapping from names.
    """
    name = f"--config {str(path)!r}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{name} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        first = str(error).replace("\n", " ")
        raise OptionsError(f"{name} is not YAML: {first}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise OptionsError(f"{name} is no mapping; give lines such as `max-model-len: 4096`")
    if "config" in content:
        raise OptionsError(f"{name} names another file under config; put all options into one")
    return content
