"""What DeepEP's `ElasticBuffer` has beside expert parallelism, refused by name: nobody should wait for it to work."""

from typing import Any, NoReturn

_ENGRAM, _PIPELINE, _GATHER = "engram", "pipeline sends", "all-gather and reduce-scatter"


def _refusal(name: str, family: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"ElasticBuffer.{name}: DeepEP's {family} is not part of this package; dispatch and combine are. "
            "Use torch.distributed for it"
        )

    refuse.__name__, refuse.__doc__ = name, f"Raise NotImplementedError: {family} is not here."
    return staticmethod(refuse)


class RefusedCalls:
    """Every name that is refused, as a static method that raises NotImplementedError."""

    engram_write = _refusal("engram_write", _ENGRAM)
    engram_fetch = _refusal("engram_fetch", _ENGRAM)
    get_engram_storage_size_hint = _refusal("get_engram_storage_size_hint", _ENGRAM)
    pp_set_config = _refusal("pp_set_config", _PIPELINE)
    pp_send = _refusal("pp_send", _PIPELINE)
    pp_recv = _refusal("pp_recv", _PIPELINE)
    get_pp_buffer_size_hint = _refusal("get_pp_buffer_size_hint", _PIPELINE)
    create_agrs_session = _refusal("create_agrs_session", _GATHER)
    destroy_agrs_session = _refusal("destroy_agrs_session", _GATHER)
    agrs_new_session = _refusal("agrs_new_session", _GATHER)
    agrs_set_config = _refusal("agrs_set_config", _GATHER)
    agrs_get_inplace_tensor = _refusal("agrs_get_inplace_tensor", _GATHER)
    all_gather = _refusal("all_gather", _GATHER)
    get_agrs_num_max_session_bytes = _refusal("get_agrs_num_max_session_bytes", _GATHER)
    get_agrs_buffer_size_hint = _refusal("get_agrs_buffer_size_hint", _GATHER)
