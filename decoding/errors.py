"""The error of a wrong file, flag, request or argument, which every room raises. This file imports
nothing, so that all may import it."""


class UserError(ValueError):
    """What the user can put right; the message names the file, key or argument, and what would
    work.

    A program prints it in one line and ends with status 2; a server answers it with status 400. Any
    other exception, a plain ValueError among them, is a bug and keeps its traceback.
    """
