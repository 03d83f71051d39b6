"""`python generate.py`: join the ranks, read prompts, open an LLM, decode, report.

    main, run       the program; `run` raises the errors that `main` turns into a line and an exit
                    status
    Job             the prompts of one run, an LLM that is ready for them, and where their answers
                    go

The other files of cli/ are named after these steps: options and flags, prompts, opening, output,
chat, report.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from cli.answers import RowAnswer
from cli.chat import chat
from cli.errors import defer_interrupts, exit_on_error, silent, use_threads
from cli.exits import print_broken
from cli.flags import FLAGS, parse_args, with_chosen_seed
from cli.opening import Workload, open_llm
from cli.options import Options
from cli.output import Output, open_output
from cli.page import write_report
from cli.prompt_cache import PromptCache
from cli.prompts import read_prompts
from cli.report import report
from loading.files import write_atomically
from loading.target import pick_device
from tp import Ranks, join, local_device


@exit_on_error(joins_ranks=True)
def main(options: Options | None = None) -> None:
    options = parse_args() if options is None else options
    device = pick_device(local_device(options.model.device))
    everyone = join(device, options.run.timeout)
    use_threads(options.run.threads)
    with silent(everyone.rank > 0):
        everyone.check_same(lambda: values_to_compare(options))
        options = with_chosen_seed(options, everyone.broadcast_object)
        job = Job(options, device, everyone)
        profile = options.output.profile if everyone.rank == 0 else None
        with job.cache.around(job.llm.engine, job.prefixes), profiled(profile):
            if options.prompts.interactive:
                chat(job.llm, options)
            with job.output as output, defer_interrupts() as interrupts:
                for answer in job.llm.run(job.answers(), interrupts):
                    output.add(answer)
        job.report()
        # No rank may end before the others by its exit status.
        if everyone.broadcast_object(job.has_errors()):
            sys.exit(2)


run = main.__wrapped__


class Job:
    """The prompts of one run, an LLM that is ready for them, and where their answers go."""

    def __init__(self, options: Options, device: torch.device, everyone: Ranks):
        self.options = options
        self.is_root = everyone.rank == 0
        prompts = []
        self.broken = []
        file = None
        if self.is_root:
            file = open_output(options.output.file)
            if not options.prompts.interactive:
                prompts, self.broken = read_prompts(options.prompts)
        prompts, self.broken = everyone.broadcast_object((prompts, self.broken))
        print_broken(self.broken, prompts)
        self.cache = PromptCache(options)
        workload = Workload(prompts)
        self.llm, self.rows, self.refused = open_llm(options, workload, device, everyone)
        self.prefixes = [row.ids for row in self.rows]  # of the prompts, for the cache's file
        self.output = Output(self.llm, self.rows, options, file)

    def answers(self) -> Iterator[RowAnswer]:
        """New answers for the rows."""
        return (self.output.answer(row, number) for number, row in enumerate(self.rows))

    def report(self) -> None:
        output = self.output
        if output.answers:
            report(output.timings(), self.llm.engine)
        if self.options.output.report and self.is_root:
            write_report(self.options, output.answers, self.llm.engine)

    def has_errors(self) -> bool:
        """Could a prompt not be answered?"""
        return bool(self.broken or self.refused or self.output.has_errors)


def values_to_compare(options: Options) -> dict[str, object]:
    """What must be equal on all ranks. Paths may differ between machines, so only their
    presence counts."""
    values = {"its torch": torch.__version__}
    for key, value in options.flags.items():
        flag = FLAGS[key]
        values[flag.name] = value is None if flag.is_path else value
    values["its generation_config.json"] = options.requests.of_folder
    if options.model.random_weights:
        values["the file of --random_weights"] = options.model.config_file.read_bytes()
    return values


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of the block to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if file:
        write_atomically(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))
