"""Lists and sizes that pages show: `python -m tests.runs` writes them anew.

families    the published names of tests/conftest.py's FAMILIES, which are compared with
            transformers
folders     other programs' folders in test_quantized_folders.py, test_floats.py and test_mlx.py,
            and the schemes that hold them here
sizes       lines of code, and minutes to read them, in README's table of files
"""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import FAMILIES  # noqa: E402

from tests import test_floats, test_mlx, test_quantized_folders  # noqa: E402

PUBLISHED = {  # every family of the table; the same name counts once
    "llama-2": "Llama 2",
    "llama-3": "3",
    "llama-3.1": "3.1",
    "llama-3.2": "3.2 and 3.3",
    "codellama": "CodeLlama",
    "tinyllama": "TinyLlama",
    "yi": "Yi",
    "smollm2": "SmolLM2",
    "llama-linear": None,
    "llama-biased": None,
    "mistral-v0.1": "Mistral (sliding window and not)",
    "mistral-v0.2": None,
    "mistral-nemo": "Mistral Nemo and Small 3",
    "qwen2": "Qwen2",
    "qwen2.5-sliding": None,
    "qwen2.5-yarn": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3-biased": None,
    "r1-distill-llama": "the R1 distillations of Llama and Qwen",
    "r1-distill-qwen": "MiMo-7B",
    "mixtral": "Mixtral",
    "qwen2-moe": "Qwen1.5-MoE and Qwen2-MoE",
    "qwen3-moe": "Qwen3-MoE",
    "qwen3-moe-mixed": None,
    "smollm3": "SmolLM3",
    "phi-4": "Phi-4",
    "phi-3": "Phi-3",
    "phi-4-mini": "Phi-3.5 and Phi-4-mini",
    "granite": "Granite 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "seed-oss": "Seed-OSS",
    "ernie-4.5": "ERNIE 4.5 (dense)",
    "hunyuan": "Hunyuan (dense)",
    "exaone-4": "EXAONE 4",
    "exaone-4-small": None,
    "ministral-3": "Ministral 3",
    "gpt-oss": "gpt-oss",
    "olmoe": "OLMoE",
    "granite-moe": "Granite MoE",
    "granite-swa": "Granite SWA",
    "granite-moe-swa": "Granite MoE SWA",
    "mellum-2": "Mellum 2",
    "cwm": "CWM",
    "ministral-8b": "Ministral 8B",
    "iquest-coder": "IQuest-Coder",
    "glm-4.5": "GLM-4.5 to 4.7",
    "glm-4.5-air": None,
    "glm-4": "GLM-4 and GLM-4-0414 (9B and 32B)",
    "glm-4-0414": None,
    "minimax-m2": "MiniMax-M2",
    "solar-open": "Solar Open",
    "k-exaone": "K-EXAONE",
    "dots.llm1": "dots.llm1",
    "hy3": "Hy3",
    "ernie-4.5-moe": "ERNIE 4.5 (MoE)",
    "hunyuan-a13b": "Hunyuan-A13B",
    "gemma-3": "Gemma 3",
    "qwen2.5-vl": "Qwen2.5-VL and Qwen3-VL (text alone)",
    "qwen3-vl": None,
    "exaone-4.5": "EXAONE 4.5 (text alone)",
    "qwen3-vl-moe": "Qwen3-VL-MoE (text alone)",
}


def families() -> str:
    if FAMILIES.keys() != PUBLISHED.keys():
        raise ValueError(
            f"PUBLISHED and FAMILIES differ: {sorted(FAMILIES.keys() ^ PUBLISHED.keys())}"
        )
    names = [PUBLISHED[name] for name in FAMILIES if PUBLISHED[name]]
    return "\n".join(textwrap.wrap(f"It runs {', '.join(names[:-1])} and {names[-1]}.", 118))


def folders() -> str:
    schemes_by_folder: dict[str, set[str]] = {}
    cases = [(config, scheme, "") for scheme, config, *_ in test_quantized_folders.EXACT.values()]
    cases += [(config, scheme, "") for scheme, config, *_ in test_floats.FOLDERS.values()]
    cases += [({"quant_method": "modelopt", **test_floats.MODELOPT}, "nvfp4", "")]
    cases += [({"quant_method": "mlx", "mode": "mxfp4"}, "mxfp4", "")]
    cases += [
        ({"quant_method": "mlx", "mode": "affine"}, f"mlx{bits}-g{group}", "")
        for bits, group in test_mlx.SIZES
    ]
    cases += [
        (config, "plain weights, with a message", "") for config, *_ in test_floats.PLAIN.values()
    ]
    cases += [
        (config, scheme, ", other groups, orders or zero points")
        for scheme, config, *_ in test_quantized_folders.INEXACT.values()
    ]
    for config, scheme, remark in cases:
        label = config["quant_method"]
        if label == "compressed-tensors":
            weights = config["config_groups"]["group_0"]["weights"]
            strategy = f", {weights['strategy']}" if config["format"] == "float-quantized" else ""
            bits = f", {weights['num_bits']} bits" if config["format"] == "pack-quantized" else ""
            label += f": {config['format']}{strategy}{bits}"
        elif label == "fp8":
            label += (
                ": blocks of [128, 128]"
                if config.get("weight_block_size")
                else ": one scale a matrix"
            )
        elif label == "bitsandbytes":
            label += f": {config['bnb_4bit_quant_type']}"
        elif label == "mlx":
            label += f": {config['mode']}"
        elif label == "modelopt":
            label += f": {config['quant_algo']}"
        else:
            label += f": {config['bits']} bits"
        if "bits" in config and config["bits"] == 8 and not remark:
            label += ", one scale a row"
        schemes_by_folder.setdefault(label + remark, set()).add(scheme.removesuffix("-float32"))
    again = {True: ": quantized again, with a message", False: ""}
    lines = [
        f"| {label} | {', '.join(sorted(schemes))}{again['other groups' in label]} |"
        for label, schemes in sorted(schemes_by_folder.items())
    ]
    return "\n".join(["| folder | stored here as |", "|---|---|", *lines])


BLOCKS = {"families": families, "folders": folders}
SIZE = re.compile(r"^(\| \[([\w/]+(?:\.py)?)\S*\) \| )[\d,]+ \| (\d* ?)\|", flags=re.M)
CORE = ("generate.py", "model.py", "decoding/sampling.py", "decoding/runner.py")
# What a round takes besides.
DRAFTING = (
    "decoding/batch.py",
    "speculative.py",
    "drafts/base.py",
    "decoding/engine.py",
    "decoding/planner.py",
)
LINES_A_MINUTE = 30


def num_lines(path: str) -> int:
    """Lines of a Python file, or of all in a folder."""
    files = [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def sizes(text: str) -> str:
    """The text with lines and minutes in its table of files: rows of "| [model.py](model.py) | 600
    | 20 | …"."""

    def row(match: re.Match) -> str:
        n = num_lines(match[2])
        return f"{match[1]}{n:,} | {f'{round(n / LINES_A_MINUTE)} ' if match[3] else ''}|"

    return SIZE.sub(row, text)


def filled(text: str) -> str:
    """The text with every marked list made anew."""
    for name in re.findall(r"<!-- runs (\w+) -->", text):
        match = re.search(rf"<!-- runs {name} -->\n(.*?)\n<!-- end -->", text, flags=re.S)
        text = text[: match.start(1)] + BLOCKS[name]() + text[match.end(1) :]
    return text


if __name__ == "__main__":
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        page.write_text(sizes(filled(page.read_text())))
