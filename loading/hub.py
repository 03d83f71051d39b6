"""A model's name on the Hugging Face hub -> its folder or file on this machine.

    ORGANIZATION/NAME[@REVISION]            the safetensors, tokenizer and config files
    ORGANIZATION/NAME[@REVISION]:Q4_K_M     the GGUF file of this type

The hub's own client keeps files in its cache, shows progress, continues a download that was cut
off, and takes what the cache has where there is no network.
"""

import re
from pathlib import Path

from decoding.errors import UserError
from loading.plain_files import one_line

PATH_HELP = (
    "a Hugging Face folder, a .gguf file, or a model on the hub: ORG/NAME[@REVISION][:GGUF_TYPE]"
)
NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^:\s]+))?(?::([\w.-]+))?")
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "hf_quant_config.json"]
VISION = "mmproj"  # in the names of GGUF files with a vision encoder
DUPLICATES = ["*/*.safetensors*", "consolidated*"]  # some repositories hold the weights twice


def checkpoint_path(name: str | None) -> str | None:
    """`name` where it is a path (or None); for a name on the hub, the path of its folder or GGUF
    file, downloaded if need be. UserError in one line for a name that cannot be had."""
    match = NAME.fullmatch(name or "")
    if match is None or Path(name).exists():
        return name
    try:
        return str(download(*match.groups()))
    except Exception as error:  # the client's errors have no common class
        raise UserError(
            f"{name}: no such folder here, and the hub cannot give it: {one_line(error)}"
        ) from None


def download(repo: str, revision: str | None = None, gguf_type: str | None = None) -> Path:
    """The folder of a repository, or its GGUF file of a type, the first one of a split model."""
    from huggingface_hub import snapshot_download

    if gguf_type is None:
        from loading.tokenizer import FILES

        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[*PATTERNS, *FILES],
            ignore_patterns=DUPLICATES,
        )
        return Path(folder)
    # Some publishers write types in small letters, and the hub compares case.
    letters = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in gguf_type)
    patterns = [f"*[-.]{letters}.gguf", f"*[-.]{letters}-?????-of-?????.gguf"]
    folder = Path(
        snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=[f"*{VISION}*"]
        )
    )
    # Another program may have fetched a vision encoder before.
    files = [
        file
        for pattern in patterns
        for file in sorted(folder.rglob(pattern))
        if VISION not in file.name
    ]
    exact = re.compile(rf".*[-.]{re.escape(gguf_type)}(-\d{{5}}-of-\d{{5}})?\.gguf")
    files = [file for file in files if exact.fullmatch(file.name)] or files
    models = {re.sub(r"-\d{5}-of-\d{5}", "", file.name) for file in files}
    if len(models) != 1:
        matches = ", ".join(sorted(models)) or "none; the model's page on the hub lists its files"
        raise UserError(f"one GGUF file of type {gguf_type} is needed; found {matches}")
    return files[0]
