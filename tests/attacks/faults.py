"""Stop every program in the middle, take away its disk, its input and its reader, and see what it
leaves behind.

    python -m tests.attacks.faults [--seed 1] [--moments 5] [--only quantize bench] [--faults
    SIGTERM] [--write FILE]

    build, PROGRAMS     tiny inputs, and the programs as data: command, what it makes, when that is
                        whole
    FAULTS              what is done to a run: signals at random moments, full and read-only disks,
                        closed pipes, …
    Case                one program, disturbed once, with files and processes of its own
    problems            what is wrong about a disturbed run, and about the undisturbed one after it

Programs run as they are, in processes of their own; each first undisturbed, for its duration and
its output. Moments are spread over that duration, one at random in each equal part, from the time
on when Python itself has started. After a fault must hold: the exit status is the one documented,
with one line "error: …" where it is 2, and no traceback; every process has ended; what stands under
the output's name is missing, what was there before, or equal to the undisturbed output, bit for
bit; NAME.partial does not load, unless it is whole; what was printed is a beginning of the
undisturbed text; and the same command, undisturbed, then makes the undisturbed output and leaves no
NAME.partial, from the last saved step on where training states are saved. Disks are small tmpfs
inside a temporary folder, which takes the right to mount; without it those cases are skipped with a
word. Linux only.
"""

import collections
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.record import record
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.errors import UserError
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model

ROOT = Path(__file__).parents[2]
DEMO, DRAFT = ROOT / "checkpoints" / "demo", ROOT / "checkpoints" / "demo-draft"
START_S = 0.15  # Python's own; before, Ctrl-C is not ours to answer
DEADLINE_S, PATIENCE_S = 180, 30  # for a process to end by itself; for its children to follow it
RANKS_WAIT_S = 20  # --timeout of the launches
DISK = 2**20  # bytes of a small disk
ROOM = 200_000  # bytes that are left on a nearly full one
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # of Linux's prctl
NOISE = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error")

HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# ---------------------------------------------------------------------------------------- programs


def contents(path: Path) -> object:
    """Digests of a file, or of all files of a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def without_times(folder: Path) -> object:
    """Of a distilled folder: distill.json but for seconds and costs, which are measured; all
    else."""
    made = json.loads((folder / "distill.json").read_text())
    learned = [
        {key: one[key] for key in ("step", "train_loss", "alpha")} for one in made["evaluations"]
    ]
    return {**contents(folder), "distill.json": learned}


def rows(file: Path) -> object:
    """Of a results file: what was measured, and the row that was there before."""
    found = json.loads(file.read_text())["rows"]
    return [row if row["id"] == "before" else row["id"] for row in found]


class Program(NamedTuple):
    """`command` after python, where IN and OUT stand for folders; `made` is what it makes in OUT,
    `image` what of that does not depend on the time; `says`: its text on stdout does not either;
    `before`: files that OUT holds at first;
    `state`: a training state to continue from; `in_place`: a folder of that name may be there as
    long as it does not load; `ranks`: torchrun's; `share`: of the moments; `only`: these faults,
    where each takes long."""

    name: str
    command: tuple[str, ...]
    made: str | None = None
    image: Callable[[Path], object] = contents
    says: bool = False
    before: Mapping[str, str] = MappingProxyType({})
    state: str | None = None
    in_place: bool = False
    ranks: int = 0
    share: float = 1
    only: tuple[str, ...] = ()


OLD = json.dumps({"rows": [{"id": "before", "value": 1, "unit": "s"}]})
TEXT = (
    "generate.py",
    "--checkpoint",
    "IN/demo",
    "--device",
    "cpu",
    "--ignore_eos",
    "--max_new_tokens",
)
TRAINING = (
    "--context",
    "64",
    "--seed",
    "3",
    "--device",
    "cpu",
    "--work",
    "OUT/work",
    "--output",
    "OUT/made",
)
PROGRAMS = [
    Program("generate", (*TEXT, "400", "--draft_checkpoint", "IN/draft"), says=True),
    Program(
        "quantize",
        ("quantize.py", "--checkpoint", "IN/model", "--scheme", "int4-g32", "--output", "OUT/made"),
        "made",
    ),
    Program(
        "distill_draft",
        (
            "-m",
            "scripts.distill_draft",
            "--target",
            "IN/demo",
            "--text",
            "IN/text.txt",
            "--layers",
            "1",
            "--dim",
            "64",
            "--batch",
            "4",
            "--heldout",
            "500",
            "--steps",
            "24",
            "--eval_every",
            "4",
            "--patience",
            "99",
            *TRAINING,
        ),
        "made",
        without_times,
        state="work/state.pt",
    ),
    Program(
        "train_demo",
        (
            "-m",
            "benchmarks.train_demo",
            "--text",
            "IN/stories.txt",
            "--heldout",
            "IN/text.txt",
            "--steps",
            "12",
            "--save_every",
            "3",
            "--batch",
            "2",
            "--eval_rows",
            "2",
            *TRAINING,
        ),
        "made/demo",
        state="work/demo.pt",
        in_place=True,
        share=0.4,
    ),
    Program(
        "bench",
        ("-m", "benchmarks.bench", "first_token", "--rounds", "1", "--write", "OUT/made.json"),
        "made.json",
        rows,
        before={"made.json": OLD},
        share=0.2,
        only=("SIGINT", "SIGTERM", "SIGKILL", "stdout full", "disk full"),
    ),
    Program(
        "two ranks",
        (
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            TEXT[0],
            "--timeout",
            str(RANKS_WAIT_S),
            *TEXT[1:],
            "150",
        ),
        says=True,
        ranks=2,
        share=0.2,
    ),
]


def build(root: Path) -> Path:
    """What the programs read."""
    shutil.copytree(DEMO, root / "demo")
    shutil.copytree(DRAFT, root / "draft")
    model = random_model(config_from_hf(HF), dtype=torch.float32)
    save_model(model, root / "model", HF)
    shutil.copy(DEMO / "tokenizer.model", root / "model")
    english = (ROOT / "README.md").read_text() + (ROOT / "benchmarks" / "NOTES.md").read_text()
    (root / "text.txt").write_text(english[:12_000])
    sources = [file.read_text() for file in sorted(ROOT.glob("*.py"))]
    (root / "stories.txt").write_text("<|endoftext|>\n".join([english, *sources]))
    return root


# ------------------------------------------------------------------------------------------- runs


class Case:
    """One run of a program on files of its own. Its processes are known by a word in their
    environment."""

    def __init__(self, program: Program, inputs: Path, root: Path):
        self.program, self.inputs, self.out = program, inputs, root / "out"
        self.word = f"FAULTS_CASE={root.name}"
        self.out.mkdir(parents=True)
        self.stdout, self.stderr, self.status = "", "", None
        self.deadline = DEADLINE_S

    def place(self) -> None:
        """What is there before the program runs."""
        for name, text in self.program.before.items():
            (self.out / name).write_text(text)

    @property
    def command(self) -> list[str]:
        folders = {"IN/": f"{self.inputs}/", "OUT/": f"{self.out}/"}
        return [
            sys.executable,
            *(
                re.sub("^(IN/|OUT/)", lambda m: folders[m[0]], part)
                for part in self.program.command
            ),
        ]

    def run(self, strike: Callable[["Case"], None] | None = None, **options) -> float:
        """Run it, struck once or not, to its end; seconds. Leaves what it printed, its exit status
        and, in `left`, the processes that did not end with it."""
        name, value = self.word.split("=")
        env = os.environ | {name: value, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=env, start_new_session=True, **(streams | options)
            )
            try:
                if strike:
                    strike(self)
                self.status = self.process.wait(self.deadline)
                seconds = time.perf_counter() - start
                self.left = self.wait_for_others()
            except subprocess.TimeoutExpired:
                self.status, self.left, seconds = (
                    None,
                    self.processes(),
                    time.perf_counter() - start,
                )
            finally:
                for pid in self.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.wait()
            out.seek(0), err.seek(0)
            self.stdout, self.stderr = (
                stream.read().decode(errors="replace") for stream in (out, err)
            )
        return seconds

    def processes(self) -> dict[int, str]:
        """Processes of this case that run, each with its rank, if it has one."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if self.word in words and not dead:
                    ranks = [word for word in words if word.startswith("RANK=")]
                    found[int(folder.name)] = ranks[0] if ranks else ""
        return found

    def wait_for_others(self) -> dict[int, str]:
        end = time.monotonic() + PATIENCE_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return left


class Whole(NamedTuple):
    """What an undisturbed run came to."""

    seconds: float
    stdout: str
    image: object


def undisturbed(program: Program, inputs: Path, root: Path) -> Whole:
    """UserError where the program does not even work by itself."""
    case = Case(program, inputs, root)
    case.place()
    seconds = case.run()
    if case.status or case.left:
        raise UserError(
            f"{program.name}: status {case.status} without any fault: {case.stderr[-800:]}"
        )
    image = program.image(case.out / program.made) if program.made else None
    return Whole(seconds, case.stdout, image)


# ----------------------------------------------------------------------------------------- faults


def signalled(number: int, target: str = "") -> Callable[[Case], None]:
    """Ctrl-C goes to all processes of a terminal, other signals to one. `target`: "RANK=0", or the
    process itself."""

    def strike(case: Case) -> None:
        end = time.monotonic() + 30
        while case.process.poll() is None and time.monotonic() < end:
            pids = (
                [pid for pid, rank in case.processes().items() if rank == target]
                if target
                else [case.process.pid]
            )
            if target and pids:
                time.sleep(START_S)  # a rank starts when torchrun starts it
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number) if number == signal.SIGINT and not target else os.kill(
                        pid, number
                    )
            if pids:
                return
            time.sleep(0.02)

    return strike


def removed(case: Case) -> None:
    shutil.rmtree(case.inputs, ignore_errors=True)


def truncated(case: Case) -> None:
    """A mapped file that shrinks is a SIGBUS to who reads on."""
    for file in case.inputs.rglob("*"):
        if file.suffix in (".safetensors", ".pth", ".model") and file.is_file():
            os.truncate(file, file.stat().st_size // 2)


@contextlib.contextmanager
def nothing(case: Case) -> Iterator[dict]:
    yield {}


@contextlib.contextmanager
def own_inputs(case: Case) -> Iterator[dict]:
    """A copy, to be destroyed."""
    case.inputs, before = Path(shutil.copytree(case.inputs, case.out.parent / "in")), case.inputs
    try:
        yield {}
    finally:
        case.inputs = before


@contextlib.contextmanager
def reader_gone(case: Case, **others) -> Iterator[dict]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield {"stdout": writer, **others}
    finally:
        os.close(writer)


both_gone = functools.partial(reader_gone, stderr=subprocess.STDOUT)  # 2>&1 | head


@contextlib.contextmanager
def full_stdout(case: Case) -> Iterator[dict]:
    with open("/dev/full", "w") as full:
        yield {"stdout": full}


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """A tmpfs on a folder, for as long as the block lasts."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True, capture_output=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True, capture_output=True)


def small_disk(room: int) -> Callable:
    @contextlib.contextmanager
    def around(case: Case) -> Iterator[dict]:
        with disk(case.out, DISK):
            case.place()
            filler = case.out / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
                while stream.write(bytes(4096)):
                    pass
            os.truncate(filler, filler.stat().st_size - room)
            yield {}
            filler.unlink()
            remount(case.out, f"size={256 * DISK}")
            yield {}

    return around


@contextlib.contextmanager
def read_only_disk(case: Case) -> Iterator[dict]:
    with disk(case.out, 256 * DISK):
        case.place()
        remount(case.out, "ro")
        yield {}
        remount(case.out, "rw")
        yield {}


def bound_by_permissions() -> None:
    """In the child: root may no longer write where permissions say that nobody may."""
    if os.getuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def read_only(which: Callable[[Case], Path]) -> Callable:
    @contextlib.contextmanager
    def around(case: Case) -> Iterator[dict]:
        top = which(case)
        every = [path for path in (top, *top.rglob("*")) if not path.is_symlink()]
        modes = [(path, path.stat().st_mode) for path in every]
        for path, mode in modes:
            path.chmod(mode & ~0o222)
        try:
            yield {"preexec_fn": bound_by_permissions}
        finally:
            for path, mode in modes:
                path.chmod(mode)

    return around


class Fault(NamedTuple):
    """`ends`: exit statuses that are right if the output is not whole; `around`: the state of
    things it runs in, ended before the next run (a second yield: but for the disk); `strike`: what
    is done at random moments."""

    ends: tuple[int, ...]
    around: Callable = nothing
    strike: Callable[[Case], None] | None = None
    mounts: bool = False
    fits: Callable[[Program], bool] = lambda program: not program.ranks
    heard: bool = True  # is there anybody to read stderr


def writes(program: Program) -> bool:
    return program.made is not None


def writes_folder(program: Program) -> bool:
    """A file is written at once."""
    return program.made is not None and "." not in program.made


def launched(program: Program) -> bool:
    return program.ranks > 0


def reads_long(program: Program) -> bool:
    """A layer at a time."""
    return program.name == "quantize"


ENDS = {
    "SIGINT": (130, -signal.SIGINT),
    "SIGTERM": (-signal.SIGTERM,),
    "SIGKILL": (-signal.SIGKILL,),
}
FAILED = tuple(range(1, 256))  # torchrun's statuses are its own


def signal_faults() -> dict[str, Fault]:
    found = {
        name: Fault(ends, strike=signalled(getattr(signal, name))) for name, ends in ENDS.items()
    }
    for name, ends in ENDS.items():
        for target in ("", "RANK=0", "RANK=1"):
            where = f"{name} to {f'rank {target[-1]}' if target else 'torchrun'}"
            strike = signalled(getattr(signal, name), target)
            found[where] = Fault(
                FAILED if target else (*FAILED, *ends), strike=strike, fits=launched
            )
    return found


FAULTS = {
    **signal_faults(),
    "stdout closed": Fault((0, *FAILED), reader_gone, fits=lambda program: True),
    "stdout and stderr closed": Fault((0, *FAILED), both_gone, heard=False),
    "stdout full": Fault((2,), full_stdout),
    "disk full": Fault(FAILED, small_disk(0), mounts=True, fits=writes),
    "disk nearly full": Fault(FAILED, small_disk(ROOM), mounts=True, fits=writes_folder),
    "disk read-only": Fault(FAILED, read_only_disk, mounts=True, fits=writes),
    "folder read-only": Fault(FAILED, read_only(lambda case: case.out), fits=writes),
    "input read-only": Fault((), read_only(lambda case: case.inputs)),
    "input removed": Fault((2,), own_inputs, removed, fits=reads_long),
    "input truncated": Fault((2, -signal.SIGBUS), own_inputs, truncated, fits=reads_long),
}
# ------------------------------------------------------------------------------------------ checks


def loads(folder: Path) -> bool:
    try:
        load_model(folder)
    except (UserError, OSError):
        return False
    return True


def state_of(case: Case, whole: Whole) -> str:
    """Of the output: "nothing", "as before", "whole" or "refused"; anything else is wrong."""
    program = case.program
    if program.made is None:
        return "whole" if case.stdout == whole.stdout else "part"
    made, before = case.out / program.made, program.before.get(program.made)
    if not made.exists():
        return "nothing"
    if before is not None and made.is_file() and made.read_bytes() == before.encode():
        return "as before"
    with contextlib.suppress(OSError, ValueError, KeyError):
        if program.image(made) == whole.image:
            return "whole"
    if program.in_place and not loads(made):
        return "refused"
    return "NEITHER OLD NOR WHOLE"


def problems(case: Case, fault: Fault, whole: Whole) -> list[str]:
    """What is wrong about a run that was disturbed."""
    found, program, state = [], case.program, state_of(case, whole)
    errors = [line for line in case.stderr.splitlines() if line.startswith("error: ")]
    if case.status is None:
        found.append(f"still ran after {case.deadline} s")
    elif case.status not in fault.ends and not (case.status == 0 and state == "whole"):
        found.append(f"status {case.status}, output: {state}")
    if case.left:
        found.append(f"{len(case.left)} processes left behind: {sorted(case.left.values())}")
    if fault.heard:
        # torchrun has tracebacks of its own
        noise = [
            word
            for word in NOISE
            if word in case.stderr and not (program.ranks and word == NOISE[0])
        ]
        noise += [
            f"through {name}" for name in re.findall(rf'File "{ROOT}/(\S+)", line', case.stderr)
        ]
        if noise:
            found.append(f"on stderr: {', '.join(noise)}")
        if case.status == 2 and len(errors) != 1 and not program.ranks:
            found.append(f"status 2 with {len(errors)} lines of error")
    if state.isupper() or (had_output(case) and state == "nothing"):
        found.append(f"output: {state}")
    if program.says and not whole.stdout.startswith(case.stdout.rstrip("\n")):
        found.append(f"printed what an undisturbed run does not: {case.stdout[-80:]!r}")
    for partial in case.out.rglob("*.partial"):
        if partial.is_dir() and loads(partial) and program.image(partial) != whole.image:
            found.append(f"{partial.name} loads and is not whole")
    return found


def had_output(case: Case) -> bool:
    return case.program.made in case.program.before


def saved_step(case: Case) -> int | None:
    """Of the training state that is there. An unreadable one is found by the run that wants to
    continue."""
    file = case.out / (case.program.state or "-")
    return torch.load(file, weights_only=True)["step"] if file.is_file() else None


def again(case: Case, whole: Whole) -> list[str]:
    """What is wrong about an undisturbed run after the disturbed one."""
    found, saved = [], saved_step(case)
    case.run()
    if case.status or case.left:
        return [f"the next run: status {case.status}, {case.stderr[-300:]!r}"]
    if state_of(case, whole) != "whole":
        found.append("the next run's output differs from the undisturbed one")
    if partials := [str(path.relative_to(case.out)) for path in case.out.rglob("*.partial")]:
        found.append(f"the next run leaves {', '.join(partials)}")
    steps = [int(step) for step in re.findall(r"step (\d+): ", case.stderr)]
    if saved is not None and not all(step > saved for step in steps):
        found.append(f"step {saved} was saved, the next run did steps {steps}")
    return found


def attempt(
    program: Program, fault: Fault, moment: float | None, whole: Whole, inputs: Path, root: Path
) -> dict:
    """One case: {"outcome", "resumed", "problems"}."""
    case = Case(program, inputs, root)
    if not fault.mounts:
        case.place()
    case.deadline = DEADLINE_S if not program.ranks else whole.seconds + 2 * RANKS_WAIT_S

    def strike(case: Case) -> None:
        time.sleep(moment)
        fault.strike(case)

    with contextlib.ExitStack() as stack:
        around = fault.around(case)
        options = stack.enter_context(around)
        case.run(strike if fault.strike else None, **options)
        state = state_of(case, whole)
        outcome = f"{case.status} {state}"
        found, saved = problems(case, fault, whole), saved_step(case)
        if fault.mounts:
            next(around.gen)  # the disk stays, its fault goes
        else:
            stack.close()
        if program.made and state != "whole":
            found += again(case, whole)
    return {"outcome": outcome, "resumed": bool(saved), "problems": found}


# ------------------------------------------------------------------------------------------ whole


def moments_of(
    program: Program, fault: Fault, whole: Whole, moments: int, rng: random.Random
) -> list[float | None]:
    """One at random in each equal part of the run; one run alone for what is not a matter of
    moments."""
    if fault.strike is None:
        return [None]
    n = max(1, round(moments * program.share))
    span = max(whole.seconds - START_S, 0)
    return [START_S + span * (part + rng.random()) / n for part in range(n)]


def may_mount(root: Path) -> bool:
    (root / "disk").mkdir()
    try:
        with disk(root / "disk", DISK):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def matrix(
    programs: list[Program], faults: Mapping[str, Fault], moments: int, seed: int, root: Path
) -> dict:
    """Every program under every fault that fits it."""
    inputs, mounts = build(root / "in"), may_mount(root)
    table, failures, skipped, start = {}, [], {}, time.monotonic()
    count = resumed = 0
    for program in programs:
        whole = undisturbed(program, inputs, root / f"{program.name} alone")
        line = table[program.name] = {}
        for name, fault in faults.items():
            if not fault.fits(program) or (program.only and name not in program.only):
                continue
            if fault.mounts and not mounts:
                skipped[name] = "no right to mount a tmpfs"
                continue
            rng = random.Random(f"{seed} {program.name} {name}")
            outcomes, drawn = collections.Counter(), moments_of(program, fault, whole, moments, rng)
            for moment in tqdm(drawn, desc=f"{program.name}: {name}", leave=False):
                count += 1
                where = root / f"case{count}"
                found = attempt(program, fault, moment, whole, inputs, where)
                shutil.rmtree(where, ignore_errors=True)
                if moment and found["outcome"] == "0 whole" and moment > whole.seconds / 4:
                    drawn.append(moment / 2)  # it came too late
                outcomes[found["outcome"]] += 1
                resumed += found["resumed"]
                about = {
                    "program": program.name,
                    "fault": name,
                    "moment_s": moment,
                    "outcome": found["outcome"],
                }
                failures += [{**about, "problem": problem} for problem in found["problems"]]
            line[name] = dict(sorted(outcomes.items()))
    return {
        "seed": seed,
        "cases": count,
        "resumed": resumed,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
        "skipped": skipped,
        "table": table,
    }


def show(found: dict) -> None:
    """Exit status, state of the output, and how often, for every cell."""
    for program, line in found["table"].items():
        for fault, outcomes in line.items():
            cells = ", ".join(f"{outcome} ({times})" for outcome, times in outcomes.items())
            print(f"{program:18}  {fault:24}  {cells}")
    for what, reason in found["skipped"].items():
        print(f"{what}: skipped, {reason}")
    for one in found["failures"]:
        at = "" if one["moment_s"] is None else f" at {one['moment_s']:.2f} s"
        print(f"FAILED  {one['program']}, {one['fault']}{at}: {one['problem']}")
    print(f"{found['cases']} cases, {len(found['failures'])} failures, {found['seconds']} s")


def main() -> None:
    parser = Parser(description="Stop every program in the middle, and see what it leaves behind.")
    add = parser.add_argument
    names = ", ".join(program.name for program in PROGRAMS)
    add("--only", nargs="+", metavar="PROGRAM", help=f"of: {names}")
    add("--faults", nargs="+", metavar="FAULT", help=f"of: {', '.join(FAULTS)}")
    add(
        "--moments",
        type=positive,
        default=5,
        help="at which a signal comes, for each program; default: 5",
    )
    add("--seed", type=int, default=1)
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    # children would inherit that nohup ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with exit_on_error():
        programs = [program for program in PROGRAMS if not args.only or program.name in args.only]
        faults = {
            name: fault for name, fault in FAULTS.items() if not args.faults or name in args.faults
        }
        if not programs or not faults:
            raise UserError("--only and --faults leave nothing to do; --help shows the names")
        with tempfile.TemporaryDirectory(prefix="faults-") as root:
            found = matrix(programs, faults, args.moments, args.seed, Path(root))
        show(found)
        if args.write:
            record(args.write, found)
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
