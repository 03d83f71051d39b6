"""`python -m scripts.distill_draft`: its flags are answered before torch is imported, and then
scripts/distill/ runs."""

from cli.start import answer_flags
from scripts.distill.distill_flags import parse_args

if __name__ == "__main__":
    answer_flags(parse_args)
    from scripts.distill.distill_draft import main

    main()
