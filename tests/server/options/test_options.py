"""Options from every source: flags, keywords, and the value that a parent process passes on."""

import argparse
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.config import DispatchMode, EngineSettings
from server.options.flag import OptionsError, size
from server.options.reading import (
    add_options,
    environment_from,
    handed_on,
    known_words,
    options_from,
    options_from_keywords,
)
from server.options.table import OPTIONS, HttpOptions, LogOptions, Options
from server.tools.page import options_page
from tests.support.service.certificate import write_certificate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "options.md"


def parse(*words: str, environment: dict[str, str] | None = None, **defaults: Any) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return options_from(parser.parse_args(words), environment or {}, defaults=defaults)


def test_the_page_of_options_is_the_tables() -> None:
    assert PAGE.read_text() == options_page(), "run: python -m server.tools.page > docs/options.md"


def test_a_flag_and_a_keyword_belong_to_one_option() -> None:
    names = known_words()
    keywords = [option.keyword for option in OPTIONS]
    assert len(set(names)) == len(names) and len(set(keywords)) == len(keywords)


def test_defaults_are_those_of_the_design() -> None:
    options = parse()
    assert (options.model, options.host, options.port) == ("demo", "127.0.0.1", 8000)
    assert (options.engine.max_num_seqs, options.engine.max_num_batched_tokens) == (None, None), (
        "the device decides"
    )
    assert (options.device, options.engine.enforce_eager) == ("auto", False)
    assert options.served_model_names == ("demo",)
    assert options.engine.enable_prefix_caching


def test_every_setting_of_an_engine_has_a_flag_with_its_default() -> None:
    defaults = {option.path[1]: option.flag.default for option in OPTIONS if option.path[:1] == ("engine",)}
    assert EngineSettings(**defaults) == EngineSettings()
    assert set(defaults) == {field.name for field in fields(EngineSettings)}


def test_what_is_handed_on_is_the_same_options() -> None:
    options = parse(
        "some/model",
        *(
            "--served-model-name",
            "a",
            "b c",
            "-dp",
            "3",
            "--threads=2",
            "--kv-cache-memory",
            "1.5G",
            "--dtype",
        ),
        *(
            "bfloat16",
            "--max-model-len",
            "99",
            "--no-enable-prefix-caching",
            "--request-timeout",
            "0.1",
            "--port=0",
        ),
        *(
            "--distributed-timeout-seconds=2.5",
            "--host=::",
            "--all2all-backend=gloo",
            "--served-model-name=-dash",
            "--api-key=k",
            "--device=cuda",
            "--enforce-eager",
            "--enable-torch-compile",
            "--dispatch-mode=low_latency",
            '--speculative-config={"method": "suffix"}',
            "--batch-invariant",
            "--enable-eplb",
            '--eplb-config={"num_redundant_experts": 3, "horizon_s": 1.5}',
            "--expert-placement=some/placement.json",
            "--tool-call-parser=glm45",
            "--reasoning-parser=deepseek_r1",
            "--enable-auto-tool-choice",
            "--enable-expert-parallel",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--enable-server-load-tracking",
        ),
        *("--allowed-origins", '["https://a", "b"]', "--allowed-methods", '["GET"]', "--allow-credentials"),
        *("--forwarded-allow-ips=10.0.0.7, 10.1.0.0/16,::1", "--max-connections=9"),
        *("--max-request-bytes=1K", "--root-path=/llm/", "--shutdown-timeout=7", "--log-format=json"),
        *("--log-level=debug", "--log-requests", "--disable-access-log"),
        "--disable-access-log-for-endpoints=",
    )
    assert options.http == HttpOptions(
        allowed_origins=("https://a", "b"),
        allowed_methods=("GET",),
        allow_credentials=True,
        max_request_bytes=1024,
        max_connections=9,
        forwarded_allow_ips=("10.0.0.7", "10.1.0.0/16", "::1"),
        root_path="/llm",
        shutdown_timeout_s=7.0,
    )
    assert options.log == LogOptions(
        format="json", level="debug", requests=True, access=False, quiet_paths=()
    )
    handed = parse(*handed_on(options), environment=environment_from(options))
    assert handed == options
    assert handed.engine.dispatch_mode is DispatchMode.LOW_LATENCY
    assert options.served_model_names == ("a", "b c", "-dash")


@settings(max_examples=25)
@given(st.floats(min_value=1e-9, max_value=1.0), st.floats(min_value=0, max_value=1e300))
def test_floats_survive_the_way_to_a_child(share: float, timeout_s: float) -> None:
    options = parse(f"--gpu-memory-utilization={share!r}", f"--request-timeout={timeout_s!r}")
    assert parse(*handed_on(options)) == options


def test_the_defaults_of_http_and_logs_are_those_of_their_classes() -> None:
    options = parse()
    assert (options.http, options.log) == (HttpOptions(), LogOptions())
    assert not options.needs_key


def test_a_cluster_key_of_one_start_travels_in_the_environment_alone() -> None:
    options = replace(parse(), own_cluster_key="5e5a3e" * 10)
    assert options.cluster_key == b"5e5a3e" * 10
    assert "5e5a3e" not in " ".join(handed_on(options)) + repr(options)
    assert parse(*handed_on(options), environment=environment_from(options)) == options
    assert parse(environment=environment_from(options)).cluster_key is None, "users pass a file"


def test_a_template_s_file_is_handed_on_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionsError, match=r"--chat-template is 'own.jinja', which is not a file"):
        parse("--chat-template=own.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    options = parse("--chat-template=own.jinja")
    assert options.chat_template == str(tmp_path / "own.jinja")
    assert parse(*handed_on(options)) == options


def test_a_file_of_keys_asks_for_one_and_is_handed_on_by_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nsesame\n")
    options = parse(f"--api-key-file={file}")
    assert options.needs_key and options.api_keys == ()
    assert "sesame" not in " ".join([*handed_on(options), *environment_from(options).values()])
    assert parse(*handed_on(options)) == options


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the `openssl` program to make a certificate"
)
def test_a_certificate_is_loaded_before_anything_starts(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    options = parse(f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}")
    assert options.http.scheme == "https"
    assert parse(*handed_on(options)) == options
    with pytest.raises(OptionsError, match="cannot be used"):
        parse(f"--ssl-certfile={certificate}")  # without its key


def test_keys_travel_in_the_environment_only() -> None:
    options = parse("--api-key", "one", "--api-key=two", environment={"WIDEEP_API_KEY": "two three"})
    assert options.api_keys == ("one", "two", "three")
    assert not {"one", "two", "three"} & set(handed_on(options))
    assert environment_from(options) == {"WIDEEP_API_KEY": "one two three"}


def test_the_served_name_of_a_directory_is_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "olmoe"
    directory.mkdir()
    assert parse(f"{directory}/").served_model_names == ("olmoe",)
    monkeypatch.chdir(directory)
    assert parse(".").served_model_names == ("olmoe",)
    assert parse("org/name").served_model_names == ("org/name",)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--port=70000"], "--port is 70000; it must be 0 to 65535"),
        (["--max-num-seqs=0"], "--max-num-seqs is 0; it must be at least 1"),
        (["--max-num-batched-tokens=15"], "--max-num-batched-tokens is 15; it must be at least 16"),
        (["--max-num-batched-tokens=32", "--max-num-seqs=64"], "it must be at least --max-num-seqs (64)"),
        (["--data-parallel-size=0"], "--data-parallel-size is 0"),
        (["--threads=-1"], "--threads is -1"),
        (["--max-model-len=0"], "--max-model-len is 0"),
        (["--gpu-memory-utilization=1.5"], "--gpu-memory-utilization is 1.5"),
        (["--gpu-memory-utilization=nan"], "--gpu-memory-utilization is nan"),
        (["--gpu-memory-utilization=1", "--kv-cache-memory=1G"], "both size the KV cache"),
        (["--distributed-timeout-seconds=0"], "--distributed-timeout-seconds is 0.0; it must be above 0"),
        (["--distributed-timeout-seconds=nan"], "--distributed-timeout-seconds is nan"),
        (["--distributed-timeout-seconds=inf"], "it must be above 0 and at most 86400 (a day)"),
        (["--request-timeout=-1"], "--request-timeout is -1.0"),
        (["--request-timeout=nan"], "--request-timeout is nan"),
        (["--request-timeout=inf"], "--request-timeout is inf"),
        (["--rank-recovery-timeout=-1"], "--rank-recovery-timeout is -1.0; it must be 0 or more seconds"),
        (["--rank-recovery-timeout=nan"], "--rank-recovery-timeout is nan"),
        (["--kv-cache-memory=lots"], "--kv-cache-memory is 'lots'; give a size such as 512M"),
        (["--kv-offloading-size=lots"], "--kv-offloading-size is 'lots'; give a size such as 512M"),
        (["--kv-offloading-size=-1"], "--kv-offloading-size is '-1'; a plain number counts GiB"),
        (["--kv-offloading-size=nan"], "--kv-offloading-size is 'nan'; a plain number counts GiB"),
        (
            ["--kv-offloading-size=21474836480"],
            "counts GiB, as in vLLM: give a size such as 20 or 20G, or 0 for none",
        ),
        (
            ["--kv-offloading-dir=d"],
            "--kv-offloading-dir needs --kv-offloading-disk-size: a tier on disk has",
        ),
        (
            ["--kv-offloading-dir=d", "--kv-offloading-disk-size=0"],
            "--kv-offloading-dir needs --kv-offloading-disk",
        ),
        (["--kv-offloading-disk-size=1G"], "--kv-offloading-disk-size needs --kv-offloading-dir"),
        (["--kv-offloading-dir=/dev/null", "--kv-offloading-disk-size=1"], "is '/dev/null'; give a folder"),
        (
            ["--kv-offloading-size=1G", "--no-enable-prefix-caching"],
            "--kv-offloading-size keeps cached prefixes, but --no-enable-prefix-caching disables the prefix cache; remove",
        ),
        (
            ["--kv-offloading-dir=d", "--kv-offloading-disk-size=1", "--no-enable-prefix-caching"],
            "--kv-offloading-dir keeps cached prefixes, but --no-enable-prefix-caching",
        ),
        (["--kv-cache-dtype=fp4"], "--kv-cache-dtype is 'fp4'; it must be one of auto, fp8, int8"),
        (["--api-key="], "--api-key is empty"),
        (["--api-key=a b"], "--api-key is empty or contains white space"),
        (["--served-model-name="], "--served-model-name has an empty name"),
        ([""], "MODEL is empty"),
        (["--eplb-config=1"], "--eplb-config: it is '1'; it must be an object"),
        (['--eplb-config={"a": 1}'], "--eplb-config: a is not known"),
        (["--allowed-origins=*"], "--allowed-origins is '*'; give a JSON list of strings"),
        (["--allowed-headers=[1]"], "--allowed-headers is '[1]'; give a JSON list of strings"),
        (["--max-request-bytes=0"], "--max-request-bytes is '0'; give a size"),
        (
            ["--max-inflight-request-bytes=1M"],
            "is 1048576; it must be at least --max-request-bytes (33554432)",
        ),
        (["--max-connections=0"], "--max-connections is 0; it must be at least 1"),
        (["--max-connections-per-address=0"], "--max-connections-per-address is 0; it must be at least 1"),
        (
            ["--forwarded-allow-ips=10.0.0.7,proxy"],
            "--forwarded-allow-ips has 'proxy'; give addresses such as",
        ),
        (["--shutdown-timeout-seconds=-1"], "--shutdown-timeout-seconds is -1.0; it must be 0 or more"),
        (["--shutdown-timeout-seconds=inf"], "--shutdown-timeout-seconds is inf"),
        (["--root-path=llm"], "--root-path is 'llm'; it must begin with /"),
        (["--api-key-file=/no/such/file"], "--api-key-file '/no/such/file' cannot be read"),
        (["--cluster-key-file=/no/such/file"], "--cluster-key-file '/no/such/file' cannot be read"),
        (["--join=head"], "--join is 'head'; give HOST:PORT"),
        (["--join=head:0"], "--join is 'head:0'; give HOST:PORT"),
        (["--join=head:\u00b2"], "--join is 'head:\u00b2'; give HOST:PORT"),
        (["--uds=" + "s" * 108], "; give a path of at most 107 bytes, folders included"),
        (["--api-server-count=0"], "--api-server-count is 0; it must be at least 1"),
        (["--api-server-count=all"], "--api-server-count is 'all'; it must be a whole number"),
        (
            ["--standby=a:b"],
            "--standby is 'a:b'; give a name or an address of the second node, such as 10.0.0.2",
        ),
        (["--standby=fe80::1"], "--standby is 'fe80::1'"),
        (["--standby="], "--standby is ''"),
        (["--standby=a:0"], "--standby is 'a:0'"),
        (["--standby=a", "--uds=s"], "--standby does not work with --uds; leave one of the two out"),
        (["--standby=a", "--pool=b"], "--standby does not work with --pool"),
        (["--standby=a", "--port=0"], "--standby does not work with --port 0"),
        (["--fronts=all"], "--fronts is 'all'"),
        (["--fronts=per-node", "--standby=a"], "--fronts per-node does not work with --standby"),
        (["--fronts=per-node", "--pool=b"], "--fronts per-node does not work with --pool"),
        (["--fronts=per-node", "--port=0"], "--fronts per-node does not work with --port 0"),
        (["--ssl-keyfile=x"], "--ssl-keyfile needs a certificate"),
        (["--ssl-certfile=/no/cert"], "--ssl-certfile is '/no/cert', which is not a file"),
        (["--disable-access-log-for-endpoints=health"], "has 'health'; give paths such as"),
        (["--otlp-traces-endpoint=localhost:4317"], "is 'localhost:4317'; give a URL"),
        (["--tool-call-parser=x"], "--tool-call-parser is 'x'; it must be one of cohere"),
        (["--reasoning-parser=x"], "--reasoning-parser is 'x'; it must be one of cohere"),
        (["--max-num-seqs=many"], "--max-num-seqs is 'many'; it must be a whole number"),
        (["--request-timeout=soon"], "--request-timeout is 'soon'; it must be a number"),
        (["--enable-dbo"], "--enable-dbo: dual-batch overlap"),
        (["--options={}"], "--options is for processes that WideEP starts itself"),
    ],
)
def test_bad_values_are_named(words: list[str], complaint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse(*words)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "text, num_bytes",
    [("512M", 512 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("7", 7), ("3kb", 3072), (" 1T ", 1 << 40)],
)
def test_sizes_are_powers_of_1024(text: str, num_bytes: int) -> None:
    assert size("--x", text) == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("20", 20 << 30), ("0.5", 1 << 29), ("20G", 20 << 30), ("64M", 64 << 20), ("0", 0)],
)
def test_a_plain_size_of_a_tier_counts_gib(text: str, num_bytes: int) -> None:
    options = parse(f"--kv-offloading-size={text}")
    assert options.engine.kv_offloading_bytes == num_bytes
    assert options.engine.has_kv_tiers == (num_bytes > 0)
    assert parse(*handed_on(options)) == options


@pytest.mark.parametrize("text", ["", "0", "-1G", "G", "inf", "nan", "1e999", "1 000", "5X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionsError):
        size("--x", text)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({}, ()),
        ({"data_parallel_size": 2, "max_model_len": 64}, ("--data-parallel-size=2", "--max-model-len=64")),
        ({"dtype": "bfloat16", "kv_cache_memory": "16M"}, ("--dtype=bfloat16", "--kv-cache-memory=16M")),
        ({"enable_eplb": True, "enable_expert_parallel": True}, ("--enable-eplb",)),
        ({"enable_eplb": False, "enable_prefix_caching": True}, ()),
        ({"enable_prefix_caching": False}, ("--no-enable-prefix-caching",)),
        ({"eplb_config": {"num_redundant_experts": 2}}, ('--eplb-config={"num_redundant_experts": 2}',)),
        ({"served_model_name": ["a", "b"], "api_key": ["k"]}, ("--served-model-name=a", "--served-model-name=b", "--api-key=k")),
        ({"max_model_len": None, "request_timeout": 1.5}, ("--request-timeout=1.5",)),
        ({"kv_offloading_size": 2, "kv_offloading_dir": "d", "kv_offloading_disk_size": "4G"}, ("--kv-offloading-size=2G", "--kv-offloading-dir=d", "--kv-offloading-disk-size=4")),
        ({"port": 1234}, ("--port=1234",)),
        ({"allowed_origins": ["http://a", "http://b"]}, ('--allowed-origins=["http://a", "http://b"]',)),
    ],
)  # fmt: skip
def test_keywords_mean_what_the_flags_mean(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    expected = parse("m", *words, port=0, access_log=False, log_stats=False)
    assert options_from_keywords("m", keywords, {}) == expected


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        (
            {"tensor_parallel_size": 2},
            "--tensor-parallel-size 2: attention runs data-parallel and experts are spread over all ranks: use --data-parallel-size 2",
        ),
        ({"model_len": 2}, "'model_len' is not an option"),
        ({"dtype": "int3"}, "--dtype is 'int3'; it must be one of auto, float32, bfloat16"),
        ({"max_num_seqs": "many"}, "--max-num-seqs is 'many'; it must be a whole number"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; it must be at least 1"),
        ({"max_num_seqs": 2.5}, "--max-num-seqs is 2.5; it must be a whole number"),
        ({"enable_dbo": True}, "--enable-dbo: dual-batch overlap"),
        ({"enable_eplb": "yes"}, "--enable-eplb is 'yes'; it must be True or False"),
        ({"max_num_seqs": True}, "--max-num-seqs is True; it needs a value"),
    ],
)
def test_a_wrong_keyword_is_a_sentence_and_not_the_end_of_the_script(
    keywords: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        options_from_keywords("m", keywords, {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        ("k" * 64, 0o640, r"accessible to other users \(mode 640\); run chmod 600"),
        ("k" * 64, 0o604, r"mode 604"),
        ("k" * 31 + "\n", 0o600, "has 31 bytes; a key needs at least 32"),
    ],
)
def test_a_cluster_key_is_a_secret(tmp_path: Path, content: str, mode: int, complaint: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(OptionsError, match=complaint):
        parse(f"--cluster-key-file={file}")
    file.write_text("k" * 32 + "\n")
    file.chmod(0o600)
    assert parse(f"--cluster-key-file={file}").cluster_key == b"k" * 32
