"""NumberRuntime, for random weights, which bring no tokenizer."""

from loading.tokenizers.base import Runtime


class NumberRuntime(Runtime):
    """Encodes text as its bytes and decodes ids as numbers."""

    add_bos = False
    strip_first_space = True

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size, specials={}, literals={}, bos_id=None, eos_id=None)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def token_bytes(self, id: int) -> bytes:
        return f" {id}".encode()
