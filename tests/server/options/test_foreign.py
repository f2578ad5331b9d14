"""Flags of vLLM and SGLang: each is accepted, ignored, or refused with a sentence that names ours."""

import argparse
import re
from pathlib import Path

import pytest

from scheduler.policy.speculative import Method, SpeculativeConfig
from server.options.flag import OptionsError
from server.options.foreign.sglang import SAME_AS_SGLANG, SGLANG_FLAGS, SHARED_WITH_VLLM
from server.options.foreign.vllm import DIFFERS_FROM_VLLM, SAME_AS_VLLM, VLLM_FLAGS
from server.options.reading import add_options, known_words, notes_on, options_from, options_from_keywords
from server.options.table import OPTIONS, Options
from server.options.words import spelled, why_unknown
from server.tools.guides import FOLDER, sglang_guide, vllm_guide

HERE = Path(__file__).parent
FOREIGN = (*VLLM_FLAGS, *SGLANG_FLAGS)
# Flags in these sentences that are not the service's: torchrun's, and those of `wideep experts plan`.
OF_OTHERS = {"--nnodes", "--nproc-per-node", "--no-python", "--out"}
OURS = {name for option in OPTIONS for name in (*option.flag.names, *option.flag.off_names)}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(spelled(words))


def taken(*words: str) -> tuple[Options, list[str]]:
    args = parsed(*words)
    return options_from(args, {}), notes_on(args)


def named_in(file: str) -> list[str]:
    return (HERE / file).read_text().split()


@pytest.mark.parametrize("page, text", [("from_vllm.md", vllm_guide()), ("from_sglang.md", sglang_guide())])
def test_the_guides_are_the_tables(page: str, text: str) -> None:
    assert (FOLDER / page).read_text() == text, "run: python -m server.tools.guides"


def test_every_flag_of_vllm_0_33_stands_in_its_guide() -> None:
    shown = set(re.findall(r"`(-[\w-]+)`", vllm_guide()))
    missing = [name for name in named_in("vllm_0_33_flags.txt") if name not in shown]
    assert missing == []


def test_every_flag_of_sglang_s_recipes_stands_in_its_guide() -> None:
    shown = set(re.findall(r"`(-[\w-]+)`", sglang_guide()))
    assert [name for name in named_in("sglang_recipe_flags.txt") if name not in shown] == []


@pytest.mark.parametrize("text", [vllm_guide(), sglang_guide()])
def test_a_guide_has_four_verdicts(text: str) -> None:
    rows = re.findall(r"^\| `.*? \| ([a-z]+).*? \|", text, re.MULTILINE)
    assert set(rows) == {"same", "alias", "ignored", "rejected"}


def test_the_guide_of_vllm_names_no_values_of_sglang() -> None:
    assert "--enable-dp-attention" not in vllm_guide()


def test_what_is_said_to_be_the_same_is_ours() -> None:
    ours = {*OURS, "--model"}
    assert {*SAME_AS_VLLM.split(), *SAME_AS_SGLANG.split(), *DIFFERS_FROM_VLLM} <= ours
    assert set(SHARED_WITH_VLLM.split()) <= {name for flag in VLLM_FLAGS for name in flag.names}


def test_a_name_has_one_meaning() -> None:
    words = known_words()
    assert len(set(words)) == len(words)


def test_sentences_name_flags_that_there_are() -> None:
    for flag in FOREIGN:
        said = f"{flag.because} {flag.otherwise} {flag.becomes}"
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said))
        assert named <= OURS | OF_OTHERS, f"{flag.name} names a flag that does not exist"
        assert bool(flag.becomes) != bool(flag.because or flag.otherwise), (
            f"{flag.name}: an alias or a reason"
        )
        assert "\n" not in said and not re.search(r"[^.]\. ", said), f"{flag.name}: one sentence"
        assert not said.strip().endswith("."), f"{flag.name}: one sentence"


@pytest.mark.parametrize(
    "words, note",
    [
        (["-tp", "1"], "--tensor-parallel-size 1 has no effect: every rank"),
        (["-pp=1"], "--pipeline-parallel-size 1 has no effect"),
        (
            ["--nnodes", "1", "--node-rank", "0", "--master-addr", "10.0.0.1"],
            "--master-addr 10.0.0.1 has no effect",
        ),
        (["-dp", "2", "--data-parallel-size-local", "2"], "--data-parallel-size-local 2 has no effect"),
        (
            ["--data-parallel-address=h", "--data-parallel-rpc-port=1"],
            "--data-parallel-rpc-port 1 has no effect",
        ),
        (["--data-parallel-start-rank=0"], "--data-parallel-start-rank 0 has no effect"),
        (["--data-parallel-backend", "mp"], "--data-parallel-backend mp has no effect"),
        (["--renderer-num-workers", "4"], "--renderer-num-workers 4 has no effect: each front"),
        (["--enable-chunked-prefill"], "--enable-chunked-prefill has no effect: prompts"),
        (["--no-async-scheduling"], "--no-async-scheduling has no effect"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype fp8_e4m3 means fp8 here: e4m3 is the only"),
        (["--calculate-kv-scales"], "--calculate-kv-scales has no effect: every token and head"),
        (["--block-size", "16"], "--block-size 16 has no effect: a block has 16 tokens"),
        (["--load-format=safetensors"], "--load-format safetensors means auto here: each rank reads"),
        (
            ["--no-trust-remote-code"],
            "--no-trust-remote-code has no effect: code from a checkpoint",
        ),
        (
            ["--trust-remote-code"],
            "--trust-remote-code has no effect: code from a checkpoint is never",
        ),
        (["--enable-expert-parallel"], "--enable-expert-parallel has no effect: experts are always"),
        (["--dtype", "half"], "--dtype half means bfloat16 here: weights are kept"),
        (
            ["--all2all-backend=deepep_low_latency"],
            "--all2all-backend deepep_low_latency means auto here: steps",
        ),
        (["--structured-outputs-config.backend", "auto"], "--structured-outputs-config"),
        (
            ["--tp", "8", "--dp", "8", "--ep", "8", "--enable-dp-attention"],
            "--tensor-parallel-size 8 has no effect",
        ),
        (["--mm-encoder-tp-mode=data"], "has no effect: one process per front encodes images"),
        (
            ["--kv-offloading-size=20", "--kv-offloading-backend=native"],
            "--kv-offloading-backend native has no effect: --kv-offloading-size uses WideEP's own offloading",
        ),
        (
            ["--enable-hierarchical-cache", "--kv-offloading-size=20G", "--hicache-write-policy=write_back"],
            "--enable-hierarchical-cache has no effect: --kv-offloading-size turns on offloading to host memory",
        ),
        (
            ["--hicache-storage-backend=file", "--kv-offloading-dir=d", "--kv-offloading-disk-size=2G"],
            "--hicache-storage-backend file has no effect: --kv-offloading-dir turns on offloading to disk",
        ),
        (["--no-enable-hierarchical-cache"], "--no-enable-hierarchical-cache has no effect"),
        (["--enable-sleep-mode", "--device=cpu"], "--enable-sleep-mode has no effect: POST /sleep is always"),
        (["--no-enable-sleep-mode"], "--no-enable-sleep-mode has no effect"),
        (
            ["--enable-memory-saver", "--device=cpu"],
            "--enable-memory-saver has no effect: POST /release_memory",
        ),
    ],
)
def test_what_changes_nothing_is_said_in_a_line(words: list[str], note: str) -> None:
    options, notes = taken("m", *words)
    assert any(note in each for each in notes)
    assert options.model == "m"


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--enable-lora-bias"], "--enable-lora-bias: adapters have no weights of this kind"),
        (["--enable-lora-bias", "-tp", "8"], "2 flags are not supported:\n  --enable-lora-bias: adapters"),
        (["--enable-lora-bias", "-tp", "8"], "\n  --tensor-parallel-size 8: attention"),
        (["-tp", "8"], "--tensor-parallel-size 8: attention runs data-parallel"),
        (["-tp", "8"], "use --data-parallel-size 8"),
        (["-pp", "2"], "--pipeline-parallel-size 2: layers are not split"),
        (
            ["--nnodes", "2", "--node-rank", "1"],
            "--nnodes 2: on several nodes, start the ranks with torchrun",
        ),
        (["-dp", "16", "--data-parallel-size-local", "8"], "--data-parallel-size-local 8: on several nodes"),
        (["--headless"], "--headless: only the node of the rendezvous endpoint serves HTTP"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: prompts always run in chunks"),
        (
            ["--kv-cache-dtype", "fp8_e5m2"],
            "--kv-cache-dtype is 'fp8_e5m2'; it must be one of auto, fp8, int8",
        ),
        (["--block-size", "32"], "--block-size 32: a block has 16 tokens"),
        (["--load-format", "gguf"], "--load-format is 'gguf'; it must be auto or dummy: weights are read"),
        (
            ["--kv-offloading-size=20", "--kv-offloading-backend=lmcache"],
            "--kv-offloading-backend lmcache: other backends are not supported; WideEP has its own KV cache offloading",
        ),
        (
            ["--enable-lmcache"],
            "--enable-lmcache: WideEP has its own KV cache offloading: --kv-offloading-size",
        ),
        (
            ["--enable-hierarchical-cache"],
            "--enable-hierarchical-cache: give the size of host memory for offloading",
        ),
        (
            ["--enable-hicache", "--kv-offloading-size=0"],
            "--enable-hierarchical-cache: give the size of host memory for offloading with --kv-offloading-size",
        ),
        (["--hicache-size=30"], "--hicache-size 30: it counts one rank's memory in 10^9 bytes; use"),
        (
            ["--hicache-ratio=2"],
            "--hicache-ratio 2: use --kv-offloading-size, the memory that the ranks of a node share",
        ),
        (
            ["--hicache-storage-backend=file"],
            "--hicache-storage-backend file: offloading to disk needs --kv-offloading-dir",
        ),
        (
            ["--hicache-storage-backend=mooncake", "--kv-offloading-dir=d", "--kv-offloading-disk-size=2"],
            "--hicache-storage-backend mooncake: offloading to disk needs --kv-offloading-dir and --kv-offloading-disk-size",
        ),
        (
            ["--enable-sleep-mode"],
            "--enable-sleep-mode: sleep mode (docs/sleep.md) works with --device cpu only",
        ),
        (
            ["--enable-memory-saver", "--device=cuda"],
            "--enable-memory-saver: sleep mode (docs/sleep.md) works",
        ),
        (["--sleep-mode-backend=x"], "--sleep-mode-backend x: sleep mode has no such setting"),
        (["--lora-eviction-policy", "fifo"], "--lora-eviction-policy fifo: only lru is implemented"),
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-paths", "a=b", "a=c"], "--lora-modules has the name 'a' twice"),
        (["--lora-target-modules", "q_proj"], "--lora-target-modules needs --enable-lora"),
        (
            ["--enable-lora", "--lora-target-modules", "q_proj", "self_attn.k_proj"],
            "--lora-target-modules is 'self_attn.k_proj'; give the last parts",
        ),
        (["--enable-lora", "--lora-target-modules", "q_proj", "all"], "--lora-target-modules is 'all'; give"),
        (
            ["--enable-lora", "--max-loras=4", "--max-loaded-loras=2"],
            "--max-cpu-loras is 2; it must be at least",
        ),
        (
            ["--num-redundant-experts=3", '--eplb-config={"num_redundant_experts": 4}'],
            "sets the same value; give one",
        ),
        (["--num-redundant-experts=3", "--eplb-config=3"], "sets the same value; give one"),
        (["--enable-dbo"], "--enable-dbo: dual-batch overlap"),
        (["-O3"], "--optimization-level 3: decode steps on a GPU"),
        (["--dtype", "float64"], "--dtype is 'float64'; it must be one of auto, float32, bfloat16"),
        (
            ["--context-length=4096", "--max-model-len=8192"],
            "--context-length is 4096 and --max-model-len is 8192",
        ),
        (["--model", "other"], "the model is given twice, 'm' and --model 'other'"),
        (["--disaggregation-mode=text"], "--role is 'text'; it must be one of both, prefill, decode"),
        (["--disaggregation-mode=decode", "--role=prefill"], "they mean the same: give one"),
        (
            ["--disaggregation-ib-device=mlx5_0"],
            "the transfer between pools has no such setting; use --pools",
        ),
        (["--kv-transfer-config=nixl"], "--kv-transfer-config nixl: it is not JSON"),
        (["--kv-transfer-config=[]"], "--kv-transfer-config []: it must be a JSON object"),
        (
            ['--kv-transfer-config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
            "kv_connector is 'OffloadingConnector', which does not connect a prefill to a decode engine",
        ),
        (
            ['--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
            "kv_role is 'kv_both', which leaves the part to a proxy; give the part of each request that this pool runs: --role",
        ),
        (
            [
                "--kv-transfer-config.kv_connector=NixlConnector",
                "--kv-transfer-config.kv_role=kv_producer",
                "--kv-transfer-config.kv_load_failure_policy=fail",
            ],
            "kv_load_failure_policy is 'fail'; blocks that fail are always recomputed",
        ),
        (
            [
                '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {}}'
            ],
            "kv_connector_extra_config: the transfer between pools has no such setting",
        ),
        (
            ["--pools=prefill:1,decode:1", "--disaggregation-mode=decode"],
            "--role makes this torchrun one pool; give one of them",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_a_sentence(words: list[str], complaint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        taken("m", *words)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (["--model", "m"], ["m"]),
        (["--model-path", "m"], ["m"]),
        (["--max_model_len", "4096"], ["--max-model-len", "4096"]),
        (["--context-length", "4096"], ["--max-model-len", "4096"]),
        (["--disable-radix-cache"], ["--no-enable-prefix-caching"]),
        (["--disable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--disable-cuda-graph"], ["--enforce-eager"]),
        (["--enable-eplb", "--no-enable-eplb"], []),
        (["--sampling-defaults", "openai"], ["--generation-config", "vllm"]),
        (["--random-seed", "7"], ["--seed", "7"]),
        (["--uvicorn-log-level", "trace"], ["--log-level", "debug"]),
        (["--kv-cache-memory-bytes", "1G"], ["--kv-cache-memory", "1G"]),
        (["--kv-offloading-size", "1.5"], ["--kv-offloading-size", "1.5G"]),
        (["--max-model-len", "8k"], ["--max-model-len", "8000"]),
        (["--max-model-len", "8K"], ["--max-model-len", "8192"]),
        (["--max-num-batched-tokens", "1.5k"], ["--max-num-batched-tokens", "1500"]),
        (["--ep-num-redundant-experts=3", "--eplb-log-balancedness"], ['--eplb-config={"num_redundant_experts": 3, "log_balancedness": true}']),
        (["--num-redundant-experts=3", '--eplb-config={"min_gain": 0.5}'], ['--eplb-config={"num_redundant_experts": 3, "min_gain": 0.5}']),
        (["--deepep-mode", "normal"], ["--dispatch-mode", "normal"]),
        (["--disaggregation-mode", "null"], []),
        (["--disaggregation-mode", "null", "--pools=both:1,both:1"], ["--pools=both:1,both:1"]),
        (["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend=nixl"], ["--role", "prefill"]),
        (["--pool=long", "--disaggregation-mode=decode", "--disaggregation-bootstrap-port=9"], ["--pool=long", "--role=decode"]),
        (['--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_port": 1}'], ["--role=prefill"]),
        (["--kv-transfer-config.kv_connector=MooncakeConnector", "--kv-transfer-config.kv_role=kv_consumer"], ["--role=decode"]),
        (["--eplb-config.num_redundant_experts", "3"], ['--eplb-config={"num_redundant_experts": 3}']),
        (["--eplb_config.min_gain=0.5", "--eplb-config.spread=true"], ['--eplb-config={"min_gain": 0.5, "spread": true}']),
    ],
)  # fmt: skip
def test_words_of_others_mean_ours(theirs: list[str], ours: list[str]) -> None:
    assert taken(*theirs)[0] == taken(*ours)[0]


@pytest.mark.parametrize("given", ["8x", "k", "1.0001k", "-8k", "0.5K5"])
def test_what_is_no_number_of_tokens_is_refused(given: str) -> None:
    with pytest.raises(OptionsError, match="--max-model-len"):
        taken(f"--max-model-len={given}")


def test_keywords_of_scripts_are_judged_alike() -> None:
    options = options_from_keywords("m", {"tensor_parallel_size": 1, "enable_chunked_prefill": True}, {})
    assert options == options_from_keywords("m", {}, {})
    with pytest.raises(OptionsError, match="--enable-lora-bias: adapters"):
        options_from_keywords("m", {"enable_lora_bias": True}, {})
    with pytest.raises(
        OptionsError, match=r"'max_model_lens' is not an option \(did you mean max_model_len\?\)"
    ):
        options_from_keywords("m", {"max_model_lens": 8}, {})


@pytest.mark.parametrize(
    "left, says",
    [
        (["--enable-elpb"], "--enable-elpb is not a flag of `wideep serve` (did you mean --enable-eplb?)"),
        (["--max-model", "3"], "--max-model is not a flag of `wideep serve` (did you mean --max-model-len?)"),
        (
            ["3", "--frobnicate=1"],
            "--frobnicate is not a flag of `wideep serve`; `wideep serve --help=all` lists them",
        ),
        (["b"], "unexpected argument 'b'"),
    ],
)
def test_a_word_that_nobody_knows_is_answered_by_the_nearest(left: list[str], says: str) -> None:
    assert why_unknown(left, "wideep serve").startswith(says)


def test_words_after_two_dashes_are_left_alone() -> None:
    assert spelled(["--max_num_seqs=3", "--", "--a_b"]) == ["--max-num-seqs=3", "--", "--a_b"]


def write_config(at: Path, text: str) -> str:
    file = at / "config.yaml"
    file.write_text(text)
    return f"--config={file}"


def test_a_file_of_options_stands_behind_the_command_line(tmp_path: Path) -> None:
    flag = write_config(
        tmp_path,
        "model: m\nport: 9000\nmax_model_len: 8K\ntensor-parallel-size: 1\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\neplb-config:\n  num_redundant_experts: 3\n-dp: 4\napi-key: null\n",
    )
    options, notes = taken("--port=1", flag)
    assert (options.model, options.port, options.engine.max_model_len) == ("m", 1, 8192)
    assert (options.engine.enable_prefix_caching, options.served_model_names) == (False, ("a", "b"))
    assert (options.engine.eplb_config.num_redundant_experts, options.data_parallel_size) == (3, 4)
    assert [note.partition(" has no effect")[0] for note in notes] == ["--tensor-parallel-size 1"]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("max-model-length: 3", "'max-model-length' is not an option (did you mean max_model_len?)"),
        ("enable-lora-bias: true", "--enable-lora-bias: adapters"),
        ("- port", "is not a mapping; give lines such as"),
        ("port: [", "is not YAML"),
        ("config: other.yaml", "names another file"),
        ("port: true", "--port is True; it needs a value"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        taken(write_config(tmp_path, text))
    assert complaint in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionsError, match="--config '/no/such' cannot be read"):
        taken("--config=/no/such")


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-algorithm=NEXTN", "--speculative-num-steps=3", "--speculative-eagle-topk=1"],
        [
            "--speculative-algorithm",
            "EAGLE",
            "--speculative-num-steps",
            "3",
            "--speculative-num-draft-tokens",
            "4",
        ],
        ["--spec-method=mtp", "--spec-tokens=3"],
        ["-sc", '{"method": "deepseek_mtp", "num_speculative_tokens": 3}'],
        ["--speculative-config.method=mtp", "--speculative-config.num_speculative_tokens=3"],
    ],
)
def test_drafts_may_be_asked_for_in_other_words(words: list[str]) -> None:
    options, _ = taken(*words)
    assert options.engine.speculative_config == SpeculativeConfig(method=Method.MTP, num_drafts=3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--speculative-algorithm=EAGLE3"], "the method is 'EAGLE3'; it must be one of ngram, suffix, mtp"),
        (["--speculative-draft-model-path=x"], "--speculative-draft-model-path x: drafts come from texts"),
        (["--speculative-num-steps=3", "--speculative-num-draft-tokens=8"], "one more than the steps"),
        (["--spec-tokens=3", '-sc={"method": "ngram", "num_speculative_tokens": 4}'], "give one"),
    ],
)
def test_other_drafts_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(OptionsError) as raised:
        taken(*words)
    assert sentence in str(raised.value)
