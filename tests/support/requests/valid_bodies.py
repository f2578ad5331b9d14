"""At least one valid body for every POST endpoint, as input of mutations. A test requires one for every new endpoint."""

from typing import Any

from tests.support.placement.load_reports import RANKS
from tests.support.service.paced_front import MODEL

_CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "the cat sat"},
        {"role": "user", "content": [{"type": "text", "text": "hello world"}], "name": "me"},
        {"role": "assistant", "content": "on the mat"},
        {"role": "user", "content": "hello"},
    ],
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["zebra"],
    "seed": 1,
}
_TOOL = {
    "type": "function",
    "function": {"name": "cat", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_CALLS = [{"id": "c1", "type": "function", "function": {"name": "cat", "arguments": '{"a": 1}'}}]
_WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": _CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "mat"},
    ],
    "tools": [_TOOL],
    "max_tokens": 4,
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0},
        "b": {"type": "array", "items": {"$ref": "#/$defs/c"}},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"enum": ["x", "y", None]}},
}
_FORMED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
_COMPLETION = {"model": MODEL, "prompt": "the cat sat on the mat", "max_tokens": 4, "n": 2, "seed": 3}
_ASKED = {
    "model": MODEL,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hello"}],
}  # of Anthropic's
_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "the", "signature": "s"},
            {"type": "tool_use", "id": "t", "name": "cat", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "mat"}]},
]
_ITEMS = [
    {"role": "developer", "content": [{"type": "input_text", "text": "the"}]},
    {"type": "message", "role": "user", "content": "hello"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "the"}]},
    {"type": "function_call", "call_id": "t", "name": "cat", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "t", "output": "mat"},
]

_TENSORS = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[2, 2]]}
_GROUP = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "timeout_s": 0.1}

BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/chat/completions": (
        _CHAT,
        {**_CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {
            **_CHAT,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "presence_penalty": 0.5,
            "max_completion_tokens": 3,
        },
        _WITH_TOOLS,
        {**_WITH_TOOLS, "stream": True, "tool_choice": "auto", "parallel_tool_calls": False},
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": 1}, "user": "u"},
        {
            **_FORMED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True},
            },
        },
        {
            **_FORMED,
            "structured_outputs": {"regex": "[a-z]{1,3}( \\d+)?", "disable_any_whitespace": True},
            "n": 2,
        },
        {**_FORMED, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "cat"}}},
    ),
    "/v1/completions": (
        _COMPLETION,
        {**_COMPLETION, "prompt": ["hello", "world"], "stream": True, "logprobs": 2},
        {**_COMPLETION, "prompt": [[5, 6, 7], [8]], "echo": True, "stop_token_ids": [9], "min_tokens": 1},
        {"prompt": [5, 6, 7], "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
        {
            "prompt": "hello",
            "max_tokens": 4,
            "structured_outputs": {"grammar": 'start: "a" rest?\nrest: /b+/\n'},
        },
        {"prompt": "hello", "max_tokens": 4, "guided_choice": ["mat", "cat"], "stream": True},
        {"prompt": "hello", "max_tokens": 4, "guided_json": _SCHEMA, "logprobs": 1},
    ),
    "/v1/responses": (
        {"model": MODEL, "input": "hello", "max_output_tokens": 4, "instructions": "the cat", "store": True},
        {"input": _ITEMS, "max_output_tokens": 4, "stream": True, "metadata": {"k": "v"}, "user": "u"},
        {
            "input": [{"role": "user", "content": "hi"}],
            "max_output_tokens": 3,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "parallel_tool_calls": False,
            "temperature": 0.5,
        },
        {
            "input": "hello",
            "max_output_tokens": 4,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
        },
        {"input": "hello", "max_output_tokens": 4, "background": True},
    ),
    "/v1/responses/input_tokens": ({"model": MODEL, "input": _ITEMS},),
    "/v1/responses/{response_id}/cancel": ({},),
    "/v1/files": ({"purpose": "batch", "file": "{}"},),
    "/v1/batches": (
        {
            "input_file_id": "file-0",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"k": "v"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
    "/v1/batches/{batch_id}/cancel": ({},),
    "/v1/messages": (
        {
            **_ASKED,
            "system": "the cat",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop_sequences": ["zebra"],
        },
        {**_ASKED, "stream": True, "system": [{"type": "text", "text": "the"}], "metadata": {"user_id": "u"}},
        {**_ASKED, "messages": _TURNS, "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}},
    ),
    "/v1/messages/count_tokens": ({"model": MODEL, "messages": _TURNS, "output_config": {"effort": "low"}},),
    "/invocations": ({**_CHAT, "n": 2}, _COMPLETION),
    "/tokenize": (
        {"model": MODEL, "prompt": "hello world", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False},
    ),
    "/detokenize": ({"model": MODEL, "tokens": [5, 6, 7]},),
    "/api/chat": (
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "options": {"num_predict": 4, "temperature": 0.5, "seed": 3, "stop": ["zebra"], "num_ctx": 64},
            "keep_alive": "5m",
        },
        {
            "model": MODEL,
            "stream": False,
            "messages": [
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "cat", "arguments": {}}}],
                },
                {"role": "tool", "tool_name": "cat", "content": "mat"},
            ],
            "tools": [_TOOL],
            "options": {"num_predict": 4},
        },
    ),
    "/api/generate": (
        {
            "model": MODEL,
            "prompt": "hello",
            "system": "the cat",
            "options": {"num_predict": 4},
            "think": False,
        },
        {"model": MODEL, "prompt": "hello", "raw": True, "stream": False, "options": {"num_predict": 4}},
        {
            "model": MODEL,
            "prompt": "hello",
            "format": _SCHEMA,
            "stream": False,
            "options": {"num_predict": 4},
        },
    ),
    "/api/show": ({"model": MODEL, "verbose": True},),
    "/generate": (
        {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0.5}, "rid": "mine"},
        {"input_ids": [[5, 6, 7], [8]], "stream": True, "return_logprob": True, "top_logprobs_num": 2},
    ),
    "/reset_prefix_cache": ({},),
    "/flush_cache": ({},),
    "/ranks/drain": ({"rank": 0, "undo": True, "timeout_s": 0},),
    "/pools": ({"pool": "both", "role": "both"},),
    "/scale_elastic_ep": ({"new_data_parallel_size": RANKS, "drain_timeout": 1},),
    "/scale_elastic_ep/abort": ({"operation_id": "none"}, {}),
    "/is_scaling_elastic_ep": ({},),
    "/sleep": ({},),
    "/wake_up": ({},),
    "/release_memory_occupation": ({"tags": ["kv_cache"]}, {}),
    "/resume_memory_occupation": ({"tags": ["weights", "kv_cache"]}, {}),
    "/experts/plan": ({"policy": "shares", "max_moved": 0.5}, {}),
    "/experts/apply": ({"policy": "repair", "max_moved": 0.1},),
    "/experts/rollback": ({},),
    "/start_expert_distribution_record": ({},),
    "/stop_expert_distribution_record": ({},),
    "/dump_expert_distribution_record": ({},),
    "/ping": ({},),
    **dict.fromkeys(("/pause", "/pause_generation", "/resume", "/continue_generation"), ({},)),
    **dict.fromkeys(
        ("/start_weight_update", "/begin_weight_update"), ({"partial": True, "weight_version": "2"},)
    ),
    **dict.fromkeys(
        ("/finish_weight_update", "/end_weight_update"), ({"weight_version": "2", "timeout_s": 0.1},)
    ),
    **dict.fromkeys(("/weight_checker", "/weights_checker"), ({"action": "checksum", "timeout_s": 0.1},)),
    "/update_weights": ({"path": "/no/folder", "timeout_s": 0.1},),
    "/update_weights_from_disk": ({"model_path": "/no/folder", "weight_version": "2"},),
    "/update_weights_from_distributed": ({**_TENSORS, "timeout_s": 0.1},),
    "/init_weights_update_group": (_GROUP,),
    "/init_weight_transfer_engine": ({"init_info": _GROUP},),
    "/destroy_weights_update_group": ({},),
    "/abort_weight_update": ({},),
    "/update_weight_version": ({"new_version": "2"},),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/load_lora_adapter"), ({"lora_name": "a", "lora_path": "/no/folder"},)
    ),
    **dict.fromkeys(("/v1/unload_lora_adapter", "/unload_lora_adapter"), ({"lora_name": "a"},)),
}
# After one of these, requests are refused or wait until the named endpoint is called.
SLEEPS = {
    "/sleep": "/wake_up",
    "/release_memory_occupation": "/wake_up",
    "/pause": "/resume",
    "/pause_generation": "/continue_generation",
}
_OF_WEIGHTS = tuple(path for path in BODIES if "weight" in path)  # the scripted ranks of this front have none
_OF_ADAPTERS = tuple(path for path in BODIES if "lora" in path)  # this front takes none
# Not mutated in bulk: each success starts a process that imports torch, refuses all other requests, or waits for ranks.
NEVER = ("/dump_expert_distribution_record", "/scale_elastic_ep", *_OF_WEIGHTS, *SLEEPS)
RARE = (  # endpoints that take no body or start a process: a few mutations each suffice
    "/experts/rollback",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/reset_prefix_cache",
    "/flush_cache",
    "/ranks/drain",
    "/pools",
    "/scale_elastic_ep/abort",
    "/is_scaling_elastic_ep",
    "/wake_up",
    "/resume_memory_occupation",
    "/resume",
    "/continue_generation",
    *_OF_ADAPTERS,
    "/v1/responses/{response_id}/cancel",
    "/v1/batches/{batch_id}/cancel",
    "/v1/files",
    "/ping",
)
EXEMPT_FROM_200 = (
    *_OF_WEIGHTS,
    *_OF_ADAPTERS,
    "/v1/responses/{response_id}/cancel",
    "/v1/batches/{batch_id}/cancel",
    "/scale_elastic_ep/abort",  # nothing to abort
    "/v1/batches",  # the file does not exist
    "/v1/files",  # a form; tests/server/api/openai/batches/test_form.py fuzzes it
    "/experts/rollback",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)
