"""`python quantize.py`: its flags, which are answered before torch is imported, then its work and
its exit status."""

from cli.flags import DTYPES, Parser, positive
from cli.options import QuantizeOptions
from cli.start import answer_flags
from loading.hub import PATH_HELP, checkpoint_path
from weights.schemes import SCHEMES


def parse_args(argv: list[str] | None = None) -> QuantizeOptions:
    parser = Parser(
        description="Quantize a Hugging Face folder, layer by layer; or make one of a GGUF file."
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="PATH", help=PATH_HELP)
    add(
        "--adapter", metavar="DIR", help="a LoRA adapter in PEFT's layout, merged before quantizing"
    )
    add(
        "--scheme",
        metavar="SCHEME",
        help=f"{', '.join(SCHEMES)}; default, of a .gguf file only: plain weights",
    )
    add("--output", required=True, metavar="DIR", help="must not exist yet")
    add(
        "--method",
        choices=("rtn", "search", "gptq"),
        default="rtn",
        help="nearest code; ranges searched; GPTQ (both int4 only)",
    )
    add(
        "--head",
        dest="head_scheme",
        metavar="SCHEME",
        help="of lm_head, and of an embedding tied to it; default: as it is",
    )
    add("--dtype", choices=DTYPES, help="of plain weights; default: the checkpoint's")
    add("--calibration", metavar="FILE", help="text for gptq")
    add("--samples", type=positive, default=128, help="windows of the text, for gptq")
    add(
        "--context",
        type=positive,
        help="tokens a window; default: 512, or one less than the model's context",
    )
    add("--device", default="cpu")
    args = parser.parse_args(argv)
    args.checkpoint = checkpoint_path(args.checkpoint)
    return QuantizeOptions(**vars(args))


def main(argv: list[str] | None = None) -> None:
    options = answer_flags(lambda: parse_args(argv))
    from cli.errors import exit_on_error
    from cli.quantized_folder import run

    with exit_on_error():
        run(options)
