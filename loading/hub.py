"""A model's name on the Hugging Face hub -> its folder or file on this machine.

    ORGANIZATION/NAME[@REVISION]            the safetensors, tokenizer and config files
    ORGANIZATION/NAME[@REVISION]:Q4_K_M     the GGUF file of this type

The hub's own client keeps files in its cache, shows progress, and continues a download that was cut off. A name that
the cache has is not looked up again; the hub's program (`hf download`) brings its newest files.

Flags name this file's functions, so what needs torch is imported only for a name on the hub.
"""

import argparse
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import loading.plain_files as plain_files

PATH_HELP = "a Hugging Face folder, a .gguf file, or a model on the hub: ORG/NAME[@REVISION][:GGUF_TYPE]"
NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^:\s]+))?(?::(?P<type>[\w./-]+))?")
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "hf_quant_config.json"]
DUPLICATES = ["*/*.safetensors*", "consolidated*"]  # some repositories hold the weights a second time
# A GGUF file is MODEL.gguf, or MODEL-00001-of-00003.gguf and so on. MODEL ends in the type, which is Q4_K_M, or
# UD-Q4_K_M of Unsloth's recipe. A projector of images (mmproj) is no model.
GGUF = re.compile(
    r"(?!.*mmproj)(?P<model>(?:.*?[-./])??(?P<type>(?:UD-)?[^-./]+))(?:-\d{5}-of-(?P<count>\d{5}))?\.gguf",
    re.IGNORECASE,
)


def checkpoint_path(name: str) -> str:
    """`name` where it is a path; for a name on the hub, the path of its folder or GGUF file, downloaded if need be. An
    argparse type: ArgumentTypeError for a name that is neither, or that cannot be had."""
    match = NAME.fullmatch(name)
    if match is None or Path(name).exists():
        return name
    try:
        return str(download(**match.groupdict()))
    except ImportError:
        reason = "no such folder or file; to download a model, pip install huggingface_hub"
    except Exception as error:  # the client's errors have no common class
        reason = access_refusal(error, match["repo"]) or " ".join(str(error).split()) or type(error).__name__
    raise argparse.ArgumentTypeError(f"{name}: {reason}") from None


def access_refusal(error: Exception, repo: str) -> str | None:
    """The reason, if the hub refuses a repository to this user. It answers alike for one that does not exist."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    status = getattr(response, "status_code", None)
    if status not in (401, 403) and (response is None or response.headers.get("X-Error-Code") != "RepoNotFound"):
        return None
    return (
        f"no such folder, and the hub refuses {repo} (status {status}): it does not exist, or is gated or private; ask"
        " for access on its page, then log in with `hf auth login` or set HF_TOKEN"
    )


def download(repo: str, revision: str | None = None, type: str | None = None) -> Path:
    """The folder of a repository, or its GGUF file of a type (the first one of a split model), from the cache if that
    is complete. OSError or ValueError where it cannot be had."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from loading.tokenizer import FILES

    patterns = [*PATTERNS, *FILES]
    fetch = functools.partial(snapshot_download, repo, revision=revision)
    try:
        path = cached_path(Path(fetch(local_files_only=True, allow_patterns=[])), type)
        if type is None:  # the client compares with the repository's list of files, where it has that
            fetch(local_files_only=True, allow_patterns=patterns, ignore_patterns=DUPLICATES)
        return path
    except LocalEntryNotFoundError as error:
        is_partial = hasattr(error, "snapshot_path")  # its first sentence names the files
        reason = str(error).partition(". ")[0] if is_partial else "no such folder here or in the hub's cache"
    except ValueError as error:
        reason = f"not complete in the hub's cache: {error}"
    try:
        siblings = model_info(repo, revision=revision).siblings  # unlike list_repo_files, it does not retry for seconds
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if status < 500 or isinstance(error, ValueError):  # an answer, or a name that the client refuses
            raise
        raise ValueError(f"{reason}, and the hub cannot be reached") from None
    if type is None:
        return Path(fetch(allow_patterns=patterns, ignore_patterns=DUPLICATES))
    files = gguf_files([file.rfilename for file in siblings or ()], type)
    return Path(fetch(allow_patterns=files)) / files[0]


def cached_path(folder: Path, type: str | None) -> Path:
    """A cached folder, or its GGUF file of a type. ValueError names a file that is not there."""
    if type is not None:
        # The client stores a repository's list of files here. An older one does not.
        listed = plain_files.read_json(folder.parents[1] / "trees" / f"{folder.name}.json").get("files", ())
        files = gguf_files({*listed, *(file.relative_to(folder).as_posix() for file in folder.rglob("*"))}, type)
        if absent := [name for name in files if not (folder / name).exists()]:
            raise ValueError(f"no file {absent[0]}")
        return folder / files[0]
    from loading.draft_kinds import kind_of
    from loading.files import read_json, shards

    needs_tokenizer = kind_of(read_json(folder / "config.json")) in ("model", "pard")
    tokenizers = [folder / name for name in ("tokenizer.model", "tokenizer.json", "tekken.json")]
    if needs_tokenizer and not any(file.exists() for file in tokenizers):
        raise ValueError(f"{folder}: neither tokenizer.model nor tokenizer.json, nor tekken.json")
    shards(folder)
    return folder


def gguf_files(names: Iterable[str], type: str) -> list[str]:
    """The files of the one model of this type, in order. `type` may be a longer ending of its name. ValueError lists
    the types if there is none, and the models if there are several."""
    matches = [match for match in map(GGUF.fullmatch, sorted(names)) if match]
    endings = tuple(f"{separator}{type}".lower() for separator in "-./")
    models = {
        match["model"]: match
        for match in matches
        if len(type) >= len(match["type"]) and f"/{match['model']}".lower().endswith(endings)
    }
    if not models:
        types = sorted({match["type"] for match in matches})
        raise ValueError(f"no GGUF file of type {type}; there are {', '.join(types) or 'none'}")
    if len(models) > 1:
        raise ValueError(f"{len(models)} GGUF files of type {type}; give a longer ending: {', '.join(models)}")
    ((model, match),) = models.items()
    parts = range(1, int(match["count"] or 0) + 1)
    return [f"{model}-{part:05d}-of-{match['count']}.gguf" for part in parts] or [match[0]]


def model_name(path: str | Path) -> str:
    """The name of a folder or file, and of a repository where the path lies in the hub's cache."""
    path = Path(path).absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name if path.is_symlink() else path.resolve().name
