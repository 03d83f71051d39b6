"""An OpenAI-compatible server, and a page that shows drafting as it happens: `python -m scripts.serve`.

    Front           /v1/models, /v1/completions, /v1/chat/completions and the page, on FastAPI and uvicorn
    run, main       flags, loading, a thread for the connections, signals

The main thread decodes (scripts/batches.py), because compiled code belongs to the thread that compiled it; connections
have a thread of their own. scripts/openai_form.py has the protocol's objects, scripts/serve.html the page. A request
names no path and no file. It listens on loopback, to requests under loopback's names, unless --host says otherwise.
"""

import argparse
import asyncio
import hmac
import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from cli.errors import ending_plainly, fail, use_threads
from cli.flags import Parser, check_options, positive
from cli.flags import parse_args as generate_flags
from cli.load import pick_device
from cli.main import open_session
from cli.prompts import conversation_ids, new_tokens
from cli.report import greedy_text
from decoding.validation import check_lengths, check_settings
from scripts.batches import Decoder, Job, Row
from scripts.openai_form import MAX_TOP_LOGPROBS, MIN_SEED, Answer, Ask, Event, Refusal, ask_of
from tp import ALONE

try:
    import uvicorn
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import HTMLResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    fail(f"scripts.serve needs FastAPI and uvicorn: pip install fastapi uvicorn ({error})")

MOST_BYTES = 2**22  # of a request's body
MOST_CONNECTIONS = 512
NUM_SLOTS = 4  # answers that are decoded at a time
CHAT = "/v1/chat/completions"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ELSEWHERE = ("prompt", "prompt_file", "interactive", "system", "num_samples", "json", "profile", "show_drafts",
             "logprobs", "tools", "prefill", "chat_template_kwargs", "prompt_cache")  # fmt: skip


def said(body: dict, status: int = 200) -> Response:
    """In ASCII: a client's lone surrogates, repeated in an error, have no UTF-8."""
    return Response(json.dumps(body), status, media_type="application/json")


class Front:
    """The server's paths, as coroutines of the connections' thread. `hosts`: the names that it answers to, or all."""

    def __init__(self, args: argparse.Namespace, decoder: Decoder, hosts: set[str] | None):
        self.args, self.decoder, self.session, self.hosts = args, decoder, decoder.session, hosts
        self.name, self.created = Path(args.random_weights or args.checkpoint).resolve().name, int(time.time())
        self.pieces, self.page = self.session.tokenizer.pieces(), Path(__file__).with_suffix(".html").read_text("utf-8")
        self.seeds = itertools.count(args.seed)  # of requests without
        self.reader = ThreadPoolExecutor(1)  # encodes one prompt after the other: templates share a process

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, dependencies=[Depends(self.admit)])
        paths = {"/": self.shown, "/v1/models": self.models, "/v1/models/{name:path}": self.model}
        for path, get in paths.items():
            app.add_api_route(path, get, response_model=None)
        for path in ("/v1/completions", CHAT):
            app.add_api_route(path, self.answer, methods=["POST"], response_model=None)

        async def refused(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                error = Refusal(f"{request.method} {request.url.path}: {error.detail}", None, error.status_code)
            error = error if isinstance(error, Refusal) else Refusal("internal error", None, 500)
            return said(error.body, error.status)

        for kind in (Refusal, HTTPException, Exception):
            app.add_exception_handler(kind, refused)
        return app

    async def admit(self, request: Request) -> None:
        """Refusal without the key, or under a foreign name: a page from elsewhere can give its own name our address."""
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError as error:
            raise Refusal(f"the Host header: {error}") from None
        if self.hosts and name not in self.hosts:
            raise Refusal(f"this server answers to {', '.join(sorted(self.hosts))}, not to {name!r:.99}", None, 403)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        required = self.args.api_key
        is_valid = required is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), required.encode())
        )
        if not is_valid and request.url.path != "/":
            raise Refusal("no API key, or a wrong one: send Authorization: Bearer KEY", None, 401, "invalid_api_key")

    async def shown(self) -> Response:
        return HTMLResponse(self.page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    async def models(self) -> Response:
        return said({"object": "list", "data": [self.about()]})

    async def model(self, name: str) -> Response:
        if name != self.name:
            raise Refusal(f"no model {name!r:.99}: this server has {self.name!r}", "model", 404, "model_not_found")
        return said(self.about())

    def about(self) -> dict:
        engine, args = self.session.engine, self.args
        found = {
            "context": engine.max_seq_length, "rows": engine.batch_size, "k": engine.speculate_k,
            "draft": Path(args.draft_checkpoint).resolve().name if args.draft_checkpoint else args.draft,
            "greedy_text": greedy_text(engine), "plain_tok_s": 1 / engine.costs.decode_s if engine.costs else None,
            "temperature": args.temperature, "chat_template": self.session.tokenizer.template is not None,
        }  # fmt: skip
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "quickdraft", "about": found}

    async def answer(self, request: Request) -> Response:
        """Read, check, encode; hand the rows to the decoder; send what comes back."""
        args, job, chat = self.args, Job(asyncio.get_running_loop()), request.url.path == CHAT
        try:
            async with asyncio.timeout(args.answer_s):
                ask = ask_of(await body_of(request), chat, self.name, self.session.sampling, args.max_new_tokens)
                prompts = await job.loop.run_in_executor(self.reader, self.encoded, ask)
        except TimeoutError:
            raise Refusal(f"not read within {args.answer_s:g} s", None, 408) from None
        seed = next(self.seeds) if ask.seed is None else ask.seed
        rows = [
            Row(job, ask, i * ask.n + n, ids, new, as_int64(seed + n), self.session, args.stop)
            for i, (ids, new) in enumerate(prompts)
            for n in range(ask.n)
        ]
        self.decoder.put(rows)
        job.watch = asyncio.create_task(self.watched(request, job))
        answer, prompted = Answer(ask, self.name, self.pieces), sum(len(ids) for ids, _ in prompts)
        if ask.stream:
            lines = streamed(job, answer, len(rows), prompted)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        found = [Event(n, []) for n in range(len(rows))]
        async for n, tokens, ending in job.events(len(rows)):
            found[n] = Event(n, found[n].tokens + tokens, ending)
        choices = [answer.choice(event, whole=True) for event in found]
        return said({**answer.head, "choices": choices, "usage": answer.usage(prompted, found)})

    async def watched(self, request: Request, job: Job) -> None:
        """Until the client has left or has its answer, or the time is over."""
        try:
            async with asyncio.timeout(self.args.answer_s):
                while (await request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            job.tell(Refusal(f"not done after {self.args.answer_s:g} s, the server's --answer_s", None, 504, "timeout"))
        self.decoder.drop(job)

    def encoded(self, ask: Ask) -> list[tuple[list[int], int]]:
        """Of every prompt its ids, and how many tokens may follow."""
        tokenizer, engine, found = self.session.tokenizer, self.session.engine, []
        try:
            check_settings(engine.model, ask.sampling, 0, (), 0)
        except ValueError as error:
            raise Refusal(str(error), "logit_bias") from None
        try:
            for prompt in ask.prompts:
                if not isinstance(ids := prompt, list) or ask.chat:
                    ids = conversation_ids(tokenizer, prompt, **ask.names) if ask.chat else tokenizer.encode(prompt)
                room = max(1, engine.max_seq_length - len(ids))
                new = room if ask.chat and ask.new is None else new_tokens(ask.new, ids, engine.max_seq_length)
                check_lengths(engine.model, [ids], [max(1, new)], engine.max_seq_length, engine.drafter)
                found.append((ids, new))
        except ValueError as error:
            message = str(error).removeprefix("prompt 0 ").replace("--max_new_tokens", "max_tokens")
            code = "context_length_exceeded" if "positions" in message else None
            raise Refusal(f"the prompt: {message}", "messages" if ask.chat else "prompt", 400, code) from None
        return found


def as_int64(seed: int) -> int:
    """The seed after the largest is the smallest. The sampler hashes all 64 bits, so negative seeds need no mapping."""
    return (seed - MIN_SEED) % 2**64 + MIN_SEED


async def body_of(request: Request) -> object:
    """A JSON body. Browsers send no JSON to other sites without asking them first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("the body must be JSON, with Content-Type: application/json", None, 415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Refusal(f"the body is longer than {MOST_BYTES} bytes", None, 413)
    except ClientDisconnect:
        raise Refusal("the client left before the body's end") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None


async def streamed(job: Job, answer: Answer, rows: int, prompted: int) -> AsyncIterator[str]:
    """The answer as server-sent events. An error ends it."""
    ask, found, line = answer.ask, [], lambda body: f"data: {json.dumps(body)}\n\n"
    for index in range(rows if ask.chat else 0):
        yield line(answer.opening(index))
    try:
        async for event in job.events(rows):
            if event.tokens:
                yield line(answer.chunk(answer.choice(event._replace(ending=None))))
            if event.ending:
                yield line(answer.chunk(answer.choice(event._replace(tokens=[]))))
            found.append(event)
    except Refusal as error:
        yield line(error.body)
        return
    if ask.usage:
        yield line(answer.chunk(usage=answer.usage(prompted, found)))
    yield "data: [DONE]\n\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="An OpenAI-compatible server, and a page that shows drafting as it happens.", allow_abbrev=False,
        epilog="Every other flag is generate.py's and says what a request leaves open; --batch_size answers are"
        f" decoded at a time, by default {NUM_SLOTS}; others wait for a free slot.",
    )  # fmt: skip
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on; default: this machine alone, %(default)s")
    add("--port", type=int, default=8000, metavar="N", help="default: %(default)s; 0: any that is free")
    add("--api_key", metavar="KEY", help="that every request but the page's must bring; others on this"
        " machine can see it: not in --api_key_file or the variable QUICKDRAFT_API_KEY; default: none")  # fmt: skip
    add("--api_key_file", metavar="FILE", help="a file that holds the key")
    add("--queue", type=positive, default=256, metavar="N", help="answers that may wait; default: %(default)s")
    add("--answer_s", type=float, default=600, metavar="S", help="seconds for one request; default: %(default)s")
    own, rest = parser.parse_known_args(argv)
    has_slots = any(word.partition("=")[0] == "--batch_size" for word in rest)
    args, usual = generate_flags(rest if has_slots else [*rest, f"--batch_size={NUM_SLOTS}"]), generate_flags([])
    if wrong := [name for name in ELSEWHERE if getattr(args, name) != getattr(usual, name)]:
        fail(f"--{wrong[0]} is about generate.py's own prompts and output: a server's come with its requests")
    return argparse.Namespace(**vars(args), **vars(own))


def api_key_of(args: argparse.Namespace) -> str | None:
    """The key of --api_key, --api_key_file or QUICKDRAFT_API_KEY, in this order; None without any of them."""
    source, key = "--api_key", args.api_key
    if key is not None and args.api_key_file is not None:
        raise ValueError("--api_key and --api_key_file: give one of them")
    if args.api_key_file is not None:
        source = f"--api_key_file {args.api_key_file}"
        try:
            key = Path(args.api_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source}: {error}") from None
    elif key is None:
        source, key = "QUICKDRAFT_API_KEY", os.environ.get("QUICKDRAFT_API_KEY")
    if key is not None and not (key and all("!" <= character <= "~" for character in key)):
        raise ValueError(f"{source}: a key must be visible ASCII characters without blanks, at least one")
    return key


def bound(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there: {error}") from None
    return found


def run(args: argparse.Namespace) -> bool:
    """Serve until a signal. SIGTERM: nobody new is let in, what was asked is answered; SIGINT: now. Was it SIGTERM?"""
    check_options(args)
    for wrong, message in (
        (not 0 < args.answer_s < 1e6, f"--answer_s {args.answer_s} must be a positive number of seconds"),
        (not 0 <= args.port < 2**16, f"--port {args.port} must lie between 0 and 65535"),
    ):
        if wrong:
            raise ValueError(message)
    args.api_key = api_key_of(args)
    listener = bound(args.host, args.port)
    device, threads = pick_device(args.device), use_threads(args.threads)
    opened = argparse.Namespace(**{**vars(args), "interactive": True, "logprobs": MAX_TOP_LOGPROBS})
    session, _, _ = open_session(opened, [], device, ALONE, num_slots=args.batch_size)
    if device.type == "cpu" and args.threads is None:
        session.choose_threads(threads)
    decoder = Decoder(session, args.queue)
    address, port = listener.getsockname()[:2]
    local = ip_address(address).is_loopback
    if not local and not args.api_key:
        print(f"anybody who reaches {address} may use this server; --api_key_file FILE locks it", file=sys.stderr)
    front = Front(args, decoder, {"localhost", "127.0.0.1", "::1", args.host} if local else None)
    server = uvicorn.Server(uvicorn.Config(
        front.app(), log_level="warning", lifespan="off", limit_concurrency=MOST_CONNECTIONS, server_header=False,
        timeout_graceful_shutdown=math.ceil(args.answer_s),
    ))  # fmt: skip

    def end(number: int, frame: object) -> None:
        server.should_exit = True
        if number == signal.SIGINT:
            server.force_exit = decoder.stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    connections = threading.Thread(target=server.run, args=([listener],), daemon=True)
    connections.start()
    while connections.is_alive() and not server.started:
        time.sleep(0.01)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
    while connections.is_alive():
        decoder.turn(seconds=0.2)
    return not decoder.stopped


def main(argv: Sequence[str] | None = None) -> None:
    with ending_plainly():
        drained = run(parse_args(argv))
    sys.exit(0 if drained else 130)


if __name__ == "__main__":
    main()
