"""`--eplb-config`: vLLM's keys and some of WideEP's. Checked once; unknown keys are errors."""

import json
import math
from dataclasses import dataclass, fields
from typing import Any

POLICIES = ("default", "repair", "shares")


class EplbConfigError(ValueError):
    """An invalid value of --eplb-config."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """How experts are balanced while serving. The first six keys are vLLM's."""

    window_size: int = 1000  # steps in the load window
    step_interval: int = 3000  # steps between decisions
    num_redundant_experts: int = 0  # slots of a layer beyond one per expert, rounded up to full ranks
    log_balancedness: bool = False  # log it at every decision
    use_async: bool = True  # experts always move during steps; no other mode exists
    policy: str = "default"  # "repair" is the same; "shares" never moves an expert
    max_bytes_per_step: int = 1 << 20  # bytes that a rank may send during one step
    horizon_s: float = 600.0  # a plan must pay for itself within it
    # Part of the horizon that a plan must save beyond its cost; half of it if nothing moves.
    min_gain: float = 0.02
    max_moved: float = 0.1  # part of all slots that one decision may fill
    num_groups: int = 0  # groups of experts to keep on one node each; 0: no groups
    min_nodes: int = 1  # least number of nodes with a copy of each expert
    spread: bool = False  # put an expert's copies on different nodes
    history_file: str = ""  # file for decisions on the front's node; "": only in memory

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            EplbConfigError: The message names the key, the value seen and the values allowed.
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
            raise EplbConfigError("use_async is false; experts can only move during steps: remove it")

    def _check_type(self, name: str, value: Any, kind: Any) -> None:
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise EplbConfigError(f"{name} is {value!r}; it must be {_KINDS[kind]}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def parse_eplb_config(text: str) -> EplbConfig:
    """Parse the flag's JSON object.

    Raises:
        EplbConfigError: The text is not an object, or a key or value is wrong.
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
        raise EplbConfigError(f"{', '.join(unknown)} is not known; the keys are {', '.join(known)}")
    return EplbConfig(**value)


def slots_of_rank(num_experts: int, num_ranks: int, num_redundant: int) -> int:
    """Return the slots of a layer on a rank: experts and redundant ones, rounded up to full ranks.

    Raises:
        EplbConfigError: There are more redundant experts than the ranks can use.
    """
    found = -(-(num_experts + num_redundant) // num_ranks)
    if found > num_experts:
        raise EplbConfigError(
            f"num_redundant_experts is {num_redundant}; a rank holds no expert twice, so {num_ranks} "
            f"rank{'s have' if num_ranks > 1 else ' has'} use for at most {num_experts * (num_ranks - 1)} in addition to the "
            f"model's {num_experts} experts"
        )
    return found
