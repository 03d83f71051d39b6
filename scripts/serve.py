"""An OpenAI-compatible server, and a page that shows drafting as it happens: `python -m
scripts.serve`.

    Api             /v1/models, /v1/completions, /v1/chat/completions, /health and the page, on
                    FastAPI and uvicorn; the first three without /v1 too
    run, main       flags, loading, a thread for the connections, signals

The main thread decodes (scripts/batches.py), because compiled code belongs to the thread that
compiled it; a second thread serves connections. scripts/openai_form.py has the protocol's objects,
scripts/serve.html the page, scripts/serve_flags.py the flags. The server listens on this machine's
loopback address unless --host names another; no request can name a path or a file.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.serve_flags import parse_args

    answer_flags(parse_args)

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
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from cli.errors import exit_on_error, fail, use_threads
from cli.flags import with_chosen_seed
from cli.opening import Workload, open_llm
from cli.page import page
from cli.report import greedy_text
from decoding.grammar import Grammar, JsonGrammars
from decoding.sampling import Sampling
from decoding.settings import is_random, new_tokens, random_seed
from decoding.state import MAX_STOP_IDS
from decoding.validation import check_lengths, check_settings, reason_of
from loading.target import pick_device
from loading.tokenizer import conversation_ids
from scripts.serve_flags import ServerOptions, parse_args, read_api_key

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
CHAT = "/chat/completions"
COMPLETIONS = "/completions"
MODELS = "/models"
VERSIONS = ("/v1", "")  # in front of these paths: some clients leave it out
OPEN_PATHS = ("/", "/health")  # need no key
PATHS_HELP = f"this server has /v1{CHAT}, /v1{COMPLETIONS}, /v1{MODELS}, /health and /"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)

log = logging.getLogger("uvicorn.error")  # in the format of uvicorn's lines about requests


def json_response(body: dict, status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


def model_name(path: str | Path) -> str:
    """The name of a folder or file, and of a repository where the path lies in the hub's cache."""
    path = Path(path).absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name


class EncodedPrompt(NamedTuple):
    ids: list[int]
    max_new_tokens: int  # 0: an echo alone


class Api:
    """The server's paths, as coroutines of the connections' thread. `hosts`: the Host headers that
    it accepts; None accepts all."""

    def __init__(self, server: ServerOptions, decoder: Decoder, hosts: set[str] | None):
        self.server = server
        self.options = server.options
        self.defaults = server.options.requests
        self.sampling = Sampling(**self.defaults.sampling)
        self.decoder = decoder
        self.llm = decoder.llm
        self.hosts = hosts
        self.name = server.model_alias or model_name(server.options.model.source)
        tokenizer = self.llm.tokenizer
        vocab_size = self.llm.engine.model.config.vocab_size
        # Ids beyond the tokenizer's have no bytes.
        self.pieces = tokenizer.pieces() + [b""] * (vocab_size - tokenizer.vocab_size)
        self.html = page(Path(__file__).with_suffix(".html"))
        self.created = int(time.time())
        self.next_seed = self.defaults.seed  # of the next request without a seed
        self.encoder = ThreadPoolExecutor(1)  # a tokenizer encodes one prompt after the other

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, dependencies=[Depends(self.admit)])
        if self.server.cors:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.server.cors,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        pages = {"/": self.page, "/health": self.health}
        posts = {}
        for version in VERSIONS:
            pages |= {version + MODELS: self.models, version + MODELS + "/{name:path}": self.model}
            posts |= {version + COMPLETIONS: self.answer, version + CHAT: self.answer}
        for path, get in pages.items():
            app.add_api_route(path, get, methods=["GET", "HEAD"], response_model=None)
        for path, post in posts.items():
            app.add_api_route(path, post, methods=["POST"], response_model=None)

        for error_class in (Refusal, HTTPException, Exception):
            app.add_exception_handler(error_class, refuse)
        return app

    async def admit(self, request: Request) -> None:
        """Raise a Refusal without the key, or for a foreign Host: a page's owner can point the
        page's name here."""
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError as error:
            raise Refusal(f"the Host header: {error}") from None
        if self.hosts and name not in self.hosts:
            hosts = ", ".join(sorted(self.hosts))
            raise Refusal(f"this server answers to {hosts}, not to {name!r:.99}", None, 403)
        if request.url.path in OPEN_PATHS or self.server.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_equal = hmac.compare_digest(key.strip().encode(), self.server.api_key.encode())
        if scheme.lower() != "bearer" or not is_equal:
            message = "no API key, or a wrong one: send Authorization: Bearer KEY"
            raise Refusal(message, None, 401, "invalid_api_key")

    async def page(self) -> Response:
        return HTMLResponse(
            self.html,
            headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"},
        )

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self.description()]})

    async def model(self, name: str) -> Response:
        if name != self.name:
            raise Refusal(
                f"no model {name!r:.99}: this server has {self.name!r}",
                "model",
                404,
                "model_not_found",
            )
        return json_response(self.description())

    def description(self) -> dict:
        engine = self.llm.engine
        draft = self.options.draft
        about = {
            "context": engine.max_seq_length,
            "rows": engine.batch_size,
            "k": engine.speculate_k,
            "draft": model_name(draft.checkpoint) if draft.checkpoint else draft.spec,
            "greedy_text": greedy_text(engine),
            "temperature": self.sampling.temperature,
            "chat_template": self.llm.tokenizer.template is not None,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "quickdraft",
            "about": about,
        }

    async def answer(self, http_request: Request) -> Response:
        """Read, check and encode a request, give its rows to the decoder, and send the answers."""
        job = Job(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self.server.answer_s):
                request, prompts = await self.read(http_request, job)
        except TimeoutError:
            raise Refusal(f"not read within {self.server.answer_s:g} s", None, 408) from None
        rows = self.rows(job, request, prompts)
        self.decoder.add(rows)
        job.watcher = asyncio.create_task(self.watch(http_request, job))
        answer = Answer(request, self.name, self.pieces)
        prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        if request.stream:
            lines = stream_events(http_request, job, answer, len(rows), prompt_tokens)
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)
        events = [Event(index, []) for index in range(len(rows))]
        async for index, tokens, ending in job.events(len(rows)):
            events[index] = Event(index, events[index].tokens + tokens, ending)
        choices = [answer.choice(event) for event in events]
        usage = answer.usage(prompt_tokens, events)
        return json_response({**answer.head, "choices": choices, "usage": usage})

    async def read(
        self, http_request: Request, job: Job
    ) -> tuple[TextRequest, list[EncodedPrompt]]:
        """The checked request with its encoded prompts. Sets what all answers of the job share."""
        body = await read_body(http_request)
        is_chat = http_request.url.path.endswith(CHAT)
        request = read_request(body, is_chat, self.name, self.sampling)
        num_rows = len(request.prompts) * request.n
        if num_rows > self.server.queue:  # before encoding, which takes long for many
            raise Refusal(
                f"{num_rows} answers are more than the {self.server.queue} that may wait",
                "n" if request.n > 1 else "prompt",
            )
        job.stop_ids = self.stop_ids(request)
        run = functools.partial(job.loop.run_in_executor, self.encoder)
        prompts = await run(self.encode_prompts, request)
        job.grammar = await run(self.compile_grammar, request)
        return request, prompts

    def rows(self, job: Job, request: TextRequest, prompts: list[EncodedPrompt]) -> list[Row]:
        """A row for each answer: n for the first prompt, then n for the next."""
        rows = []
        tokenizer = self.llm.tokenizer
        for (ids, limit), seed in zip(prompts, self.seeds(request, len(prompts))):
            for n in range(request.n):
                row_seed = as_int64(seed + n)
                row = Row(
                    job, request, len(rows), ids, limit, row_seed, tokenizer, self.defaults.stop
                )
                rows.append(row)
        return rows

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
        """The tokens that end this request's answers. Refusal for too many, and for one that the
        model does not have."""
        key = "stop_token_ids"
        ids = frozenset(request.stop_token_ids)
        V = self.llm.engine.model.config.vocab_size
        if max(ids, default=0) >= V:
            raise Refusal(f"{key} holds {max(ids)}, outside the vocabulary of {V}", key)
        is_ignored = self.defaults.ignore_eos if request.ignore_eos is None else request.ignore_eos
        if not is_ignored:
            ids |= self.llm.tokenizer.stop_ids
        if len(ids) > MAX_STOP_IDS:
            raise Refusal(f"{len(ids)} stop tokens are more than the {MAX_STOP_IDS} that fit", key)
        return ids

    async def watch(self, http_request: Request, job: Job) -> None:
        """Drop the job when its client has left or has the answer, or when its time is over. The
        Refusal ends an `answer` that still waits for events."""
        refusal = Refusal("the client has left")
        try:
            async with asyncio.timeout(self.server.answer_s):
                while (await http_request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            message = f"not done after {self.server.answer_s:g} s, the server's --answer_s"
            refusal = Refusal(message, None, 504, "timeout")
        self.decoder.drop(job)
        job.send(refusal)

    @functools.cached_property
    def grammars(self) -> JsonGrammars:
        return JsonGrammars(self.llm.tokenizer, self.llm.tokenizer.stop_ids)

    def compile_grammar(self, request: TextRequest) -> Grammar | None:
        """The grammar of a request's response_format. Refusal for a schema that cannot be
        obeyed."""
        if request.response_format is None:
            return None
        try:
            if not self.stop_ids(request) & self.llm.tokenizer.stop_ids:
                reason = "the model has none, or ignore_eos ignores it"
                raise ValueError(f"JSON answers need an end token: {reason}")
            return self.grammars.compile(request.response_format)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"response_format: {error}", "response_format") from None

    def encode_prompts(self, request: TextRequest) -> list[EncodedPrompt]:
        """Refusal for a prompt, or a number of tokens, that does not fit."""
        try:
            check_settings(self.llm.engine.model, request.sampling, 0, (), 0)
        except ValueError as error:
            raise Refusal(str(error), "logit_bias") from None
        try:
            return [self.encode(request, prompt) for prompt in request.prompts]
        except ValueError as error:
            message = reason_of(error).partition(", or lower")[0]
        code = None
        if "positions" in message:
            code = "context_length_exceeded"
            # litellm, aider and others look for these words of OpenAI's.
            limit = self.llm.engine.max_seq_length
            message += f". This model's maximum context length is {limit} tokens."
        param = "messages" if request.chat else "prompt"
        raise Refusal(f"the prompt: {message}", param, 400, code)

    def encode(self, request: TextRequest, prompt: str | list) -> EncodedPrompt:
        """max_tokens is clipped to the room that the prompt leaves. A chat without it gets all of
        the room."""
        tokenizer = self.llm.tokenizer
        ids = prompt
        if request.chat:
            kwargs = request.chat_template_kwargs
            ids = conversation_ids(tokenizer, prompt, tools=request.tools, **kwargs)
        elif isinstance(prompt, str):
            parse_special = request.parse_special
            if parse_special is None:
                parse_special = self.defaults.parse_special
            ids = tokenizer.encode(prompt, parse_special=parse_special)
        max_length = self.llm.engine.max_seq_length
        limit = room = max(1, max_length - len(ids))
        requested = request.max_new_tokens
        if requested is None:
            requested = self.defaults.max_new_tokens
        if requested is not None or not request.chat:
            limit = min(room, new_tokens(requested, ids, max_length))
        check_lengths(self.llm.engine.model, [ids], [max(1, limit)], max_length)
        return EncodedPrompt(ids, limit)


async def refuse(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in an exception."""
    refusal = error
    if isinstance(error, HTTPException):
        hint = f": {PATHS_HELP}" if error.status_code == 404 else ""
        message = f"{request.method} {request.url.path}: {error.detail}{hint}"
        refusal = Refusal(message, None, error.status_code)
    elif not isinstance(error, Refusal):
        refusal = Refusal("internal error", None, 500)
    log_refusal(request, refusal)
    return json_response(refusal.body, refusal.status)


def as_int64(seed: int) -> int:
    """The seed, wrapped around to int64. The sampler hashes all 64 bits, so negative seeds need no
    mapping."""
    return (seed - MIN_SEED) % 2**64 + MIN_SEED


async def read_body(request: Request) -> object:
    """The body as JSON. Content-Type must say so: browsers do not send JSON to another site without
    its consent."""
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise Refusal("the body must be JSON, with Content-Type: application/json", None, 415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise Refusal(f"the body is longer than {MAX_BODY_BYTES} bytes", None, 413)
    except ClientDisconnect:
        raise Refusal("the client left before the body's end") from None
    try:
        return parse_body(body)
    except UnicodeEncodeError:
        message = "stop holds half of a surrogate pair, which is no character"
        raise Refusal(message, "stop") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None


def parse_body(body: bytes) -> object:
    """JSON, where question marks replace lone surrogates, which UTF-8 cannot encode. In a stop
    string they are a UnicodeEncodeError, because the answer would end at any question mark."""
    fields = json.loads(body)
    if isinstance(fields, dict):
        json.dumps(fields.get("stop"), ensure_ascii=False).encode()
    return json.loads(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))


def log_refusal(request: Request, error: Refusal) -> None:
    """One line with the reason, because many clients do not show it. The request's text stays out
    of it, but for level debug."""
    message = str(error) if log.isEnabledFor(logging.DEBUG) else error.logged
    line = f"{request.method} {request.url.path}: {error.status}, {message}"
    level = logging.ERROR if error.status >= 500 else logging.WARNING
    printable = "".join(x if x.isprintable() else " " for x in line)  # no control codes
    log.log(level, "%s", printable)


def event_line(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def stream_events(
    http_request: Request, job: Job, answer: Answer, num_rows: int, prompt_tokens: int
) -> AsyncIterator[str]:
    """The answer as server-sent events. An error ends it."""
    events = []
    opened: set[int] = set()
    options = answer.request.stream_options
    # As in vLLM, a client that says no to the last count gets none before it either.
    has_running_usage = (
        options.get("continuous_usage_stats") and options.get("include_usage") is not False
    )
    num_decoded = 0
    usage = None
    try:
        async for event in job.events(num_rows):
            events.append(event)
            num_decoded += sum(token.round > 0 for token in event.tokens)
            if has_running_usage:
                usage = token_counts(prompt_tokens, num_decoded)
            for chunk in chunks(answer, event, opened, usage):
                yield event_line(chunk)
    except Refusal as error:
        log_refusal(http_request, error)
        yield event_line(error.body)
        return
    if options.get("include_usage"):
        yield event_line(answer.chunk(usage=answer.usage(prompt_tokens, events)))
    yield "data: [DONE]\n\n"


def chunks(answer: Answer, event: Event, opened: set[int], usage: dict | None) -> Iterator[dict]:
    """The chunks of an event. A chat's role comes before its first token; `opened` has the answers
    whose role was sent."""
    if answer.request.chat and event.index not in opened:
        opened.add(event.index)
        yield answer.opening(event.index, usage)
    if event.tokens:
        yield answer.chunk(answer.choice(event._replace(ending=None)), usage=usage)
    if event.ending:
        yield answer.chunk(answer.choice(event._replace(tokens=[])), usage=usage)


def log_config() -> dict:
    """uvicorn's own, with the lines about requests on stderr too: stdout is for text."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


def listen(flags: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
    try:
        return socket.create_server((flags.host, flags.port), family=family)
    except OSError as error:
        raise ValueError(
            f"--host {flags.host} --port {flags.port}: cannot listen there: {error}"
        ) from None


def make_server(flags: ServerOptions, decoder: Decoder, is_local: bool) -> uvicorn.Server:
    hosts = {"localhost", "127.0.0.1", "::1", flags.host.lower()} if is_local else None
    api = Api(flags, decoder, hosts)
    config = uvicorn.Config(
        api.app(),
        log_level=flags.log_level,
        log_config=log_config(),
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(flags.answer_s),
    )
    return uvicorn.Server(config)


def end_on_signals(server: uvicorn.Server, decoder: Decoder) -> None:
    """SIGTERM stops accepting requests and finishes the running ones; SIGINT ends at once."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True
        if number == signal.SIGINT:
            server.force_exit = True
            decoder.is_stopped = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def run(flags: ServerOptions) -> int:
    """Serve until a signal; returns the exit status."""
    options = with_chosen_seed(flags.options)
    options = replace(options, engine=replace(options.engine, logprobs=MAX_TOP_LOGPROBS))
    flags = replace(flags, api_key=read_api_key(flags), options=options)
    listener = listen(flags)  # clients that connect while the model loads wait for it
    device = pick_device(options.model.device)
    use_threads(options.run.threads)
    opened = open_llm(options, Workload(num_slots=options.run.batch_size), device)
    decoder = Decoder(opened.llm, flags.queue)
    address, port = listener.getsockname()[:2]
    is_local = ip_address(address).is_loopback
    if not is_local and not flags.api_key:
        print(
            f"anybody who reaches {address} may use this server; --api_key_file FILE asks for a"
            " key",
            file=sys.stderr,
        )
    server = make_server(flags, decoder, is_local)
    end_on_signals(server, decoder)
    connections = threading.Thread(target=server.run, args=([listener],), daemon=True)
    connections.start()
    while connections.is_alive() and not server.started:
        time.sleep(0.01)
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
    while connections.is_alive() and not decoder.is_stopped:
        decoder.step(timeout_s=0.2)
    return 130 if decoder.is_stopped else 0


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_error():
        status = run(parse_args(argv))
    sys.exit(status)


if __name__ == "__main__":
    main()
