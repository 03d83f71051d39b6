"""What runs, as README says it: `python -m tests.runs` writes it there from the tests' tables.

families    the published names of what tests/conftest.py's FAMILIES compare with transformers
folders     other programs' folders of test_foreign.py and test_floats.py, and what holds them here
"""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import FAMILIES  # noqa: E402

from tests import test_floats, test_foreign  # noqa: E402

PUBLISHED = {  # every family of the table; the same name counts once
    "llama-2": "Llama 2", "llama-3": "3", "llama-3.1": "3.1", "llama-3.2": "3.2 and 3.3", "codellama": "CodeLlama",
    "tinyllama": "TinyLlama", "yi": "Yi", "smollm2": "SmolLM2", "llama-linear": None, "llama-biased": None,
    "mistral-v0.1": "Mistral (sliding window and not)", "mistral-v0.2": None,
    "mistral-nemo": "Mistral Nemo and Small 3",
    "qwen2": "Qwen2", "qwen2.5-sliding": None, "qwen2.5-yarn": "Qwen2.5", "qwen3": "Qwen3", "qwen3-biased": None,
    "r1-distill-llama": "the R1 distillations of Llama and Qwen", "r1-distill-qwen": "MiMo-7B", "mixtral": "Mixtral",
    "qwen2-moe": "Qwen1.5-MoE and Qwen2-MoE", "qwen3-moe": "Qwen3-MoE", "qwen3-moe-mixed": None,
    "smollm3": "SmolLM3", "phi-4": "Phi-4", "phi-3": "Phi-3", "phi-4-mini": "Phi-3.5 and Phi-4-mini",
    "granite": "Granite 3", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "seed-oss": "Seed-OSS",
    "ernie-4.5": "ERNIE 4.5 (dense)", "hunyuan": "Hunyuan (dense)", "exaone-4": "EXAONE 4", "exaone-4-small": None,
    "ministral-3": "Ministral 3", "gpt-oss": "gpt-oss",
}  # fmt: skip


def families() -> str:
    if FAMILIES.keys() != PUBLISHED.keys():
        raise ValueError(f"PUBLISHED and FAMILIES differ: {sorted(FAMILIES.keys() ^ PUBLISHED.keys())}")
    names = [PUBLISHED[name] for name in FAMILIES if PUBLISHED[name]]
    return "\n".join(textwrap.wrap(f"It runs {', '.join(names[:-1])} and {names[-1]}.", 118))


def folders() -> str:
    found: dict[str, set[str]] = {}
    cases = [(config, scheme, "") for scheme, config, *_ in test_foreign.EXACT.values()]
    cases += [(config, scheme, "") for scheme, config, *_ in test_floats.FOLDERS.values()]
    cases += [({"quant_method": "modelopt", **test_floats.MODELOPT}, "nvfp4", "")]
    cases += [(config, "plain weights, and said so", "") for config, *_ in test_floats.PLAIN.values()]
    cases += [
        (config, scheme, ", other groups, orders or zero points")
        for scheme, config, *_ in test_foreign.INEXACT.values()
    ]
    for config, scheme, remark in cases:
        what = config["quant_method"]
        if what == "compressed-tensors":
            weights = config["config_groups"]["group_0"]["weights"]
            strategy = f", {weights['strategy']}" if config["format"] == "float-quantized" else ""
            bits = f", {weights['num_bits']} bits" if config["format"] == "pack-quantized" else ""
            what += f": {config['format']}{strategy}{bits}"
        elif what == "fp8":
            what += ": blocks of [128, 128]" if config.get("weight_block_size") else ": one scale a matrix"
        elif what == "bitsandbytes":
            what += f": {config['bnb_4bit_quant_type']}"
        elif what == "modelopt":
            what += f": {config['quant_algo']}"
        else:
            what += f": {config['bits']} bits"
        if "bits" in config and config["bits"] == 8 and not remark:
            what += ", one scale a row"
        found.setdefault(what + remark, set()).add(scheme.removesuffix("-float32"))
    again = {True: ": quantized again, and said so", False: ""}
    lines = [
        f"| {what} | {', '.join(sorted(schemes))}{again['other groups' in what]} |"
        for what, schemes in sorted(found.items())
    ]
    return "\n".join(["| folders | held in |", "|---|---|", *lines])


def filled(text: str) -> str:
    for name, made in (("families", families()), ("folders", folders())):
        found = re.search(rf"<!-- runs {name} -->\n(.*?)\n<!-- end -->", text, flags=re.S)
        if not found:
            raise ValueError(f"README.md: no place is marked <!-- runs {name} -->")
        text = text[: found.start(1)] + made + text[found.end(1) :]
    return text


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(filled(README.read_text()))
