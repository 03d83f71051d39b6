"""`python -m scripts.distill_draft`: its flags are answered before torch is imported, and then
scripts/distill/ runs."""

from cli.start import answer_flags
from scripts.flags import distill_draft_args

if __name__ == "__main__":
    answer_flags(distill_draft_args)
    from scripts.distill.distill_draft import main

    main()
