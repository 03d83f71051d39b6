"""generate.py with the kernel: `python -m examples.int4_vnni.run [flags of generate.py] --quantize
int4-g32`."""

if __name__ == "__main__":  # before torch is imported: Ctrl-C is handled from the first moment on
    from cli.process import prepare

    prepare()

from cli.flags import parse_args
from cli.start import answer_flags

if __name__ == "__main__":
    options = answer_flags(parse_args)

    from cli.errors import exit_on_error
    from cli.main import main
    from examples.int4_vnni.kernel import plug_in

    with exit_on_error(joins_ranks=True):
        plug_in()
        main(options)
