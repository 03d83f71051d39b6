"""An OpenAI-compatible server, and a page that shows drafting as it happens: `python -m scripts.serve`.

    Api             /v1/models, /v1/completions, /v1/chat/completions, /health and the page, on
                    FastAPI and uvicorn; the first three without /v1 too
    run, main       flags, loading, a thread for the connections, signals

The main thread decodes (scripts/batches.py), because compiled code belongs to the thread that compiled it; a second
thread serves connections. scripts/openai_form.py has the protocol's objects, scripts/serve.html the page,
scripts/serve_flags.py the flags. The server listens on this machine's loopback address unless --host names another; no
request can name a path or a file.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.serve_flags import checked_args

    answer_flags(checked_args)

import argparse
import asyncio
import copy
import functools
import hmac
import json
import logging
import math
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
from cli.flags import check_options, choose_seed
from cli.load import pick_device
from cli.main import open_session
from cli.page import page
from cli.prompts import conversation_ids, new_tokens
from cli.report import greedy_text
from decoding.grammar import Grammar, JsonGrammars
from decoding.settings import is_random, random_seed
from decoding.slots import MAX_STOP_IDS
from decoding.validation import check_lengths, check_settings
from loading.hub import model_name
from scripts.serve_flags import check_server_flags, parse_args, read_api_key
from tp import ALONE

try:
    import uvicorn
    from fastapi import Depends, FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    from scripts.batches import Decoder, Job, Row
    from scripts.openai_form import (
        MAX_TOP_LOGPROBS,
        MIN_SEED,
        Answer,
        Event,
        Refusal,
        TextRequest,
        read_request,
        token_counts,
    )
except ImportError as error:
    fail(f"scripts.serve needs FastAPI and uvicorn: pip install fastapi uvicorn ({error})")

MAX_BODY_BYTES = 2**22
MAX_CONNECTIONS = 512
CHAT, COMPLETIONS, MODELS = "/chat/completions", "/completions", "/models"
VERSIONS = ("/v1", "")  # in front of these paths: some clients leave it out
OPEN_PATHS = ("/", "/health")  # need no key
PATHS_HELP = f"this server has /v1{CHAT}, /v1{COMPLETIONS}, /v1{MODELS}, /health and /"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


log = logging.getLogger("uvicorn.error")  # in the format of uvicorn's lines about requests


def json_response(body: dict, status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


class Api:
    """The server's paths, as coroutines of the connections' thread. `hosts`: the Host headers that it accepts; None
    accepts all."""

    def __init__(self, args: argparse.Namespace, decoder: Decoder, hosts: set[str] | None):
        self.args, self.decoder, self.session, self.hosts = args, decoder, decoder.session, hosts
        self.name = args.model_alias or model_name(args.random_weights or args.checkpoint)
        tokenizer, vocab_size = self.session.tokenizer, self.session.engine.model.config.vocab_size
        self.pieces = tokenizer.pieces() + [b""] * (vocab_size - tokenizer.vocab_size)  # for ids of the model alone
        self.html = page(Path(__file__).with_suffix(".html"))
        self.created, self.next_seed = int(time.time()), args.seed  # of the next request without a seed
        self.encoder = ThreadPoolExecutor(1)  # encodes one prompt after the other: templates share a process

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, dependencies=[Depends(self.admit)])
        if self.args.cors:
            app.add_middleware(CORSMiddleware, allow_origins=self.args.cors, allow_methods=["*"], allow_headers=["*"])
        pages = {"/": self.page, "/health": self.health}
        posts = {}
        for version in VERSIONS:
            pages |= {version + MODELS: self.models, version + MODELS + "/{name:path}": self.model}
            posts |= {version + COMPLETIONS: self.answer, version + CHAT: self.answer}
        for path, get in pages.items():
            app.add_api_route(path, get, methods=["GET", "HEAD"], response_model=None)
        for path, post in posts.items():
            app.add_api_route(path, post, methods=["POST"], response_model=None)

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                hint = f": {PATHS_HELP}" if error.status_code == 404 else ""
                message = f"{request.method} {request.url.path}: {error.detail}{hint}"
                error = Refusal(message, None, error.status_code)
            error = error if isinstance(error, Refusal) else Refusal("internal error", None, 500)
            log_refusal(request, error)
            return json_response(error.body, error.status)

        for kind in (Refusal, HTTPException, Exception):
            app.add_exception_handler(kind, refuse)
        return app

    async def admit(self, request: Request) -> None:
        """Raise a Refusal without the key, or for a foreign Host: a page's owner can point the page's name here."""
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
        if not is_valid and request.url.path not in OPEN_PATHS:
            raise Refusal("no API key, or a wrong one: send Authorization: Bearer KEY", None, 401, "invalid_api_key")

    async def page(self) -> Response:
        return HTMLResponse(self.html, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self.description()]})

    async def model(self, name: str) -> Response:
        if name != self.name:
            raise Refusal(f"no model {name!r:.99}: this server has {self.name!r}", "model", 404, "model_not_found")
        return json_response(self.description())

    def description(self) -> dict:
        engine, args = self.session.engine, self.args
        about = {
            "context": engine.max_seq_length, "rows": engine.batch_size, "k": engine.speculate_k,
            "draft": model_name(args.draft_checkpoint) if args.draft_checkpoint else args.draft,
            "greedy_text": greedy_text(engine), "temperature": args.temperature,
            "chat_template": self.session.tokenizer.template is not None,
        }  # fmt: skip
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "quickdraft", "about": about}

    async def answer(self, http_request: Request) -> Response:
        """Read, check and encode a request, give its rows to the decoder, and send the answers."""
        args, job = self.args, Job(asyncio.get_running_loop())
        is_chat = http_request.url.path.endswith(CHAT)
        try:
            async with asyncio.timeout(args.answer_s):
                request = read_request(await read_body(http_request), is_chat, self.name, self.session.sampling)
                num_rows, param = len(request.prompts) * request.n, "n" if request.n > 1 else "prompt"
                if num_rows > args.queue:  # now, because encoding many prompts takes long
                    raise Refusal(f"{num_rows} answers are more than the {args.queue} that may wait", param)
                job.stop_ids = self.stop_ids(request)
                prompts = await job.loop.run_in_executor(self.encoder, self.encode_prompts, request)
                job.grammar = await job.loop.run_in_executor(self.encoder, self.compile_grammar, request)
        except TimeoutError:
            raise Refusal(f"not read within {args.answer_s:g} s", None, 408) from None
        rows = []
        for (ids, limit), seed in zip(prompts, self.seeds(request, len(prompts))):
            for n in range(request.n):
                row_seed = as_int64(seed + n)
                row = Row(job, request, len(rows), ids, limit, row_seed, self.session, args.stop)
                rows.append(row)
        self.decoder.add(rows)
        job.watcher = asyncio.create_task(self.watch(http_request, job))
        answer, prompt_tokens = Answer(request, self.name, self.pieces), sum(len(ids) for ids, _ in prompts)
        if request.stream:
            lines = stream_events(http_request, job, answer, len(rows), prompt_tokens)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        events = [Event(n, []) for n in range(len(rows))]
        async for n, tokens, ending in job.events(len(rows)):
            events[n] = Event(n, events[n].tokens + tokens, ending)
        choices = [answer.choice(event) for event in events]
        return json_response({**answer.head, "choices": choices, "usage": answer.usage(prompt_tokens, events)})

    def seeds(self, request: TextRequest, num_prompts: int) -> list[int]:
        """The seed of every prompt's first answer: a request's own one, or others for every prompt,
        so that equal prompts differ."""
        if request.seed is not None and not is_random(request.seed):
            return [request.seed] * num_prompts
        first = random_seed()
        if request.seed is None:
            first = self.next_seed
            self.next_seed += request.n * num_prompts
        return [first + number * request.n for number in range(num_prompts)]

    def stop_ids(self, request: TextRequest) -> frozenset[int]:
        """The tokens that end this request's answers. Refusal for too many, and for one that the model
        does not have."""
        key = "stop_token_ids"
        ids = frozenset(request.stop_token_ids)
        V = self.session.engine.model.config.vocab_size
        if max(ids, default=0) >= V:
            raise Refusal(f"{key} holds {max(ids)}, outside the vocabulary of {V}", key)
        is_ignored = self.args.ignore_eos if request.ignore_eos is None else request.ignore_eos
        if not is_ignored:
            ids |= self.session.tokenizer.stop_ids
        if len(ids) > MAX_STOP_IDS:
            raise Refusal(f"{len(ids)} stop tokens are more than the {MAX_STOP_IDS} that fit", key)
        return ids

    async def watch(self, http_request: Request, job: Job) -> None:
        """Drop the job when its client has left or has the answer, or when its time is over. The Refusal ends an
        `answer` that still waits for events."""
        refusal = Refusal("the client has left")
        try:
            async with asyncio.timeout(self.args.answer_s):
                while (await http_request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            refusal = Refusal(f"not done after {self.args.answer_s:g} s, the server's --answer_s", None, 504, "timeout")
        self.decoder.drop(job)
        job.send(refusal)

    @functools.cached_property
    def grammars(self) -> JsonGrammars:
        return JsonGrammars(self.session.tokenizer, self.session.tokenizer.stop_ids)

    def compile_grammar(self, request: TextRequest) -> Grammar | None:
        """The grammar of a request's response_format. Refusal for a schema that cannot be obeyed."""
        if request.response_format is None:
            return None
        try:
            if not self.stop_ids(request) & self.session.tokenizer.stop_ids:
                reason = "the model has none, or ignore_eos ignores it"
                raise ValueError(f"JSON answers need an end token: {reason}")
            return self.grammars.compile(request.response_format)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"response_format: {error}", "response_format") from None

    def encode_prompts(self, request: TextRequest) -> list[tuple[list[int], int]]:
        """(ids, max_new_tokens) of every prompt. max_tokens is clipped to the room that the prompt leaves."""
        tokenizer, engine, encoded = self.session.tokenizer, self.session.engine, []
        try:
            check_settings(engine.model, request.sampling, 0, (), 0)
        except ValueError as error:
            raise Refusal(str(error), "logit_bias") from None
        requested = self.args.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        try:
            for prompt in request.prompts:
                if request.chat:
                    ids = conversation_ids(tokenizer, prompt, tools=request.tools, **request.chat_template_kwargs)
                elif isinstance(prompt, str):
                    is_flag_set, key = self.args.parse_special, request.parse_special
                    ids = tokenizer.encode(prompt, parse_special=is_flag_set if key is None else key)
                else:
                    ids = prompt
                room = max(1, engine.max_seq_length - len(ids))
                is_unlimited = request.chat and requested is None
                limit = room if is_unlimited else min(room, new_tokens(requested, ids, engine.max_seq_length))
                check_lengths(engine.model, [ids], [max(1, limit)], engine.max_seq_length)
                encoded.append((ids, limit))
        except ValueError as error:
            message = str(error).removeprefix("prompt 0 ").partition(", or lower")[0]
            code = None
            if "positions" in message:
                code = "context_length_exceeded"
                # litellm, aider and others look for these words of OpenAI's.
                limit = engine.max_seq_length
                message += f". This model's maximum context length is {limit} tokens."
            raise Refusal(f"the prompt: {message}", "messages" if request.chat else "prompt", 400, code) from None
        return encoded


def as_int64(seed: int) -> int:
    """The seed, wrapped around to int64. The sampler hashes all 64 bits, so negative seeds need no mapping."""
    return (seed - MIN_SEED) % 2**64 + MIN_SEED


async def read_body(request: Request) -> object:
    """The body as JSON. Content-Type must say so: browsers do not send JSON to another site without its consent."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("the body must be JSON, with Content-Type: application/json", None, 415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise Refusal(f"the body is longer than {MAX_BODY_BYTES} bytes", None, 413)
    except ClientDisconnect:
        raise Refusal("the client left before the body's end") from None
    try:  # question marks replace lone surrogates, which UTF-8 cannot encode
        fields = json.loads(body)
        if isinstance(fields, dict):
            json.dumps(fields.get("stop"), ensure_ascii=False).encode()  # not in a stop string: it would end at any
        return json.loads(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))
    except UnicodeEncodeError:
        raise Refusal("stop holds half of a surrogate pair, which is no character", "stop") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None


def log_refusal(request: Request, error: Refusal) -> None:
    """One line with the reason, because many clients do not show it. The request's text stays out of
    it, but for level debug."""
    message = str(error) if log.isEnabledFor(logging.DEBUG) else error.logged
    line = f"{request.method} {request.url.path}: {error.status}, {message}"
    level = logging.ERROR if error.status >= 500 else logging.WARNING
    printable = "".join(x if x.isprintable() else " " for x in line)  # no terminal's codes
    log.log(level, "%s", printable)


async def stream_events(
    http_request: Request, job: Job, answer: Answer, num_rows: int, prompt_tokens: int
) -> AsyncIterator[str]:
    """The answer as server-sent events. A chat's role comes with its first token. An error ends
    it."""
    request, events, as_line = answer.request, [], lambda body: f"data: {json.dumps(body)}\n\n"
    options = request.stream_options
    # As in vLLM, a client that says no to the last count gets none before it either.
    has_running_usage = options.get("continuous_usage_stats") and options.get("include_usage") is not False
    opened = set()
    num_decoded = 0
    try:
        async for event in job.events(num_rows):
            events.append(event)
            num_decoded += sum(token.round > 0 for token in event.tokens)
            usage = token_counts(prompt_tokens, num_decoded) if has_running_usage else None
            if request.chat and event.index not in opened:
                opened.add(event.index)
                yield as_line(answer.opening(event.index, usage))
            if event.tokens:
                yield as_line(answer.chunk(answer.choice(event._replace(ending=None)), usage=usage))
            if event.ending:
                yield as_line(answer.chunk(answer.choice(event._replace(tokens=[])), usage=usage))
    except Refusal as error:
        log_refusal(http_request, error)
        yield as_line(error.body)
        return
    if options.get("include_usage"):
        yield as_line(answer.chunk(usage=answer.usage(prompt_tokens, events)))
    yield "data: [DONE]\n\n"


def log_config() -> dict:
    """uvicorn's own, with the lines about requests on stderr too: stdout is for text."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit status. SIGTERM stops accepting requests and finishes the running ones;
    SIGINT ends at once."""
    check_options(args)
    check_server_flags(args)
    args.api_key = read_api_key(args)
    choose_seed(args)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:  # clients that connect while the model loads wait for it
        listener = socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        raise ValueError(f"--host {args.host} --port {args.port}: cannot listen there: {error}") from None
    device = pick_device(args.device)
    use_threads(args.threads)
    session_args = argparse.Namespace(**{**vars(args), "interactive": True, "logprobs": MAX_TOP_LOGPROBS})
    session, _, _ = open_session(session_args, [], device, ALONE, num_slots=args.batch_size)
    decoder = Decoder(session, args.queue)
    address, port = listener.getsockname()[:2]
    is_local = ip_address(address).is_loopback
    if not is_local and not args.api_key:
        print(f"anybody who reaches {address} may use this server; --api_key_file FILE asks for a key", file=sys.stderr)
    api = Api(args, decoder, {"localhost", "127.0.0.1", "::1", args.host.lower()} if is_local else None)
    server = uvicorn.Server(uvicorn.Config(
        api.app(), log_level=args.log_level, log_config=log_config(), lifespan="off",
        limit_concurrency=MAX_CONNECTIONS, server_header=False,
        timeout_graceful_shutdown=math.ceil(args.answer_s),
    ))  # fmt: skip

    def end(number: int, frame: object) -> None:
        server.should_exit = True
        if number == signal.SIGINT:
            server.force_exit = decoder.is_stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    connections = threading.Thread(target=server.run, args=([listener],), daemon=True)
    connections.start()
    while connections.is_alive() and not server.started:
        time.sleep(0.01)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
    while connections.is_alive() and not decoder.is_stopped:
        decoder.step(timeout_s=0.2)
    return 130 if decoder.is_stopped else 0


def main(argv: Sequence[str] | None = None) -> None:
    with ending_plainly():
        status = run(parse_args(argv))
    sys.exit(status)


if __name__ == "__main__":
    main()
