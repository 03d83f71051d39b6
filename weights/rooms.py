"""Files that a fork may delete: without one, the rest runs, and a use of it is a ValueError that names it.

room        a module of the project, or a stand-in where its file is missing
resolve     the function behind "module:name", a row of a table
"""

import importlib
from collections.abc import Callable
from types import ModuleType


class Missing:
    """Stands for a module whose file, or one that it needs, is missing. ValueError for every use."""

    def __init__(self, file: str):
        self.file = file

    def __getattr__(self, name: str):
        raise ValueError(f"{self.file} is missing: this copy was made without it")


def room(module: str) -> ModuleType | Missing:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        name = module if f"{module}.".startswith(f"{error.name}.") else error.name
        return Missing(f"{name.replace('.', '/')}.py")


def resolve(row: str) -> Callable:
    module, name = row.split(":")
    return getattr(room(module), name)
