"""Text <-> token ids for every kind of tokenizer file, behind one class.

    load_tokenizer      the tokenizer of a folder or GGUF file
    Tokenizer           encode, decode, stream, chat, stop_ids
    StreamDecoder       ids in, complete characters out
    FILES, copy_files   a folder's tokenizer files, which go along when its weights are written anew

Special tokens are invisible in decoded text. Text that spells one, in a prompt without
`parse_special` or in a message, encodes as characters; so does a message that spells a marker of
the chat template. Other added tokens, and the user-defined pieces of a sentencepiece model, match
in any text. No config.json is needed; ids beyond its vocabulary are refused by name.
"""

import codecs
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from decoding.errors import UserError
from loading.chat_messages import are_calls, first_text, join_parts, message_forms
from loading.chat_templates import ChatTemplate, load_chat_template, read_chat_template
from loading.plain_files import error_prefix, file_exists, is_gguf, plain_file, short_repr
from loading.tokenizers.base import APART, Runtime, library_errors, replace_surrogates
from loading.tokenizers.ranks import (
    HUNYUAN_FILE,
    RanksRuntime,
    has_ranks,
    read_tekken,
    read_tiktoken,
)
from loading.tokenizers.sentencepiece_model import SentencePieceRuntime
from loading.tokenizers.settings import TokenizerSettings
from loading.tokenizers.tokenizer_json import TokenizersRuntime

FILES = (
    "tokenizer*",
    "tekken.json",
    HUNYUAN_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "generation_config.json",
)


class StreamDecoder:
    """An incremental decoder from ids to text, which holds bytes back until a character is
    complete."""

    def __init__(self, to_bytes: Callable[[int], bytes], strip_first_space: bool):
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_first_space

    def feed(self, id: int) -> str:
        """The characters that this id completes; '' while one is incomplete."""
        piece = self._to_bytes(id)
        if piece and self._strip:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The bytes held back; U+FFFD if the text ended inside a character."""
        return self._utf8.decode(b"", final=True)


@dataclass(eq=False)
class Tokenizer:
    """A folder's tokenizer."""

    runtime: Runtime
    vocab_size: int  # the smaller of the tokenizer's and the model's
    stop_ids: frozenset[int] = frozenset()  # generation ends after these
    template: ChatTemplate | None = None
    folder: str = "tokenizer"  # or GGUF file, for messages

    @property
    def bos_id(self) -> int | None:
        return self.runtime.bos_id

    @property
    def add_bos(self) -> bool:
        """Does `encode` put BOS in front by default?"""
        return self.runtime.add_bos

    @property
    def specials(self) -> dict[str, int]:
        """Name -> id of the special tokens."""
        return self.runtime.specials

    def encode(self, text: str, bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of text. `bos`: put BOS in front; None follows the folder's policy. `parse_special`:
        names of special tokens in the text are these tokens, and no second BOS is put before one
        that the text begins with."""
        with_bos = self.add_bos if bos is None else bos
        leading_ids = self.runtime.leading_ids if with_bos else []
        ids = self._check_ids(self.runtime.encode(replace_surrogates(text), parse_special))
        has_leading_ids = parse_special and ids[: len(leading_ids)] == leading_ids
        return ids if has_leading_ids else leading_ids + ids

    def parse(self, text: str) -> list[int]:
        """Ids of text in which the names of special tokens are these tokens, such as a rendered
        template. No BOS."""
        return self.encode(text, bos=False, parse_special=True)

    def stream(self, continues: bool = False, visible: Collection[str] = ()) -> StreamDecoder:
        """A new decoder. `continues`: the ids follow others, so that a leading space is kept.
        `visible`: special tokens whose names are part of the text."""
        names = {self.specials[name]: name.encode() for name in visible}

        def to_bytes(id: int) -> bytes:
            return names.get(id) or self.runtime.to_bytes(id)

        return StreamDecoder(to_bytes, self.runtime.strip_first_space and not continues)

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join(stream.feed(id) for id in ids) + stream.flush()

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """What each id spells, a special token its name. A character stands at the id that
        completes it."""
        stream = StreamDecoder(self.runtime.piece, strip_first_space=False)
        texts = [stream.feed(id) for id in ids]
        if texts:
            texts[-1] += stream.flush()
        return texts

    def pieces(self) -> list[bytes]:
        """The bytes of every id, or a special token's name. Tokenizers with equal pieces read each
        other's ids."""
        return [self.runtime.piece(id) for id in range(self.vocab_size)]

    def chat(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list | None = None,
        prefill: str = "",
        **names,
    ) -> list[int]:
        """Ids of a conversation ({"role", "content"} objects) in the folder's format, up to the
        next answer.

        `prefill` is the beginning of that answer. `tools` (JSON schemas) and `names` are variables
        of the template. Content may be a list of {"type": "text", "text"} parts, as in OpenAI's
        API, which are joined unless the template loops over them. A tool call's arguments may be an
        object or JSON in a string. Special tokens that the template writes, BOS among them, become
        ids; those that a message spells stay text. UserError without a template, if the template
        refuses, and if it does not read a message, the tools or a variable.
        """
        if self.template is None:
            raise UserError(
                f"{self.folder}: no chat template (chat_template.jinja or tokenizer_config.json)"
            )
        template = self.template.select(tools)
        template.check_request(tools, names)
        # The markers are not escaped in the assistant's messages, in which templates look for its
        # <think>.
        literals = self.runtime.literals
        markers = [name for name in literals if name in template.source and not name.isspace()]
        variables = self._escape({**names, "tools": tools}, [*self.specials, *markers])

        def escape(message: dict) -> dict:
            is_assistant = message.get("role") == "assistant"
            return self._escape(message, [*self.specials, *([] if is_assistant else markers)])

        def render(form: list[dict]) -> str:
            escaped = [escape(message) for message in form]
            return template.render(escaped, add_generation_prompt, **variables)

        forms = message_forms(messages, template.developer, template.content_form)
        text = first_text(render, forms)
        return self.parse(text + self._escape(prefill, self.specials))

    def _escape(self, value: object, names: Iterable[str]) -> object:
        """A JSON value in which these names are broken up in every string, by inserting the
        separator `runtime.apart` after their first character: they then encode as plain text. Keys
        and roles that are identifiers stay as they are, because templates compare them. UserError
        for another value."""
        match value:
            case list():
                return [self._escape(item, names) for item in value]
            case dict():
                escaped = {}
                for key, item in value.items():
                    is_word = key == "role" and str(item).isidentifier()
                    new_key = key if str(key).isidentifier() else self._escape(key, names)
                    escaped[new_key] = item if is_word else self._escape(item, names)
                return escaped
            case tuple():
                # It may be a key, which no list can be.
                return tuple(self._escape([*value], names))
            case str():
                return self._escape_text(value, names)
            case None | bool() | int() | float():
                return value
        # A template could print it, whatever it spells.
        raise UserError(
            f"{short_repr(value)} is no JSON value; messages and a template's variables hold these"
        )

    def _escape_text(self, text: str, names: Iterable[str]) -> str:
        present = [name for name in [*names, APART] if len(name) > 1 and name in text]
        if not present:
            return text
        starts = "|".join(map(re.escape, present))
        return re.sub(f"(?s)(?={starts}).", lambda first: first[0] + self.runtime.apart, text)

    def _check_ids(self, ids: list[int]) -> list[int]:
        """The same ids. UserError names a token outside the model's vocabulary."""
        id = max(ids, default=0)
        if id < self.vocab_size:
            return ids
        name = self.runtime.piece(id).decode(errors="replace")
        raise UserError(
            f"{self.folder}: the text holds the token {name!r}, whose id {id} lies outside the"
            f" model's vocabulary of {self.vocab_size}"
        )


def load_tokenizer(
    checkpoint_dir: str | os.PathLike,
    chat_template: str | Path | None = None,
    known: Mapping[str, dict] = MappingProxyType({}),
) -> Tokenizer:
    """The tokenizer of a folder or GGUF file. The file `chat_template` replaces its own template.
    `known`: files of the folder that have been read already, by their names.
    UserError names the file that is missing or cannot be read."""
    path = Path(checkpoint_dir)
    if not is_gguf(path):
        return load_folder(path, chat_template, known)
    from loading.gguf_vocabulary import write_files

    with tempfile.TemporaryDirectory(prefix="quickdraft-") as folder:
        write_files(path, Path(folder))
        with error_prefix(path):
            tokenizer = load_folder(Path(folder), chat_template, {})
    tokenizer.folder = str(path)
    return tokenizer


def load_folder(
    folder: Path, chat_template: str | Path | None, known: Mapping[str, dict]
) -> Tokenizer:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder or GGUF file")
    settings = TokenizerSettings(folder, known)
    with library_errors(folder, "a tokenizer file has invalid values"):
        runtime = open_runtime(folder, settings)
    variables = runtime.variables | settings.name_by_key
    if chat_template is None:
        template = load_chat_template(folder, settings.values, variables)
    else:
        template = read_chat_template(Path(chat_template), variables)
    return Tokenizer(
        runtime,
        vocab_size=min(runtime.vocab_size, settings.model_vocab_size),
        stop_ids=frozenset(runtime.stop_ids | settings.eos_ids()),
        template=template,
        folder=str(folder),
    )


def open_runtime(folder: Path, settings: TokenizerSettings) -> Runtime:
    """The vocabulary in tokenizer.json, tokenizer.model (sentencepiece or tiktoken, by content),
    tekken.json or hy.tiktoken. As in transformers, the first of these that a folder has is read."""
    fast = folder / "tokenizer.json"
    model = folder / "tokenizer.model"
    tekken = folder / "tekken.json"
    hunyuan = folder / HUNYUAN_FILE
    if file_exists(fast):
        return TokenizersRuntime(plain_file(fast), settings)
    if file_exists(model):
        plain_file(model)
        if has_ranks(model):
            return RanksRuntime(model, read_tiktoken(model, settings), settings)
        return SentencePieceRuntime(model, settings)
    if file_exists(tekken):
        return RanksRuntime(tekken, read_tekken(tekken), settings)
    if file_exists(hunyuan):
        return RanksRuntime(plain_file(hunyuan), read_tiktoken(hunyuan, settings), settings)
    raise UserError(f"{folder}: neither tokenizer.model nor tokenizer.json, nor tekken.json")


def copy_files(folder: Path, target: Path) -> None:
    """Copy the FILES of a folder, or write those of a GGUF file, without their modes, which may be
    read-only. UserError if the folder is gone, in which glob finds nothing."""
    if is_gguf(folder):
        from loading.gguf_vocabulary import write_files

        return write_files(folder, target)
    for file in sorted(
        {file for pattern in FILES for file in folder.glob(pattern) if file.is_file()}
    ):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")


def is_message(message) -> bool:
    """Is it a dict with a role that says or calls something?"""
    match message:
        case {"role": _, "tool_calls": calls} if calls:
            return are_calls(calls)
        case {"role": _, "content": content}:
            return content is not None
    return False


def conversation_ids(
    tokenizer: Tokenizer,
    messages: list[dict],
    tools: list | None = None,
    prefill: str = "",
    **names,
) -> list[int]:
    """Ids of the messages in the model's chat format, or without one as texts, a line each, the
    prefill last. UserError for messages that say nothing, for what the template does not read, and
    without one for variables, tools and calls of them."""
    for number, message in enumerate(messages):
        if not is_message(message):
            raise UserError(
                f"message {number} must be a dict with a role and a content, or with tool_calls as"
                " a list of dicts"
            )
    if tokenizer.template is not None:
        return tokenizer.chat(messages, tools=tools, prefill=prefill, **names)
    has_calls = any(message.get("tool_calls") for message in messages)
    unsupported = ["tools"] * bool(tools) + ["tool_calls"] * has_calls + [*names]
    if unsupported:
        raise UserError(
            f"this model has no chat template for {', '.join(unsupported)}; give one as"
            " --chat_template FILE"
        )
    texts = [join_parts(message["content"]) for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise UserError("the content of a message must be a text, or a list of text parts")
    if prefill:
        texts.append(prefill)
    return tokenizer.encode("\n".join(texts))
