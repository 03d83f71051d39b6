"""The lm-evaluation-harness on both of its sides: `python -m benchmarks.evaluation [--checkpoint
DIR_OR_FILE]`.

    quickdraft      scripts.eval_lm's QuickdraftLM; `drafted` with --draft or --draft_checkpoint
    transformers    the harness's own Hugging Face backend, on the same weights and with the same
                    batch size

Tasks: choices among five endings of a story, and answers up to a line's end or --new tokens, from a
local file. Programs run in turn, one a process, and ratios are taken within a round. A rate is
documents a second of the side's
`loglikelihood` or `generate_until`; the harness's own time does not count.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.pipes import ROOT, Worker, answer_lines, close, in_turn
from benchmarks.record import publish, ratios, row
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from loading.target import pick_device

TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def documents(num_documents: int) -> list[dict]:
    """A beginning of a story, its ending among four of other stories, and the ending's number."""
    words = (ROOT / "checkpoints" / "stories.txt").read_text("utf-8").split()
    endings = [" ".join(words[start : start + 12]) for start in range(0, len(words) - 12, 12)]
    rows = []
    for i in range(num_documents):
        start = 7 * i % (len(words) - 90)
        length, label = 20 + 10 * (i % 5), i % 5
        choices = [endings[(i + 5 * n) % len(endings)] for n in range(5)]
        choices[label] = " ".join(words[start + length : start + length + 12])
        rows.append(
            {"context": " ".join(words[start : start + length]), "choices": choices, "label": label}
        )
    return rows


class Harness:
    """One side, inside a worker."""

    def __init__(self, program: str, args: dict):
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        file, folder, num_new = Path(args["checkpoint"]), Path(args["folder"]), args["new"]
        stop = {"until": ["\n"], "max_gen_toks": num_new, "do_sample": False}
        for name, task in TASKS.items():
            data = {
                "data_files": {"test": str(folder / "documents.jsonl")},
                "cache_dir": str(folder / program),
            }
            common = {
                "task": name,
                "dataset_path": "json",
                "test_split": "test",
                "dataset_kwargs": data,
            }
            generation = {"generation_kwargs": stop} if name == "answer" else {}
            task = common | {"doc_to_text": "{{context}}"} | generation | task
            (folder / f"{program}.{name}.yaml").write_text(
                json.dumps(task | {"task": f"{program}.{name}"})
            )
        from lm_eval.tasks import TaskManager

        self.program, self.manager = (
            program,
            TaskManager(include_path=str(folder), include_defaults=False),
        )
        if program == "transformers":
            from lm_eval.models.huggingface import HFLM

            source = {"pretrained": str(file)}
            if file.is_file():
                source = {"pretrained": str(file.parent), "gguf_file": file.name}
            self.lm = HFLM(
                **source, dtype=args["dtype"], device="cpu", batch_size=args["batch_size"]
            )
        else:
            from cli.opening import load_models
            from scripts import eval_lm

            flags = [
                "--checkpoint",
                str(file),
                "--tasks",
                "-",
                "--device",
                "cpu",
                "--dtype",
                args["dtype"],
            ]
            flags += [
                f"--{name}={args[name]}"
                for name in ("draft", "draft_checkpoint")
                if program == "drafted" and args[name]
            ]
            sys.argv[1:] = flags
            device = pick_device("cpu")
            model, tokenizer, drafter = load_models(eval_lm.parse_args(), device)
            self.lm = eval_lm.QuickdraftLM(
                model, tokenizer, batch_size=args["batch_size"], drafter=drafter
            )

    def evaluate(self, task: str) -> dict:
        from lm_eval import simple_evaluate

        name, seconds = f"{self.program}.{task}", 0.0
        method_name = TASKS[task]["output_type"].replace("multiple_choice", "loglikelihood")

        def timed(*args, **kwargs):
            nonlocal seconds
            started = time.perf_counter()
            results = getattr(type(self.lm), method_name)(self.lm, *args, **kwargs)
            seconds += time.perf_counter() - started
            return results

        with mock.patch.object(self.lm, method_name, timed):
            results = simple_evaluate(
                self.lm,
                tasks=[name],
                task_manager=self.manager,
                bootstrap_iters=0,
                verbosity="ERROR",
            )
        num_documents = results["n-samples"][name]["effective"]
        texts = (
            [sample["filtered_resps"] for sample in results["samples"][name]]
            if task == "answer"
            else None
        )
        metric = next(
            value
            for key, value in results["results"][name].items()
            if key.startswith(("acc,", "exact_match,"))
        )
        return {"rate": num_documents / seconds, "metric": metric, "texts": texts}


def run(args: argparse.Namespace) -> list[dict]:
    """Measure, print, write."""
    programs = ["quickdraft", "transformers"] + (
        ["drafted"] if args.draft or args.draft_checkpoint else []
    )
    name, rows = ("smollm2" if "SmolLM2" in args.checkpoint else Path(args.checkpoint).name), []
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps(document) + "\n" for document in documents(args.documents))
        Path(folder, "documents.jsonl").write_text(lines, "utf-8")
        worker_args = json.dumps(vars(args) | {"write": None, "folder": folder})
        # cli/ sets this for this project alone.
        spin_count, workers = {"GOMP_SPINCOUNT": os.environ.pop("GOMP_SPINCOUNT", "10000")}, {}
        for program in programs:
            env = None if program == "transformers" else spin_count
            workers[program] = Worker(
                "benchmarks.evaluation", "--worker", program, worker_args, env=env
            )
        try:
            for task in TASKS:
                answers, _ = in_turn(workers, args.rounds, [{"method": "evaluate", "task": task}])
                rates = {
                    program: [answer["rate"] for answer in answers[program]] for program in programs
                }
                first = {program: answers[program][0] for program in programs}
                metrics = ", ".join(
                    f"{program} {first[program]['metric']:.3f}" for program in programs
                )
                comment = (
                    f"{args.documents} documents, batches of {args.batch_size},"
                    f" {args.dtype}; scores: {metrics}"
                )
                if first["quickdraft"]["texts"]:
                    pairs = zip(
                        first["quickdraft"]["texts"], first["transformers"]["texts"], strict=True
                    )
                    comment += f"; {sum(a == b for a, b in pairs)} texts equal"
                rows += [
                    row(
                        f"{name}.eval.{task}.{program}.documents_s",
                        rates[program],
                        "documents/s",
                        comment,
                    )
                    for program in programs
                ]
                rows += [
                    row(
                        f"{name}.eval.{task}.{'drafted.' * (program == 'drafted')}vs_transformers",
                        ratios(rates[program], rates["transformers"]),
                        "ratio",
                        comment,
                    )
                    for program in programs
                    if program != "transformers"
                ]
        finally:
            close(workers)
    return publish(rows, args.write)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        out, sys.stdout = sys.stdout, sys.stderr
        program = Harness(sys.argv[2], json.loads(sys.argv[3]))
        sys.stdout = out
        return answer_lines(program)
    parser = Parser(
        description="Measure scripts.eval_lm beside the harness's Hugging Face backend."
    )
    add = parser.add_argument
    add("--checkpoint", default="checkpoints/demo", metavar="PATH", help="default: %(default)s")
    add("--draft_checkpoint", default="", metavar="DIR", help="measure drafted answers too")
    add("--draft", default="", metavar="SPEC", help="likewise, such as suffix")
    add("--documents", type=positive, default=48, help="of each task; default: %(default)s")
    add(
        "--new", type=positive, default=48, help="tokens of an answer at most; default: %(default)s"
    )
    add("--batch_size", type=positive, default=8, help="of both sides; default: %(default)s")
    add("--dtype", default="bfloat16", help="of both sides; default: %(default)s")
    add(
        "--rounds",
        type=positive,
        default=5,
        help="measurements of every program; default: %(default)s",
    )
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    with exit_on_error():
        print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
