"""What `--eplb-config` says: vLLM's keys, and ours beside them. Checked once; unknown keys are errors."""

import json
import math
from dataclasses import dataclass, fields
from typing import Any

POLICIES = ("default", "repair", "shares")


class EplbConfigError(ValueError):
    """A value of --eplb-config that cannot be granted."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """How experts are balanced while serving. The first six keys are vLLM's."""

    window_size: int = 1000  # steps whose load decides
    step_interval: int = 3000  # steps between decisions
    num_redundant_experts: int = 0  # slots of a layer beyond one for each expert, rounded up to full ranks
    log_balancedness: bool = False  # say it at every decision
    use_async: bool = True  # moves run beside the steps; there is no other way
    policy: str = "default"  # "repair" by its other name; "shares" never moves an expert
    max_bytes_per_step: int = 1 << 20  # that a rank sends beside one step
    horizon_s: float = 600.0  # a plan must pay for itself within it
    min_gain: float = (
        0.02  # part of the horizon that a plan must save beyond its cost; half where nothing moves
    )
    max_moved: float = 0.1  # part of all slots that one decision may fill
    num_groups: int = 0  # of experts that are best kept on one node; 0: none
    min_nodes: int = 1  # on which every expert has a copy
    spread: bool = False  # an expert's copies go to different nodes
    history_file: str = ""  # where decisions are kept, on the front's node; empty: in memory

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            EplbConfigError: naming the key, the value seen and the values allowed.
        """
        for field in fields(self):
            self._check_type(field.name, getattr(self, field.name), field.type)
        least = {
            "window_size": 1, "step_interval": 1, "num_redundant_experts": 0, "max_bytes_per_step": 4096,
            "num_groups": 0, "min_nodes": 1,
        }  # fmt: skip
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise EplbConfigError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        for name, largest in {"horizon_s": math.inf, "min_gain": 1.0, "max_moved": 1.0}.items():
            value = getattr(self, name)
            if not (0 <= value <= largest and math.isfinite(value)):
                raise EplbConfigError(f"{name} is {value}; it must be 0 or more, at most {largest:g}")
        if self.policy not in POLICIES:
            raise EplbConfigError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        if not self.use_async:
            raise EplbConfigError("use_async is false; experts only ever move beside the steps: leave it out")

    def _check_type(self, name: str, value: Any, kind: Any) -> None:
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise EplbConfigError(f"{name} is {value!r}; it must be {_KINDS[kind]}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def parse_eplb_config(text: str) -> EplbConfig:
    """Read the flag's JSON object.

    Raises:
        EplbConfigError: it is no object, or a key or value is wrong.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise EplbConfigError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EplbConfigError(f'it is {text!r}; it must be an object such as {{"num_redundant_experts": 2}}')
    known = [field.name for field in fields(EplbConfig)]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise EplbConfigError(f"{', '.join(unknown)} is not known; there are {', '.join(known)}")
    return EplbConfig(**value)


def slots_of_rank(num_experts: int, num_ranks: int, num_redundant: int) -> int:
    """Return the slots that a layer has on a rank: experts and redundant ones, rounded up to full ranks.

    Raises:
        EplbConfigError: more redundant experts than ranks have a use for.
    """
    found = -(-(num_experts + num_redundant) // num_ranks)
    if found > num_experts:
        raise EplbConfigError(
            f"num_redundant_experts is {num_redundant}; a rank holds no expert twice, so {num_ranks} "
            f"rank{'s have' if num_ranks > 1 else ' has'} use for at most {num_experts * (num_ranks - 1)} beside the model's "
            f"{num_experts} experts"
        )
    return found
