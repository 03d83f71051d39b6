"""tokenizer.json of the tokenizers library, which matches special and added tokens itself.

TokenizersRuntime   the library's Tokenizer with the tokens of the settings
rebuild_llama       puts the parts of transformers' Llama tokenizer in place of the file's
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from loading.plain_files import refused
from loading.tokenizers.base import APART, Runtime, byte_of, library_errors
from loading.tokenizers.settings import TokenizerSettings

# GPT-2's printable characters for bytes: a printable byte's own, and those from 256 on, in order,
# for the others.
BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())
PRINTABLE_FIRST = sorted(range(256), key=lambda byte: chr(byte) not in BYTE_CHARS)
BYTE_OF_CHAR = dict(zip(BYTE_CHARS, PRINTABLE_FIRST))


class TokenizersRuntime(Runtime):
    """UserError for a file that the library cannot read, and for settings that contradict it."""

    def __init__(self, file: Path, settings: TokenizerSettings):
        self._file = file
        with library_errors(file, "not a tokenizer of the tokenizers library"):
            model = Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
        if settings.rebuilds_llama() and getattr(model.model, "byte_fallback", False):
            rebuild_llama(model, settings.prepend_scheme())
        model.no_padding()
        model.no_truncation()
        specials = special_ids(model)
        add_configured_tokens(model, file, settings)
        # The library skips a token that either file calls special.
        specials |= special_ids(model)
        added = model.get_added_tokens_decoder()
        literals = {
            token.content: id for id, token in added.items() if token.content not in specials
        }
        vocab = model.get_vocab()
        vocab_size = 1 + max(vocab.values())
        bos_id = vocab.get(settings.name_by_key.get("bos_token"))
        eos_id = vocab.get(settings.name_by_key.get("eos_token"))
        super().__init__(
            vocab_size,
            specials,
            literals,
            bos_id,
            eos_id,
            literals_are_raw=settings.get("added_tokens_are_text"),
        )
        decoder = str(model.decoder)
        self._has_byte_level = "ByteLevel" in decoder
        self._has_byte_fallback = "ByteFallback" in decoder or not model.decoder
        # A special token of our own, matched after the normalizer, which therefore puts no space
        # after it.
        model.add_special_tokens([AddedToken(APART, normalized=True)])
        self._apart_id = model.token_to_id(APART)
        if model.normalizer:
            self.apart = model.normalizer.normalize_str(APART)
        self._model = model
        self._decoder = model.decoder or decoders.Replace("▁", " ")
        self.strip_first_space = self._decoder.decode(["▁a"]) == "a"
        self._set_leading_ids(settings.get("add_bos_token"))

    def _set_leading_ids(self, add_bos: bool | None) -> None:
        """The post-processor has the BOS policy, which the settings' add_bos_token overrides. Its
        tokens belong to no sequence; those before the text lead every text."""
        probe = self._model.encode("a")
        num_leading = probe.sequence_ids.index(0)
        ids = probe.ids[:num_leading]
        if ids and self.bos_id is None:
            self.bos_id = ids[0]
            self.leading_ids = ids[:1]
        if add_bos is None:
            self.leading_ids = ids or self.leading_ids
        self.add_bos = bool(ids if add_bos is None else add_bos)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        with self._lock, library_errors(self._file, "this tokenizer cannot encode the text"):
            self._model.encode_special_tokens = not parse_special
            ids = self._model.encode(text, add_special_tokens=False).ids
        return [id for id in ids if id != self._apart_id]

    def token_bytes(self, id: int) -> bytes:
        """As in the library, added tokens are decoded like all others."""
        token = self._model.id_to_token(id) or ""
        if self._has_byte_level and BYTE_OF_CHAR.keys() >= set(token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if self._has_byte_fallback and byte_of(token):
            return byte_of(token)
        # Of a text's first token a decoder may strip a space.
        text = self._decoder.decode(["a", token])
        return text.removeprefix("a").encode()


def special_ids(model: Tokenizer) -> dict[str, int]:
    tokens = model.get_added_tokens_decoder().items()
    return {token.content: id for id, token in tokens if token.special}


def tokens_by_name(model: Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in model.get_added_tokens_decoder().values()}


def rebuild_llama(model: Tokenizer, prepend_scheme: str) -> None:
    """Give a Tokenizer the parts of transformers' LlamaTokenizer, which takes the vocabulary and
    the post-processor alone from the file (models/llama/tokenization_llama.py)."""
    model.normalizer = None
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend_scheme != "never":
        steps.append(decoders.Strip(" ", left=1))
    model.decoder = decoders.Sequence(steps)


def add_configured_tokens(model: Tokenizer, file: Path, settings: TokenizerSettings) -> None:
    """Add the tokens of the settings. UserError for an id that the library does not give.

    As in transformers (TokenizersBackend), a token that the file has too gets its flags from
    added_tokens_decoder, but not from added_tokens.json. Tokens of keys such as eos_token are
    special; those that neither file adds have the flags of their own objects.
    """
    tokens = dict(sorted(settings.added.items()))
    if settings.get("added_tokens_decoder") is None:  # the older file adds only what is missing
        stored = tokens_by_name(model)
        tokens = {id: token for id, token in tokens.items() if token.content not in stored}
    model.add_tokens([*tokens.values()])
    for id, token in tokens.items():
        new_id = model.token_to_id(token.content)
        if new_id != id:
            raise refused(
                f"{file}: token {id}",
                token.content,
                f"gets the id {new_id}; correct added_tokens_decoder in tokenizer_config.json, or"
                " added_tokens.json",
            )
    stored = tokens_by_name(model)
    tokens = [token for token in settings.listed if token.content not in stored]
    for configured in settings.token_by_key.values():
        token = stored.get(configured.content, configured)
        token.special = True
        tokens.append(token)
    vocab = model.get_vocab()
    model.add_tokens([token for token in tokens if token.content in vocab])
