"""Text <-> token ids for every kind of tokenizer file, behind one class.

    load_tokenizer      the tokenizer of a folder or GGUF file
    Tokenizer           encode, decode, stream, chat, stop_ids
    StreamDecoder       ids in, complete characters out
    StopStrings         text in, text out up to the first stop string
    FILES, copy_files   a folder's tokenizer files, which go along when its weights are written anew

Special tokens are invisible in decoded text. Text that spells one, in a prompt without `parse_special` or in a message,
encodes as characters; so does a message that spells a marker of the chat template. Other added tokens, and the
user-defined pieces of a sentencepiece model, match in any text. No config.json is needed; ids beyond its vocabulary are
refused by name.
"""

import codecs
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loading.chat_messages import message_forms, render_complete
from loading.chat_templates import ChatTemplate, one_line
from loading.plain_files import file_exists, is_gguf, plain_file, read_json
from loading.vocabularies import APART, MAX_ID, NAMED_TOKENS, flags_by_name, token_fields, vocab_size

FILES = (
    "tokenizer*", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja",
    "additional_chat_templates/*.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SPACES = re.compile(r"\s*")
MAX_TEMPLATE_CHARS = 2**18  # real templates stay far below


class StreamDecoder:
    """An incremental decoder from ids to text, which holds bytes back until a character is complete."""

    def __init__(self, to_bytes: Callable[[int], bytes], strip_first_space: bool):
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_first_space

    def feed(self, id: int) -> str:
        """The characters that this id completes; '' while one is incomplete."""
        piece = self._to_bytes(id)
        if piece and self._strip:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The bytes held back; U+FFFD if the text ended inside a character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """A filter that passes text through up to the first stop string and holds back a possible
    beginning of one. Empty stop strings, which clients send in place of none, are ignored.

    Special tokens have no text, so a stop string that names some of `specials` (name -> id) also matches the tokens
    themselves: in the text held back, a character that no text has, a surrogate, stands for each. Such a token in the
    middle of another stop string keeps that one from matching.
    """

    def __init__(self, stops: Sequence[str], specials: Mapping[str, int] | None = None):
        stops = [stop for stop in stops if stop]
        names = [name for name in specials or {} if any(name in stop for stop in stops)]
        names.sort(key=len, reverse=True)
        unused = (chr(code) for code in range(0xD800, 0xE000) if not any(chr(code) in stop for stop in stops))
        marks = dict(zip(names, unused))
        pattern = "|".join(map(re.escape, marks)) or "(?!)"  # the longest first; (?!) matches nothing
        marked_stops = [re.sub(pattern, lambda name: marks[name[0]], stop) for stop in stops]
        self.stops = tuple(dict.fromkeys([*stops, *marked_stops]))
        self.mark_by_id = {specials[name]: mark for name, mark in marks.items()}
        self.removed_marks = dict.fromkeys(map(ord, marks.values()))  # a table for str.translate, which removes them
        self.pending, self.stopped = "", False

    def feed_token(self, id: int, stream: StreamDecoder, is_last: bool) -> str:
        """`feed` the text that `stream` makes of a token. The `is_last` one, which ends the answer, has no text."""
        text = self.mark_by_id.get(id)
        if text is None:
            text = "" if is_last else stream.feed(id)
        return self.feed(text)

    def feed(self, text: str) -> str:
        """The text that is now certain to precede every stop string. Sets `stopped` once the first one is complete."""
        if self.stopped:
            return ""
        self.pending += text
        length, match = len(self.pending), self._first_match()
        partials = (n for stop in self.stops for n in range(len(stop[: length + 1])) if self.pending.endswith(stop[:n]))
        end = min(length - max(partials, default=0), length if match is None else match)
        self.stopped = end == match
        text, self.pending = self.pending[:end], "" if self.stopped else self.pending[end:]
        return text.translate(self.removed_marks)

    def flush(self) -> str:
        """The text held back, at the end of the input. Ends at a stop string in it, which sets `stopped`."""
        match = self._first_match()
        self.stopped |= match is not None
        text, self.pending = self.pending[:match], ""
        return text.translate(self.removed_marks)

    def _first_match(self) -> int | None:
        """The position of the first stop string in the text held back."""
        return min((self.pending.find(stop) for stop in self.stops if stop in self.pending), default=None)


@dataclass(eq=False)
class Tokenizer:
    """A folder's tokenizer."""

    to_ids: Callable[[str], list[int]]  # of text without special tokens
    to_bytes: Callable[[int], bytes]  # of one id; b"" for a special token
    vocab_size: int  # one more than the largest id of both tokenizer and model
    bos_id: int | None = None
    add_bos: bool = False  # does `encode` put BOS in front by default?
    leading_ids: tuple[int, ...] = ()  # ids that it puts in front instead of bos_id alone
    stop_ids: frozenset[int] = frozenset()  # generation ends after these
    strip_first_space: bool = False  # does the library put a space before every text?
    specials: dict[str, int] = field(default_factory=dict)  # matched only in the output of a chat template
    literals: dict[str, int] = field(default_factory=dict)  # matched in any text
    spacing: dict[str, tuple[bool, bool, bool]] = field(default_factory=dict)  # name -> (lstrip, rstrip, single_word)
    apart: str = APART  # inside a name it turns a token into text; `parse` drops it
    to_ids_after_special: Callable[[str], list[int]] | None = None  # if text after a special token encodes otherwise
    to_ids_after_text: Callable[[str], list[int]] | None = None  # if text behind `apart` encodes otherwise
    to_ids_with_specials: Callable[[str], list[int]] | None = None  # if the library matches special tokens itself
    template: ChatTemplate | None = None
    folder: str = "tokenizer"  # or GGUF file, for messages

    def encode(self, text: str, bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of text. `bos`: put BOS in front; None follows the folder's policy. `parse_special`: names of special
        tokens in the text are these tokens, and no second BOS is put before one that the text begins with."""
        with_bos = self.add_bos if bos is None else bos
        leading_ids = [*self.leading_ids] or [self.bos_id] if with_bos and self.bos_id is not None else []
        if parse_special:
            ids = self.parse(text)
            has_leading_ids = ids[: len(leading_ids)] == leading_ids
            return ids if has_leading_ids else leading_ids + ids
        names = {} if self.to_ids_with_specials else self.literals
        return self._check_ids(leading_ids + self._encode_around(replace_surrogates(text), names))

    def parse(self, text: str) -> list[int]:
        """Ids of text in which the names of special tokens are these tokens, such as a rendered template. No BOS."""
        if self.to_ids_with_specials is not None:
            return self._check_ids(self.to_ids_with_specials(replace_surrogates(text)))
        names = {**self.specials, **self.literals, self.apart: None}
        return self._check_ids(self._encode_around(replace_surrogates(text), names))

    def stream(self, continues: bool = False) -> StreamDecoder:
        """A new decoder. `continues`: the ids follow others, so that a leading space is kept."""
        return StreamDecoder(self.to_bytes, self.strip_first_space and not continues)

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join(stream.feed(id) for id in ids) + stream.flush()

    def pieces(self) -> list[bytes]:
        """The bytes of every id, or a special token's name. Tokenizers with equal pieces read each other's ids."""
        names = {id: name.encode() for name, id in self.specials.items()}
        return [names.get(id) or self.to_bytes(id) for id in range(self.vocab_size)]

    def chat(
        self, messages: list[dict], add_generation_prompt: bool = True, tools: list | None = None, prefill: str = "",
        **names,
    ) -> list[int]:  # fmt: skip
        """Ids of a conversation ({"role", "content"} objects) in the folder's format, up to the next answer.

        `prefill` is the beginning of that answer. `tools` (JSON schemas) and `names` are variables of the template.
        Content may be a list of {"type": "text", "text"} parts, as in OpenAI's API, which are joined unless the
        template loops over them. A tool call's arguments may be an object or JSON in a string. Special tokens that the
        template writes, BOS among them, become ids; those that a message spells stay text. ValueError without a
        template, if the template refuses, and if it does not read a message, the tools or a variable.
        """
        template = self.template
        if template is None:
            raise ValueError(f"{self.folder}: no chat template (chat_template.jinja or tokenizer_config.json)")
        template.check_request(tools, names)
        source = template.source_for(tools)
        # The markers are not escaped in the assistant's messages, in which templates look for its <think>.
        markers = [name for name in self.literals if name in source and not name.isspace()]
        tokens = [*self.specials, *markers]
        escaped_tools = self._escape(tools, tokens, source)
        escaped_names = {key: self._escape(value, tokens, source) for key, value in names.items()}

        def escape(message: dict) -> dict:
            is_assistant = message.get("role") == "assistant"
            return self._escape(message, self.specials if is_assistant else tokens, source)

        def render(form: list[dict]) -> str:
            return template.render(form, add_generation_prompt, escaped_tools, **escaped_names)

        roles = template.roles(tools)
        forms = message_forms(messages, source in template.part_readers, "developer" in roles)
        escaped_forms = ([escape(message) for message in form] for form in forms)
        return self.parse(render_complete(render, escaped_forms, roles) + self._escape(prefill, self.specials))

    def _escape(self, value: object, names: Iterable[str], source: str = "") -> object:
        """A JSON value with `apart` behind the first character of these names in all texts and keys. Keys and roles
        that are words of the template `source` stay as they are."""
        if isinstance(value, dict):
            escaped = {key: self._escape(item, names, source) for key, item in value.items()}
            if is_template_word(value.get("role"), source):
                escaped["role"] = value["role"]
            return {
                key if is_template_word(key, source) else self._escape(key, names): item
                for key, item in escaped.items()
            }
        if isinstance(value, list):
            return [self._escape(item, names, source) for item in value]
        if not isinstance(value, str):
            return value
        text = replace_surrogates(value).replace(APART, APART[0] + self.apart + APART[1])
        starts = "|".join(re.escape(name) for name in names if len(name) > 1 and name in text)
        return re.sub(f"(?s)(?={starts}).", lambda first: first[0] + self.apart, text) if starts else text

    def _check_ids(self, ids: list[int]) -> list[int]:
        """The same ids. ValueError names a token outside the model's vocabulary."""
        if max(ids, default=0) >= self.vocab_size:
            id = next(id for id in ids if id >= self.vocab_size)
            names = {id: name for name, id in {**self.specials, **self.literals}.items()}
            name = names.get(id) or self.to_bytes(id).decode(errors="replace")
            vocab = f"the model's vocabulary of {self.vocab_size}"
            raise ValueError(f"{self.folder}: the text holds the token {name!r}, whose id {id} lies outside {vocab}")
        return ids

    def _encode_around(self, text: str, names: Mapping[str, int | None]) -> list[int]:
        """Ids of text in which names become their ids. A name of None is dropped, and separates the texts around it."""
        ids, to_ids, end = [], self.to_ids, 0
        present = sorted((name for name in names if name in text), key=len, reverse=True)
        pattern = "|".join(map(re.escape, present)) or "(?!)"  # the longest first; (?!) matches nothing
        for match in re.finditer(pattern, text):
            lstrip, rstrip, single_word = self.spacing.get(match[0], (False, False, False))
            start, stop = match.span()
            in_word = single_word and re.search(r"\w", text[max(start - 1, 0) : start] + text[stop : stop + 1])
            if start < end or in_word:
                continue
            before = text[end:start].rstrip() if lstrip else text[end:start]
            ids += to_ids(before) if before else []
            id = names[match[0]]
            ids += [] if id is None else [id]
            end = SPACES.match(text, stop).end() if rstrip else stop
            to_ids = (self.to_ids_after_text if id is None else self.to_ids_after_special) or self.to_ids
        return ids + (to_ids(text[end:]) if text[end:] else [])


def is_template_word(value: object, source: str) -> bool:
    return isinstance(value, str) and value.isidentifier() and value in source


def replace_surrogates(text: str) -> str:
    """The text with a question mark for each lone surrogate, which UTF-8 cannot encode."""
    return text.encode("utf-8", errors="replace").decode()


def load_tokenizer(checkpoint_dir: str | Path) -> Tokenizer:
    """The tokenizer of a folder or GGUF file. ValueError names the file that is missing or cannot be read."""
    folder = Path(checkpoint_dir)
    if is_gguf(folder):
        with tempfile.TemporaryDirectory(prefix="quickdraft-") as temporary:
            from loading.gguf_metadata import write_files

            write_files(folder, Path(temporary))
            try:
                return replace(load_tokenizer(temporary), folder=str(folder))
            except ValueError as error:
                raise ValueError(str(error).replace(temporary, str(folder))) from None
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder or GGUF file")
    try:
        settings, names = read_json(folder / "tokenizer_config.json"), read_json(folder / "special_tokens_map.json")
        # As in transformers: beside settings of before 4.34, which have no added_tokens_decoder, the map is the newer.
        settings = {**names, **settings} if "added_tokens_decoder" in settings else {**settings, **names}
        objects = {
            key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, dict)
        }  # {"content": name, "lstrip": …}
        settings |= {key: token.get("content") for key, token in objects.items()}
        settings["named_flags"] = flags_by_name([*objects.values()])
        fields = token_fields(folder, settings)
        fields["template"] = load_template(folder, settings, fields.pop("names", {}))
        fields["stop_ids"] = frozenset(fields["stop_ids"] | eos_ids(folder))
        fields["vocab_size"] = min(fields["vocab_size"], vocab_size(folder))
        return Tokenizer(**fields, folder=str(folder))
    except (AttributeError, TypeError, LookupError, OverflowError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: a tokenizer file has invalid values: {one_line(error)}") from None


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, folder: str) -> None:
    """ValueError unless both read every id as the same string. Models may still have padded vocabularies."""
    for id, pieces in enumerate(itertools.zip_longest(tokenizer.pieces(), other.pieces())):
        if pieces[0] != pieces[1]:
            first, second = ("no token" if p is None else repr(p.decode(errors="replace")) for p in pieces)
            raise ValueError(f"{folder}: its tokenizer differs from the first's: token {id} is {second}, there {first}")


def load_template(folder: Path, settings: dict, names: dict[str, str]) -> ChatTemplate | None:
    """The template in chat_template.jinja, the settings' chat_template or chat_template.json, with the one for tools
    called "tool_use". `names`: key -> name of special tokens that the settings leave out."""
    file = folder / "chat_template.jinja"
    tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
    names = names | {key: settings[key] for key in NAMED_TOKENS if settings.get(key) is not None}
    extra = settings.get("extra_special_tokens")  # a model's own, by key, or a list of names without keys
    own = {**settings, **(extra if isinstance(extra, dict) else {})}
    names |= {key: name for key, name in own.items() if key.endswith("_token") and isinstance(name, str)}
    try:
        if file_exists(file):
            sources = {"default": plain_file(file, 4 * MAX_TEMPLATE_CHARS).read_text(encoding="utf-8")}
            if file_exists(tool_file):
                sources["tool_use"] = plain_file(tool_file, 4 * MAX_TEMPLATE_CHARS).read_text(encoding="utf-8")
        else:
            file = folder / "tokenizer_config.json"
            sources = settings.get("chat_template")
            if sources is None:  # the older file of models with a processor, such as mistral3
                file = folder / "chat_template.json"
                sources = read_json(file).get("chat_template")
            if isinstance(sources, list):
                sources = {entry.get("name"): entry.get("template") for entry in sources if isinstance(entry, dict)}
            sources = sources if isinstance(sources, dict) else {"default": sources}
        default, with_tools = (sources.get(key) for key in ("default", "tool_use"))
        if not isinstance(default, str):
            return None
        for source in (default, with_tools):
            if isinstance(source, str) and len(source) > MAX_TEMPLATE_CHARS:
                raise ValueError(f"a chat template of {len(source):,} characters is longer than {MAX_TEMPLATE_CHARS:,}")
        return ChatTemplate(default, names, with_tools if isinstance(with_tools, str) else None)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def eos_ids(folder: Path) -> set[int]:
    """The ids in eos_token_id of config.json and generation_config.json, a number or a list in each. A config.json that
    wraps a text model may hold them in its text_config."""
    ids = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        fields = read_json(file)
        text = fields.get("text_config") if isinstance(fields.get("text_config"), dict) else {}
        value = fields.get("eos_token_id", text.get("eos_token_id"))
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < MAX_ID for id in values):
            raise ValueError(f"{file}: eos_token_id = {value!r:.99} must be a token's id or a list of them")
        ids.update(values)
    return ids


def copy_files(folder: Path, other: Path) -> None:
    """Copy the FILES of a folder, or write those of a GGUF file, without their modes, which may be read-only."""
    if is_gguf(folder):
        from loading.gguf_metadata import write_files

        write_files(folder, other)
    for file in sorted({file for pattern in FILES for file in folder.glob(pattern) if file.is_file()}):
        copy = other / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
