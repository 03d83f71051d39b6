"""Text <-> token ids, whatever the folder holds, behind one small class.

    load_tokenizer      tokenizer.model (sentencepiece or tiktoken ranks) or tokenizer.json, told apart by content
    Tokenizer           encode, decode, stream, chat, stop_ids
    StreamDecoder       ids in, whole characters out
    StopStrings         text in, text out up to the first stop string
    ChatTemplate        the folder's own jinja template, sandboxed, in a process of its own
    FILES, copy_files   what a folder holds for all this, and has to come along when its weights are made anew

`decode` is the stream fed at once, so the two cannot differ. Special tokens are invisible in decoded text, and text
that spells one encodes as the characters it is, in a prompt and in a chat message alike. (One exception: in a prompt,
not in a message, a piece that a sentencepiece model itself calls user-defined is found in text, as sentencepiece does.)
This file imports no project file and needs no config.json; it does not know models or sampling.
"""

import base64
import binascii
import codecs
import contextlib
import datetime
import functools
import json
import math
import re
import reprlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip

# Names that end a turn or a text in the families we read. A folder's chat model stops there although its config
# often lists only one of them.
END_NAMES = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip

# Llama 3's split pattern and special tokens, as published with its reference code; the ids follow the ranks.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = 256
LLAMA30_NAMES = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA31_NAMES = {**LLAMA30_NAMES, 4: "finetune_right_pad_id", 5: "step_id", 8: "eom_id", 10: "python_tag"}

# Beyond these a folder is broken or hostile; real ones stay far below.
LARGEST_FILE = 2**26  # bytes of a vocabulary
LARGEST_SETTINGS = 2**24  # bytes of other JSON
LARGEST_ID = 2**24
MOST_GROWTH = 64  # times a normalizer may lengthen a text
LONGEST_TEMPLATE = 2**18  # characters
LONGEST_ADDITION = 2**22  # characters that a template writes besides the messages, each up to 16 times
TEMPLATE_S, TEMPLATE_BYTES = 5, 2**29


class StreamDecoder:
    """Turns ids into text as they come, holding back bytes until they make a whole character."""

    def __init__(self, to_bytes: Callable[[int], bytes], strip_first_space: bool):
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_first_space

    def feed(self, id: int) -> str:
        """The text that is certain now; '' while a character is incomplete."""
        piece = self._to_bytes(id)
        if piece and self._strip:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What was held back; U+FFFD where the text ended inside a character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Passes text through up to the first stop string; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("a stop string is empty; give it at least one character")
        self.stops, self.held, self.stopped = tuple(stops), "", False

    def feed(self, text: str) -> str:
        """What is certain to stand before every stop string. `stopped` is set once one has been found."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self.held += text
        found = min((i for i in (self.held.find(stop) for stop in self.stops) if i >= 0), default=None)
        if found is not None:
            text, self.held, self.stopped = self.held[:found], "", True
            return text
        keep = max(self._overlap(stop) for stop in self.stops)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self.held))
        return next(n for n in range(longest, -1, -1) if self.held.endswith(stop[:n]))

    def flush(self) -> str:
        """What was held back when no more text comes."""
        text, self.held = self.held, ""
        return text


class Renderer:
    """The process in which templates run: started with the first conversation, kept for the next ones, ended when one
    takes too long. A template is a program; jinja's sandbox bounds what it may touch, not what it spends."""

    process: subprocess.Popen | None = None

    def ask(self, request: list) -> dict:
        """The process's answer to a request, a line of JSON each."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is not for it
            )  # fmt: skip
        answer, watch = b"", threading.Timer(TEMPLATE_S, self.process.kill)
        watch.start()
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            watch.cancel()
            if not answer.endswith(b"\n"):  # it was killed, or we are interrupted: the next request gets another one
                self.process.kill()
                self.process.wait()
                self.process = None
        if not answer.endswith(b"\n"):
            raise ValueError(f"the chat template took more than {TEMPLATE_S} s or {TEMPLATE_BYTES // 2**20} MB")
        return json.loads(answer)


RENDERER = Renderer()


class ChatTemplate:
    """A folder's jinja template, with the names that transformers gives templates."""

    def __init__(self, source: str, names: Mapping[str, str]):
        import jinja2

        self.source, self.names = source, dict(names)
        try:
            template_environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is broken: {_line(error)}") from None

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        given = {"messages": messages, "tools": None, "documents": None, **self.names}
        found = RENDERER.ask([self.source, given | {"add_generation_prompt": add_generation_prompt}])
        if "error" in found:
            raise ValueError(f"the chat template refused the messages: {found['error']}")
        return found["text"]


def template_environment():
    """jinja as transformers sets it up for templates: sandboxed, with a few names more."""
    import jinja2
    import jinja2.debug  # which it would import with the first error, when no file can be opened any more
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what training learns; decoding takes its body as it is."""

        tags = {"generation"}  # noqa: RUF012, jinja's protocol

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render_requests() -> None:
    """What `python tokenizer.py` does: lines [template, names] in, lines {"text"} or {"error"} out."""
    template_of = functools.lru_cache(8)(template_environment().from_string)
    template_of("{{ strftime_now('%Y') }}").render()  # opens what jinja and the clock need once
    _limit_this_process()
    for line in sys.stdin:
        try:
            source, names = json.loads(line)
            found = {"text": template_of(source).render(names)}
            if len(found["text"]) > LONGEST_ADDITION + 16 * len(line):
                found = {"error": f"it writes {len(found['text'])} characters"}
        except Exception as error:  # whatever a template can cause
            found = {"error": _line(error)}
        print(json.dumps(found), flush=True)


def _limit_this_process() -> None:
    """A template opens and writes no file, and has a bounded memory. Where a system has no such limits, time is one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_BYTES, TEMPLATE_BYTES))


def _line(error: Exception) -> str:
    """What an error says, or else its kind, on one line of bounded length."""
    text = "".join(char if char.isprintable() else " " for char in str(error)[:1000])
    return " ".join(text.split())[:500] or type(error).__name__


def _shown(value: object) -> str:
    """A value in an error message, shortened."""
    return reprlib.repr(value)


class Tokenizer:
    """One folder's tokenizer.

    vocab_size is one more than the largest id it knows; bos_id is None where the model has none; add_bos is the
    folder's own policy; stop_ids are the ids after which generation ends. specials maps the names of special tokens to
    ids, found only in what a chat template writes; literals maps names that are found in any text. template is None
    where the folder has none.
    """

    def __init__(
        self,
        to_ids: Callable[[str], list[int]],
        to_bytes: Callable[[int], bytes],
        *,
        vocab_size: int,
        bos_id: int | None,
        add_bos: bool,
        stop_ids: Iterable[int],
        strip_first_space: bool,
        specials: Mapping[str, int] | None = None,
        literals: Mapping[str, int] | None = None,
        to_ids_after_special: Callable[[str], list[int]] | None = None,
        parse: Callable[[str], list[int]] | None = None,
        template: ChatTemplate | None = None,
    ):
        self._to_ids, self._to_bytes = to_ids, to_bytes
        self._to_ids_after_special, self._parse = to_ids_after_special or to_ids, parse or self._parse_all
        self._literals = dict(literals or {})
        if vocab_size > LARGEST_ID:
            raise ValueError(f"a token has the id {vocab_size - 1}; ids below {LARGEST_ID:,} are read")
        self.vocab_size, self.bos_id, self.add_bos = vocab_size, bos_id, add_bos
        self.stop_ids = frozenset(stop_ids)
        self.specials, self.template = dict(specials or {}), template
        self._strip_first_space = strip_first_space

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Ids of text, led by BOS when `bos` is true, or when it is None and the folder's policy says so."""
        with_bos = self.add_bos if bos is None else bos
        before = [self.bos_id] if with_bos and self.bos_id is not None else []
        return before + self._find(_valid(text), self._literals)

    def parse(self, text: str) -> list[int]:
        """Ids of text in which the names of special tokens are those tokens, such as a rendered chat template; no BOS
        is put in front."""
        return self._parse(_valid(text))

    def stream(self, continues: bool = False) -> StreamDecoder:
        """A fresh decoder. `continues`: the ids follow others, so that a leading space is a real one."""
        return StreamDecoder(self._to_bytes, self._strip_first_space and not continues)

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join(stream.feed(id) for id in ids) + stream.flush()

    def pieces(self) -> list[bytes]:
        """What every id stands for, special tokens by name: two tokenizers with equal pieces read each other's ids."""
        names = {id: name.encode() for name, id in self.specials.items()}
        return [names.get(id) or self._to_bytes(id) for id in range(self.vocab_size)]

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation ({"role", "content"} objects) in the folder's own format, ready for the answer.

        Special tokens that the template writes become ids; those that a message spells stay text. BOS comes from the
        template, once. ValueError where there is no template or the template refuses.
        """
        if self.template is None:
            raise ValueError("this folder has no chat template (tokenizer_config.json or chat_template.jinja)")
        marks = {name: f"\ufdd0{number}\ufdd1" for number, name in enumerate(self.specials)}
        hidden = [
            {key: _replace(_valid(value), marks) if key != "role" and isinstance(value, str) else value
             for key, value in message.items()}
            for message in messages
        ]  # fmt: skip
        text = _valid(self.template.render(hidden, add_generation_prompt))
        if hidden == messages:
            return self._parse(text)
        # A name that a message spells comes back in two halves, which no backend reads as one.
        halves = {mark: f"{name[0]}\ufdd0{name[1:]}" for name, mark in marks.items()}
        return self._find(_replace(text, halves), {**self.specials, **self._literals, "\ufdd0": None})

    def _parse_all(self, text: str) -> list[int]:
        return self._find(text, {**self.specials, **self._literals})

    def _find(self, text: str, names: Mapping[str, int | None]) -> list[int]:
        """Ids of text in which names stand for an id, or (None) only part what is before them from what follows."""
        ids = []
        for number, part in enumerate(re.split(f"({_pattern(names)})", text) if names else [text]):
            if number % 2:
                ids += [names[part]] if names[part] is not None else []
            elif part:
                ids += (self._to_ids_after_special if number else self._to_ids)(part)
        return ids


def _pattern(names: Iterable[str]) -> str:
    """Any of the names, the longest first."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def _replace(text: str, by: Mapping[str, str]) -> str:
    return re.sub(_pattern(by), lambda match: by[match[0]], text) if by else text


def _valid(text: str) -> str:
    """Lone surrogates cannot be encoded: a question mark stands for each."""
    return text.encode("utf-8", errors="replace").decode()


# ---------------------------------------------------------------------------------------- one folder


def copy_files(folder: Path, other: Path) -> None:
    """The FILES of one folder into another, without their modes: they may be read-only."""
    for file in sorted({file for pattern in FILES for file in folder.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, other / file.name)


def load_tokenizer(checkpoint_dir: str | Path) -> Tokenizer:
    """The folder's tokenizer. ValueError, naming the file, when there is none or it cannot be read."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    model, fast = folder / "tokenizer.model", folder / "tokenizer.json"
    if not model.exists() and not fast.exists():
        raise ValueError(f"{folder}: neither tokenizer.model nor tokenizer.json")
    try:
        settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
        if not model.exists():
            return _tokenizers(fast, settings)
        _checked(model, LARGEST_FILE)
        return (_tiktoken if _is_ranks(model) else _sentencepiece)(model, settings)
    except (AttributeError, TypeError, LookupError, OverflowError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: a tokenizer file holds what it cannot mean: {_line(error)}") from None


@contextlib.contextmanager
def _library(file: Path, what: str):
    """What a tokenizer's library raises is a ValueError: bare exceptions, and the panics of Rust, which are none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{file}: {what}: {_line(error)}") from None


def _byte(piece: str) -> bytes | None:
    """The byte that a piece such as <0x0A> stands for."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(found[1]) if found else None


def _is_ranks(file: Path) -> bool:
    """tiktoken's format: a line is a token in base64 and its rank. A sentencepiece protobuf never starts like that."""
    with file.open("rb") as stream:
        return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\s*", stream.readline(4096)) is not None


def _template(folder: Path, settings: dict, names: Mapping[str, str] | None = None) -> ChatTemplate | None:
    """chat_template.jinja, or tokenizer_config.json's chat_template: a string, or a list with one named default.
    `names` are the special tokens' where the settings do not say."""
    file = folder / "chat_template.jinja"
    try:
        found = _checked(file, 4 * LONGEST_TEMPLATE).read_text(encoding="utf-8") if file.exists() else None
        source = settings.get("chat_template") if found is None else found
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        if len(source) > LONGEST_TEMPLATE:
            raise ValueError(f"a chat template of {len(source):,} characters is longer than {LONGEST_TEMPLATE:,}")
        keys = ("bos_token", "eos_token", "unk_token", "pad_token")
        said = {key: name for key in keys if (name := _name(settings, key)) is not None}
        return ChatTemplate(source, {**(names or {}), **said})
    except ValueError as error:
        raise ValueError(f"{file if file.exists() else folder / 'tokenizer_config.json'}: {error}") from None


def _added(folder: Path, settings: dict) -> dict[int, tuple[str, bool]]:
    """Tokens that tokenizer_config.json or added_tokens.json put beside the model's own: id -> (name, special)."""
    added = {}
    try:
        for name, id in _json(folder / "added_tokens.json").items():
            added[int(id)] = (name, True)
        for id, token in (settings.get("added_tokens_decoder") or {}).items():
            added[int(id)] = (token["content"], bool(token.get("special")))
    except ValueError as error:
        raise ValueError(f"{folder}: added tokens need whole numbers as ids: {_line(error)}") from None
    for id, (name, _) in added.items():
        if not 0 <= id < LARGEST_ID or not isinstance(name, str) or not name:
            raise ValueError(f"{folder}: added token {id} = {_shown(name)} needs a name and an id below {LARGEST_ID:,}")
    return added


def _checked(file: Path, largest: int) -> Path:
    """The file itself, to be read whole. ValueError where it is no plain file, or larger than real ones are."""
    if not file.is_file():  # a pipe would be waited for, a device never end
        raise ValueError(f"{file}: not a plain file")
    if file.stat().st_size > largest:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes are more than the {largest:,} that are read of it")
    return file


def _json(file: Path) -> dict:
    if not file.exists():
        return {}
    try:
        value = json.loads(_checked(file, LARGEST_SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON: {_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _stop_ids(folder: Path, names: Mapping[str, int], eos_id: int | None) -> set[int]:
    """The tokenizer's EOS, eos_token_id of config.json and generation_config.json (each a number or a list), and every
    token whose name ends a turn or a text."""
    ids = {names[name] for name in END_NAMES if name in names} | ({eos_id} - {None})
    for name in ("config.json", "generation_config.json"):
        value = _json(folder / name).get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < LARGEST_ID for id in found):
            raise ValueError(f"{folder / name}: eos_token_id = {_shown(value)} must be a token's id or a list of them")
        ids.update(found)
    return ids


def _name(settings: dict, key: str) -> str | None:
    """A token's name from tokenizer_config.json, which stores a string or an object with its content."""
    value = settings.get(key)
    return value.get("content") if isinstance(value, dict) else value


def _sentencepiece(file: Path, settings: dict) -> Tokenizer:
    import sentencepiece

    with _library(file, "not a sentencepiece model"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    texts, ids, specials, literals = {}, {}, {}, {}
    for id in range(model.get_piece_size()):
        with _library(file, f"piece {id} is no text"):
            piece = model.id_to_piece(id)
        texts[id] = (_byte(piece) if model.is_byte(id) else None) or piece.replace("▁", " ").encode()
        ids[piece] = id
        if model.is_control(id) or model.is_unknown(id):
            specials[piece] = id
    for id, (name, special) in _added(file.parent, settings).items():
        texts[id], ids[name] = name.encode(), id
        (specials if special else literals)[name] = id
    bos = ids.get(_name(settings, "bos_token"), model.bos_id())
    eos = ids.get(_name(settings, "eos_token"), model.eos_id())
    names = {}
    for key, id in (("bos_token", bos), ("eos_token", eos)):
        if id >= 0:
            names[key] = texts[id].decode()
            specials[names[key]] = id
    silent = set(specials.values())

    # sentencepiece puts a space before every text. After a special token transformers does not (unless `legacy`), nor
    # before a space; a noncharacter in front, cut off again, keeps ours away too.
    mark = "\ufffe"
    prefix = len(model.encode(mark))

    def after_special(text: str) -> list[int]:
        if settings.get("legacy") and not text.startswith(" "):
            return model.encode(text)
        return model.encode(mark + text)[prefix:]

    return Tokenizer(
        model.encode,
        lambda id: b"" if id in silent else texts.get(id, b""),
        vocab_size=max(texts) + 1,
        bos_id=bos if bos >= 0 else None,
        add_bos=bool(settings.get("add_bos_token", True)),
        stop_ids=_stop_ids(file.parent, ids, eos if eos >= 0 else None),
        strip_first_space=True,
        specials=specials,
        literals=literals,
        to_ids_after_special=after_special,
        template=_template(file.parent, settings, names),
    )


def _tiktoken(file: Path, settings: dict) -> Tokenizer:
    import tiktoken

    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{file}: not a list of tiktoken ranks: {error}") from None
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"{file}: its ranks are not the numbers from 0 to {len(pairs) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ValueError(f"{file}: no rank for the byte {lacking[0]}; every byte needs one for all text to have ids")
    first = max(ranks.values()) + 1
    specials = {name: first + i for i, name in enumerate(_llama3_specials(file.parent))}
    literals = {}
    for id, (name, special) in _added(file.parent, settings).items():
        (specials if special else literals)[name] = id
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    texts = {rank: token for token, rank in ranks.items()} | {id: name.encode() for name, id in literals.items()}
    eos = specials.get(_name(settings, "eos_token") or "<|end_of_text|>")
    return Tokenizer(
        lambda text: [id for piece in _short_pieces(text) for id in encoding.encode_ordinary(piece)],
        lambda id: texts.get(id, b""),
        vocab_size=max({**specials, **literals}.values()) + 1,
        bos_id=specials.get(_name(settings, "bos_token") or "<|begin_of_text|>"),
        add_bos=bool(settings.get("add_bos_token", True)),
        stop_ids=_stop_ids(file.parent, {**specials, **literals}, eos),
        strip_first_space=False,
        specials=specials,
        literals=literals,
        template=_template(file.parent, settings, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}),
    )


def _llama3_specials(folder: Path) -> list[str]:
    """The 256 names behind the ranks. 3.1 gave some reserved places names and numbered the rest anew; its config.json
    has scaled RoPE, and without one the later names hold."""
    config = _json(folder / "config.json")
    scaled = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    known = LLAMA30_NAMES if config and not scaled else LLAMA31_NAMES
    names, reserved = [], 0
    for place in range(LLAMA3_SPECIALS):
        if place in known:
            names.append(f"<|{known[place]}|>")
        else:
            names.append(f"<|reserved_special_token_{reserved}|>")
            reserved += 1
    return names


def _short_pieces(text: str, longest: int = 100_000) -> Iterable[str]:
    """tiktoken's regular expression overflows on very long input: cut it, where a space allows, before that."""
    while len(text) > longest:
        cut = text.rfind(" ", 1, longest)
        cut = longest if cut < 0 else cut
        yield text[:cut]
        text = text[cut:]
    yield text


def _tokenizers(file: Path, settings: dict) -> Tokenizer:
    import tokenizers

    with _library(file, "not a tokenizer of the tokenizers library"):
        stored = json.loads(_checked(file, LARGEST_FILE).read_text(encoding="utf-8"))
        if _growth(stored.get("normalizer")) > MOST_GROWTH:
            raise ValueError(f"its normalizer can make a text more than {MOST_GROWTH} times longer")
        model = tokenizers.Tokenizer.from_file(str(file))
    model.encode_special_tokens = True  # text that spells a special token stays text
    model.no_padding()
    model.no_truncation()
    added = model.get_added_tokens_decoder()
    names = {token.content: id for id, token in added.items()}
    specials = {token.content: id for id, token in added.items() if token.special}

    def ids_of(text: str, add_special_tokens: bool = False) -> list[int]:
        with _library(file, "this tokenizer cannot encode the text"):
            return model.encode(text, add_special_tokens=add_special_tokens).ids

    # The post-processor is where the library itself keeps the BOS policy: see what it puts before nothing.
    before = ids_of("", add_special_tokens=True)
    bos = model.token_to_id(_name(settings, "bos_token") or "")
    bos = before[0] if bos is None and before else bos
    decoder = str(stored.get("decoder"))
    byte_level = "ByteLevel" in decoder
    from_char = _byte_of_char()

    def parse(text: str) -> list[int]:
        """What transformers does with a rendered template: the library finds the special tokens itself."""
        model.encode_special_tokens = False
        try:
            return ids_of(text)
        finally:
            model.encode_special_tokens = True

    def piece_bytes(id: int) -> bytes:
        token = model.id_to_token(id)
        if token is None or id in added:
            return b"" if token is None or added[id].special else added[id].content.encode()
        if byte_level:
            known = all(char in from_char for char in token)
            return bytes(from_char[char] for char in token) if known else token.encode()
        return _byte(token) or token.replace("▁", " ").encode()

    policy = settings.get("add_bos_token")
    return Tokenizer(
        ids_of,
        functools.lru_cache(maxsize=None)(piece_bytes),
        vocab_size=max(model.get_vocab().values(), default=-1) + 1,
        bos_id=bos,
        add_bos=bool(before) and before[0] == bos if policy is None else bool(policy) and bos is not None,
        stop_ids=_stop_ids(file.parent, names, model.token_to_id(_name(settings, "eos_token") or "")),
        strip_first_space="Strip" in decoder or "Metaspace" in decoder,
        specials=specials,
        parse=parse,
        template=_template(file.parent, settings),
    )


def _growth(normalizer: object) -> float:
    """How many times longer a normalizer of tokenizer.json can make a text, which the library would let grow without
    end. ValueError for a table that says it is larger than it is: room for it would be made, and the process die."""
    if not isinstance(normalizer, dict):
        return 1
    if normalizer.get("type") == "Sequence":
        return math.prod(_growth(part) for part in normalizer["normalizers"])
    if normalizer.get("type") == "Replace":
        return max(1, len(normalizer["content"]) / max(1, len(normalizer["pattern"].get("String", ""))))
    if normalizer.get("type") == "Precompiled":
        table = base64.b64decode(normalizer["precompiled_charsmap"])
        if int.from_bytes(table[:4], "little") > len(table):
            raise ValueError("precompiled_charsmap is cut off")
    return max(1, len(normalizer.get("prepend", "")))


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the other 68 follow from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


if __name__ == "__main__":
    render_requests()
