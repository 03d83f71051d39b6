"""A model from the Hugging Face hub into checkpoints/: `python -m scripts.download TinyLlama/TinyLlama-1.1B-Chat-v1.0`.

It downloads safetensors, tokenizer, template and config files. It skips pickles, other formats, and the duplicate
weights that some repositories have in folders or in Mistral's layout (consolidated.safetensors).
"""

from pathlib import Path

from cli.flags import Parser
from loading.tokenizer import FILES

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", *FILES]
DUPLICATES = ["*/*", "consolidated*"]


def download(repo: str, output: Path, revision: str | None = None) -> Path:
    """Fetch one repository into output/NAME and return that folder."""
    from huggingface_hub import snapshot_download

    folder = output / repo.split("/")[-1]
    snapshot_download(
        repo, revision=revision, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=DUPLICATES,
    )  # fmt: skip
    return folder


def main() -> None:
    parser = Parser(description="Fetch a model's safetensors, tokenizer and config files.")
    parser.add_argument("repo", help="OWNER/NAME on the hub")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), help="parent of NAME; default: %(default)s")
    parser.add_argument("--revision", help="branch, tag or commit")
    args = parser.parse_args()
    try:
        print(download(args.repo, args.output, args.revision))
    except ImportError:
        parser.error("scripts.download needs huggingface_hub: pip install huggingface_hub")
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors or ValueErrors
        parser.error(f"{args.repo}: {error}")


if __name__ == "__main__":
    main()
