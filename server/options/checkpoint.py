"""Options that choose and override a model's files.

`serve.preflight.checkpoint` makes one folder of these files before any other code reads the model.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from server.options.flag import Group, OptionsError, flag, text

MODEL = Group("model", "all processes")
# Names of checkpoint formats in vLLM and SGLang -> their quant_method. Giving the checkpoint's own format changes nothing.
STORED_METHODS = {
    "fp8": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "awq": "awq", "awq_marlin": "awq",
    "gptq": "gptq", "gptq_marlin": "gptq", "compressed-tensors": "compressed-tensors", "modelopt": "modelopt",
    "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt", "modelopt_mxfp8": "modelopt", "quark": "quark",
    "fbgemm_fp8": "fbgemm_fp8", "w8a8_int8": "w8a8_int8", "w8a8_fp8": "w8a8_fp8", "auto-round": "gptq",
}  # fmt: skip


def _object(name: str, given: Any) -> dict[str, Any]:
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError as error:
            raise OptionsError(f"{name} is {given!r}, which is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionsError(
            f"{name} is {given!r}; give a JSON object such as '{{\"num_experts_per_tok\": 4}}'"
        )
    return value


def _folder_or_name(name: str, given: Any) -> str:
    path = os.path.expanduser(text(name, given))
    if not given:
        raise OptionsError(f"{name} is empty; give a folder, or a name on the hub")
    return os.path.abspath(path) if os.path.exists(path) else str(given)


def _download_folder(name: str, given: Any) -> str:
    path = os.path.abspath(os.path.expanduser(text(name, given)))
    if os.path.exists(path) and not os.path.isdir(path):
        raise OptionsError(f"{name} is {given!r}, which is a file; give a folder")
    return path


def _generation(name: str, given: Any) -> str:
    if given in ("auto", "vllm"):
        return str(given)
    path = os.path.abspath(os.path.expanduser(text(name, given)))
    if not os.path.isfile(os.path.join(path, "generation_config.json")):
        raise OptionsError(
            f"{name} is {given!r}; it must be auto (the model's), vllm (none), or a folder with a generation_config.json"
        )
    return path


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The source of a model's files, and the files and fields to replace."""

    revision: str | None = flag(
        MODEL, "--revision", read=text, metavar="NAME", default_text="the newest",
        help="branch, tag or commit of the model on the hub",
    )  # fmt: skip
    download_dir: str | None = flag(
        MODEL, "--download-dir", read=_download_folder, metavar="FOLDER", default_text="HF_HOME's hub",
        help="folder that models of the hub are downloaded to",
    )  # fmt: skip
    tokenizer: str | None = flag(
        MODEL, "--tokenizer", read=_folder_or_name, metavar="FOLDER", default_text="the model's",
        help="folder or hub name of the tokenizer and chat template to use instead of the model's",
    )  # fmt: skip
    hf_overrides: dict[str, Any] | None = flag(  # noqa: RUF009 - it declares a field
        MODEL, "--hf-overrides", read=_object, metavar="JSON",
        help="replace these fields of config.json; the fields of a nested ..._config are merged into it",
    )  # fmt: skip
    generation_config: str = flag(
        MODEL, "--generation-config", read=_generation, metavar="{auto,vllm,FOLDER}", default="auto",
        help="folder of the generation_config.json with default sampling parameters: auto is the model's folder, vllm uses no "
        "file",
    )  # fmt: skip
    override_generation_config: dict[str, Any] | None = flag(  # noqa: RUF009 - it declares a field
        MODEL, "--override-generation-config", read=_object, metavar="JSON",
        help='replace these fields of the generation config, such as {"temperature": 0.5}',
    )  # fmt: skip

    @property
    def replaces_files(self) -> bool:
        """Return whether the service needs a folder with changed files instead of the model's own."""
        return (
            self.tokenizer is not None
            or self.hf_overrides is not None
            or self.generation_config != "auto"
            or self.override_generation_config is not None
        )
