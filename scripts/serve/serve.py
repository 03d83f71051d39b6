"""An OpenAI-compatible server, and a page that shows drafting as it happens: `python -m
scripts.serve`.

    Api             the paths, on FastAPI and uvicorn; those under /v1 without it too
    run, main       flags, loading, a thread for the connections, signals

The main thread decodes (batches.py), because compiled code belongs to the thread that
compiled it; a second thread serves connections. openai_form.py has the objects of chats and
completions, responses.py those of /v1/responses, metrics.py the metrics,
serve.html the page, serve_flags.py the flags. The server listens on this machine's
loopback address unless --host names another; no request can name a path or a file.
"""

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from cli.errors import exit_on_error, fail, use_threads
from cli.flags import with_chosen_seed
from cli.opening import open_llm
from cli.page import page
from cli.prompts import finite_number, refuse_constant
from cli.report import greedy_text
from decoding.batch import MAX_STOP_IDS
from decoding.errors import UserError
from decoding.grammar import Grammar, JsonGrammars
from decoding.sampling import Sampling
from decoding.settings import is_random, new_tokens, random_seed
from decoding.validation import check_lengths, check_settings, reason_of
from loading.chat_messages import join_parts
from loading.target import pick_device
from loading.tokenizer import conversation_ids
from scripts.serve.serve_flags import ServerOptions, parse_args, read_api_key

try:
    import uvicorn
    from fastapi import Depends, FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from pydantic_core import from_json
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    from scripts.serve.batches import Decoder, Job, Row
    from scripts.serve.message_form import MessageForm
    from scripts.serve.openai_form import (
        MAX_TOP_LOGPROBS,
        MIN_SEED,
        Answer,
        Event,
        Refusal,
        TextRequest,
        read_request,
        token_counts,
    )
    from scripts.serve.responses import (
        ResponseEvents,
        ResponseStore,
        read_response_request,
        with_own_param,
    )
except ImportError as error:
    fail(f"scripts.serve needs FastAPI and uvicorn: pip install fastapi uvicorn ({error})")

MAX_BODY_BYTES = 2**22
MAX_CONNECTIONS = 512
BODY_S = 60  # for a request's body
CHAT = "/chat/completions"
COMPLETIONS = "/completions"
MODELS = "/models"
RESPONSES = "/responses"
VERSIONS = ("/v1", "")  # in front of these paths: some clients leave it out
OPEN_PATHS = ("/", "/health")  # need no key
PATHS_HELP = (
    f"this server has text alone: /v1{CHAT}, /v1{COMPLETIONS}, /v1{RESPONSES}, /v1{MODELS},"
    " /tokenize, /detokenize, /metrics, /health and /"
)
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


def event_stream(*args) -> Response:
    """The `event_lines` of these arguments."""
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(event_lines(*args), media_type="text/event-stream", headers=headers)


class EncodedPrompt(NamedTuple):
    ids: list[int]
    max_new_tokens: int  # 0: an echo alone


class Submitted(NamedTuple):
    """A request whose answers are waiting or decoding."""

    job: Job
    answer: Answer
    num_rows: int
    prompt_tokens: int


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
        self.responses = ResponseStore()
        self.encoder = ThreadPoolExecutor(1)  # a tokenizer encodes one prompt after the other
        self.compiler = ThreadPoolExecutor(1)  # of grammars, for which nobody else waits

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, dependencies=[Depends(self.admit)])
        if self.server.cors:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.server.cors,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        app.state.metrics = self.decoder.metrics
        pages = {"/": self.page, "/health": self.health, "/metrics": self.metrics}
        posts = {"/tokenize": self.tokenize, "/detokenize": self.detokenize}
        for version in VERSIONS:
            pages |= {version + MODELS: self.models, version + MODELS + "/{name:path}": self.model}
            posts |= {version + COMPLETIONS: self.answer, version + CHAT: self.answer}
            posts[version + RESPONSES] = self.respond
            path = version + RESPONSES + "/{id}"
            pages[path] = self.stored_response
            app.add_api_route(path, self.delete_response, methods=["DELETE"], response_model=None)
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
        # HTTP/1.0 may leave it out, which no browser speaks.
        is_named = "host" in request.headers
        if self.hosts and is_named and name not in self.hosts:
            hosts = ", ".join(sorted(self.hosts))
            message = f"this server answers to {hosts}, not to {name!r:.99}: see --allowed_host"
            raise Refusal(message, None, 403)
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
            "k": engine.planner.speculate_k,
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
        """Answer a chat or a completion."""
        body = await self.read_body(http_request)
        is_chat = http_request.url.path.endswith(CHAT)
        request = read_request(body, is_chat, self.name, self.sampling)
        job, answer, num_rows, prompt_tokens = await self.submit(http_request, request)
        if request.stream:
            chunks = answer_chunks(job, answer, num_rows, prompt_tokens)
            return event_stream(http_request, chunks, lambda error: error.body, "data: [DONE]\n\n")
        events = [Event(index, []) for index in range(num_rows)]
        async for index, tokens, ending in job.events(num_rows):
            events[index] = Event(index, events[index].tokens + tokens, ending)
        choices = [choice for event in events for choice in answer.choices(event)]
        usage = answer.usage(prompt_tokens, events)
        return json_response({**answer.head, "choices": choices, "usage": usage})

    async def in_time(self, awaitable: Awaitable, seconds: float = math.inf) -> object:
        """Its result. Refusal if these seconds, or a request's time, end first."""
        seconds = min(seconds, self.server.answer_s)
        try:
            async with asyncio.timeout(seconds):
                return await awaitable
        except TimeoutError:
            raise Refusal(f"not read within {seconds:g} s", None, 408) from None

    def read_body(self, http_request: Request) -> Awaitable:
        return self.in_time(read_body(http_request), BODY_S)

    def in_thread(self, executor: ThreadPoolExecutor, function: Callable, *args) -> Awaitable:
        """The function's result, from a thread beside the connections'."""
        loop = asyncio.get_running_loop()
        return self.in_time(loop.run_in_executor(executor, function, *args))

    async def submit(self, http_request: Request, request: TextRequest) -> Submitted:
        """Encode a request's prompts and give its rows to the decoder."""
        num_rows = len(request.prompts) * request.n
        if num_rows > self.server.queue:  # before encoding, which takes long for many
            raise Refusal(
                f"{num_rows} answers are more than the {self.server.queue} that may wait",
                "n" if request.n > 1 else "prompt",
            )
        check_size(request)
        job = Job(asyncio.get_running_loop())
        job.stop_ids = self.stop_ids(request)
        form = MessageForm(request, self.llm.tokenizer)
        job.visible = form.visible
        prompts = await self.in_thread(self.encoder, self.encode_prompts, request)
        form.read_prompt(prompts[0].ids)
        job.grammar = await self.in_thread(self.compiler, self.compile_grammar, form)
        self.decoder.add(self.rows(job, request, prompts))
        job.watcher = asyncio.create_task(self.watch(http_request, job))
        answer = Answer(request, self.name, self.pieces, form.parser, job.stop_ids)
        return Submitted(job, answer, num_rows, sum(len(prompt.ids) for prompt in prompts))

    # ----------------------------------------------------------------------------------- responses

    async def respond(self, http_request: Request) -> Response:
        """Answer /v1/responses by a streamed chat."""
        request = read_response_request(await self.read_body(http_request))
        conversation = self.responses.conversation(request)
        try:
            chat = read_request(request.chat_body(conversation), True, self.name, self.sampling)
            submitted = await self.submit(http_request, chat)
        except Refusal as error:
            raise with_own_param(error) from None
        response = request.response(chat, self.name)
        events = ResponseEvents(response, conversation, self.responses)
        chunks = answer_chunks(*submitted)
        if request.stream:
            return event_stream(http_request, events.of_chat(chunks), events.failure)
        async for event in events.of_chat(chunks):
            response = event.get("response", response)
        return json_response(response)

    async def stored_response(self, id: str, http_request: Request) -> Response:
        for key in http_request.query_params:  # such as stream, which would have events
            raise Refusal(f"{key!r:.99} is not supported: a response comes whole", key[:99])
        return json_response(self.responses.get(id).response)

    async def delete_response(self, id: str) -> Response:
        self.responses.remove(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    # --------------------------------------------------------------------------------------- vLLM's

    async def tokenize(self, http_request: Request) -> Response:
        """The ids of a prompt or of messages, which may be longer than the context."""
        body = await self.read_body(http_request)
        is_chat = "messages" in body
        bos = None
        if not is_chat and body.get("add_special_tokens") is False:
            bos = body.pop("add_special_tokens")
        request = read_request(body, is_chat, self.name, self.sampling)
        if len(request.prompts) > 1:
            raise Refusal(f"{len(request.prompts)} prompts: give one of them", "prompt")
        try:
            ids = await self.in_thread(self.encoder, self.ids_of, request, request.prompts[0], bos)
        except UserError as error:
            raise Refusal(f"the prompt: {error}", "messages" if is_chat else "prompt") from None
        max_length = self.llm.engine.max_seq_length
        return json_response({"count": len(ids), "max_model_len": max_length, "tokens": ids})

    async def detokenize(self, http_request: Request) -> Response:
        """The text of ids, in which special tokens have none."""
        ids = (await self.read_body(http_request)).get("tokens")
        vocab = range(self.llm.tokenizer.vocab_size)
        if not isinstance(ids, list) or not all(type(id) is int and id in vocab for id in ids):
            raise Refusal(f"tokens must be a list of ids below {len(vocab)}", "tokens")
        text = await self.in_thread(self.encoder, self.llm.tokenizer.decode, ids)
        return json_response({"prompt": text})

    async def metrics(self) -> Response:
        text = self.decoder.metrics.text(self.decoder.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------------------- before a slot

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

    def compile_grammar(self, form: MessageForm) -> Grammar | None:
        """The grammar of a request's response_format or tool_choice. Refusal for a schema that
        cannot be obeyed."""
        key = "tools" if form.request.forced_tools else "response_format"
        if form.request.response_format is None and not form.request.forced_tools:
            return None
        try:
            if not self.stop_ids(form.request) & self.llm.tokenizer.stop_ids:
                reason = "the model has none, or ignore_eos ignores it"
                raise UserError(f"JSON answers need an end token: {reason}")
            return form.grammar(self.grammars)
        except (UserError, RecursionError) as error:
            # The message may quote the schema.
            is_of_schema = str(error).startswith("the schema")
            logged = f"{key}: the schema cannot be obeyed" if is_of_schema else None
            raise Refusal(f"{key}: {error}", key, logged=logged) from None

    def encode_prompts(self, request: TextRequest) -> list[EncodedPrompt]:
        """Refusal for a prompt, or a number of tokens, that does not fit."""
        try:
            check_settings(self.llm.engine.model, request.sampling, 0, (), 0)
        except UserError as error:
            raise Refusal(str(error), "logit_bias") from None
        try:
            return [self.encode(request, prompt) for prompt in request.prompts]
        except UserError as error:
            message = reason_of(error).partition(", or lower")[0]
        message = f"the prompt: {message}"
        param = "messages" if request.chat else "prompt"
        if "positions" in message:
            raise too_long(message, param, self.llm.engine.max_seq_length)
        raise Refusal(message, param)

    def encode(self, request: TextRequest, prompt: str | list) -> EncodedPrompt:
        """max_tokens is clipped to the room that the prompt leaves. A chat without it gets all of
        the room."""
        ids = self.ids_of(request, prompt)
        max_length = self.llm.engine.max_seq_length
        limit = room = max(1, max_length - len(ids))
        requested = request.max_new_tokens
        if requested is None:
            requested = self.defaults.max_new_tokens
        if requested is not None or not request.chat:
            limit = min(room, new_tokens(requested, ids, max_length))
        check_lengths(self.llm.engine.model, [ids], [max(1, limit)], max_length)
        return EncodedPrompt(ids, limit)

    def ids_of(
        self, request: TextRequest, prompt: str | list, bos: bool | None = None
    ) -> list[int]:
        """The prompt's ids; `bos` as Tokenizer.encode has it. UserError for a conversation that
        the template does not read."""
        tokenizer = self.llm.tokenizer
        if request.chat:
            return self.chat_ids(request, prompt)
        if not isinstance(prompt, str):
            return prompt
        parse_special = request.parse_special
        if parse_special is None:
            parse_special = self.defaults.parse_special
        return tokenizer.encode(prompt, bos, parse_special)

    def chat_ids(self, request: TextRequest, messages: list[dict]) -> list[int]:
        kwargs = dict(request.chat_template_kwargs)
        if self.server.system and not any(is_system(message) for message in messages):
            messages = [{"role": "system", "content": self.server.system}, *messages]
        if request.continue_final_message:
            *messages, answer = messages
            if answer["role"] != "assistant" or answer.keys() - {"role", "content", "name"}:
                raise UserError("continue_final_message needs an assistant's text as the last one")
            kwargs["prefill"] = join_parts(answer["content"])
        elif not request.add_generation_prompt:
            kwargs["add_generation_prompt"] = False
        tools = request.template_tools
        return conversation_ids(self.llm.tokenizer, messages, tools=tools, **kwargs)


def too_long(message: str, param: str, max_length: int) -> Refusal:
    """litellm, aider and others look for these words of OpenAI's."""
    message += f". This model's maximum context length is {max_length} tokens."
    return Refusal(message, param, 400, "context_length_exceeded")


def check_size(request: TextRequest) -> None:
    """Refusal for a chat of items that references name again and again."""
    if request.chat:
        (messages,) = request.prompts
        texts = [join_parts(message.get("content")) or "" for message in messages]
        if sum(map(len, texts)) > MAX_BODY_BYTES:
            message = f"messages: more than {MAX_BODY_BYTES} characters"
            raise Refusal(message, "messages", 413)


def is_system(message: dict) -> bool:
    return message["role"] in ("system", "developer")


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


async def read_body(request: Request) -> dict:
    """The body, a JSON object. Content-Type must say so: browsers do not send JSON to another site
    without its consent."""
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
        fields = parse_body(body)
    except UnicodeEncodeError:
        message = "stop holds half of a surrogate pair, which is no character"
        raise Refusal(message, "stop") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal("the body must be a JSON object")
    return fields


def parse_body(body: bytes) -> object:
    """JSON, where question marks replace lone surrogates, which UTF-8 cannot encode. In a stop
    string they are a UnicodeEncodeError, because the answer would end at any question mark.
    ValueError beyond 200 levels, pydantic's limit: Python's own depends on how deep its caller
    is, so what could be read could perhaps not be written. Also for NaN and Infinity, which an
    answer that repeats them would pass on to strict parsers."""
    fields = json.loads(body, parse_constant=refuse_constant, parse_float=finite_number)
    if isinstance(fields, dict):
        json.dumps(fields.get("stop"), ensure_ascii=False).encode()
    return from_json(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))


def log_refusal(request: Request, error: Refusal) -> None:
    """Count it, and write one line with the reason, because many clients do not show it. The
    request's text stays out of it, but for level debug."""
    message = str(error) if log.isEnabledFor(logging.DEBUG) else error.logged
    line = f"{request.method} {request.url.path}: {error.status}, {message}"
    level = logging.ERROR if error.status >= 500 else logging.WARNING
    log.log(level, "%s", line)
    request.app.state.metrics.add({"refused_requests_total": 1})


def event_line(body: dict) -> str:
    """A server-sent event, which has a name if the body has a type."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n"


async def event_lines(
    http_request: Request,
    events: AsyncIterator[dict],
    failure: Callable[[Refusal], dict],
    last: str = "",
) -> AsyncIterator[str]:
    """Server-sent events, then `last`. A Refusal among them ends them with its `failure`."""
    try:
        async for event in events:
            yield event_line(event)
        yield last
    except Refusal as error:
        log_refusal(http_request, error)
        yield event_line(failure(error))


async def answer_chunks(
    job: Job, answer: Answer, num_rows: int, prompt_tokens: int
) -> AsyncIterator[dict]:
    """The answers as chunks. Raises a Refusal that ends them."""
    events = []
    opened: set[int] = set()
    options = answer.request.stream_options
    # As in vLLM, a client that says no to the last count gets none before it either.
    has_running_usage = (
        options.get("continuous_usage_stats") and options.get("include_usage") is not False
    )
    num_decoded = 0
    usage = None
    async for event in job.events(num_rows):
        events.append(event)
        num_decoded += sum(token.round > 0 for token in event.tokens)
        if has_running_usage:
            usage = token_counts(prompt_tokens, num_decoded)
        for chunk in chunks(answer, event, opened, usage):
            yield chunk
    if options.get("include_usage"):
        yield answer.chunk(usage=answer.usage(prompt_tokens, events))


def chunks(answer: Answer, event: Event, opened: set[int], usage: dict | None) -> Iterator[dict]:
    """The chunks of an event. A chat's role comes before its first token; `opened` has the answers
    whose role was sent."""
    if answer.request.chat and event.index not in opened:
        opened.add(event.index)
        yield answer.opening(event.index, usage)
    for choice in answer.choices(event):
        yield answer.chunk(choice, usage=usage)


class PrintableArgs(logging.Filter):
    """Spaces in place of control codes, which would reach the terminal from a client: from its
    request, or from the headers of a trusted proxy."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        record.args = tuple(
            "".join(x if x.isprintable() else " " for x in arg) if isinstance(arg, str) else arg
            for arg in args
        )
        return True


def log_config() -> dict:
    """uvicorn's own, with the lines about requests on stderr too: stdout is for text."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["filters"] = {"printable": {"()": PrintableArgs}}
    for handler in config["handlers"].values():
        handler["filters"] = ["printable"]
    return config


def listen(flags: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
    try:
        return socket.create_server((flags.host, flags.port), family=family)
    except (OSError, TypeError, UnicodeError) as error:
        raise UserError(
            f"--host {flags.host} --port {flags.port}: cannot listen there: {error}"
        ) from None


def make_server(flags: ServerOptions, decoder: Decoder, is_local: bool) -> uvicorn.Server:
    local_hosts = {"localhost", "127.0.0.1", "::1", flags.host.lower(), *flags.allowed_hosts}
    hosts = local_hosts if is_local else None
    api = Api(flags, decoder, hosts)
    config = uvicorn.Config(
        api.app(),
        log_level=flags.log_level,
        log_config=log_config(),
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
        http="h11",
        proxy_headers=flags.forwarded_allow_ips is not None,
        forwarded_allow_ips=flags.forwarded_allow_ips,
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
    opened = open_llm(options, device, num_slots=options.run.batch_size)
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
