"""Text <-> token ids, whatever the folder holds, behind one small class.

    load_tokenizer      the tokenizer of a folder
    Tokenizer           encode, decode, stream, chat, stop_ids
    StreamDecoder       ids in, whole characters out
    StopStrings         text in, text out up to the first stop string
    FILES, copy_files   what a folder holds for all this, and has to come along when its weights are made anew

Special tokens are invisible in decoded text. Text that spells one encodes as its characters, in a prompt and in a
message; so does a message that spells a marker of the chat template which the folder does not call special. Other added
tokens are found in any text, and so are the pieces that a sentencepiece model calls user-defined. This file needs no
config.json; where there is one, ids beyond its vocabulary are refused by name. It does not know models or sampling.
"""

import codecs
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loading.chat_templates import ChatTemplate, one_line
from loading.gguf import is_gguf
from loading.gguf_metadata import write_files
from loading.vocabularies import APART, LARGEST_ID, file_exists, plain_file, read_json, token_fields

FILES = (
    "tokenizer*", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja",
    "additional_chat_templates/*.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")  # tokens that settings name
SPACES = re.compile(r"\s*")
LONGEST_TEMPLATE = 2**18  # characters; real ones stay far below


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
        """The text that certainly stands before the stop string that begins first. `stopped`: that one is complete."""
        if self.stopped:
            return ""
        self.held += text
        length, match = len(self.held), self._match()
        partials = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        cut = min(length - max(partials, default=0), length if match is None else match)
        self.stopped = cut == match
        text, self.held = self.held[:cut], "" if self.stopped else self.held[cut:]
        return text

    def flush(self) -> str:
        """The text that was held back when no more comes, up to a stop string in it, which sets `stopped`."""
        match = self._match()
        self.stopped |= match is not None
        text, self.held = self.held[:match], ""
        return text

    def _match(self) -> int | None:
        """Where the first stop string begins in the text held back."""
        return min((self.held.find(stop) for stop in self.stops if stop in self.held), default=None)


@dataclass(eq=False)
class Tokenizer:
    """One folder's tokenizer."""

    to_ids: Callable[[str], list[int]]  # of text in which nothing is special
    to_bytes: Callable[[int], bytes]  # of one id; none for a special token
    vocab_size: int  # one more than the largest id that the model has too
    bos_id: int | None = None
    add_bos: bool = False  # the folder's own policy
    leading_ids: tuple[int, ...] = ()  # where that policy puts others in front than bos_id alone
    stop_ids: frozenset[int] = frozenset()  # generation ends after these
    strip_first_space: bool = False  # the library puts a space before every text
    specials: dict[str, int] = field(default_factory=dict)  # found only in what a chat template writes
    literals: dict[str, int] = field(default_factory=dict)  # found in any text
    spacing: dict[str, tuple[bool, bool, bool]] = field(default_factory=dict)  # lstrip, rstrip, single_word of a name
    apart: str = APART  # a name with this inside is text, and this is nothing, in what a chat template writes
    to_ids_after_special: Callable[[str], list[int]] | None = None  # where text behind a special token differs
    to_ids_with_specials: Callable[[str], list[int]] | None = None  # where the library finds special tokens itself
    template: ChatTemplate | None = None

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Ids of text. BOS leads them when `bos` is true, or when it is None and the folder's policy says so."""
        with_bos = self.add_bos if bos is None else bos
        before = [*self.leading_ids] or [self.bos_id] if with_bos and self.bos_id is not None else []
        names = {} if self.to_ids_with_specials else self.literals
        return self._known(before + self._find(valid(text), names))

    def parse(self, text: str) -> list[int]:
        """Ids of text in which special tokens' names are those tokens, such as a rendered template. Without BOS."""
        if self.to_ids_with_specials is not None:
            return self._known(self.to_ids_with_specials(valid(text)))
        return self._known(self._find(valid(text), {**self.specials, **self.literals, self.apart: None}))

    def stream(self, continues: bool = False) -> StreamDecoder:
        """A fresh decoder. `continues`: the ids follow others, so that a leading space is a real one."""
        return StreamDecoder(self.to_bytes, self.strip_first_space and not continues)

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join(stream.feed(id) for id in ids) + stream.flush()

    def pieces(self) -> list[bytes]:
        """What every id stands for, special tokens by name: two tokenizers with equal pieces read each other's ids."""
        names = {id: name.encode() for name, id in self.specials.items()}
        return [names.get(id) or self.to_bytes(id) for id in range(self.vocab_size)]

    def chat(
        self, messages: list[dict], add_generation_prompt: bool = True, tools: list | None = None, prefill: str = "",
        **names,
    ) -> list[int]:  # fmt: skip
        """Ids of a conversation ({"role", "content"} objects) in the folder's own format, ready for the answer, or
        for the rest of an answer that begins with `prefill`. `tools` (JSON schemas) and `names` are for the template,
        which decides what it makes of them. Content may be a list of {"type": "text", "text"} parts, as OpenAI has it.

        Special tokens that the template writes become ids. Those that a message spells stay text. BOS comes from the
        template, once. ValueError where there is no template or the template refuses.
        """
        if self.template is None:
            raise ValueError("this folder has no chat template (tokenizer_config.json or chat_template.jinja)")
        source = self.template.source_for(tools)
        # Not in the model's own turns: it writes <think> itself, and templates look for that in its answers.
        markers = [name for name in self.literals if name in source and not name.isspace()]
        both, parted = [*self.specials, *markers], []
        for message in messages:
            texts = {**message, "content": joined(message.get("content"))} if "content" in message else message
            parted.append(self._part(texts, self.specials if message.get("role") == "assistant" else both, source))
        names = {key: self._part(value, both, source) for key, value in names.items()}
        text = self.template.render(parted, add_generation_prompt, self._part(tools, both, source), **names)
        return self.parse(text + self._part(prefill, self.specials))

    def _part(self, value: object, names: Iterable[str], source: str = "") -> object:
        """A JSON value with these names parted behind their first characters in all its texts and keys, but for keys
        and roles that are words of the template `source`, which looks for them."""
        if isinstance(value, dict):
            parts = {key: self._part(part, names, source) for key, part in value.items()}
            if is_word(value.get("role"), source):
                parts["role"] = value["role"]
            return {key if is_word(key, source) else self._part(key, names): part for key, part in parts.items()}
        if isinstance(value, list):
            return [self._part(part, names, source) for part in value]
        if not isinstance(value, str):
            return value
        text = valid(value).replace(APART, APART[0] + self.apart + APART[1])
        for name in names:
            while len(name) > 1 and name in text:
                text = text.replace(name, name[0] + self.apart + name[1:])
        return text

    def _known(self, ids: list[int]) -> list[int]:
        """The same ids. ValueError names a token that the model does not have."""
        if max(ids, default=0) >= self.vocab_size:
            id = next(id for id in ids if id >= self.vocab_size)
            names = {id: name for name, id in {**self.specials, **self.literals}.items()}
            name = names.get(id) or self.to_bytes(id).decode(errors="replace")
            where = f"outside the model's vocabulary of {self.vocab_size}"
            raise ValueError(f"the text holds the token {name!r}, whose id {id} lies {where}")
        return ids

    def _find(self, text: str, names: Mapping[str, int | None]) -> list[int]:
        """Ids of text in which names stand for an id. None: the name only parts what is before it from what follows."""
        ids, to_ids, end = [], self.to_ids, 0
        present = sorted((name for name in names if name in text), key=len, reverse=True)
        pattern = "|".join(map(re.escape, present)) or "(?!)"  # the longest first; matches nothing without names
        for match in re.finditer(pattern, text):
            lstrip, rstrip, single_word = self.spacing.get(match[0], (False, False, False))
            start, stop = match.span()
            in_word = single_word and re.search(r"\w", text[max(start - 1, 0) : start] + text[stop : stop + 1])
            if start < end or in_word:
                continue
            part = text[end:start].rstrip() if lstrip else text[end:start]
            ids += to_ids(part) if part else []
            ids += [names[match[0]]] if names[match[0]] is not None else []
            end = SPACES.match(text, stop).end() if rstrip else stop
            to_ids = self.to_ids_after_special or self.to_ids
        return ids + (to_ids(text[end:]) if text[end:] else [])


def is_word(value: object, source: str) -> bool:
    return isinstance(value, str) and value.isidentifier() and value in source


class ContentError(ValueError):
    """A part of a message that is no text."""


def joined(content: object) -> object:
    """A message's content as templates take it. ContentError for a part that is no text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ContentError(f'content holds {part!r:.99}; {{"type": "text", "text": …}} can be read')
    return "".join(part["text"] for part in content)


def valid(text: str) -> str:
    """Lone surrogates cannot be encoded: a question mark stands for each."""
    return text.encode("utf-8", errors="replace").decode()


def load_tokenizer(checkpoint_dir: str | Path) -> Tokenizer:
    """The tokenizer of a folder or GGUF file. ValueError, naming the file, when there is none or it cannot be read."""
    folder = Path(checkpoint_dir)
    if is_gguf(folder):
        with tempfile.TemporaryDirectory(prefix="quickdraft-") as made:
            write_files(folder, Path(made))
            try:
                return load_tokenizer(made)
            except ValueError as error:
                raise ValueError(str(error).replace(made, str(folder))) from None
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder or GGUF file")
    try:
        settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        for key in NAMED:
            if isinstance(settings.get(key), dict):  # an object with the name as its content
                settings[key] = settings[key].get("content")
        fields = token_fields(folder, settings)
        fields["template"] = find_template(folder, settings, fields.pop("names", {}))
        fields["stop_ids"] = frozenset(fields["stop_ids"] | eos_ids(folder))
        rows = read_json(folder / "config.json").get("vocab_size")
        fields["vocab_size"] = min(fields["vocab_size"], rows if isinstance(rows, int) else LARGEST_ID)
        return Tokenizer(**fields)
    except (AttributeError, TypeError, LookupError, OverflowError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: a tokenizer file holds what it cannot mean: {one_line(error)}") from None


def find_template(folder: Path, settings: dict, names: dict[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, or the settings' chat_template, with the one of name "tool_use" beside it. names: of special
    tokens that the settings do not name."""
    file, tool_file = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    names = names | {key: settings[key] for key in NAMED if settings.get(key) is not None}
    try:
        if file_exists(file):
            sources = {"default": plain_file(file, 4 * LONGEST_TEMPLATE).read_text(encoding="utf-8")}
            if file_exists(tool_file):
                sources["tool_use"] = plain_file(tool_file, 4 * LONGEST_TEMPLATE).read_text(encoding="utf-8")
        else:
            file, sources = folder / "tokenizer_config.json", settings.get("chat_template")
            if isinstance(sources, list):
                sources = {part.get("name"): part.get("template") for part in sources if isinstance(part, dict)}
            sources = sources if isinstance(sources, dict) else {"default": sources}
        default, with_tools = (sources.get(key) for key in ("default", "tool_use"))
        if not isinstance(default, str):
            return None
        for source in (default, with_tools):
            if isinstance(source, str) and len(source) > LONGEST_TEMPLATE:
                raise ValueError(f"a chat template of {len(source):,} characters is longer than {LONGEST_TEMPLATE:,}")
        return ChatTemplate(default, names, with_tools if isinstance(with_tools, str) else None)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def eos_ids(folder: Path) -> set[int]:
    """eos_token_id of config.json and generation_config.json, each a number or a list."""
    ids = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(file).get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < LARGEST_ID for id in found):
            raise ValueError(f"{file}: eos_token_id = {value!r:.99} must be a token's id or a list of them")
        ids.update(found)
    return ids


def copy_files(folder: Path, other: Path) -> None:
    """The FILES of one folder into another, without their modes: they may be read-only. A GGUF file's are made."""
    if is_gguf(folder):
        write_files(folder, other)
    for file in sorted({file for pattern in FILES for file in folder.glob(pattern) if file.is_file()}):
        copy = other / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
