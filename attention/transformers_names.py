"""Names that differ between the supported versions of `transformers` (the range is in `server.machine.versions`).

Since 5.24 models, layers, mixers and outputs call the cache `cache`. Before, mixers called it `cache_params` and
everything else `past_key_values`. The name is read from a function's signature, so builds between two releases work too.
Rejected: passing the old name everywhere. `transformers` renames it but warns in every layer, and code that replaces a
module receives the new name. Rejected: comparing version numbers, which builds from the main branch do not follow.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import masking_utils

_NAMES = ("cache", "past_key_values")  # newest first


def _cache_name() -> str:
    known = inspect.signature(masking_utils.create_causal_mask).parameters
    name = next((name for name in _NAMES if name in known), None)
    if name is None:
        raise ImportError(
            f"create_causal_mask takes no {' or '.join(_NAMES)}, but {', '.join(known)}",
            name=masking_utils.__name__,
        )
    return name


CACHE = _cache_name()
"""Keyword that passes the cache to models and layers, and the field of their outputs."""
MIXER_CACHES = (CACHE, "cache_params")
"""Keywords that may pass it to mixers."""


def mixer_cache(options: Mapping[str, Any]) -> Any:
    """Return the cache from a mixer's keywords, or None."""
    return next((options[name] for name in MIXER_CACHES if options.get(name) is not None), None)
