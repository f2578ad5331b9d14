"""Describe the served checkpoint for /api/tags and /api/show, from its own files, read once at the start."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from server.api.ollama.answer import timestamp
from server.api.parsers.registry import NONE
from server.api.served import ServedModel
from server.machine.model_fields import experts_per_token, num_experts

_WEIGHTS = "*.safetensors"
_NEVER = "9999-12-31T23:59:59Z"  # when the model leaves memory; clients require a time
_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_new_tokens": "num_predict"}  # -> Ollama's names
_SIZES = {  # key of config.json -> Ollama's name, after the architecture's
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A checkpoint in Ollama's form."""

    model: ServedModel
    config: dict[str, Any]  # config.json, with the text model's configuration merged into it
    num_bytes: int  # of weights
    digest: str  # SHA-256 of the configuration and of the names and sizes of the weight files

    @classmethod
    def read(cls, model: ServedModel) -> "ModelCard":
        """Read a checkpoint's files without opening the weights."""
        directory = Path(model.directory)
        path = directory / "config.json"
        text = path.read_text(encoding="utf-8") if model.directory and path.is_file() else "{}"
        weights = sorted(directory.glob(_WEIGHTS)) if model.directory else []
        sizes = {file.name: file.stat().st_size for file in weights}
        whole = json.loads(text)
        config = whole | (whole.get("text_config") or {})
        digest = hashlib.sha256(json.dumps([whole, sizes], sort_keys=True).encode()).hexdigest()
        return cls(model=model, config=config, num_bytes=sum(sizes.values()), digest=digest)

    def entry(self, name: str) -> dict[str, Any]:
        """Return an entry of /api/tags."""
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified_at(),
            "size": self.num_bytes,
            "digest": self.digest,
            "details": self._details(),
        }

    def running(self, name: str, *, is_on_gpu: bool) -> dict[str, Any]:
        """Return an entry of /api/ps."""
        return {
            "name": name,
            "model": name,
            "size": self.num_bytes,
            "digest": self.digest,
            "details": self._details(),
            "expires_at": _NEVER,
            "size_vram": self.num_bytes if is_on_gpu else 0,
            "context_length": self.model.max_len(),
        }

    def shown(self) -> dict[str, Any]:
        """Return the answer of /api/show."""
        defaults = self.model.sampling_defaults
        return {
            "parameters": "\n".join(
                f"{_PARAMETERS.get(name, name)} {value}" for name, value in sorted(defaults.items())
            ),
            "template": self.model.tokenizer.template.text,
            "details": self._details(),
            "model_info": self._sizes(),
            "capabilities": self._capabilities(),
            "modified_at": self._modified_at(),
        }

    def _modified_at(self) -> str:
        return timestamp(datetime.fromtimestamp(self.model.created, UTC))

    def _details(self) -> dict[str, Any]:
        family = str(self.config.get("model_type", ""))
        quantized = (self.config.get("quantization_config") or {}).get("quant_method")
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": str(
                quantized or self.config.get("dtype") or self.config.get("torch_dtype") or ""
            ),
        }

    def _sizes(self) -> dict[str, Any]:
        family = str(self.config.get("model_type", ""))
        sizes = {name: self.config[key] for key, name in _SIZES.items() if self.config.get(key) is not None}
        for name, count in (
            ("expert_count", num_experts(self.config)),
            ("expert_used_count", experts_per_token(self.config)),
        ):
            sizes |= {name: count} if count else {}
        return {
            "general.architecture": family,
            f"{family}.context_length": self.model.max_len(),
            **{f"{family}.{name}": size for name, size in sizes.items()},
        }

    def _capabilities(self) -> list[str]:
        markup = self.model.markup
        seeing = ["vision"] if self.model.images is not None else []
        tools = ["tools"] if markup.tools != NONE else []
        return ["completion", *seeing, *tools, *(["thinking"] if markup.reasoning != NONE else [])]
