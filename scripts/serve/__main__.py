"""`python -m scripts.serve`: its flags are answered before torch is imported."""

from cli.start import answer_flags
from scripts.serve.serve_flags import parse_args

if __name__ == "__main__":
    answer_flags(parse_args)
    from scripts.serve.serve import main

    main()
