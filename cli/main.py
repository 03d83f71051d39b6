"""`python generate.py`: join the ranks, read prompts, open an LLM, decode, report.

The other files of cli/ are named after these steps: options and flags, prompts, opening, output,
chat, report. cli/start.py turns the errors that `main` raises into a line and an exit status.
"""

import contextlib
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from cli.chat import chat
from cli.errors import defer_interrupts, silent, use_threads
from cli.exits import print_broken
from cli.flags import FLAGS, with_chosen_seed
from cli.opening import open_llm
from cli.options import Options
from cli.output import Output, open_output
from cli.page import write_report
from cli.prompt_cache import PromptCache
from cli.prompts import read_prompts
from cli.report import report
from loading.files import write_atomically
from loading.target import pick_device
from tp import join, local_device


def main(options: Options) -> None:
    device = pick_device(local_device(options.model.device))
    everyone = join(device, options.run.timeout)
    is_root = everyone.rank == 0
    use_threads(options.run.threads)
    with silent(not is_root):
        everyone.check_same(lambda: values_to_compare(options))
        options = with_chosen_seed(options, everyone.broadcast_object)
        file = open_output(options.output.file) if is_root else None
        has_prompts = is_root and not options.prompts.interactive
        prompts_read = read_prompts(options.prompts) if has_prompts else ([], [])
        prompts, broken = everyone.broadcast_object(prompts_read)
        print_broken(broken, prompts)
        cache = PromptCache(options)
        llm, rows, refused = open_llm(options, device, everyone, prompts)
        output = Output(llm, rows, options, file)
        profile = options.output.profile if is_root else None
        with cache.around(llm.engine, [row.ids for row in rows]), profiled(profile):
            if options.prompts.interactive:
                chat(llm, options)
            with output, defer_interrupts() as interrupts:
                for answer in llm.run(output.new_answers(), interrupts):
                    output.add(answer)
        if output.answers:
            report(output.timings(), llm.engine)
        if options.output.report and is_root:
            write_report(options, output.answers, llm.engine)
        # No rank may end before the others by its exit status.
        if everyone.broadcast_object(bool(broken or refused or output.has_errors)):
            sys.exit(2)


def values_to_compare(options: Options) -> dict[str, object]:
    """What must be equal on all ranks. Paths may differ between machines, so only their
    presence counts."""
    values = {"its torch": torch.__version__}
    for key, value in options.flags.items():
        flag = FLAGS[key]
        values[flag.name] = value is None if flag.is_path else value
    values["its generation_config.json"] = options.requests.of_folder
    if options.model.random_weights:
        values["the file of --random_weights"] = Path(options.model.random_weights).read_bytes()
    return values


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of the block to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if not file:
        return

    def write(partial: Path) -> None:
        trace.export_chrome_trace(str(partial))
        if file.endswith(".gz"):
            partial.write_bytes(gzip.compress(partial.read_bytes()))

    write_atomically(Path(file), write)
