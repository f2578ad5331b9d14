"""The flags that `serve`, `worker`, `engine` and `front` share, for argparse, in groups as --help shows them."""

import argparse

from dispatch.availability import BACKENDS
from server.api.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from server.options.command_line import DEMO_MODEL
from server.options.http_options import add_http_arguments
from server.options.log_options import add_log_arguments

_ALWAYS_ON = {
    "--enable-auto-tool-choice": "the model may always call tools",
    "--enable-expert-parallel": "experts are always spread over the ranks",
    "--enable-prompt-tokens-details": "usage always tells of cached tokens",
    "--enable-server-load-tracking": "GET /load is always there",
}


_NO_HALVES = (
    "steps in two halves (dual-batch overlap) were slower wherever they were measured and are no longer offered; leave "
    "it out"
)


class _Refused(argparse.Action):
    """A flag of vLLM's that is known and not offered; `const` says why."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: object) -> None:
        """End with the reason."""
        parser.error(f"{self.option_strings[0]}: {self.const}")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all of them."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="a Hugging Face model directory, a hub name, or 'demo' (default), the model that WideEP makes itself",
    )
    add_http_arguments(parser.add_argument_group("HTTP endpoint"))
    _add_parser_arguments(parser.add_argument_group("tool calls and reasoning"))
    _add_rank_arguments(parser.add_argument_group("ranks"))
    _add_dispatch_arguments(parser.add_argument_group("dispatch"))
    _add_placement_arguments(parser.add_argument_group("expert placement"))
    _add_limit_arguments(parser.add_argument_group("limits"))
    _add_memory_arguments(parser.add_argument_group("memory"))
    add_log_arguments(parser.add_argument_group("logs and traces"))


def _add_parser_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tool-call-parser",
        choices=TOOL_PARSERS,
        metavar="NAME",
        help=f"how the model writes tool calls: {', '.join(TOOL_PARSERS)} (default: by its chat template)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        metavar="NAME",
        help=f"how the model writes reasoning: {', '.join(REASONING_PARSERS)} (default: by its chat template)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="render chats with this Jinja template (default: the model's own)",
    )
    for flag, what in _ALWAYS_ON.items():
        add(flag, action="store_true", help=f"accepted for vLLM's sake: {what}")


def _add_rank_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--data-parallel-size",
        "-dp",
        type=int,
        metavar="N",
        help="ranks on this node, one process each (default: 2 on CPU, else one per GPU)",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="what computes; auto is cuda where a GPU and all that it needs is found, else cpu, and says why "
        "(default: %(default)s)",
    )
    add("--threads", type=int, metavar="N", help="threads per rank (default: cores / local ranks)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="type the weights are kept in, but for quantised ones, which stay as they are; CPU computes in float32, a "
        "GPU in this type (default: %(default)s, on a GPU bfloat16)",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="on a GPU: no token's bits depend on the requests beside it, at a price in speed; always so on CPU",
    )
    add("--enforce-eager", action="store_true", help="on a GPU: run decode steps without CUDA graphs")
    add(
        "--enable-torch-compile",
        action="store_true",
        help="on a GPU: compile what lies between attention, experts and routing (norms, rotary, residuals); the start "
        "takes longer",
    )
    add("--enable-dbo", action=_Refused, nargs=0, const=_NO_HALVES, help=argparse.SUPPRESS)


def _add_dispatch_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--all2all-backend",
        default="auto",
        choices=BACKENDS,
        help="how ranks exchange tokens; auto is shm between ranks of one host, gloo otherwise; on GPUs it is nccl, with "
        "decode steps through each other's memory (nvshmem between hosts) where that can be had; deep_ep is the installed "
        "package (default: auto)",
    )
    add(
        "--dispatch-mode",
        default="auto",
        choices=("auto", "normal", "low_latency"),
        help="auto is low_latency for steps that only decode, normal for steps with prompts (default: %(default)s)",
    )
    add(
        "--dispatch-dtype",
        default="auto",
        choices=("auto", "fp8"),
        help="what tokens travel to experts as: the model's own type, or FP8 with DeepSeek's block scales, a "
        "quarter of float32's bytes and not the same bits (default: %(default)s)",
    )
    add(
        "--dispatch-node-size",
        type=int,
        default=0,
        metavar="N",
        help="send a token once to each node of N ranks and spread it inside, where links between nodes are the "
        "slow ones; divides the number of ranks (default: 0, straight to every rank)",
    )
    add(
        "--distributed-timeout-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long a rank may keep another one waiting before it counts as hung (default: %(default)s)",
    )


def _add_placement_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--enable-eplb",
        action="store_true",
        help="move experts while serving, where that pays by the load seen; `wideep experts apply` works without",
    )
    add(
        "--eplb-config",
        default="{}",
        metavar="JSON",
        help='such as {"num_redundant_experts": 8}; keys: window_size, step_interval, num_redundant_experts, '
        "log_balancedness, policy, max_bytes_per_step, horizon_s, min_gain, max_moved, num_groups, min_nodes, "
        "spread, history_file",
    )
    add(
        "--expert-placement",
        metavar="FILE",
        help="start with this placement, as `wideep experts plan --out FILE` writes it (default: experts evenly)",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt plus output (default: the model's)")
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="requests a rank runs at once (default: 64 on CPU, 256 on a GPU)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens a rank runs in one step (default: 512 on CPU, 8192 on a GPU)",
    )
    add(
        "--request-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="deadline of a request; 0 is none (default: none)",
    )
    add(
        "--rank-recovery-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="when no rank serves any more, how long requests wait for one to come back until the service ends "
        "(default: %(default)g)",
    )


def _add_memory_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--kv-cache-memory",
        metavar="BYTES",
        help="KV cache per rank, e.g. 512M or 2G (default: 25%% of free memory over the local ranks; on a GPU what "
        "--gpu-memory-utilization leaves)",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="on a GPU: share of its free memory for weights and KV cache (default: 0.9); on CPU: share of free memory "
        "for the KV cache; above 0 and at most 1",
    )
    add("--enable-prefix-caching", action="store_true", default=True, help="the default")
    add(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not reuse the KV cache of equal prefixes",
    )
