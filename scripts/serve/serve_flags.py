"""The flags of scripts.serve, and their refusals. This file needs no torch, whose import takes
seconds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cli.exits import fail
from cli.flags import Parser, given, positive
from cli.flags import parse_args as generate_options
from cli.options import Options
from decoding.errors import UserError

NUM_SLOTS = 4  # default of --batch_size
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True)
class ServerOptions:
    """The server's own flags, and generate.py's for its model. UserError for one that cannot
    work."""

    host: str
    port: int
    api_key: str | None
    api_key_file: str | None
    cors: list[str] | None
    allowed_hosts: list[str]
    forwarded_allow_ips: str | None
    model_alias: str | None
    system: str | None
    queue: int
    log_level: str
    answer_s: float
    options: Options

    def __post_init__(self):
        if not 0 < self.answer_s < 1e6:
            raise UserError(f"--answer_s {self.answer_s} must be a positive number of seconds")
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port {self.port} must lie between 0 and 65535")
        for origin in self.cors or ():
            if origin != "*" and not is_origin(origin):
                raise UserError(
                    f"--cors {origin}: an origin is SCHEME://HOST[:PORT] without a path, or *"
                )


def is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:  # such as half an IPv6 address
        return False
    return bool(parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"


def parse_args(argv: Sequence[str] | None = None) -> ServerOptions:
    parser = Parser(
        prog="python -m scripts.serve",
        description="An OpenAI-compatible server, and a page that shows drafting as it happens.",
        allow_abbrev=False,
        epilog="All other flags are generate.py's; they are the defaults of requests. --batch_size"
        f" answers (default {NUM_SLOTS}) are decoded at a time, others wait for a free slot.",
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen here; default: this machine alone, %(default)s",
    )
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen on; 0: any free one; default: %(default)s",
    )
    add(
        "--api_key",
        metavar="KEY",
        help="key of every request but those for the page and /health; `ps` shows it, so prefer"
        " --api_key_file or the variable QUICKDRAFT_API_KEY",
    )
    add("--api_key_file", metavar="FILE", help="a file that holds the key")
    add(
        "--cors",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin use the server, such as http://localhost:3000; *: of any;"
        " may be repeated",
    )
    add(
        "--allowed_host",
        action="append",
        dest="allowed_hosts",
        default=[],
        type=str.lower,
        metavar="NAME",
        help="answer to this name in the Host header too, such as one that a proxy or a container"
        " sends; a server on a loopback address answers to this machine's names alone; may be"
        " repeated",
    )
    add(
        "--forwarded_allow_ips",
        metavar="ADDRESSES",
        help="believe X-Forwarded-For and X-Forwarded-Proto of proxies at these addresses,"
        " separated by commas; default: of none",
    )
    add(
        "--served_model_name",
        "--model_alias",
        dest="model_alias",
        metavar="NAME",
        help="the model's name in requests; default: the checkpoint's",
    )
    add("--system", metavar="TEXT", help="the system message of chats that bring none")
    add(
        "--queue",
        type=positive,
        default=256,
        metavar="N",
        help="answers that may wait; default: %(default)s",
    )
    level_help = (
        "of lines on stderr: info has one for every request, warning those that are refused; debug"
        " quotes what was refused; default: %(default)s"
    )
    add("--log_level", choices=LOG_LEVELS, default="info", help=level_help)
    add(
        "--answer_s",
        type=float,
        default=600,
        metavar="S",
        help="seconds for one request; default: %(default)s",
    )
    server, words = parser.parse_known_args(argv)
    refused = [flag for flag in given(words) if flag.of_request]
    if refused:
        fail(
            f"{refused[0].name} is about generate.py's own prompts and output; a request to the"
            " server brings them"
        )
    options = generate_options([f"--batch_size={NUM_SLOTS}", *words])
    return ServerOptions(**vars(server), options=options)


def read_api_key(args: ServerOptions) -> str | None:
    """The key of --api_key, --api_key_file or QUICKDRAFT_API_KEY, in this order; None without any
    of them. UserError for a key that cannot work. A file is read once, as it may be a pipe."""
    source = "--api_key"
    key = args.api_key
    if key is not None and args.api_key_file is not None:
        raise UserError("--api_key and --api_key_file: give one of them")
    if args.api_key_file is not None:
        source = f"--api_key_file {args.api_key_file}"
        try:
            key = Path(args.api_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: {error}") from None
    elif key is None:
        source = "QUICKDRAFT_API_KEY"
        key = os.environ.get(source)
    is_visible = bool(key) and all("!" <= character <= "~" for character in key)
    if key is not None and not is_visible:
        raise UserError(
            f"{source}: a key must be visible ASCII characters without blanks, at least one"
        )
    return key
