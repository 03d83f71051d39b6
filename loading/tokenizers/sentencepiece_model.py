"""tokenizer.model of sentencepiece. What differs between programs is where a space is put in front
of a text."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models

from loading.tokenizers.base import APART, Runtime, byte_of, end_ids, library_errors
from loading.tokenizers.settings import LLAMA_CLASSES, TokenizerSettings

TEXT = ""  # what the splitter calls a part of a text between names
# A noncharacter in front of a text, whose ids are dropped, keeps sentencepiece from putting a space
# there.
MARK = "\ufffe"


class SentencePieceRuntime(Runtime):
    """UserError for a file that is no sentencepiece model.

    sentencepiece knows no added tokens: the tokenizers library splits a text at their names, with
    the spaces that their flags give to them, and sentencepiece encodes the parts between.
    """

    def __init__(self, file: Path, settings: TokenizerSettings):
        import sentencepiece

        with library_errors(file, "not a sentencepiece model"):
            model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        self._model = model
        self._pieces = {id: model.id_to_piece(id) for id in range(model.get_piece_size())}
        specials = {
            piece: id
            for id, piece in self._pieces.items()
            if model.is_control(id) or model.is_unknown(id)
        }
        self._pieces |= {id: token.content for id, token in settings.added.items()}
        ids = {piece: id for id, piece in self._pieces.items()}
        names = settings.name_by_key.values()
        specials |= settings.added_ids(special=True)
        specials |= {name: ids[name] for name in names if name in ids}
        literals = settings.added_ids(special=False)
        # -1 where the file has none
        bos_id = ids.get(settings.name_by_key.get("bos_token"), model.bos_id())
        eos_id = ids.get(settings.name_by_key.get("eos_token"), model.eos_id())
        super().__init__(
            max(self._pieces) + 1,
            specials,
            literals,
            bos_id,
            eos_id,
            literals_are_raw=settings.get("added_tokens_are_text"),
        )
        self.stop_ids |= end_ids(ids)
        self.add_bos = settings.adds_bos()
        self._added_ids = specials | literals
        self._splitter = make_splitter(specials, literals, settings)
        self._mark_length = len(model.encode(MARK))
        self._set_spaces(settings)

    def _set_spaces(self, settings: TokenizerSettings) -> None:
        """Where a space is put.

        program              at a text's start       after a token     before another space
        llama.cpp            by add_dummy_prefix     as at the start   yes
        transformers' Llama  by its prepend_scheme   by its scheme     no
        sentencepiece        by add_dummy_prefix     no                yes
        """
        pieces = self._model.encode("a", out_type=str)
        has_dummy_prefix = pieces[0].startswith("▁")  # Yi has none
        scheme = settings.prepend_scheme()
        is_gguf = bool(settings.get("added_tokens_are_text"))
        is_llama = settings.get("tokenizer_class") in LLAMA_CLASSES or "legacy" in settings.values
        is_llama = is_llama and not is_gguf  # as transformers reads it
        if is_llama:
            self._space_at_start = scheme != "never"
            self._space_after_token = scheme == "always"
        else:
            self._space_at_start = has_dummy_prefix and (is_gguf or scheme != "never")
            self._space_after_token = self._space_at_start and is_gguf
        self._space_before_space = not is_llama
        self.strip_first_space = self._space_at_start

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        with self._lock:
            self._splitter.encode_special_tokens = not parse_special
            encoding = self._splitter.encode(text, add_special_tokens=False)
        puts_space = self._space_at_start
        ids = []
        for split_id, (start, end) in zip(encoding.ids, encoding.offsets):
            name = self._splitter.id_to_token(split_id)
            if name == TEXT:
                ids += self._encode_part(text[start:end], puts_space)
            elif name == APART:
                puts_space = False
            else:
                puts_space = self._space_after_token
                ids.append(self._added_ids[name])
        return ids

    def _encode_part(self, text: str, puts_space: bool) -> list[int]:
        if puts_space and (self._space_before_space or not text.startswith((" ", "▁"))):
            text = " " + text
        # Without byte fallback, unknown neighbours are one token: MARK's last one holds the text's
        # first too, if that is unknown, and is not dropped.
        is_fused = self._model.unk_id() in self._model.encode(text[:1])
        return self._model.encode(MARK + text)[self._mark_length - is_fused :]

    def token_bytes(self, id: int) -> bytes:
        piece = self._pieces.get(id, "")
        return byte_of(piece) or piece.replace("▁", " ").encode()


def make_splitter(
    specials: dict[str, int], literals: dict[str, int], settings: TokenizerSettings
) -> Tokenizer:
    """A Tokenizer that has these names alone; all else is TEXT."""
    tokens = [*settings.token_by_key.values(), *settings.added.values()]
    flags = {token.content: token for token in tokens}
    splitter = Tokenizer(models.WordLevel({TEXT: 0}, unk_token=TEXT))
    for name in [*specials, *literals, APART]:
        token = flags.get(name, AddedToken(name, normalized=False))
        token.special = name not in literals
        splitter.add_tokens([token])
    return splitter
