"""The libraries behind a Tokenizer, one class a library, all with the interface of `base.Runtime`.

base.py                 Runtime: encode, the bytes of an id, special and added tokens
settings.py             tokenizer_config.json and the files beside it: added and special tokens, the
                        model's vocabulary
sentencepiece_model.py  tokenizer.model of sentencepiece
ranks.py                tiktoken's ranks: Llama 3's tokenizer.model and Mistral's tekken.json
tokenizer_json.py       tokenizer.json of the tokenizers library
numbers.py              no file: bytes in, numbers out, for random weights
"""
