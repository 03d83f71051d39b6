"""A model from the Hugging Face hub into checkpoints/: `python -m scripts.download TinyLlama/TinyLlama-1.1B-Chat-v1.0`.

Takes safetensors, tokenizer, template and config files, and nothing else: no pickles, no other formats, none of the
duplicate weights that some repositories keep in folders.
"""

import argparse
import sys
from pathlib import Path

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
            "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja"]  # fmt: skip


def download(repo: str, output: Path, revision: str | None = None) -> Path:
    """Fetch one repository into output/NAME and return that folder."""
    from huggingface_hub import snapshot_download

    folder = output / repo.split("/")[-1]
    snapshot_download(
        repo, revision=revision, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=["*/*"],
    )  # fmt: skip
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch a model's safetensors, tokenizer and config files.")
    parser.add_argument("repo", help="OWNER/NAME on the hub")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), help="gets a folder NAME")
    parser.add_argument("--revision", help="branch, tag or commit")
    args = parser.parse_args()
    try:
        print(download(args.repo, args.output, args.revision))
    except ImportError:
        sys.exit(_error("scripts.download needs huggingface_hub: pip install huggingface_hub"))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors or ValueErrors
        sys.exit(_error(f"{args.repo}: {error}"))


def _error(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
