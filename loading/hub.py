"""A model's name on the Hugging Face hub -> its folder or file on this machine.

    ORGANIZATION/NAME[@REVISION]            the safetensors, tokenizer and config files
    ORGANIZATION/NAME[@REVISION]:Q4_K_M     the GGUF file of this type

The hub's own client keeps files in its cache, shows progress, and continues a download that was cut off. A name that
the cache has is not looked up again; the hub's program (`hf download`) brings its newest files.
"""

import argparse
import re
from pathlib import Path

from loading.files import read_json
from loading.tokenizer import FILES

PATH_HELP = "a Hugging Face folder, a .gguf file, or a model on the hub: ORG/NAME[@REVISION][:GGUF_TYPE]"
NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:\s]+))?(?::(?P<type>[\w.-]+))?")
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", *FILES]
DUPLICATES = ["*/*.safetensors*", "consolidated*"]  # some repositories hold the weights a second time


def checkpoint_path(name: str) -> str:
    """`name` where it is a path; for a name on the hub, the path of its folder or GGUF file, downloaded if need be. An
    argparse type: ArgumentTypeError for a name that is neither, or that cannot be had."""
    match = NAME.fullmatch(name)
    if match is None or Path(name).exists() or Path(name).parent.exists():
        return name
    try:
        return str(download(**match.groupdict()))
    except ImportError:
        reason = "no such folder or file; to download a model, pip install huggingface_hub"
    except Exception as error:  # the client's errors have no common class
        reason = " ".join(str(error).split()) or type(error).__name__
    raise argparse.ArgumentTypeError(f"{name}: {reason}") from None


def download(repo: str, revision: str | None = None, type: str | None = None) -> Path:
    """The folder of a repository, or its GGUF file of a type. OSError or ValueError where it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [f"*{case}*.gguf" for case in (type, type.lower(), type.upper())] if type else PATTERNS
    ignored = None if type else DUPLICATES
    options = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": ignored}
    try:
        folder = Path(snapshot_download(repo, local_files_only=True, **options))
        if is_complete(folder) if type is None else gguf_file(folder, type):
            return folder if type is None else gguf_file(folder, type)
    except LocalEntryNotFoundError:
        pass  # not in the cache, or not all of it
    try:
        folder = Path(snapshot_download(repo, **options))
    except LocalEntryNotFoundError:
        raise ValueError("not in the hub's cache, and the hub cannot be reached") from None
    if type is None:
        return folder
    if (file := gguf_file(folder, type)) is None:
        raise ValueError(f"no GGUF file of type {type}; there are {', '.join(gguf_names(repo, revision)) or 'none'}")
    return file


def is_complete(folder: Path) -> bool:
    """Does a folder have every file of weights that its index names?"""
    index = folder / "model.safetensors.index.json"
    names = read_json(index)["weight_map"].values() if index.exists() else ()
    has_weights = all((folder / name).exists() for name in names) and any(folder.glob("*.safetensors"))
    return has_weights and (folder / "config.json").exists()


def gguf_file(folder: Path, type: str) -> Path | None:
    """The file of this type, or the first one of several that are one model."""
    ending = re.compile(rf".*(?:^|[-._]){re.escape(type)}(?:-00001-of-\d+)?\.gguf", re.IGNORECASE)
    return next((file for file in sorted(folder.rglob("*.gguf")) if ending.fullmatch(file.name)), None)


def gguf_names(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import list_repo_files

    return sorted(name for name in list_repo_files(repo, revision=revision) if name.endswith(".gguf"))


def model_name(path: str | Path) -> str:
    """The name of a folder or file, and of a repository where the path lies in the hub's cache."""
    path = Path(path).absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name if path.is_symlink() else path.resolve().name
