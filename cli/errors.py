"""Where a program meets the system: exit statuses, Ctrl-C, pipes, launchers, a container's quota.

exit_on_error          stands around every program; cli/exits.py prints its errors
defer_interrupts        Ctrl-C between two steps
use_threads, cpu_share  threads of a CPU
free_memory             bytes that may still be allocated
"""

import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from cli.exits import close_stdout, fail
from decoding.errors import UserError
from decoding.launcher import check_single_process, launched
from tp import leave, lost_contact

OLDEST_TORCH = [2, 11]


@contextlib.contextmanager
def exit_on_error(joins_ranks: bool = False) -> Iterator[None]:
    """A UserError, an OSError and a lack of memory are one line and status 2; Ctrl-C is status 130;
    a closed stdout, as in `program | head`, ends quietly; any other exception is a bug, and keeps
    its traceback.

    SIGTERM ends a program at once; an unfinished file then lies under NAME.partial. Without
    `joins_ranks` the program refuses to be one of several processes of torchrun: each would do all
    of the work, and write to the same files.
    """
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # cli/process.py's; `nohup` stays
            signal.signal(signal.SIGINT, signal.default_int_handler)
        check_torch()
        if not joins_ranks:
            check_single_process()
        yield
        sys.stdout.flush()  # an error here can still be printed
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        close_stdout()
        if launched():
            sys.exit(1)  # the other ranks must not wait for this one
    except (UserError, OSError, MemoryError) as error:
        fail(error)
    except UnicodeEncodeError as error:
        fail(f"{error}: stdout's encoding lacks it; PYTHONIOENCODING=utf-8 has all")
    except RuntimeError as error:
        if lost_contact(error):
            fail(
                f"lost contact with another rank; if that rank printed an error, it is the cause"
                f" ({error})"
            )
        if is_out_of_memory(error):
            fail(error)
        raise
    finally:
        leave_ranks()


def is_out_of_memory(error: Exception) -> bool:
    """Did torch find no memory? On a CPU the words of its error alone say so."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def check_torch() -> None:
    if [int(part) for part in torch.__version__.split(".")[:2]] < OLDEST_TORCH:
        raise UserError(
            f"torch {torch.__version__} is too old: quickdraft needs 2.11 or later, and is"
            " tested up to 2.15"
        )


@contextlib.contextmanager
def defer_interrupts() -> Iterator[list]:
    """Append a first Ctrl-C to the list that is yielded, and raise it at the end. A second one acts
    at once.

    Inside a guard of compiled code the exception would be lost: torch takes it for a failed guard,
    and recompiles.
    """
    usual = signal.getsignal(signal.SIGINT)
    interrupts = []

    def remember(*signal_args) -> None:
        interrupts.append(signal_args)
        signal.signal(signal.SIGINT, usual)

    if callable(usual):  # not where it is ignored
        signal.signal(signal.SIGINT, remember)
    try:
        yield interrupts
    finally:
        if callable(usual):
            signal.signal(signal.SIGINT, usual)
        if interrupts:
            raise KeyboardInterrupt


@contextlib.contextmanager
def silent(is_silent: bool) -> Iterator[None]:
    """If `is_silent`, the block prints nothing."""
    if not is_silent:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def leave_ranks() -> None:
    """End the process group. If an exception is ending the program, NCCL would wait for collectives
    that never end, so the process exits at once."""
    error = sys.exc_info()[1]
    if error is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        status = 1
        if isinstance(error, SystemExit):
            status = error.code
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    leave()


def use_threads(num_threads: int | None) -> int:
    """Use --threads, by default torch's number, at most cpu_share(), which local ranks divide.
    Returns the number."""
    share = cpu_share()
    usual = torch.get_num_threads()
    num_local = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's; Slurm sets no such variable
    if num_local and launched() and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's default
        share = max(1, share // int(num_local))
        usual = share
    torch.set_num_threads(num_threads or min(usual, share))
    return torch.get_num_threads()


def cpu_share(file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Processors that this process may keep busy: its affinity, or a smaller quota of its container
    (Linux, cgroups v2). More threads than the quota use it up early, and then all of them wait."""
    affinity = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    try:
        quota, period = Path(file).read_text().split()
        return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # another system, or "max": no quota
        return affinity


def free_memory(device: torch.device, folder: str = "/sys/fs/cgroup") -> float:
    """Bytes that this process may still allocate on the device; infinity where the system does not
    say. On a CPU its share of what the machine or a container's limit leaves, caches of files
    counted as free (Linux, cgroups v2)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with contextlib.suppress(OSError, ValueError):
        free = 1024 * read_number("/proc/meminfo", "MemAvailable:")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        used = read_number(f"{folder}/memory.current")
        used -= read_number(f"{folder}/memory.stat", "inactive_file")
        free = min(free, read_number(f"{folder}/memory.max") - used)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched() else 1
    return max(0, free) / num_local


def read_number(file: str, name: str | None = None) -> int:
    """The number that follows a name in a file of the system; without a name, its first word."""
    words = Path(file).read_text().split()
    return int(words[0] if name is None else words[words.index(name) + 1])
